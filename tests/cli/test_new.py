"""`agentrl new`: what it writes is installed for real, tested, listed, tried, trained with and evaluated with."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from cli_help import refused
from warm import Python

QUICK = ("train.steps=1", "rollout.tasks=2", "rollout.n=4", "eval.tasks=4", "train.threads=1")


class House:
    """A Python with this one's packages and its own installed besides; nothing comes from an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
        self.packages = own
        parent = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"  # what is editable there as well
        (own / "parent.pth").write_text(parent)

    def add_broken(self, group: str, name: str) -> None:
        """Install a plugin whose module cannot be imported, as pip would."""
        (self.packages / f"{name}.py").write_text("import no_such_module_anywhere\n")
        info = self.packages / f"{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: agentrl-{name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[agentrl.{group}]\n{name} = {name}:Plugin\n")

    def run(self, *arguments: str, cwd: Path | None = None, fails: bool = False) -> str:
        process = Python(arguments, cwd=cwd or self.folder, env=self.environment(), packages=self.packages)
        said, _ = process.communicate()
        assert (process.returncode != 0) is fails, said
        return said

    def listed(self, kind: str) -> str:
        """What its own interpreter finds."""
        command = [str(self.python), "-m", "agentrl.cli.main", kind]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment(), capture_output=True, text=True, check=True
        ).stdout

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "VIRTUAL"))}
        return {**kept, "COLUMNS": "200", "XDG_CACHE_HOME": str(self.folder / "cache")}

    def agentrl(self, *arguments: str, cwd: Path | None = None, fails: bool = False) -> str:
        return self.run("-m", "agentrl.cli.main", *arguments, cwd=cwd, fails=fails)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """With a new tool, environment and agent, and a tool and an environment that fail to import."""
    made = House(tmp_path_factory.mktemp("house"))
    assert "next: cd doubler && pip install -e '.[test]' && pytest" in made.agentrl("new", "tool", "doubler")
    made.agentrl("new", "env", "apples")
    assert "agentrl try recipes/patient.yaml --model tiny" in made.agentrl("new", "agent", "patient")
    packages = [part for name in ("doubler", "apples", "patient") for part in ("-e", f"{made.folder / name}[test]")]
    pip = [sys.executable, "-m", "pip", "--python", str(made.python), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-index", "--no-build-isolation", *packages], check=True)
    for group, name in (("tools", "sick_tool"), ("envs", "sick_env")):
        made.add_broken(group, name)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["doubler", "apples"])
def test_its_own_test_passes_and_would_notice(house, name):
    folder = house.folder / name
    assert re.search(r"\d+ passed", house.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder))
    source = folder / "src" / f"{name}.py"
    whole = source.read_text()
    broken = {
        "doubler": ("        session.state = None", "        session.state.pop('connection')"),
        "apples": ('right = sold == min(row["asked"], row["there"])', 'right = sold == row["asked"]'),
    }
    old, new = broken[name]
    assert old in whole
    source.write_text(whole.replace(old, new))
    try:
        assert "failed" in house.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder, fails=True)
    finally:
        source.write_text(whole)


@pytest.mark.slow
def test_an_agent_passes_its_own_test_and_does_a_task(house):
    """What its test would notice: `tests/testing/test_testing.py`."""
    folder = house.folder / "patient"
    assert re.search(r"\d+ passed", house.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder))
    out = house.agentrl("try", "recipes/patient.yaml", "train.threads=1", "--model", "tiny", cwd=folder)
    assert re.search(r"^ended by stop after \d turns? and \d tool calls?$", out, re.M)


