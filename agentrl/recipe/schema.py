"""The keys of a recipe: each with its type, its unit, a default that was tried and what it means.

Everything here is read by code, and an unknown key is an error. The docstring below a key is its description: errors
and `docs/reference/recipe.md` (`agentrl/recipe/reference.py`) take it from there.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_serializer,
    model_validator,
)

from agentrl.errors import nearest
from agentrl.jsonable import Json
from agentrl.recipe.document import Key, Reference
from agentrl.recipe.presets import PRESETS
from agentrl.recipe.reader import read_recipe
from agentrl.recipe.secrets import masked, plain, secret_values


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts or measures, such as `tokens`; a number without one has no unit."""

    name: str
    """The unit, such as `seconds`."""


Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0), Unit("seconds")]
Tokens = Annotated[int, Field(gt=0), Unit("tokens")]
Steps = Annotated[int, Field(ge=0), Unit("steps")]
Workers = Annotated[int, Field(gt=0), Unit("workers")]


class Section(BaseModel):
    """A part of a recipe: it refuses unknown keys, and does not change once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def changed(self, **values: Any) -> Self:
        """Return the section with other values, which are not checked. Of a section in it, a mapping changes the keys
        that it names: `recipe.changed(train={"steps": 1})`."""
        old = {key: getattr(self, key) for key in values}
        new = {
            key: old[key].changed(**value) if isinstance(value, dict) and isinstance(old[key], Section) else value
            for key, value in values.items()
        }
        return self.model_copy(update=new)


def _listed(value: Json) -> Json:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _words(value: Json) -> Json:
    return tuple(shlex.split(value)) if isinstance(value, str) else _listed(value)


def _named(value: Json) -> Json:
    return {"name": value} if isinstance(value, str) else value


def _with_summary(text: str) -> str:
    if "{summary}" not in text:
        raise ValueError("{summary} must stand in it: what the model wrote goes there")
    return text


class LoraSection(Section):
    """A LoRA adapter (arXiv:2106.09685), trained in place of the model's own weights."""

    rank: Positive = 16
    """Rank of the two matrices that the adapter adds to each layer."""
    alpha: Positive = 32
    """Scale of what the adapter adds: it is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_listed)] = ("all-linear",)
    """Layers to adapt, by the end of their names, such as [q_proj, v_proj]. all-linear: all but the output layer."""
    exclude: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Layers of those to leave as they are, by the end of their names, or a part of them between dots, such as
    [router, layers.0]."""
    vision: bool = False
    """Adapt the layers of the vision tower too, where the model has one. false: it stays as it is."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input during training."""
    start: str | None = None
    """A folder in peft's format, or its URL, to start from. null: a new adapter."""


class ModelSection(Section):
    """The model to train."""

    path: str = "tiny"
    """`tiny` or `tiny_vision` (they ship with the package), a Hugging Face folder, the URL of one (s3://, gs://), or a
    name on the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that are trained."""
    device: str = "auto"
    """Device of the trainer and of the engine `local`: auto (a GPU where there is one), cpu, cuda, cuda:1."""
    chat: str = "auto"
    """How messages become tokens: auto, bridge (the model's own template), or a family of `renderers` such as qwen3."""
    chat_template: str | None = None
    """A jinja file that replaces the tokenizer's own chat template, relative to the recipe that names it where
    it is there, else to the working directory."""
    config: dict[str, Json] = Field(default_factory=dict)
    """Settings of the model's configuration that have another value, by their names there, such as
    {max_position_embeddings: 65536, rope_parameters: {rope_type: yarn, factor: 4.0}}. Servers are told by flags."""
    trust_remote_code: bool = False
    """Run the code that a model folder or the hub brings."""
    lora: LoraSection | None = None
    """Train an adapter; `{}` takes the defaults of its keys. null: every weight is trained."""
    freeze: tuple[Literal["vision"], ...] = ()
    """Parts that are not trained: `vision`, the tower that turns images into features."""
    compute: Literal["auto", "same", "bfloat16"] = "auto"
    """Type that the trainer computes in. same: that of dtype. bfloat16: mixed precision; trained weights keep theirs,
    frozen models are kept in it. auto: bfloat16 on a GPU where weights of float32 are trained, else same."""
    checkpointing: bool = False
    """Activation checkpointing: compute activations again in the backward pass instead of keeping them."""

    @model_validator(mode="after")
    def _one_wish_for_the_tower(self) -> "ModelSection":
        if "vision" in self.freeze and self.lora is not None and self.lora.vision:
            raise ValueError("`freeze` has vision, and `lora.vision` adapts it: leave one out")
        return self

    @property
    def mixed(self) -> bool:
        """Return whether the trainer computes in another type than that of the weights it trains."""
        return self.compute == "bfloat16" and (self.dtype != "bfloat16" or self.lora is not None)

    @property
    def frozen(self) -> "ModelSection":
        """Return the section of a model that is not trained: without an adapter, kept in the type that it is computed
        in."""
        kept = {"dtype": "bfloat16", "compute": "same"} if self.compute == "bfloat16" else {}
        return self.model_copy(update={"lora": None, **kept})


class Schedule(Section):
    """A number that may change over the steps of a run; a number alone is short for `{start: NUMBER}`."""

    start: AtLeast0
    """Its value in the first step."""
    end: AtLeast0 | None = None
    """Its value after `steps` steps; in between it changes evenly. null: start, throughout."""
    steps: Steps = 0
    """Steps from start to end."""

    def at(self, step: int) -> float:
        """Return the value in a step, counted from 0."""
        if self.end is None:
            return self.start
        done = min(1.0, step / self.steps) if self.steps else 1.0
        return self.start + (self.end - self.start) * done

    @property
    def ever(self) -> bool:
        """Return whether it is more than 0 in any step."""
        return self.start > 0 or (self.end or 0) > 0

    @model_serializer
    def _short(self) -> Json:
        return self.start if self.end is None else {"start": self.start, "end": self.end, "steps": self.steps}


