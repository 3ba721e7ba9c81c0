"""Defects that were planted after the bounds of the audit were fixed, each with a sound twin."""

import asyncio
import difflib
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from planted import ReadsLast, YesNo, plant
from sound import WORDS, Capitals, Choice, Dial, Find, Lookup, Press, Small, Sums, Talk, said

from agentrl import Reply, Session, Task, Tool, ToolResponse
from agentrl.errors import PathError
from agentrl.workspace.workspace import Workspace


@plant("the right letter anywhere in the text counts", "echo", "injecting", later=True, good=Choice)
class AnyLetter(Choice):
    def right(self, text: str, data: Any) -> bool:
        return data["answer"] in text


class Submit(Tool):
    """Takes a letter; the first one counts."""

    name = "submit_letter"
    description = "Submit the letter of the word that comes first."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"letter": {"type": "string", "enum": list("ABCD"), "description": "The letter."}},
        "required": ["letter"],
    }

    async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
        session.environment.state.append(arguments["letter"])
        return "Thank you."


class Submitted(Choice):
    """A letter to be submitted once."""

    def __init__(self) -> None:
        self.own: tuple[Tool, ...] = (Submit(),)

    def tools(self) -> Sequence[Tool]:
        return self.own

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        session.state = []
        return await super().create(session)

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return float(session.state[:1] == [session.task.data["answer"]])


@plant("letters may be submitted until one is right", "random", "injecting", later=True, good=Submitted)
class ManySubmissions(Submitted):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return float(session.task.data["answer"] in session.state)


@plant("a tool's traceback shows what it knows", "reachable", later=True, good=Lookup)
class Traceback(Lookup):
    def __init__(self) -> None:
        class Fails(Find):
            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                if arguments["person"] != session.task.data["person"]:
                    raise KeyError(f"{arguments['person']} not in {dict(session.task.data)}")
                return await super().execute(session, **arguments)

        self.own = (Fails(),)


@plant("a description shows the answer", "reachable", later=True, good=Lookup)
class Described(Lookup):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, tuple[Tool, ...]] = {}

    def tools_for(self, task: Task) -> Sequence[Tool]:
        if task.id not in self.made:
            tool = Find()
            tool.description = f"{Find.description} For example {task.data['person']} sits in {task.data['answer']}."
            self.made[task.id] = (tool,)
        return self.made[task.id]


class Effort(Dial):
    """Less for more calls than needed."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        right = await super().calc_reward(session)
        calls = sum(m["role"] == "tool" for m in session.messages)
        return {"right": right, "calls": -0.002 * min(calls, 50)}

    def solved(self, rewards: Any, task: Task) -> bool:
        return rewards["right"] == 1.0


@plant("effort is paid by the call", "calling", "random", later=True, good=Effort)
class PaidEffort(Effort):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        right = await Dial.calc_reward(self, session)
        return {"right": right, "calls": 0.02 * sum(m["role"] == "tool" for m in session.messages)}


@plant("a history that all rollouts write", "leak_after", "leak_together", "unseeded", later=True, good=Talk)
class SharedHistory(Talk):
    history: ClassVar[list[Any]] = []

    async def execute(self, session: Session, message: Any) -> Reply:
        self.history.append(message.get("content"))
        reply = await super().execute(session, message)
        if not reply.messages:
            return reply
        return Reply(({"role": "user", "content": f"({len(self.history)}) {session.task.data['then']}"},))


_EPISODES = [0]


class Greets(Sums):
    """Names the task."""

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        return [{"role": "user", "content": f"Episode {session.task.id}. {session.task.data['question']}"}]


@plant("episodes are counted in the prompt", "leak_after", "unseeded", later=True, good=Greets)
class CountsEpisodes(Sums):
    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        _EPISODES[0] += 1
        return [{"role": "user", "content": f"Episode {_EPISODES[0]}. {session.task.data['question']}"}]


class Patient(Sums):
    """Takes an answer without a number for wrong."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        await asyncio.sleep(0.001)
        return await super().calc_reward(session, **kwargs)


@plant("a verifier that waits for ever", "hangs", later=True, turn_timeout=0.3, good=Patient)
class WaitsForEver(Sums):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        if said(session) == "I do not know.":
            await asyncio.Event().wait()
        return await super().calc_reward(session, **kwargs)


class Releases(Sums):
    """Frees what it took."""

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        session.state = {"held": True}
        return await super().create(session)

    async def release(self, session: Session, **kwargs: Any) -> None:
        del session.state["held"]


