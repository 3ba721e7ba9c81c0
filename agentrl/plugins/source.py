"""A source of tools that are known only once it is opened, such as a server that offers them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from agentrl.plugins.tool import Tool


class ToolSource(ABC):
    """Stands in `tools` of a recipe like a tool (entry point group `agentrl.tools`), and gives any number of them."""

    @abstractmethod
    async def open(self) -> Sequence[Tool]:
        """Its tools, once a run, in the run's event loop. Raises UserError (one line) when they cannot be had."""

    async def close(self) -> None:  # noqa: B027 - a hook with a default
        """Free what `open` took, once, when the run ends; also after an `open` that failed."""