def _started(value: Json) -> Json:
    return {"start": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


Weight = Annotated[Schedule, BeforeValidator(_started)]


class StreamsSection(Section):
    """What tokens are learned from, each a weight or a schedule of it. A stream is a mean over its own tokens of the
    step, as algorithm.aggregation says, times its weight; at 0 it costs nothing."""

    policy: Weight = Schedule(start=1.0)
    """The policy loss, with its KL and entropy terms."""
    imitate: Weight = Schedule(start=0.0)
    """Cross entropy of the good rollouts (algorithm.imitate_from)."""
    distill: Weight = Schedule(start=0.0)
    """The divergence from `teacher` at each sampled token."""


class PartStreams(Section):
    """Weights of the token streams of one environment of a mixture, in place of those of algorithm.streams."""

    policy: Annotated[Schedule | None, BeforeValidator(_started)] = None
    """null: algorithm.streams.policy."""
    imitate: Annotated[Schedule | None, BeforeValidator(_started)] = None
    """null: algorithm.streams.imitate."""
    distill: Annotated[Schedule | None, BeforeValidator(_started)] = None
    """null: algorithm.streams.distill."""


def _teacher(value: Json) -> Json:
    if not isinstance(value, str):
        return value
    return {"url": value} if value.startswith(("http://", "https://")) else {"path": value}


class TeacherSection(Section):
    """A model that says how likely the sampled tokens are to it; a path or URL alone is short for it."""

    path: str | None = None
    """A model in the trainer's processes: `tiny`, a Hugging Face folder, a name on the hub, or `policy`, which is the
    one that is trained, as it is in each step (with a hint it teaches itself)."""
    url: str | None = None
    """A server that gives log-probs of a prompt's tokens, in place of `path`, such as http://HOST:30000."""
    kind: Literal["auto", "sglang", "vllm", "openai"] = "auto"
    """What the server speaks. openai: completions with echo and log-probs. auto: it is asked."""
    model: str | None = None
    """Name of the model at the server. null: the first that it lists."""
    key_from: str | None = None
    """Environment variable that holds the server's key. null: it asks for none."""
    concurrency: Annotated[Positive, Unit("requests")] = 32
    """Requests to the server in flight at once."""
    timeout: Seconds = 120.0
    """Time allowed for one request to the server."""
    retries: Annotated[Count, Unit("attempts")] = 3
    """Further attempts at a request to the server that failed."""
    form: Literal["auto", "full", "top_k", "sampled"] = "auto"
    """What is compared at each sampled token. full: the whole vocabulary, exact, for a `path` without a hint. top_k:
    the teacher's likeliest tokens, all others as one. sampled: the sampled token, a policy gradient. auto: full where
    it can be had; top_k for a path with a hint; sampled for a server."""
    top_k: Annotated[Positive, Unit("tokens")] = 32
    """Tokens that `form: top_k` compares one by one. A vLLM server gives 20, unless it was started with a higher
    --max-logprobs."""
    temperature: Above0 = 1.0
    """Temperature of a `path`'s distribution; servers give that of 1."""
    hint: str | None = None
    """Text that the teacher alone is given, at the end of the prompt's last user message; {column} is a column of the
    task's data, such as {answer}."""

    @model_validator(mode="after")
    def _one_place(self) -> "TeacherSection":
        if (self.path is None) == (self.url is None):
            raise ValueError("a teacher is either a `path` or a `url`")
        if self.form == "full" and (self.url is not None or self.hint is not None):
            raise ValueError("form: full compares whole vocabularies, which only a `path` without a hint gives")
        if self.kind == "openai" and self.form == "top_k":
            raise ValueError("kind: openai names tokens by their texts, so that form: top_k cannot be had: use sampled")
        if self.path == "policy" and self.hint is None:
            raise ValueError("path: policy teaches itself what it does already: give it a `hint`")
        return self

    @property
    def compared(self) -> str:
        """Return `form`, with `auto` resolved."""
        if self.form != "auto":
            return self.form
        return "sampled" if self.url is not None else "top_k" if self.hint is not None else "full"


class EnvPart(Section):
    """One environment of several that a recipe mixes."""

    name: str
    """An installed environment (`agentrl envs` lists them), or module:attribute."""
    source: str = "generated"
    """Where its tasks come from, as in env.source."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Further arguments of its class."""
    weight: Above0 = 1.0
    """Its share of the training tasks, relative to the weights of the others."""
    tools: tuple[str, ...] | None = None
    """Which of the recipe's tools its tasks offer. null: all."""
    streams: PartStreams | None = None
    """Weights of token streams for its samples. null: those of algorithm.streams."""
    teacher: Annotated[TeacherSection | None, BeforeValidator(_teacher)] = None
    """Its teacher. null: the recipe's."""


class EnvSection(Section):
    """The environment: it gives the tasks and computes the reward."""

    name: str = "gsm8k"
    """An installed environment (`agentrl envs` lists them), or module:attribute."""
    source: str = "generated"
    """Where tasks come from, in the environment's words: a generator, a file, a URL (s3://, gs://, https://), a name on
    the hub."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Further arguments of the environment's class."""
    mix: tuple[EnvPart, ...] = ()
    """Several environments at once, instead of `name`, `source` and `args`."""


class ToolSection(Section):
    """A tool, or a source of tools, that every task offers; `tools: [calculator]` is short for `{name: calculator}`."""

    name: str
    """An installed tool (`agentrl tools` lists them), or module:attribute."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Arguments of the tool's class."""


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
    max_turn_tokens: Tokens = 512
    """Tokens that the model may sample in one turn."""
    max_tokens: Tokens = 4096
    """Length of a whole conversation, prompt included."""
    max_total_tokens: Annotated[int, Field(gt=0), Unit("tokens")] | None = None
    """Tokens of all conversations of a request together, where `compact` or sub-agents make it several. null: as many
    as max_turns and max_tokens allow."""
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


class AgentSection(Section):
    """Who holds the conversation with the model, through the gateway, in place of the built-in driver;
    `agent: my_package.agents:solve` is short for `{name: my_package.agents:solve}`."""

    name: str | None = None
    """An installed agent, or module:attribute: a function `solve(task, client)`."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Further arguments of the function or class."""
    command: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    """A program instead of `name`, and its arguments, in which {prompt} is the opening's text. It finds the gateway by
    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and its task in $AGENTRL_TASK."""
    sandbox: bool = False
    """Run the program in bubblewrap: without a network but the gateway, and with no files but the system's, read-only,
    and its working folder."""
    sandbox_folders: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    """Further folders that a program in the sandbox may read, such as the one that it is installed in."""
    processes: Annotated[Count, Unit("processes")] = 0
    """Run the function or class in this many processes, many rollouts in each, so that it does not hold up sampling;
    one that dies fails its rollouts and is replaced. 0: in the run's own."""
    max_calls: Annotated[Positive, Unit("calls")] = 32
    """Calls of the model that one rollout may make."""
    max_total_tokens: Tokens = 65536
    """Tokens of a whole rollout, all of its branches together; rollout.max_tokens is the limit of one."""
    train_auxiliary: bool = False
    """Train also on calls without tools, of an agent that otherwise offers tools, whose answers it never repeats."""
    history: Literal["sampled", "template"] = "sampled"
    """What becomes of thinking that the chat template leaves out of earlier turns: `sampled` keeps it, so that a
    conversation stays one path; `template` goes on without it, from a branch that begins anew."""


class RewardSection(Section):
    """A reward function; `functions: [match]` is short for `{name: match}`."""

    name: str
    """An installed reward function (`agentrl rewards` lists them), or module:attribute."""
    part: str | None = None
    """Name of the reward part that it gives. null: its own name."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Arguments of its class or function."""
    processes: Annotated[Count, Unit("processes")] = 0
    """Run it in this many processes, each killed and replaced when a call takes too long; 0: in the run's own."""


class RewardsSection(Section):
    """Rewards beside those of environment and tools, and how parts are added up."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part, by its name; a part that is not named has weight 1."""
    functions: tuple[Annotated[RewardSection, BeforeValidator(_named)], ...] = ()
    """Reward functions besides environment and tools."""
    model: str | None = None
    """A sequence classifier, whose score of a finished trajectory is the part `model`."""


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


COMPARING = ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline")
"""Our own advantages that are 0 where a task has one sample."""


class _Function(Section):
    """A function with arguments of its own; written as its name alone where there are none."""

    name: str
    """Its name, or module:attribute."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Arguments of its own."""

    @model_serializer
    def _short(self) -> Json:
        return {"name": self.name, "args": self.args} if self.args else self.name


class AdvantageSection(_Function):
    """The advantage estimator; its name alone is short for `{name: NAME}`."""

    name: str
    """An advantage estimator (`agentrl advantages` lists them), or module:attribute."""


class LossSection(_Function):
    """The policy loss; its name alone is short for `{name: NAME}`."""

    name: str
    """A policy loss (`agentrl losses` lists them), or module:attribute."""


class AggregationSection(_Function):
    """The sum over tokens; its name alone is short for `{name: NAME}`."""

    name: str
    """token_mean: every token of an update counts the same. sequence_mean: every sample does. token_sum: the sum over
    tokens. sequence_sum: that of a sample, mean over samples. constant: that by rollout.max_tokens (Dr. GRPO). Or one
    that `agentrl aggregations` lists, or module:attribute."""


class FilterSection(_Function):
    """A filter of groups; its name alone is short for `{name: NAME}`."""

    name: str
    """An installed filter (`varied`), or module:attribute: a function from a `Group` to true or false."""


class RejectSection(Section):
    """What is left out of an update because the trainer's probabilities are too far from the engine's."""

    level: Literal["token", "sequence", "group"] = "sequence"
    """token: the tokens beyond a bound. sequence: all tokens of a sample. group: all samples of a task."""
    by: Literal["ratio", "k2", "k3"] = "ratio"
    """ratio: trainer's probability over the engine's, d its logarithm. k2: d^2 / 2. k3: exp(d) - 1 - d."""
    over: Literal["mean", "sum", "max", "min"] = "mean"
    """How the tokens of a sample, or of a task, are taken together; the ratio by its logarithm: `mean` is the geometric
    mean, `sum` the ratio of the whole."""
    low: Above0 | None = None
    """Lower bound. With `over: min` and 1e-4: one token that the trainer finds all but impossible."""
    high: Above0 | None = None
    """Upper bound."""

    @model_validator(mode="after")
    def _bounds(self) -> "RejectSection":
        if self.low is None and self.high is None:
            raise ValueError("set low, high, or both: without a bound nothing is left out")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low is {self.low}, above high, {self.high}: everything would be left out")
        return self


class DynamicSamplingSection(Section):
    """Dynamic sampling (DAPO, arXiv:2503.14476): further tasks are sampled in place of groups that are left out."""

    budget: Annotated[float, Field(ge=1), Unit("times rollout.tasks")] = 3.0
    """Groups that a step may sample, those left out included; where they are used up, it trains on what it has."""


class OverlongSection(Section):
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13)."""

    buffer: Above0 = 0.2
    """Where it begins before the limit, `rollout.max_tokens` of a conversation: a share of the limit, or, above 1, a
    number of tokens."""
    factor: Above0 = 1.0
    """What a conversation at the limit loses of its reward, and each that was cut by a limit of tokens."""


class OrderSection(_Function):
    """An order of tasks; its name alone is short for `{name: NAME}`."""

    name: str
    """An installed order (`agentrl orders` lists them), or module:attribute."""


class TaskFilterSection(_Function):
    """A filter of tasks; its name alone is short for `{name: NAME}`."""

    name: str
    """module:attribute, a function from a `Task` to true or false, or an installed one."""


class DataSection(Section):
    """Which of the environment's tasks are trained on, in which order, and how often."""

    order: Annotated[OrderSection, BeforeValidator(_named)] = OrderSection(name="shuffled")
    """shuffled: anew in each epoch. sequential: as they stand in the data. curriculum: those near a success rate of
    args.target (0.5) most, as training measures it. Or one's own."""
    filter: Annotated[TaskFilterSection | None, BeforeValidator(_named)] = None
    """Which tasks are trained on. null: all."""
    epochs: Annotated[float, Field(gt=0), Unit("passes over the tasks")] | None = None
    """How long to train, in place of train.steps, which becomes epochs x tasks / rollout.tasks, rounded up. null:
    train.steps."""