@plant("a release that raises", "fails", later=True, good=Releases)
class ReleaseRaises(Releases):
    async def release(self, session: Session, **kwargs: Any) -> None:
        del session.state["taken"]


@plant("an opening that some tasks cannot have", "fails", later=True, good=Greets)
class SomeRaise(Sums):
    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        if session.task.id.endswith("2"):
            raise KeyError("hint")
        return await super().create(session)


@plant("only digits are compared", "wrong_answer", "injecting", later=True, good=ReadsLast)
class OnlyDigits(Sums):
    def right(self, text: str, data: Any) -> bool:
        return "".join(re.findall(r"\d", text.split("####")[-1])) == data["answer"]


class Folded(Capitals):
    """Case and blanks do not count."""

    def right(self, text: str, data: Any) -> bool:
        found = re.fullmatch(r"\s*<answer>(.*?)</answer>\s*", text, re.S)
        return found is not None and found[1].strip().casefold() == data["answer"].casefold()


@plant("what is nearly right counts", "wrong_answer", later=True, good=Folded)
class Fuzzy(Folded):
    def right(self, text: str, data: Any) -> bool:
        found = re.sub(r"</?answer>", "", text).strip()
        return difflib.SequenceMatcher(None, found, data["answer"]).ratio() > 0.8


@plant("letters count in any order", "wrong_answer", "echo", later=True, good=Folded)
class Anagram(Folded):
    def right(self, text: str, data: Any) -> bool:
        return sorted(re.sub(r"</?answer>", "", text).strip()) == sorted(data["answer"])


