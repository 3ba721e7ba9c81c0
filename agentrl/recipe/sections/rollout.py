"""`rollout` and `engine`: how conversations are sampled."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from agentrl.jsonable import Json
from agentrl.recipe.sections.section import Above0, AtLeast0, Count, Positive, Seconds, Section, Tokens, Unit


def _with_summary(text: str) -> str:
    if "{summary}" not in text:
        raise ValueError("{summary} must stand in it: what the model wrote goes there")
    return text


class CompactSection(Section):
    """Compaction: a conversation that nears its limit of tokens goes on from a summary of it that the model writes."""

    at: Above0 = 0.75
    """When: a share of the conversation's limit (rollout.max_tokens, or the model's context where that is less), or,
    above 1, a number of tokens."""
    most: Annotated[Positive, Unit("summaries")] = 8
    """Summaries of one rollout; after the last one, conversations go on to their limit."""
    prompt: str = (
        "The conversation is about to be cut. Write a summary of what you have done and found out so far, and of what "
        "is left to do: you will go on from the task and your summary alone."
    )
    """What the model is asked, as a user's message."""
    resume: Annotated[str, AfterValidator(_with_summary)] = "A summary of your work so far:\n{summary}"
    """What stands after the opening's messages when the model goes on; {summary} is what it wrote."""


class RolloutSection(Section):
    """How conversations are sampled, and their limits."""

    n: Annotated[Positive, Unit("samples per task")] = 8
    """Samples of each task: the size of a group."""
    tasks: Annotated[Positive, Unit("tasks per step")] = 16
    """Tasks of each step; a step trains on rollout.n x rollout.tasks samples."""
    temperature: AtLeast0 = 1.0
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1: from all."""
    top_k: Annotated[Count, Unit("tokens")] = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    max_turns: Annotated[Positive, Unit("turns")] = 6
    """Assistant turns of a request: summaries and the turns of sub-agents count."""
    max_tool_calls: Annotated[Positive, Unit("calls")] = 16
    """Tool calls of a request: those of sub-agents count."""
    max_tool_calls_per_turn: Annotated[Positive, Unit("calls")] = 3
    """Tool calls of one turn; further ones are refused, and the model is told."""
    strict_calls: bool = False
    """Let the model call only tools that are there, with arguments that fit their schemas: in a call, ids that lead to
    anything else are not sampled, and the trainer leaves them out likewise."""
    max_turn_tokens: Tokens = 512
    """Tokens that the model may sample in one turn."""
    max_tokens: Tokens = 4096
    """Length of a whole conversation, prompt included."""
    max_total_tokens: Annotated[int, Field(gt=0), Unit("tokens")] | None = None
    """Tokens of all conversations of a request together, where `compact`, sub-agents or an agent make it several. null:
    as many as max_turns and max_tokens allow; 65536 for an agent."""
    compact: CompactSection | None = None
    """Go on from summaries; `{}` takes the defaults of its keys. null: a conversation ends at its limit."""
    max_tool_tokens: Tokens = 256
    """What one tool response may add; longer ones are cut in the middle."""
    max_images: Annotated[Count, Unit("images")] = 32
    """Images of one conversation. What tools and the environment's replies show beyond is left out, and the model is
    told. A task whose opening holds more is left out, as one that is too long; an agent's call with more is refused."""
    max_image_pixels: Annotated[Positive, Unit("pixels")] = 16_777_216
    """The most pixels of an image: one that claims more is refused without being decoded. What is taken the model's own
    image processor makes smaller."""
    max_image_bytes: Annotated[Positive, Unit("bytes")] = 20_000_000
    """The most bytes of an image's file."""
    tool_timeout: Seconds = 30.0
    """Time allowed for one tool call."""
    turn_timeout: Seconds = 300.0
    """Time allowed for one turn: sampling and tools."""
    timeout: Seconds = 900.0
    """Time allowed for one request."""
    stuck_timeout: Seconds = 600.0
    """Time that a plugin's function may hold up every request, in the event loop or with the interpreter's lock, before
    the run ends: saved, with exit code 2; killed (137) where nothing else helps, with what was saved by then."""
    retries: Annotated[Count, Unit("attempts")] = 1
    """Further attempts at a request that FAILED."""
    concurrency: Annotated[Positive, Unit("requests")] = 1024
    """Requests in flight at once."""
    overlap: Literal["none", "one_step", "async"] = "none"
    """none: sample, then train. one_step: sample the next step's batch while this one trains. async: never stop
    sampling; new weights arrive in the middle of requests."""
    max_staleness: Annotated[int, Field(ge=1), Unit("updates")] = 2
    """Updates allowed between a sample's first token and its training (overlap: async)."""
    oversample: Annotated[float, Field(ge=1), Unit("times tasks")] = 1.0
    """Groups that a step begins. Once rollout.tasks are whole it abandons the others, whose tasks come again with the
    next step (overlap: none)."""

    @model_validator(mode="after")
    def _oversampled_alone(self) -> "RolloutSection":
        if self.oversample > 1 and self.overlap != "none":
            raise ValueError(
                "oversample abandons what is slow, overlap lets it go on (async) or waits for it (one_step): choose one"
            )
        return self


class EngineSection(Section):
    """The engine that samples tokens."""

    name: str = "local"
    """An installed engine (`agentrl engines` lists them), or module:attribute."""
    max_batch: Annotated[Positive, Unit("sequences")] = 128
    """Sequences decoded at once."""
    sleep: bool = False
    """Give the engine's memory back while the trainer works: for one device that both share."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Further arguments of the engine's class."""