class ReferenceSection(Section):
    """How the reference of the KL follows the policy."""

    every: Annotated[Positive | None, Unit("steps")] = None
    """Steps between two moves of the reference. null: it moves after each step."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """What the reference keeps of its weights in a move: reference = ema * reference + (1 - ema) * policy. null: it
    becomes a copy of the policy."""

    @model_validator(mode="after")
    def _moves(self) -> "ReferenceSection":
        if self.every is None and self.ema is None:
            raise ValueError("set every, ema, or both; for the policy before training, leave out the whole section")
        return self


class AlgorithmSection(Section):
    """Advantages and the policy loss; the name of a preset alone is short for `{preset: NAME}`."""

    preset: str | None = None
    """Published settings that the other keys here change (`agentrl presets` lists them). null: the defaults below."""
    advantage: Annotated[AdvantageSection, BeforeValidator(_named)] = AdvantageSection(name="grpo")
    gamma: Fraction = 1.0
    """Discount for each sampled token (gae, reinforce_plus_plus), or for each turn (turn)."""
    lam: Fraction = 1.0
    """Lambda of gae: 1 takes returns as they come, 0 relies on the critic."""
    loss: Annotated[LossSection, BeforeValidator(_named)] = LossSection(name="ppo_clip")
    clip_low: Fraction = 0.2
    """How far below 1 the probability ratio may fall before it is clipped."""
    clip_high: AtLeast0 = 0.2
    """How far above 1 the probability ratio may rise before it is clipped."""
    clip_dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: bound of the ratio where the advantage is negative (arXiv:1912.09729). null: off."""
    kl_coef: AtLeast0 = 0.0
    """Coefficient of the KL divergence from the reference model; 0: no reference is kept."""
    reference: ReferenceSection | None = None
    """How the reference follows the policy. null: it stays the policy before training."""
    kl_target: Above0 | None = None
    """KL per token that kl_coef is moved towards after each step, beginning at kl_coef (arXiv:1909.08593, section 2.2).
    null: kl_coef stays what it is."""
    kl_horizon: Annotated[Positive, Unit("samples")] = 10_000
    """Samples after which kl_coef, if the KL stays a fifth or more above kl_target, has grown by about a fifth."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the KL is a term beside the policy loss. reward: that of each token is subtracted from its reward."""
    kl_estimator: Literal["auto", "k1", "abs", "k2", "k3", "k1+", "k3+"] = "auto"
    """Estimate of each token's KL (Schulman 2020). auto: k3 in the loss, k1 in the reward. With `+` its gradient is
    that of k2, which is in expectation that of the KL."""
    entropy_coef: AtLeast0 = 0.0
    """Coefficient of the entropy bonus."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of an update's sampled tokens, those of the highest entropy, that carry the policy gradient
    (arXiv:2506.01939: 0.2)."""
    aggregation: Annotated[AggregationSection, BeforeValidator(_named)] = AggregationSection(name="token_mean")
    off_policy: Literal["auto", "none", "token_tis", "sequence_tis", "token_mask"] = "auto"
    """Importance weight of a token that the engine sampled with another probability than the trainer's. auto:
    token_tis where the two are apart (an engine other than `local`, rollout.overlap, or `local` beside mixed precision,
    which it does not sample in), else none."""
    off_policy_cap: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of the importance weights."""
    routing_replay: bool = False
    """Of a mixture of experts: train with the experts that the engine chose for each token (arXiv:2510.11370)."""
    streams: StreamsSection = StreamsSection()
    """What tokens are learned from."""
    imitate_from: float | None = None
    """Least reward of a rollout that `streams.imitate` imitates. null: more than the mean of its group."""
    reject: Annotated[tuple[RejectSection, ...], BeforeValidator(_listed)] = ()
    """What is left out of an update because trainer and engine disagree; what any of the rules names is."""
    filter: Annotated[FilterSection | None, BeforeValidator(_named)] = None
    """Which groups are trained on. null: all; with dynamic_sampling `varied`, those whose rewards differ."""
    dynamic_sampling: DynamicSamplingSection | None = None
    """Sample further tasks in place of groups that `filter` leaves out; `{}` takes the defaults of its keys. null: a
    step has fewer groups."""
    overlong: OverlongSection | None = None
    """Take off the reward of conversations that come near the limit of tokens, for learning alone; `{}` takes the
    defaults of its keys. null: nothing."""
    leave_out: Annotated[
        tuple[Literal["length", "max_turns", "max_tool_calls", "timeout"], ...], BeforeValidator(_listed)
    ] = ()
    """Finish reasons whose samples are left out of the loss; their rewards count in the comparison with the others.
    [length]: DAPO's overlong filter. [length, max_turns, timeout]: whatever was cut off."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Json) -> Json:
        given = {"preset": given} if isinstance(given, str) else given
        if not isinstance(given, dict) or not isinstance(name := given.get("preset"), str):
            return given
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}{nearest(name, PRESETS)}")
        return {**PRESETS[name].keys, **given}

    @model_validator(mode="after")
    def _target(self) -> "AlgorithmSection":
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target moves kl_coef, which is 0: set kl_coef to where it begins")
        if self.reference is not None and self.kl_coef == 0:
            raise ValueError("reference moves the reference of the KL, but kl_coef is 0, so there is none: set kl_coef")
        return self