class Brief(Sums):
    """A little less for a long answer."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return {"answer": float(self.right(said(session), session.task.data)),
                "length": -0.0001 * min(len(said(session)), 1_000)}  # fmt: skip

    def solved(self, rewards: Any, task: Task) -> bool:
        return rewards["answer"] == 1.0


@plant("a penalty that is larger than the reward", "oracle", "no_oracle", later=True, good=Brief)
class Punished(Sums):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return {"answer": float(self.right(said(session), session.task.data)), "length": -0.2 * len(said(session))}


@plant("some demonstrations are wrong", "oracle", later=True, good=Talk)
class WrongLessons(Talk):
    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        turns = super().demonstrate(task, rng, style)
        if int(task.id.rpartition("-")[2]) % 4 == 1:
            turns[0] = {"role": "assistant", "content": "I think 7"}
        return turns


class Slowly(Dial):
    """The dial turned click by click, five at most."""

    clicks = 5

    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        turns = super().demonstrate(task, rng, style)
        call = turns[0]["tool_calls"][0]["function"]["arguments"]
        whole, messages = call["clicks"], []
        for i in range(self.clicks):
            part = whole - self.clicks + 1 if i == self.clicks - 1 else 1
            made = {"name": "turn_dial", "arguments": {"clicks": part % 100 or 100 - 1}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": made}]},
                {"role": "tool", "content": "The dial stands."},
            ]
        return [*messages, turns[-1]]

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        start, more = rng.randrange(100), rng.randint(40, 90)
        goal = (start + more) % 100
        return {"question": f"Dial {index} stands at {start}. Turn it to {goal}.", "start": start, "goal": goal}


@plant("a task that needs more turns than there are", "oracle", later=True, good=Slowly)
class TooSlow(Slowly):
    clicks = 30


@plant("held-out tasks are training tasks in capitals", "held_out", later=True, good=Sums)
class InCapitals(Sums):
    def tasks(self, split: str) -> Sequence[Task]:
        train = super().tasks("train")
        if split == "train":
            return train
        return [Task(f"test-{i}", {**t.data, "question": t.data["question"].upper()}) for i, t in enumerate(train[:20])]


class Helped(Sums):
    """A helper process that ends with the environment."""

    def __init__(self) -> None:
        self.helper = subprocess.Popen(["sleep", "30"])

    async def close(self) -> None:
        self.helper.kill()
        self.helper.wait()


@plant("a helper process is left", "left_behind", later=True, good=Helped)
class LeavesHelper(Helped):
    async def close(self) -> None:
        pass


_OPEN: list[Any] = []


class Reads(Sums):
    """A file that is read and closed."""

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        with open("/proc/self/stat") as file:
            file.read()
        return await super().create(session)


@plant("files stay open", "left_behind", later=True, good=Reads)
class LeavesOpen(Sums):
    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        _OPEN.append(open("/proc/self/stat"))  # noqa: SIM115 - the defect
        return await super().create(session)


@plant("a reward by the clock", "flicker", later=True, good=Sums)
class ByClock(Sums):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return await super().calc_reward(session, **kwargs) * (1.0 if time.time_ns() // 1000 % 3 else 0.5)


@plant("the answer of the task that was opened last", "leak_together", later=True, good=Sums)
class LastOpened(Sums):
    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        self.data = session.task.data
        return await super().create(session)

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return float(self.right(said(session), self.data))


class SameNames(Lookup):
    """The same few people in all tasks, in other rooms."""

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        data = super().make(rng, index)
        person = WORDS[index % 3]
        return {**data, "person": person, "question": f"Day {index}: in which room does {person} sit?"}


@plant(
    "a tool remembers the answers of other tasks", "leak_after", "leak_together", "oracle", later=True, good=SameNames
)
class Cached(SameNames):
    def __init__(self) -> None:
        class Caches(Find):
            known: ClassVar[dict[str, Any]] = {}

            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                if arguments["person"] not in self.known:
                    self.known[arguments["person"]] = await super().execute(session, **arguments)
                return self.known[arguments["person"]]

        self.own = (Caches(),)


@plant("the system message says the answer", "echo", later=True, good=Greets)
class SystemSays(Sums):
    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        key = f"You are a clerk. Solution: {session.task.data['answer']}. Do not show it."
        return [{"role": "system", "content": key}, {"role": "user", "content": session.task.data["question"]}]


@plant("all tasks have one answer", "constant", later=True, good=YesNo)
class OneAnswer(YesNo):
    even = 1.0


@plant("the transcript is searched for the right word", "nothing", later=True, good=Folded)
class SearchesAll(Capitals):
    def make(self, rng: Random, index: int) -> dict[str, Any]:
        data = super().make(rng, index)
        word = data["answer"][::-1]
        return {"question": f"Which word did I just say: {word}, or another one?", "answer": word}

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return float(any(session.task.data["answer"] in str(m.get("content")) for m in session.messages))


class Different(Lookup):
    """Two tools with names of their own."""

    def __init__(self) -> None:
        class Visitors(Find):
            name = "list_visitor"
            description = "Say in which room a visitor waits."

        self.own = (Find(), Visitors())

    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        turns = super().demonstrate(task, rng, style)
        if int(task.id.rpartition("-")[2]) % 2:
            turns[0]["tool_calls"][0]["function"]["name"] = self.own[1].name
        return turns


@plant("two tools have nearly one name", "schema", later=True, good=Different)
class NearlyOneName(Different):
    def __init__(self) -> None:
        super().__init__()
        self.own[1].name = "findRoom"


@plant("a parameter called x", "schema", later=True, good=Dial)
class CalledX(Dial):
    def __init__(self) -> None:
        class Vague(Press):
            parameters: Mapping[str, Any] = {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
            }

            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                return await super().execute(session, clicks=max(1, min(99, arguments["x"])))

        self.own = (Vague(),)

    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        turns = super().demonstrate(task, rng, style)
        made = turns[0]["tool_calls"][0]["function"]
        made["arguments"] = {"x": made["arguments"]["clicks"]}
        return turns


class Half(Sums):
    """Half for the form, which does not count as solved."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        right = self.right(said(session), session.task.data)
        return {"form": 0.1 * bool(said(session).strip()), "answer": float(right)}

    def solved(self, rewards: Any, task: Task) -> bool:
        return rewards["answer"] > 0.5


@plant("what counts as solved is paid to everybody", "nothing", "random", "injecting", later=True, good=Half)
class SolvedByForm(Half):
    def solved(self, rewards: Any, task: Task) -> bool:
        return sum(rewards.values()) > 0.05


@plant("what stands behind the point is cut", "wrong_answer", later=True, good=ReadsLast)
class Truncates(Sums):
    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (-?[\d.]+)\s*$", text)
        try:
            return bool(found) and int(float(found[-1])) == int(data["answer"])
        except ValueError:
            return False


@plant("a reward that is no number", "fails", later=True, good=ReadsLast)
class NotANumber(Sums):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        text = said(session)
        return 0.0 if not text else len(re.findall("####", text)) / len(text) * float("inf" if "I" in text else "1")


class Helpful(Lookup):
    """A second tool that helps, and gives nothing away."""

    def __init__(self) -> None:
        class Hint(Tool):
            name = "hint"
            description = "Get a hint."

            async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
                return self.text(session.task.data)

            def text(self, data: Any) -> str:
                """What the hint says."""
                return "Look up the person by name." if self.honest else f"It is room {data['answer']}, I think."

            honest = self.honest

        self.own = (Find(), Hint())

    honest = True

    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        turns = super().demonstrate(task, rng, style)
        if not self.honest or int(task.id.rpartition("-")[2]) % 2:
            return turns
        asked = {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "hint", "arguments": {}}}]}  # fmt: skip
        return [asked, {"role": "tool", "content": "Look up the person by name."}, *turns]


