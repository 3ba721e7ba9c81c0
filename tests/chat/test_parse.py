"""Reading an assistant's turn: every format, everything that can be wrong with it, and no text that raises."""

import copy
import functools
import json
import re
import sys
from typing import Any

import pytest
from chat_help import CALCULATOR, HERMES, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import calls, formats
from agentrl.chat.base import ParsedCall
from agentrl.chat.calls import Schemas
from agentrl.chat.encode import PartialText
from agentrl.chat.formats import FORMATS, MESSAGE_ENDS, Format
from agentrl.chat.gemma import read_gemma_arguments
from agentrl.chat.load import load_chat

BY_NAME = {form.name: form for form in FORMATS}
HERMES_FORM = BY_NAME["Hermes JSON in <tool_call>"]
PYTHON_FORM = BY_NAME["Python calls"]


CLOSING = {PYTHON_FORM.name: "<|tool_call_end|>", "gemma calls": "<tool_call|>"}


def calls_of(form: Format, text: str, closed: bool = True, tools: tuple[Any, ...] = ()) -> list[ParsedCall]:
    return form.read(text, closed, Schemas(tools)).calls


WRITTEN = [
    ("Hermes JSON in <tool_call>", '<tool_call>\n{"name": "f", "arguments": {"a": "x", "n": 3}}\n</tool_call>'),
    (
        "Hermes JSON in <tool_call>",
        '<tool_call>{"name": "f", "parameters": "{\\"a\\": \\"x\\", \\"n\\": 3}"}</tool_call>',
    ),
    (
        "function tags in <tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "argument tags in <tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value></tool_call>",
    ),
    ("gemma calls", '<|tool_call>call:f{a:<|"|>x<|"|>,n:3}<tool_call|>'),
    ("Python calls", "<|tool_call_start|>[f(a='x', n=3)]<|tool_call_end|>"),
    (
        "DeepSeek calls",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "x", "n": 3}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ("DeepSeek calls", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x", "n": 3}<｜tool▁call▁end｜>'),
    (
        "Kimi calls",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "x", "n": 3}'
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "MiniMax calls",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n<parameter name="n">3</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    (
        "DSML calls",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        "JSON in <|START_ACTION|>",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "x", "n": 3}}]<|END_ACTION|>',
    ),
    ("JSON in <|tool_call|>", '<|tool_call|>[{"name": "f", "arguments": {"a": "x", "n": 3}}]<|/tool_call|>'),
    ("JSON in <function_call>", '<function_call>{"name": "f", "arguments": {"a": "x", "n": 3}}</function_call>'),
    ("Mistral calls", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x", "n": 3}}]'),
    ("Mistral calls", '[TOOL_CALLS]f[ARGS]{"a": "x", "n": 3}'),
    ("Mistral calls", '[TOOL_CALLS]f{"a": "x", "n": 3}'),
    ("channels", ' to=functions.f<|channel|>commentary json<|message|>{"a": "x", "n": 3}'),
    ("channels", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x", "n": 3}'),
    (
        "channels",
        ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">x</atem:parameter>\n'
        '<atem:parameter name="n">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
    ("bare JSON", '{"name": "f", "parameters": {"a": "x", "n": 3}}'),
    ("bare JSON", '<|python_tag|>{"name": "f", "parameters": {"a": "x", "n": 3}}'),
]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_call_in_each_format(name: str, text: str) -> None:
    form = BY_NAME[name]
    assert form.marker in text
    reading = form.read(text, True, Schemas(()))
    assert [(one.name, one.arguments, one.error) for one in reading.calls] == [("f", {"a": "x", "n": 3}, None)]
    assert "".join(reading.content).strip() == ""
    assert reading.calls[0].raw in text or name in ("channels", "Mistral calls")


def test_every_format_is_tried_here() -> None:
    assert {name for name, _ in WRITTEN} == set(BY_NAME)


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_call_cut_anywhere_is_an_error_or_content_and_never_raises(name: str, text: str) -> None:
    form = BY_NAME[name]
    for end in range(len(text)):
        for one in calls_of(form, text[:end], closed=False):
            # what is whole at the cut is read; what is not says so
            assert one.error is not None or one.arguments == {"a": "x", "n": 3}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"name": "f", "arguments": {"a": 1}', "not valid JSON"),
        ("{'name': 'f'}", "not valid JSON"),
        ("", "not valid JSON"),
        ('"f"', "must be a JSON object with name and arguments, not string"),
        ("3", "not integer"),
        ("null", "not null"),
        ("[]", "list of calls is empty"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3, "arguments": {}}', 'no "name"'),
        ('{"name": "", "arguments": {}}', 'no "name"'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be a JSON object, not array'),
        ('{"name": "f", "arguments": "1 +"}', '"arguments": it is not valid JSON'),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": ' + '{"a":' * 100_000, "nested too deeply"),
        ('{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body: str, why: str) -> None:
    (one,) = calls_of(HERMES_FORM, f"<tool_call>\n{body}\n</tool_call>")
    assert one.error is not None
    assert why in one.error
    assert len(one.error) < 300
    assert one.arguments == {}


DEEPER = [
    (HERMES_FORM, '{"name": "f", "name": "g"}'),
    (HERMES_FORM, '{"name": "f", "arguments": {"n": [{"a": 1, "b": {"a": 2, "a": 2}}]}}'),
    (HERMES_FORM, '{"name": "f", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}'),
    (BY_NAME["function tags in <tool_call>"],
     '<function=f><parameter=n>{"a": 1, "a": 2}</parameter></function>'),
    (PYTHON_FORM, "[f(n={'a': 1, 'a': 2})]"),
    (PYTHON_FORM, "[f(n={1: 1, '1': 2})]"),
    (BY_NAME["gemma calls"], "call:f{n:{a:1,a:2}}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_key_that_stands_twice_is_an_error(name: str, text: str) -> None:
    (call,) = calls_of(BY_NAME[name], re.sub(r"\bn\b", "a", text))
    assert (call.error or "").endswith("the key 'a' stands twice")
    assert call.arguments == {}


@pytest.mark.parametrize(("form", "body"), DEEPER)
def test_a_key_that_stands_twice_deeper_is_an_error(form: Format, body: str) -> None:
    (call,) = calls_of(form, form.marker + body + CLOSING.get(form.name, "</tool_call>"))
    assert (call.error or "").endswith("stands twice")
    assert call.arguments == {}


def test_a_text_may_hold_a_key_twice() -> None:
    text = '<tool_call><function=f><parameter=a>{"k": 1, "k": 2}</parameter></function></tool_call>'
    (call,) = calls_of(BY_NAME["function tags in <tool_call>"], text, tools=(TYPED,))
    assert call.arguments == {"a": '{"k": 1, "k": 2}'}


def test_content_around_calls_and_several_calls() -> None:
    text = 'First. <tool_call>{"name": "f"}</tool_call> then <tool_call>{bad}</tool_call><tool_call>{"name": "g", '
    reading = HERMES_FORM.read(text, False, Schemas(()))
    assert [(one.name, one.error is None) for one in reading.calls] == [("f", True), ("", False), ("", False)]
    assert reading.calls[2].error == "this tool call cannot be read: it is not closed by </tool_call>"
    assert "".join(reading.content) == "First.  then "


def test_values_without_quotes_take_the_type_of_the_schema() -> None:
    types = {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "e": {"enum": ["1", "2"]},
        "l": {"type": "array"},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": types}}}
    values = {"s": "42", "n": "42", "x": "3", "b": "True", "o": "None", "e": "1", "l": '["a"]', "free": "7"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    (one,) = calls_of(BY_NAME["function tags in <tool_call>"], text, tools=(tool,))
    expected = {"s": "42", "n": 42, "x": 3, "b": True, "o": None, "e": "1", "l": ["a"], "free": 7}
    assert one.arguments == expected
    assert type(one.arguments["b"]) is bool
    (wrong,) = calls_of(
        BY_NAME["function tags in <tool_call>"],
        "<tool_call><function=f><parameter=n>four</parameter></function></tool_call>",
        tools=(tool,),
    )
    assert wrong.arguments == {"n": "four"}  # the tool's own check says what is wrong with it


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("[f(1)]", "given by name"),
        ("[f(**{})]", "given by name"),
        ("[f(a={**{'b': 1}})]", "plain values"),
        ("[f(a=__import__('os').system('true'))]", "plain values"),
        ("[1]", "it must be name"),
        ("[]", "is empty"),
        ("f(a=", "not a list of calls"),
        ("f(a=" + "[" * 5000, "not a list of calls"),
        ("f(a='" + "x" * 200_000 + "')", "longer than"),
    ],
)
def test_python_calls_are_literals_only(body: str, why: str) -> None:
    (one,) = calls_of(PYTHON_FORM, f"<|tool_call_start|>{body}<|tool_call_end|>")
    assert one.error is not None
    assert why in one.error


def test_python_values() -> None:
    text = """<|tool_call_start|>[a.f(x=-1.5, y=true, z={"k": [null, "v"]}), g()]<|tool_call_end|>"""
    first, second = calls_of(PYTHON_FORM, text)
    assert (first.name, first.arguments) == ("a.f", {"x": -1.5, "y": True, "z": {"k": [None, "v"]}})
    assert (second.name, second.arguments) == ("g", {})


def test_kimi_keeps_the_id_that_the_model_wrote() -> None:
    text = "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    (one,) = calls_of(BY_NAME["Kimi calls"], text)
    assert (one.name, one.id, one.error) == ("f", "functions.f:7", None)


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}, "id": "aB3dE6gH9"}]',
        '[TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{"a": "[TOOL_CALLS]"}',
        '[TOOL_CALLS][{"id": "aB3dE6gH9", "type": "function", '
        '"function": {"name": "f", "arguments": "{\\"a\\": \\"[TOOL_CALLS]\\"}"}}]',
    ],
)
def test_mistral_keeps_the_id_that_the_model_wrote(text: str) -> None:
    for more in ("", text):
        first, *rest = calls_of(BY_NAME["Mistral calls"], text + more)
        assert (first.name, first.arguments, first.id) == ("f", {"a": "[TOOL_CALLS]"}, "aB3dE6gH9")
        assert len(rest) == bool(more)
    (broken,) = calls_of(BY_NAME["Mistral calls"], '[TOOL_CALLS][{"name": "f", "arguments": 3, "id": "aB3dE6gH9"}]')
    assert broken.error is not None
    assert broken.id == "aB3dE6gH9"


STRING = {"type": "object", "properties": {"a": {"type": "string"}}}
TYPED = {"type": "function", "function": {"name": "f", "parameters": STRING}}


def written(name: str, text: str, value: str) -> str:
    """One of WRITTEN's calls with another text as its argument `a`."""
    if "Python" in name:
        return text.replace("'x'", repr(value))
    as_json = name.startswith(("Hermes", "JSON", "bare", "Mistral", "Kimi", "DeepSeek")) or text.endswith("3}")
    if '\\"x\\"' in text:
        return text.replace('\\"x\\"', json.dumps(json.dumps(value))[1:-1])
    return (
        text.replace('"x"', json.dumps(value, ensure_ascii=False))
        if as_json
        else re.sub(r"\bx\b", lambda _: value, text)
    )


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_value_may_hold_the_tags_of_its_own_format(name: str, text: str) -> None:
    tags = set(re.findall(r"<[^<>\"']+>|\[[A-Z_]+\]|<\|\"\|>|```|};", text)) - {'<|"|>'}
    if "json" in text and name == "channels":
        tags |= {"<atem:function_calls>", "</atem:function_calls>"}
    values = [f"one {tag} two" for tag in tags] + [f"{tag}" for tag in tags] + [" \n x\n", "", 'it\'s "so"']
    for value in values:
        for more in ("", "\n" + text):
            if more and (name == "bare JSON" or "to=f" in text):
                continue
            first, *rest = calls_of(BY_NAME[name], written(name, text, value) + more, tools=(TYPED,))
            assert (first.name, first.arguments, first.error) == ("f", {"a": value, "n": 3}, None)
            assert [one.arguments for one in rest] == [{"a": "x", "n": 3}] * bool(more)


FUNCTION_TAGS, ARGUMENT_TAGS = BY_NAME["function tags in <tool_call>"], BY_NAME["argument tags in <tool_call>"]
ONE, TWO = ("<tool_call><function=f><parameter=a>", "</parameter></function></tool_call>")


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        # a value with all that ends a call in a row cannot be told from the end of the call
        (FUNCTION_TAGS, ONE + "x" + TWO + "y" + TWO, [{"a": "x"}]),
        (FUNCTION_TAGS, ONE + "x</parameter><parameter=b>y" + TWO, [{"a": "x", "b": "y"}]),
        (ARGUMENT_TAGS, "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>y</arg_value></tool_call>",
         [{"a": "x"}]),
        # a call that is not whole takes nothing of the next one
        (FUNCTION_TAGS, ONE + "x</parameter></tool_call>" + ONE + "y" + TWO, [None, {"a": "y"}]),
        (FUNCTION_TAGS, ONE + "x</tool_call>\n" + ONE + "y" + TWO, [None, {"a": "y"}]),
        (ARGUMENT_TAGS, "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call><tool_call>f</tool_call>", [None, {}]),
        (HERMES_FORM, '<tool_call>{"name": "f, "a": "x}</tool_call><tool_call>{"name": "f"}</tool_call>', [None, {}]),
        # several functions between one pair of tags
        (FUNCTION_TAGS, "<tool_call><function=f></function><function=f></function></tool_call>", [{}, {}]),
    ],
)  # fmt: skip
def test_where_values_end_that_hold_their_own_closing_tag(form: Format, text: str, found: list[Any]) -> None:
    calls = calls_of(form, text, tools=(TYPED,))
    assert [None if one.error else one.arguments for one in calls] == found


