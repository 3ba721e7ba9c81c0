"""What of the tool source `mcp` needs no running server, and what runs in event loops of its own."""

import asyncio
import base64
import json
from typing import Any

import pytest
from agentrl_tools.mcp import McpSource
from agentrl_tools.mcp.source import McpTool, parameters_of
from mcp_help import STDIO, ask, offers
from mcp_types import Tool as Offer
from processes import alive
from train_help import metrics, small
from vision_help import file_of, picture

from agentrl import ArgumentError, Tool
from agentrl.errors import UserError
from agentrl.images import STORE, ImageError


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"properties": {"a": {"$ref": "https://example.org/schema.json"}}},
        {"properties": {"a": {"type": "array", "items": [{"type": "integer"}]}, "b": {"type": "integer"}}},
        {"properties": {"a": {"type": "file"}}},
        {"properties": {"a": {"type": "string", "pattern": "^\\p{L}+$"}}},
        {"properties": {"a": {"not": {"type": "string"}}}},
        {"properties": {"a": {"type": ["integer", "null"], "default": None}}},
        {"properties": None, "required": ["a"]},
        {"properties": {"a": True}},
        {"properties": {"a": {"if": {}, "then": False}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ],
)
def test_schemas_that_are_no_business_of_ours_are_left_to_the_server(schema):
    tool = McpTool(None, "t", "", "", schema)
    assert tool.parameters["type"] == "object"
    assert isinstance(tool.parameters["properties"], dict)
    value = "x" if "pattern" in str(schema) and "Properties" not in str(schema) else 5
    assert tool.check({"a": value}) == {"a": value}


def test_a_slip_of_the_model_is_told_where_the_schema_lists_what_there_is():
    closed = parameters_of({"properties": {"a": {"type": "integer"}}})
    assert "additionalProperties" not in closed
    assert parameters_of({"properties": {"a": {}}, "additionalProperties": False})["additionalProperties"] is False
    with pytest.raises(ArgumentError, match="unknown argument 'b'"):
        McpTool(None, "t", "", "", closed).check({"b": 1})


def test_a_pattern_that_backtracks_does_not_hold_up_the_event_loop():
    tool = McpTool(None, "t", "", "", {"properties": {"a": {"type": "string", "pattern": "^(a|a)*$"}}})
    assert tool.check({"a": "a" * 40}) == {"a": "a" * 40}
    with pytest.raises(ArgumentError, match="take too long to check"):
        tool.check({"a": "a" * 40 + "!"})


def test_a_prompt_has_a_servers_schema_in_the_form_that_models_know():
    point = {"title": "Point", "required": ["x"], "properties": {"x": {"type": "number"}}, "type": "object"}
    given = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"Point": point},
        "properties": {
            "to": {"description": "Where.", "$ref": "#/$defs/Point"},
            "by": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "By"},
        },
        "required": ["to"],
        "type": "object",
    }
    (tool,) = McpSource(command="x").chosen([Offer(name="go", input_schema=given)])
    assert json.dumps(tool.schema["function"]["parameters"]) == (
        '{"type": "object", "properties": {"to": {"type": "object", "properties": {"x": {"type": "number"}}, '
        '"required": ["x"], "description": "Where.", "title": "Point"}, "by": {"type": "string", "nullable": true}}, '
        '"required": ["to"]}'
    )
    assert tool.check({"to": {"x": "1"}, "by": None}) == {"to": {"x": 1.0}, "by": None}
    endless = {"type": "object", "properties": {"in": {"$ref": "#"}}}
    with pytest.raises(UserError, match=r"MCP server x: tool 'go': .*refer to themselves.*leave it out with `exclude`"):
        McpSource(command="x").chosen([Offer(name="go", input_schema=endless)])


