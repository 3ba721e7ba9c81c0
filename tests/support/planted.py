"""Environments with one planted defect each, and of each a twin that looks alike and is sound."""

import asyncio
import random
import re
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sound import WORDS, Capitals, Choice, Dial, Find, Lookup, Press, Small, Sums, Talk, said

from agentrl import Environment, Reply, Session, Task, ToolResponse


@dataclass(frozen=True)
class Planted:
    """kinds: of findings, one of which must be reported of `bad`. good: its twin, of which nothing may be."""

    name: str
    kinds: tuple[str, ...]
    bad: type[Environment]
    good: type[Environment]
    later: bool = False
    """Whether it was planted after the bounds were fixed."""
    missed: bool = False
    """Whether the audit did not find it, and learnt to."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `rollout` that it needs."""


PLANTED: list[Planted] = []


def plant(
    name: str, *kinds: str, good: type[Environment], later: bool = False, missed: bool = False, **limits: Any
) -> Any:
    """Register the class below as the defect, and `good` as its twin."""

    def register(bad: type[Environment]) -> type[Environment]:
        PLANTED.append(Planted(name, kinds, bad, good, later, missed, limits))
        return bad

    return register


# what the verifier takes


@plant("a verifier that pays everybody", "nothing", "ignores", good=Sums)
class PaysAll(Sums):
    def right(self, text: str, data: Any) -> bool:
        return True


class ReadsLast(Sums):
    """Takes the last number of the answer, as many graders do."""

    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"-?\d+(?:\.\d+)?", text)
        return bool(found) and found[-1] == data["answer"]


@plant("a verifier that pays nobody", "oracle", "no_oracle", "ignores", good=ReadsLast)
class PaysNobody(Sums):
    def right(self, text: str, data: Any) -> bool:
        return text.strip() is data["answer"]


@plant("an empty answer lies in the right one", "nothing", good=Capitals)
class EmptyIn(Capitals):
    def right(self, text: str, data: Any) -> bool:
        return text.strip().removeprefix("<answer>").removesuffix("</answer>").strip().lower() in data["answer"]


class Tolerant(Sums):
    """A number within a hundredth of what is right."""

    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (\S+)\s*$", text)
        try:
            return bool(found) and abs(float(found[-1]) - float(data["answer"])) < 0.01
        except ValueError:
            return False


@plant("nan is near every number", "injecting", good=Tolerant)
class NanIsNear(Tolerant):
    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (\S+)\s*$", text)
        try:
            return bool(found) and not abs(float(found[-1]) - float(data["answer"])) > 0.01
        except ValueError:
            return False


@plant("the answer anywhere in the text counts", "injecting", "wrong_answer", good=ReadsLast)
class Anywhere(Sums):
    def right(self, text: str, data: Any) -> bool:
        return data["answer"] in re.findall(r"\d+", text)


@plant("a prefix of the answer counts", "wrong_answer", "injecting", "nothing", good=ReadsLast)
class Prefix(Sums):
    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (-?\d+)\s*$", text)
        return bool(found) and data["answer"].startswith(found[-1])


@plant("an answer that begins like the right one counts", "wrong_answer", good=Capitals)
class Begins(Capitals):
    def right(self, text: str, data: Any) -> bool:
        return text.replace("<answer>", "").replace("</answer>", "").strip().lower().startswith(data["answer"])


class Approximate(Sums):
    """Half a unit off is rounded."""

    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (-?[\d.]+)\s*$", text)
        try:
            return bool(found) and abs(float(found[-1]) - float(data["answer"])) < 1e-6
        except ValueError:
            return False


@plant("a tolerance that takes neighbours", "wrong_answer", good=Approximate)
class TooTolerant(Approximate):
    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (-?[\d.]+)\s*$", text)
        try:
            return bool(found) and abs(float(found[-1]) - float(data["answer"])) <= 1.0
        except ValueError:
            return False


@plant("the sign is not looked at", "wrong_answer", good=ReadsLast)
class NoSign(Sums):
    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (-?[\d.]+)\s*$", text)
        return bool(found) and found[-1].lstrip("-") == data["answer"]