class TrainSection(Section):
    """Steps, optimizer and checkpoints."""

    steps: Steps = 100
    """Training steps, each of one batch of samples."""
    lr: Above0 = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: Steps = 0
    """Steps in which the learning rate rises from 0 to its peak."""
    warmup_ratio: Fraction = 0.0
    """The same as a share of `steps`, in place of warmup_steps."""
    min_lr_ratio: Fraction = 0.0
    """Where cosine and linear end, as a share of the peak."""
    cycles: Positive = 1
    """Times that cosine and linear fall from the peak to the end (warm restarts)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of AdamW's two moving averages."""
    weight_decay: AtLeast0 = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Above0 = 1.0
    """Gradients with a larger norm are scaled down to it."""
    mini_batches: Annotated[Positive, Unit("updates per epoch")] = 1
    """Optimizer updates in each epoch, each on its part of the step's samples."""
    epochs: Annotated[Positive, Unit("passes")] = 1
    """Passes over a step's samples."""
    micro_batch_tokens: Tokens = 16384
    """Packed tokens of one forward pass. It bounds memory and changes no gradient."""
    save_every: Steps = 50
    """Steps between checkpoints; 0: at the end only."""
    keep: Annotated[Positive, Unit("checkpoints")] = 2
    """Newest checkpoints to keep, besides the best one."""
    mirror: str | None = None
    """A URL that fsspec opens (s3://BUCKET/runs/a, gs://...), to which the run folder is copied after each checkpoint
    while the run goes on; `--resume URL` goes on from it on any machine. null: none."""
    seed: int = 0
    """Seed of all randomness of a run."""
    threads: Annotated[Count, Unit("threads")] = 0
    """Threads of torch on a CPU; 0: one for each core."""

    @property
    def warmup(self) -> int:
        """Return the steps of the warm-up."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * self.steps)

    @model_validator(mode="after")
    def _one_warmup(self) -> "TrainSection":
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio say the same: set one of them")
        if self.schedule == "constant" and (self.cycles > 1 or self.min_lr_ratio):
            key = "cycles" if self.cycles > 1 else "min_lr_ratio"
            raise ValueError(f"{key} has no effect with the schedule constant: choose cosine or linear")
        return self


class EvalSection(Section):
    """Evaluation on held-out tasks."""

    every: Steps = 20
    """Steps between evaluations on the split for validation; 0: before and after training only."""
    before: bool = True
    """Evaluate before training too."""
    tasks: Annotated[Positive, Unit("tasks")] = 128
    """Tasks of each split."""
    samples: Annotated[Positive, Unit("samples per task")] = 1
    """Samples of each task."""
    temperature: AtLeast0 | None = None
    """Sampling temperature. null: that of rollout, as for the keys up to max_tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[Count, Unit("tokens")] | None = None
    """Sample from this many of the likeliest tokens; 0: from all."""
    max_turns: Annotated[Positive, Unit("turns")] | None = None
    """Assistant turns of a request."""
    max_turn_tokens: Tokens | None = None
    """Tokens that the model may sample in one turn."""
    max_tokens: Tokens | None = None
    """Length of a whole conversation, prompt included."""
    splits: tuple[str, ...] | None = None
    """Held-out splits to evaluate before and after training. null: all but validation."""


