"""`agentrl try`: a tool's calls and one task of an environment, by a person, a file of replies, a model."""

import io
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_help import refused
from paths import ROOT
from PIL import Image

from agentrl import Environment, Reply, Task, Tool, ToolResponse, ToolSource, tool
from agentrl.cli import main
from agentrl.plugins.registry import installed

RECIPE = str(ROOT / "recipes" / "gsm8k_tool.yaml")
EVENTS: list[str] = []
QUESTION = "Leo gets 12 pears"
RED = Image.new("RGB", (6, 4), (255, 0, 0))


@pytest.fixture(autouse=True)
def _fresh():
    EVENTS.clear()


def said(capsys, *arguments: str, code: int = 0) -> str:
    assert main.run(["try", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


class Noted(Tool):
    """Writes its hooks down."""

    name = "noted"
    description = "Notes."
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}  # noqa: RUF012

    def __init__(self, greeting: str = "hello", times: int = 1):
        self.greeting, self.times = greeting, times

    async def create(self, session, start=0):
        session.state = start
        EVENTS.append(f"create {start}")

    async def execute(self, session, word):
        session.state += 1
        EVENTS.append(f"execute {word}")
        if word == "raise":
            raise RuntimeError("out of paper")
        if word == "end":
            return ToolResponse("the end", done=True)
        picture = (RED, b"\x89PNG 1234") if word == "picture" else ()
        return ToolResponse(
            f"{self.greeting} {word} " * self.times, picture, reward=0.5, metrics={"state": session.state}
        )

    async def calc_reward(self, session, **kwargs):
        EVENTS.append("calc_reward")
        return {"calls": session.state / 10}

    async def release(self, session, **kwargs):
        EVENTS.append("release")

    async def close(self):
        EVENTS.append("close")


class Many(ToolSource):
    async def open(self):
        @tool
        def one(x: int) -> int:
            """The first."""
            return x + 1

        return [one, Noted()]


NOTED = f"{__name__}:Noted"


def test_a_tool_is_called_with_all_its_hooks(capsys):
    out = said(
        capsys,
        NOTED,
        '{"word": "a"}',
        '{"word": "b"}',
        "--args",
        "greeting=hi",
        "--args",
        "times=2",
        "--create",
        "start=3",
    )
    assert EVENTS == ["create 3", "execute a", "execute b", "calc_reward", "release", "close"]
    assert re.search(r'^/noted \{"word": "a"\}\n\[tool noted\]\nhi a hi a', out, re.M)
    assert re.search(r"^\(noted: [\d.]+ ms, state 5\)$", out, re.M)
    assert out.count("(step reward 0.5)") == 2
    assert "reward 1.5: calls 0.5, step 1" in out


ORDERS = "\x1b]0;owned\x07\x1b[2J\rover\x08\u202egnp\u2066\x9b31m\ud800 [red]x[/red] [/nope] \\[b]"
"""What a terminal would obey, and rich's markup."""
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x0dover\x08\u202egnp\u2066\x9b31m\ud800 [red]x[/red] [/nope] \[b]"


class Loud(Noted):
    """Gives a terminal orders wherever a tool has a word."""

    name = "loud"
    description = f"Notes {ORDERS}"

    async def execute(self, session, word):
        if word == "raise":
            raise RuntimeError(ORDERS)
        return ToolResponse(ORDERS, error=word == "error")

    async def release(self, session, **kwargs):
        raise RuntimeError(ORDERS)


def test_what_tools_say_gives_the_terminal_no_orders(capsys):
    arguments = [f'{{"word": "{word}"}}' for word in ("a", "error", "raise")]
    assert main.run(["try", f"{__name__}:Loud", *arguments]) == 1
    assert main.run(["try", f"{__name__}:Loud"]) == 0
    out, logged = capsys.readouterr()
    assert re.search(r"[^\n\x20-\x7e]", out) is None
    on_one_line = SHOWN.replace(r"\x0d", " ")  # what is raised is told in one line
    assert out.count(SHOWN) + out.count(on_one_line) >= 5
    assert on_one_line in logged
    assert re.search(r"[^\n\x20-\x7e]", logged) is None


def test_a_shipped_tool(capsys):
    assert "\n6\n" in said(capsys, "calculator", '{"expression": "2*3"}')


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"word": "raise"}, r"Error: RuntimeError: out of paper(.|\n)*error of the tool"),
        ({"wrd": "a"}, r"Error: (argument 'word' is missing|unknown argument 'wrd')(.|\n)*error of the model"),
    ],
)
def test_an_error_is_shown_as_the_model_reads_it_and_is_the_exit_code(capsys, arguments, words):
    import json

    assert re.search(words, said(capsys, NOTED, json.dumps(arguments), '{"word": "b"}', code=1))
    assert EVENTS[-3:] == ["calc_reward", "release", "close"]
    assert "execute b" in EVENTS, "the session goes on"