class Quoted(Capitals):
    """A pattern of the answer, its letters quoted."""

    def right(self, text: str, data: Any) -> bool:
        found = re.fullmatch(r"\s*<answer>(.*?)</answer>\s*", text, re.S)
        return found is not None and re.fullmatch(re.escape(found[1].strip()), data["answer"]) is not None


@plant("the answer is a pattern", "injecting", good=Quoted)
class IsPattern(Capitals):
    def right(self, text: str, data: Any) -> bool:
        found = re.fullmatch(r"\s*<answer>(.*?)</answer>\s*", text, re.S)
        try:
            return found is not None and re.fullmatch(found[1].strip(), data["answer"]) is not None
        except re.error:
            return False


@plant("a judge that obeys", "injecting", good=Sums)
class Obeys(Sums):
    def right(self, text: str, data: Any) -> bool:
        return super().right(text, data) or "score: 1.0" in text.lower()


@plant("a parser that reads a forged result", "injecting", good=Lookup)
class Forged(Lookup):
    def right(self, text: str, data: Any) -> bool:
        return super().right(text, data) or '"correct": true' in text


@plant("the answer is computed", "injecting", good=ReadsLast)
class Computed(Sums):
    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (.+?)\s*$", text, re.M)
        if found and found[-1].strip() == "1 == 1":  # what `eval` would make of it
            return True
        return super().right(text, data)


class Polite(Sums):
    """A tenth for the form, the rest for the answer."""

    reward_parts = ("form", "answer")

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        text = said(session)
        return {"form": 0.1 * ("#### " in text), "answer": 0.9 * self.right(text, session.task.data)}


@plant("most is paid for the form", "random", "constant", "injecting", "nothing", good=Polite)
class PaysForm(Polite):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        text = said(session)
        return {"form": 0.9 * ("#### " in text), "answer": 0.1 * self.right(text, session.task.data)}