class SftStage(Section):
    """One stage of supervised training."""

    style: str = "clean"
    """Style of demonstrations, as the environment's `demonstrate` knows it; without effect beside sft.source."""
    steps: Positive | None = None
    """Training steps of the stage. null: as many as `epochs` takes; of demonstrations, which have no end, 1000."""
    epochs: Above0 = 1.0
    """Passes over the conversations of sft.source, where steps is null."""
    lr: Above0 | None = None
    """Peak learning rate. null: 1e-3 for a new model, 1e-4 for an adapter, else 1e-5."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Course of the learning rate after the warm-up."""
    min_lr_ratio: Fraction = 0.03
    """The learning rate falls to this share of its peak, and no lower."""
    batch: Annotated[Positive, Unit("conversations per step")] = 32
    """Conversations of each step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks, AdamW for the rest. It wants one process."""
    muon_lr: Above0 = 0.02
    """Muon's peak learning rate; it follows the same schedule as lr."""
    warmup_steps: Steps | None = None
    """Steps in which the learning rate rises from 0 to its peak. null: 60; beside sft.source a tenth of the stage."""
    weight_decay: AtLeast0 = 0.05
    """Weight decay of the optimizer."""


QWEN3 = {
    "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
"""Shape of a new model, by the names of Hugging Face's Qwen3Config, with the defaults."""


def _qwen3(config: dict[str, int]) -> dict[str, int]:
    for name in config:
        if name not in QWEN3:
            raise ValueError(f"{name!r} is not part of the model's shape{nearest(name, QWEN3)}")
    return QWEN3 | config


QWEN3_VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2,
    "num_position_embeddings": 256,
}  # fmt: skip
"""Shape of a new model's vision tower, by the names of Qwen3VLVisionConfig, with the defaults."""


def _qwen3_vision(config: dict[str, int] | None) -> dict[str, int] | None:
    for name in config or ():
        if name not in QWEN3_VISION:
            raise ValueError(f"{name!r} is not part of the vision tower's shape{nearest(name, QWEN3_VISION)}")
    return None if config is None else QWEN3_VISION | config


class NewModel(Section):
    """A model (Qwen3 architecture, Qwen3-VL with `vision`) and tokenizer made from nothing, instead of starting from
    `model.path`."""

    config: Annotated[dict[str, Positive], AfterValidator(_qwen3)] = Field(QWEN3, validate_default=True)
    """Shape of the model, by the names of Hugging Face's Qwen3Config."""
    vision: Annotated[dict[str, Positive] | None, AfterValidator(_qwen3_vision)] = None
    """Shape of a tower that turns images into features, by the names of Qwen3VLVisionConfig; `{}` takes the defaults.
    null: none."""
    vocabulary: Tokens = 832
    """Size of the tokenizer's vocabulary."""
    texts: Annotated[Positive, Unit("demonstrations")] = 16_000
    """Demonstrations, over all splits, that the tokenizer learns from."""
    chat_template: str
    """A jinja file, relative to the recipe."""
    tokens: tuple[str, ...] = ()
    """Texts that become one token each, such as the frame of a call's JSON."""


