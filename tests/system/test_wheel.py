"""The wheel: what it holds, and that it trains by a recipe's name, in an empty folder. And the source distribution."""

import os
import subprocess
import sys
import tarfile
import zipfile

import pytest
from paths import ROOT

NOT_NEEDED = ("openai", "ray")
"""Packages of which each takes most of a second to import, and which such a run uses nothing of."""


def build(target, folder):
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("agentrl-*")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    """The wheel's files, for all tests: what is imported of them is compiled once."""
    folder = tmp_path_factory.mktemp("site")
    wheel.extractall(folder)
    return folder


def files(*folders: str) -> set[str]:
    """Names of the checkout's files below folders, relative to its root."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.parent.name != "__pycache__"}


@pytest.mark.slow
def test_it_holds_the_packages_and_recipes_and_no_tests(wheel):
    expected = files("agentrl") | {f"agentrl/{name}" for name in files("recipes")}
    expected |= {name.partition("/")[2] for name in files("tools", "envs")} | {"agentrl/view/metrics.md"}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {"agentrl/py.typed", "agentrl/models/tiny/model.safetensors", "agentrl/scaffold/tool/test.py.tmpl"} <= found
    assert not [name for name in found if "test_" in name or name.startswith("tests")]


def test_the_versions_for_sglang_are_the_tried_ones_but_for_its_torch():
    tried, theirs = (
        (ROOT / name).read_text().splitlines()[1:] for name in ("constraints.txt", "constraints-sglang.txt")
    )
    assert [line for line in tried if line not in theirs] == ["torch==2.13.0"]
    assert [line for line in theirs if line not in tried] == ["torch==2.14.1"]


@pytest.mark.slow
def test_the_source_distribution_holds_what_its_tests_read(tmp_path):
    folders = ("agentrl", "tools", "envs", "recipes", "tests", "docs", "examples", "benchmarks", "scripts", ".ci")
    expected = files(*folders) | {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml", "constraints.txt"}
    expected.add("constraints-sglang.txt")
    with tarfile.open(build("sdist", tmp_path)) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert expected <= found


def environment_of(unpacked):
    return {**os.environ, "PYTHONPATH": str(unpacked), "XDG_CACHE_HOME": str(unpacked / ".cache")}


def run(unpacked, folder, *commands):
    """Commands of the unpacked wheel, whose packages and entry points come before those of the checkout."""
    environment = environment_of(unpacked)
    code = (
        "import agentrl, shlex, sys; print(agentrl.__file__, file=sys.stderr); from agentrl.cli.main import run;"
        "code = max(run(shlex.split(command)) for command in sys.argv[1:]);"
        f"print('imported:', [name for name in {NOT_NEEDED!r} if name in sys.modules]); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *commands]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(str(unpacked))
    return done.stdout


@pytest.mark.slow
def test_it_trains_by_the_name_of_a_recipe(unpacked, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    small = "train.steps=1 rollout.tasks=2 rollout.n=2 eval.tasks=2 eval.every=0 train.threads=1"
    said = run(unpacked, empty, f"train gsm8k_tool {small}", "check gsm8k_ppo --recipe", "check text_game --recipe")
    assert (empty / "runs" / "gsm8k_tool-001" / "checkpoints" / "step_1" / "model.safetensors").is_file()
    assert '{"step": 1, ' in (empty / "runs" / "gsm8k_tool-001" / "metrics.jsonl").read_text()
    assert said.endswith("imported: []\n")
    assert "advantage: gae" in said  # gsm8k_ppo extends another
    template = unpacked / "agentrl" / "recipes" / "tiny_template.jinja"
    assert f"chat_template: {template}" in said


@pytest.mark.slow
def test_what_new_writes_is_installed_tested_and_trained(unpacked, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    kinds = {"shop": "env", "doubler": "tool", "patient": "agent"}
    run(unpacked, empty, *(f"new {kind} {name}" for name, kind in kinds.items()))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    packages = [f"./{name}" for name in kinds]
    subprocess.run([*pip, "--target", str(unpacked), *packages], cwd=empty, check=True, capture_output=True)
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *packages]
    tested = subprocess.run(
        pytest_, cwd=empty, env=environment_of(unpacked), capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout
    small = "train.steps=1 rollout.tasks=2 rollout.n=2 eval.tasks=2 train.threads=1"
    taught = "'sft={stages: [{steps: 2, batch: 2}]}'"
    commands = [f"train {name}/recipes/{name}.yaml {small}" for name in kinds]
    said = run(unpacked, empty, f"{commands[0]} {taught}", f"{commands[0]} {taught}", *commands[1:])
    assert said.count("teaches first") == 1
    assert said.count("taught already") == 1
    for name in kinds:
        rows = (empty / "runs" / f"{name}-001" / "metrics.jsonl").read_text().splitlines()
        assert rows[-1].startswith('{"step": 1, ')
    assert '"start/steps": 2' in (empty / "runs" / "shop-002" / "metrics.jsonl").read_text()
