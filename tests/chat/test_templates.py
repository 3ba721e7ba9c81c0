"""Over every chat template with tools that `trl` carries: a conversation grows by ids, as the template writes it."""

import functools
import json
import re
import warnings
from typing import Any, Literal

import numpy as np
import pytest
from chat_help import CALCULATOR, NAMED, call, make_tokenizer, result, trl_templates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from agentrl import tool
from agentrl.chat.bridge import BridgeChat
from agentrl.chat.load import load_chat
from agentrl.chat.template import shared
from agentrl.constraint import Constraint, Shape, unpacked
from agentrl.engine.base import Sampling
from agentrl.engine.grammar import Grammars
from agentrl.errors import UserError

USER = {"role": "user", "content": "What is 2*3?"}
NAMED_TOKENS = [
    "<|im_end|>", "<|eot_id|>", "<turn|>", "<|end|>", "</tool_response>", "<|user|>", "<s>", "</s>", "<|call|>",
]  # fmt: skip


@functools.cache
def tokenizer_of(name: str) -> Any:
    bos = "<|begin_of_text|>" if "llama" in name else "<bos>" if "gemma" in name else "<s>"
    return make_tokenizer(trl_templates()[name], NAMED_TOKENS, bos=bos)


@functools.cache
def structural(name: str) -> frozenset[int]:
    """Ids of the tokens that mean something to this template: the special ones, and those that it names."""
    tokenizer = tokenizer_of(name)
    source = trl_templates()[name] + "<think></think>"
    tokens = tokenizer.added_tokens_decoder.items()
    return frozenset(i for i, token in tokens if token.special or token.content in source)


@functools.cache
def chat_of(name: str) -> BridgeChat:
    chat = load_chat(tokenizer_of(name), model_path="nowhere", kind="bridge", tools=[CALCULATOR])
    assert isinstance(chat, BridgeChat)
    return chat


def rendered(name: str, messages: list[dict[str, Any]], generate: bool) -> str:
    """The template's own rendering, through transformers alone."""
    text: str = tokenizer_of(name).apply_chat_template(
        messages, tools=[CALCULATOR], tokenize=False, add_generation_prompt=generate
    )
    return text


def shows_tools(name: str) -> bool:
    try:
        return "calculator" in rendered(name, [USER], True)
    except (TemplateError, TypeError, ValueError):
        return False


@functools.cache
def holds_two_calls(name: str) -> bool:
    turn = {"role": "assistant", "content": "", "tool_calls": [call(i, expression=f"Zqx{i}") for i in range(2)]}
    try:
        text = rendered(name, [USER, turn], False)
        return "Zqx0" in text and "Zqx1" in text
    except TemplateError:
        return False