def test_a_tool_may_end_the_episode(capsys):
    out = said(capsys, NOTED, '{"word": "end"}', '{"word": "b"}')
    assert "it ended the episode: 1 call was not made" in out
    assert "execute b" not in EVENTS


def test_images_are_written_to_files(capsys, tmp_path):
    out = said(capsys, NOTED, '{"word": "picture"}', "--images", str(tmp_path / "new"))
    file = tmp_path / "new" / "image-1.png"
    assert f"(image of 6 x 4 pixels: {file})" in out
    assert Image.open(file).getpixel((5, 3)) == (255, 0, 0)
    assert "(image that cannot be shown: it is no image that can be read)" in out


def test_without_a_call_a_tool_is_described(capsys):
    out = said(capsys, "calculator")
    assert "calculator {expression: string}" in out
    assert """agentrl try calculator '{"expression": "..."}'""" in out


def test_a_source_lists_its_tools_and_one_is_chosen(capsys):
    out = said(capsys, f"{__name__}:Many")
    assert re.search(r"^one \{x: integer\}\n  The first.\nnoted ", out, re.M)
    assert "\n8\n" in said(capsys, f"{__name__}:Many", "--tool", "one", '{"x": 7}')
    assert "choose one by --tool: one, noted" in refused(capsys, "try", f"{__name__}:Many", '{"x": 7}')
    assert "does not offer it; did you mean 'one'" in refused(capsys, "try", f"{__name__}:Many", "--tool", "on")


def write(tmp_path, text: str, name: str = "replies.txt") -> str:
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def test_a_file_of_replies_plays_a_task_of_a_recipe(capsys, tmp_path):
    replies = write(tmp_path, 'I reckon:\n/calculator {"expression": "12*7"}\n---\n/calculator\n---\nso\n#### 6\n---\n')
    out = said(capsys, RECIPE, "--replies", replies)
    assert out.index("task train-0") < out.index(QUESTION) < out.index("I reckon:") < out.index("\n84\n")
    assert "argument 'expression' is missing" in out
    assert re.search(r"^ended by stop after 3 turns and 2 tool calls\nreward 1: answer 1\nsolved: yes$", out, re.M)


def test_json_lines_play_a_task_of_an_environment(capsys, tmp_path):
    lines = [
        '{"content": "/usr\\n/bin {} too", "tool_calls": [{"name": "calculator", "arguments": {"expression": "1+1"}}]}',
        '{"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": {"name": "calculator", '
        '"arguments": "{\\"expression\\": \\"2+2\\"}"}}]}',
        '"#### 5"',
    ]
    replies = write(tmp_path, "\n\n".join(lines), "replies.jsonl")
    out = said(capsys, "gsm8k", "--replies", replies, "--tools", "calculator", "--split", "test", "--task", "test-3")
    assert "task test-3" in out
    assert "/usr\n/bin {} too" in out, "what begins with a slash and is said is no call"
    assert out.index("\n2\n") < out.index("\n4\n") < out.index("solved: no")


async def plans(task, client, calls=2):
    """An agent: what is planned in one conversation is done in another."""
    async with client.openai(max_retries=0) as openai:

        async def ask(*messages):
            found = await openai.chat.completions.create(model="any", messages=list(messages), tools=list(client.tools))
            return found.choices[0].message

        first = {"role": "user", "content": "a plan?"}
        plan = await ask(first)
        done = await ask(client.messages[0], {"role": "user", "content": f"the plan: {plan.content}"})
        text = "nothing"
        for call in done.tool_calls or ():
            text = await client.call_tool(call.function.name, call.function.arguments)
        for _ in range(calls - 2):
            await ask(first, {"role": "assistant", "content": plan.content}, {"role": "user", "content": text})
        return {"got": text}


AGENT = f"agent={__name__}:plans"


def test_an_agent_of_a_recipe_does_a_task(capsys, tmp_path):
    replies = write(tmp_path, 'calculate\n---\n/calculator {"expression": "12*7"}\n---\n#### 6')
    out = said(capsys, RECIPE, f"agent={{name: {__name__}:plans, args: {{calls: 3}}}}", "--replies", replies)
    assert f"agent {__name__}:plans" in out
    assert out.index("a plan?") < out.index("calculate") < out.index("(call 2 begins a conversation)")
    assert out.index("(call 2") < out.index(QUESTION) < out.index("the plan: calculate") < out.index("(call 3 goes on")
    assert re.search(r"^\(call 3 goes on from answer 1\)\n\[user\]\n84\n\[assistant\]\n#### 6$", out, re.M)
    assert out.count("a plan?") == 1
    assert re.search(r"^the agent returned {'got': '84'}\nended by stop after 3 turns and 1 tool call$", out, re.M)
    assert "solved: yes" in out


