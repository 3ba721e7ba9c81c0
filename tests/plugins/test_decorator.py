"""`@tool`: from a typed function and its docstring to a tool."""

import asyncio
import json
import random
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema

from agentrl import ArgumentError, Session, Task, Tool, ToolResponse, UserError, tool
from agentrl.plugins.signature import read_docstring


class Unit(Enum):
    KM = "km"
    MILES = "miles"


class Place(BaseModel):
    name: str
    title: str = "town"
    near: list["Place"] = Field(default_factory=list)


@dataclass
class Size:
    width: int


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just('{"name": "A"}'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("name"), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture
def session():
    return Session("r/0", Task("t", {}), random.Random(0), 0.0)


def call(made: Tool, session: Session, **arguments: Any) -> Any:
    return asyncio.run(made.execute(session, **made.check(arguments)))


@tool
def distance(place: Place, unit: Unit = Unit.KM, via: list[str] | None = None, limit: float = 1.5) -> str:
    """How far a place is.

    It is measured by road.

    Args:
        place: Where to go.
        unit (Unit): What to measure in,
            one of two.
        via: Places on the way: in order.

    Returns:
        The distance.
    """
    return f"{place.name} {place.title} {unit.name} {via} {limit}"


def test_name_description_and_schema():
    assert isinstance(distance, Tool)
    assert distance.name == "distance"
    assert distance.description == "How far a place is.\n\nIt is measured by road."
    properties = distance.parameters["properties"]
    assert distance.parameters["type"] == "object"
    assert distance.parameters["required"] == ["place"]
    assert properties["place"]["description"] == "Where to go."
    assert properties["unit"]["description"] == "What to measure in, one of two."
    assert properties["unit"]["default"] == "km"
    assert properties["via"]["description"] == "Places on the way: in order."
    assert properties["limit"] == {"type": "number", "default": 1.5}
    assert distance.parameters["$defs"]["Unit"]["enum"] == ["km", "miles"]
    assert set(distance.parameters["$defs"]["Place"]["properties"]) == {"name", "title", "near"}
    with pytest.raises(
        UserError, match=r"^tool 'distance': its parameters refer to themselves \(\$ref '#/\$defs/Place'"
    ):
        _ = distance.schema


def pair(
    a: int,
    b: Literal["x", "y"],
    c: list[str],
    d: dict[str, int],
    unit: Unit,
    e: tuple[int, str],
    f: list,
    g: Any,
    h: int | str,
    i: list[int] | dict[str, str] | None,
    j: Literal[1, "a"],
    k: int | None = None,
    m: Literal["p", "q"] | None = None,
    n: list[float] | None = None,
) -> str:
    """Do it.

    At once.

    Args:
        a: A.
        b: B.
        c: C.
        d: D.
        unit: U.
        e: E.
        f: F.
        g: G.
        h: H.
        i: I.
        j: J.
        k: K.
        m: M.
        n: N.
    """
    return ""


def test_a_prompt_has_the_schema_that_transformers_writes():
    expected = get_json_schema(pair)
    del expected["function"]["return"]
    assert json.dumps(tool(pair).schema) == json.dumps(expected)


def test_titles_are_left_out_but_not_an_argument_of_that_name():
    text = json.dumps(distance.parameters)
    assert text.count('"title"') == 1  # the property of Place


def test_it_is_still_the_function():
    assert distance(Place(name="A")) == "A town KM None 1.5"
    assert distance.__name__ == "distance"
    assert distance.__doc__.startswith("How far")


def test_arguments_reach_the_function_typed(session):
    assert call(
        distance, session, place={"name": "A", "near": [{"name": "B"}]}, unit="miles", via=["C"], limit="2"
    ) == ("A town MILES ['C'] 2.0")


def test_json_written_once_too_often_is_read(session):
    assert call(distance, session, place='{"name": "A"}', via='["B"]') == "A town KM ['B'] 1.5"


def test_null_leaves_an_argument_out_where_it_may_not_be_null(session):
    assert call(distance, session, place={"name": "A"}, unit=None, via=None) == "A town KM None 1.5"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {},
            r"argument 'place' is missing; it takes \{place: object, unit\?: km\|miles, via\?: list of string\|null",
        ),
        ({"place": {"name": "A"}, "uni": "km"}, r"unknown argument 'uni'; it takes \{place"),
        ({"place": {"name": "A"}, "unit": "feet"}, r"argument 'unit' should be 'km' or 'miles', got \"feet\""),
        ({"place": {}}, r"argument 'place.name' is missing"),
        ({"place": {"name": "A"}, "limit": "far"}, r"argument 'limit' should be a valid number, got \"far\""),
        ({"place": {"name": "A"}, "via": "B"}, r"argument 'via' should be a list, got \"B\""),
        ({"place": 3}, r"argument 'place' should be an object, got 3"),
        ({"place": {"name": "A", "near": [{"name": ["x"]}]}}, r"argument 'place.near.0.name' should be a valid string"),
    ],
)
def test_wrong_arguments_are_one_line_and_never_reach_the_function(arguments, words):
    with pytest.raises(ArgumentError, match=words) as error:
        distance.check(arguments)
    assert "\n" not in str(error.value)


