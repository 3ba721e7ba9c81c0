"""The environment `terminal_tasks`: files in a workspace, something to do with them, and a check of what came of it."""

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random

from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Json, Message, Session, Task
from agentrl.workspace.archive import packed
from agentrl.workspace.workspace import Workspace
from agentrl_envs.conversation import check_generated, check_split, check_style, generated_tasks, opening
from agentrl_envs.terminal_tasks.demonstrations import STYLES, demonstrate
from agentrl_envs.terminal_tasks.generate import HELD_OUT_SIZE, SPLITS, TRAIN_SIZE, job_of, make_task
from agentrl_envs.terminal_tasks.grade import grade

SETUP_SECONDS = 60.0
"""For the script that makes the state of a task."""


class TerminalTasks(Environment):
    """Small jobs at a terminal, for the tool `terminal` or any other that works in a workspace.

    source: `generated`, which is all there is. system_prompt: "" for none. git: jobs with small histories are among
    them; the workspace must have git. seed: of the training tasks.

    Rewards: `passed`, 1 where the end state is as it should be; `fraction`, the share of what had to be brought about.
    """

    name = "terminal_tasks"
    reward_parts = ("passed", "fraction")
    splits = SPLITS[1:]
    uses_workspace = True

    def __init__(self, source: str = "generated", system_prompt: str = "", git: bool = False, seed: int = 0) -> None:
        check_generated(self, source)
        self._system_prompt, self._git, self._seed = system_prompt, git, seed

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        return generated_tasks(split, TRAIN_SIZE, HELD_OUT_SIZE, self._seed, partial(make_task, self._git))

    async def prepare(self, task: Task, workspace: Workspace) -> None:
        job = job_of(task.data)
        await workspace.unpack(packed({workspace.absolute(path): text.encode() for path, text in job.files.items()}))
        if job.setup:
            done = await workspace.exec(job.setup, seconds=SETUP_SECONDS)
            if not done.ok:
                raise RuntimeError(f"the state of task {task.id} cannot be made: {done.text().strip()}")

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        return opening(session.task.data["instruction"], self._system_prompt)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        assert session.workspace is not None, "uses_workspace says so"
        came = await grade(job_of(session.task.data), session.workspace)
        return {"passed": float(came.passed), "fraction": came.fraction}

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        """Decide by the end state as a whole, alone."""
        return rewards.get("passed", 0.0) >= 1.0

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        """A job done in a style of `demonstrations.STYLES`."""
        check_style(self, style, STYLES)
        return demonstrate(job_of(task.data), rng, style)
