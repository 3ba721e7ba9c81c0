"""`agentrl replay`: a stored rollout against the tools as they are now."""

import difflib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.common import console

if TYPE_CHECKING:
    from agentrl.offline.replay import Replayed, Step
    from agentrl.plugins.types import Message

DIFFERENT = 1


def replay_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder of a run, an evaluation or rollouts.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of its recipe to change.")
    ] = None,
    request: Annotated[
        str | None, typer.Option("--id", metavar="REQUEST", help="The sample's id, such as step_3/train-7#0.12.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="The sample's step.")] = None,
    split: Annotated[str | None, typer.Option("--split", metavar="NAME", help="Its split: train, or another.")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="Its task's id.")] = None,
    sample: Annotated[int | None, typer.Option("--sample", min=0, help="Its number among the task's.")] = None,
) -> None:
    """Play a stored rollout again: the model's turns are given, calls run live, and differences are shown.

    Exit code 1 where environment or tools answer otherwise than stored.
    """
    from agentrl.offline.replay import Which, replay

    found = replay(run, Which(request, step, split, task, sample), overrides=overrides or [])
    _print(found)
    raise typer.Exit(0 if found.same else DIFFERENT)


def _print(found: "Replayed") -> None:
    out = console()

    def say(text: str, style: str | None = None) -> None:
        out.print(text, markup=False, soft_wrap=True, style=style)

    stored = found.stored.trajectory
    say(f"== {stored.request_id}: {len(stored.turns)} turns of the model are given, calls run live", "bold")
    for number, step in enumerate(found.steps):
        say(f"-- turn {number}" if number else "-- opening", "bold")
        for line, style in _lines(step, model=bool(number)):
            say(line, style)
    if found.live.failure is not None:
        say(f"failed ({found.live.failure.boundary}): {found.live.failure.message}", "red")
    if found.stopped:
        say(f"stopped: {found.stopped}", "yellow")
    say(f"ended by {stored.finish} then, {found.live.finish} now")
    for name in {**stored.rewards, **found.live.rewards}:
        then, now = stored.rewards.get(name), found.live.rewards.get(name)
        if name in found.group_parts:
            say(f"reward {name}: {_number(then)} then; of the whole group, so not computed")
        else:
            say(f"reward {name}: {_number(then)} then, {_number(now)} now", None if then == now else "yellow")
    wrong = [str(number) for number, step in enumerate(found.steps) if not step.same]
    if not wrong:
        say("environment and tools answer as stored", "green")
    else:
        say(f"environment or tools answer otherwise after turn {', '.join(wrong)} (0: the opening)", "red")


def _lines(step: "Step", model: bool) -> list[tuple[str, str | None]]:
    """Return the lines of a step: what the model said, then what is alike, or the difference."""
    said = step.stored[:1] if model else []
    rest = [list(side)[len(said) if model else 0 :] for side in (step.stored, step.live)]
    lines: list[tuple[str, str | None]] = [(line, None) for message in said for line in _text(message)]
    if model and step.stored and step.live and step.stored[0] != step.live[0]:
        lines += _difference(step.stored[:1], step.live[:1])
    if rest[0] == rest[1]:
        return lines + [(line, "dim") for message in rest[0] for line in _text(message)]
    return lines + _difference(*rest)


def _difference(stored: "Sequence[Message]", live: "Sequence[Message]") -> list[tuple[str, str | None]]:
    styles = {"-": "red", "+": "green"}
    then, now = ([line for message in side for line in _text(message)] for side in (stored, live))
    if then == now:  # it is in fields that are not shown
        then, now = ([json.dumps(message, ensure_ascii=False) for message in side] for side in (stored, live))
    lines = difflib.unified_diff(then, now, "stored", "live", lineterm="")
    return [(line, styles.get(line[:1])) for line in lines if not line.startswith("@@")]


def _text(message: "Message") -> list[str]:
    content: Any = message.get("content")
    name = f" {message['name']}" if message.get("name") else ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    lines = [f"[{message['role']}{name}]", *text.splitlines()]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        lines.append(f"-> {function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})")
    return lines


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
