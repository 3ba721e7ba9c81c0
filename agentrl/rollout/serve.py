"""`serve`: a model behind the gateway for people, so that any OpenAI or Anthropic client talks to what was trained."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress

from agentrl.chat.base import Chat
from agentrl.engine.base import Engine, Sampling
from agentrl.gateway.call import Call, Completion, Feed, GatewayError, Origin
from agentrl.gateway.fields import shown
from agentrl.gateway.server import Gateway
from agentrl.plugins.types import Content, Json
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.agent import TreeEndpoint
from agentrl.rollout.conversation_tree import ConversationTree, Node
from agentrl.rollout.groups import rare_collections
from agentrl.rollout.player import Player
from agentrl.rollout.talk import Talk, apart_from_tasks, nobody

_NEUTRAL = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
KEPT_TOKENS = 1_000_000
"""Tokens of conversations that are kept, so that what was sampled in them goes on as it was; then all are forgotten,
once no call is answered: at twice as many, further calls wait for that."""


class ServedModel(TreeEndpoint):
    """Answers everybody: each call samples as it asks, else as the recipe's `rollout` says."""

    def __init__(self, engine: Engine, chat: Chat, limits: RolloutSection) -> None:
        super().__init__(ConversationTree("serve", chat), engine, chat, limits)
        self._generations = 0
        self._running = 0  # calls that are being answered
        self._idle = asyncio.Event()

    async def complete(self, call: Call, origin: Origin, feed: Feed | None = None) -> Completion:
        while self._running and self.tree.tokens > 2 * KEPT_TOKENS:  # under a load that never pauses
            self._idle.clear()
            await self._idle.wait()
        if self.tree.tokens > KEPT_TOKENS and not self._running:
            self._forget()
        self._running += 1
        try:
            return await super().complete(call, origin, feed)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @property
    def tools(self) -> tuple[dict[str, Json], ...]:
        """None: clients have tools of their own."""
        return ()

    async def call_tool(self, name: str, arguments: Mapping[str, Json] | str) -> Content:
        """Refuse: there are none."""
        raise GatewayError("no tools are served here")

    def _forget(self) -> None:
        """Forget all conversations."""
        for branch in self.tree.branches:
            self.engine.finish(branch.name)
        self._generations += 1
        self.tree = ConversationTree(f"serve-{self._generations}", self.chat)

    def sampling(self, node: Node, room: int) -> Sampling:
        asked, limits = node.call.asked, self.limits
        for key, neutral in _NEUTRAL.items():
            if asked.get(key, neutral) != neutral:
                raise GatewayError(f"{key}: {shown(asked[key])} is not served here; leave it out")
        return Sampling(
            max_tokens=room,
            temperature=_number(asked, "temperature", 0.0, 5.0, limits.temperature),
            top_p=_number(asked, "top_p", 1e-6, 1.0, limits.top_p),
            top_k=int(_number(asked, "top_k", 0, 1e6, limits.top_k)),
            stop_ids=self.chat.stop_ids,
            seed=int(_number(asked, "seed", 0, 2**62, secrets.randbits(62))),
        )


def _number(asked: Mapping[str, Json], key: str, low: float, high: float, default: float) -> float:
    value = asked.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise GatewayError(f"{key}: expected a number from {low:g} to {high:g}, got {str(value)[:40]!r}")
    return value


async def serve(recipe: Recipe, model: str | None, host: str, port: int, key: str, say: Callable[[str], None]) -> None:
    """Serve the recipe's model, or `model`, until it is cancelled. Raises UserError.

    key: what clients must send; empty: anything will do. say: told where it answers, once it does."""
    player = await Player.build(apart_from_tasks(recipe, tools=()), model, Talk(nobody), say=say)
    gateway = Gateway(host=host, port=port, model=model or recipe.model.path)
    try:
        await gateway.start()
        with gateway.serving(ServedModel(player.engine, player.chat, recipe.rollout), key), rare_collections():
            say(f"OPENAI_BASE_URL={gateway.url}/v1 ANTHROPIC_BASE_URL={gateway.url}")
            say(f"API key: {key or 'any'}")
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
    finally:
        await gateway.close()
        for line in await player.close():
            say(line)
