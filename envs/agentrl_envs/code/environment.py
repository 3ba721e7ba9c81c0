"""The environment `code`: a function is asked for, tools to try it with, and hidden tests that it must pass."""

import logging
from collections.abc import Mapping, Sequence
from random import Random

from agentrl_tools.sandbox import Limits, make_sandbox
from agentrl_tools.sandbox.base import MIB

from agentrl.data.source import open_source
from agentrl.errors import UserError
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Json, Message, Session, Task, answer_of
from agentrl_envs.code.answer import find_solution
from agentrl_envs.code.demonstrations import STYLES, demonstrate
from agentrl_envs.code.generate import HELD_OUT_SIZE, SPLITS, problem
from agentrl_envs.code.runner import SolutionRunner, UnfitTestsError, Verdict
from agentrl_envs.code.source import TRAIN_SIZE, generated, read_tasks
from agentrl_envs.conversation import check_split, check_style, generated_tasks, opening

INSTRUCTIONS = "Answer with the whole function in one ```python block."

_OUTPUT = 200_000  # characters of a result, as text
_log = logging.getLogger("agentrl.envs.code")


class Code(Environment):
    """Functions to write.

    source: `generated`, or files, a hub name or a function with rows as in MBPP or HumanEval. system_prompt: "" for
    none. backend: of the sandbox that solutions run in (auto, bwrap, e2b); pool: interpreters that it starts ahead.
    seconds: for one call of a solution; total_seconds: for all its calls; memory_mb: of one solution. concurrency:
    solutions tested at once. seed: of the generated training tasks, and of what is held out of a file. splits, config:
    of real data.
    """

    name = "code"
    reward_parts = ("passed", "fraction", "format")

    def __init__(
        self,
        source: str = "generated",
        system_prompt: str = INSTRUCTIONS,
        backend: str = "auto",
        pool: int = 4,
        seconds: float = 5.0,
        total_seconds: float = 20.0,
        memory_mb: int = 256,
        concurrency: int = 8,
        seed: int = 0,
        splits: dict[str, str | list[str]] | None = None,
        config: str | None = None,
    ) -> None:
        if min(seconds, total_seconds, memory_mb, concurrency) <= 0:
            raise ValueError("seconds, total_seconds, memory_mb and concurrency must be above 0")
        self._system_prompt = system_prompt
        made = source == "generated"
        self._rows = None if made else open_source(source, splits=splits, config=config, seed=seed)
        self._seed = seed
        self.splits = SPLITS[1:] if self._rows is None else self._rows.splits
        limits = Limits(wall_seconds=max(seconds, 10.0), memory=memory_mb * MIB, output=_OUTPUT)
        self._sandbox = make_sandbox(backend, limits=limits, pool=pool)
        self._runner = SolutionRunner(self._sandbox, seconds, total_seconds, concurrency)

    def tasks(self, split: str) -> Sequence[Task]:
        if self._rows is not None:
            return read_tasks(self._rows.rows(split), split)
        check_split(self, split)
        return generated_tasks(split, TRAIN_SIZE, HELD_OUT_SIZE, self._seed, generated)

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        return opening(session.task.data["question"], self._system_prompt)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        """`passed` (1.0 where all tests pass), `fraction` (their share) and `format` (a block defines the
        function)."""
        solution = find_solution(answer_of(session.messages), session.task.data["entry_point"])
        if solution is None:
            return {"passed": 0.0, "fraction": 0.0, "format": 0.0}
        verdict = await self._verdict(session.task, solution)
        _log.debug("%s: %d of %d tests passed %s", session.id, verdict.passed, verdict.total, verdict.why)
        return {"passed": float(verdict.all_passed), "fraction": verdict.passed / verdict.total, "format": 1.0}

    async def _verdict(self, task: Task, solution: str) -> Verdict:
        name = task.data["entry_point"]
        if "tests" in task.data:
            return await self._runner.by_results(solution, name, task.data["tests"])
        setup = task.data["setup"]
        try:
            return await self._runner.by_script(f"{setup}\n{solution}", name, setup, task.data["script"])
        except UnfitTestsError as error:
            raise UserError(f"{task.data['row']}: {error}") from error

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        """Decide by whether all tests passed, alone."""
        return rewards.get("passed", 0.0) >= 1.0

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        """A solution in a style of `demonstrations.STYLES`; for generated tasks only."""
        if self._rows is not None:
            raise UserError("code demonstrates generated tasks only: set env.source to generated")
        check_style(self, style, STYLES)
        origin = task.data
        return demonstrate(problem(origin["split"], origin["index"], origin["seed"]), rng, style)

    async def close(self) -> None:
        await self._sandbox.close()
