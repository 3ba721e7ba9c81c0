"""GSM8K as rows that others read: the multi-turn tool format of verl, for `agentrl data gsm8k`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from agentrl.plugins.types import Json, Task
from agentrl_envs.gsm8k.environment import SYSTEM_PROMPT, Gsm8k


def multi_turn(
    source: str = "openai/gsm8k", system_prompt: str = SYSTEM_PROMPT, seed: int = 0, config: str | None = None
) -> Mapping[str, Sequence[Mapping[str, Json]]]:
    """Grade-school problems with a tool that grades, as multi-turn rows.

    source, seed, config: as of the environment gsm8k. system_prompt: empty for none.
    """
    env = Gsm8k(source, seed=seed, config=config)
    origin = "agentrl/gsm8k-generated" if source == "generated" else "openai/gsm8k"
    return {split: _Rows(env.tasks(split), split, origin, system_prompt) for split in ("train", *env.splits)}


class _Rows(Sequence[Mapping[str, Json]]):
    def __init__(self, tasks: Sequence[Task], split: str, origin: str, system_prompt: str) -> None:
        self._tasks, self._split, self._origin, self._system_prompt = tasks, split, origin, system_prompt

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._row(index % len(self), self._tasks[index])

    def __iter__(self) -> Iterator[Mapping[str, Json]]:
        return (self._row(i, task) for i, task in enumerate(islice(self._tasks, len(self))))

    def _row(self, index: int, task: Task) -> dict[str, Json]:
        question, truth = task.data["question"], task.data["answer"]
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return {
            "data_source": self._origin,
            "prompt": [*system, {"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {
                "split": self._split,
                "index": index,
                "answer": task.data.get("solution", f"#### {truth}"),
                "question": question,
                "need_tools_kwargs": True,
                "tools_kwargs": {
                    name: {"create_kwargs": dict(k.create_kwargs)} for name, k in task.tools_kwargs.items()
                },
            },
        }