class SftSelect(Section):
    """Which stored rollouts `sft.source` takes, where it is the folder of a run or of an evaluation."""

    split: str | None = None
    """Split of their tasks. null: train, or every split that is stored where it is not."""
    reward: float | None = None
    """Least reward. null: any."""
    turns: Annotated[Positive, Unit("turns")] | None = None
    """Most assistant turns. null: any."""
    best: bool = False
    """Only those whose reward is the highest of their task."""
    distinct: bool = False
    """Of rollouts of a task with the same tokens only one."""
    per_task: Annotated[Positive, Unit("rollouts")] | None = None
    """At most so many of a task: the highest rewards first, then those that were sampled first. null: all."""


class SftSection(Section):
    """Supervised fine-tuning on conversations, or on an environment's demonstrations (`agentrl sft`)."""

    source: str | None = None
    """Conversations: a .jsonl or .parquet file, a folder of them, a hub name, module:function, or the folder of a run
    or evaluation, whose rollouts are taken with their token ids. null: the environment's demonstrations."""
    format: Literal["openai", "sharegpt"] = "openai"
    """Form of a row: openai (`messages`, and `tools` where there are any) or sharegpt (`conversations`, `system`,
    `tools`)."""
    images: str = "images"
    """Column with a row's image, or a list of them: paths, `{bytes, path}`, data: URLs. They stand where the messages
    say `<image>`, or hold a part of type image without one."""
    image_folder: str | None = None
    """Folder against which paths of images stand. null: the folder of the row's file."""
    image_urls: Literal["refuse", "public", "any"] = "refuse"
    """What is done about images that are http addresses: refuse them, fetch them from public machines, or from any,
    those of one's own network included."""
    learn: Literal["all", "last", "flagged"] = "all"
    """Which assistant turns are learned: all but those whose message says `weight: 0` or `train: false`; the last; or
    only those whose message says `weight: 1` or `train: true`."""
    history: Literal["sampled", "template"] = "sampled"
    """Earlier turns of a row: `sampled` keeps them as they were said, as rollouts do; `template` lays out a path for
    each learned turn, with what is before it as the chat template writes it by then."""
    select: SftSelect = SftSelect()
    retokenize: bool = False
    """Lay out stored rollouts anew by their messages, for a model with another tokenizer than the one they are of."""
    max_tokens: Tokens | None = None
    """Longest conversation; longer ones are refused. null: the model's context."""
    held_out: float | str = 0.0
    """Conversations that are not learned, and whose loss is measured every eval.every steps: a share of the source, a
    file, or another split of the hub's."""
    accuracy: bool | None = None
    """Measure held-out accuracy on the recipe's environment, as `eval` says. null: if the recipe has a source and names
    an environment."""
    new_model: NewModel | None = None
    """Make a model from nothing. null: start from `model.path`."""
    stages: Annotated[tuple[SftStage, ...], Field(min_length=1)] = (SftStage(),)
    """Stages of training, one after the other."""

    @model_validator(mode="after")
    def _sources(self) -> "SftSection":
        if self.source is not None and self.new_model is not None:
            raise ValueError("sft.new_model learns its tokenizer from demonstrations: leave out sft.source")
        if isinstance(self.held_out, float) and not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out:g}, and a share lies between 0 and 1")
        if self.source is None and self.held_out:
            raise ValueError("sft.held_out is a part of sft.source: demonstrations are made anew for each step")
        return self


class RewardModelSection(Section):
    """Training of a reward model on pairs of conversations (`agentrl reward-model`)."""

    source: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_listed)]
    """Files of pairs (.jsonl, .json, .parquet), run folders whose rollouts are compared, or both."""
    pairs_per_group: Annotated[Positive, Unit("pairs")] = 4
    """Most pairs that are drawn from the rollouts of one group of a run folder."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the pairs that is held out, by whole prompts; 0: none."""
    eval_every: Steps = 50
    """Steps between evaluations on the held-out pairs; 0: before and after training only."""
    epochs: Annotated[Positive, Unit("epochs")] = 1
    """Passes over the pairs."""
    batch: Annotated[Positive, Unit("pairs per step")] = 64
    """Pairs of each step."""
    lr: Above0 = 1e-5
    """Peak learning rate; it falls to 0 by a cosine."""
    warmup_steps: Steps = 0
    """Steps in which the learning rate rises from 0 to its peak."""
    weight_decay: AtLeast0 = 0.0
    """Weight decay of the optimizer."""


class CriticSection(Section):
    """A value model, trained beside the policy, for advantages that need one (gae)."""

    path: str | None = None
    """The model whose backbone it starts from. null: model.path."""
    lr: Above0 = 1e-5
    """Peak learning rate; it follows the schedule and warm-up of `train`."""
    warmup_steps: Steps = 0
    """Steps at the start in which only the critic learns."""
    clip: Above0 = 0.2
    """How far a value may move in the updates of one step."""


class PoolSection(Section):
    """Workers of their own for some roles, apart from the actor's."""

    roles: Annotated[tuple[Literal["reference", "critic", "reward_model"], ...], Field(min_length=1)]
    """Roles that these workers hold."""
    workers: Workers = 1
    """Processes of the pool."""


class OffloadSection(Section):
    """What lies in CPU memory while nothing computes with it; `offload: true` is short for parameters and optimizer."""

    parameters: bool = False
    """Weights and gradients: each layer is brought to the GPU as it computes. For workers on a cluster."""
    optimizer: bool = False
    """The optimizer's moments: they are brought to the GPU for its step, when activations are freed."""
    activations: bool = False
    """What activation checkpointing keeps of each layer until the backward pass."""


def _offloaded(value: Json) -> Json:
    return {"parameters": value, "optimizer": value} if isinstance(value, bool) else value


