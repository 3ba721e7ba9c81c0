"""The environment `dataset`: the rows of people's own data are the tasks; an answer that matches is paid 1.0."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from agentrl_tools.rewards.match import Match

from agentrl.data.change import Change
from agentrl.data.rows import Row
from agentrl.data.source import open_source
from agentrl.errors import UserError
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Json, Message, Session, Task, answer_of
from agentrl_envs.dataset.tasks import ANSWERS, CHECKED, Columns, DatasetTasks

_log = logging.getLogger("agentrl.envs.dataset")
Files = str | list[str]


class Dataset(Environment):
    """Tasks from any data: a prompt, and where there is one an answer.

    source: anything that `agentrl.data.source` reads (.jsonl, .json, .parquet, a folder, a hub name, module:function).
    prompt: the column with the prompt, text or a list of chat messages. system: put before a prompt that has none.
    answer: the column with what is right (by default `reward_model.ground_truth`, `ground_truth` or `answer`).
    reward: `match` (the same text or number), `numeric` (the same number), `none` (`rewards.functions` and tools pay).
    map, filter: import paths of functions over rows, in `workers` processes.
    splits: for each split its files, or the source's own name of it. config: of a hub dataset.
    seed: of what is held out of a lone file.
    images: the column with images, which stand where the prompt says `<image>`: paths, files as `{bytes, path}`, or
    `data:` URLs. image_folder: against which paths stand (by default the folder of the row's file). image_urls:
    `refuse` images that are http addresses, fetch them from `public` machines, or from `any`, those of one's own
    network included.
    videos: the column with videos; a prompt that shows one (`<video>`) is refused.
    tools: `recipe` (every task offers the recipe's tools) or `row` (those that its row names, or gives kwargs).
    """

    name = "dataset"
    example = MappingProxyType({"source": "agentrl_envs.dataset.tasks:example_rows"})

    def __init__(
        self,
        source: str = "generated",
        prompt: str = "prompt",
        answer: str | None = None,
        system: str = "",
        reward: Literal["match", "numeric", "none"] = "match",
        map: str | None = None,
        filter: str | None = None,
        workers: int = 1,
        splits: dict[str, Files] | None = None,
        config: str | None = None,
        seed: int = 0,
        images: str = "images",
        image_folder: str | None = None,
        image_urls: Literal["refuse", "public", "any"] = "refuse",
        videos: str = "videos",
        tools: Literal["recipe", "row"] = "recipe",
    ) -> None:
        from agentrl.data.media import Images  # not before data is read: it imports numpy

        if source == "generated" and not splits:
            raise UserError(
                "env.source: the environment dataset needs data: a file, a folder, a hub name or module:function"
            )
        if image_folder is not None and not Path(image_folder).is_dir():
            raise UserError(f"env.args.image_folder: there is no folder {image_folder}")
        self._images = Images(images, image_folder, image_urls)
        self._columns = Columns(prompt, answer, system, self._images, videos, tools == "row")
        self._source = open_source(
            None if source == "generated" else source,
            splits=splits,
            config=config,
            seed=seed,
            key=self._key,
            change=Change(map, filter, workers),
        )
        self._match = None if reward == "none" else Match("numeric" if reward == "numeric" else "exact")
        self.pays = self._match is not None
        self._reward, self._made = reward, dict[str, DatasetTasks]()
        self.splits = self._source.splits

    def _key(self, row: Row, where: str) -> str:
        return str(self._columns.messages(row, where))

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._made:
            tasks = DatasetTasks(split, self._source.rows(split), self._columns)
            unseen = None
            for i in range(min(len(tasks), CHECKED)):
                self._check(tasks[i], tasks.where(i))
                unseen = tasks.where(i) if unseen is None and self._unseen(tasks[i]) else unseen
            if unseen is not None:
                column = self._images.column
                _log.warning(
                    "%s: its prompt says <image>, and the row has no field %r: no image is shown (env.args.images "
                    "names the column)",
                    *(unseen, column),
                )
            self._made[split] = tasks
        return self._made[split]

    def _unseen(self, task: Task) -> bool:
        """Whether a task speaks of an image in a column that its row does not have."""
        from agentrl.data.media import tagged

        return self._images.column not in task.data and tagged(task.data["messages"])

    def _check(self, task: Task, where: str) -> None:
        if self._match is None:
            return
        truth = task.data.get("ground_truth")
        if truth is None:
            looked = f"field {self._columns.answer!r}" if self._columns.answer else f"any of {', '.join(ANSWERS)}"
            raise UserError(
                f"{where}: has no answer in {looked}: name its column by env.args.answer, or set env.args.reward "
                "to none and let rewards.functions or a tool pay"
            )
        try:
            self._match.check(truth)
        except ValueError as error:
            raise UserError(f"{where}: {error} (env.args.reward is {self._reward})") from error

    def images(self, task: Task) -> Sequence[object]:
        from agentrl.images import hashes

        return hashes(self._images.fetched(task.data["messages"]))

    async def create(self, session: Session, **create_kwargs: Json) -> Sequence[Message]:
        messages: list[Message] = list(session.task.data["messages"])
        if self._images.urls == "refuse":
            return messages
        return await asyncio.to_thread(self._images.fetched, messages)

    @property
    def reward_parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """`answer`, if answers are compared with a ground truth."""
        return () if self._match is None else ("answer",)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        if self._match is None:
            return {}
        right = self._match.right(answer_of(session.messages), session.task.data["ground_truth"])
        return {"answer": 1.0 if right else 0.0}

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        """Decide by the answer alone, where it is paid: what tools and reward functions add or take away does not
        count."""
        return rewards["answer"] >= 1.0 if "answer" in rewards and self._match else super().solved(rewards, task)