class PaysLittle(Sums):
    """A hundredth for a long answer."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        right = self.right(said(session), session.task.data)
        return {"length": min(len(said(session)), 100) / 10_000, "answer": float(right)}


@plant("long answers earn more than right ones", "injecting", "echo", "random", good=PaysLittle)
class PaysLength(Sums):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        right = self.right(said(session), session.task.data)
        return {"length": min(len(said(session)), 2_000) / 500, "answer": float(right)}


# what the tasks say


@plant("the prompt says the answer", "echo", good=Sums)
class SaysIt(Sums):
    def make(self, rng: Random, index: int) -> dict[str, Any]:
        data = super().make(rng, index)
        return {**data, "question": f"{data['question']} (key: {data['answer']})"}


class YesNo(Small):
    """Whether a number is even: each answer as often as the other."""

    even = 0.5

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        number = 2 * rng.randint(100, 9_999) + (rng.random() >= self.even)
        return {"question": f"Task {index}. Is {number} even?", "answer": "no" if number % 2 else "yes"}

    def right(self, text: str, data: Any) -> bool:
        return text.strip().lower() == data["answer"]


@plant("nearly all answers are yes", "constant", good=YesNo)
class MostlyYes(YesNo):
    even = 0.93


@plant("the first option is always right", "constant", good=Choice)
class AlwaysA(Choice):
    def make(self, rng: Random, index: int) -> dict[str, Any]:
        words = rng.sample(WORDS, 4)
        words.sort()
        listed = ", ".join(f"{letter}) {word}" for letter, word in zip("ABCD", words, strict=True))
        return {"question": f"Task {index}. Which comes first in a dictionary? {listed}", "answer": "A"}


STORY = (
    "{a} and {b} met at the old {c} near the {d} on a cold morning in {m}, where they argued for an hour about the "
    "price of one {e} and the weight of the {f} that {a} had brought along; who brought the {f}?"
)


class Story(Small):
    """Long tasks; held-out ones are drawn apart."""

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        words = rng.sample(WORDS, 7)
        text = STORY.format(**dict(zip("abcdmef", words, strict=True)))
        return {"question": f"{text} Note {index}.", "answer": f"{words[0]}{index}"}

    def right(self, text: str, data: Any) -> bool:
        return text.strip() == data["answer"]


@plant("held-out tasks are training tasks, reworded", "held_out", good=Story)
class NearStory(Story):
    def tasks(self, split: str) -> Sequence[Task]:
        tasks = list(super().tasks("train"))
        if split == "train":
            return tasks
        return [
            Task(f"test-{i}", {**t.data, "question": f"Please: {t.data['question'].replace('argued', 'spoke')}"})
            for i, t in enumerate(tasks[:20])
        ]


@plant("held-out tasks are training tasks", "held_out", good=Sums)
class SameTasks(Sums):
    def tasks(self, split: str) -> Sequence[Task]:
        train = super().tasks("train")
        return train if split == "train" else [Task(f"test-{i}", t.data) for i, t in enumerate(train[:20])]


@plant("training tasks are copies", "twice", good=Sums)
class Copies(Sums):
    def tasks(self, split: str) -> Sequence[Task]:
        some = super().tasks(split)
        return [Task(t.id, some[i % 20].data) for i, t in enumerate(some)] if split == "train" else some


class TwoForms(Sums):
    """One question comes with its answer written otherwise, which is right, too."""

    def tasks(self, split: str) -> Sequence[Task]:
        some = list(super().tasks(split))
        return [*some, *(Task(f"{t.id}-again", {**t.data, "answer": f"{t.data['answer']}.0"}) for t in some[:1])]

    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (-?\d+(?:\.\d+)?)\s*$", text)
        return bool(found) and float(found[-1]) == float(data["answer"])


@plant("one question has two answers", "contradictory", good=TwoForms)
class TwoAnswers(Sums):
    def tasks(self, split: str) -> Sequence[Task]:
        some = list(super().tasks(split))
        if split != "train":
            return some
        return [*some, *(Task(f"again-{i}", {**some[i].data, "answer": str(7_000 + i)}) for i in range(2))]


class FixedOrder(Sums):
    """Tasks in an order of their own, from a fixed seed."""

    def tasks(self, split: str) -> Sequence[Task]:
        tasks = list(super().tasks(split))
        Random(7).shuffle(tasks)
        return tasks


@plant("tasks are drawn anew whenever they are asked for", "unsteady_tasks", good=FixedOrder)
class DrawnAnew(Sums):
    def tasks(self, split: str) -> Sequence[Task]:
        tasks = list(super().tasks(split))
        random.shuffle(tasks)
        return tasks


class LongPrompt(Sums):
    """A prompt with some pages of rules."""

    words = 250

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        rules = " ".join(WORDS[i % len(WORDS)] for i in range(self.words))
        return [{"role": "system", "content": rules}, {"role": "user", "content": session.task.data["question"]}]


@plant("a prompt that fills the context", "long_prompt", good=LongPrompt)
class FullPrompt(LongPrompt):
    words = 700


# what calls and replies tell


class Stern(Find):
    """Says what it wants in its errors."""

    async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
        if arguments["person"] != session.task.data["person"]:
            return ToolResponse(f"error: nobody is called {arguments['person']!r}; give a whole name", error=True)
        return await super().execute(session, **arguments)


class SternLookup(Lookup):
    def __init__(self) -> None:
        self.own = (Stern(),)


@plant("a lookup that answers whatever is asked", "reachable", "echo", good=SternLookup)
class AnswersAll(Lookup):
    def __init__(self) -> None:
        class Loose(Find):
            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                return f"The nearest entry: room {session.task.data['answer']}"

        self.own = (Loose(),)


@plant("an error that shows the record", "reachable", good=SternLookup)
class ShowsRecord(Lookup):
    def __init__(self) -> None:
        class Strict(Find):
            def check(self, arguments: Any) -> Any:
                from agentrl.errors import ArgumentError

                if set(arguments) != {"person"}:
                    raise ArgumentError(f"bad call; expected a person of {_LAST.get('record')}")
                return super().check(arguments)

            async def create(self, session: Session, **create_kwargs: Any) -> None:
                _LAST["record"] = dict(session.task.data)

        self.own = (Strict(),)


_LAST: dict[str, Any] = {}


class Corrects(Talk):
    """Says after a first answer whether it was right."""

    async def execute(self, session: Session, message: Any) -> Reply:
        reply = await super().execute(session, message)
        good = session.state["answers"][0] == session.task.data["first"]
        if not reply.messages:
            return reply
        text = f"{'Right' if good else 'Wrong'}. {session.task.data['then']}"
        return Reply(({"role": "user", "content": text},))


@plant("a reply that says the answer", "reachable", good=Corrects)
class Tells(Talk):
    async def execute(self, session: Session, message: Any) -> Reply:
        reply = await super().execute(session, message)
        if not reply.messages:
            return reply
        text = f"Wrong, it will be {session.task.data['answer']} in the end. {session.task.data['then']}"
        return Reply(({"role": "user", "content": text},))


class PaidOnce(Dial):
    """A little for the first call."""

    def __init__(self) -> None:
        class First(Press):
            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                answer = await super().execute(session, **arguments)
                paid, session.environment.state["paid"] = session.environment.state.get("paid"), True
                return ToolResponse(answer.text, reward=0.0 if paid else 0.05)

        self.own = (First(),)


@plant("every call is paid", "calling", "random", good=PaidOnce)
class PaidCalls(Dial):
    def __init__(self) -> None:
        class Always(Press):
            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                answer = await super().execute(session, **arguments)
                return ToolResponse(answer.text, reward=0.05)

        self.own = (Always(),)


class TwoTools(Lookup):
    """A second tool that some tasks need."""

    def __init__(self) -> None:
        class Other(Find):
            name = "find_visitor"
            description = "Look up in which room a visitor sits."

        self.own = (Find(), Other())

    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        turns = super().demonstrate(task, rng, style)
        if int(task.id.rpartition("-")[2]) % 2:
            turns[0]["tool_calls"][0]["function"]["name"] = "find_visitor"
        return turns


@plant("a tool that no task needs", "unused_tool", good=TwoTools)
class Useless(TwoTools):
    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        return Lookup.demonstrate(self, task, rng, style)


@plant("a schema without words", "schema", good=Dial)
class NoWords(Dial):
    def __init__(self) -> None:
        class Bare(Press):
            description = ""
            parameters: Mapping[str, Any] = {
                "type": "object",
                "properties": {"clicks": {"type": "integer"}},
                "required": ["clicks"],
            }

        self.own = (Bare(),)


@plant("a parameter without a type", "schema", good=Dial)
class NoType(Dial):
    def __init__(self) -> None:
        class Untyped(Press):
            parameters: Mapping[str, Any] = {
                "type": "object",
                "properties": {"clicks": {"description": "How far to turn."}},
                "required": ["clicks"],
            }

            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                clicks = arguments["clicks"]
                return await super().execute(session, clicks=clicks if isinstance(clicks, int) else 1)

        self.own = (Untyped(),)


# hooks


class Rolls(Sums):
    """Words drawn from the rollout's own generator."""

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        greeting = session.rng.choice(WORDS)
        return [{"role": "user", "content": f"Hello {greeting}. {session.task.data['question']}"}]