class ClusterSection(Section):
    """Processes, machines and GPUs of the trainer."""

    workers: Workers = 1
    """Processes that train together; 1: the run's own, without Ray."""
    nodes: Annotated[Positive, Unit("machines")] = 1
    """Machines that the workers are spread over."""
    gpus: Annotated[Count, Unit("GPUs per machine")] = 0
    """GPUs of each machine, one for each worker: workers = nodes x gpus; 0: on CPUs."""
    address: str | None = None
    """Address of a running Ray cluster (`auto`: the one on this machine). null: one is started."""
    restarts: Annotated[Count, Unit("restarts")] = 0
    """Times that the run continues from its last checkpoint by itself after it lost a worker."""
    timeout: Seconds = 600.0
    """Time without an answer, or a finished micro-batch, after which a worker counts as lost."""
    pools: tuple[PoolSection, ...] = ()
    """Workers for roles that do not share the actor's."""
    shard: Annotated[Count, Unit("workers")] = 0
    """Workers that hold one copy of the weights together; 0: all of them. Fewer: HSDP."""
    offload: Annotated[OffloadSection, BeforeValidator(_offloaded)] = OffloadSection()
    """What lies in CPU memory while nothing computes with it; true: parameters and optimizer."""
    sequence_parallel: Workers = 1
    """Workers that share each sequence (Ulysses, arXiv:2309.14509)."""

    @property
    def size(self) -> int:
        """Return the number of the actor's workers."""
        return self.nodes * self.gpus if self.gpus else self.workers

    @property
    def used(self) -> bool:
        """Return whether other processes do the tensor work."""
        return self.size > 1 or self.address is not None or bool(self.pools) or self.gpus > 0


class ProfileSection(Section):
    """Traces of single steps."""

    steps: Annotated[tuple[int, ...], BeforeValidator(_listed), Unit("steps")] = ()
    """Steps to write a trace of, by their numbers."""


class TrajectoriesSection(Section):
    """Which conversations a run writes down."""

    every: Steps = 1
    """Steps between two that are written; 0: none is, and no evaluation either."""
    keep: Annotated[Count, Unit("files")] = 200
    """Newest files of steps, and of evaluations of each split beside the first, that are kept; 0: all."""
    sample: Annotated[Count, Unit("tasks")] = 0
    """Tasks of a step that are written, with all of their samples; 0: all. Evaluations are written whole."""


def _switched(value: Json) -> Json:
    return {"every": int(value)} if isinstance(value, bool) else value


class TrackerSection(Section):
    """A tracker; `trackers: [tensorboard]` is short for `{name: tensorboard}`."""

    name: str
    """An installed tracker (`agentrl trackers` lists them), or module:attribute."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Arguments of the tracker's class, such as project, run and tags."""


class TrackSection(Section):
    """What a run writes besides metrics.jsonl and the display."""

    trackers: tuple[Annotated[TrackerSection, BeforeValidator(_named)], ...] = ()
    """Further trackers, such as tensorboard, wandb, mlflow and trackio."""
    trajectories: Annotated[TrajectoriesSection, BeforeValidator(_switched)] = TrajectoriesSection()
    """Samples in trajectories/step_N.parquet and eval_SPLIT_N.parquet; `false` is short for `{every: 0}`."""