def test_every_kind_of_annotation(session):
    @tool(name="many", description="Takes much.")
    def function(
        a: int,
        b: Literal["x", "y"],
        c: dict[str, int],
        d: int | str,
        e: tuple[int, int],
        f: Size,
        g: Any = None,
        schema: bool = False,
    ) -> str:
        return repr((a, b, c, d, e, f, g, schema))

    assert function.name == "many"
    assert function.description == "Takes much."
    assert function.parameters["properties"]["b"]["enum"] == ["x", "y"]
    got = call(function, session, a="1", b="x", c={"k": 1}, d="q", e=[1, 2], f={"width": 3}, g=None, schema=True)
    assert got == "(1, 'x', {'k': 1}, 'q', (1, 2), Size(width=3), None, True)"


def test_the_session_is_injected_and_not_the_models(session):
    @tool
    def who(session: Session, suffix: str = "") -> str:
        """Say who."""
        return session.id + suffix

    assert "session" not in who.parameters["properties"]
    assert call(who, session, suffix="!") == "r/0!"
    with pytest.raises(ArgumentError, match="unknown argument 'session'"):
        who.check({"session": "mine"})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, ""),
        (True, "true"),
        (3, "3"),
        (2.5, "2.5"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        ([Place(name="é")], '[{"name":"é","title":"town","near":[]}]'),
        (Size(1), '{"width":1}'),
    ],
)
def test_what_it_returns_becomes_text(session, value, text):
    @tool
    def give() -> Any:
        """Give it."""
        return value

    assert call(give, session) == text


def test_a_tool_response_goes_through(session):
    response = ToolResponse("x", reward=1.0, done=True)

    @tool
    async def finish() -> ToolResponse:
        """End it."""
        return response

    assert call(finish, session) is response


def test_what_it_raises_is_the_callers(session):
    @tool
    def fail() -> str:
        """Fail."""
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        call(fail, session)


async def test_an_async_function_runs_concurrently(session):
    inside = asyncio.Barrier(8)

    @tool
    async def wait() -> str:
        """Wait for the others."""
        await inside.wait()
        return "met"

    async with asyncio.timeout(60):
        assert await asyncio.gather(*(wait.execute(session) for _ in range(8))) == ["met"] * 8


async def test_a_thread_keeps_the_loop_free_and_many_wait_at_once(session):
    together = threading.Barrier(65)

    @tool(thread=True)
    def wait() -> str:
        """Wait for the others."""
        together.wait(60)
        return threading.current_thread().name

    names = asyncio.gather(*(wait.execute(session) for _ in range(64)))
    await asyncio.sleep(0)  # the calls begin; the loop itself is the last to arrive
    await asyncio.to_thread(together.wait, 60)
    assert len(set(await names)) == 64
    await wait.close()
    await wait.close()


async def test_a_synchronous_function_runs_in_the_loop(session):
    @tool
    def where() -> str:
        """Say where."""
        return threading.current_thread().name

    assert await where.execute(session) == threading.main_thread().name


def bad_no_annotation(x):
    """Takes x."""


def bad_varargs(*x: int):
    """Takes xs."""


def bad_positional(x: int, /):
    """Takes x."""


def bad_no_docstring(x: int):
    pass


def bad_type(x: threading.Lock):  # type: ignore[valid-type]
    """Takes a lock."""


def bad_docstring(number: int):
    """Takes a number.

    Args:
        numbr: The number.
    """


def bad_name(x: "Nowhere"):  # type: ignore[name-defined]  # noqa: F821
    """Takes x."""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (bad_no_annotation, "parameter 'x' has no type annotation"),
        (bad_varargs, "cannot be filled by name"),
        (bad_positional, "cannot be filled by name"),
        (bad_no_docstring, "needs a docstring"),
        (bad_type, "have no JSON schema"),
        (bad_docstring, "describes 'numbr', which is not a parameter; did you mean 'number'"),
        (bad_name, "annotation cannot be read: .*Nowhere"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_one_line(function, words):
    with pytest.raises(UserError, match=f"tool '{function.__name__}'.*{words}") as error:
        tool(function)
    assert "\n" not in str(error.value)


def test_a_thread_for_an_async_function_is_refused():
    with pytest.raises(UserError, match="leave thread=True out"):

        @tool(thread=True)
        async def wait() -> None:
            """Wait."""


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["place", "unit", "via", "limit", "x\ny" * 500]), json_values, max_size=4))
def test_whatever_a_model_writes_passes_or_is_told(arguments):
    told = ""
    try:
        typed = distance.check(arguments)
    except ArgumentError as error:
        told = str(error)
    else:
        assert isinstance(typed["place"], Place)
    assert "\n" not in told
    assert len(told) < 400


GOOGLE = """Summary.

Args:
    a: First.
    b (int, optional): Second
        goes on: here.

Raises:
    ValueError: never.
"""
NUMPY = """Summary.

Parameters
----------
a : int
    First.
b : str, optional
    Second
    goes on: here.

Returns
-------
str
"""
SPHINX = """Summary.

:param a: First.
:param int b: Second
    goes on: here.
:returns: text
"""


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX])
def test_docstring_styles(text):
    read = read_docstring(text)
    assert read.description == "Summary."
    assert read.arguments == {"a": "First.", "b": "Second goes on: here."}


def test_a_docstring_without_sections_is_all_description():
    text = "Summary.\n\nNotes on it are here: all of them.\n\nReturns quickly."
    assert read_docstring(text).description == text
    assert read_docstring("").description == ""
