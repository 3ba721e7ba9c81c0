"""`agentrl replay`: a stored rollout against the tools as they are now."""

import difflib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from agentrl.cli.common import OwnOverrides, RequestId, SampleNumber, SplitName, StepNumber, TaskId, console
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from agentrl.offline.replay import Replayed, Step
    from agentrl.plugins.types import Message

DIFFERENT = 1


def replay_command(
    run: Annotated[str, Argument(metavar="RUN", help="A folder of a run, an evaluation or rollouts.")],
    overrides: OwnOverrides = None,
    request: RequestId = None,
    step: StepNumber = None,
    split: SplitName = None,
    task: TaskId = None,
    sample: SampleNumber = None,
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
    """The lines of a step: what the model said, then what is alike, or the difference."""
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
    content: Json = message.get("content")
    name = f" {message['name']}" if message.get("name") else ""
    lines = [f"[{message['role']}{name}]"]
    for part in content if isinstance(content, list) else [content] if content else []:
        lines += _part(part).splitlines()
    for call in message.get("tool_calls") or ():
        function = call["function"]
        lines.append(f"-> {function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})")
    return lines


def _part(part: object) -> str:
    """A content or a part of one as text, an image by the beginning of its file's name in `images/`."""
    from agentrl.images import is_kept

    if isinstance(part, dict) and is_kept(part):
        return f"(image {part['image'][:12]})"
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else json.dumps(part, ensure_ascii=False)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
