"""`algorithm`, `teacher` and `critic`: what is learned from the samples."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, RootModel, model_serializer, model_validator

from agentrl.errors import nearest
from agentrl.jsonable import Json
from agentrl.recipe.presets import PRESETS
from agentrl.recipe.sections.section import (
    Above0,
    AtLeast0,
    Count,
    Fraction,
    FunctionSection,
    Positive,
    Seconds,
    Section,
    Steps,
    Unit,
    listed,
    named,
)


class Schedule(RootModel[dict[Count, AtLeast0]]):
    """A number that may change over the steps of a run: its values by step, between which it changes evenly. A number
    alone is one that stays what it is."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def constant(cls, value: float) -> "Schedule":
        """One that stays what it is."""
        return cls({0: value})

    def at(self, step: int) -> float:
        """The value in a step, counted from 0."""
        points = sorted(self.root.items())
        for (first, start), (last, end) in pairwise(points):
            if step < last:
                return start + (end - start) * (max(0, step - first) / (last - first))
        return points[-1][1]

    @property
    def ever(self) -> bool:
        """Whether it is more than 0 in any step."""
        return any(self.root.values())

    @model_validator(mode="before")
    @classmethod
    def _written_short(cls, given: Json) -> Json:
        if isinstance(given, int | float) and not isinstance(given, bool):
            return {0: given}
        if not isinstance(given, dict) or not given:
            raise ValueError("expected a number, or a number for each of some steps, such as {0: 1.0, 100: 0.1}")
        return {int(step) if str(step).isdecimal() else step: value for step, value in given.items()}

    @model_serializer
    def _short(self) -> Json:
        return self.root[0] if list(self.root) == [0] else self.root


class StreamsSection(Section):
    """What tokens are learned from, each a weight, or a schedule of it: `{0: 1.0, 100: 0.1}` goes evenly from 1 at the
    start to 0.1 after 100 steps. A stream is a mean over its own tokens of the step, as algorithm.aggregation says,
    times its weight; at 0 it costs nothing."""

    policy: Schedule = Schedule.constant(1.0)
    """The policy loss, with its KL and entropy terms."""
    imitate: Schedule = Schedule.constant(0.0)
    """Cross entropy of the good rollouts (algorithm.imitate_from)."""
    distill: Schedule = Schedule.constant(0.0)
    """The divergence from `teacher` at each sampled token."""


def teacher_of(value: Json) -> Json:
    """`{path: TEXT}` for a text alone, which is short for it."""
    return {"path": value} if isinstance(value, str) else value


class TeacherSection(Section):
    """A model that says how likely the sampled tokens are to it; a path or URL alone is short for it."""

    path: str
    """A model in the trainer's processes: `tiny`, a Hugging Face folder, a name on the hub, or `policy`, which is the
    one that is trained, as it is in each step (with a hint it teaches itself). Or the URL of a server that gives
    log-probs of a prompt's tokens, such as http://HOST:30000."""
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
    """What is compared at each sampled token. full: the whole vocabulary, exact, for a model here without a hint.
    top_k: the teacher's likeliest tokens, all others as one. sampled: the sampled token, a policy gradient. auto: full
    where it can be had; top_k for a model here with a hint; sampled for a server."""
    top_k: Annotated[Positive, Unit("tokens")] = 32
    """Tokens that `form: top_k` compares one by one. A vLLM server gives 20, unless it was started with a higher
    --max-logprobs."""
    temperature: Above0 = 1.0
    """Temperature of the distribution of a model here; servers give that of 1."""
    hint: str | None = None
    """Text that the teacher alone is given, at the end of the prompt's last user message; {column} is a column of the
    task's data, such as {answer}."""

    @model_validator(mode="after")
    def _possible(self) -> "TeacherSection":
        if self.form == "full" and (self.served or self.hint is not None):
            raise ValueError("form: full compares whole vocabularies, which only a model here without a hint gives")
        if self.kind == "openai" and self.form == "top_k":
            raise ValueError("kind: openai names tokens by their texts, so that form: top_k cannot be had: use sampled")
        if self.path == "policy" and self.hint is None:
            raise ValueError("path: policy teaches itself what it does already: give it a `hint`")
        return self

    @property
    def served(self) -> bool:
        """Whether it is a server, and no model in the trainer's processes."""
        return self.path.startswith(("http://", "https://"))

    @property
    def compared(self) -> str:
        """`form`, with `auto` resolved."""
        if self.form != "auto":
            return self.form
        return "sampled" if self.served else "top_k" if self.hint is not None else "full"


COMPARING = ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline")
"""Our own advantages that are 0 where a task has one sample."""


class AdvantageSection(FunctionSection):
    """The advantage estimator; its name alone is short for `{name: NAME}`."""

    name: str
    """An advantage estimator (`agentrl advantages` lists them), or module:attribute."""


class LossSection(FunctionSection):
    """The policy loss; its name alone is short for `{name: NAME}`."""

    name: str
    """A policy loss (`agentrl losses` lists them), or module:attribute."""


