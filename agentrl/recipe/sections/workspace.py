"""`workspace`: the files and processes that each rollout has to itself."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from agentrl.jsonable import Json
from agentrl.recipe.sections.section import Count, Positive, Section, Unit
from agentrl.workspace.provider import Network, WorkspaceLimits, WorkspaceSpec
from agentrl.workspace.workspace import MIB


def _hosts(value: Json) -> Json:
    return tuple(value) if isinstance(value, list) else value


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
    ready: Annotated[Count, Unit("workspaces")] = 8
    """Workspaces that are opened ahead, so that no rollout waits for its own."""

    def spec(self) -> WorkspaceSpec:
        """What is opened, unless the environment asks for something else."""
        network = Network(everything=True) if self.network == "all" else Network()
        if not isinstance(self.network, str):
            network = Network(hosts=tuple(self.network))
        limits = WorkspaceLimits(
            memory=self.memory_mb * MIB, disk=self.disk_mb * MIB, processes=self.processes
        )  # fmt: skip
        return WorkspaceSpec(self.image, limits, network)


def provided(value: Json) -> Json:
    """`{provider: TEXT}` for a text alone, which is short for it."""
    return {"provider": value} if isinstance(value, str) else value
