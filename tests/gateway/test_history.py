"""Old messages are known by their bytes: a body is read as if all of it had been parsed, and nothing twice."""

import json
from typing import Any

import pytest

from agentrl.gateway.anthropic_messages import AnthropicMessages
from agentrl.gateway.call import Call, GatewayError
from agentrl.gateway.chat_completions import ChatCompletions
from agentrl.gateway.history import History, _read
from agentrl.gateway.responses import Responses

DIALECTS: dict[str, Any] = {
    "messages": ChatCompletions(), "input": Responses(lambda _: ()), "anthropic": AnthropicMessages(),
}  # fmt: skip
TALK = [
    {"role": "user", "content": 'Überall "messages": [{}]'}, {"role": "assistant", "content": "é]}"},
    {"role": "user", "content": "and then?"}, {"role": "assistant", "content": "so"},
    {"role": "user", "content": "now"},
]  # fmt: skip


def parsed(history: History, text: bytes, dialect: Any) -> Call:
    """The call of a body, which is kept."""
    found = history.find(text, dialect)
    read = history.parse(found, dialect)
    history.keep(found, read)
    return read.call


def body(name: str, messages: list[Any], spaced: bool, **more: Any) -> bytes:
    key = "messages" if name == "anthropic" else name
    whole = {"max_tokens": 5, key: messages, "model": "m", **more} if name == "anthropic" else {key: messages, **more}
    return json.dumps(whole, ensure_ascii=False, separators=None if spaced else (",", ":")).encode()


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
def test_a_longer_body_goes_on_from_the_one_before(name: str, spaced: bool) -> None:
    history, dialect, before = History(), DIALECTS[name], None
    for length in (1, 3, 5):
        text = body(name, TALK[:length], spaced)
        call = parsed(history, text, dialect)
        assert call.earlier is before
        assert call.messages == dialect.parse(json.loads(text)).messages
        before = call


@pytest.mark.parametrize("name", DIALECTS)
def test_a_system_message_that_is_sent_again_is_there_twice(name: str) -> None:
    reminder = {"role": "system", "content": "Use the tools."}
    history, dialect = History(), DIALECTS[name]
    messages = [reminder, *TALK[:2]]
    parsed(history, body(name, messages, True), dialect)
    text = body(name, [*messages, reminder, *TALK[2:3]], True)
    call = parsed(history, text, dialect)
    assert call.earlier is not None
    assert [message["role"] for message in call.messages] == ["system", "user", "assistant", "system", "user"]
    assert call.messages == dialect.parse(json.loads(text)).messages


@pytest.mark.parametrize("change", [{"tools": [{"name": "t"}]}, {"system": "Be brief."}], ids=str)
def test_other_tools_or_another_system_prompt_are_another_history(change: dict[str, Any]) -> None:
    history, dialect = History(), DIALECTS["anthropic"]
    parsed(history, body("anthropic", TALK[:1], True), dialect)
    text = body("anthropic", TALK[:3], True, **change)
    call = parsed(history, text, dialect)
    assert call.earlier is None
    assert call.messages == dialect.parse(json.loads(text)).messages


def test_a_body_that_is_broken_after_what_is_known_is_an_error() -> None:
    history, dialect = History(), DIALECTS["messages"]
    known = body("messages", TALK[:1], False)
    parsed(history, known, dialect)
    for broken in (known[:-2] + b",{]}", known[:-2] + b"}", known[:-1]):
        with pytest.raises(GatewayError, match="the body is not JSON"):
            parsed(history, broken, dialect)


def test_a_body_is_read_as_json_reads_it() -> None:
    """In one pass, which also finds where the messages stand."""
    right = [
        "{}", " {\n} ", '{"a":1}', '{ "a" : [ 1 , {"b":null} ] , "c":"}]," }', '{"messages":[{}]}', '{"a":1,"a":2}',
        '{"messages":[{"k":1}],"messages":3}', '{"\\u0061": 1}', '{"ü":"🙂","messages":[{"k":"é"} ] }\n',
    ]  # fmt: skip
    wrong = [
        "", " ", "{", "{,}", '{"a"}', '{"a":}', '{"a":1,}', '{"a":1}}', '{"a":1 "b":2}', "{a:1}", '{"a":1', "[]", "nul",
        '{"a" 1}', '{"a":1};', "\ufeff{}", "{'a':1}", '{"messages":[{}]', '{"messages":[{},]}', '{"a": NaN}',
        '{"a": [-Infinity]}', '"{"', "{1:2}",
    ]  # fmt: skip
    for text in right:
        found, head, end = _read(body := text.encode(), "messages")
        assert repr(found) == repr(json.loads(body))
        assert not head or json.loads(b"[" + body[head:end] + b"]") == found["messages"]
        assert bool(head) == (bool(found.get("messages")) and found["messages"] != 3)
    for text in wrong:
        with pytest.raises(GatewayError, match="the body is not"):
            _read(text.encode(), "messages")
    with pytest.raises(GatewayError, match="the body is not JSON"):
        _read(b'{"a": "\xff"}', "messages")
    assert _read('{"a": "\ud800"}'.encode("utf-8", "surrogatepass"), "a")[0] == {"a": "\ud800"}
