"""`WorkspaceProvider`: where workspaces come from, what they may use, and what a provider can do."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

from agentrl.errors import UserError
from agentrl.workspace.workspace import MIB, Snapshot, Workspace


@dataclass(frozen=True, slots=True)
class WorkspaceLimits:
    """What the processes and files of one workspace may use together."""

    memory: int = 1024 * MIB
    """Bytes of all processes."""
    processes: int = 256
    """Processes and threads."""
    disk: int = 256 * MIB
    """Bytes of all that is written. In memory where a provider says so, beside `memory`."""
    files: int = 100_000
    """Files that are made."""
    descriptors: int = 1024
    """Open files of one process."""
    seconds: float = math.inf
    """Seconds after which a workspace that nobody closed is closed."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")


@dataclass(frozen=True, slots=True)
class Network:
    """What a workspace may reach."""

    everything: bool = False
    """All that this machine reaches."""
    hosts: tuple[str, ...] = ()
    """Hosts that are reached through a proxy (HTTP_PROXY, HTTPS_PROXY), each `name`, `name:port` or `*.name`."""

    @property
    def none(self) -> bool:
        """Whether nothing is reached."""
        return not self.everything and not self.hosts


@dataclass(frozen=True, slots=True)
class WorkspaceSpec:
    """What is to be opened."""

    image: str = ""
    """A provider's image: a root folder, a name of a container's image, a template. Empty: its default."""
    limits: WorkspaceLimits = WorkspaceLimits()
    """What it may use."""
    network: Network = Network()
    """What it may reach."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of all that runs in it. Nothing of this machine's environment is among them."""
    labels: dict[str, str] = field(default_factory=dict)
    """What a provider marks it by, besides the run."""
    build: str = ""
    """A folder with a Dockerfile that the image is made from, where a provider builds. Empty: none."""
    users: tuple[str, ...] = ()
    """Users of the image as whom programs will run, such as those of a grader."""
    user: str = ""
    """As whom programs run that name no other, where the provider has users. Empty: as the image says."""
    folder: str = ""
    """Where programs begin; it is made where it is missing. Empty: where the image says."""

    def for_grader(self, image: str = "", build: str = "") -> "WorkspaceSpec":
        """The same without a network and as the image's user; or so from another image, and where that begins."""
        spec = replace(self, network=Network(), user="")
        return replace(spec, image=image, build=build, folder="") if image or build else spec


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a provider can do. What a recipe or an environment asks for beyond it is refused by name before a run."""

    images: bool = False
    """Images other than its default."""
    build: bool = False
    """Builds an image from a Dockerfile."""
    hosts: bool = False
    """Egress to a list of hosts."""
    everything: bool = False
    """Egress to everything."""
    users: bool = False
    """Runs programs as users of the image."""
    listens: bool = False
    """Carries connections from inside to this process (`Workspace.listen`)."""


class WorkspaceProvider(ABC):
    """Built once a run as `cls(**workspace.args)`; entry point group `agentrl.workspaces`. Opens any number at once."""

    name: str
    """As recipes name it."""
    capabilities: Capabilities
    """What it can do."""

    @abstractmethod
    async def start(self, run: str) -> None:
        """Make sure that it works here, and sweep what runs that are dead left behind. run: names this one, in labels.
        Raises UserError, one line with what to do."""

    @abstractmethod
    async def open(self, spec: WorkspaceSpec, snapshot: Snapshot | None = None) -> Workspace:
        """Open a workspace, from its image or from a snapshot. Raises WorkspaceError; UserError where the image is
        none."""

    @abstractmethod
    async def forget(self, snapshot: Snapshot) -> None:
        """Drop a snapshot; workspaces that were opened from it live on."""

    @abstractmethod
    async def close(self) -> None:
        """Close all workspaces, drop all snapshots, and leave nothing. May be called twice."""

    def check(self, spec: WorkspaceSpec) -> None:
        """Raise UserError, which names what of `spec` this provider cannot do."""
        if spec.folder and not spec.folder.startswith("/"):
            raise UserError(f"workspace: programs begin in an absolute path, not in {spec.folder!r}")
        users = list(dict.fromkeys((*spec.users, *((spec.user,) if spec.user else ()))))
        lacks = {
            "image": bool(spec.image) and not self.capabilities.images,
            "build": bool(spec.build) and not self.capabilities.build,
            "network (a list of hosts)": bool(spec.network.hosts) and not self.capabilities.hosts,
            "network: all": spec.network.everything and not self.capabilities.everything,
            f"users of the image ({', '.join(users)})": bool(users) and not self.capabilities.users,
        }
        if missing := [name for name, lacking in lacks.items() if lacking]:
            raise UserError(f"workspace.provider {self.name!r} cannot do: {', '.join(missing)}")
