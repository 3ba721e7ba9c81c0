"""Tools written against verl's BaseTool, older and newer, unchanged under the real driver; verl is not installed."""

import json
import subprocess
import sys

import pytest
from adapter_plugins import SCHEMA
from paths import SUPPORT

from agentrl.errors import UserError
from agentrl.plugins.registry import make_tool
from agentrl.plugins.toolbox import Toolbox
from agentrl.plugins.types import Task, ToolKwargs
from agentrl.recipe.sections.env import ToolSection
from agentrl.testing import call, check_tool
from agentrl.testing.play import Alone, Stage


def made(tool: str, **args):
    return make_tool(ToolSection(name="verl", args={"tool": tool, **args}))


def old(**args):
    return made("adapter_plugins:OldTool", **{"config": {"penalty": -0.05}, "schema": SCHEMA, **args})


def new(**args):
    return made("verl_new_tool.NewTool", **{"schema": SCHEMA, **args})


async def play(tool, *turns, **kwargs):
    task = Task("t", {}, tools_kwargs={tool.name: ToolKwargs(**kwargs)})
    return await Stage(Alone(), [tool]).play(task, lambda _: list(turns))


async def test_an_older_tool_runs_unchanged():
    tool = old()
    assert tool.schema == SCHEMA
    turns = [call("grade", answer="4"), call("grade", answer="5"), call("grade", answer=5), call("grade"), "done"]
    played = await play(tool, *turns, create_kwargs={"ground_truth": "5"}, execute_kwargs={"extra": 1})
    assert played.failure is None
    said = [m["content"] for m in played.messages if m["role"] == "tool"]
    assert said[:3] == ["answer='4' {'extra': 1}", "answer='5' {'extra': 1}", "answer='5' {'extra': 1}"]
    assert "'answer' is missing" in said[3]
    assert [turn.reward for turn in played.turns] == [-0.05, 0.0, -0.05, 0.0, 0.0]
    assert dict(played.rewards) == {"grade": 1.0, "step": pytest.approx(-0.1)}
    assert dict(played.tool_uses[1].metrics) == {"right": 1.0}, "a metric that is no number is left out"
    assert tool._made.instances == {}, "it was released"


async def test_a_newer_tool_that_imports_verl_runs_unchanged():
    tool = new()
    assert tool.schema == SCHEMA
    played = await play(
        tool, call("grade", answer="4"), call("grade", answer="5"), "done", create_kwargs={"ground_truth": "5"}
    )
    assert played.failure is None
    wrong, right = (m["content"] for m in played.messages if m["role"] == "tool")
    assert wrong == "right: False"
    assert right == [{"type": "text", "text": "right: True"}, {"type": "image", "image": b"GIF8..."}]
    assert dict(played.rewards) == {"grade": 0.0, "step": 1.0}
    assert tool._made.instances == {}


async def test_base_class_hooks_and_a_schema_of_its_own():
    tool = made("verl_new_tool:OwnSchema", config={"a": 1})
    assert (tool.name, tool.description, tool._made.config) == ("noop", "Does nothing.", {"a": 1})
    played = await play(tool, call("noop"), "done")
    assert [m["content"] for m in played.messages if m["role"] == "tool"] == ["{}"]


@pytest.mark.parametrize("make", [old, new])
def test_they_keep_the_contract_of_tools(make):
    check_tool(make(), calls=[{"answer": "4"}, {"answer": "5"}], wrong=[{}], create_kwargs={"ground_truth": "5"})


async def test_a_tool_config_file_of_verl_gives_all_its_tools(tmp_path):
    entries = [
        {"class_name": "adapter_plugins.OldTool", "config": {"penalty": -1.0, "type": "native"}, "tool_schema": SCHEMA},
        {"class_name": "verl_new_tool.OwnSchema", "config": {}},
    ]
    file = tmp_path / "tools.yaml"
    file.write_text(json.dumps({"tools": entries}))
    toolbox = await Toolbox.open([ToolSection(name="verl", args={"file": str(file)})], Alone())
    assert [tool.name for tool in toolbox.tools] == ["grade", "noop"]
    assert toolbox.tools[0]._made.config["penalty"] == -1.0
    await toolbox.close()