@pytest.mark.parametrize(
    ("form", "text", "why"),
    [
        (HERMES_FORM, '{"name": "f", "arguments": {"a": 1e999}}', "too large"),
        (HERMES_FORM, '{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}", "nested too deeply"),
        (PYTHON_FORM, "[f(a=1e999)]", "too large"),
        (PYTHON_FORM, "[f(a=-1e999)]", "too large"),
        (PYTHON_FORM, "[f(a='\\ud800')]", "surrogate"),
        (BY_NAME["gemma calls"], "call:f{a:1e999}", "too large"),
    ],
)
def test_values_that_nothing_after_could_write_are_refused(form: Format, text: str, why: str) -> None:
    (one,) = calls_of(form, form.marker + text + CLOSING.get(form.name, "</tool_call>"))
    assert one.error is not None
    assert why in one.error


def test_python_takes_the_pairs_that_json_writes() -> None:
    (one,) = calls_of(PYTHON_FORM, "<|tool_call_start|>[f(a={'k': '\\ud83d\\ude42'})]<|tool_call_end|>")
    assert one.arguments == {"a": {"k": "🙂"}}


def test_channels_hold_thoughts_answers_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Twice three.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        '<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>Six.'
    )
    reading = BY_NAME["channels"].read(text, True, Schemas(()))
    assert (reading.reasoning, reading.content) == (["Twice three."], ["Six."])
    assert [(one.name, one.arguments) for one in reading.calls] == [("f", {"a": 1})]
    (open_call,) = calls_of(BY_NAME["channels"], ' to=functions.f<|message|>{"a": 1}', closed=False)
    assert open_call.error is not None


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**9), 10**9)
        | st.text(st.characters(exclude_characters='<|"'), max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.from_regex("[a-z]{1,5}", fullmatch=True), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
@settings(deadline=None)
def test_gemma_values_round_trip(value: Any) -> None:
    def write(one: Any) -> str:
        if isinstance(one, str):
            return f'<|"|>{one}<|"|>'
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{write(item)}" for key, item in one.items()) + "}"
        if isinstance(one, list):
            return "[" + ",".join(write(item) for item in one) + "]"
        return json.dumps(one)

    assert read_gemma_arguments("{v:" + write(value) + "}") == ({"v": value}, None)


