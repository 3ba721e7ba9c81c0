"""Constraints in the words of servers: a schema where the turn is JSON alone, else a structural tag."""

import json
from dataclasses import replace
from typing import Any

import pytest

from agentrl.constraint import Constraint, Shape
from agentrl.engine.base import Sampling
from agentrl.engine.servers.answer import Features, Wanted
from agentrl.engine.servers.structured import structural_tag
from agentrl.engine.sglang import wire as sglang
from agentrl.engine.vllm import wire as vllm

SCHEMA = '{"type": "object"}'
VALUE = {"type": "json_schema", "json_schema": {"type": "object"}}
WHOLE = Constraint((Shape("", SCHEMA, ""),))
CALLS = Constraint((Shape("<a>", SCHEMA, "</a>"), Shape("<b>", SCHEMA, "")))


def text(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def form(constraint: Constraint) -> Any:
    return json.loads(structural_tag(constraint))["format"]


def test_a_tag_says_what_the_constraint_says() -> None:
    first = {"type": "sequence", "elements": [text("<a>"), VALUE, text("</a>")]}
    second = {"type": "sequence", "elements": [text("<b>"), VALUE]}
    assert form(CALLS) == {"type": "or", "elements": [first, second]}
    thinks = replace(WHOLE, thought=("<think>", "</think>"))
    thought = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    gap = {"type": "regex", "pattern": "\\n{0,2}"}
    assert form(thinks) == {"type": "or", "elements": [{"type": "sequence", "elements": [thought, gap, VALUE]}, VALUE]}
    begun = {"type": "sequence", "elements": [{**thought, "begin": ""}, gap, VALUE]}
    assert form(replace(thinks, begun=True)) == begun


@pytest.mark.parametrize(("constraint", "whole"), [(WHOLE, True), (CALLS, False), (None, False)])
def test_each_kind_of_server_is_told_in_its_own_parameter(constraint: Constraint | None, whole: bool) -> None:
    wanted = Wanted([1, 2], Sampling(9, stop_ids=(2,), constraint=constraint), 9, "rid")
    ours = sglang.request_body(wanted, Features())["sampling_params"]
    theirs = vllm.request_body(wanted, Features())["sampling_params"].get("structured_outputs")
    tag = None if constraint is None or whole else structural_tag(constraint)
    assert (ours.get("json_schema"), ours.get("structural_tag")) == (SCHEMA if whole else None, tag)
    assert theirs == ({"json": {"type": "object"}} if whole else {"structural_tag": tag} if tag else None)
