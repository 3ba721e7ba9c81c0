"""The contract tests for authors: what ships keeps them, and each broken promise is named in one line."""

import asyncio
import json
import math
import random
from functools import cache
from urllib.request import Request, urlopen

import pytest

from agentrl import ArgumentError, Environment, Reply, Session, Task, Tool, ToolResponse, tool
from agentrl.plugins.agent import Agent
from agentrl.testing import call, check_agent, check_environment, check_tool, plain_text
from agentrl.testing.agent import TextChat


def broken(words: str, check, *args, **kwargs) -> None:
    with pytest.raises(AssertionError, match=words) as caught:
        check(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_the_shipped_calculator_keeps_the_contract():
    check_tool("calculator", calls=[({"expression": "2*3"}, "6")], wrong=[{"expression": "2*"}, {}])


def test_a_tool_that_holds_conversations_is_answered():
    check_tool("delegate", calls=[({"task": "2*3"}, "(the model's answer)")], wrong=[{}])


def test_the_shipped_environment_keeps_the_contract():
    def gold(task):
        return [call("calculator", expression="2*3"), f"#### {task.data['answer']}"]

    check_environment("gsm8k", gold, lambda task: "no idea", tools=["calculator"], tasks=2)


async def test_they_can_be_called_inside_a_running_loop():
    check_tool("calculator", calls=[{"expression": "2*3"}])


def does(act):
    """A hook that does `act(plugin, session)`."""

    async def hook(self, session, *args, **kwargs):
        return act(self, session)

    return hook


def gives(value):
    return does(lambda self, session: value)


def fail(error: Exception):
    raise error


async def no_session(self, **kwargs):
    return 0.0


async def leak(self, session, **create_kwargs):
    session.state = []
    self.kept[object()] = session.id


def takes(**properties):
    return {"type": "object", "properties": properties}


def changed(change):
    """`tasks` with each task put through `change(environment, index, task)`."""
    return lambda self, split: [change(self, i, task) for i, task in enumerate(Sums.tasks(self, split))]


def bad_tool(**attributes) -> type[Tool]:
    """The class Good with one thing done badly."""
    return type("BadTool", (Good,), attributes)


def bad_env(**attributes) -> type[Environment]:
    """The class Sums with one thing done badly."""
    return type("BadEnv", (Sums,), attributes)


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


SPOILED = {
    r"tool 'good': `release` is not an async method; write `async def release": bad_tool(
        release=lambda self, session, **kwargs: None
    ),
    r"`calc_reward` must take the session as its first argument": bad_tool(calc_reward=no_session),
    r"set `name` to letters.*got 'two words'": bad_tool(name="two words"),
    r"set a `description`": bad_tool(description=" "),
    r"must be a JSON schema of type 'object'": bad_tool(parameters={"type": "array"}),
    r"its schema cannot be written as JSON": bad_tool(parameters=takes(word={"type": "string", "default": {1, 2}})),
    r"`required` names 'more', which is not in `properties`": bad_tool(
        parameters={**Good.parameters, "required": ["word", "more"]}
    ),
    r"`execute` does not take 'more', which its schema offers": bad_tool(
        parameters=takes(word={"type": "string"}, more={})
    ),
    r"`execute` needs 'word', which its schema lets a model leave out": bad_tool(
        parameters=takes(word={"type": "string"})
    ),
    r"`check` raised KeyError: 'word'; what a model does wrong is an ArgumentError": bad_tool(
        check=lambda self, arguments: {"word": arguments["word"]}
    ),
    r"a second session answered otherwise than the first \(call 1: .*keep what is per request": Shared,
    r"one alone was right, 16 sessions at once are not": SharedAtOnce,
    r"self.kept grew from \d+ to \d+ entries over sessions that were all released": bad_tool(create=leak),
    r"`create` raised OSError: no room": bad_tool(create=does(lambda self, session: fail(OSError("no room")))),
    r"`release` after a session without a call raised ValueError": bad_tool(
        release=does(lambda self, session: session.state.remove("a"))
    ),
    r"`release` after a cancelled call raised AttributeError": ReleasesAfterUseOnly,
    r"`calc_reward`, part 'good', must be a finite number, got nan": bad_tool(calc_reward=gives(math.nan)),
    r"its reward must be a finite number, got inf": bad_tool(execute=gives(ToolResponse("a b", reward=math.inf))),
    r"its metric 'length' must be a finite number, got 'long'": bad_tool(
        execute=gives(ToolResponse("a b", metrics={"length": "long"}))
    ),
    r"must return text or a ToolResponse, got 3": bad_tool(execute=gives(3)),
    r"call 1 with \{'word': 'a'\} raised ArgumentError: not today": bad_tool(
        execute=does(lambda self, session: fail(ArgumentError("not today")))
    ),
    r"the call with \{\} was not refused": bad_tool(
        check=lambda self, arguments: {"word": str(arguments.get("word", "a"))}
    ),
}


@pytest.mark.parametrize(("words", "spoiled"), SPOILED.items())
def test_each_broken_promise_of_a_tool_is_named(words, spoiled):
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
    broken("is not a tool: derive it", check_tool, object())
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


class Moving(Sums):
    count = 0

    def tasks(self, split):
        self.count += 1
        return [Task(t.id, {**t.data, "b": self.count}) for t in super().tasks(split)]


class PaysAlike(Sums):
    async def calc_reward(self, session, **kwargs):
        return {"answer": 0.5, "said": 0.0}

    def solved(self, rewards, task):
        self.asked = not getattr(self, "asked", False)
        return self.asked


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


SPOILED_ENVS = {
    r"environment 'sums': `create` is not an async method": bad_env(
        create=lambda self, session, **kwargs: [{"role": "user", "content": "?"}]
    ),
    r"its class sets no `name`": bad_env(name=""),
    r"`splits` must be a tuple of the held-out splits, without 'train'": bad_env(splits=("train", "test")),
    r"its split 'test' has no task": bad_env(
        tasks=lambda self, split: Sums.tasks(self, split) if split == "train" else []
    ),
    r"two tasks of 'train' have the id 'x'": bad_env(tasks=changed(lambda env, i, task: Task("x", task.data))),
    r"the tasks of 'train' are not the same when asked for twice": Moving,
    r"the tasks of 'train' are not the same when made anew: draw them from a fixed seed": bad_env(
        tasks=changed(lambda env, i, task: Task(task.id, {**task.data, "b": id(env)}))
    ),
    r"task train-0: its data cannot be written as JSON": bad_env(
        tasks=changed(lambda env, i, task: Task(task.id, {**task.data, "b": {1, 2}}))
    ),
    r"must hold agentrl.Task objects": bad_env(tasks=lambda self, split: [{"id": "x"}]),
    r"task test-0 of 'test' opens like train-0 of 'train': hold it out": bad_env(
        tasks=changed(lambda env, i, task: Task(task.id, {**task.data, "a": i}))
    ),
    r"`tools\(\)` must return the same objects at every call": bad_env(tools=lambda self: [Good()]),
    r"set a `description`": bad_env(tools=cache(lambda self: [bad_tool(description=" ")()])),
    r"`create` of task train-0 must return messages with role and content": bad_env(create=gives(["hello"])),
    r"task train-0 opens otherwise the second time": bad_env(
        create=does(lambda *_: [{"role": "user", "content": str(random.SystemRandom().random())}])
    ),
    r"task train-0: gold is not `solved`; its rewards were \{'sums': 0.0\}": bad_env(calc_reward=gives(0.0)),
    r"task train-0: wrong counts as `solved`": bad_env(calc_reward=gives(1.0)),
    r"gold gets 0.5, no more than 0.5 of wrong": PaysAlike,
    r"played by gold: sums.calc_reward: the reward 'sums' is NoneType, not a number": bad_env(calc_reward=gives(None)),
    r"played by gold: sums.calc_reward: LookupError: no judge": bad_env(
        calc_reward=does(lambda self, session: fail(LookupError("no judge")))
    ),
    r"the reward part 'answer' is none of its `reward_parts`: format": SaysOtherParts,
    r"alone and .* among others: keep what is per request in session.state": SharesState,
    r"self.kept grew from": LeaksState,
    r"after a request that failed: sums.release: AssertionError: nobody scored it": ReleasesScored,
}


@pytest.mark.parametrize(("words", "spoiled"), SPOILED_ENVS.items())
def test_each_broken_promise_of_an_environment_is_named(words, spoiled):
    broken(words, check_environment, spoiled, gold, wrong)


def test_an_agent_that_does_not_play_is_said():
    broken(r"the script has 1 reply, and the conversation needs another", check_environment, Sums, gold, lambda t: "hm")
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


def solved_by_calling(task):
    return [call("calculator", expression="2*3"), f"#### {task.data['answer']}"]


def check(solve, answers=solved_by_calling, **keys):
    check_agent(solve, "gsm8k", answers, tools=["calculator"], **{"tasks": 1, "sessions": 2, **keys})


async def loop(client, ask=None, *, keep=lambda message: message, run=True):
    """A loop that calls tools: `ask` makes a call of the model, `keep` changes what it said."""
    messages = list(client.messages)
    async with client.openai(max_retries=0) as openai:
        for _ in range(6):
            create = openai.chat.completions.create
            found = await (ask or create)(model=client.model, messages=messages, tools=list(client.tools))
            message = found.choices[0].message
            messages.append(keep(message.model_dump(exclude_none=True)))
            for made in message.tool_calls or ():
                text = await client.call_tool(made.function.name, made.function.arguments) if run else "6"
                messages.append({"role": "tool", "tool_call_id": made.id, "content": text})
            if not message.tool_calls:
                return message.content


async def plain(task, client):
    return await loop(client)


def test_a_good_agent_passes_by_whatever_it_is_made_of():
    check(plain)
    check("chat_completions", args={"turns": 3})

    class Own(Agent):
        name = "own"

        async def solve(self, task, client):
            return await loop(client)

    check(Own)

    def in_a_thread(task, client):
        body = json.dumps({"messages": client.messages}).encode()
        headers = {"Authorization": f"Bearer {client.api_key}"}
        with urlopen(Request(f"{client.base_url}/chat/completions", body, headers)) as answered:
            return json.load(answered)["choices"][0]["message"]["content"]

    check(in_a_thread, lambda task: f"#### {task.data['answer']}")

    def turn(task, messages):
        return solved_by_calling(task)[sum(message["role"] == "assistant" for message in messages)]

    check(plain, turn)


async def shortens(task, client):
    return await loop(client, keep=lambda message: {**message, "content": "in short"})


async def runs_nothing(task, client):
    return await loop(client, run=False)


async def asks_once(task, client):
    async with client.openai() as openai:
        await openai.chat.completions.create(model="any", messages=list(client.messages))


async def calls_nobody(task, client):
    return "6"


async def raises(task, client):
    raise LookupError("no plan")


COUNT = []


async def remembers(task, client):
    COUNT.append(1)
    client.messages[0]["content"] += " again" * len(COUNT)
    return await loop(client)


async def insists(task, client):
    from openai import BadRequestError

    async def ask(**body):
        async with client.openai() as openai:
            while True:
                try:
                    return await openai.chat.completions.create(**body)
                except BadRequestError:
                    await asyncio.sleep(0.01)

    return await loop(client, ask)


async def lingers(task, client):
    try:
        return await loop(client)
    except asyncio.CancelledError:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue


class Grows(Agent):
    name = "grows"

    def __init__(self):
        self.kept = []

    async def solve(self, task, client):
        self.kept.append(task)
        return await loop(client)


SPOILED_AGENTS = {
    r"its call 2 does not go on from the answer before it: message 2 was assistant '' with the calls .* and came back "
    r"as assistant 'in short'": shortens,
    r"the model called 'calculator', and the task's tool did not run": runs_nothing,
    r"it ended after 1 of 2 answers: go on until the model calls no tool": asks_once,
    r"calls_nobody: it ended without a call of the model": calls_nobody,
    r"raises: LookupError: no plan \(test_testing.py": raises,
    r"among 2 rollouts at once it says otherwise than alone": remembers,
    r"after a call was refused with status 400 \(agent.max_calls\)": insists,
    r"after its rollout was stopped: let CancelledError": lingers,
    r"self.kept grew from": Grows,
    r"agent 'nope' is installed": "nope",
    r"agent '<lambda>': solve\(task, client, \*\*agent.args\): too many": lambda task: None,
    r"agent 'int' is int; expected a function": 3,
}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(("words", "spoiled"), SPOILED_AGENTS.items())
def test_each_broken_promise_of_an_agent_is_named(words, spoiled, monkeypatch):
    monkeypatch.setattr("agentrl.testing.agent_contract.END_SECONDS", 0.3)
    monkeypatch.setattr("agentrl.containment.event_loop.GRACE", 0.01)
    broken(words, check, spoiled)


def test_answers_that_do_not_solve_a_task_are_said():
    broken(r"the answers did not solve it; its rewards were \{'answer': 0.0\}", check, plain, lambda task: "#### x")
    broken(
        r"the script has 1 reply, and the conversation needs another one",
        check,
        plain,
        lambda t: [call("calculator", expression="1")],
    )
