"""The contract tests for authors: what ships keeps them, and each broken promise is named in one line."""

import asyncio
import math
import random

import pytest

from agentrl import ArgumentError, Environment, Reply, Session, Task, Tool, ToolResponse, tool
from agentrl.testing import call, check_environment, check_tool, plain_text
from agentrl.testing.agent import TextChat


def broken(words: str, check, *args, **kwargs) -> None:
    with pytest.raises(AssertionError, match=words) as caught:
        check(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_the_shipped_calculator_keeps_the_contract():
    check_tool("calculator", calls=[({"expression": "2*3"}, "6")], wrong=[{"expression": "2*"}, {}])


def test_the_shipped_environment_keeps_the_contract():
    def gold(task):
        return [call("calculator", expression="2*3"), f"#### {task.data['answer']}"]

    check_environment("gsm8k", gold, lambda task: "no idea", tools=["calculator"], tasks=2)


async def test_they_can_be_called_inside_a_running_loop():
    check_tool("calculator", calls=[{"expression": "2*3"}])


class Good(Tool):
    """Remembers, per session; each test below spoils one thing."""

    name = "good"
    description = "Remembers."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
    }

    def __init__(self):
        self.kept = {}

    async def create(self, session: Session, **create_kwargs) -> None:
        session.state = []

    async def execute(self, session: Session, word: str) -> ToolResponse | str:
        await asyncio.sleep(0)
        session.state.append(word)
        return " ".join(session.state)

    async def calc_reward(self, session: Session, **kwargs) -> float:
        return len(session.state) / 10

    async def release(self, session: Session, **kwargs) -> None:
        session.state.clear()


CALLS = ({"word": "a"}, ({"word": "b"}, "a b"))


def test_a_good_tool_passes():
    check_tool(Good, CALLS, wrong=[{}, {"word": "a", "loud": True}])
    check_tool(Good())


class Sync(Good):
    def release(self, session, **kwargs):
        return None


class NoSession(Good):
    async def calc_reward(self, **kwargs):
        return 0.0


class BadName(Good):
    name = "two words"


class NoDescription(Good):
    description = " "


class NoObject(Good):
    parameters = {"type": "array"}  # noqa: RUF012


class Unwritable(Good):
    parameters = {"type": "object", "properties": {"word": {"type": "string", "default": {1, 2}}}}  # noqa: RUF012


class RequiresMore(Good):
    parameters = {**Good.parameters, "required": ["word", "more"]}  # noqa: RUF012


class OffersMore(Good):
    parameters = {"type": "object", "properties": {"word": {"type": "string"}, "more": {}}}  # noqa: RUF012


class MayLeaveOut(Good):
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}}  # noqa: RUF012


class ChecksBadly(Good):
    def check(self, arguments):
        return {"word": arguments["word"]}


class Shared(Good):
    async def execute(self, session, word):
        self.kept.setdefault("all", []).append(word)
        return " ".join(self.kept["all"])


class SharedAtOnce(Good):
    """Alone it is right; at once, sessions see each other's word."""

    async def execute(self, session, word):
        self.last = f"{word} of {session.rng.random()} {id(session)}"
        mine = self.last
        await asyncio.sleep(0.001)
        return "a b same" if self.last == mine else "other"


class Leaking(Good):
    async def create(self, session, **create_kwargs):
        session.state = []
        self.kept[object()] = session.id


class CreatesBadly(Good):
    async def create(self, session, **create_kwargs):
        raise OSError("no room")


class ReleasesBadly(Good):
    async def release(self, session, **kwargs):
        session.state.remove("a")


class ReleasesAfterUseOnly(Good):
    """Trips over a session whose call was cancelled before it did anything."""

    async def create(self, session, **create_kwargs):
        session.state = ["fresh"]

    async def execute(self, session, word):
        session.state = None
        await asyncio.sleep(0)
        session.state = ["a b"]
        return "a b"

    async def release(self, session, **kwargs):
        session.state.clear()


