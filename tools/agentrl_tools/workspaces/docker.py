"""The provider `docker`: a container for each workspace, by the API of Docker daemons; podman's speaks it, too.

Files are read and written by the daemon, so that nothing in a container can hang, refuse or fake that. Programs run
under a shell of the image. A container's first process is a shell that waits; a restart ends everything else.
"""

import asyncio
import contextlib
import hashlib
import io
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import UserError
from agentrl.workspace import egress
from agentrl.workspace.archive import packed_as
from agentrl.workspace.provider import Capabilities, WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import MIB, Snapshot, WorkspaceError
from agentrl_tools.workspaces.container import Container
from agentrl_tools.workspaces.daemon import LONG_SECONDS, Daemon, DaemonError, Image, line
from agentrl_tools.workspaces.loopback import may_enter
from agentrl_tools.workspaces.owner import LABEL_OWNER, LABEL_PROVIDER, LABEL_RUN, owner

_WAIT = ["/bin/sh", "-c", "trap : TERM INT HUP; while :; do sleep 86400 & wait; done"]
_DROPPED = (
    "AUDIT_CONTROL", "AUDIT_READ", "AUDIT_WRITE", "BLOCK_SUSPEND", "DAC_READ_SEARCH", "IPC_LOCK", "IPC_OWNER", "LEASE",
    "LINUX_IMMUTABLE", "MAC_ADMIN", "MAC_OVERRIDE", "MKNOD", "NET_ADMIN", "NET_BIND_SERVICE", "NET_BROADCAST",
    "NET_RAW", "SETFCAP", "SETPCAP", "SYSLOG", "SYS_ADMIN", "SYS_BOOT", "SYS_CHROOT", "SYS_MODULE", "SYS_NICE",
    "SYS_PACCT", "SYS_PTRACE", "SYS_RAWIO", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "WAKE_ALARM",
)  # fmt: skip
"""All capabilities but what root needs to install packages and to become others. They are not `ALL` with some added
again: podman gives what is added to ordinary users, too."""
_SHARED_MEMORY = 64 * MIB
_REPOSITORY = "localhost/agentrl-snapshot"

T = TypeVar("T")