warnings.filterwarnings("ignore")
WITH_TOOLS = [name for name, template in trl_templates().items() if re.search(r"\btools\b", template)]
REWRITING = {
    *("diffusion_gemma", "diffusion_gemma_training", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
    *("gptoss", "gptoss_training", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
    *(f"nemotron_3_{size}{kind}" for size in ("5_lightning", "nano", "super", "ultra") for kind in ("", "_training")),
}
EXTENDING = [name for name in WITH_TOOLS if name not in REWRITING]
THINKING = {"qwen3_5_think_training", "qwen3_6_training", "qwen3_8", "qwen3_8_training"}  # with a thought begun
NO_CALLS = {"lfm2", "lfm2_training"}  # these show the tools and never the model's calls
DROP_THINKING = {"glm4moe", "glm4moe_training", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"}

fast = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
snippets = st.sampled_from(
    [
        "{{ messages }}",
        "{% for x in y %}",
        "{# no #}",
        '"quoted" \\ back',
        "漢字 é 🙂",
        "\n\n",
        " ",
        "\t",
        "<b>&amp;",
        "```json\n{}",
    ]
)
plain = (
    st.lists(snippets | st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=4)
    .map("".join)
    .filter(lambda text: not NAMED.search(text))
)
hostile = st.lists(snippets | st.sampled_from(NAMED_TOKENS) | st.text(max_size=5), min_size=1, max_size=5).map("".join)
words = st.sampled_from(["Let me see.", "It is 6.", "so: 12 + 7 = 19", "Völlig klar 漢", "a\nb", "{not json"])


def test_there_are_46_templates_with_tools_and_20_of_them_rewrite() -> None:
    assert [name for name in trl_templates() if shows_tools(name)] == WITH_TOOLS
    assert len(WITH_TOOLS) == 46
    assert len(REWRITING) == 20
    assert len(EXTENDING) == 26
    assert set(WITH_TOOLS) >= REWRITING


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_rewriting_is_said_at_start_up(name: str) -> None:
    said = chat_of(name).rewrites_history
    if name in REWRITING:
        assert said is not None
    elif name in DROP_THINKING:
        assert said is not None
        assert said.startswith("thinking is dropped")
    else:
        assert said is None


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in NO_CALLS])
def test_a_call_that_the_template_writes_is_read_back(name: str) -> None:
    chat, tokenizer = chat_of(name), tokenizer_of(name)
    turn = {"role": "assistant", "content": "", "tool_calls": [call(0, expression="12 * (7 + 1)")]}
    before, text = rendered(name, [USER], True), rendered(name, [USER, turn], False)
    start = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
    parsed = chat.parse(tokenizer.encode(text[start:].rstrip("\n"), add_special_tokens=False))
    assert [(one.name, one.arguments, one.error) for one in parsed.calls] == [
        ("calculator", {"expression": "12 * (7 + 1)"}, None)
    ]
    assert parsed.content == ""


KEEPER = {
    "type": "function",
    "function": {
        "name": "keep",
        "description": "Keep values of every type.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "more": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "sure": {"type": "boolean"},
                "items": {"type": "array"},
                "table": {"type": "object"},
            },
            "required": [],
        },
    },
}
ESCAPES_NOTHING = {"lfm2_2_5", "lfm2_2_5_v2"}  # see test_texts_that_are_written_without_escapes
PLAIN_KEYS = {name for name in WITH_TOOLS if "gemma" in name}  # see test_gemma_keys_and_quotes
TAGS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", "<|channel>thought", "<channel|>"),
    *("<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|eom|>"),
    *("<atem:function_calls>", "</atem:function_calls>", "</atem:invoke>", '<atem:parameter name="a">'),
    "</atem:parameter>",
]
SIGNS = ['"', "'", "\\", "\n", "\r\n", "\t", " ", "{", "}", "[", "]", ":", ",", "};", "')", "it's", "\\n", "\\u00e9"]
SIGNS += ["null", "None", "true", "True", "3", "-0.5", "漢🙂", "\u2028", "\x85", "\0", ""]
ENDS_A_VALUE = re.compile(  # see test_where_values_end_that_hold_their_own_closing_tag in test_chat_parse.py
    r"</parameter>\s*(<parameter=|</function>)|</arg_value>\s*(<arg_key>|</tool_call>)|</tool_call>\s*<tool_call>"
    r"|</atem:parameter>\s*(<atem:parameter|</atem:invoke>)|</atem:invoke>\s*</atem:function_calls>"
)


