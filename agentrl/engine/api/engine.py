"""`OpenAIEngine`: a model at an OpenAI-compatible endpoint, for evaluation only: there are no log-probs to train on."""

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.chat.base import Chat
from agentrl.engine.api.chat import ApiChat, Ledger, Opening, outgoing
from agentrl.engine.base import Engine, EngineError, Generation, GenerationFinish, OnTokens, Sampling
from agentrl.errors import UserError, nearest
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from agentrl.weights.source import WeightSource

FOREVER = 1 << 30  # tokens: the endpoint limits its context itself
PRICES = ("input", "cached_input", "output")
"""Kinds of tokens that have prices."""
LINE = 300  # maximum characters of an endpoint's error that are kept


class OpenAIEngine(Engine):
    """An engine that requests chat completions and uses the endpoint's own tool calls.

    model: the model's name at the endpoint. max_batch: maximum number of requests at once. base_url: of the endpoint;
    None: OPENAI_BASE_URL, else OpenAI's. api_key_env: the environment variable with the key, which other endpoints may
    not need. timeout: seconds per completion. retries: after status 429 or 5xx and lost connections, with growing
    pauses. max_tokens_key: the endpoint's name for the maximum tokens of a completion; None: `max_tokens`, at OpenAI
    `max_completion_tokens`. extra: further keys of the request's body. prices: what a million tokens cost, for
    `agentrl eval`, by PRICES; `cached_input` without a price costs what input does. tool_images: where the images of
    tools go: `user`, into a message of the user behind the results of the turn, since OpenAI takes text alone in a
    tool's message; `tool`, where they belong, for endpoints that take them there.

    Raises UserError if OpenAI's key is not set, a price is none, or `tool_images` is neither.
    """

    brings_chat = True  # no model and no tokenizer are loaded
    images = True

    def __init__(
        self,
        *,
        model: str,
        max_batch: int = 64,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 300.0,
        retries: int = 5,
        max_tokens_key: str | None = None,
        extra: dict[str, Json] | None = None,
        prices: dict[str, float] | None = None,
        tool_images: str = "user",
    ) -> None:
        _check_prices(prices or {})
        if tool_images not in ("user", "tool"):
            raise UserError(f"engine.args.tool_images is {tool_images!r}; it is user or tool")
        self._tool_images = tool_images
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        key = os.environ.get(api_key_env, "")
        if not key and base_url is None:
            raise UserError(f"engine openai: {api_key_env} is not set in the environment (engine.args.api_key_env)")
        self.name, self.base_url, self._key = model, base_url, key or "none"
        self._timeout, self._retries, self._extra = timeout, retries, extra or {}
        self._max_tokens_key = max_tokens_key or ("max_tokens" if base_url else "max_completion_tokens")
        self._limit = asyncio.Semaphore(max_batch)
        self._ledger = Ledger()
        self._known: dict[str, list[int]] = {}
        self._calls: dict[str, asyncio.Task[object]] = {}
        self._client: AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.chat: Chat = ApiChat(self._ledger, f"messages of {model} at {base_url or 'OpenAI'}")

    @property
    def max_context(self) -> int:
        return FOREVER

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Request one completion. Raises EngineError if the endpoint refuses it or does not answer despite retries."""
        body = self._body(list(ids), sampling)
        async with self._limit:
            work = asyncio.ensure_future(self._connected().chat.completions.create(**body))
            self._calls[request_id] = work
            try:
                answer = await work
            except asyncio.CancelledError:
                if work.cancelled() and self._calls.get(request_id) is None:
                    return Generation([], [], GenerationFinish.ABORT)
                work.cancel()
                raise
            except Exception as error:  # the boundary `engine`: any error of the client fails the request
                raise EngineError(f"{self.name}: {type(error).__name__}: {_line(error)}") from error
            finally:
                self._calls.pop(request_id, None)
        return self._generation(answer, request_id)

    def _body(self, ids: list[int], sampling: Sampling) -> dict[str, Json]:
        opening, *pieces = self._ledger.find(ids)
        assert isinstance(opening, Opening)
        conversation = [*opening.messages, *(message for piece in pieces for message in piece)]
        messages = outgoing(conversation, self._tool_images)
        body = {"model": self.name, "messages": messages, "temperature": sampling.temperature, "top_p": sampling.top_p}
        if opening.tools:
            body["tools"] = list(opening.tools)
        if sampling.seed is not None:
            body["seed"] = sampling.seed % (1 << 31)
        if self._extra:
            body["extra_body"] = dict(self._extra)
        return {**body, self._max_tokens_key: sampling.max_tokens}

    def _generation(self, answer: Json, request_id: str) -> Generation:
        if not getattr(answer, "choices", None):
            raise EngineError(f"{self.name}: the endpoint's answer holds no choice")
        choice = answer.choices[0]
        message = choice.message.model_dump(exclude_none=True)
        turn = {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
        turn.setdefault("content", None)
        tokens = max(1, answer.usage.completion_tokens if answer.usage else 1)
        ids = self._ledger.add((turn,), tokens)
        self._known.setdefault(request_id, []).append(ids[0])
        finish = GenerationFinish.LENGTH if choice.finish_reason == "length" else GenerationFinish.STOP
        return Generation(ids, [0.0] * len(ids), finish, usage=_usage(answer.usage))

    def _connected(self) -> "AsyncOpenAI":
        """The client of the running event loop; it is made on first use."""
        from openai import AsyncOpenAI

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._client = AsyncOpenAI(
                api_key=self._key, base_url=self.base_url, timeout=self._timeout, max_retries=self._retries
            )
        return self._client

    def finish(self, request_id: str) -> None:
        self._ledger.forget(self._known.pop(request_id, ()))

    def abort(self, request_id: str | None = None) -> None:
        for name in [request_id] if request_id is not None else list(self._calls):
            if (work := self._calls.pop(name, None)) is not None:
                work.cancel()

    async def update_weights(self, version: int, weights: "WeightSource | None" = None) -> None:
        raise EngineError("the weights behind an endpoint cannot be trained: engine openai is for evaluation")

    async def health(self) -> None:
        """Check that the endpoint has the model; an endpoint without a list of models passes.

        Raises UserError if it refuses the key, cannot be reached or does not have the model.
        """
        import openai

        try:
            await self._connected().models.retrieve(self.name)
        except openai.NotFoundError as error:
            await self._not_found(error)
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise UserError(f"engine openai: {self.base_url or 'OpenAI'} refuses the key: {_line(error)}") from error
        except openai.APIConnectionError as error:
            raise UserError(f"engine openai: {self.base_url or 'OpenAI'} cannot be reached: {_line(error)}") from error
        except openai.APIStatusError:
            return

    async def _not_found(self, error: Exception) -> None:
        """Raise UserError if the endpoint's list of models lacks the model; without a list, the route is missing."""
        import openai

        try:
            known = sorted([model.id async for model in self._connected().models.list()])
        except openai.APIError:
            return
        if known and self.name not in known:
            raise UserError(
                f"engine openai: {self.base_url or 'OpenAI'} has no model {self.name!r}{nearest(self.name, known)}"
            ) from error

    async def close(self) -> None:
        self.abort()
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.close()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:LINE]


def _usage(counted: Json) -> dict[str, int]:
    """The tokens that an endpoint counted; empty where it says nothing."""
    if counted is None:
        return {}
    details = getattr(counted, "prompt_tokens_details", None)
    cached = getattr(details, "cached_tokens", None) or 0
    return {"input": counted.prompt_tokens or 0, "cached_input": cached, "output": counted.completion_tokens or 0}


def _check_prices(prices: object) -> None:
    if not isinstance(prices, dict) or not prices.keys() <= set(PRICES):
        unknown = next((str(key) for key in prices if key not in PRICES), "") if isinstance(prices, dict) else ""
        raise UserError(
            f"engine.args.prices: expected prices of a million tokens by {', '.join(PRICES)}{nearest(unknown, PRICES)}"
        )
    for key, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < float("inf"):
            raise UserError(f"engine.args.prices.{key}: expected a number of at least 0, got {price!r}")