class DockerProvider(WorkspaceProvider):
    """address: of a daemon, or several: `unix://PATH`, `tcp://HOST:PORT`, `ssh://USER@HOST`; empty: what DOCKER_HOST or
    the usual sockets say. image: what is opened where a recipe names none. pull: fetch images that are not there from
    their registry. deadline: seconds in which a daemon must answer an ordinary call. quota: let the daemon's storage
    bound what is written, which takes one that can (overlay over xfs with pquota, btrfs, zfs); otherwise it is measured
    every second, and who exceeds it has everything killed."""

    name = "docker"
    capabilities = Capabilities(images=True, build=True, everything=True, users=True)

    def __init__(
        self,
        address: str | Sequence[str] = "",
        image: str = "",
        *,
        pull: bool = True,
        deadline: float = 60.0,
        quota: bool = False,
    ) -> None:
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses or not all(isinstance(one, str) for one in addresses):
            raise UserError("workspace.args.address: an address, or a list of them")
        if not deadline > 0:
            raise UserError("workspace.args.deadline: seconds above 0")
        self._daemons = [Daemon(one, deadline) for one in addresses]
        here = may_enter() and all(daemon.is_here for daemon in self._daemons)
        self.capabilities = replace(self.capabilities, hosts=here, listens=here)
        self._image, self._pull, self._quota = image, pull, quota
        self._run, self._count, self._name = "", 0, secrets.token_hex(8)
        self._started = False
        self._open: dict[Container, str] = {}  # with the name of the snapshot that each was opened from
        self._snapshots: dict[str, Daemon] = {}
        self._forgotten: set[str] = set()
        self._images: dict[tuple[Daemon, str], asyncio.Task[Image]] = {}

    def check(self, spec: WorkspaceSpec) -> None:
        if spec.network.hosts and not self.capabilities.hosts:
            raise UserError(
                "workspace.network: the provider 'docker' can do a list of hosts only where the daemon is on this "
                "machine (workspace.args.address: unix://...) and the run is root's"
            )
        super().check(spec)

    async def start(self, run: str) -> None:
        self._run = run
        errors = []
        for daemon in self._daemons:
            try:
                await daemon.start()
                await daemon.sweep()
            except WorkspaceError as error:
                errors.append(str(error))
        self._started = True
        if len(errors) == len(self._daemons):
            await self.close()
            raise UserError(f"workspace.provider 'docker': {errors[0]}; is it running?")

    async def open(self, spec: WorkspaceSpec, snapshot: Snapshot | None = None) -> Container:
        self.check(spec)
        name = snapshot.name if snapshot is not None else ""
        if not (name or spec.image or spec.build or self._image):
            raise UserError("workspace.image: the provider 'docker' has no default; name an image")
        if name and name not in self._snapshots:
            raise WorkspaceError(f"there is no snapshot {name} any more")
        daemons = [self._snapshots[name]] if name else sorted(self._daemons, key=lambda daemon: daemon.load)
        for last, daemon in enumerate(daemons, 1 - len(daemons)):
            try:
                return await self._open_on(daemon, spec, name)
            except (WorkspaceError, UserError):
                if last == 0:
                    raise
        raise AssertionError("not reached")

    async def _open_on(self, daemon: Daemon, spec: WorkspaceSpec, snapshot: str) -> Container:
        self._count += 1
        daemon.used += 1
        container = None
        try:
            image = origin = await self._image_of(daemon, spec, "")
            if snapshot:  # which says as whom and where the programs of its container began
                image = await self._image_of(daemon, spec, snapshot)
            user = spec.user or origin.user or ("0" if image.user else "")
            image = replace(image, user=user, folder=spec.folder or origin.folder)
            container = Container(self, daemon, f"{self._run or 'run'}-{self._count}", spec, image, snapshot)
            self._open[container] = snapshot
            await container.begin(self._config(spec, image, container.home))
            return container
        except BaseException:
            if container is None:
                daemon.used -= 1
            else:
                await container.close()
            raise

    def _config(self, spec: WorkspaceSpec, image: Image, home: str) -> dict[str, Any]:
        """A container, in the words of the API."""
        limits = spec.limits
        own = {} if image.folder else {"HOME": home}
        if not any(variable.startswith("LANG=") for variable in image.env):
            own["LANG"] = "C.UTF-8"
        if spec.network.hosts:
            own |= egress.VARIABLES
        host: dict[str, Any] = {
            "NetworkMode": "default" if spec.network.everything else "none",
            "Memory": limits.memory, "MemorySwap": limits.memory, "PidsLimit": limits.processes,
            "CapDrop": list(_DROPPED), "SecurityOpt": ["no-new-privileges"],
            "ShmSize": min(_SHARED_MEMORY, limits.memory // 2), "LogConfig": {"Type": "none"},
        }  # fmt: skip
        if self._quota:
            host["StorageOpt"] = {"size": str(limits.disk)}
        return {
            "Image": image.id, "Entrypoint": [*_WAIT, secrets.token_hex(8)], "Cmd": [], "WorkingDir": home,
            "User": image.user, "HostConfig": host,
            "Env": [f"{name}={value}" for name, value in {**own, **spec.env}.items()],
            "Labels": {**spec.labels, **self.labels()}, "StopTimeout": 0,
        }  # fmt: skip

    def labels(self) -> dict[str, str]:
        """What says whose a container or an image is."""
        return {LABEL_RUN: self._run, LABEL_OWNER: owner(), LABEL_PROVIDER: self._name}

    @property
    def measured(self) -> bool:
        """Whether what is written has to be measured."""
        return not self._quota

    @property
    def listens(self) -> bool:
        """Whether containers can listen."""
        return self.capabilities.listens

    async def _image_of(self, daemon: Daemon, spec: WorkspaceSpec, snapshot: str) -> Image:
        """The image to open, looked for once a run on each daemon. Raises UserError, DaemonError."""
        key = snapshot or spec.build or spec.image or self._image
        looked = self._images.get((daemon, key))
        if looked is None or (looked.done() and (looked.cancelled() or looked.exception())):
            if snapshot or not spec.build:
                looking = daemon.image(key, self._pull and not snapshot)
            else:
                looking = self._built(daemon, Path(spec.build))
            looked = self._images[daemon, key] = asyncio.ensure_future(looking)
        return await asyncio.shield(looked)

    async def _built(self, daemon: Daemon, folder: Path) -> Image:
        """The image of a folder with a Dockerfile, which stays with the daemon under the hash of its content."""
        if not (folder / "Dockerfile").is_file():
            raise UserError(f"workspace build: {folder} has no file Dockerfile")
        try:
            tar = await asyncio.to_thread(packed_as, folder, "/")
        except OSError as error:
            raise UserError(f"workspace build: {folder}: {error}") from None
        tag = f"localhost/agentrl-build:{hashlib.sha256(tar).hexdigest()[:24]}"
        with contextlib.suppress(UserError):
            return await daemon.image(tag, pull=False)
        building = daemon.docker.images.build(
            fileobj=io.BytesIO(tar), encoding="identity", tag=tag, rm=True, forcerm=True
        )
        try:
            said = await daemon.call("build an image", building, LONG_SECONDS)
        except DaemonError as error:
            if error.status >= 900 or "no answer" in str(error):
                raise
            raise UserError(f"workspace build: {folder / 'Dockerfile'}: {error}") from None
        try:
            return await daemon.image(tag, pull=False)
        except UserError:
            words = [str(part.get("stream") or part.get("error") or "") for part in said if isinstance(part, dict)]
            raise UserError(f"workspace build: {folder / 'Dockerfile'}: {line(' '.join(words[-3:]))}") from None

    async def keep(self, container: Container, daemon: Daemon) -> Snapshot:
        """Keep the files of a container as an image. Raises DaemonError."""
        tag = f"{hashlib.sha256(owner().encode()).hexdigest()[:12]}-{secrets.token_hex(6)}"
        labels = [f'LABEL {name}="{value}"' for name, value in self.labels().items() if '"' not in value]
        commit = daemon.docker.containers.container(container.container).commit(
            repository=_REPOSITORY, tag=tag, changes=labels, config={}
        )
        await daemon.call("keep a snapshot", commit, LONG_SECONDS)
        name = f"{_REPOSITORY}:{tag}"
        self._snapshots[name] = daemon
        return Snapshot(self.name, name)

    async def forget(self, snapshot: Snapshot) -> None:
        if snapshot.name in self._snapshots:
            self._forgotten.add(snapshot.name)
            await self._drop_forgotten()

    async def _drop_forgotten(self) -> None:
        """Drop what nothing was opened from any more. The newest first: it may be made from the others."""
        for name in sorted(self._forgotten - set(self._open.values()), key=list(self._snapshots).index, reverse=True):
            daemon = self._snapshots[name]
            self._forgotten.discard(name)
            if not await daemon.remove_images([name]):
                del self._snapshots[name]
                self._images.pop((daemon, name), None)

    async def fresh(self, spec: WorkspaceSpec, snapshot: str) -> Container:
        """Open a snapshot, or without one an image."""
        return await self.open(spec, Snapshot(self.name, snapshot) if snapshot else None)

    async def closed(self, container: Container, daemon: Daemon) -> None:
        """Note that one is closed."""
        if container in self._open:
            del self._open[container]
            daemon.used -= 1
            with contextlib.suppress(WorkspaceError):
                await self._drop_forgotten()

    async def close(self) -> None:
        await asyncio.gather(*(container.close() for container in list(self._open)))
        for daemon in self._daemons:
            if self._started:
                with contextlib.suppress(WorkspaceError):  # also what a daemon made and did not tell
                    await daemon.sweep(self._name)
            await daemon.close()
        self._started = False
        for looking in self._images.values():
            looking.cancel()
        self._snapshots.clear()
        self._images.clear()
        self._forgotten.clear()
