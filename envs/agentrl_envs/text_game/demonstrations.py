"""How a game is played, as chat messages: by a shortest way, or as somebody plays who does not look.

Every answer in a demonstration is the game's own to that move.
"""

from random import Random

from agentrl.plugins.types import Message
from agentrl_envs.conversation import Styles, assistant, draw_way, tool_turn
from agentrl_envs.text_game.game import Game
from agentrl_envs.text_game.world import Direction

STYLES: Styles[str] = {"clean": {"best": 1.0}, "careless": {"best": 0.5, "wander": 0.3, "bump": 0.15, "talk": 0.05}}
"""Relative frequencies of what is done in a turn: `best` takes the best move, `wander` any legal one, `bump` one that
the map does not allow, `talk` none."""


def demonstrate(game: Game, rng: Random, style: str, reminder: str) -> list[Message]:
    """Return the messages after the opening, to the end of the game. `game` is played."""
    said: list[Message] = []
    while not game.over:
        way = draw_way(STYLES[style], rng)
        if way == "talk":
            said += [assistant("Let me think."), {"role": "user", "content": game.waste(reminder).text}]
        else:
            direction = _choose(game, rng, way)
            said += tool_turn("move", {"to": direction.value}, game.move(direction).text)
    return said


def _choose(game: Game, rng: Random, way: str) -> Direction:
    """Choose a move; the best one is always the first of them, so that a model can learn which one is meant."""
    legal = game.open_ways()
    if way == "best":
        return game.best_ways()[0]
    closed = [direction for direction in Direction if direction not in legal]
    return rng.choice(closed if way == "bump" and closed else legal)