class SwallowsCancellation(Good):
    async def execute(self, session, word):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)
        return "a b"


class BadReward(Good):
    async def calc_reward(self, session, **kwargs):
        return math.nan


class BadStep(Good):
    async def execute(self, session, word):
        return ToolResponse("a b", reward=math.inf)


class BadMetric(Good):
    async def execute(self, session, word):
        return ToolResponse("a b", metrics={"length": "long"})


class NoText(Good):
    async def execute(self, session, word):
        return 3


class Refuses(Good):
    async def execute(self, session, word):
        raise ArgumentError("not today")


class AcceptsAll(Good):
    def check(self, arguments):
        return {"word": str(arguments.get("word", "a"))}


SPOILED = [
    (Sync, r"tool 'good': `release` is no async method; write `async def release"),
    (NoSession, r"`calc_reward` must take the session as its first argument"),
    (BadName, r"set `name` to letters.*got 'two words'"),
    (NoDescription, r"set a `description`"),
    (NoObject, r"must be a JSON schema of type 'object'"),
    (Unwritable, r"its schema cannot be written as JSON"),
    (RequiresMore, r"`required` names 'more', which is not in `properties`"),
    (OffersMore, r"`execute` does not take 'more', which its schema offers"),
    (MayLeaveOut, r"`execute` needs 'word', which its schema lets a model leave out"),
    (ChecksBadly, r"`check` raised KeyError: 'word'; what a model does wrong is an ArgumentError"),
    (Shared, r"a second session answered otherwise than the first \(call 1: .*keep what is per request"),
    (SharedAtOnce, r"one alone was right, 16 sessions at once are not"),
    (Leaking, r"self.kept grew from \d+ to \d+ entries over sessions that were all released"),
    (CreatesBadly, r"`create` raised OSError: no room"),
    (ReleasesBadly, r"`release` after a session without a call raised ValueError"),
    (ReleasesAfterUseOnly, r"`release` after a cancelled call raised AttributeError"),
    (BadReward, r"`calc_reward`, part 'good', must be a finite number, got nan"),
    (BadStep, r"its reward must be a finite number, got inf"),
    (BadMetric, r"its metric 'length' must be a finite number, got 'long'"),
    (NoText, r"must return text or a ToolResponse, got 3"),
    (Refuses, r"call 1 with \{'word': 'a'\} raised ArgumentError: not today"),
    (AcceptsAll, r"the call with \{\} was not refused"),
]


@pytest.mark.parametrize(("spoiled", "words"), SPOILED, ids=[s.__name__ for s, _ in SPOILED])
def test_each_broken_promise_of_a_tool_is_named(spoiled, words):
    broken(words, check_tool, spoiled, CALLS, wrong=[{}])


def test_a_cancelled_call_must_end(monkeypatch):
    real = asyncio.wait

    async def impatient(work, timeout=None):
        return await real(work, timeout=None if timeout is None else timeout / 100)

    monkeypatch.setattr("agentrl.testing.tool.asyncio.wait", impatient)
    broken(r"a cancelled call did not end.*do not swallow", check_tool, SwallowsCancellation, CALLS)


def test_a_tool_that_asks_the_world_need_not_repeat_itself():
    @tool
    def roll(sides: int) -> int:
        """Roll a die."""
        return random.SystemRandom().randint(1, sides)

    check_tool(roll, [{"sides": 10**12}], deterministic=False)
    broken(r"a second session answered otherwise", check_tool, roll, [{"sides": 10**12}])
    broken(r"its answer must hold 'seven'", check_tool, roll, [({"sides": 6}, "seven")])


def test_what_is_no_tool_is_said():
    broken("is no tool: derive it", check_tool, object())
    broken("was refused: argument 'expression' is missing", check_tool, "calculator", [{}])