@pytest.mark.slow
def test_it_is_listed_beside_those_that_cannot_be_imported(house):
    tools, envs = house.listed("tools"), house.listed("envs")
    agents = house.agentrl("agents")
    assert re.search(r"^doubler +agentrl-doubler 0.1.0 +doubler:Doubler +Works out one operation", tools, re.M)
    assert re.search(r"^apples +agentrl-apples 0.1.0 +apples:Apples +A customer at a shop's counter", envs, re.M)
    assert re.search(r"^patient +agentrl-patient 0.1.0 +patient:solve +Do one task", agents, re.M)
    for name, out in (("sick_tool", tools), ("sick_env", envs)):
        assert re.search(rf"^{name} +agentrl-{name} 0.1.0 +{name}:Plugin +broken: ", out, re.M)
    assert re.search(r"^calculator ", tools, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sick_tool", "sick_env"])
def test_a_broken_plugin_breaks_who_names_it(house, name):
    line = house.agentrl("try", name, fails=True)
    assert re.fullmatch(rf"error: .*{name!r} of agentrl-{name} 0.1.0 cannot be imported.*\n", line)


@pytest.mark.slow
def test_it_can_be_tried(house):
    out = house.agentrl("try", "doubler", '{"expression": "2*3"}')
    assert "\n6\n" in out
    assert "reward 0: doubler 0" in out
    replies = house.folder / "replies.txt"
    replies.write_text(
        '/sell {"item": "violin", "number": 2}\n---\n/sell {"item": "violin", "number": 1}\n---\nsold 1\n'
    )
    rows = house.folder / "apples" / "tasks.jsonl"
    out = house.agentrl("try", "apples", "--source", str(rows), "--task", "train-1", "--replies", str(replies))
    assert "error: 1 there" in out
    assert re.search(r"^ended by stop after 3 turns and 2 tool calls$", out, re.M)
    assert re.search(r"^solved: no$", out, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["doubler", "apples"])
def test_it_trains_the_embedded_model(house, name):
    folder = house.folder / name
    short = ["sft={stages: [{steps: 2, batch: 2}]}"] if name == "apples" else []
    out = house.agentrl("train", f"recipes/{name}.yaml", *QUICK, *short, cwd=folder)
    assert re.search(r"step +1/1 +reward", out)
    run = folder / "runs" / f"{name}-001"
    assert (run / "checkpoints" / "step_1").is_dir()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 1
    if name == "doubler":
        assert metrics[-1]["tool/calculator/calls"] > 0, "the new tool goes by the name that the embedded model knows"
    else:
        assert metrics[0]["start/steps"] == 2
        assert metrics[0]["start/loss_last"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("name", "points"), [("apples", 0.1), ("doubler", 0.2), ("patient", 0.2)])
def test_it_raises_the_reward_as_generated(house, name, points):
    folder = house.folder / name
    house.agentrl("train", f"recipes/{name}.yaml", f"output=runs/{name}-long", cwd=folder)
    rows = [json.loads(line) for line in (folder / "runs" / f"{name}-long" / "metrics.jsonl").read_text().splitlines()]
    before, after = (row["eval/test/accuracy"] for row in (rows[0], rows[-1]))
    assert after >= before + points
    assert before >= rows[0].get("start/test/accuracy", 0.0)


@pytest.mark.slow
def test_it_evaluates(house):
    out = house.agentrl("eval", "doubler/recipes/doubler.yaml", "eval.tasks=4", "train.threads=1")
    assert "accuracy" in out


MISTAKES = [
    ("json", "a module 'json' already exists"),
    ("yaml", "a module 'yaml' already exists"),
    ("class", "is a Python keyword"),
    ("match", "is a Python keyword"),
    ("Doubler", "cannot name a module"),
    ("a-b", "cannot name a module"),
    ("../x", "cannot name a module"),
    ("calculator", "'calculator' is already installed from agentrl"),
    ("old", "old already exists"),
]


@pytest.mark.parametrize(("name", "words"), MISTAKES)
def test_a_name_that_will_not_do_is_refused(capsys, tmp_path, name, words):
    (tmp_path / "old").mkdir()
    assert words in refused(capsys, "new", "tool", name, "--into", str(tmp_path))
    assert [p.name for p in tmp_path.rglob("*")] == ["old"]


def test_more_mistakes(capsys, tmp_path):
    assert "'gsm8k' is already installed" in refused(capsys, "new", "env", "gsm8k", "--into", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, "new", "env", "fresh", "--into", str(tmp_path / "file"))
    assert "Missing command" in refused(capsys, "new")
    assert "Missing argument 'NAME'" in refused(capsys, "new", "tool")