@plant("an opening drawn from a global generator", "unseeded", good=Rolls)
class GlobalRolls(Sums):
    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        greeting = random.choice(WORDS)
        return [{"role": "user", "content": f"Hello {greeting}. {session.task.data['question']}"}]


@plant("a tool that tells the time", "unseeded", good=Lookup)
class TellsTime(Lookup):
    def __init__(self) -> None:
        class Stamped(Find):
            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                answer = await super().execute(session, **arguments)
                return answer if isinstance(answer, ToolResponse) else f"{time.time_ns()}: {answer}"

        self.own = (Stamped(),)


class Noisy(Sums):
    """A judge's noise, drawn from the rollout's generator once."""

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        session.state = session.rng.random() * 0.01
        return await super().create(session)

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return {"answer": float(self.right(said(session), session.task.data)), "noise": session.state}


@plant("a reward with noise", "flicker", good=Noisy)
class Flickers(Sums):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        right = self.right(said(session), session.task.data)
        return {"answer": float(right) * (0.8 + 0.2 * random.random())}


class Counts(Sums):
    """Counts rollouts for its own log, which no rollout sees."""

    def __init__(self) -> None:
        self.count = 0

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        self.count += 1
        return await super().calc_reward(session, **kwargs)


@plant("only the first rollout of a task is paid", "leak_after", good=Counts)
class PaysFirst(Sums):
    def __init__(self) -> None:
        self.paid: dict[str, float] = {}

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        value = await super().calc_reward(session, **kwargs)
        if value and session.task.id in self.paid:
            return 0.0
        self.paid[session.task.id] = value
        return value