def test_a_schema_may_stand_in_a_file(tmp_path):
    file = tmp_path / "schema.yaml"
    file.write_text(f"tool_schema: {json.dumps(SCHEMA)}")
    assert old(schema=str(file)).schema == SCHEMA


async def test_a_video_is_refused_and_not_lost_in_silence():
    played = await play(made("verl_new_tool:Video", schema=SCHEMA), call("grade", answer="x"), "done")
    assert "video" in played.messages[2]["content"]
    assert played.tool_uses[0].error.startswith("tool: ")


def bad_file(tmp_path, content):
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    return str(file)


MISTAKES = [
    (lambda _: make_tool(ToolSection(name="verl")), r"give args.tool .* or args.file"),
    (lambda _: made("adapter_plugins:Bare"), r"adapter_plugins:Bare is not a class with verl's hooks"),
    (lambda _: made("adapter_plugins:SCHEMA"), r"is not a class with verl's hooks"),
    (lambda _: made("Tool"), r"tool verl: 'Tool' is not an import path; expected package.module:Class"),
    (lambda _: made("no_such_package.Tool"), r"tool verl cannot be imported from 'no_such_package'"),
    (lambda _: made("verl_too_much:score"), r"verl.utils.reward_score.*without verl there is only its BaseTool"),
    (lambda _: old(schema={"type": "function"}), r"its schema is wrong at function: Field required"),
    (lambda _: made("verl_new_tool:NewTool"), r"NewTool\(config, tool_schema\) raised ValueError: .*give one"),
    (lambda tmp: old(schema=str(tmp / "none.yaml")), r"none.yaml cannot be read: No such file"),
    (lambda tmp: old(schema=bad_file(tmp, "a: [")), r"bad.yaml is no YAML"),
    (lambda tmp: make_tool(ToolSection(name="verl", args={"file": bad_file(tmp, "x: 1")})), r"has no list `tools`"),
    (lambda tmp: old(file=str(tmp)), r"give args.tool .* or args.file"),
]


@pytest.mark.parametrize(("make", "words"), MISTAKES)
def test_a_mistake_is_one_line(make, words, tmp_path):
    with pytest.raises(UserError, match=words) as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_verl_is_stood_in_for_only_when_a_tool_wants_it():
    """And what stands in for it is no package that others could take for verl."""
    code = """
import sys
from agentrl.plugins.registry import make_tool
from agentrl.recipe.sections.env import ToolSection
from agentrl_tools.verl.stand_in import installed
from adapter_plugins import SCHEMA
make_tool(ToolSection(name="verl", args={"tool": "adapter_plugins:OldTool", "schema": SCHEMA}))
assert "verl" not in sys.modules
make_tool(ToolSection(name="verl", args={"tool": "verl_new_tool:NewTool", "schema": SCHEMA}))
assert "verl" in sys.modules and not installed()
"""
    subprocess.run([sys.executable, "-c", code], cwd=SUPPORT, check=True)


@pytest.mark.slow
def test_verl_itself_goes_before_the_stand_in(tmp_path):
    """A package called verl that is really there is used, and is not replaced."""
    tools = tmp_path / "verl" / "tools"
    tools.mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").write_text("")
    (tools / "__init__.py").write_text("")
    (tools / "schemas.py").write_text("from pydantic import BaseModel\nclass OpenAIFunctionToolSchema(BaseModel):\n"
                                      "    type: str\n    function: dict\n")  # fmt: skip
    (tmp_path / "theirs.py").write_text(
        "from verl.tools.schemas import OpenAIFunctionToolSchema as S\nfrom adapter_plugins import OldTool\n"
        "class T(OldTool):\n    def __init__(self, config, tool_schema):\n"
        "        assert type(tool_schema) is S\n        self.tool_schema, self.instances = tool_schema, {}\n"
    )
    code = (
        "from agentrl.plugins.registry import make_tool; from agentrl.recipe.schema import ToolSection;"
        "from adapter_plugins import SCHEMA;"
        "print(make_tool(ToolSection(name='verl', args={'tool': 'theirs:T', 'schema': SCHEMA})).name)"
    )
    path = f"{tmp_path}:{SUPPORT}"
    result = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert result.stdout == "grade\n", result.stderr
