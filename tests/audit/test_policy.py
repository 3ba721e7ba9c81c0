"""What a policy plays: values that the schemas of tools take."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.audit.policy import random_value
from agentrl.plugins.schema import check_arguments

_SMALL = st.integers(-30, 30)


@st.composite
def _bounded(draw: st.DrawFn) -> dict[str, Any]:
    """A number that one or both sides bound, each strictly or not."""
    low, room = draw(_SMALL), draw(st.integers(3, 40))
    lower = {draw(st.sampled_from(["minimum", "exclusiveMinimum"])): low} if draw(st.booleans()) else {}
    upper = {draw(st.sampled_from(["maximum", "exclusiveMaximum"])): low + room} if draw(st.booleans()) else {}
    return {"type": draw(st.sampled_from(["integer", "number"])), **lower, **upper}


@st.composite
def _sized(draw: st.DrawFn, kind: str, what: str) -> dict[str, Any]:
    """A text or list of a length."""
    least, room = draw(st.integers(0, 40)), draw(st.integers(0, 5))
    return {
        "type": kind,
        **({f"min{what}": least} if draw(st.booleans()) else {}),
        **({f"max{what}": least + room} if draw(st.booleans()) else {}),
    }


_SCALARS = st.one_of(
    _bounded(), _sized("string", "Length"), st.builds(lambda v: {"const": v}, _SMALL), st.just({"type": "boolean"}),
    st.builds(lambda v: {"enum": v}, st.lists(st.text(max_size=3), min_size=1)), st.just({"type": ["integer", "null"]}),
    st.just({"$ref": "#/$defs/place"}), st.just({"type": "integer", "nullable": True}),
)  # fmt: skip


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def held(schemas: dict[str, Any], needed: int) -> dict[str, Any]:
        return {"type": "object", "properties": schemas, "required": sorted(schemas)[:needed]}

    return st.one_of(
        st.builds(held, st.dictionaries(st.sampled_from("abc"), inner), st.integers(0, 3)),
        st.builds(lambda size, items: {**size, "items": items}, _sized("array", "Items"), inner),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"allOf": [one], "description": "x"}, inner),
    )


SCHEMAS = st.recursive(_SCALARS, _nested, max_leaves=6)
DEFINED = {
    "place": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 3, "maximum": 3.001}, "minItems": 2},
    "tree": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
             "required": ["next"]},
}  # fmt: skip


def _fits(schema: dict[str, Any], seed: int) -> None:
    root = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": DEFINED}
    value = {"x": random_value(schema, Random(seed), root)}
    assert check_arguments(root, value) == value


@settings(max_examples=100, deadline=None)
@given(SCHEMAS, st.integers(0, 99))
def test_random_values_fit_their_schema(schema: dict[str, Any], seed: int) -> None:
    _fits(schema, seed)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "maximum": -1},
        {"type": "number", "exclusiveMaximum": 0},
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
        {"$ref": "#/$defs/tree"},
        {"allOf": [{"type": "integer", "minimum": 50}, {"maximum": 60}]},
        {"type": "string", "minLength": 90, "maxLength": 90},
    ],
)
def test_values_at_the_edge_fit(schema: dict[str, Any]) -> None:
    for seed in range(20):
        _fits(schema, seed)
