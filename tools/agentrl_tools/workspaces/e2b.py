"""The provider `e2b`: a sandbox of the service E2B for each workspace, through its own SDK.

The service has the machine, its snapshots and its network. Everything inside is done by scripts that its daemon runs,
as root where they are ours. A sandbox that nobody renews ends by itself.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.errors import PathError, UserError
from agentrl.workspace.provider import Capabilities, Network, WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import Snapshot, WorkspaceError
from agentrl_tools.workspaces.e2b_workspace import E2bWorkspace, Origin, within
from agentrl_tools.workspaces.owner import LABEL_OWNER, LABEL_PROVIDER, LABEL_RUN, is_dead, owner

if TYPE_CHECKING:
    from e2b import AsyncSandbox

LABEL = "agentrl"
"""Metadata that all our sandboxes carry, since the service finds them by exact values."""
_LONG = 3.0  # times the deadline: a snapshot, a start
_PAGES = 1000  # of a list
_LINE = 300
_NEVER_FULL = (400, 409)
"""How the service refuses a snapshot without processes."""
_EVERYWHERE = "0.0.0.0/0"
_MISSING_KEY = "workspace.provider 'e2b': set E2B_API_KEY"

T = TypeVar("T")


class E2bProvider(WorkspaceProvider):
    """image: template that is opened where a recipe names none. deadline: seconds in which the service must answer an
    ordinary call. lifetime: seconds after which the service ends a sandbox that this run does not renew any more."""

    name = "e2b"
    capabilities = Capabilities(images=True, hosts=True, everything=True, users=True)

    def __init__(self, image: str = "base", *, deadline: float = 60.0, lifetime: float = 900.0) -> None:
        if not deadline > 0 or not lifetime >= 60:
            raise UserError("workspace.args: deadline is above 0 seconds, lifetime at least 60")
        try:
            import e2b
        except ImportError as error:
            raise UserError(f"workspace.provider 'e2b': {error}; pip install e2b-code-interpreter") from None
        self._sdk = e2b
        self._image, self.deadline, self._lifetime = image, deadline, lifetime
        self._run, self._name, self._count = "", secrets.token_hex(8), 0
        self._open: set[E2bWorkspace] = set()
        self._snapshots: dict[str, Origin] = {}
        self._baselines: dict[Origin, asyncio.Task[dict[str, str]]] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def start(self, run: str) -> None:
        self._run = run
        if not os.environ.get("E2B_API_KEY"):
            raise UserError(_MISSING_KEY)
        try:
            await self._sweep()
        except WorkspaceError as error:
            raise UserError(f"workspace.provider 'e2b': {error}") from None
        self._renewing = asyncio.ensure_future(self._renew())

    def check(self, spec: WorkspaceSpec) -> None:
        super().check(spec)
        if ports := [host for host in spec.network.hosts if ":" in host]:
            raise UserError(f"workspace.provider 'e2b' cannot do: network (a port of a host, {ports[0]!r})")

    async def open(self, spec: WorkspaceSpec, snapshot: Snapshot | None = None) -> E2bWorkspace:
        self.check(spec)
        if snapshot is None:
            return await self._opened(spec, Origin(spec.image or self._image))
        if snapshot.name not in self._snapshots:
            raise WorkspaceError(f"there is no snapshot {snapshot.name} any more")
        return await self._opened(spec, self._snapshots[snapshot.name])

    async def _opened(self, spec: WorkspaceSpec, origin: Origin) -> E2bWorkspace:
        self._count += 1
        name = f"{self._run or 'run'}-{self._count}"
        creating = self._sdk.AsyncSandbox.create(
            template=origin.template,
            timeout=int(self._lifetime),
            metadata={**spec.labels, **self.labels()},
            envs=dict(spec.env),
            allow_internet_access=not spec.network.none,
            network=_network(spec.network),
        )
        try:
            sandbox = await self.call("open a sandbox", creating, _LONG * self.deadline)
        except _RefusedError as error:
            if error.status == 404:
                raise UserError(f"workspace.image: the service e2b has no template {origin.template!r}") from None
            raise
        workspace = E2bWorkspace(self, sandbox, name, spec, origin)
        self._open.add(workspace)
        try:
            await workspace.begin()
        except BaseException:
            await workspace.close()
            raise
        return workspace

    def labels(self) -> dict[str, str]:
        """What says whose a sandbox is."""
        return {LABEL: "workspace", LABEL_RUN: self._run, LABEL_OWNER: owner(), LABEL_PROVIDER: self._name}

    async def call(self, what: str, work: Awaitable[T], seconds: float = 0.0) -> T:
        """Await `work` of the SDK, for so long (0: the deadline). Raises WorkspaceError."""
        seconds = seconds or self.deadline
        try:
            return await within(seconds, work)
        except (UserError, WorkspaceError, PathError):
            raise
        except TimeoutError:
            raise WorkspaceError(f"the service e2b failed to {what}: no answer within {seconds:g} s") from None
        except Exception as error:  # noqa: BLE001 - whatever the SDK makes of what the service says
            if isinstance(error, self._sdk.AuthenticationException):
                raise UserError(f"workspace.provider 'e2b': E2B_API_KEY is refused: {_line(error)}") from None
            status = getattr(error, "status_code", None) or 0
            raise _RefusedError(f"the service e2b failed to {what}: {_line(error)}", status) from None

    async def keep(self, sandbox: "AsyncSandbox") -> Snapshot:
        """Keep the files of a sandbox. Where the service has no snapshots without processes, those that calls
        started are ended as it is opened. Raises WorkspaceError."""
        name, processes = _snapshot_name(), False
        try:
            making = sandbox.create_snapshot(name=name, mode="filesystem")
            made = await self.call("keep a snapshot", making, _LONG * self.deadline)
        except _RefusedError as error:
            if error.status not in _NEVER_FULL:
                raise
            making, processes = sandbox.create_snapshot(name=name), True
            made = await self.call("keep a snapshot", making, _LONG * self.deadline)
        self._snapshots[made.snapshot_id] = Origin(made.snapshot_id, processes)
        return Snapshot(self.name, made.snapshot_id)

    async def forget(self, snapshot: Snapshot) -> None:
        origin = self._snapshots.pop(snapshot.name, None)
        if origin is not None:
            if baseline := self._baselines.pop(origin, None):
                baseline.cancel()
            await self._drop(origin.template)

    async def _drop(self, snapshot: str) -> None:
        await self.call("drop a snapshot", self._sdk.AsyncSandbox.delete_snapshot(snapshot))

    async def fresh(self, spec: WorkspaceSpec, origin: Origin, image: str, build: str) -> E2bWorkspace:
        """Open what a workspace was opened from, or another image, without a network. Raises WorkspaceError,
        UserError."""
        spec = spec.for_grader(image, build)
        self.check(spec)
        return await self._opened(spec, Origin(image) if image else origin)

    async def baseline(self, spec: WorkspaceSpec, origin: Origin) -> dict[str, str]:
        """The kind of each path of an origin, looked for once. Raises WorkspaceError."""
        looking = self._baselines.get(origin)
        if looking is None or (looking.done() and (looking.cancelled() or looking.exception())):
            looking = self._baselines[origin] = asyncio.ensure_future(self._looked(spec, origin))
        return await asyncio.shield(looking)

    async def _looked(self, spec: WorkspaceSpec, origin: Origin) -> dict[str, str]:
        workspace = await self.fresh(spec, origin, "", "")
        try:
            return {path: entry.kind for path, entry in (await workspace.entries()).items()}
        finally:
            await workspace.close()

    def closed(self, workspace: E2bWorkspace) -> None:
        """Note that one is closed."""
        self._open.discard(workspace)

    async def _renew(self) -> None:
        """Let all that is open live on. What the service does wrong the next call will say."""
        while True:
            await asyncio.sleep(self._lifetime / 3)
            await asyncio.gather(*(workspace.renew(int(self._lifetime)) for workspace in list(self._open)))

    async def _sweep(self, provider: str = "") -> None:
        """End the sandboxes and drop the snapshots of a provider; without one those of runs that are dead."""
        wanted = {LABEL: "workspace", **({LABEL_PROVIDER: provider} if provider else {})}
        listing = self._sdk.AsyncSandbox.list(query=self._sdk.SandboxQuery(metadata=wanted), limit=100)
        for _ in range(_PAGES):
            if not listing.has_next:
                break
            for one in await self.call("list sandboxes", listing.next_items()):
                if provider or is_dead(str((one.metadata or {}).get(LABEL_OWNER, ""))):
                    await self.call("end a sandbox", self._sdk.AsyncSandbox.kill(one.sandbox_id))
        if not provider:
            await self._sweep_snapshots()

    async def _sweep_snapshots(self) -> None:
        listing = self._sdk.AsyncSandbox.list_snapshots(limit=100)
        for _ in range(_PAGES):
            if not listing.has_next:
                break
            for one in await self.call("list snapshots", listing.next_items()):
                if any(is_dead(_owner_of(name)) for name in [one.snapshot_id, *one.names]):
                    await self._drop(one.snapshot_id)

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        for looking in self._baselines.values():
            looking.cancel()
        await asyncio.gather(*(workspace.close() for workspace in list(self._open)))
        started, self._renewing = self._renewing is not None, None
        for origin in self._snapshots.values():
            with contextlib.suppress(WorkspaceError):  # the sweep of a later run drops it
                await self._drop(origin.template)
        self._snapshots.clear()
        self._baselines.clear()
        if started:
            with contextlib.suppress(WorkspaceError, UserError):  # also what it made and did not tell
                await self._sweep(self._name)


class _RefusedError(WorkspaceError):
    """The service refused a call. status: of HTTP; 0: none is known."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def _network(network: Network) -> Any:
    if not network.hosts:
        return None
    return {"allow_out": list(network.hosts), "deny_out": [_EVERYWHERE]}


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LINE]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _snapshot_name() -> str:
    """A name that says whose it is, of the few characters that the service takes."""
    host, boot, *others = owner().split("/")
    return "-".join((LABEL, _digest(host), _digest(boot), *others, secrets.token_hex(4)))


def _owner_of(name: str) -> str:
    """The owner's label of a snapshot's name; empty where it is not known here."""
    name = name.rpartition("/")[2].partition(":")[0]
    parts, (host, boot, *_) = name.split("-"), owner().split("/")
    if len(parts) != 7 or parts[0] != LABEL or parts[1] != _digest(host):
        return ""
    return "/".join((host, boot if parts[2] == _digest(boot) else "another", *parts[3:6]))
