"""What all sections of a recipe share: the base class, the types of numbers with their units, and short forms."""

import math
import shlex
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_serializer

from agentrl.jsonable import Json


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts or measures, such as `tokens`; a number without one has no unit."""

    name: str
    """The unit, such as `seconds`."""


def _whole_steps(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError(f"expected a share below 1, or a whole number of steps, got the number {value:g}")
    return value


def steps_of(warmup: float, steps: int) -> int:
    """The steps of a warm-up, which is a share of `steps` where it is less than 1."""
    return int(warmup) if warmup >= 1 else math.ceil(warmup * steps)


Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0), Unit("seconds")]
Tokens = Annotated[int, Field(gt=0), Unit("tokens")]
Steps = Annotated[int, Field(ge=0), Unit("steps")]
Warmup = Annotated[float, Field(ge=0), AfterValidator(_whole_steps)]
Workers = Annotated[int, Field(gt=0), Unit("workers")]


class Section(BaseModel):
    """A part of a recipe: it refuses unknown keys, and does not change once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def changed(self, **values: object) -> Self:
        """The section with other values, which are not checked. Of a section in it, a mapping changes the keys
        that it names: `recipe.changed(train={"steps": 1})`."""
        old = {key: getattr(self, key) for key in values}
        new = {
            key: old[key].changed(**value) if isinstance(value, dict) and isinstance(old[key], Section) else value
            for key, value in values.items()
        }
        return self.model_copy(update=new)


def listed(value: Json) -> Json:
    """A list for a text alone, which is short for it."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def words(value: Json) -> Json:
    """The words of a text, as a shell reads them."""
    return tuple(shlex.split(value)) if isinstance(value, str) else listed(value)


def named(value: Json) -> Json:
    """`{name: TEXT}` for a text alone, which is short for it."""
    return {"name": value} if isinstance(value, str) else value


class FunctionSection(Section):
    """A function with arguments of its own; written as its name alone where there are none."""

    name: str
    """Its name, or module:attribute."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Arguments of its own."""

    @model_serializer
    def _short(self) -> Json:
        return {"name": self.name, "args": self.args} if self.args else self.name