class Sums(Environment):
    """A sum; asks once more; each test below spoils one thing."""

    name = "sums"

    def tasks(self, split):
        first = 0 if split == "train" else 1000
        return [Task(f"{split}-{i}", {"a": first + i, "b": 7}) for i in range(20)]

    async def create(self, session, **create_kwargs):
        session.state = 0
        return [{"role": "user", "content": f"{session.task.data['a']}+7?"}]

    async def execute(self, session, message):
        session.state += 1
        if message["content"].isdecimal() or session.state > 1:
            return Reply(done=True)
        return Reply(messages=({"role": "user", "content": "a number, please"},))

    async def calc_reward(self, session, **kwargs):
        return {"answer": float(session.messages[-1]["content"] == str(session.task.data["a"] + 7))}


def gold(task):
    return str(task.data["a"] + 7)


def wrong(task):
    return ["hm", "hm"]


def adaptive(task, messages):
    return gold(task) if messages[-1]["content"] == "a number, please" else "let me see"


def test_a_good_environment_passes():
    check_environment(Sums, gold, wrong)
    check_environment(Sums(), adaptive, wrong)


class SyncEnv(Sums):
    def create(self, session, **create_kwargs):
        return [{"role": "user", "content": "?"}]


class Unnamed(Sums):
    name = ""


class TrainHeldOut(Sums):
    splits = ("train", "test")


class NoTask(Sums):
    def tasks(self, split):
        return super().tasks(split) if split == "train" else []


class SameIds(Sums):
    def tasks(self, split):
        return [Task("x", t.data) for t in super().tasks(split)]


class Moving(Sums):
    count = 0

    def tasks(self, split):
        self.count += 1
        return [Task(t.id, {**t.data, "b": self.count}) for t in super().tasks(split)]


class Random(Sums):
    def __init__(self):
        self.salt = random.SystemRandom().random()

    def tasks(self, split):
        return [Task(t.id, {**t.data, "b": self.salt}) for t in super().tasks(split)]


class NoJson(Sums):
    def tasks(self, split):
        return [Task(t.id, {**t.data, "b": {1, 2}}) for t in super().tasks(split)]


class NoTasks(Sums):
    def tasks(self, split):
        return [{"id": "x"}]


class NotHeldOut(Sums):
    def tasks(self, split):
        return [Task(t.id, {**t.data, "a": i}) for i, t in enumerate(super().tasks(split))]


class NewTools(Sums):
    def tools(self):
        return [Good()]


class BadTools(Sums):
    def __init__(self):
        self.own = [NoDescription()]

    def tools(self):
        return self.own


class NoMessages(Sums):
    async def create(self, session, **create_kwargs):
        return ["hello"]


class OpensAnew(Sums):
    async def create(self, session, **create_kwargs):
        return [{"role": "user", "content": str(random.SystemRandom().random())}]


class NeverPaid(Sums):
    async def calc_reward(self, session, **kwargs):
        return 0.0


class AlwaysPaid(Sums):
    async def calc_reward(self, session, **kwargs):
        return 1.0


class PaysAlike(Sums):
    async def calc_reward(self, session, **kwargs):
        return {"answer": 0.5, "said": 0.0}

    def solved(self, rewards, task):
        self.asked = not getattr(self, "asked", False)
        return self.asked


class PaysNothing(Sums):
    async def calc_reward(self, session, **kwargs):
        return None


class RaisesReward(Sums):
    async def calc_reward(self, session, **kwargs):
        raise LookupError("no judge")


class SaysOtherParts(Sums):
    reward_parts = ("format",)

    async def calc_reward(self, session, **kwargs):
        return await super().calc_reward(session)


class SharesState(Sums):
    async def create(self, session, **create_kwargs):
        self.now = session.task.data["a"]
        return await super().create(session)

    async def execute(self, session, message):
        await asyncio.sleep(0.001)
        return await super().execute(session, message)

    async def calc_reward(self, session, **kwargs):
        return {"answer": float(session.messages[-1]["content"] == str(self.now + 7))}


