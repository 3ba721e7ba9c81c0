"""Chooses the backend. Never one without isolation."""

from collections.abc import Sequence

from agentrl.errors import UserError, nearest
from agentrl_tools.sandbox.base import Limits, Sandbox
from agentrl_tools.sandbox.bwrap import BwrapSandbox
from agentrl_tools.sandbox.e2b import E2bSandbox, usable

BACKENDS = ("auto", "bwrap", "e2b")


def make_sandbox(
    backend: str = "auto", *, limits: Limits | None = None, pool: int = 4, packages: Sequence[str] = ()
) -> Sandbox:
    """A sandbox for code that a model wrote.

    backend: `bwrap` (bubblewrap on this machine), `e2b` (the service, its key in the environment), or `auto`, the first
    of them that works here. limits: None means the defaults; `e2b` enforces its own, but for time and output. pool: how
    many interpreters `bwrap` starts ahead. packages: folders of importable packages that `bwrap` shows, read-only.

    Raises UserError (one line, what to install) when the backend, or any for `auto`, cannot be used here.
    """
    if backend not in BACKENDS:
        raise UserError(f"sandbox backend {backend!r}{nearest(backend, BACKENDS)}")
    limits = limits or Limits()
    if backend == "e2b":
        return E2bSandbox(limits)
    try:
        return BwrapSandbox(limits, pool=pool, packages=packages)
    except UserError:
        if backend == "bwrap" or not usable():
            raise
    return E2bSandbox(limits)
