"""`judge`: a language model behind an OpenAI-compatible endpoint grades the answer. Out of reach, it raises."""

import asyncio
import hashlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.plugins.reward import Reward, Sample
from agentrl.plugins.types import InfrastructureError
from agentrl_tools.loops import PerLoop
from agentrl_tools.rewards.judge_cache import ReplyCache, default_path
from agentrl_tools.rewards.judge_prompt import DEFAULT_PATTERN, DEFAULT_TEMPLATE, ScoreReader, fill, read_template

_AGAIN = "I find no score in the form that was asked for. Reply again, and end with it."


class Judge(Reward):
    """A language model grades the answer, from 0 to 1.

    model, base_url, api_key_env: the endpoint and the environment variable that holds its key. template: a text, or a
    file, with {question}, {answer}, {ground_truth}, {conversation}. system: a system message for the judge.
    pattern, json_field, scale: how a score is read (see `ScoreReader`). truth: the field of the task's data.
    asks: how often a reply without a score is asked again, at most, that included. concurrency: requests at once.
    retries: of a request that meets 429, 5xx, a timeout or no connection, with back-off. timeout: seconds of one
    request; deadline: of one score, waiting for a place included. cache: where replies are kept: true (the user's cache
    folder), false, or a file. temperature, max_tokens, extra: of the request; extra is merged into its body.
    """

    name = "judge"

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        template: str = DEFAULT_TEMPLATE,
        system: str = "",
        pattern: str = DEFAULT_PATTERN,
        json_field: str | None = None,
        scale: tuple[float, float] = (0.0, 10.0),
        truth: str | None = None,
        asks: int = 3,
        concurrency: int = 32,
        retries: int = 5,
        timeout: float = 60.0,
        deadline: float = 240.0,
        cache: bool | str = True,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        extra: dict[str, Any] | None = None,
    ) -> None:
        if asks < 1 or concurrency < 1 or retries < 0 or timeout <= 0 or deadline <= 0 or max_tokens < 1:
            raise ValueError(
                "asks, concurrency, max_tokens want 1 or more; retries 0 or more; timeout, deadline above 0"
            )
        self._template, self._system, self._truth = read_template(template), system, truth
        self._reader = ScoreReader(pattern, json_field, scale)
        self._asks, self._deadline = asks, deadline
        self._where = f"judge {model} at {base_url or os.environ.get('OPENAI_BASE_URL') or 'api.openai.com'}"
        self._settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "extra": extra or {}}
        self._client = {
            "base_url": base_url,
            "api_key": _key(api_key_env, base_url),
            "timeout": timeout,
            "max_retries": retries,
        }
        self._lines = PerLoop(lambda: _Line(self._client, concurrency))
        self._cache = _cache(cache)

    async def score(self, sample: Sample) -> float:
        messages = [{"role": "user", "content": fill(self._template, sample, self._truth)}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        try:
            async with asyncio.timeout(self._deadline):
                return await self._asked(messages)
        except TimeoutError as error:
            raise InfrastructureError(f"{self._where}: no score within {self._deadline:g} s") from error

    async def _asked(self, messages: list[dict[str, str]]) -> float:
        """Ask until a reply holds a score. Only such replies are kept."""
        key = self._fingerprint(messages)
        kept = None if self._cache is None else await self._cache.get(key)
        if kept is not None and (score := self._reader.read(kept)) is not None:
            return score
        asked, reply = list(messages), ""
        for _ in range(self._asks):
            reply = await self._reply(asked)
            if (score := self._reader.read(reply)) is not None:
                if self._cache is not None:
                    await self._cache.put(key, reply)
                return score
            asked = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": _AGAIN}]
        raise InfrastructureError(f"{self._where}: no score in {self._asks} replies, the last being {reply[:200]!r}")

    async def _reply(self, messages: list[dict[str, str]]) -> str:
        from openai import OpenAIError

        settings = {name: value for name, value in self._settings.items() if name != "extra"}
        line = self._lines.here()
        async with line.places:
            try:
                made = await line.client.chat.completions.create(
                    messages=messages, extra_body=self._settings["extra"], **settings
                )
                return str(made.choices[0].message.content or "")
            except OpenAIError as error:
                raise InfrastructureError(f"{self._where}: {type(error).__name__}: {error}") from error
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise InfrastructureError(f"{self._where}: its reply is no chat completion: {error}") from error

    def _fingerprint(self, messages: list[dict[str, str]]) -> str:
        asked = {"where": self._client["base_url"], "messages": messages, **self._settings}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    async def close(self) -> None:
        if line := self._lines.take():
            await line.client.close()
        if self._cache is not None:
            self._cache.close()


class _Line:
    """A client, and how many may use it at once. It belongs to one event loop."""

    def __init__(self, client: dict[str, Any], concurrency: int) -> None:
        from openai import AsyncOpenAI

        self.client: Any = AsyncOpenAI(**client)
        self.places = asyncio.Semaphore(concurrency)


def _key(name: str, base_url: str | None) -> str:
    """A server of one's own often wants no key; OpenAI's does."""
    key = os.environ.get(name)
    if key is None and base_url is None and "OPENAI_BASE_URL" not in os.environ:
        raise UserError(f"judge: the environment variable {name} is not set; set it, or give base_url")
    return key or "none"


def _cache(cache: bool | str) -> ReplyCache | None:
    if cache is False:
        return None
    made = ReplyCache(default_path() if cache is True else Path(cache))
    try:
        made.check()
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"judge: the cache {made.path} cannot be opened: {error}") from error
    return made
