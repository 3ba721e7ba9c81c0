"""`agentrl env add`: a virtual environment of pinned packages, a recipe that plays, and what is refused."""

import os
import sys
from pathlib import Path

import pytest
from agentrl_envs.foreign.sources import Verifiers

from agentrl.cli.main import BAD_USAGE, run
from agentrl.errors import UserError
from agentrl.recipe.load import load_recipe

SOURCE = "added_source:Toy"
BROKEN = "added_source:Broken"


def add(tmp_path: Path, source: str, what: str, *more: str) -> int:
    return run(["env", "add", source, what, "--into", str(tmp_path), "--python", sys.executable, *more])


@pytest.mark.slow
def test_it_installs_writes_and_tries(tmp_path, capsys):
    assert add(tmp_path, SOURCE, "10") == 0
    said = capsys.readouterr().out
    assert "[1/4] a virtual environment in" in said
    assert "guessing: 100 tasks of train, 10 tasks of test" in said
    assert "not carried by guessing: images: the number is told in words" in said
    assert "2 tasks of each split were played" in said
    (path,) = tmp_path.glob("*/10.yaml")
    recipe = load_recipe(path)
    interpreter = Path(recipe.env.args["python"])
    assert interpreter.is_relative_to(tmp_path)
    assert os.access(interpreter, os.X_OK)
    assert add(tmp_path, SOURCE, "10") == BAD_USAGE, "a recipe is not overwritten"
    assert "exists: remove it" in capsys.readouterr().err
    assert add(tmp_path, SOURCE, "12", "--tasks", "0") == 0, "the interpreter serves another one, too"


@pytest.mark.slow
def test_what_the_contract_test_finds_is_said(tmp_path, capsys):
    assert add(tmp_path, BROKEN, "10") == BAD_USAGE
    assert "the contract test failed, the recipe is there all the same" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "what", "said"),
    [
        (
            "verifiers", "wordle",
            "wordle is no folder, and no package of the reviewed table is called so: give the path of a taskset",
        ),
        ("verifers", "x", "no source 'verifers' is installed; did you mean 'verifiers'?"),
        (SOURCE, "none", "there is no game 'none'"),
    ],
)  # fmt: skip
def test_nothing_is_installed_by_a_name_that_was_guessed(tmp_path, capsys, source, what, said):
    assert add(tmp_path, source, what) == BAD_USAGE
    assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()], "nothing was made"


@pytest.mark.parametrize(("folder", "what", "name"), [("rooms", ".", "rooms"), ("rooms/src", "..", "rooms")])
def test_a_folder_is_named_by_where_it_lies(tmp_path, capsys, monkeypatch, folder, what, name):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "rooms" / "__init__.py").touch()
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / f"{name}.yaml").touch()
    monkeypatch.chdir(tmp_path / folder)
    assert add(tmp_path, "verifiers", what) == BAD_USAGE
    assert f"verifiers/{name}.yaml exists: remove it" in capsys.readouterr().err


PROJECT = "pyproject.toml"


def taskset(tmp_path: Path, folder: str, file: str, content: str) -> str:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / file).write_text(content)
    given = Verifiers().sections(str(tmp_path / folder), "python")["env"]["args"]["args"]
    return given["config"]["taskset"]["id"]


def test_a_taskset_is_called_as_verifiers_imports_it(tmp_path):
    assert taskset(tmp_path, "my-env-main", PROJECT, '[project]\nname = "My-Env"\n') == "my_env"
    assert taskset(tmp_path, "echo", "__init__.py", "") == "echo"


@pytest.mark.parametrize(
    ("folder", "file", "content", "said"),
    [
        ("harbor", "__init__.py", "", "verifiers would load its own taskset 'harbor' instead: rename this one"),
        ("mine", PROJECT, '[project]\nname = "textarena"\n', "would load its own taskset 'textarena'"),
        ("my-env", "__init__.py", "", "verifiers imports 'my_env': rename the folder to that"),
        ("mine", PROJECT, "[tool.x]\n", "pyproject.toml: expected `name` under .project."),
        ("mine", PROJECT, "name =", "pyproject.toml: cannot be read"),
    ],
)
def test_a_taskset_that_would_not_be_imported_is_refused(tmp_path, folder, file, content, said):
    with pytest.raises(UserError, match=said):
        taskset(tmp_path, folder, file, content)


def test_an_interpreter_of_another_version_is_refused(tmp_path, capsys):
    assert (
        run(["env", "add", "added_source:Newer", "10", "--into", str(tmp_path), "--python", sys.executable])
        == BAD_USAGE
    )
    assert "give Python 3.97 to 3.99" in capsys.readouterr().err


def test_a_folder_of_somebody_else_is_left_alone(tmp_path, capsys):
    mine = tmp_path / "Toy" / "venv"
    mine.mkdir(parents=True)
    (mine / "mine.txt").write_text("x")
    assert add(tmp_path, SOURCE, "10") == BAD_USAGE
    assert "this command did not make it" in capsys.readouterr().err
    assert (mine / "mine.txt").exists()


@pytest.mark.slow
def test_an_installation_that_fails_is_one_line(tmp_path, capsys):
    assert add(tmp_path, "added_source:Absent", "10") == BAD_USAGE
    assert "the installation failed" in capsys.readouterr().err


def test_sources_are_listed(capsys):
    assert run(["env", "add"]) == 0
    said = capsys.readouterr().out
    assert "agentrl env add verifiers PATH" in said
