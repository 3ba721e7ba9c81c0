"""`agentrl view`: runs as a page in the browser."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from agentrl.cli.common import console

if TYPE_CHECKING:
    from agentrl.plugins.types import Json
    from agentrl.view.assets import Ranges, Watched


def view_command(
    runs: Annotated[
        list[str], Argument(metavar="RUN...", help="Folders of runs or evaluations, or folders that hold such.")
    ],
    follow: Annotated[
        bool, Option("--follow", help="Go to the newest step as it comes; the run may still be about to begin.")
    ] = False,
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")] = 0,
    open_page: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show runs as a page in the browser, live while they train, until Ctrl-C."""
    import asyncio

    from agentrl.view.catalog import Catalog

    catalog = Catalog([Path(run) for run in runs])
    catalog.check(wait=follow)
    from agentrl.view.server import Shown, serve

    out = console()

    def opened(address: str) -> None:
        out.print(f"{', '.join(catalog.names)}: {address}", markup=False, soft_wrap=True)
        out.print("Only this machine can open it. Ctrl-C ends it.", style="dim")
        if open_page:
            import webbrowser

            webbrowser.open(address)

    asyncio.run(serve(Shown(catalog, _ranges, _watched, _why, follow), port, opened))


def _ranges() -> "Ranges":
    from agentrl.learner.monitors import RANGES

    return RANGES


def _watched() -> "Watched":
    from agentrl.learner.monitors import WATCHED

    return WATCHED


def _why(path: Path, first: Path | None, piece: "Callable[[int], str] | None") -> "Json":
    from agentrl.eval.why import reasons

    return reasons(path, first, piece)
