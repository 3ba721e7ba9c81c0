"""How a game is played, as chat messages: by a shortest way, or as somebody plays who does not look.

Every answer in a demonstration is the game's own to that move.
"""

from dataclasses import dataclass, fields
from random import Random

from agentrl.plugins.types import FunctionCall, Message
from agentrl_envs.text_game.game import Game, Outcome
from agentrl_envs.text_game.world import Direction


@dataclass(frozen=True)
class Style:
    """Relative frequencies of what is done with a turn: a best move, any legal one, one that the map does not allow,
    or no move at all."""

    best: float = 1.0
    wander: float = 0.0
    bump: float = 0.0
    talk: float = 0.0


STYLES = {"clean": Style(), "careless": Style(best=0.5, wander=0.3, bump=0.15, talk=0.05)}


def demonstrate(game: Game, rng: Random, style: Style, reminder: str) -> list[Message]:
    """The messages after the opening, to the end of the game. `game` is played."""
    ways = [f.name for f in fields(style)]
    weights = [getattr(style, way) for way in ways]
    said: list[Message] = []
    while not game.over:
        way = rng.choices(ways, weights)[0]
        if way == "talk":
            said += _talk(game.waste(reminder))
        else:
            direction = _choose(game, rng, way)
            said += _move(direction, game.move(direction))
    return said


def _choose(game: Game, rng: Random, way: str) -> Direction:
    """The best move is always the first of them, so that a pupil can learn which one is meant."""
    legal = game.open_ways()
    if way == "best":
        return game.best_ways()[0]
    closed = [direction for direction in Direction if direction not in legal]
    return rng.choice(closed if way == "bump" and closed else legal)


def _move(direction: Direction, outcome: Outcome) -> list[Message]:
    function: FunctionCall = {"name": "move", "arguments": {"to": direction.value}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": outcome.text},
    ]


def _talk(outcome: Outcome) -> list[Message]:
    return [{"role": "assistant", "content": "Let me think."}, {"role": "user", "content": outcome.text}]