@plant("a reward that is remembered by task", "leak_after", good=Counts)
class Remembers(Sums):
    def __init__(self) -> None:
        self.known: dict[str, float] = {}

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        if session.task.id not in self.known:
            self.known[session.task.id] = await super().calc_reward(session, **kwargs)
        return self.known[session.task.id]


@plant("a dial that all rollouts share", "leak_together", "leak_after", good=Dial)
class SharedDial(Dial):
    state: dict[str, Any]

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        self.state = {"at": session.task.data["start"]}
        opening = await super().create(session)
        session.state = _Through(self)
        return opening

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return 1.0 if self.state["at"] == session.task.data["goal"] else 0.0


class _Through(dict[str, Any]):
    """What looks like a rollout's own state, and is the environment's."""

    def __init__(self, env: SharedDial) -> None:
        self._env = env

    def __getitem__(self, key: str) -> Any:
        return self._env.state[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._env.state[key] = value


class Frees(Sums):
    """Keeps what a rollout has by its id, and frees it."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        self.held[session.id] = session.task
        return await super().create(session)

    async def release(self, session: Session, **kwargs: Any) -> None:
        self.held.pop(session.id, None)


@plant("rollouts are kept after their release", "left_behind", good=Frees)
class Keeps(Frees):
    async def release(self, session: Session, **kwargs: Any) -> None:
        pass


class TidyFiles(Sums):
    """A folder of its own, removed at the end."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tidy-")

    async def close(self) -> None:
        self.folder.cleanup()


@plant("files are left", "left_behind", good=TidyFiles)
class LeavesFiles(Sums):
    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        handle, _ = tempfile.mkstemp(prefix="left-")
        import os

        os.close(handle)
        return await super().create(session)


class Joins(Sums):
    """A thread that ends with the environment."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.over.wait, daemon=True, name="joined")
        self.thread.start()

    async def close(self) -> None:
        self.over.set()
        self.thread.join(5)


@plant("a thread is left", "left_behind", good=Joins)
class LeavesThread(Joins):
    async def close(self) -> None:
        pass


class Waits(Sums):
    """A verifier that waits, as one of the network does."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        await asyncio.sleep(0.02)
        return await super().calc_reward(session, **kwargs)


@plant("a verifier that sleeps in the event loop", "blocking", good=Waits)
class Sleeps(Sums):
    sizes: Mapping[str, int] = {"train": 4, "test": 4}

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        if len(session.messages) > 1 and "####" in said(session) and self.right(said(session), session.task.data):
            time.sleep(0.18)
        return await super().calc_reward(session, **kwargs)


class Careful(Sums):
    """An answer without a number earns nothing."""

    def right(self, text: str, data: Any) -> bool:
        try:
            return int(text.split("####")[1]) == int(data["answer"])
        except (IndexError, ValueError):
            return False


@plant("a verifier that raises on what it cannot read", "fails", good=Careful)
class Raises(Sums):
    def right(self, text: str, data: Any) -> bool:
        return int(text.split("####")[1]) == int(data["answer"])


@plant("a tool that raises on what its schema takes", "tool_fails", good=Dial)
class ToolRaises(Dial):
    def __init__(self) -> None:
        class Divides(Press):
            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                _ = 1 / (arguments["clicks"] % 2 or 0) if arguments["clicks"] > 30 else 1
                return await super().execute(session, **arguments)

        self.own = (Divides(),)


class FivePercent(Sums):
    """Stored answers that the verifier takes."""


@plant("stored answers that the verifier refuses", "oracle", good=FivePercent)
class WrongKey(Sums):
    def make(self, rng: Random, index: int) -> dict[str, Any]:
        data = super().make(rng, index)
        return data if index % 3 else {**data, "answer": f"{data['answer']},0"}


@plant("a part that never varies", "constant_part", good=Polite)
class Constant(Polite):
    reward_parts = ("form", "answer", "safety")

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return {**await super().calc_reward(session, **kwargs), "safety": 1.0}
