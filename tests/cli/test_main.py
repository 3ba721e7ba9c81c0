"""The command line: what people see, and mistakes that are one line on stderr with exit code 2."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_help import refused
from paths import ROOT
from warm import Python

from agentrl import __version__
from agentrl.cli import main
from agentrl.fine_tuning.new_model import bare_tokenizer
from agentrl.recipe.load import load_recipe

RECIPE = str(ROOT / "recipes" / "gsm8k_tool.yaml")


MISTAKES = [
    (["check", RECIPE, "rollout.m=3"], r"command line: rollout.m: unknown key"),
    (["check", RECIPE, "train.lrr=3"], r"train.lrr: unknown key; did you mean 'train.lr'\?"),
    (["check", RECIPE, "rollout.n=many"], r"rollout.n: expected a whole number, got the text 'many'"),
    (["check", RECIPE, "rollout.n=1"], r"gsm8k_tool.yaml: rollout.n is 1, but grpo"),
    (["check", RECIPE, "fast"], r"'fast' is not key=value"),
    (["check", RECIPE, "tools=[calculater]"], r"no tool 'calculater' is installed; did you mean 'calculator'"),
    (["check", RECIPE, "tools.calculator.args.max_op=2"], r"tools.calculator.args.max_op: .*'max_operations'"),
    (["check", RECIPE, "env.name=gsm9k"], r"no environment 'gsm9k' is installed; did you mean 'gsm8k'\?"),
    (["check", RECIPE, "env.args.nothing=1"], r"env.args.nothing: Gsm8k takes no such argument"),
    (["check", RECIPE, "env.source=nowhere.jsonl"], r"nowhere.jsonl"),
    (["check", RECIPE, "engine.name=locl"], r"no engine 'locl' is installed; did you mean 'local'\?"),
    (["check", RECIPE, "algorithm.loss=ppo_clop"], r"no loss 'ppo_clop'; did you mean 'ppo_clip'"),
    (["check", RECIPE, "algorithm.advantage=grop"], r"no advantage 'grop'; did you mean 'grpo'"),
    (["check", RECIPE, "rewards.model=./nowhere"], r"rewards.model: ./nowhere is not a folder"),
    (["check", RECIPE, "track.trackers=[wanbd]"], r"no tracker 'wanbd' is installed; did you mean 'wandb'"),
    (["check", RECIPE, "eval.splits=[tset]"], r"eval.splits: environment 'gsm8k' has no 'tset'; did you mean 'test'"),
    (["check", RECIPE.replace("tool", "tol")], r"no such recipe file; did you mean .*gsm8k_tool.yaml"),
    (
        ["serve", "nosuch"],
        r"nosuch: no such recipe file; the nearest that ship are \S+, \S+, \S+; `agentrl recipes` lists",
    ),
    (["check"], r"Missing argument .*; see agentrl check --help"),
    (["check", RECIPE, "--fast"], r"No such option.*--fast.*; see agentrl check --help"),
    (["chek"], r"No such command 'chek'.*; see agentrl --help"),
    (["train"], r"train needs a recipe"),
    (["train", "train.steps=3"], r"train needs a recipe"),
    (["train", "--resume", "nowhere"], r"--resume nowhere: no run there"),
    (["check", "gsm8k_tol"], r"gsm8k_tol: no such recipe file; did you mean .*gsm8k_tool"),
    (["recipes", "gsm8k_tol"], r"no recipe 'gsm8k_tol' ships with agentrl; did you mean 'gsm8k_tool'"),
    (["recipes", "--copy"], r"--copy needs a name"),
    (["eval", RECIPE, "output=a", "--output", "b"], r"output=a --output b: the same twice"),
    (["eval", "--resume", "nowhere", "output=a"], r"--resume nowhere: the model and the folder stay what they are"),
    (["eval", RECIPE, "--samples", "x"], r"Invalid value for '--samples'.*; see agentrl eval --help"),
]


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(a).replace(RECIPE, "R") for a, _ in MISTAKES])
def test_a_mistake_is_one_line(capsys, arguments, words):
    assert re.search(words, refused(capsys, *arguments))


@pytest.mark.parametrize("key", ["algorithm.loss=x", "algorithm.advantage=x", "rewards.model=./x", "engine.name=x"])
def test_check_looks_names_up_before_it_prints_anything(capsys, key):
    assert main.run(["check", RECIPE, key]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


@pytest.mark.slow
def test_sft_refuses_a_folder_for_the_model_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    code = (
        "import sys\nfrom agentrl.cli.main import run\n"
        "codes = [run(['sft', 'tiny_warmstart', '--out', out]) for out in sys.argv[1:]]\n"
        "assert codes == [2, 2, 2], codes\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    folders = [tmp_path / "model", tmp_path / "file", tmp_path / "file" / "in"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, folders)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model, file, inside = done.stderr.splitlines()
    assert model.endswith("model: holds a model already (model.safetensors): remove it, or name another folder")
    assert file == inside == f"error: --out {tmp_path / 'file'} is not a folder"


@pytest.mark.parametrize("command", ["train", "eval", "sft", "reward-model"])
def test_every_command_refuses_an_unknown_key(capsys, command):
    assert "rolout: unknown key; did you mean 'rollout'?" in refused(capsys, command, RECIPE, "rolout.n=3")


def test_check_shows_what_would_run(capsys):
    assert main.run(["check", RECIPE, "rollout.n=5"]) == 0
    out = capsys.readouterr().out
    titles = re.findall(r"^(first prompt|tasks|tools|memory|devices)\b", out, re.M)
    assert titles == ["first prompt", "tasks", "tools", "memory", "devices"]
    assert "  n: 5\n" not in out
    assert main.run(["check", RECIPE, "rollout.n=5", "--recipe"]) == 0
    assert "  n: 5\n" in capsys.readouterr().out
    assert re.search(r"^train: \d+ tasks$", out, re.M)
    assert re.search(r"^test: \d+ tasks$", out, re.M)
    assert re.search(r"^calculator \{expression: string\} from agentrl \S+ \(agentrl_tools", out, re.M)
    assert '"required": ["expression"]' in out
    assert re.search(r"^first prompt \(task ", out, re.M)


def test_neither_check_nor_an_error_shows_secrets(capsys, monkeypatch):
    monkeypatch.setenv("AGENTRL_TEST_SECRET", "hunter2")
    mcp = "tools=[{name: mcp, args: {command: no-such-server, args: [--token, hunter2]}}]"
    assert (
        main.run(
            ["check", RECIPE, "--recipe", "output=${AGENTRL_TEST_SECRET}", mcp, "tools.0.args.env={MODE: hunter2}"]
        )
        == 2
    )
    out, err = capsys.readouterr()
    assert "output: ${AGENTRL_TEST_SECRET}" in out
    assert re.search(r"MCP server no-such-server --token \*\*\*: .*not found", err)
    assert "hunter2" not in out + err
    for args in ("{url: x, headers: Bearer hunter2}", "{url: 'ftp://me:hunter2@x'}", "{url: 1, env: {A: [hunter2]}}"):
        assert "hunter2" not in refused(capsys, "check", RECIPE, f"tools=[{{name: mcp, args: {args}}}]")


CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def model_folder(tmp_path):
    """A folder with a byte-level tokenizer and no weights."""
    bare_tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path


def test_check_renders_the_first_prompt_without_a_model(capsys, model_folder):
    assert main.run(["check", RECIPE, f"model.path={model_folder}"]) == 0
    prompt, _, told = capsys.readouterr().out.partition("first prompt (task train-0)\n")[2].partition("\ntools\n")
    (schema,) = re.findall(r"^  (\{.*\})$", told, re.M)
    assert f'"parameters": {schema}}}}}<|im_end|>' in prompt  # key for key as the tools were shown
    assert schema.startswith('{"type": "object", "properties": {"expression": {"type": "string", "description": ')
    assert prompt.startswith("<|im_start|>system\n{")
    assert '"name": "calculator"' in prompt
    assert re.search(r"<\|im_start\|>user\n.+<\|im_end\|>\n<\|im_start\|>assistant\n", prompt)
    assert re.search(r"^\(\d{3} tokens; rollout.max_tokens is 512", prompt, re.M)
    assert re.search(r"^\(chat: own bridge; calls as Hermes JSON", prompt, re.M)


@pytest.mark.parametrize(
    ("keys", "context"),
    [
        ([], 1024),
        (["engine.args.max_context=700"], 700),
        (["engine.name=sglang", "engine.args.urls=[http://x:1]", "model.device=cpu"], 1024),
        (["rollout.max_tokens=1024"], None),
    ],
)
def test_check_says_a_context_that_is_too_short_as_a_run_does(capsys, keys, context):
    assert main.run(["check", RECIPE, "rollout.max_tokens=5000", *keys]) == 0
    said = capsys.readouterr().out
    assert ("more than the model's context" in said) is (context is not None)
    if context is not None:
        line = f"rollout.max_tokens 5000 is more than the model's context: conversations end at {context} tokens"
        assert f"\n{line}\n" in said


def test_check_shows_the_messages_where_there_is_no_tokenizer(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else the hub is tried for half a minute
    assert main.run(["check", RECIPE, "model.path=agentrl-tests/nowhere"]) == 0
    prompt = capsys.readouterr().out.partition("first prompt (task train-0)\n")[2]
    assert prompt.startswith("user: ")
    assert "not rendered: the tokenizer of" in prompt


def test_check_refuses_a_model_folder_that_is_none(capsys):
    assert "model.path: ./nowhere is no folder" in refused(capsys, "check", RECIPE, "model.path=./nowhere")


@pytest.mark.parametrize("command", ["check", "train", "eval", "chat"])
def test_every_command_refuses_a_model_that_sees_in_an_unknown_way(capsys, command, model_folder, tmp_path):
    (model_folder / "config.json").write_text('{"model_type": "llava", "vision_config": {"hidden_size": 8}}')
    chosen = [str(model_folder)] if command == "chat" else [RECIPE, f"model.path={model_folder}"]
    line = refused(capsys, command, *chosen, f"output={tmp_path / 'run'}")
    assert "is a 'llava', which sees: of such models qwen2_vl, " in line


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("tools", [r"calculator +{agentrl} +agentrl_tools.calculator:\w+ +Works out"]),
        ("envs", [r"gsm8k +{agentrl} +agentrl_envs.gsm8k.environment:Gsm8k +\w"]),
        ("rewards", [r"match +{agentrl} +agentrl_tools.rewards.match:Match +\w"]),
        (
            "advantages",
            [r"grpo +{agentrl} +agentrl.algo.advantage:grpo +Group-relative", r"own +own 1.0 +own:f +My own"],
        ),
        ("losses", [r"ppo_clip +{agentrl} +agentrl.algo.loss:ppo_clip +\w", r"own +own 1.0 +own:f +My own"]),
        ("trackers", [r"own +own 1.0 +own:f +My own"]),
        ("engines", [r"local +{agentrl} +agentrl.engine.local.engine:LocalEngine +\S", r"sglang +{agentrl}"]),
    ],
)
def test_lists_say_what_is_installed_and_where_from(capsys, tmp_path, monkeypatch, command, rows):
    info = tmp_path / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    groups = ("advantages", "losses", "trackers")
    (info / "entry_points.txt").write_text("".join(f"[agentrl.{group}]\nown = own:f\n" for group in groups))
    (tmp_path / "own.py").write_text('def f(): "My own."')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main.run([command]) == 0
    out = capsys.readouterr().out
    for row in rows:
        assert re.search("^" + row.replace("{agentrl}", rf"agentrl {re.escape(__version__)}"), out, re.M)
    assert "broken" not in out


def test_an_empty_list_says_so(capsys, monkeypatch):
    monkeypatch.setattr("agentrl.plugins.registry._installed", lambda group, folders: [])
    assert main.run(["trackers"]) == 0
    assert capsys.readouterr().out == "nothing is installed in the group agentrl.trackers\n"


@pytest.mark.slow
def test_recipes_are_listed_printed_and_copied(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.run(["recipes"]) == 0
    listed = capsys.readouterr().out
    for path in (ROOT / "recipes").glob("*.yaml"):
        first = path.read_text().splitlines()[0].removeprefix("# ")
        assert re.search(rf"^{path.stem} +{re.escape(first)}$", listed, re.M)
        assert main.run(["recipes", path.stem]) == 0
        assert capsys.readouterr().out == path.read_text()
        into = tmp_path / "copies" / path.stem
        assert main.run(["recipes", path.stem, "--copy", "--into", str(into)]) == 0
        assert f"wrote {into / path.name}\n" in capsys.readouterr().out
        assert (into / path.name).read_text() == path.read_text()
        monkeypatch.setenv("AGENTRL_SGLANG_VENV", "/venv")
        recipe = load_recipe(into / path.name)  # with what it extends
        if recipe.sft is not None and recipe.sft.new_model is not None:
            assert Path(recipe.sft.new_model.chat_template).parent == into
            assert Path(recipe.sft.new_model.chat_template).is_file()


def test_a_copy_overwrites_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.run(["recipes", "text_game", "--copy"]) == 0
    assert main.run(["recipes", "tiny_warmstart", "--copy"]) == 0  # whose template is there already, unchanged
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["text_game.yaml", "tiny_template.jinja", "tiny_warmstart.yaml"]
    capsys.readouterr()
    assert "text_game.yaml already exists: remove it, or choose another" in refused(
        capsys, "recipes", "text_game", "--copy"
    )
    (tmp_path / "text_game.yaml").unlink()
    (tmp_path / "tiny_template.jinja").write_text("mine")
    assert "tiny_template.jinja already exists" in refused(capsys, "recipes", "text_game", "--copy")
    assert not (tmp_path / "text_game.yaml").exists()
    assert "cannot be written: Not a directory" in refused(
        capsys, "recipes", "user_sim", "--copy", "--into", "tiny_warmstart.yaml/x"
    )


def test_a_broken_plugin_is_listed_with_the_reason(capsys, tmp_path, monkeypatch):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.tools]\nshaky = no_such_module:x\ncalculator = other:x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main.run(["tools"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^shaky +broken 1.0 +no_such_module:x +broken: .*ModuleNotFoundError", out, re.M)
    assert len(re.findall(r"^calculator .* clash: 2 distributions offer this name", out, re.M)) == 2
    assert re.search(r"^calc_gsm8k_reward .*Grades an answer", out, re.M)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "no\x1b[31m\u202e.yaml"],
        ["check", RECIPE, "train.\x1b[31m\u202e=3"],
        ["tools", "--\x1b[31m\u202e"],
        ["try", "no\x1b[31m\u202e"],
        ["check", RECIPE, 'model.path="[/nope]"', 'env.source="[/nope]\\x1b[31m\\u202e"'],
    ],
    ids=repr,
)
def test_no_error_gives_the_terminal_orders(capsys, arguments):
    assert main.run(arguments) == 2
    out, err = capsys.readouterr()
    assert re.search(r"[^\n\x20-\x7e]", out + err) is None
    assert r"\x1b[31m\u202e" in err


def test_a_live_terminal_shows_orders_and_obeys_its_own(capsys):
    """Progress and tables go another way than lines: rich lays them out, moves the cursor and colours."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from agentrl.terminal import Terminal
    from agentrl.training.display import Display

    text = "run[/nope]\x1b[2J\r\x9b\u202e"
    shown = r"run[/nope]\x1b[2J\x0d\x9b\u202e"
    console = Terminal(force_terminal=True, width=120, legacy_windows=False, _environ={"TERM": "xterm"})
    with Display(3, text, console) as display:
        display.phase(text)
        display.note(text)
        display.step(1, {"reward/mean": 0.5, "rollout/tokens_per_s": 1.0, "time/step_s": 1.0})
    display.final([(text, 0.1, 0.2)], text, 3.0)
    table = Table(escape(text), title=Text(text))
    table.add_column(Text(text))
    table.add_row(Text(text), escape(text))
    console.print(table)
    console.print(escape(text), Text(text), {"a": text})
    out = capsys.readouterr().out
    assert out.count(shown) >= 6
    assert "\x1b[2K" in out  # what Live clears itself
    assert not {"\x1b[2J", "\x9b", "\u202e"} & {out[i : i + n] for n in (1, 4) for i in range(len(out))}


