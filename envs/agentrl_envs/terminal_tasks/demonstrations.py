"""How a job is done, as chat messages: well, or as somebody does who is often wrong."""

from random import Random

from agentrl.plugins.types import Message
from agentrl_envs.conversation import Styles, assistant, draw_way, tool_turn
from agentrl_envs.terminal_tasks.job import Job, Step

STYLES: Styles[str] = {"clean": {"right": 1.0}, "careless": {"right": 0.35, "wrong": 0.45, "idle": 0.2}}
"""Relative frequencies of what is done: `right`; `wrong` runs another command at the end; `idle` does nothing."""
DONE = "Done."


def demonstrate(job: Job, rng: Random, style: str) -> list[Message]:
    """The messages after the opening."""
    way = draw_way(STYLES[style], rng)
    steps = [] if way == "idle" else [*job.steps[:-1], rng.choice(job.wrong) if way == "wrong" else job.steps[-1]]
    return [*(message for step in steps for message in _turn(step)), assistant(DONE)]


def _turn(step: Step) -> list[Message]:
    return tool_turn("terminal", {"command": step.command}, step.told)