class AggregationSection(FunctionSection):
    """The sum over tokens; its name alone is short for `{name: NAME}`."""

    name: str
    """token_mean: every token of an update counts the same. sequence_mean: every sample does. token_sum: the sum over
    tokens. sequence_sum: that of a sample, mean over samples. constant: that by rollout.max_tokens (Dr. GRPO). Or one
    that `agentrl aggregations` lists, or module:attribute."""


class FilterSection(FunctionSection):
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


_FUNCTIONS = ("advantage", "loss", "aggregation")
"""Keys whose arguments are merged over those of a preset, where both name the same function."""


def _over(preset: Json, given: Json) -> Json:
    old, new = named(preset), named(given)
    if not isinstance(new, dict) or new.get("name", old["name"]) != old["name"]:
        return given
    args = new.get("args", {})
    return {**old, **new, "args": {**old.get("args", {}), **args} if isinstance(args, dict) else args}


class AlgorithmSection(Section):
    """Advantages and the policy loss; the name of a preset alone is short for `{preset: NAME}`."""

    preset: str | None = None
    """Published settings that the other keys here change (`agentrl presets` lists them). null: the defaults below."""
    advantage: Annotated[AdvantageSection, BeforeValidator(named)] = AdvantageSection(name="grpo")
    loss: Annotated[LossSection, BeforeValidator(named)] = LossSection(name="ppo_clip")
    clip_low: Fraction = 0.2
    """How far below 1 the probability ratio may fall before it is clipped."""
    clip_high: AtLeast0 = 0.2
    """How far above 1 the probability ratio may rise before it is clipped."""
    clip_dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: bound of the ratio where the advantage is negative (arXiv:1912.09729), of each token (ppo_clip) or of
    the sample (gspo). null: off."""
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
    kl_estimator: Literal["auto", "k1", "abs", "k2", "k3", "k1+", "k3+", "k3*"] = "auto"
    """Estimate of each token's KL (Schulman 2020). auto: k3 in the loss, k1 in the reward. With `+` its gradient is
    that of k2, which is in expectation that of the KL. `k3*`: k3 times the probability ratio, whose gradient is that,
    too, also after several updates (DeepSeek-V3.2, arXiv:2512.02556)."""
    entropy_coef: AtLeast0 = 0.0
    """Coefficient of the entropy bonus."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of an update's sampled tokens, those of the highest entropy, that carry the policy gradient
    (arXiv:2506.01939: 0.2)."""
    aggregation: Annotated[AggregationSection, BeforeValidator(named)] = AggregationSection(name="token_mean")
    off_policy: Literal["auto", "none", "token_tis", "sequence_tis", "token_mask"] = "auto"
    """Importance weight of a token that the engine sampled with another probability than the trainer's. auto:
    token_tis where the two are apart (an engine other than `local`, rollout.overlap, or `local` beside mixed precision,
    which it does not sample in), else none."""
    off_policy_cap: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of the importance weights."""
    off_policy_mask: Above0 | None = None
    """Mean of log engine - log policy over a sample above which its tokens of negative advantage carry no policy
    gradient (DeepSeek-V3.2, arXiv:2512.02556, equation 9: off-policy sequence masking). null: off."""
    routing_replay: bool = False
    """Of a mixture of experts: train with the experts that the engine chose for each token (arXiv:2510.11370)."""
    streams: StreamsSection = StreamsSection()
    """What tokens are learned from."""
    imitate_from: float | None = None
    """Least reward of a rollout that `streams.imitate` imitates. null: more than the mean of its group."""
    reject: Annotated[tuple[RejectSection, ...], BeforeValidator(listed)] = ()
    """What is left out of an update because trainer and engine disagree; what any of the rules names is."""
    filter: Annotated[FilterSection | None, BeforeValidator(named)] = None
    """Which groups are trained on. null: all; with dynamic_sampling `varied`, those whose rewards differ, without what
    `overlong` takes off."""
    dynamic_sampling: DynamicSamplingSection | None = None
    """Sample further tasks in place of groups that `filter` leaves out; `{}` takes the defaults of its keys. null: a
    step has fewer groups."""
    overlong: OverlongSection | None = None
    """Take off the reward of conversations that come near the limit of tokens, for learning alone; `{}` takes the
    defaults of its keys. null: nothing."""
    leave_out: Annotated[
        tuple[Literal["length", "max_turns", "max_tool_calls", "timeout"], ...], BeforeValidator(listed)
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
        preset = PRESETS[name].keys
        functions = {key: _over(preset[key], given[key]) for key in _FUNCTIONS if key in preset and key in given}
        return {**preset, **given, **functions}

    @model_validator(mode="after")
    def _target(self) -> "AlgorithmSection":
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target moves kl_coef, which is 0: set kl_coef to where it begins")
        if self.reference is not None and self.kl_coef == 0:
            raise ValueError("reference moves the reference of the KL, but kl_coef is 0, so there is none: set kl_coef")
        return self


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
