"""What a model makes of the tasks: how hard they are, and how many groups would teach it."""

from collections.abc import Mapping, Sequence

from agentrl.audit.finding import Finding, Report, Row, Severity, found
from agentrl.audit.run import Measure, Told, spread
from agentrl.chat.load import load_chat
from agentrl.errors import UserError
from agentrl.models.load import load_tokenizer
from agentrl.plugins.registry import tasks_of
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Message, Task
from agentrl.recipe.schema import Recipe
from agentrl.rollout.groups import Contrast, contrast
from agentrl.rollout.player import Player
from agentrl.trajectory import Group

SAMPLES = 8
"""Of a task, at each temperature."""
COOL = 0.3
"""The second temperature, beside the recipe's."""
TEACHING = 0.1
"""Share of the groups that must teach something."""
HARD, EASY = 0.02, 0.95
"""Solved shares below and above which tasks are too hard and too easy."""


def measure_of(recipe: Recipe) -> Measure | None:
    """What counts the tokens of openings, by the recipe's tokenizer; None where that cannot be loaded."""
    try:
        tokenizer = load_tokenizer(recipe.model)
        section = recipe.model
        chat = load_chat(
            tokenizer, model_path=section.path, kind=section.chat, chat_template=section.chat_template, tools=[]
        )
    except UserError:
        return None

    def measure(messages: Sequence[Message], tools: Mapping[str, Tool]) -> int:
        return len(chat.render(messages, [tool.schema for tool in tools.values()]))

    return measure


async def model_findings(recipe: Recipe, path: str, report: Report, told: Told, count: int) -> list[Finding]:
    """Let a model play at two temperatures. Raises UserError: it cannot be loaded."""
    told.stage("loading the model")
    player = await Player.build(recipe, model_path=path)
    findings: list[Finding] = []
    try:
        tasks = spread(tasks_of(player.env, "train"), count)
        for temperature in dict.fromkeys((recipe.rollout.temperature, COOL)):
            told.stage(f"the model at temperature {temperature:g}")
            told.at(f"the model's rollouts at temperature {temperature:g}")
            limits = {"temperature": temperature, "retries": 0}
            groups = await player.play(
                tasks, SAMPLES, seed=0, limits=limits, on_sample=lambda place, sample: told.at("the model's rollouts")
            )
            report.rows.append(_row(player, groups, temperature))
            report.plays += sum(len(group.trajectories) for group in groups)
            findings += _difficulty(player, groups, temperature)
    finally:
        await player.close()
    return findings


def _row(player: Player, groups: Sequence[Group], temperature: float) -> Row:
    samples = [t for group in groups for t in group.trajectories]
    reward = sum(t.reward for t in samples) / max(1, len(samples))
    shares = solved_shares(player, groups)
    solved = sum(shares.values()) / max(1, len(shares))
    return Row(f"model {temperature:g}", f"{SAMPLES} samples a task", len(groups), reward, solved)


def solved_shares(player: Player, groups: Sequence[Group]) -> dict[str, float]:
    """By task the share of samples that are solved."""
    shares = {}
    for group in groups:
        if group.trajectories:
            right = sum(player.env.solved(t.rewards, group.task) for t in group.trajectories)
            shares[group.task.id] = right / len(group.trajectories)
    return shares


def _difficulty(player: Player, groups: Sequence[Group], temperature: float) -> list[Finding]:
    shares = solved_shares(player, groups)
    if not shares:
        tasks: list[Task] = [group.task for group in groups]
        line = f"at temperature {temperature:g} no rollout of the model came to a reward"
        return [found("fails", Severity.HIGH, line, [task.id for task in tasks])]
    teaching = [group for group in groups if contrast(group) is Contrast.VARIED]
    mean = sum(shares.values()) / len(shares)
    line = (
        f"at temperature {temperature:g} the model solves {mean:.0%}; {len(teaching)} of {len(groups)} groups of "
        f"{SAMPLES} would teach it"
    )
    never = [task for task, share in shares.items() if share == 0.0]
    if len(teaching) < TEACHING * len(groups):
        return [found("difficulty", Severity.MEDIUM, line, never or list(shares))]
    return [found("difficulty", Severity.LOW if mean > EASY or mean < HARD else Severity.INFO, line, never)]
