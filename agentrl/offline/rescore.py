"""`rescore`: the rewards of stored rollouts computed again, by changed functions, weights or graders.

What the recipe's functions and its reward model give is computed from the stored conversations. What environment and
tools gave is kept, since their hooks need a session; or the conversation is played again in one, with live calls.
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from agentrl.checkpoint.run_folder import RunFolder
from agentrl.compute.classifier import RewardModel
from agentrl.containment.event_loop import blocking, run
from agentrl.containment.threads import check_abandoned
from agentrl.errors import UserError, nearest
from agentrl.eval.held_out import solved_by
from agentrl.eval.progress import Progress
from agentrl.models.load import load_tokenizer, resolve_types
from agentrl.offline.replay import live_tasks, play_again, scripted_player
from agentrl.offline.turns import StoredTurns
from agentrl.plugins.environment import Environment, declared_parts
from agentrl.plugins.mixture import environment_of
from agentrl.plugins.registry import load, make_environment
from agentrl.plugins.rewards import MODEL, Rewards, make_rewards
from agentrl.plugins.toolbox import Toolbox
from agentrl.plugins.types import Task
from agentrl.recipe.load import dump_recipe, load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import RewardSection, RewardsSection
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.journal import Journal
from agentrl.rollout.model_reward import ModelReward, translation
from agentrl.rollout.player import Player
from agentrl.rollout.scorer import Scorer
from agentrl.rollout.selection import make_filter
from agentrl.rollout.stored import StoredSample, as_groups, chosen_files, read_samples, unseen_groups
from agentrl.rollout.trajectory_file import FILTERED, TRAIN, Row, Stored, read_rows
from agentrl.trajectory import STEP, Boundary, Group, Trajectory

CLOSE = 1e-6  # relative difference of rewards that is none: a reward model's scores depend on the batch


class Scores(NamedTuple):
    """What a sample earned."""

    reward: float | None
    """None where it failed."""
    parts: Mapping[str, float]
    """By name, before weighting."""
    solved: bool | None
    """The environment's word; None where it failed."""
    failure: str | None = None
    """Why it failed."""


class Change(NamedTuple):
    """One sample, before and after."""

    file: Stored
    """Where it is stored."""
    task: str
    """The task's id."""
    sample: int
    """Its index among the samples of the task."""
    request: str
    """Its id."""
    before: Scores
    """As stored."""
    after: Scores
    """As computed now."""

    @property
    def flipped(self) -> bool:
        """Whether it is solved now and was not, or the other way round."""
        return self.before.solved is not self.after.solved

    @property
    def changed(self) -> bool:
        """Whether anything differs: the reward, a part, whether it is solved or failed."""
        ours, theirs = self.before.parts, self.after.parts
        return (
            self.flipped
            or not _alike(self.before.reward, self.after.reward)
            or ours.keys() != theirs.keys()
            or not all(_alike(value, theirs[name]) for name, value in ours.items())
        )


