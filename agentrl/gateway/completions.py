"""The dialect of OpenAI's Completions API: a prompt as it stands, of text or of token ids, without a conversation."""

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate

from agentrl.gateway.call import Call, Completion, GatewayError
from agentrl.gateway.chat_completions import count, event, flag, openai_error, strings, usage, usage_asked
from agentrl.gateway.fields import COMPLETIONS, asked_of, check_fields
from agentrl.gateway.stream import Writer
from agentrl.plugins.types import Json


class Completions:
    """`POST /v1/completions`."""

    history = ""
    instructions = ""

    def parse(self, body: Mapping[str, Json]) -> Call:
        """The call. Raises GatewayError for what cannot be served."""
        ignored = check_fields(body, COMPLETIONS)
        return Call(
            messages=(),
            prompt=_prompt(body.get("prompt")),
            max_tokens=count(body.get("max_tokens"), "max_tokens"),
            stop=strings(body.get("stop"), "stop"),
            stream=flag(body.get("stream"), "stream"),
            usage_in_stream=usage_asked(body),
            logprobs=body.get("logprobs") is not None,
            token_ids=flag(body.get("return_token_ids"), "return_token_ids"),
            model=str(body.get("model", "")),
            asked=asked_of(body, COMPLETIONS),
            ignored=ignored,
        )

    def render(self, found: Completion, call: Call) -> dict[str, Json]:
        """The answer as an object."""
        return {**_head(found.id, call), "choices": [_choice(found, call, str(found.finish))], "usage": usage(found)}

    def writer(self, call: Call) -> Writer:
        """What writes an answer as server-sent events."""
        return _CompletionWriter(call)

    def error(self, error: GatewayError) -> dict[str, Json]:
        """The body of an error."""
        return openai_error(error)


class _CompletionWriter(Writer):
    """The whole text is one event: what a prompt of no known form begins is not read while it is sampled."""

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        self._head = _head(self.completion_id, self.call)
        return iter(())

    def piece(self, kind: str, text: str) -> Iterator[bytes]:
        return iter(())

    def close(self, found: Completion) -> Iterator[bytes]:
        yield event({**self._head, "choices": [_choice(found, self.call, str(found.finish))]})
        if self.call.usage_in_stream:
            yield event({**self._head, "choices": [], "usage": usage(found)})
        yield b"data: [DONE]\n\n"


def _head(completion_id: str, call: Call) -> dict[str, Json]:
    return {
        "id": f"cmpl-{completion_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": call.model,
    }


def _choice(found: Completion, call: Call, finish: str) -> dict[str, Json]:
    texts, values = [text for text, _ in found.tokens], [value for _, value in found.tokens]
    offsets = [0, *accumulate(map(len, texts))][: len(texts)]
    logprobs = {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
    return {
        "index": 0,
        "text": found.message["content"],
        "logprobs": logprobs if call.logprobs else None,
        "finish_reason": finish,
        **({"token_ids": list(found.ids)} if call.token_ids else {}),
    }


def _prompt(given: Json) -> str | tuple[int, ...]:
    """The prompt: text, token ids, or an array of one of them. Raises GatewayError."""
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise GatewayError(f"prompt: {len(given)} prompts were given; send a request for each")
        given = given[0]
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(i) is int and 0 <= i < 1 << 31 for i in given):
        return tuple(given)
    raise GatewayError("prompt: expected a text or an array of token ids, not empty")
