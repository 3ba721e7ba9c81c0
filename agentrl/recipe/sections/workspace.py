"""`workspace`: the files and processes that each rollout has to itself."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from agentrl.jsonable import Json
from agentrl.recipe.sections.section import Count, Positive, Section, Unit
from agentrl.workspace.provider import Network, WorkspaceLimits, WorkspaceSpec
from agentrl.workspace.workspace import MIB


def _hosts(value: Json) -> Json:
    return tuple(value) if isinstance(value, list) else value


def _variables(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(f"{name!a} is no name of a variable, or its text holds a zero byte")
    return value


class WorkspaceSection(Section):
    """Where rollouts have files and processes; the provider alone is short for `{provider: NAME}`."""

    provider: str = "bwrap"
    """An installed provider, or module:attribute. bwrap: bubblewrap on this machine. docker: docker or podman.
    e2b: the service E2B. harbor: environments of a Harbor installation."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Arguments of the provider's class."""
    image: str = ""
    """What they begin as, in the provider's words: a root folder, a container's image, a template. Empty: its default,
    for bwrap this machine's programs without its files."""
    network: Annotated[Literal["none", "all"] | tuple[str, ...], BeforeValidator(_hosts)] = "none"
    """What programs reach: nothing, everything, or a list of hosts (`pypi.org`, `*.example.org`) through a proxy."""
    memory_mb: Annotated[Positive, Unit("MiB")] = 1024
    """Memory of all processes of one."""
    disk_mb: Annotated[Positive, Unit("MiB")] = 256
    """What one may write; bwrap keeps it in memory, beside `memory_mb`."""
    processes: Annotated[Positive, Unit("processes")] = 256
    """Processes and threads of one."""
    files: Annotated[Positive, Unit("files")] = 100_000
    """Files that one may make, which bwrap alone counts."""
    descriptors: Annotated[int, Field(ge=32), Unit("files")] = 1024
    """Files that one process may have open."""
    env: Annotated[dict[str, str], AfterValidator(_variables)] = Field(default_factory=dict)
    """Environment variables of all programs; `${NAME}` fills in one of this machine's, of which they have no other."""
    ready: Annotated[Count, Unit("workspaces")] = 8
    """Workspaces that are opened ahead, so that no rollout waits for its own."""

    def spec(self) -> WorkspaceSpec:
        """What is opened, unless the environment asks for something else."""
        network = Network(everything=True) if self.network == "all" else Network()
        if not isinstance(self.network, str):
            network = Network(hosts=tuple(self.network))
        limits = WorkspaceLimits(
            memory=self.memory_mb * MIB, disk=self.disk_mb * MIB, processes=self.processes, files=self.files,
            descriptors=self.descriptors,
        )  # fmt: skip
        return WorkspaceSpec(self.image, limits, network, dict(self.env))


def provided(value: Json) -> Json:
    """`{provider: TEXT}` for a text alone, which is short for it."""
    return {"provider": value} if isinstance(value, str) else value