@pytest.mark.parametrize("forced", [False, True], ids=["piped", "live"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
def test_every_encoding_of_a_terminal_will_do(monkeypatch, encoding, forced):
    """A finished run once ended with a UnicodeEncodeError: curve, arrow, table, live display, texts of strangers."""
    from rich.table import Table
    from rich.text import Text

    from agentrl.eval.result import Accuracy
    from agentrl.terminal import Terminal
    from agentrl.training.display import Display

    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True))
    console = Terminal(force_terminal=forced, width=160, legacy_windows=False, _environ={"TERM": "xterm"})
    with Display(2, "läuf", console) as display:
        display.note("漢字 und ü")
        for step in (1, 2):
            display.step(step, {"reward/mean": step / 2, "rollout/tokens_per_s": 1.0, "time/step_s": 1.0})
    display.final([("prüf", None, Accuracy(0.5, 0.4, 0.6))], "läufe/1", 3.0)
    table = Table(title=Text("…"))
    table.add_column(Text("é"))
    table.add_row(Text("漢"))
    console.print(table)
    said = raw.getvalue().decode(encoding)
    wanted = {
        "ascii": ["\\u6f22\\u5b57 und \\xfc", "pr\\xfcf", "reward =#  0.50 -> 1.00", "+--"],
        "latin-1": ["\\u6f22\\u5b57 und ü", "prüf", "reward =#  0.50 -> 1.00", "+--"],
        "cp437": ["\\u6f22\\u5b57 und ü", "prüf", "reward =█  0.50 -> 1.00", "+--"],
        "utf-8": ["漢字 und ü", "prüf", "reward ▅█  0.50 → 1.00", "┏━"],
    }
    plain = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", said)
    assert [words for words in wanted[encoding] if words not in plain] == []