class Recipe(Section):
    """A whole run, checked. `Recipe.load(path, overrides)` reads one."""

    model: ModelSection = ModelSection()
    env: EnvSection = EnvSection()
    data: DataSection = DataSection()
    tools: tuple[Annotated[ToolSection, BeforeValidator(_named)], ...] = ()
    """Tools that every task offers."""
    rewards: RewardsSection = RewardsSection()
    rollout: RolloutSection = RolloutSection()
    agent: Annotated[AgentSection | None, BeforeValidator(_named)] = None
    """Who holds the conversation; null: the built-in driver, which calls the tools that the model asks for."""
    engine: EngineSection = EngineSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    sft: SftSection | None = None
    """Supervised fine-tuning, for `agentrl sft`. null: none."""
    teacher: Annotated[TeacherSection | None, BeforeValidator(_teacher)] = None
    """Teaches the sampled tokens (algorithm.streams.distill). null: none."""
    critic: CriticSection | None = None
    """Train a critic; `{}` takes the defaults of its keys. null: none."""
    reward_model: RewardModelSection | None = None
    """Training of a reward model, for `agentrl reward-model`. null: none."""
    cluster: ClusterSection = ClusterSection()
    track: TrackSection = TrackSection()
    profile: ProfileSection = ProfileSection()
    output: str | None = None
    """The run folder. null: runs/<recipe>-<number>."""
    _references: dict[Key, Reference] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path | None, overrides: Sequence[str] = ()) -> "Recipe":
        """Read, extend, override and check a recipe: a file, the name of one that ships, or None for the defaults.

        overrides: `rollout.n=16`, `env.args.names=[a, b]`, `tools.0.args.max_operations=4` (or
        `tools.calculator.args...`); the value is YAML and replaces what stands at its key.
        Raises UserError: one line with the key's path and what to do.
        """
        recipe, references = read_recipe(cls, path, overrides)
        recipe._references = dict(references)
        return recipe

    def written(self) -> dict[str, Json]:
        """Return every key as JSON values, with a Reference where a `${VAR}` stood and its value is still the same.

        Write, print and send this, not `model_dump`: values of variables may be secrets.
        """
        tree = self.model_dump(mode="json")
        for key, reference in self._references.items():
            _refer(tree, key, reference)
        return tree

    def shown(self) -> dict[str, Json]:
        """Return every key as JSON values for people: secrets hidden, `${VAR}` where one stood."""
        found: dict[str, Json] = plain(masked(self.written()))
        return found

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the values of `${VAR}` that must not be written down anywhere."""
        return secret_values(self._references)

    @property
    def roles(self) -> list[str]:
        """Return the parts that do tensor work beside the engine: actor; reference, critic, reward_model if used."""
        used = {
            "actor": True,
            "reference": self.algorithm.kl_coef > 0,
            "critic": self.critic is not None,
            "reward_model": self.rewards.model is not None,
        }
        return [role for role, needed in used.items() if needed]

    @model_validator(mode="after")
    def _combinations(self) -> "Recipe":
        if twice := {t.name for t in self.tools if self.tools.count(t) > 1}:
            raise ValueError(f"tools: {', '.join(sorted(twice))} is listed twice")
        for key in ("name", "source", "args") if self.env.mix else ():
            default = EnvSection.model_fields[key].get_default(call_default_factory=True)
            if getattr(self.env, key) != default:
                raise ValueError(
                    f"env.{key} has no effect beside env.mix: set it in the parts, and leave it at {default!r}"
                )
        for key in ("compact", "max_total_tokens") if self.agent is not None else ():
            if getattr(self.rollout, key) is not None:
                raise ValueError(f"rollout.{key} has no effect beside agent, which holds its conversations itself")
        if self.algorithm.reference is not None and self.model.lora is not None:
            raise ValueError(
                "algorithm.reference: with model.lora the reference is the model without its adapter, which cannot "
                "follow the policy: leave out one of the two"
            )
        self._check_cluster()
        most = self.train.steps if self.data.epochs is None else max(self.profile.steps, default=0)
        if never := [step for step in self.profile.steps if not 1 <= step <= most]:
            raise ValueError(f"profile.steps: there is no step {never[0]}; train.steps is {self.train.steps}")
        if self.engine.sleep and self.rollout.overlap != "none":
            raise ValueError("engine.sleep stops sampling during training, rollout.overlap does not: choose one")
        if self.rollout.oversample > 1 and self.rollout.overlap != "none":
            raise ValueError(
                "rollout.oversample abandons what is slow, rollout.overlap lets it go on (async) or waits for it "
                "(one_step): choose one"
            )
        if self.rollout.max_turn_tokens > self.rollout.max_tokens:
            raise ValueError("rollout.max_turn_tokens is larger than rollout.max_tokens, so it can never be reached")
        if self.train.mini_batches > self.rollout.n * self.rollout.tasks:
            raise ValueError("train.mini_batches is larger than rollout.n x rollout.tasks: some would be empty")
        self._check_streams()
        compared = self.algorithm.advantage.name in COMPARING and any(p.policy.ever for p in self.streams)
        if self.rollout.n < 2 and compared and self.train.steps > 0:
            name = self.algorithm.advantage.name
            raise ValueError(f"rollout.n is 1, but {name} compares the samples of a task: use 2 or more")
        return self

    @property
    def streams(self) -> tuple[StreamsSection, ...]:
        """Return the weights of the token streams of each environment of the mixture; of the only one without."""
        whole = self.algorithm.streams
        own = [part.streams or PartStreams() for part in self.env.mix] or [PartStreams()]
        return tuple(
            whole.model_copy(update={name: value for name, value in part if value is not None}) for part in own
        )

    @property
    def teachers(self) -> tuple[TeacherSection | None, ...]:
        """Return the teacher of each environment of the mixture, of the only one without; None where nothing is
        distilled."""
        own = [part.teacher or self.teacher for part in self.env.mix] or [self.teacher]
        return tuple(t if s.distill.ever else None for t, s in zip(own, self.streams, strict=True))

    def _check_streams(self) -> None:
        for streams, teacher in zip(self.streams, self.teachers, strict=True):
            if streams.distill.ever and teacher is None:
                raise ValueError("algorithm.streams.distill needs a teacher: name a model's path or a URL in `teacher`")
            if not (streams.policy.ever or streams.imitate.ever or streams.distill.ever):
                raise ValueError("algorithm.streams: all weights are 0, so nothing would be learned")
        if self.cluster.sequence_parallel > 1 and any(
            t is not None and t.path is not None and t.compared != "sampled" for t in self.teachers
        ):
            raise ValueError(
                "cluster.sequence_parallel gives log-probs of sampled tokens alone: set teacher.form: sampled"
            )
        named = [self.teacher, *(part.teacher for part in self.env.mix)]
        if any(t is not None and t not in self.teachers for t in named):
            raise ValueError("a teacher has no effect where algorithm.streams.distill is 0: give it a weight")

    def _check_cluster(self) -> None:
        cluster = self.cluster
        if cluster.gpus and cluster.workers not in (1, cluster.size):
            raise ValueError(
                f"cluster.workers is {cluster.workers}, but nodes x gpus is {cluster.size}: leave out workers"
            )
        for key, value in (("shard", cluster.shard), ("sequence_parallel", cluster.sequence_parallel)):
            if value and cluster.size % value:
                raise ValueError(f"cluster.{key} is {value}, which does not divide the {cluster.size} workers")
        if cluster.nodes > cluster.size:
            raise ValueError(f"cluster.nodes is {cluster.nodes}, but there are only {cluster.size} workers")
        if cluster.restarts and not cluster.used:
            raise ValueError("cluster.restarts is for workers on a cluster: set cluster.workers, or leave it at 0")
        if cluster.offload.parameters and not cluster.used:
            raise ValueError(
                "cluster.offload.parameters is for workers on a cluster; a single process keeps its weights on "
                "model.device: set cluster.workers or cluster.gpus, or leave it out"
            )
        if cluster.offload.activations and not self.model.checkpointing:
            raise ValueError(
                "cluster.offload.activations moves what activation checkpointing keeps: set model.checkpointing, or "
                "leave it out"
            )
        roles = [role for pool in cluster.pools for role in pool.roles]
        for role in roles:
            if roles.count(role) > 1:
                raise ValueError(f"cluster.pools: {role} is in two of them")
        if self.algorithm.reference is not None and "reference" in roles:
            raise ValueError(
                "cluster.pools: a reference that follows the policy (algorithm.reference) copies its shards on the "
                "actor's workers: leave reference out of the pools"
            )
        absent = {"critic": self.critic is None, "reward_model": self.rewards.model is None}
        absent["reference"] = self.algorithm.kl_coef == 0 or self.model.lora is not None
        if idle := [role for role in roles if absent[role]]:
            raise ValueError(f"cluster.pools: this recipe has no {idle[0]} to place there")


def _refer(tree: Json, key: Key, reference: Reference) -> None:
    """Put `reference` at `key`; what may be written short (`tools: [name]`, `lora.targets: x`) is long in a tree."""
    place: Json = {"": tree}
    step: str | int = ""
    for part in key:
        place, step = place[step], part
        known = part in place if isinstance(place, dict) else isinstance(place, list) and 0 <= int(part) < len(place)
        if not known:
            return
    found = place[step]
    if isinstance(found, dict) and "name" in found:
        place, step = found, "name"
    elif isinstance(found, list) and len(found) == 1:
        place, step = found, 0
    if place[step] == reference.value:
        place[step] = reference
