"""The environment `gsm8k`: a question, tools to work it with, and 1.0 for the right number behind `####`."""

from collections.abc import Mapping, Sequence
from random import Random

from agentrl_tools.rewards.grade import grade

from agentrl.data.source import open_source
from agentrl.errors import UserError
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Json, Message, Session, Task, answer_of
from agentrl_envs.conversation import check_split, check_style, generated_tasks, opening
from agentrl_envs.gsm8k.demonstrations import STYLES, demonstrate
from agentrl_envs.gsm8k.problems import HELD_OUT_SIZE, SPLITS, problem
from agentrl_envs.gsm8k.source import TRAIN_SIZE, generated, question_of, read_tasks

SYSTEM_PROMPT = (
    "Solve the problem step by step. Use a tool for every calculation, and at least once before you answer. "
    "End with the final answer, a number alone, on a line of its own: #### <number>"
)
"""For real data. Generated problems are asked without it, so that prompts stay short for a tiny model."""


class Gsm8k(Environment):
    """Grade-school word problems.

    source: `generated`, or anything that `agentrl.data.source` reads (a .jsonl or .parquet file, a hub name such as
    `openai/gsm8k`) with the fields `question` and `answer`, which ends in `#### x`.
    system_prompt: None takes the source's own (none at all for `generated`).
    seed: of the generated training problems, and of what is held out of a file. config: of a hub dataset.
    """

    name = "gsm8k"
    reward_parts = ("answer",)

    def __init__(
        self, source: str = "generated", system_prompt: str | None = None, seed: int = 0, config: str | None = None
    ) -> None:
        if config is None and source == "openai/gsm8k":
            config = "main"
        made = source == "generated"
        self._rows = None if made else open_source(source, config=config, seed=seed, key=question_of)
        self._seed, self._read = seed, dict[str, Sequence[Task]]()
        default = "" if made else SYSTEM_PROMPT
        self._system_prompt = default if system_prompt is None else system_prompt
        self.splits = SPLITS[1:] if self._rows is None else self._rows.splits

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        if self._rows is None:
            return generated_tasks(split, TRAIN_SIZE, HELD_OUT_SIZE, self._seed, generated)
        if split not in self._read:
            self._read[split] = read_tasks(self._rows.rows(split), split)
        return self._read[split]

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        return opening(session.task.data["question"], self._system_prompt)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        right = grade(answer_of(session.messages), session.task.data["answer"])
        return {"answer": 1.0 if right else 0.0}

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        """Decide by the answer alone: what tools add or take away does not count."""
        return rewards.get("answer", 0.0) >= 1.0

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        """A worked problem in a style of `demonstrations.STYLES`; for generated problems only."""
        if self._rows is not None:
            raise UserError("gsm8k demonstrates generated problems only: set env.source to generated")
        check_style(self, style, STYLES)
        origin = task.data
        return demonstrate(problem(origin["split"], origin["index"], origin["seed"]), rng, style)
