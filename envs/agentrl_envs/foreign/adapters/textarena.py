"""textarena: its games for one player, and those for two against a fixed opponent.

A turn of the model is a move, in the form that the game asks for (`[4]`); the game's messages are what the user says.
The games draw from Python's global random numbers, so each game's are put in place before it moves and taken away
after.
"""

import contextlib
import importlib.util
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import textarena as ta

HELD_OUT = 1_000_000_007
"""Where the seeds of held-out tasks begin."""
MOST_MOVES = 500
"""Of one player in a row."""
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_one_at_a_time = threading.Lock()

Opponent = Callable[[str, random.Random], str]
"""From what a player was just told to its move."""


class Adapter:
    """game: an id of textarena, such as `TicTacToe-v0`. options: further arguments of the game. players: 1 or 2; by
    default what the game is for. seat:
    the model's, of two (-1: both in turn, by task). opponent: who has the other seat: `random` takes one of the moves
    that the game lists in brackets, or what `file.py:function` names, from the text that a player is told and random
    numbers to a move. train, held_out: how many tasks, each a seed. opening: what stands before the game's own first
    message; rules: whether the game's rules stand in it. win: the least reward that counts as solved.
    unfinished: the reward of a game that is not over when the rollout is; by default that of a loss against an
    opponent, else 0: were it more than a loss, a model would learn to leave."""

    def __init__(
        self,
        game: str,
        options: dict[str, Any] | None = None,
        players: int | None = None,
        seat: int = -1,
        opponent: str = "random",
        train: int = 10_000,
        held_out: int = 200,
        seed: int = 0,
        opening: str = "",
        rules: bool = True,
        win: float = 1.0,
        unfinished: float | None = None,
    ) -> None:
        if players not in (None, 1, 2):
            raise ValueError(f"players is {players}: games for one player and for two are played")
        self.game, self.options, self.seat = game, options or {}, seat
        self.opponent = _opponent(opponent)
        self.sizes, self.seed, self.opening, self.rules = {"train": train, "test": held_out}, seed, opening, rules
        self.win = win
        if f"{game}-raw" in ta.envs.registration.ENV_REGISTRY:
            self.game = f"{game}-raw"  # without what repeats the whole game in each message
        self.name = game.partition("-v")[0].lower()
        self.players = _players(self.game, self.options) if players is None else players
        self.unfinished = (-1.0 if self.players == 2 else 0.0) if unfinished is None else unfinished
        ta.make(self.game, **self.options)

    def describe(self) -> dict[str, Any]:
        """See docs/foreign.md."""
        return {
            "name": self.name,
            "splits": self.sizes,
            "reward_parts": ["game"],
            "solved": {"game": self.win},
            "cannot": {"tools": "moves are texts", "seats": "more than two players, or a model in each seat"},
        }

    def task(self, split: str, index: int) -> dict[str, Any]:
        """The seed of a game and the model's seat."""
        first = self.seed if split == "train" else HELD_OUT
        seat = 0 if self.players == 1 else index % 2 if self.seat < 0 else self.seat
        return {"seed": first + index, "seat": seat}

    def open(self, task: dict[str, Any], seed: int) -> "Game":
        """One rollout."""
        return Game(self, task)

    def demonstrate(self, task: dict[str, Any], seed: int, style: str) -> list[dict[str, Any]]:
        """A game of moves that the game lists: `random` ones. What moves look like, not how to win."""
        if style != "random":
            raise ValueError(f"there is no style {style!r}: textarena has demonstrations of `random` moves")
        game, rng, said = Game(self, task), random.Random(seed), []
        told: str | None = game.messages
        for _ in range(MOST_MOVES):
            said.append({"role": "assistant", "content": listed_move(told or "", rng)})
            told = game.step(said[-1])
            if told is None:
                break
            said.append({"role": "user", "content": told})
        return said if said[-1]["role"] == "assistant" else said[:-1]


def _players(game: str, options: dict[str, Any]) -> int:
    """How many a game is for: one or two. Raises ValueError."""
    why = ""
    for count in (1, 2):
        try:
            ta.make(game, **options).reset(num_players=count, seed=0)
        except Exception as error:  # noqa: BLE001 - games assert, or raise whatever they miss
            why = f"{type(error).__name__}: {error}"
        else:
            return count
    raise ValueError(f"{game} begins neither with one player nor with two: {why}")


