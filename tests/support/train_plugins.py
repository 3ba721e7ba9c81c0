"""Plugins for the tests of whole runs, named in recipes by import path: `train_plugins:Noisy`."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_envs.gsm8k.environment import Gsm8k

from agentrl.plugins.tool import Tool
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Message, Session, Task


class Noisy(Gsm8k):
    """gsm8k with a seeded random part in the reward, so that a group's rewards differ however good the model is."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> dict[str, float]:
        return {**await super().calc_reward(session, **kwargs), "noise": session.rng.random()}


class LeavesThreads(Noisy):
    """Leaves behind a thread that is no daemon, one of asyncio's, and a task that ignores its cancellation."""

    kept: list[Any] = []  # noqa: RUF012

    async def create(self, session: Session, **create_kwargs: Any) -> list[Message]:
        if not self.kept:
            forever = threading.Event()
            threading.Thread(target=forever.wait, name="forever").start()
            self.kept.append(asyncio.get_running_loop().run_in_executor(None, forever.wait))
            self.kept.append(asyncio.create_task(self._stay()))
        return await super().create(session, **create_kwargs)

    async def _stay(self) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)


class Few(Noisy):
    """Twelve tasks, which whoever goes through all of them is done with in no time."""

    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks(split)[:12]


class Half(Noisy):
    """Five tasks, the rewards of two differ from sample to sample; those of the others are equal."""

    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks(split)[:5]

    async def calc_reward(self, session: Session, **kwargs: Any) -> dict[str, float]:
        return {"answer": 0.0, "noise": session.rng.random() * (int(session.task.id.rpartition("-")[2]) % 2)}


def first_eight(task: Task) -> bool:
    """A filter of tasks."""
    return int(task.id.rpartition("-")[2]) < 8


class Flat(Gsm8k):
    """Every sample gets the same reward."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> dict[str, float]:
        return {"answer": 0.5}


class Lonely(Noisy):
    """The machinery loses all samples of a task but the first, whose id ends in #0."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> dict[str, float]:
        if "#0." not in session.id:
            raise RuntimeError("the judge is away")
        return await super().calc_reward(session, **kwargs)


class Hopeless(Gsm8k):
    """Every reward raises."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> dict[str, float]:
        raise NotImplementedError("no reward yet")


class Broken(Noisy):
    """The reward raises for the tasks with an even number, `create` for those whose number ends in 1."""

    async def create(self, session: Session, **create_kwargs: Any) -> list[Message]:
        if session.task.id.endswith("1"):
            raise ValueError("no [bold]room[/nothing] here")
        return await super().create(session, **create_kwargs)

    async def calc_reward(self, session: Session, **kwargs: Any) -> dict[str, float]:
        if int(session.task.id.rpartition("-")[2]) % 2 == 0:
            raise ZeroDivisionError("no judge for even numbers")
        return await super().calc_reward(session, **kwargs)


class LongPrompts(Noisy):
    """The prompts of every third task are far longer than any limit."""

    async def create(self, session: Session, **create_kwargs: Any) -> list[Message]:
        messages = await super().create(session, **create_kwargs)
        if int(session.task.id.rpartition("-")[2]) % 3 == 0:
            messages[-1] = {"role": "user", "content": "a long story " * 500}
        return messages


class TooLong(Noisy):
    """No prompt of its twenty tasks fits."""

    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks(split)[:20]

    async def create(self, session: Session, **create_kwargs: Any) -> list[Message]:
        return [{"role": "user", "content": "a long story " * 500}]


class Empty(Noisy):
    """Nothing to train on."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [] if split == "train" else super().tasks(split)


class _Calculator(Tool):
    """Called like the shipped calculator, which the model knows how to call."""

    name = "calculator"
    description = "Works out one operation."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
        "additionalProperties": False,
    }


class Raising(_Calculator):
    async def execute(self, session: Session, **arguments: Any) -> str:
        raise RuntimeError("out of paper")


class Moving(_Calculator):
    """Changes the working directory of the process, which the run's folder must not depend on."""

    async def execute(self, session: Session, *, expression: str) -> str:
        os.chdir("/")
        raise RuntimeError("out of the house")


class Leaving(_Calculator):
    """Ends the program, as it thinks, also in a task that it starts and in a callback; its release does so too."""

    async def execute(self, session: Session, **arguments: Any) -> str:
        loop = asyncio.get_running_loop()
        session.state = loop.create_task(self._leave())
        loop.call_soon(sys.exit, 0)
        sys.exit(0)

    async def _leave(self) -> None:
        raise KeyboardInterrupt

    async def release(self, session: Session, **kwargs: Any) -> None:
        sys.exit(0)