def test_a_person_answers_an_agent_and_may_leave(capsys, monkeypatch):
    typed(monkeypatch, 'calculate\n/calculator {"expression": "1+1"}\n')
    out = said(capsys, RECIPE, AGENT)
    assert "the plan: calculate" in out
    assert "(calculator: " in out
    assert "the agent returned {'got': '2'}" in out
    typed(monkeypatch, "calculate\n")
    assert "quit after 1 turn: released, without a reward" in said(capsys, RECIPE, AGENT, code=1)


def test_a_program_and_an_agent_that_fails_say_so(capsys, tmp_path):
    program = "agent={command: [sh, -c, 'echo no plan; exit 3']}"
    out = said(capsys, RECIPE, program, "--replies", write(tmp_path, "x"), code=1)
    assert "agent sh -c 'echo no plan; exit 3'" in out
    assert "[output of the agent]\nno plan\nthe agent ended with exit code 3" in out
    assert "failed (agent): agent sh: it ended without a call of the model" in out


@tool
def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


class Talk(Environment):
    """Talks back once, pays a step reward for it, and brings a tool whose state is its own."""

    name = "talk"
    splits = ()

    def __init__(self, source="generated", fails=False):
        self.fails = fails

    def tools(self):
        return (shout,)

    def tasks(self, split):
        return [Task("t0", {})]

    async def create(self, session, **create_kwargs):
        EVENTS.append("create")
        return [{"role": "user", "content": "Hello [bold]you[/bold]?"}]

    async def execute(self, session, message):
        if message["content"] == "bye":
            return Reply(done=True)
        if self.fails:
            raise LookupError("lost the thread")
        return Reply(messages=({"role": "user", "content": "And?"},), reward=0.25)

    async def calc_reward(self, session, **kwargs):
        return {"talk": 0.5}

    async def release(self, session, **kwargs):
        EVENTS.append("release")

    async def close(self):
        EVENTS.append("close")


def test_the_environment_speaks_between_turns_and_brings_tools(capsys, tmp_path):
    out = said(capsys, f"{__name__}:Talk", "--replies", write(tmp_path, 'hm\n---\n/shout {"text": "hey"}\n---\nbye'))
    assert "Hello [bold]you[/bold]?" in out
    assert out.index("And?") < out.index("(step reward 0.25)") < out.index("HEY") < out.index("reward 0.75")
    assert out.count("(step reward") == 1
    assert EVENTS == ["create", "release", "close"]


def test_what_the_machinery_does_wrong_is_a_line(capsys, tmp_path):
    out = said(capsys, f"{__name__}:Talk", "--args", "fails=true", "--replies", write(tmp_path, "hm"), code=1)
    assert re.search(r"^failed \(environment\): talk.execute: LookupError: lost the thread", out, re.M)
    assert EVENTS == ["create", "release", "close"]


def test_a_script_that_is_too_short_says_so(capsys, tmp_path):
    out = said(capsys, f"{__name__}:Talk", "--replies", write(tmp_path, "hm"), code=1)
    assert "the script has 1 reply, and the conversation needs another" in out
    assert EVENTS == ["create", "release", "close"]