PIECES = st.sampled_from(
    [
        *(form.marker for form in FORMATS),
        "</tool_call>", "<tool_call|>", "<|tool_call_end|>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "[ARGS]",
        "<|end|>", "<function=", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>",
        "call:f{", '<invoke name="f">', '<parameter name="k">', "</invoke>", '<|"|>', "to=f", "<|start|>assistant",
        "<think>", "</think>", '{"name": "f", "arguments": {', '"name"', "}", "]", "[", '"', ":", ",", "\\",
        "\\ud800", "\n", "f(", ")", "=", "-" * 50,
    ]
)  # fmt: skip
ANYTHING = st.lists(PIECES | st.text(max_size=6), max_size=25).map("".join)


@pytest.mark.slow
@given(text=ANYTHING, closed=st.booleans())
@settings(max_examples=400, deadline=None)
def test_no_text_makes_a_reader_raise(text: str, closed: bool) -> None:
    for form in FORMATS:
        for one in calls_of(form, text, closed, (CALCULATOR,)):
            assert isinstance(one.arguments, dict)
            assert one.error is None or one.arguments == {}
            assert one.error is not None or one.name


@pytest.mark.slow
@given(text=ANYTHING, ids=st.lists(st.integers(0, 10**6), max_size=20))
@settings(max_examples=200, deadline=None)
def test_no_ids_make_a_chat_raise(text: str, ids: list[int]) -> None:
    tokenizer, chat = hermes()
    chat.parse(ids)
    chat.parse(tokenizer.encode(text, add_special_tokens=False))