class LeaksState(Sums):
    def __init__(self):
        self.kept = []

    async def create(self, session, **create_kwargs):
        self.kept.append(session)
        return await super().create(session)


class ReleasesScored(Sums):
    """Releases only what it has scored."""

    async def calc_reward(self, session, **kwargs):
        session.state = "scored"
        return await super().calc_reward(session)

    async def release(self, session, **kwargs):
        assert session.state in ("scored", 0)
        if session.messages and session.messages[-1]["role"] == "user":
            raise AssertionError("nobody scored it")


SPOILED_ENVS = [
    (SyncEnv, r"environment 'sums': `create` is no async method"),
    (Unnamed, r"its class sets no `name`"),
    (TrainHeldOut, r"`splits` must be a tuple of the held-out splits, without 'train'"),
    (NoTask, r"its split 'test' has no task"),
    (SameIds, r"two tasks of 'train' have the id 'x'"),
    (Moving, r"the tasks of 'train' are not the same when asked for twice"),
    (Random, r"the tasks of 'train' are not the same when made anew: draw them from a fixed seed"),
    (NoJson, r"task train-0: its data cannot be written as JSON"),
    (NoTasks, r"must hold agentrl.Task objects"),
    (NotHeldOut, r"task test-0 of 'test' opens like train-0 of 'train': hold it out"),
    (NewTools, r"`tools\(\)` must return the same objects at every call"),
    (BadTools, r"set a `description`"),
    (NoMessages, r"`create` of task train-0 must return messages with role and content"),
    (OpensAnew, r"task train-0 opens otherwise the second time"),
    (NeverPaid, r"task train-0: gold is not `solved`; its rewards were \{'sums': 0.0\}"),
    (AlwaysPaid, r"task train-0: wrong counts as `solved`"),
    (PaysAlike, r"gold gets 0.5, no more than 0.5 of wrong"),
    (PaysNothing, r"played by gold: sums.calc_reward: the reward 'sums' is NoneType, not a number"),
    (RaisesReward, r"played by gold: sums.calc_reward: LookupError: no judge"),
    (SaysOtherParts, r"task train-0: it gives 'answer', which `reward_parts` does not name"),
    (SharesState, r"alone and .* among others: keep what is per request in session.state"),
    (LeaksState, r"self.kept grew from"),
    (ReleasesScored, r"after a request that failed: sums.release: AssertionError: nobody scored it"),
]


@pytest.mark.parametrize(("spoiled", "words"), SPOILED_ENVS, ids=[s.__name__ for s, _ in SPOILED_ENVS])
def test_each_broken_promise_of_an_environment_is_named(spoiled, words):
    broken(words, check_environment, spoiled, gold, wrong)


def test_an_agent_that_does_not_play_is_said():
    broken(r"the script has 1 reply, and the conversation wants another", check_environment, Sums, gold, lambda t: "hm")
    broken(r"the agent said NoneType in turn 0, not text", check_environment, Sums, lambda t, m: None, wrong)
    broken(r"train-0: gold is not `solved`", check_environment, Sums, lambda t: [call("echo"), "x", "y"], wrong)


def test_a_turn_is_text_and_calls():
    chat = TextChat()
    text = plain_text("/usr is a folder\nand\n/bin") + "\n" + call("look", at="the // sky") + "\n/wait"
    turn = chat.parse(chat.encode_text(text))
    assert turn.content == "/usr is a folder\nand\n/bin"
    assert [(c.name, c.arguments) for c in turn.calls] == [("look", {"at": "the // sky"}), ("wait", {})]
    assert "not valid JSON" in chat.parse(chat.encode_text("/look {at")).calls[0].error
    assert "should be an object" in chat.parse(chat.encode_text("/look [1]")).calls[0].error


def test_sessions_that_see_each_other_are_noticed_by_their_answers_alone():
    broken(r"16 sessions at once answered otherwise than one alone", check_tool, SharedAtOnce, [{"word": "a"}])