def test_a_plugin_that_redirects_output_takes_no_line_of_the_run(capsys):
    from agentrl.training.display import Display

    display = Display(1, "run")
    with contextlib.redirect_stdout(io.StringIO()) as taken:
        display.note("ours")
    assert (taken.getvalue(), capsys.readouterr().out) == ("", "ours\n")


def test_lines_that_no_console_prints_will_do_in_ascii_too(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True))
    monkeypatch.setattr(main, "app", lambda **how: print("ü"))
    assert main.run([]) == 0
    assert raw.getvalue() == b"\\xfc\n"


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(capsys, arguments):
    assert main.run(arguments) == 0
    assert capsys.readouterr().out == f"agentrl {__version__}\n"


COMMANDS = (
    "train", "eval", "sft", "reward-model", "check", "try", "serve", "chat", "new", "data", "recipes", "version",
    "tools", "envs", "rewards", "advantages", "losses", "trackers", "engines",
)  # fmt: skip


def test_help_names_every_command(capsys):
    assert main.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"\b{c}\b", out) for c in COMMANDS)
    assert main.run([]) == 2
    assert "train" in capsys.readouterr().out


@pytest.mark.slow
def test_modules_of_the_folder_can_be_named(tmp_path):
    """In a process of its own, which `main` ends."""
    (tmp_path / "beside_the_recipe.py").write_text("def tools(): ...")
    arguments = ["agentrl", "check", RECIPE, "tools=[beside_the_recipe:tool]"]
    code = f"import sys; sys.path.remove(''); sys.argv = {arguments!r}; from agentrl.cli.main import main; main()"
    process = Python(["-c", code], cwd=tmp_path)
    said, _ = process.communicate()
    assert process.returncode == 2
    assert "has no 'tool'; did you mean 'tools'?" in said