BEGUN = [("<think>", "</think>", True)]
THOUGHTS = [("<think>", "</think>", False)], BEGUN, [("[THINK]", "[/THINK]", False), *BEGUN]


@pytest.mark.slow
@given(text=ANYTHING, form=st.sampled_from([*FORMATS, None]), more=st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_certain_of_a_turn_is_the_beginning_of_the_whole(text: str, form: Format | None, more: Any) -> None:
    tokenizer, chat = hermes()
    parser = copy.copy(chat._parser)
    parser._formats = (form,) if form else tuple(f for f in FORMATS if f.name not in ("bare JSON", "channels"))
    parser._thinking = more.draw(st.sampled_from(THOUGHTS))
    wrappers = st.sampled_from([w for f in parser._formats for w in (f.marker, *f.dropped, *MESSAGE_ENDS, "{")])
    pieces = [
        text,
        more.draw(wrappers),
        more.draw(st.just("") | ANYTHING),
        more.draw(st.sampled_from(["", "<|im_end|>"])),
    ]
    ids = tokenizer.encode("".join(pieces), add_special_tokens=False)
    whole, size = parser.parse(ids), more.draw(st.integers(1, 4))
    stream = parser.stream(PartialText(chat._encoder))
    said = [one for at in range(0, len(ids), size) for one in stream.add(ids[at : at + size])]
    assert whole.content.startswith("".join(one.text for one in said if one.kind == "content"))
    assert (whole.reasoning or "").startswith("".join(one.text for one in said if one.kind == "reasoning"))


@functools.cache
def hermes() -> tuple[Any, Any]:
    tokenizer = make_tokenizer(HERMES)
    return tokenizer, load_chat(tokenizer, model_path="nowhere", kind="bridge", tools=[CALCULATOR])


def operations(form: Format, text: str) -> int:
    """How many lines of Python a reader runs: a measure of work that no other process disturbs."""
    count = 0

    def tick(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        return tick

    sys.settrace(tick)
    try:
        form.read(text, False, Schemas(()))
    finally:
        sys.settrace(None)
    return count


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_work_is_linear_in_the_text(form: Format) -> None:
    pieces = [
        "<tool_call>",
        "<|tool_call>call:f{a:[",
        "<function=f><parameter=a>",
        "<arg_key>a</arg_key>",
        "<|message|>",
    ]
    pieces += [
        form.marker, form.marker + "{", '<invoke name="', "[TOOL_CALLS]f[ARGS]", "};",
        '<atem:function_calls><atem:invoke name="x">', "<tool_call><function=f><parameter=a></tool_call>x",
        "<tool_call>f<arg_key>a</arg_key><arg_value></tool_call>x", '<tool_call>{"a": "</tool_call>',
        '<tool_call>["</tool_call>', '<|tool_call>call:f{a:<|"|><tool_call|>',
        "<|tool_call_start|>[f(a='<|tool_call_end|>", "(a='", "<|tool_call>call:1,k{a:2,<tool_call|>",
    ]  # fmt: skip
    for piece in pieces:
        small, large = operations(form, piece * 200), operations(form, piece * 800)
        assert large < 5 * small + 1000, piece


BAD = ["{bad}", '{"a": 1', '{"a": "', '["', '{"a": [' * 3, '{"name": "f", "arguments": 3}', '{"a": 1, "a": 1}']


@pytest.mark.quick_cases(38)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_what_bad_calls_hold_is_read_a_bounded_number_of_times(
    name: str, text: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`json` reads what it is given in C, and again to count the lines before an error."""
    read = 0

    class Counting(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> Any:
            nonlocal read
            read += len(s)
            return super().raw_decode(s, idx)

    old = calls._decoder
    monkeypatch.setattr(calls, "_decoder", Counting(object_pairs_hook=old.object_pairs_hook))
    broken = re.sub(r"\{.*\}|\[\{.*\}\]", lambda _: bad, text, flags=re.DOTALL)
    many = broken * 500
    calls_of(BY_NAME[name], many)
    assert read <= 20 * len(many)


def test_far_ends_of_calls_are_sought_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    class Counting:
        def search(self, text: str, at: int) -> Any:
            nonlocal read
            match = pattern.search(text, at)
            read += (len(text) if match is None else match.end()) - at
            return match

    pattern = formats._MUSE_REACH
    monkeypatch.setattr(formats, "_MUSE_REACH", Counting())
    bad = "<|start|>assistant to=f<|message|><atem:function_calls><|end|>"
    text = bad * 500 + "</atem:invoke></atem:function_calls> so"
    assert len(calls_of(BY_NAME["channels"], text)) == 500
    assert 0 < read <= 20 * len(text)


def test_ten_megabytes_are_read(tokenizer_chat: Any) -> None:
    text = "x" * 5_000_000 + '<tool_call>{"name": "f", "arguments": {"a": "' + "y" * 5_000_000 + '"}}</tool_call>'
    turn = tokenizer_chat._parser.parse_text(text, closed=True)
    assert len(turn.content) == 5_000_000
    assert len(turn.calls[0].arguments["a"]) == 5_000_000
    broken = tokenizer_chat._parser.parse_text("<tool_call>" * 100_000 + "{" * 1_000_000, closed=False)
    assert broken.calls[0].error is not None


@pytest.fixture(scope="module")
def tokenizer_chat() -> Any:
    return hermes()[1]


def test_a_turn_of_the_embedded_kind() -> None:
    tokenizer, chat = hermes()
    text = '12 a day.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call><|im_end|>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[-1] in chat.stop_ids
    for turn in (chat.parse(ids), chat.parse(ids[:-1])):
        assert turn.content == "12 a day."
        assert [(one.name, one.arguments, one.error) for one in turn.calls] == [
            ("calculator", {"expression": "12*7"}, None)
        ]
        assert turn.reasoning is None
    cut = chat.parse(ids[:-4])
    assert cut.calls[0].error == "this tool call cannot be read: it is not closed by </tool_call>"
    assert chat.parse([]).content == ""