def typed(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_person_plays(capsys, monkeypatch):
    typed(monkeypatch, '?\n/calculator {"expression": "12*7"}\n/calculator {bad\nwell\\\n#### 6\n')
    out = said(capsys, RECIPE)
    assert out.count('A call is /calculator {"expression": "..."}') == 2, "at the start and when asked"
    assert "you> [tool calculator]\n84\n" in out
    assert "Error: the arguments are not valid JSON" in out
    assert "solved: yes" in out


def test_a_person_may_leave(capsys, monkeypatch):
    typed(monkeypatch, "hm\n")
    out = said(capsys, f"{__name__}:Talk", code=1)
    assert "quit after 1 turn: released, without a reward" in out
    assert out.count("(step reward 0.25)") == 1
    assert EVENTS == ["create", "release", "close"]


@pytest.mark.slow
def test_ctrl_c_in_mid_game_releases_and_ends_at_once():
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from agentrl.cli.main import main; main()"
    arguments = [sys.executable, "-u", "-c", code, "try", f"{Path(__file__).stem}:Talk"]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout is not None
    seen = b""
    while not seen.endswith(b"you> "):
        byte = child.stdout.read(1)
        assert byte, seen
        seen += byte
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert b"interrupted: the environment and its tools were released" in out
    assert b"Traceback" not in out
    assert child.returncode == 130


@pytest.mark.slow
def test_a_model_plays_by_real_sampling(capsys):
    for agent in ((), ("agent=chat_completions",)):
        keys = (*agent, "train.threads=1", "--model", "tiny", "--split", "test", "--task", "1", "--seed", "5")
        out = said(capsys, RECIPE, *keys)
        assert re.search(r"^\[user\]\nThere are 5 rows(.|\n)*^\[assistant\]\n(/calculator|####)", out, re.M)
        assert re.search(r"^ended by \w+ after(.|\n)*^reward [01]: answer [01]\nsolved: (yes|no)$", out, re.M)
        assert ("the agent returned '" in out) is bool(agent)


MISTAKES = [
    (("calculatr",), r"no tool, environment, trainer or recipe 'calculatr' is installed; did you mean 'calculator'\?"),
    (("chat_completions",), r"'chat_completions' is an agent: try a recipe with it, such as agentrl try gsm8k_tool"),
    (("calculator", "{bad"), r"call 1: '\{bad' is not JSON"),
    (("calculator", "{}", "[1]"), r"call 2: '\[1\]': expected a JSON object"),
    (("calculator", "{}", "--args", "max_operation=2"), r"takes no such argument; did you mean 'max_operations'"),
    (("calculator", "{}", "--args", "max_operations"), r"--args max_operations: expected KEY=VALUE"),
    (("calculator", "{}", "--create", "=3"), r"--create =3: expected KEY=VALUE"),
    (("gsm8k", "--task", "50000"), r"--task 50000: train of 'gsm8k' has 50000 tasks: expected 0 to 49999"),
    (("gsm8k", "--task", "-1"), r"--task -1: .*expected 0 to 49999"),
    ((f"{__name__}:Talk", "--task", "nine"), r"--task nine: train of 'talk' has no task with that id"),
    (("gsm8k", "--split", "tset"), r"--split tset: environment 'gsm8k' has no such split; did you mean 'test'\?"),
    (("gsm8k", "--replies", "nowhere.txt"), r"--replies nowhere.txt: cannot be read: No such file"),
    (("gsm8k", "--replies", "a", "--model", "b"), r"--replies and --model exclude each other"),
    (("gsm8k", "{}"), r"an environment takes no positional arguments"),
    (("gsm8k", "--tools", "calculater"), r"no tool 'calculater' is installed; did you mean 'calculator'"),
    (("gsm8k", "--source", "none.jsonl"), r"none.jsonl"),
    (("gsm8k", "--model", "./none"), r"model.path: ./none is no folder"),
    ((RECIPE, "rollout.m=3"), r"rollout.m: unknown key"),
    ((RECIPE, "--tools", "calculator"), r"a recipe names its environment and tools itself"),
    (("nowhere.yaml",), r"nowhere.yaml: no such recipe file"),
    (("no_such_module:Tool", "{}"), r"cannot be imported from 'no_such_module'"),
    ((), r"Missing argument 'what'"),
]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(a).replace(RECIPE, "R") for a, _ in MISTAKES])
def test_a_mistake_is_one_line(capsys, arguments, words):
    assert re.search(words, refused(capsys, "try", *arguments))


BAD_FILES = [
    ("r.jsonl", '"a"\n{bad', r"r.jsonl, line 2: is not JSON"),
    ("r.jsonl", '{"text": "a"}', r"line 1: has no field 'text'; expected a text, or an object with content"),
    ("r.jsonl", "[1]", r"line 1: is not a reply"),
    ("r.jsonl", '{"tool_calls": [{"arguments": {}}]}', r"a tool call needs name and arguments"),
    ("r.jsonl", '{"content": 3}', r"content must be text"),
    ("r.txt", "\n \n", r"contains no reply"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES)
def test_a_bad_file_of_replies_is_named_with_its_line(capsys, tmp_path, name, content, words):
    assert re.search(words, refused(capsys, "try", "gsm8k", "--replies", write(tmp_path, content, name)))


def test_a_file_that_is_no_text_is_refused(capsys, tmp_path):
    (tmp_path / "r.txt").write_bytes(b"\xff\xfe")
    assert "not a text file in UTF-8" in refused(capsys, "try", "gsm8k", "--replies", str(tmp_path / "r.txt"))


_ELSEWHERE = ("foreign", "openenv")  # which are nothing without somebody else's interpreter or server


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({plugin.name for plugin in installed("envs")}.difference(_ELSEWHERE)))
def test_every_environment_that_ships_is_played_without_arguments(name: str, tmp_path, capsys) -> None:
    replies = tmp_path / "replies.txt"
    replies.write_text("\n---\n".join(["I do not know."] * 40), encoding="utf-8")
    printed = said(capsys, name, "--replies", str(replies), "--images", str(tmp_path))
    assert ("plays its example" in printed) == (name in ("dataset", "harbor", "object", "swe"))
    assert ("not carried by Shelf: rollout_func: the loop over turns is ours" in printed) == (name == "object")
    assert re.search(r"^reward \S+: \w+ ", printed, re.M), "the reward with its parts"
    assert printed.endswith("solved: no\n")
