"""`env`, `tools`, `data` and `rewards`: the tasks, and what is good about an answer."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from agentrl.jsonable import Json
from agentrl.recipe.sections.algorithm import Schedule
from agentrl.recipe.sections.section import Above0, Count, FunctionSection, Section, Unit, named


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
    streams: dict[Literal["policy", "imitate", "distill"], Schedule] = Field(default_factory=dict)
    """Weights of token streams for its samples, in place of those of algorithm.streams."""
    teacher: str | None = None
    """Which of the recipe's `teachers` teaches its samples. null: `teacher`."""


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

    @model_validator(mode="after")
    def _one_or_several(self) -> "EnvSection":
        for key in ("name", "source", "args") if self.mix else ():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if getattr(self, key) != default:
                raise ValueError(f"{key} has no effect beside mix: set it in the parts, and leave it at {default!r}")
        return self


class ToolSection(Section):
    """A tool, or a source of tools, that every task offers; `tools: [calculator]` is short for `{name: calculator}`."""

    name: str
    """An installed tool (`agentrl tools` lists them), or module:attribute."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Arguments of the tool's class."""


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
    functions: tuple[Annotated[RewardSection, BeforeValidator(named)], ...] = ()
    """Reward functions besides environment and tools."""
    model: str | None = None
    """A sequence classifier, whose score of a finished trajectory is the part `model`."""


class OrderSection(FunctionSection):
    """An order of tasks; its name alone is short for `{name: NAME}`."""

    name: str
    """An installed order (`agentrl orders` lists them), or module:attribute."""


class TaskFilterSection(FunctionSection):
    """A filter of tasks; its name alone is short for `{name: NAME}`."""

    name: str
    """module:attribute, a function from a `Task` to true or false, or an installed one."""


class DataSection(Section):
    """Which of the environment's tasks are trained on, in which order, and how often."""

    order: Annotated[OrderSection, BeforeValidator(named)] = OrderSection(name="shuffled")
    """shuffled: anew in each epoch. sequential: as they stand in the data. curriculum: those near a success rate of
    args.target (0.5) most, as training measures it. Or one's own."""
    filter: Annotated[TaskFilterSection | None, BeforeValidator(named)] = None
    """Which tasks are trained on: asked of each as its turn comes, under data.epochs of all at the
    start. null: all."""
    epochs: Annotated[float, Field(gt=0), Unit("passes over the tasks")] | None = None
    """How long to train, in place of train.steps, which becomes epochs x tasks / rollout.tasks, rounded up. null:
    train.steps."""
