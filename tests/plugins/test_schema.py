"""Arguments that a model wrote, checked against a JSON schema."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import ArgumentError, UserError
from agentrl.plugins.prompt_schema import prompt_schema
from agentrl.plugins.schema import check_arguments, outline


def schema(required=(), extra=None, **properties):
    made = {"type": "object", "properties": properties, "required": list(required)}
    return made if extra is None else {**made, "additionalProperties": extra}


def check_one(rule, value):
    return check_arguments(schema(["x"], x=rule), {"x": value})["x"]


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": t} for t in ("string", "integer", "number", "boolean"))
POINT = schema(["x"], x=INTEGER, y=NUMBER)


@pytest.mark.parametrize(
    ("rule", "value", "expected"),
    [
        (INTEGER, 3, 3),
        (INTEGER, "3", 3),
        (INTEGER, " -3 ", -3),
        (INTEGER, 3.0, 3),
        (NUMBER, "2.5", 2.5),
        (NUMBER, "3", 3),
        (NUMBER, 3, 3),
        (STRING, 5, "5"),
        (STRING, 2.5, "2.5"),
        (STRING, "", ""),
        (BOOLEAN, "True", True),
        (BOOLEAN, False, False),
        ({"type": "array", "items": INTEGER}, ["1", 2], [1, 2]),
        ({"type": "array", "items": INTEGER}, "[1, 2]", [1, 2]),
        (POINT, {"x": "1", "y": "2.5"}, {"x": 1, "y": 2.5}),
        (POINT, '{"x": 1}', {"x": 1}),
        ({"enum": ["km", "miles"]}, "KM", "km"),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "a"}, "a", "a"),
        ({"type": ["integer", "null"]}, None, None),
        ({"anyOf": [INTEGER, STRING]}, "3", "3"),
        ({"anyOf": [INTEGER, BOOLEAN]}, "3", 3),
        ({"oneOf": [INTEGER, {"type": "null"}]}, None, None),
        ({**INTEGER, "nullable": True}, None, None),
        ({**INTEGER, "nullable": True}, "3", 3),
        ({"allOf": [INTEGER, {"minimum": 2}]}, "2", 2),
        ({}, {"any": 1}, {"any": 1}),
    ],
)
def test_what_is_plainly_meant_is_accepted(rule, value, expected):
    got = check_one(rule, value)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(
    ("rule", "value", "words"),
    [
        (INTEGER, "3.5", "should be an integer"),
        (INTEGER, 3.5, "should be an integer"),
        (INTEGER, True, "should be an integer"),
        (INTEGER, "9" * 5000, "should be an integer"),
        (INTEGER, float("inf"), "should be an integer"),
        (NUMBER, "nan", "should be a number"),
        (NUMBER, [1], "should be a number"),
        (NUMBER, False, "should be a number"),
        (STRING, ["a"], "should be a string"),
        (STRING, True, "should be a string"),
        (STRING, None, "should be a string, got null"),
        (BOOLEAN, 1, "should be true or false"),
        ({"type": "null"}, 1, "should be null"),
        ({"type": "array"}, {"a": 1}, "should be a list"),
        ({"type": "array", "items": INTEGER}, [1, "b"], "argument 'x.1' should be an integer, got \"b\""),
        (POINT, [1], "should be an object"),
        (POINT, {"y": 1}, "argument 'x.x' is missing"),
        (POINT, {"x": 1, "y": "q"}, "argument 'x.y' should be a number"),
        (schema(extra=False, a=INTEGER), {"b": 1}, "unknown argument 'x.b'"),
        ({"enum": ["km", "miles"]}, "feet", 'should be one of km, miles, got "feet"'),
        ({"enum": [1]}, True, "should be one of 1"),
        ({"anyOf": [INTEGER, BOOLEAN]}, "q", r"should be integer\|boolean"),
        ({"type": "integer", "minimum": 2}, 1, "should be at least 2"),
        ({"type": "integer", "maximum": 2}, "3", "should be at most 2"),
        ({"type": "number", "exclusiveMinimum": 0}, 0, "should be more than 0"),
        ({"type": "number", "exclusiveMaximum": 1}, 1, "should be less than 1"),
        ({"type": "string", "minLength": 1}, "", "1 characters or more"),
        ({"type": "string", "maxLength": 2}, "abc", "at most 2 characters"),
        ({"type": "array", "minItems": 1}, [], "1 entries or more"),
        ({"type": "array", "maxItems": 1}, [1, 2], "at most 1 entries"),
        ({"type": "string", "pattern": "^a"}, "b", r"should match \^a"),
        ({"type": "string", "pattern": r"^\p{L}+$"}, "ä1", r"should match \^"),
        ({"type": "string", "pattern": "^(a|a)*$"}, "a" * 40 + "!", "take too long to check"),
        (
            {"items": {"pattern": "(?:a{1,30}){1,30}b"}, "type": "array"},
            ["a" * 40 + "!"] * 50,
            "take too long to check",
        ),
        ({"anyOf": [{"pattern": "^(a|a)*$"}, {"enum": ["x"]}]}, "a" * 40 + "!", "take too long to check"),
        ({"pattern": r"^(?:[^,]*,?)*x$"}, "a," * 500_000 + "xP", "take too long to check"),
    ],
)
def test_what_is_wrong_is_one_short_line(rule, value, words):
    with pytest.raises(ArgumentError, match=words) as error:
        check_one(rule, value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_missing_and_unknown_arguments_say_what_the_tool_takes():
    parameters = schema(["expression"], expression=STRING, digits=INTEGER)
    with pytest.raises(ArgumentError) as error:
        check_arguments(parameters, {})
    assert str(error.value) == "argument 'expression' is missing; it takes {expression: string, digits?: integer}"
    with pytest.raises(ArgumentError) as error:
        check_arguments(parameters, {"expression": "1", "expr": "2"})
    assert str(error.value) == "unknown argument 'expr'; it takes {expression: string, digits?: integer}"


def test_further_arguments_where_the_schema_allows_them():
    assert check_arguments(schema(extra=True, a=INTEGER), {"b": 1}) == {"b": 1}
    assert check_arguments(schema(extra=INTEGER), {"b": "1"}) == {"b": 1}


def test_null_leaves_an_optional_argument_out():
    assert check_arguments(schema(a=INTEGER), {"a": None}) == {}
    assert check_arguments(schema(a={"type": ["integer", "null"]}), {"a": None}) == {"a": None}


def test_defaults_are_filled_in_and_not_shared():
    parameters = schema(a={"type": "array", "default": [1]})
    first = check_arguments(parameters, {})
    first["a"].append(2)
    assert check_arguments(parameters, {}) == {"a": [1]}


def doubled(count: int) -> dict:
    """A schema of `count` definitions, each two alternatives of the next: checking a value takes 2**count steps."""
    names = [f"n{n}" for n in range(count)]
    defs = {a: {"anyOf": [{"$ref": f"#/$defs/{b}"}] * 2} for a, b in pairwise(names)}
    return {**schema(x={"$ref": "#/$defs/n0"}), "$defs": {**defs, names[-1]: {"type": "integer"}}}


@pytest.mark.slow
def test_alternatives_within_alternatives_are_checked_in_bounded_time():
    kinds = {"type": "integer"}
    for _ in range(40):
        kinds = {"type": ["object", "object"], "properties": {"x": kinds}}
    for parameters in (doubled(40), schema(x=kinds)):
        for _ in range(2):  # what cannot be read is remembered
            with pytest.raises((ArgumentError, UserError), match=r"too long to check|too many alternatives"):
                check_arguments(parameters, {"x": "q"})
    assert outline(doubled(40)) == "{x?: any}"
    assert check_arguments(doubled(4), {"x": "3"}) == {"x": 3}


def test_a_schema_may_refer_to_itself_among_alternatives():
    value = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/value"}}]}
    parameters = {**schema(x={"$ref": "#/$defs/value"}), "$defs": {"value": value}}
    assert check_arguments(parameters, {"x": [1, [2]]}) == {"x": [1, [2]]}
    with pytest.raises(ArgumentError, match=r"should be integer\|list of integer\|list of any"):
        check_arguments(parameters, {"x": {}})


def test_a_schema_may_refer_to_itself():
    tree = schema(["value"], value=INTEGER, left={"$ref": "#/$defs/tree"})
    parameters = {**schema(["root"], root={"$ref": "#/$defs/tree"}), "$defs": {"tree": tree}}
    value = {"root": {"value": "1", "left": {"value": 2, "left": {"value": "3"}}}}
    assert check_arguments(parameters, value)["root"]["left"]["left"] == {"value": 3}
    with pytest.raises(ArgumentError, match=r"'root.left.value' should be an integer"):
        check_arguments(parameters, {"root": {"value": 1, "left": {"value": "q"}}})


@pytest.mark.parametrize(
    "rule",
    [
        {"type": "text"},
        {"$ref": "#/$defs/none"},
        "string",
        {"pattern": "("},
        {"pattern": 1},
        {"pattern": "(" * 9999},
        {"pattern": "(" * 3000 + ")" * 3000},
    ],
)
def test_a_schema_that_is_none_is_the_authors_error(rule):
    with pytest.raises(UserError, match="a tool's parameters"):
        check_one(rule, 1)


NULL = {"type": "null"}
TAGS = {"enum": ["q", "r"], "title": "Tag"}


@pytest.mark.parametrize(
    ("rule", "written"),
    [
        ({"description": "D.", "title": "X", "type": "string"}, '{"type": "string", "description": "D."}'),
        ({"title": "Why", "type": "string"}, '{"type": "string", "title": "Why"}'),
        ({"minimum": 0, "description": "D.", "default": 1, "type": "integer"},
         '{"type": "integer", "description": "D.", "minimum": 0, "default": 1}'),
        ({"anyOf": [STRING, NULL], "default": None}, '{"type": "string", "nullable": true}'),
        ({"type": ["string", "null"]}, '{"type": "string", "nullable": true}'),
        ({"type": ["string", "integer", "null"]}, '{"type": ["string", "integer"], "nullable": true}'),
        ({"oneOf": [STRING, {"const": None}]}, '{"type": "string", "nullable": true}'),
        ({"anyOf": [STRING, INTEGER, NULL]}, '{"type": ["integer", "string"], "nullable": true}'),
        ({"description": "D.", "anyOf": [{"items": STRING, "type": "array"}, STRING, NULL]},
         '{"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}], "nullable": true, '
         '"description": "D."}'),
        ({"const": "a"}, '{"type": "string", "enum": ["a"]}'),
        ({"enum": ["a", 1, None]}, '{"type": ["string", "integer", "null"], "enum": ["a", 1, null]}'),
        ({"items": {}, "type": "array"}, '{"type": "array"}'),
        ({"additionalProperties": True, "type": "object"}, '{"type": "object"}'),
        ({"items": {"$ref": "#/$defs/Tag"}, "type": "array"},
         '{"type": "array", "items": {"type": "string", "enum": ["q", "r"], "title": "Tag"}}'),
        ({"allOf": [{"$ref": "#/$defs/Tag"}], "title": "X", "description": "D."},
         '{"type": "string", "enum": ["q", "r"], "description": "D."}'),
        ({"anyOf": [{"$ref": "#/$defs/a~1b~0"}, NULL]}, '{"type": "boolean", "nullable": true}'),
        ({"$ref": "https://example.org/x.json", "description": "D."}, '{"description": "D."}'),
        ({"required": ["$defs"], "properties": {"$defs": STRING}, "type": "object"},
         '{"type": "object", "properties": {"$defs": {"type": "string"}}, "required": ["$defs"]}'),
        (True, "true"),
    ],
)  # fmt: skip
def test_a_prompt_has_a_schema_in_the_form_that_models_know(rule, written):
    given = {"$schema": "x", "required": ["x"], "properties": {"x": rule}, "$defs": {"Tag": TAGS, "a/b~": BOOLEAN}}
    before = json.dumps(given)
    shown = prompt_schema(given)
    assert json.dumps(shown["properties"]["x"]) == written
    assert list(shown) == ["type", "properties", "required"]
    assert json.dumps(given) == before


def test_a_whole_schema_may_be_a_reference():
    given = {"$ref": "#/$defs/A", "properties": {}, "$defs": {"A": schema(["a"], a=STRING)}}
    assert prompt_schema(given) == schema(["a"], a=STRING)


def twice_the_next(i):
    return {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} if i < 59 else STRING


def nested(depth):
    return {"items": nested(depth - 1)} if depth else STRING


@pytest.mark.parametrize(
    ("rule", "definitions", "words"),
    [
        ({"$ref": "#/$defs/T"}, {"T": {"items": {"$ref": "#/$defs/T"}}}, "refer to themselves"),
        ({"$ref": "#"}, {}, "refer to themselves"),
        ({"$ref": "#/$defs/none"}, {}, "points to nothing"),
        ({"$ref": "#/$defs/0"}, {f"{i}": twice_the_next(i) for i in range(60)}, "too large"),
        (nested(400), {}, "nested too deeply"),
    ],
)  # fmt: skip
def test_a_schema_that_no_prompt_can_hold_is_refused(rule, definitions, words):
    with pytest.raises(UserError, match=words) as error:
        prompt_schema({**schema(x=rule), "$defs": definitions})
    assert "\n" not in str(error.value)


def test_the_outline_of_many_arguments_is_bounded():
    assert len(outline(schema(**{f"name_{i}": STRING for i in range(12)}))) < 200
    assert outline(schema(["a"], a={"type": "array", "items": INTEGER})) == "{a: list of integer}"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
EVERYTHING = schema(
    ["a"],
    a=INTEGER,
    b=NUMBER,
    c=STRING,
    d={"anyOf": [BOOLEAN, POINT]},
    e={"type": "array", "items": POINT},
    f={"enum": ["x", 1, None]},
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefg"), values))
def test_whatever_a_model_writes_passes_or_is_told(arguments):
    try:
        result = check_arguments(EVERYTHING, arguments)
    except ArgumentError as error:
        told = str(error)
    else:
        told = ""
        assert type(result["a"]) is int
        assert result.keys() <= set("abcdef")
        assert check_arguments(EVERYTHING, result) == result
    assert "\n" not in told