def test_include_exclude_and_prefix():
    def chosen(*names: str, **arguments: Any) -> list[str]:
        return [tool.name for tool in McpSource(command="x", **arguments).chosen(offers(*names))]

    assert chosen("add", "pid", "picture", include=["add", "p*"], exclude=["picture"], prefix="my_") == [
        "my_add",
        "my_pid",
    ]
    assert chosen("read.file/x", "a" * 80) == ["read_file_x", "a" * 64]
    for names, arguments, what in (
        (["add"], {"include": ["ad"]}, "offers no tool 'ad'; did you mean 'add'"),
        (["add"], {"exclude": ["x*y"]}, "offers no tool 'x[*]y'"),
        (["add"], {"include": ["add"], "exclude": ["add"]}, "no tool that is included"),
        ([], {}, "it offers no tool"),
        (["a.b", "a_b"], {}, "two of its tools would be called 'a_b'"),
    ):
        with pytest.raises(UserError, match=what):
            chosen(*names, **arguments)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, "one of the arguments"),
        ({"command": "x", "url": "http://x"}, "one of the arguments"),
        ({"url": "http://x", "args": ["a"]}, "belong to `command`"),
        ({"command": "x", "headers": {"a": "b"}}, "belong to `url`"),
    ],
)
def test_arguments_of_the_recipe(arguments, what):
    with pytest.raises(UserError, match=what):
        McpSource(**arguments)
    with pytest.raises(ValueError, match="retries 0 or more"):
        McpSource(command="x", retries=-1)


@pytest.mark.slow
def test_a_server_that_dies_again_and_again_does_not_stop_a_run(tmp_path):
    """The embedded model's own calculator, served over MCP by a process that ends at every fifteenth call."""
    from agentrl import train

    deaths, output = tmp_path / "deaths", tmp_path / "run"
    env = {"FATAL": "15", "DEATHS": str(deaths)}
    source = {"name": "mcp", "args": {**STDIO, "include": ["calculator"], "env": env, "retries": 4}}
    train(small(output, tools=[source], train__steps=1, eval__tasks=1))
    assert deaths.read_text()
    written = metrics(output)
    assert [line["step"] for line in written] == [0, 1]
    assert written[1]["tool/calculator/calls"] > 0
    assert not any(line.get("stop/error") for line in written)


@pytest.mark.slow
def test_several_event_loops_one_after_another():
    made = McpSource(**STDIO, include=["add", "pid"])

    async def first() -> tuple[dict[str, Tool], int]:
        tools = {tool.name: tool for tool in await made.open()}
        return tools, int((await ask(tools["pid"])).text)

    async def last() -> int:
        said = int((await ask(tools["pid"])).text)
        await made.close()
        return said

    tools, one = asyncio.run(first())
    assert not alive(one)
    two = asyncio.run(last())
    assert one != two
    assert not alive(two)


async def test_what_a_result_may_hold():
    from agentrl_tools.mcp.source import response_of
    from mcp_types import (
        AudioContent,
        BlobResourceContents,
        CallToolResult,
        EmbeddedResource,
        ImageContent,
        ResourceLink,
    )

    data = base64.b64encode(file_of(picture(1), "JPEG")).decode()
    blob = BlobResourceContents(uri="file:///a.jpg", mime_type="image/jpeg", blob=data)
    shown = [
        ImageContent(type="image", data="%%%", mime_type="image/png"),
        ImageContent(type="image", data=data, mime_type="image/jpeg"),
        EmbeddedResource(type="resource", resource=blob),
    ]
    broken, *good = response_of(CallToolResult(content=shown)).images
    assert len({STORE.put(one) for one in good}) == 1
    with pytest.raises(ImageError, match="not base64"):
        STORE.put(broken)
    other = [
        AudioContent(type="audio", data="", mime_type="audio/wav"),
        ResourceLink(type="resource_link", name="log", uri="file:///log"),
    ]
    text = response_of(CallToolResult(content=other)).text
    assert text == "[audio, audio/wav, which you cannot hear]\n[resource log: file:///log]"
    assert response_of(CallToolResult(content=[], structured_content={"a": 1})).text == '{"a": 1}'
    assert response_of(CallToolResult(content=[], is_error=True)).error
