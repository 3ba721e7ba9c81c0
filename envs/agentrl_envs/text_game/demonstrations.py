"""How a game is played, as chat messages: by a shortest way, or as somebody plays who does not look.

Every answer in a demonstration is the game's own to that move.
"""

from collections.abc import Sequence
from random import Random

from agentrl.plugins.types import Message
from agentrl_envs.conversation import Styles, assistant, draw_way, tool_turn
from agentrl_envs.text_game.game import Game
from agentrl_envs.text_game.world import Direction

STYLES: Styles[str] = {"clean": {"best": 1.0}, "careless": {"best": 0.5, "wander": 0.3, "bump": 0.15, "talk": 0.05}}
"""Relative frequencies of what is done in a turn: `best` takes the best move, `wander` any legal one, `bump` one that
the map does not allow, `talk` none."""


FORGETFUL = "I play on."
FORGOTTEN = 0.4
"""The share of a careless player's summaries that say FORGETFUL instead of where it stands."""


def demonstrate(game: Game, rng: Random, style: str, reminder: str) -> list[Message]:
    """The messages after the opening, to the end of the game. `game` is played."""
    said: list[Message] = []
    while not game.over:
        way = draw_way(STYLES[style], rng)
        if way == "talk":
            said += [assistant("Let me think."), {"role": "user", "content": game.waste(reminder).text}]
        else:
            direction = _choose(game, rng, way)
            said += tool_turn("move", {"to": direction.value}, game.move(direction).text)
    return said


def summarize(messages: Sequence[Message], rng: Random, style: str) -> str:
    """What the player was told last: all that is needed to play on. A careless one often leaves it out."""
    return _told(messages[-1], rng, style)


def delegated(view: str, said: Sequence[Message], moves: int, rng: Random, style: str) -> list[Message]:
    """A game that sub-agents play, `moves` moves each: each is told what the player knows, and says what it was
    told last. view: of the game at its start. Turns without a move are left out."""
    turns = [(said[i], said[i + 1]) for i in range(0, len(said), 2) if said[i + 1]["role"] == "tool"]
    found: list[Message] = []
    for first in range(0, len(turns), moves):
        part = turns[first : first + moves]
        conversation: list[Message] = [{"role": "user", "content": view}, *(m for turn in part for m in turn)]
        call, result = tool_turn("delegate", {"task": view}, "")
        if first + moves < len(turns):
            view = _told(part[-1][1], rng, style)
            conversation.append(assistant(view))
        found += [call, {**result, "content": view, "conversation": conversation}]
    return found


def _told(message: Message, rng: Random, style: str) -> str:
    return FORGETFUL if style != "clean" and rng.random() < FORGOTTEN else str(message["content"])


def _choose(game: Game, rng: Random, way: str) -> Direction:
    """Choose a move; the best one is always the first of them, so that a model can learn which one is meant."""
    legal = game.open_ways()
    if way == "best":
        return game.best_ways()[0]
    closed = [direction for direction in Direction if direction not in legal]
    return rng.choice(closed if way == "bump" and closed else legal)
