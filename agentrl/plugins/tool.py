"""The tool: four hooks, all async, called by the driver and by nobody else."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agentrl.errors import UserError
from agentrl.plugins.prompt_schema import prompt_schema
from agentrl.plugins.schema import check_arguments
from agentrl.plugins.types import Json, Session, ToolResponse


class Tool(ABC):
    """One object serves a whole run and thousands of requests at once; what is per request lives in `session`.

    name: what the model calls it. description: for the model. parameters: a JSON schema of type `object`.
    reward_parts: every name that `calc_reward` may give, as an environment says them; none, unless it is overridden.
    converses: whether its calls hold conversations with the model; `execute` is then given `converse` besides the
    model's arguments, a `Converse`. uses_workspace: whether it needs `session.workspace`, without which no run begins.
    cannot: as an environment says it.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Json] = {"type": "object", "properties": {}}
    reward_parts: tuple[str, ...] | None = ()
    converses: bool = False
    uses_workspace: bool = False
    cannot: Mapping[str, str] = MappingProxyType({})
    _written: "tuple[tuple[object, ...], dict[str, Json]] | None" = None

    async def create(self, session: Session, **create_kwargs: Json) -> None:  # noqa: B027 - a hook with a default
        """Take what one request needs, once, before its first token."""

    @abstractmethod
    async def execute(self, session: Session, **arguments: Json) -> ToolResponse | str:
        """Run one call. `arguments` are checked against `parameters` first; a str is a ToolResponse with that text."""

    async def calc_reward(self, session: Session, **kwargs: Json) -> float | Mapping[str, float] | None:
        """The tool's part of the reward, once, after the last token. None: it has none."""
        return None

    async def release(self, session: Session, **kwargs: Json) -> None:  # noqa: B027 - a hook with a default
        """Free what `create` took. Called exactly once for each `create`, whatever happened."""

    def check(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        """The arguments as `execute` wants them. Raises ArgumentError with a line that the model can act on."""
        return check_arguments(self.parameters, arguments)

    async def close(self) -> None:  # noqa: B027 - a hook with a default
        """Free what the whole run held (a pool, a connection), once, when the run ends."""

    @property
    def schema(self) -> dict[str, Json]:
        """The tool as prompts have it: `{"type": "function", "function": {...}}`, its parameters in the form of
        `transformers.utils.get_json_schema`. Made once, so that a chat knows it again; anew where the tool has another
        name, description or parameters by now. Raises UserError where no prompt can hold them: types with recursion."""
        given = (self.name, self.description, self.parameters)
        if self._written is not None and all(one is other for one, other in zip(self._written[0], given, strict=True)):
            return self._written[1]
        try:
            parameters = prompt_schema(self.parameters)
        except UserError as error:
            raise UserError(f"tool {self.name!r}: {error}") from None
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        self._written = given, {"type": "function", "function": function}
        return self._written[1]


class ToolSource(ABC):
    """Stands in `tools` of a recipe like a tool (entry point group `agentrl.tools`), and gives any number of them."""

    @abstractmethod
    async def open(self) -> Sequence[Tool]:
        """Its tools, once a run, in the run's event loop. Raises UserError (one line) when they cannot be
        had."""

    async def close(self) -> None:  # noqa: B027 - a hook with a default
        """Free what `open` took, once, when the run ends; also after an `open` that failed."""