class Hanging(_Calculator):
    """Never answers, and does not mind being cancelled once."""

    async def execute(self, session: Session, **arguments: Any) -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)
        return "late"


class Flooding(_Calculator):
    """Ten megabytes."""

    text = "12 plus 30 is 42. " * 600_000

    async def execute(self, session: Session, **arguments: Any) -> str:
        return self.text


class Blocking(_Calculator):
    """Holds the whole event loop: says so in a file, then sleeps as no coroutine should."""

    async def execute(self, session: Session, **arguments: Any) -> str:
        Path(os.environ["AGENTRL_TEST_MARK"]).write_text("blocked")
        time.sleep(600)
        return "late"


class Stuck(_Calculator):
    """Once two steps are done it holds up every request, as AGENTRL_TEST_STUCK says."""

    async def execute(self, session: Session, **arguments: Any) -> str:
        if (mark := os.environ.get("AGENTRL_TEST_MARK")) is not None:
            rows = Path(mark).parent / "run" / "metrics.jsonl"
            if rows.exists() and '"step": 2' in rows.read_text():
                getattr(self, os.environ["AGENTRL_TEST_STUCK"])()
        return "42"

    def compute(self) -> None:
        while True:
            sum(range(100))

    def sleep(self) -> None:
        time.sleep(3600)

    def deaf(self) -> None:
        """No signal and no exception reaches what was written in C and gives the interpreter away."""
        while True:
            ctypes.CDLL(None).sleep(3600)

    def hold(self) -> None:
        ctypes.PyDLL(None).sleep(3600)


class Book(Tracker):
    """Writes down what it is told, where the run lies."""

    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.file = folder / "book.jsonl"
        self._note("start", steps=recipe["train"]["steps"], output=recipe["output"])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._note("log", step=step, keys=sorted(metrics))

    def finish(self) -> None:
        self._note("finish")

    def _note(self, what: str, **more: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"what": what, **more}) + "\n")


class Refusing(Book):
    """Does not like step 2."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().log(step, metrics)
        if step == 2:
            raise ConnectionError("nobody listens")

    def finish(self) -> None:
        super().finish()
        raise ConnectionError("nobody listens")


class Diary(Book):
    """Has a file of its own."""

    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.file = folder / "diary.jsonl"
        self._note("start")


class Absent(Book):
    """Cannot start."""

    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        raise OSError("no key for the service")


class StopsAfterThree(Book):
    """Presses Ctrl-C when step 3 is written down."""

    last = 3

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().log(step, metrics)
        if step == self.last:
            os.kill(os.getpid(), signal.SIGINT)


class StopsItsThread(Book):
    """As StopsAfterThree, but the kernel hands the signal to the tracker's thread, not to the main one."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().log(step, metrics)
        if step == 3:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)


class StopsAtOnce(StopsAfterThree):
    last = 0


class HangsLater:
    """A reward function that hangs from its `after`-th call on, until `free` is set."""

    after, calls = 8, 0
    free = threading.Event()


def hangs_later(sample: Any) -> float:
    HangsLater.calls += 1
    if HangsLater.calls > HangsLater.after:
        HangsLater.free.wait()
    return float(HangsLater.calls)


class Leaky(Noisy):
    """Says its key wherever a stranger's error may: as it is made or asked, and in what a tool of its returns."""

    def __init__(self, source: str | None = None, key: str = "", at: str = "") -> None:
        self.key, self.at, self.calls = key, at, 0
        self._leak("constructor")
        super().__init__(source)

    def _leak(self, where: str, call: int = 1) -> None:
        self.calls += where == self.at
        if where == self.at and self.calls >= call:
            raise RuntimeError(f"401 {'x' * 470} for {self.key!r}")

    def tasks(self, split: str) -> Sequence[Task]:
        self._leak("tasks")
        return super().tasks(split)

    async def create(self, session: Session, **create_kwargs: Any) -> list[Message]:
        self._leak("create")
        return await super().create(session, **create_kwargs)

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        self._leak("solved", 5)
        return super().solved(rewards, task)

    async def release(self, session: Session, **kwargs: Any) -> None:
        self._leak("release")
        await super().release(session, **kwargs)

    async def close(self) -> None:
        self._leak("close")


class LeakyCalculator(_Calculator):
    """Answers with its key, where the text is cut."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    async def execute(self, session: Session, **arguments: Any) -> str:
        return self.key + "." * 90