class Game:
    """One game. The opponent has moved whenever the model is asked."""

    def __init__(self, adapter: Adapter, task: dict[str, Any]) -> None:
        self._adapter, self._seat = adapter, task["seat"]
        self._rng = random.Random(task["seed"] * 31 + 7)  # of the opponent: the same for all samples of a task
        self._numbers: Any = None
        self._rewards: dict[int, float] | None = None
        self._turns = 0
        self._invalid = False
        with self._own_numbers():
            self._env = ta.make(adapter.game, **adapter.options)
            self._env.reset(num_players=adapter.players, seed=task["seed"])
        self.messages = adapter.opening + self._until_mine(rules=adapter.rules)

    @contextlib.contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Put this game's random numbers in the place of those that all games draw from."""
        with _one_at_a_time:
            outside = random.getstate()
            if self._numbers is not None:
                random.setstate(self._numbers)
            try:
                yield
            finally:
                self._numbers = random.getstate()
                random.setstate(outside)

    def _until_mine(self, rules: bool = True) -> str:
        """Let the opponent move until it is the model's turn, or the game is over. What the model is told."""
        for _ in range(MOST_MOVES):
            if self._rewards is not None:
                return ""
            with self._own_numbers():
                player, told = self._env.get_observation()
            if player == self._seat:
                return _text(told, self._seat, rules)
            self._move(self._adapter.opponent(_text(told, player, True), self._rng))
        raise RuntimeError(f"the opponent made {MOST_MOVES} moves, and it is still not the model's turn")

    def _move(self, action: str) -> None:
        with self._own_numbers():
            done, _ = self._env.step(action=action)
            if done:
                rewards, info = self._env.close()
                self._rewards = dict(rewards or {})
                self._invalid = bool(info.get(self._seat, {}).get("invalid_move"))

    def step(self, message: dict[str, Any]) -> str | None:
        """Make the move of an answer. What the model is told then; None: the game is over."""
        said = message.get("content")
        self._turns += 1
        self._move(said if isinstance(said, str) else "")
        told = self._until_mine()
        return None if self._rewards is not None else told or "(nothing)"

    def grade(self) -> dict[str, Any]:
        """The game's own reward of the model's seat, or that of a game which is not over."""
        over = self._rewards is not None
        reward = self._adapter.unfinished if self._rewards is None else float(self._rewards.get(self._seat, 0.0))
        metrics = {"over": float(over), "invalid": float(self._invalid), "moves": float(self._turns)}
        return {"rewards": {"game": reward}, "metrics": metrics}

    def close(self) -> None:
        """Forget the game."""
        self._env = None


def _text(told: Any, player: int, rules: bool) -> str:
    """What a player is told, without its own moves; rules: with those of the game."""
    if isinstance(told, str):
        return str(told.strip())
    kinds = ta.ObservationType
    lines = []
    for sender, message, kind in told:
        if (kind is kinds.PLAYER_ACTION and sender == player) or (kind is kinds.PROMPT and not rules):
            continue
        if not isinstance(message, str):  # a player's move, told with its arguments in the wrong order
            continue
        lines.append(f"[Player {sender}] {message}" if kind is kinds.PLAYER_ACTION else message)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def listed_move(told: str, rng: random.Random) -> str:
    """One of the moves in brackets that stand in the last line that has several, or any; `[0]` where none is listed."""
    lines = [found for line in told.split("\n") if (found := _MOVE.findall(line))]
    several = next((found for found in reversed(lines) if len(found) > 1), None)
    chosen: str = rng.choice(several or (lines[-1] if lines else ["[0]"]))
    return chosen


def _opponent(name: str) -> Opponent:
    """The opponent of a name. Raises ValueError."""
    if name == "random":
        return listed_move
    path, _, function = name.partition(":")
    if not path.endswith(".py") or not function or not os.path.isfile(path):
        raise ValueError(f"opponent: {name!r}; expected random, or file.py:function")
    spec = importlib.util.spec_from_file_location("textarena_opponent", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    found: Opponent = getattr(loaded, function)
    return found