def test_ctrl_c_is_130(monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrl.recipe.load.load_recipe", interrupt)
    assert main.run(["check", RECIPE]) == 130


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_says_what_it_cost(monkeypatch, capsys):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt("interrupted before the first step: there is nothing to save")

    monkeypatch.setattr("agentrl.training.run.train", interrupt)
    assert main.run(["train", RECIPE]) == 130
    assert capsys.readouterr().err == "interrupted before the first step: there is nothing to save\n"


def test_a_bug_is_a_traceback(monkeypatch):
    def bug(*_args, **_kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("agentrl.recipe.load.load_recipe", bug)
    with pytest.raises(ZeroDivisionError):
        main.run(["check", RECIPE])


HANGS = """
import atexit, ctypes, sys, time
from agentrl.cli import main

def flush():
    HOW.sleep(3600)

atexit.register(flush)
main.AT_EXIT, main.GRACE, sys.argv[1:] = 0.2, SECONDS, ["version"]
main.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "grace", "code", "words"),
    [
        ("time", 60, 0, r"agentrl: exited while flush \(<string>:6\), which was to run at exit, .* after 0.2 s"),
        ("ctypes.PyDLL(None)", 0.2, 1, r'File "<string>", line 6 in flush'),  # nothing but a traceback can be had
    ],
    ids=["sleeps", "holds the interpreter"],
)
def test_what_hangs_at_exit_keeps_no_command_that_is_done(how, grace, code, words):
    script = HANGS.replace("HOW", how).replace("SECONDS", str(grace))
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (process.returncode, process.stdout) == (code, f"agentrl {__version__}\n")
    assert re.search(words, process.stderr)


def test_the_interpreter_does_not_look_through_what_goes_with_it():
    script = "import atexit, gc, sys\nfrom agentrl.cli import main\nsys.argv[1:] = ['version']\n"
    script += "atexit.register(lambda: print(gc.get_freeze_count() > 10_000))\nmain.main()"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert process.stdout == f"agentrl {__version__}\nTrue\n"


HEAVY = ("torch", "transformers", "datasets", "renderers", "ray", "numpy")


@pytest.mark.slow
def test_help_and_lists_import_nothing_heavy():
    code = (
        "import sys; from agentrl.cli import main; codes = [main.run(a.split()) for a in ('--help', 'tools', 'envs')];"
        f"sys.exit(repr([codes, [m for m in {HEAVY!r} if m in sys.modules]]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.stderr.strip() == "[[0, 0, 0], []]"


def test_the_installed_command_runs():
    result = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "check", RECIPE, "train.lrr=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "error: command line: train.lrr: unknown key; did you mean 'train.lr'?\n"


@pytest.mark.parametrize(
    ("given", "kept"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_waiting_threads_let_another_run_have_their_core(given: dict[str, str], kept: str | None) -> None:
    show = "m.run = lambda _: print(os.environ.get('GOMP_SPINCOUNT')) or 0"
    said = f"import os, agentrl.cli.main as m; {show}; m.main()"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_WAIT"))}
    done = subprocess.run(
        [sys.executable, "-c", said], env={**env, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(kept)