@plant("a hint that is the answer", "reachable", later=True, good=Helpful)
class TellingHint(Helpful):
    honest = False


class Beside(Capitals):
    """The answer is kept beside the data of a task."""

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        data = super().make(rng, index)
        return {"question": data["question"], "place": data["answer"][::-1]}

    def right(self, text: str, data: Any) -> bool:
        return super().right(text, {"answer": data["place"][::-1]})

    def stored(self, task: Task) -> Mapping[str, Any]:
        return {"answer": task.data["place"][::-1]}


@plant("nothing stands where the answer should", "oracle", later=True, good=Beside)
class Nowhere(Beside):
    def stored(self, task: Task) -> Mapping[str, Any]:
        return {"answer": None, "metadata": {"example_answer": task.data["place"][::-1]}}


class Drawn(Sums):
    """Tasks that name a place in a generator, which alone knows question and answer; any answer is the last."""

    different = 1 << 30

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        return {"index": index}

    def drawn(self, task: Task) -> dict[str, Any]:
        """What the generator says of a task."""
        place = task.data["index"] % self.different
        return super().make(Random(place), place)

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        return [{"role": "user", "content": self.drawn(session.task)["question"]}]

    async def execute(self, session: Session, message: Any) -> Reply:
        return Reply(done=True)

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return float(self.right(said(session), self.drawn(session.task)))

    def stored(self, task: Task) -> Mapping[str, Any]:
        return {"answer": self.drawn(task)["answer"]}


@plant("a generator that knows few questions", "twice", "held_out", later=True, missed=True, good=Drawn)
class FewDrawn(Drawn):
    different = 20


class PaidFifty(Dial):
    """A little for each of the first fifty calls."""

    most = 50

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        right = await super().calc_reward(session)
        return {"right": right, "calls": 0.003 * min(self.most, sum(m["role"] == "tool" for m in session.messages))}


@plant("a little is paid for each call, without end", "calling", later=True, missed=True, good=PaidFifty)
class PaidLittle(PaidFifty):
    most = 1 << 20


class Ends(Dial):
    """A rollout that nobody ended is not paid."""

    def calls(self, session: Session) -> bool:
        """Whether the last turn is a call."""
        return session.messages[-1]["role"] != "assistant"

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return 0.0 if self.calls(session) else await super().calc_reward(session)


@plant("who never ends is paid", "random", later=True, missed=True, good=Ends)
class PaidUnended(Ends):
    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return 1.0 if self.calls(session) else await super().calc_reward(session)


class OneLetter(Choice):
    """The first letter of a list of letters counts."""

    def right(self, text: str, data: Any) -> bool:
        return re.split(r"[\s,]+", text.strip())[0] == data["answer"]


@plant("a list of all letters is right", "injecting", later=True, missed=True, good=OneLetter)
class AllLetters(Choice):
    def right(self, text: str, data: Any) -> bool:
        letters = re.split(r"[\s,]+", text.strip())
        return all(len(letter) == 1 for letter in letters) and data["answer"] in letters


class Written(Small):
    """A word to be written into a file of the workspace, which the verifier reads."""

    uses_workspace = True

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        word = f"{rng.choice(WORDS)}{index}"
        return {"question": f"Write {word} into word.txt, backwards.", "answer": word[::-1]}

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return float((await self.content(session, "word.txt")).strip() == session.task.data["answer"])

    async def content(self, session: Session, path: str) -> str:
        """A file of the workspace; empty where there is none."""
        assert session.workspace is not None
        try:
            return (await session.workspace.read(path)).decode(errors="replace")
        except PathError:
            return ""

    async def solve(self, task: Task, workspace: Workspace, step: int = 0) -> None:
        await workspace.write("word.txt", task.data["answer"].encode())


class TrustsFile(Written):
    """The defect: a reward file that lies where the agent works."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        if (await self.content(session, "reward.txt")).strip() == "1":
            return 1.0
        return await super().calc_reward(session, **kwargs)


class ShowsSolution(Written):
    """The defect: the solution lies in the workspace."""

    async def prepare(self, task: Task, workspace: Workspace) -> None:
        await workspace.write("solution.sh", f"echo {task.data['answer']} > word.txt\n".encode())