def _alike(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= CLOSE * max(1.0, abs(one), abs(other))


@dataclass(slots=True)
class Rescored:
    """The result of `rescore`."""

    folder: Path
    """Of the form of a run folder: the recipe, and the rollouts with their new rewards."""
    samples: list[Change] = field(default_factory=list)
    """Every sample, in the order of the files."""
    computed: tuple[str, ...] = ()
    """Parts that were computed."""
    kept: tuple[str, ...] = ()
    """Parts that stayed as they were stored."""
    notes: list[str] = field(default_factory=list)
    """Lines about what was done otherwise than one may think."""


def rescore(
    folder: str | Path,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    step: int | None = None,
    split: str | None = None,
    output: str | None = None,
    replay: bool = False,
    progress: Progress | None = None,
) -> Rescored:
    """Compute the rewards of stored rollouts again, and write them into a new folder.

    folder: of a run or an evaluation. recipe: a path; default: that of the folder. overrides: `key=value`. step, split:
    of the files; default: all. output: the new folder; default: `rescored-<number>` beside what is stored. replay: play
    every rollout again, so that environment and tools give their rewards anew; where they answer otherwise than stored,
    the stored rewards are kept.

    Raises UserError for bad input, before anything is written.
    """
    folder = Path(folder)
    files = chosen_files(folder, step, split)
    own = str(RunFolder(folder).recipe())
    previous, now = load_recipe(own), resolve_types(load_recipe(recipe or own, overrides))
    if output is not None:
        RunFolder.check_free(output)
    with progress or Progress() as shown:
        return blocking(lambda: run(_rescore(folder, files, previous, now, output, replay, shown)))


async def _rescore(
    folder: Path,
    files: Sequence[Stored],
    previous: Recipe,
    recipe: Recipe,
    output: str | None,
    replay: bool,
    progress: Progress,
) -> Rescored:
    async with AsyncExitStack() as stack:
        env = make_environment(recipe.env)
        live = await _live_hooks(recipe, env, stack) if replay else None
        if live is None:
            stack.push_async_callback(env.close)
        rewards = make_rewards(recipe.rewards)
        stack.push_async_callback(rewards.close)
        if recipe.rewards.model is not None:
            rewards = await _with_model(recipe, rewards, env, progress)
        were = _previous_parts(previous)
        _check_separable(env, were)
        facts = [row for one in files for row in read_rows(one.path, _FACTS)]
        _check_weights(recipe, rewards, were, facts)
        tasks, notes = _tasks(env, facts)
        out = RunFolder.create(output, "") if output is not None else RunFolder.within(folder, "rescored")
        out.write_recipe(dump_recipe(recipe))
        found = Rescored(out.path, computed=(*rewards.samples, *rewards.groups), notes=notes)
        whole = TrajectoriesSection(keep=0)
        journal = Journal(whole, lambda: out.trajectories, partial(environment_of, env))
        work = _Work(env, recipe, rewards, were, journal, live, tasks)
        for one in files:
            samples = _live(read_samples(one.path, recipe.rewards.weights), tasks)
            found.samples += await work.file(one, samples, progress)
        others = dict.fromkeys(part for change in found.samples for part in change.after.parts)
        found.kept = tuple(part for part in others if part not in found.computed)
        if live is not None:
            found.computed, found.kept = (*found.kept, *found.computed), ()
            line = f"{work.unlike} of {len(found.samples)} rollouts could not be played again as they are stored"
            found.notes += [f"{line}: what environment and tools gave is kept there"] if work.unlike else []
        return found


async def _live_hooks(recipe: Recipe, env: Environment, stack: AsyncExitStack) -> tuple[Player, StoredTurns]:
    """What plays rollouts again, without the recipe's own rewards."""
    engine = StoredTurns()
    player = await scripted_player(recipe.changed(rewards=RewardsSection()), env, engine)
    stack.push_async_callback(player.close)
    return player, engine


async def _with_model(recipe: Recipe, rewards: Rewards, env: Environment, progress: Progress) -> Rewards:
    """The rewards with that of the recipe's reward model, which is loaded into this process."""
    if MODEL in (*rewards.samples, *rewards.groups):
        raise UserError(f"rewards.functions: one of them fills the part {MODEL!r}, as rewards.model does")
    progress.phase("loading the reward model")
    toolbox = await Toolbox.open(recipe.tools, env)
    schemas = [tool.schema for tool in (*toolbox.tools, *env.tools())]
    await toolbox.close()
    translate = translation(recipe, load_tokenizer(recipe.model), schemas)
    return replace(rewards, groups={**rewards.groups, MODEL: ModelReward(translate, RewardModel(recipe).scores)})


def _previous_parts(previous: Recipe) -> set[str]:
    """The parts that the recipe's functions and its reward model gave when the rollouts were stored."""
    return {one.part or _name_of(one) for one in previous.rewards.functions} | (
        {MODEL} if previous.rewards.model is not None else set()
    )


def _name_of(section: RewardSection) -> str:
    try:
        found = load("rewards", section.name)
    except UserError:  # its code is gone; most are named as they are written
        return section.name.rpartition(":")[2]
    name = found.__name__ if inspect.isroutine(found) else getattr(found, "name", None)
    return name if isinstance(name, str) else section.name.rpartition(":")[2]


def _check_separable(env: Environment, were: set[str]) -> None:
    shared = next((part for part in were if part in (declared_parts(env) or ())), None)
    if shared is not None:
        raise UserError(
            f"the part {shared!r} is the sum of what environment {env.name!r} and a function gave, and what each gave "
            "is not stored: it cannot be computed again"
        )


_FACTS = ("split", "task", "task_data", "rewards")


def _check_weights(recipe: Recipe, rewards: Rewards, were: set[str], facts: Sequence[Row]) -> None:
    """Raise UserError for a weight of a part that no sample has, which is a slip of the pen."""
    stored = {part["name"] for row in facts for part in row["rewards"] or () if part} | were
    known = {*stored, *rewards.samples, *rewards.groups, STEP}
    if unknown := next((part for part in recipe.rewards.weights if part not in known), None):
        raise UserError(f"rewards.weights: no stored rollout has the part {unknown!r}{nearest(unknown, known)}")


def _tasks(env: Environment, facts: Sequence[Row]) -> tuple[dict[tuple[str, str], Task], list[str]]:
    """The tasks that the environment has still, by split and id, and a line about the others."""
    stored: dict[str, dict[str, str]] = {}
    for row in facts:
        if None not in (row["split"], row["task"], row["task_data"]):  # of a damaged file, as is said when it is read
            stored.setdefault(row["split"], {})[row["task"]] = row["task_data"]
    found = {
        (split, name): task for split, tasks in stored.items() for name, task in live_tasks(env, split, tasks).items()
    }
    gone = sum(map(len, stored.values())) - len(found)
    line = f"{gone} tasks are not in environment {env.name!r}, or otherwise: rewards see them as they are stored"
    return found, [line] if gone else []


def _live(samples: Sequence[StoredSample], tasks: Mapping[tuple[str, str], Task]) -> list[StoredSample]:
    found = []
    for facts, trajectory in samples:
        task = tasks.get((facts["split"], trajectory.task.id), trajectory.task)
        found.append(StoredSample(facts, replace(trajectory, task=task)))
    return found


def _earned(t: Trajectory, live: Trajectory, weights: Mapping[str, float]) -> Trajectory:
    """A stored trajectory with what was earned as it was played again."""
    turns = tuple(replace(turn, reward=now.reward) for turn, now in zip(t.turns, live.turns, strict=True))
    earned = replace(t, rewards=dict(live.rewards), seats=live.seats, weights=dict(weights))
    return replace(earned, turns=turns, finish=live.finish, failure=None)


@dataclass(slots=True)
class _Work:
    env: Environment
    recipe: Recipe
    rewards: Rewards
    were: set[str]
    """Parts that are computed again, or gone."""
    journal: Journal
    live: tuple[Player, StoredTurns] | None
    """What plays rollouts again; None: nothing does."""
    tasks: Mapping[tuple[str, str], Task]
    """Those that the environment has, by split and id."""
    unlike: int = 0
    """Rollouts that could not be played again as they are stored."""

    async def file(self, file: Stored, samples: Sequence[StoredSample], progress: Progress) -> list[Change]:
        """Compute the rewards of a file's samples, and write them."""
        before = {sample.facts["request"]: self._stored(sample) for sample in samples}
        rows = {sample.facts["request"]: sample for sample in samples}
        scorer = Scorer(self.rewards, self.recipe.rollout.turn_timeout)
        groups = as_groups(samples)
        done = progress.follow(f"{file.split}, step {file.step}", len(groups))
        most = max((len(group.trajectories) for group in groups), default=0) or 1
        room = asyncio.Semaphore(max(1, self.recipe.rollout.concurrency // most))

        async def score(group: Group) -> Group:
            async with room:
                bare = await self._played(group, rows) if self.live is not None else self._bare(group)
                scored = await scorer.score_stored(bare, self.recipe.rollout.retries)
                check_abandoned()
                done(scored)
                return scored

        try:
            async with asyncio.TaskGroup() as workers:
                tasks = [workers.create_task(score(group)) for group in groups]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        scored = [task.result() for task in tasks]
        if file.evaluation:
            self.journal.evaluation(file.split, file.step, scored, partial(solved_by, self.env))
        else:
            split = next((s.facts["split"] for s in samples), TRAIN)
            kept, left_out = await self._selected(samples, scored)
            self.journal.step(file.step, kept, left_out=left_out, split=split)
        after = {t.request_id: t for group in scored for t in (*group.trajectories, *group.failed)}
        return [
            Change(file, t.task.id, t.sample, t.request_id, before[t.request_id], self._scores(after[t.request_id]))
            for _, t in samples
        ]

    async def _selected(
        self, samples: Sequence[StoredSample], scored: Sequence[Group]
    ) -> tuple[list[Group], dict[str, list[Group]]]:
        """The groups of a step, and by why those that it leaves out: of what its filter left out, what the
        recipe's filter leaves out now."""
        chosen, unseen = make_filter(self.recipe), unseen_groups(samples)
        kept: list[Group] = []
        left_out: dict[str, list[Group]] = {}
        for number, group in zip(dict.fromkeys(one.facts["group"] for one in samples), scored, strict=True):
            why = unseen.get(number)
            if why == FILTERED and (chosen is None or await chosen.keeps(group)):
                why = None
            (kept if why is None else left_out.setdefault(why, [])).append(group)
        return kept, left_out

    async def _played(self, group: Group, rows: Mapping[str, StoredSample]) -> Group:
        """The group with the parts that environment and tools give now; one that a reward failed may be valid
        again."""
        assert self.live is not None
        kept = {t.request_id: t for t in self._bare(group).trajectories}
        samples: list[Trajectory] = []
        for t in (*group.trajectories, *group.failed):
            if not t.valid and (t.failure is None or t.failure.boundary is not Boundary.REWARD):
                samples.append(t)
                continue
            sample = rows[t.request_id]
            task = self.tasks.get((sample.facts["split"], t.task.id))
            found = await play_again(*self.live, sample, task) if task is not None else None
            if found is None or not found.same or found.stopped:
                self.unlike += 1
                samples.append(kept.get(t.request_id, t))
            else:
                samples.append(_earned(t, found.live, self.recipe.rewards.weights))
        return Group.of(group.task, sorted(samples, key=lambda t: t.sample))

    def _bare(self, group: Group) -> Group:
        """The group with the parts that are kept."""
        weights = dict(self.recipe.rewards.weights)
        return replace(group, trajectories=tuple(
            replace(t, rewards={part: v for part, v in t.rewards.items() if part not in self.were}, weights=weights)
            for t in group.trajectories
        ))  # fmt: skip

    def _stored(self, sample: StoredSample) -> Scores:
        scores, solved = self._scores(sample.trajectory), sample.facts["solved"]
        return scores if solved is None else scores._replace(solved=solved)

    def _scores(self, t: Trajectory) -> Scores:
        if not t.valid:
            return Scores(None, {}, None, t.failure.message if t.failure else str(t.finish))
        return Scores(t.reward, dict(t.rewards), solved_by(self.env, t))
