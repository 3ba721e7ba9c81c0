"""No garbage is looked for while what stays is made: modules by the thousand, and then the tests. It is made in about a
quarter less time so. Whoever imports this says by `look_again` when all is there."""

import gc

gc.disable()


def look_again() -> None:
    """Let no later collection go through what is there now."""
    gc.freeze()
    gc.enable()
