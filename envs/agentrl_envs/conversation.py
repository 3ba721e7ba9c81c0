"""What the shipped environments share: openings, names of splits, fields of rows, and demonstrations by style."""

from collections.abc import Callable, Mapping
from random import Random
from typing import TypeVar

from agentrl.errors import UserError, nearest
from agentrl.plugins.environment import Environment, LazyTasks
from agentrl.plugins.types import Json, Message, Task

Way = TypeVar("Way")

Styles = Mapping[str, Mapping[Way, float]]
"""By the name of a style: the ways to work a task, each with its relative frequency."""


def opening(question: str, system_prompt: str) -> list[Message]:
    """The first messages of a request: the question, after a system prompt unless that is empty."""
    system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def check_split(env: Environment, split: str) -> None:
    """Raise UserError, with the nearest known name, unless `split` is `train` or one of `env.splits`."""
    if split not in (known := ("train", *env.splits)):
        raise UserError(f"{env.name} has no split {split!r} for this source{nearest(split, known)}")


def check_generated(env: Environment, source: str) -> None:
    """Raise UserError for a source, where the environment makes all of its tasks."""
    if source != "generated":
        raise UserError(f"env.source: {env.name} makes its own tasks: expected 'generated', got {source!r}")


def generated_tasks(
    split: str, train: int, held_out: int, seed: int, make: Callable[[str, int, int], Task]
) -> LazyTasks:
    """A split of a generator, which makes a task of split, index and seed. Train depends on the seed; the
    held-out splits never do, so that runs compare. train, held_out: tasks of each split."""
    size, own = (train, seed) if split == "train" else (held_out, 0)
    return LazyTasks(size, lambda index: make(split, index, own))


def check_style(env: Environment, style: str, styles: Styles[Way]) -> None:
    """Raise UserError, with the nearest known name, for a style without demonstrations."""
    if style not in styles:
        raise UserError(f"{env.name} has no demonstrations of style {style!r}{nearest(style, styles)}")


def draw_way(ways: Mapping[Way, float], rng: Random) -> Way:
    """Draw one of `ways` by its relative frequency, with one call of `rng`."""
    return rng.choices(list(ways), list(ways.values()))[0]


def assistant(text: str) -> Message:
    """A turn of the assistant without a call."""
    return {"role": "assistant", "content": text}


def tool_turn(name: str, arguments: dict[str, object], result: str) -> list[Message]:
    """A turn that calls a tool, and the tool's result."""
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        },
        {"role": "tool", "content": result},
    ]


def text_field(fields: Mapping[str, Json], name: str, where: str) -> str:
    """The text of a row's field. where: the place of the row. Raises UserError where there is no text."""
    if name not in fields:
        raise UserError(f"{where}: has no field {name!r}; it has {', '.join(map(repr, fields)) or 'none'}")
    value = fields[name]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}, field {name!r}: expected text, got {value!r:.60}")
    return value
