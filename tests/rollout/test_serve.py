"""A model behind the gateway for people."""

import asyncio
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from chat_help import HERMES, make_tokenizer
from fakes import CharChat, ScriptedEngine
from openai import AsyncOpenAI, AuthenticationError, BadRequestError
from tiny_models import qwen3

from agentrl.chat.load import load_chat
from agentrl.engine.local.engine import LocalEngine
from agentrl.gateway.call import Feed
from agentrl.gateway.server import Gateway
from agentrl.recipe.schema import Recipe, RewardsSection, RolloutSection
from agentrl.rollout import serve as serve_module
from agentrl.rollout.serve import ServedModel, serve

USER: Any = [{"role": "user", "content": "2+2?"}]


async def asked(endpoint: ServedModel, key: str, own: str, **body: Any) -> str:
    """What the model answers a client that sends the key `own`."""
    gateway = Gateway()
    await gateway.start()
    try:
        with gateway.serving(endpoint, key):
            async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=own, max_retries=0) as openai:
                found = await openai.chat.completions.create(**{"model": "any", "messages": USER, **body})
    finally:
        await gateway.close()
    return str(found.choices[0].message.content)


def model(script: Any = ("four",)) -> tuple[ServedModel, ScriptedEngine]:
    engine = ScriptedEngine(script)
    return ServedModel(engine, CharChat(), RolloutSection(temperature=0.5, max_turn_tokens=50)), engine  # type: ignore[arg-type]


async def test_a_call_samples_as_it_asks_else_as_the_recipe_says() -> None:
    served, engine = model(lambda _, turn: "four")
    assert await asked(served, "", "whatever") == "four"
    assert await asked(served, "", "whatever", temperature=0.0, top_p=0.9, seed=7, max_tokens=20) == "four"
    first, second = engine.samplings
    assert (first.temperature, first.top_p, first.max_tokens) == (0.5, 1.0, 50)
    assert (second.temperature, second.top_p, second.max_tokens, second.seed) == (0.0, 0.9, 20, 7)
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"seed": -3}):
        with pytest.raises(BadRequestError, match=f"{next(iter(wrong))}: expected a number from"):
            await asked(served, "", "whatever", **wrong)


async def test_a_key_is_asked_for_where_there_is_one() -> None:
    served, _ = model()
    with pytest.raises(AuthenticationError):
        await asked(served, "mine", "another")
    assert await asked(served, "mine", "mine") == "four"


async def test_conversations_are_forgotten_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "KEPT_TOKENS", 20)
    served, engine = model(lambda _, turn: "a longer answer")
    for _ in range(4):
        await asked(served, "", "k")
    assert len(engine.known) == 4
    assert sum(engine.finished.values()) >= 3
    assert len(served.tree.nodes) == 1


def embedded() -> ServedModel:
    """A small model of random weights, which says all kinds of things: broken characters, calls, thoughts."""
    tokenizer = make_tokenizer(HERMES, ("<think>", "</think>"))
    model = qwen3(vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=0.2, pad_token_id=0)
    engine = LocalEngine(model, max_batch=8)
    chat = load_chat(tokenizer, model_path="nowhere", kind="bridge", tools=())
    return ServedModel(engine, chat, RolloutSection(temperature=0.0, max_turn_tokens=40))


@pytest.mark.slow
async def test_a_streamed_answer_is_what_a_whole_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By each vendor's SDK, from the embedded engine, as it samples."""
    served, gateway = embedded(), Gateway()
    took: list[int] = []
    add = Feed.add
    monkeypatch.setattr(Feed, "add", lambda feed, ids: (took.append(len(ids)), add(feed, ids)))
    await gateway.start()
    try:
        with gateway.serving(served, ""):
            async with (
                AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as openai,
                AsyncAnthropic(base_url=gateway.url, api_key="any") as anthropic,
            ):
                for question in ("2+2?", "漢字?"):
                    talk: Any = [{"role": "user", "content": question}]
                    whole = await openai.chat.completions.create(model="any", messages=talk)
                    wanted = whole.choices[0].message.content or ""
                    async with openai.chat.completions.stream(model="any", messages=talk) as chat:
                        said = "".join([e.delta async for e in chat if e.type == "content.delta"])
                    assert said == wanted
                    async with openai.responses.stream(model="any", input=question) as response:
                        said = "".join([e.delta async for e in response if e.type == "response.output_text.delta"])
                    assert said == wanted
                    async with anthropic.messages.stream(model="any", max_tokens=40, messages=talk) as message:
                        assert "".join([text async for text in message.text_stream]) == wanted
    finally:
        await gateway.close()
        await served.engine.close()
    assert max(took) == 1
    assert len(took) > 100


@pytest.mark.slow
async def test_the_embedded_model_answers_until_it_is_told_to_end() -> None:
    lines: list[str] = []
    recipe = Recipe(rewards=RewardsSection(weights={"of_a_tool": 2.0}))
    work = asyncio.create_task(serve(recipe, None, "127.0.0.1", 0, "mine", lines.append))
    async with asyncio.timeout(120):
        while not any(line.startswith("API key") for line in lines):
            await asyncio.sleep(0.05)
            assert not work.done(), work.result()
    url = next(line for line in lines if line.startswith("OPENAI")).split()[0].removeprefix("OPENAI_BASE_URL=")
    async with AsyncOpenAI(base_url=url, api_key="mine") as openai:
        found = await openai.chat.completions.create(model="any", messages=USER, temperature=0, max_tokens=8)
    assert 0 < found.usage.completion_tokens <= 8
    work.cancel()
    await asyncio.wait_for(work, 120)
