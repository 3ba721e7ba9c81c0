"""What plugins and the driver hand each other: tasks, messages, sessions, replies. No behaviour, no heavy import."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, Required, TypeAlias, TypedDict

from agentrl.errors import ArgumentError as ArgumentError
from agentrl.errors import InfrastructureError as InfrastructureError
from agentrl.jsonable import Json as Json
from agentrl.workspace.workspace import Workspace

Content: TypeAlias = str | list[dict[str, Json]]
"""What a message says: text, or parts of the Chat Completions API where there are images."""


RewardParts: TypeAlias = Mapping[str, float | Mapping[str, float]]
"""Reward parts by name; under `seats`, rewards by seat."""


class FunctionCall(TypedDict):
    """The function of a tool call. arguments: by name, or as JSON text that the model wrote and that cannot be read."""

    name: str
    arguments: dict[str, Json] | str


class ToolCallMessage(TypedDict):
    """One entry of `tool_calls`, in the shape of the OpenAI chat API."""

    type: Literal["function"]
    """The kind of call; functions are the only one."""
    id: NotRequired[str]
    """The ID that the result refers to."""
    function: FunctionCall
    """The function and its arguments."""


class Message(TypedDict, total=False):
    """A chat message in the shape of the OpenAI API. `content` is text, or parts when there are images."""

    role: Required[Literal["system", "user", "assistant", "tool"]]
    """Who wrote the message."""
    content: Required[str | list[dict[str, Json]] | None]
    """Text, or parts when there are images; None beside tool calls."""
    tool_calls: list[ToolCallMessage]
    """The calls of an assistant turn."""
    tool_call_id: str
    """The ID of the call that a tool's message answers."""
    name: str
    """The tool's name, in a tool's message."""
    reasoning_content: str
    """The reasoning of an assistant turn, apart from its content."""
    conversation: "list[Message]"
    """In a demonstration, the conversation with the model that a tool held for this result, its opening included."""


def answer_of(messages: Sequence[Message]) -> str:
    """The text of the last assistant turn; empty where there is none, or its content is not text."""
    content = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
    return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True)
class ToolKwargs:
    """What a task hands to the four hooks of one tool."""

    create_kwargs: Mapping[str, Json] = field(default_factory=dict)
    """Keyword arguments of `create`."""
    execute_kwargs: Mapping[str, Json] = field(default_factory=dict)
    """Keyword arguments of `execute`, besides the model's."""
    calc_reward_kwargs: Mapping[str, Json] = field(default_factory=dict)
    """Keyword arguments of `calc_reward`."""
    release_kwargs: Mapping[str, Json] = field(default_factory=dict)
    """Keyword arguments of `release`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do, immutable.

    `id` is unique within a split and stable over runs. `data` is the environment's own (question, answer, ...).
    `tools` names the tools that this task offers; None means all that the recipe lists.
    """

    id: str
    data: Mapping[str, Json]
    tools: tuple[str, ...] | None = None
    tools_kwargs: Mapping[str, ToolKwargs] = field(default_factory=dict)
    """By name of a tool what its hooks get."""
    create_kwargs: Mapping[str, Json] = field(default_factory=dict)
    """Keyword arguments of the environment's `create`."""
    seconds: float | None = None
    """Time of its rollouts, where that is less than `rollout.timeout`."""


@dataclass(slots=True)
class Session:
    """What is per request, one object for each plugin: a plugin keeps its own data in `state` and nowhere else.

    `messages` is the conversation so far, shared by the sessions of a request: read it, never write it.
    `deadline` is on the clock of `time.monotonic()`, in seconds. `rng` is seeded from the run's seed, the task and the
    sample, and is the plugin's own. `environment` is the environment's session of the same request, through which an
    environment's own tools reach its state (None in that session itself).
    """

    id: str
    """Unique among the requests in flight; begins with the task's id."""
    task: Task
    rng: random.Random
    deadline: float
    messages: Sequence[Message] = ()
    state: Any = None
    environment: "Session | None" = None
    workspace: Workspace | None = None
    """Files and processes of the request, where `workspace.provider` is set."""
    tampering: tuple[str, ...] = ()
    """What a grader left behind since it would have decided for it, as `kind: path`: see `agentrl.workspace.grading`.
    The environment sets it in `calc_reward`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers about the rollout by name, besides its reward: the environment sets them in `calc_reward`, and
    `metric/<name>` is their mean."""
    outcome: Any = None
    """What an agent came to (an `agentrl.plugins.agent.Outcome`), from its end on; None under the built-in driver."""


@dataclass(frozen=True, slots=True)
class Conversed:
    """What a conversation of a tool came to.

    messages: all of them; of one that went on from a summary, those since. finish: why it ended, as in `stop/<reason>`.
    turns: of the model. done: True where a tool that it called ended the episode.
    """

    messages: tuple[Message, ...]
    finish: str
    turns: int
    done: bool = False

    @property
    def answer(self) -> str:
        """The text of the last assistant turn; empty where there is none."""
        return answer_of(self.messages)


class Converse(Protocol):
    """Given to the calls of a tool that `converses`, as the argument `converse`: it holds a conversation with the model
    that is trained. Its tokens are a branch of the rollout's tree, and the rollout's reward is theirs."""

    @property
    def depth(self) -> int:
        """Calls of tools that the calling conversation lies in itself; 0 for the rollout's own."""

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that the calling conversation offers."""

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[str] = (),
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> Conversed:
        """Hold a conversation that begins with `messages` until the model answers without a call. Any number may be
        held, also at the same time, until the call ends.

        tools: names of tools of the task. max_turns, max_tokens: bounds of its own, within those of the recipe's
        `rollout`. Raises ArgumentError, for the model to read, where there is no room for the messages or no turn is
        left; InfrastructureError where the engine or a tool fails, which fails the rollout whatever the tool does.
        """


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """What one call of a tool returns.

    text: what the model reads; the driver bounds it in tokens. images: paths, bytes or PIL images.
    reward: a step reward, credited to this turn. metrics: named numbers, averaged into `tool/<name>/<key>`.
    done: True ends the episode after this turn's tools. error: True when the tool refuses its input (counted).
    """

    text: str = ""
    images: tuple[Any, ...] = ()
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    done: bool = False
    error: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment says to an assistant turn that holds no tool call.

    messages: appended to the conversation (none, and not done, is an error). reward: a step reward of this turn.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