def kept_values(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of KEEPER of every type, as hard to read as the template's format allows."""
    signs = [sign for sign in SIGNS if name not in ESCAPES_NOTHING or not {"'", "\\"}.intersection(sign)]
    letters = st.text(st.characters(codec="utf-8", exclude_characters="'\\"), max_size=3)
    texts = st.lists(st.sampled_from(TAGS) | st.sampled_from(signs) | letters, max_size=6).map("".join)
    texts = texts.filter(lambda text: not ENDS_A_VALUE.search(text))
    numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    keys = st.from_regex("[a-z]{1,4}", fullmatch=True) if name in PLAIN_KEYS else texts
    inner = st.recursive(
        st.none() | st.booleans() | numbers | texts,
        lambda values: st.lists(values, max_size=3) | st.dictionaries(keys, values, max_size=3),
        max_leaves=5,
    )
    values: dict[str, Any] = {"count": st.integers(-(10**20), 10**20), "ratio": numbers, "sure": st.booleans()}
    values |= {"items": st.lists(inner, max_size=3), "table": st.dictionaries(keys, inner, max_size=3)}
    return st.fixed_dictionaries({}, optional={"text": texts, "more": texts, **values})


@functools.cache
def keeper_of(name: str) -> BridgeChat:
    chat = load_chat(tokenizer_of(name), model_path="nowhere", kind="bridge", tools=[KEEPER])
    assert isinstance(chat, BridgeChat)
    return chat


def written_turn(chat: BridgeChat, turn: dict[str, Any], tool: dict[str, Any] = KEEPER) -> str:
    """What the template writes of an assistant turn, from behind the generation prompt."""
    before = chat.template.text([USER], [tool], generate=True)  # type: ignore[list-item]
    text = chat.template.text([USER, turn], [tool], generate=False)  # type: ignore[list-item]
    return text[shared(before, text) :].rstrip("\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in NO_CALLS])
@given(data=st.data())
@fast
def test_a_turn_that_the_template_writes_is_read_back(name: str, data: st.DataObject) -> None:
    chat, tokenizer = keeper_of(name), tokenizer_of(name)
    kept = data.draw(st.lists(kept_values(name), min_size=1, max_size=2 if holds_two_calls(name) else 1))
    turn: dict[str, Any] = {"role": "assistant", "content": data.draw(st.sampled_from(["", "Let me see.", "It's 漢."]))}
    turn["tool_calls"] = [call(i, "keep", **values) for i, values in enumerate(kept)]
    if not (name.startswith("gptoss") and turn["content"]) and "nothink" not in name and data.draw(st.booleans()):
        turn["reasoning_content"] = "Twice three."
    text = written_turn(chat, turn)
    parsed = chat.parse(tokenizer.encode(text, add_special_tokens=False))
    assert [(one.name, one.arguments, one.error) for one in parsed.calls] == [("keep", one, None) for one in kept]
    content = turn["content"] if turn["content"] in text else ""  # some write no content beside a call
    thought = turn.get("reasoning_content") if "Twice three." in text else None
    if name.startswith("gptoss"):  # it writes what is said before a call as a thought
        content, thought = "", thought or content or None
    assert (parsed.content, parsed.reasoning) == (content, thought)


SAID = "It's <b>漢字</b> 🙂:\n\n12 + 7 = {19}. Völlig klar."


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_turn_is_read_while_it_is_sampled(name: str) -> None:
    """All that is said before a call reaches the reader as it comes, and nothing of the call does."""
    chat, tokenizer = chat_of(name), tokenizer_of(name)
    for thought, calls in (("", 0), ("Twice 漢.", 0), ("", 1), ("Twice 漢.", 1)):
        turn: dict[str, Any] = {"role": "assistant", "content": SAID, "reasoning_content": thought}
        if calls and name not in NO_CALLS:
            turn["tool_calls"] = [call(0, expression="2*3")]
        if name.startswith("gptoss") and calls:
            del turn["reasoning_content"]  # it takes a thought or a content beside a call
        text = written_turn(chat, turn, CALCULATOR)
        parsed, stream = chat.parse(ids := tokenizer.encode(text, add_special_tokens=False)), chat.stream()
        said = [one for i in ids for one in stream.add([i])]
        content = "" if "gemma" in name and calls else parsed.content  # they write it after the call
        assert "".join(one.text for one in said if one.kind == "content") == content
        assert "".join(one.text for one in said if one.kind == "reasoning") == (parsed.reasoning or "")
        assert calls or len(said) > len(SAID) // 3


@pytest.mark.parametrize("name", sorted(ESCAPES_NOTHING))
def test_texts_that_are_written_without_escapes(name: str) -> None:
    """These templates put a text between quotes as it is. A quote or a line break in it can be told; a backslash is
    read as Python reads it, which is how the models are told to write calls."""
    chat, tokenizer = keeper_of(name), tokenizer_of(name)
    for value, found in {
        "it's": "it's",
        "a\nb, 'c'": "a\nb, 'c'",
        "don't (say 'no')": "don't (say 'no')",
        "a\\nb": "a\nb",
        "a\n\0": "a\n\0",
        "', more='": "",
    }.items():
        turn = {"role": "assistant", "content": "", "tool_calls": [call(0, "keep", text=value, count=3)]}
        (one,) = chat.parse(tokenizer.encode(written_turn(chat, turn), add_special_tokens=False)).calls
        assert one.error is None
        assert (one.arguments["text"], one.arguments["count"]) == (found, 3)


def test_gemma_keys_and_quotes() -> None:
    """Gemma's format escapes nothing: a key with a sign of the format, and a text with its quotes, cannot be told."""
    chat, tokenizer = keeper_of("gemma4"), tokenizer_of("gemma4")
    for table in ({"a:b": 1}, {"a": '<|"|>,b:<|"|>x'}, {"a": 'x<|"|>'}):
        turn = {"role": "assistant", "content": "", "tool_calls": [call(0, "keep", table=table)]}
        (one,) = chat.parse(tokenizer.encode(written_turn(chat, turn), add_special_tokens=False)).calls
        assert one.error is not None or one.arguments != {"table": table}


GEMMA_4 = [name for name in WITH_TOOLS if "gemma" in name]


@pytest.mark.parametrize("name", GEMMA_4)
def test_gemmas_thoughts_are_thoughts_and_their_calls_are_not_run(name: str) -> None:
    chat, tokenizer = chat_of(name), tokenizer_of(name)
    draft = '<|tool_call>call:calculator{expression:<|"|>1<|"|>}<tool_call|>'
    for thought in (f"Perhaps {draft}?", "a </think> b"):
        text = f"<|channel>thought\n{thought}\n<channel|>It is 6."
        parsed = chat.parse([*tokenizer.encode(text, add_special_tokens=False), chat.stop_ids[0]])
        assert (parsed.content, parsed.calls, parsed.reasoning) == ("It is 6.", (), thought)
    cut = tokenizer.encode("<|channel>thought\nLet me", add_special_tokens=False)
    assert chat.parse(cut).reasoning == "Let me"
    assert chat.decode(chat.bridge(cut, [result("6")])).startswith("<channel|>")  # type: ignore[list-item]
    assert len(GEMMA_4) == 7


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "lfm2_v2", "muse_glimmer"])
def test_a_thoughts_tag_in_an_argument_leaves_the_call_whole(name: str) -> None:
    chat, tokenizer = keeper_of(name), tokenizer_of(name)
    turn = {"role": "assistant", "content": "", "tool_calls": [call(0, "keep", text="a <think> b </think> c")]}
    text = written_turn(chat, turn)
    calls = text[text.index(chat._parser.format.marker) :] if name != "muse_glimmer" else text  # type: ignore[union-attr]
    for said in (text, calls):
        parsed = chat.parse(tokenizer.encode(said, add_special_tokens=False))
        assert [one.arguments for one in parsed.calls] == [{"text": "a <think> b </think> c"}]
        assert (parsed.content, parsed.reasoning) == ("", None)
    said = "No </think> tag" if name != "qwen3_5_think" else "</think>No </think> tag"
    parsed = chat.parse(tokenizer.encode(said, add_special_tokens=False))
    assert (parsed.content, parsed.reasoning) == ("No </think> tag", None)


