"""Test at run time that a fast computation equals the module's own forward on a small probe.

This is in `models` because the local engine, which tests its slot cache, is below `compute`, which tests packed rows.
"""

from collections.abc import Callable

from torch import Tensor

MISFITS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Exceptions that a model raises if it does not support the fast computation."""

HALF_SHARE = 0.25
"""Largest mean difference of log-probs in half precision, as a share of the mean difference that other prompts make."""


def disproof(
    fast: Callable[[], Tensor], slow: Callable[[], Tensor], tolerance: float, scaled: bool = False
) -> str | None:
    """Why `fast` may not replace `slow`, in a line, or None where both agree.

    scaled: `tolerance` is a share of the largest number that `slow` gives, if that is above 1.
    """
    found = attempt(fast)
    return found if isinstance(found, str) else difference(found, slow(), tolerance, scaled)


def attempt(fast: Callable[[], Tensor]) -> Tensor | str:
    """The result of `fast`, or a line about the exception by which the model refuses it."""
    try:
        return fast()
    except MISFITS as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def difference(found: Tensor, wanted: Tensor, tolerance: float, scaled: bool = False) -> str | None:
    """Compare the largest difference with `tolerance`, as `disproof` does; NaN is beyond any."""
    off = float((found - wanted).abs().max())
    scale = max(1.0, float(wanted.abs().max())) if scaled else 1.0
    return None if off <= tolerance * scale else f"it differs by {off:.2g} from the module's own forward"


def differs_like_others(found: Tensor, wanted: Tensor, other: Tensor) -> str | None:
    """Why log-probs in half precision are not those wanted, in a line; None: they differ by rounding.

    How much rounding there is depends on the model: 0.02 to 0.1 nats in the mean for tokens that it finds unlikely, 0.3
    at one of them. So the measure is the model's own: `other`, its log-probs of the same tokens after other prompts,
    which is what attention to the wrong tokens amounts to. Right ones differ by far less, a wrong mask by as much.
    """
    off, unrelated = (found - wanted).abs(), (other - wanted).abs()
    if off.mean() <= HALF_SHARE * unrelated.mean() and off.max() <= 2 * HALF_SHARE * unrelated.max():
        return None
    return (
        f"it differs by {float(off.mean()):.2g} in the mean and {float(off.max()):.2g} at most from the module's own "
        f"forward, where other prompts make {float(unrelated.mean()):.2g} and {float(unrelated.max()):.2g}"
    )