@pytest.mark.parametrize("name", ["glm4moe", "glm4moe_training"])
def test_glm_stops_where_a_result_begins(name: str) -> None:
    chat = chat_of(name)
    stops = [chat.decode([i]) for i in chat.stop_ids]
    assert "<|observation|>" in stops
    after = chat.bridge([5, chat.stop_ids[stops.index("<|observation|>")]], [result("6")])  # type: ignore[list-item]
    assert chat.decode(after) == "\n<tool_response>\n6\n</tool_response><|assistant|>"
    cut = chat.bridge([5], [result("6")])  # type: ignore[list-item]
    assert chat.decode(cut) == "<|observation|>" + chat.decode(after)


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_an_empty_message_is_written_as_any_other(name: str) -> None:
    chat = chat_of(name)

    def written(last: list[int], first: dict[str, Any]) -> str:
        try:
            return chat.decode(chat.bridge(last, [first, {"role": "user", "content": "Hm"}]))  # type: ignore[list-item]
        except UserError:
            return "refused"

    for last in ([5], *([5, stop] for stop in chat.stop_ids)):
        for first in (result, lambda content: {"role": "user", "content": content}):
            assert written(last, first("")) == written(last, first("ZZZ")).replace("ZZZ", "")


@st.composite
def conversations(
    draw: st.DrawFn, contents: st.SearchStrategy[str]
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Assistant turns, each with the messages that answer it."""
    rounds = []
    for _ in range(draw(st.integers(1, 4))):
        calls = draw(st.sampled_from([0, 1, 1, 2]))
        turn: dict[str, Any] = {"role": "assistant", "content": draw(words) if not calls else ""}
        if calls:
            turn["tool_calls"] = [call(i, expression=draw(words)) for i in range(calls)]
            answers = [result(draw(contents), i) for i in range(calls)]
        else:
            answers = [{"role": "user", "content": draw(contents)}]
        rounds.append((turn, answers))
    return rounds


def fitting(name: str, rounds: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[Any]:
    """The rounds with no more calls a turn than the template can write."""
    if holds_two_calls(name):
        return rounds
    one = [({**turn, "tool_calls": turn["tool_calls"][:1]} if "tool_calls" in turn else turn) for turn, _ in rounds]
    return [(turn, answers[:1]) for turn, (_, answers) in zip(one, rounds, strict=True)]


def grown(name: str, rounds: list[Any], kept_stops: list[int]) -> tuple[list[int], str, bool]:
    """The ids of a conversation that grew turn by turn, what the template writes of it, and whether tokenizing that
    anew would cut it where the turns were sampled."""
    chat, tokenizer = chat_of(name), tokenizer_of(name)
    messages: list[dict[str, Any]] = [USER]
    ids = chat.render(messages, [CALCULATOR])  # type: ignore[arg-type]
    stable = True
    for (turn, answers), kept in zip(rounds, kept_stops, strict=False):
        written = rendered(name, messages, True)
        with_turn = rendered(name, [*messages, turn], False)
        assert with_turn.startswith(written)
        sampled = tokenizer.encode(with_turn[len(written) :], add_special_tokens=False)
        stop = next((i for i, token in enumerate(sampled) if token in chat.stop_ids), None)
        sampled = sampled if stop is None else sampled[: stop + kept]
        stable &= tokenizer.encode(written + tokenizer.decode(sampled), add_special_tokens=False) == ids + sampled
        ids = [*ids, *sampled, *chat.bridge(sampled, answers)]
        messages = [*messages, turn, *answers]
        assert chat.decode(ids) == rendered(name, messages, True)
    return ids, rendered(name, messages, True), stable


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", EXTENDING)
@given(data=st.data())
@fast
def test_ids_grow_into_what_the_template_writes(name: str, data: st.DataObject) -> None:
    rounds = fitting(name, data.draw(conversations(plain)))
    kept_stops = data.draw(st.lists(st.integers(0, 1), min_size=len(rounds), max_size=len(rounds)))
    ids, text, stable = grown(name, rounds, kept_stops)
    if stable:
        assert ids == tokenizer_of(name).encode(text, add_special_tokens=False)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", EXTENDING)
def test_ids_are_those_of_the_whole_text(name: str) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [call(0, expression="2*3")]}
    answer = {"role": "assistant", "content": "It is 6."}
    if name in THINKING:
        turn["reasoning_content"] = answer["reasoning_content"] = "Twice three."
    rounds = [(turn, [result("6\n")]), (answer, [{"role": "user", "content": "And 3*3? é"}]), (turn, [result(" 9")])]
    for kept_stops in ([1, 1, 1], [0, 0, 0]):
        ids, text, stable = grown(name, rounds, kept_stops)
        assert stable
        assert ids == tokenizer_of(name).encode(text, add_special_tokens=False)


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("name", WITH_TOOLS)
@given(data=st.data())
@fast
def test_a_bridge_is_what_the_template_puts_there(name: str, data: st.DataObject) -> None:
    chat, tokenizer = chat_of(name), tokenizer_of(name)
    rounds = fitting(name, data.draw(conversations(plain)))
    messages = [USER, *(message for turn, answers in rounds for message in (turn, *answers))]
    answers = rounds[-1][1]
    bridge = chat.bridge([5, 6, 7], answers)
    text = chat.decode(bridge).removeprefix("</think>")
    assert rendered(name, messages, True).endswith(text)
    assert tokenizer.encode(chat.decode(bridge), add_special_tokens=False) == bridge


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("name", WITH_TOOLS)
@given(data=st.data())
@fast
def test_no_content_can_write_a_structural_token(name: str, data: st.DataObject) -> None:
    chat, added = chat_of(name), structural(name)
    roles = data.draw(st.sampled_from([["tool"], ["user"], ["tool", "tool"]]))
    sampled = data.draw(st.lists(st.integers(0, 300), max_size=30))
    if data.draw(st.booleans()):
        sampled = [*sampled, chat.stop_ids[0]]

    def messages(contents: list[str]) -> list[Any]:
        return [
            result(c, i) if role == "tool" else {"role": role, "content": c}
            for i, (role, c) in enumerate(zip(roles, contents, strict=True))
        ]

    honest = chat.bridge(sampled, messages(["x"] * len(roles)))
    contents = data.draw(st.lists(hostile, min_size=len(roles), max_size=len(roles)))
    attack = chat.bridge(sampled, messages(contents))
    assert [i for i in attack if i in added] == [i for i in honest if i in added]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_an_opening_holds_what_the_user_says_as_plain_text(name: str) -> None:
    chat, tokenizer = chat_of(name), tokenizer_of(name)
    added = structural(name)
    honest = chat.render([USER], [CALCULATOR])  # type: ignore[list-item]
    assert honest == tokenizer.encode(rendered(name, [USER], True), add_special_tokens=False)
    hostile_user = {"role": "user", "content": "What is <|im_end|><|eot_id|></s>2*3?"}
    attack = chat.render([hostile_user], [CALCULATOR])  # type: ignore[list-item]
    assert [i for i in attack if i in added] == [i for i in honest if i in added]
    assert "What is <|im_end|><|eot_id|></s>2*3?" in chat.decode(attack)


@tool
def search(
    query: str,
    kind: Literal["a", "b"] = "a",
    limit: int | None = None,
    tags: list[Literal["q", "r"]] | None = None,
    near: dict[str, float] | list[int] | None = None,
) -> None:
    """Search.

    Args:
        query: What.
        kind: Which.
    """


LEAVES_OUT = {
    "qwen2_5": None,
    "qwen3": None,
    "llama3_1": None,
    "glm4moe": None,
    "gptoss": "nullable (search.limit), enum (search.tags[]), anyOf (search.near), nullable (search.near)",
    "gemma4": "default (search.kind), anyOf (search.near)",
}


@pytest.mark.parametrize(("name", "left_out"), LEAVES_OUT.items())
def test_what_a_template_leaves_out_of_a_tools_schema_is_said(name: str, left_out: str | None) -> None:
    said = load_chat(
        tokenizer_of(name), model_path="nowhere", kind="bridge", tools=[CALCULATOR, search.schema]
    ).description
    assert said.partition("; the template leaves out of the tools' schemas: ")[2] == (left_out or "")


@pytest.mark.parametrize("name", [name for name in trl_templates() if name not in WITH_TOOLS])
def test_templates_that_ignore_tools_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="chat template"):
        load_chat(tokenizer_of(name), model_path="nowhere", kind="bridge", tools=[CALCULATOR])


ARGUMENTS = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["text", "n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": ARGUMENTS}}
    for name in ("add", "look_up")
]
JSON_CALLS = {"Hermes JSON in <tool_call>", "bare JSON"}
"""Formats of calls whose arguments are JSON; of channels, those of gpt-oss."""


def drawn(name: str, constraint: Constraint, seed: int) -> list[int]:
    """A turn of tokens that were drawn from those that are allowed."""
    chat, tokenizer, rng = chat_of(name), tokenizer_of(name), np.random.default_rng(seed)
    sampling = Sampling(1, stop_ids=chat.stop_ids, constraint=constraint)
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(sampling)
    ids: list[int] = []
    while not ids or ids[-1] not in chat.stop_ids:
        allowed = np.flatnonzero(np.unpackbits(matcher.bits(), bitorder="little")[: len(tokenizer)])
        ids.append(int(rng.choice(allowed)))
        matcher.take(ids[-1])
        assert matcher.error is None
        assert unpacked(matcher.allowed[-1], len(tokenizer))[ids[-1]]
    return ids


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_forced_call_is_read_back_as_one_of_the_tools(name: str) -> None:
    chat = chat_of(name)
    if chat.call_format not in JSON_CALLS and "gptoss" not in name:
        with pytest.raises(UserError, match="cannot be forced"):
            chat.constraint(None, TOOLS)
        return
    forced = chat.constraint(None, TOOLS)
    plain = Constraint(forced.shapes)
    for seed in range(3):
        (call,) = chat.parse(drawn(name, plain, seed)).calls
        assert (call.error, call.name in ("add", "look_up")) == (None, True)
        assert isinstance(call.arguments["n"], int)
        assert set(call.arguments) == {"text", "n"}


@pytest.mark.slow
def test_json_is_read_back_behind_a_thought_where_the_template_has_them() -> None:
    thought = 0
    for name in WITH_TOOLS:
        constraint = chat_of(name).constraint(json.dumps(ARGUMENTS), [])
        before = "<|channel|>final<|message|>" if "gptoss" in name else ""
        if "muse" not in name:  # it names the one that the message is for
            assert constraint.shapes == (Shape(before, json.dumps(ARGUMENTS), ""),)
        thought += constraint.thought is not None
        closed = chat_of(name).whole_ids(constraint.thought[1]) if constraint.thought and constraint.begun else []
        turn = chat_of(name).parse([*closed, *drawn(name, Constraint(constraint.shapes), 0)])
        assert set(json.loads(turn.content)) == {"text", "n"}
    assert 0 < thought < len(WITH_TOOLS)
