"""The environment `vision_game`: gems in a square of cells, shown as pictures; the right one is to be picked up."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from random import Random

from agentrl.errors import UserError
from agentrl.plugins.environment import Environment, LazyTasks
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, Session, Task, ToolResponse
from agentrl_envs.conversation import Styles, check_generated, check_split, check_style, draw_way, tool_turn
from agentrl_envs.vision_game.game import COLORS, MOVES, Game, named

STYLES: Styles[str] = {"clean": {"best": 1.0}, "careless": {"best": 0.6, "wander": 0.35, "grab": 0.05}}
"""Relative frequencies of what is done in a turn: `best` does the best thing, `wander` makes any move, `grab` picks up
what lies here."""
REMINDER = "Call a tool: look, move or pick_up."
TRAIN_SIZE, HELD_OUT_SIZE = 1_000_000, 1_000


class Look(Tool):
    """The picture of the game as it stands."""

    name = "look"
    description = "Look at the cells again."
    parameters: Mapping[str, Json] = {"type": "object", "properties": {}}

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        table = _table(session)
        table.game.left -= 1
        return table.answer("You look.")


class Move(Tool):
    """One step."""

    name = "move"
    description = "Move one cell. You are the black dot."
    parameters: Mapping[str, Json] = {
        "type": "object",
        "properties": {"to": {"type": "string", "enum": list(MOVES), "description": "Where you want to go."}},
        "required": ["to"],
    }

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        table = _table(session)
        return table.answer(_moved(table.game.move(arguments["to"])))


class PickUp(Tool):
    """What ends the game."""

    name = "pick_up"
    description = "Pick up the gem that lies in your cell. The game ends."
    parameters: Mapping[str, Json] = {"type": "object", "properties": {}}

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        return ToolResponse(_table(session).game.pick_up(), done=True)


class _Table:
    """A game and how it is shown."""

    def __init__(self, game: Game, blank: bool) -> None:
        self.game, self.blank = game, blank

    def answer(self, text: str) -> ToolResponse:
        return ToolResponse(text, images=(self.game.picture(self.blank),), done=self.game.over)


class VisionGame(Environment):
    """A player among gems of different colors, in a square of cells: go to the one that is named and pick it up. Every
    answer of a tool is a picture.

    source: `generated`, which is all there is. size: cells of a side. gems: how many lie there, 1 to 3. blank: show
    empty pictures, so that nothing can be known of the game. seed: of the training games.

    Reward: `gem`, 1 for the right one. A game has two turns for each move of the shortest way, and two more.
    """

    name = "vision_game"
    reward_parts = ("gem",)
    splits = ("test", "validation")

    def __init__(
        self, source: str = "generated", size: int = 4, gems: int = 2, blank: bool = False, seed: int = 0
    ) -> None:
        check_generated(self, source)
        if not 2 <= size <= 16:
            raise UserError(f"env.args.size is {size}: it must be 2 to 16")
        if not 1 <= gems <= len(COLORS):
            raise UserError(f"env.args.gems is {gems}: it must be 1 to {len(COLORS)}")
        self._size, self._gems, self._blank, self._seed = size, gems, blank, seed
        self._tools = (Look(), Move(), PickUp())

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        return LazyTasks(TRAIN_SIZE if split == "train" else HELD_OUT_SIZE, lambda index: self._task(split, index))

    def _task(self, split: str, index: int) -> Task:
        game = self._game(split, index)
        return Task(f"{split}-{index}", {"split": split, "index": index, "wanted": game.wanted, "moves": game.distance})

    def _game(self, split: str, index: int) -> Game:
        """A game of a split, at its start. Train depends on the seed, the others never do."""
        rng = Random(f"vision_game/{self._seed if split == 'train' else 0}/{split}/{index}")
        while True:
            game = Game.draft(rng, self._size, self._gems)
            if game.held_out == (split != "train"):
                return game

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        game = self._game(session.task.data["split"], session.task.data["index"])
        session.state = _Table(game, self._blank)
        content: list[dict[str, Json]] = [
            {"type": "text", "text": f"Pick up the {game.wanted} gem."},
            {"type": "image", "image": game.picture(self._blank)},
        ]
        return [{"role": "user", "content": content}]

    async def execute(self, session: Session, message: Message) -> Reply:
        """Count a turn without a call as used, and remind the player."""
        game: Game = session.state.game
        game.left -= 1
        return Reply(({"role": "user", "content": REMINDER},), done=game.over)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        return {"gem": float(session.state.game.won)}

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        """A game played in a style of STYLES. The player says what it sees before it acts, so that a model
        learns to find cells and colors apart from the way."""
        check_style(self, style, STYLES)
        game = deepcopy(self._game(task.data["split"], task.data["index"]))
        said: list[Message] = []
        while not game.over:
            way, best, thought = draw_way(STYLES[style], rng), game.best(), _thought(game)
            if way == "grab" or (way == "best" and not best):
                turn, result = tool_turn("pick_up", {}, game.pick_up())
                said += [{**turn, "content": thought}, result]
                continue
            to = rng.choice(best if way == "best" else list(MOVES))
            turn, result = tool_turn("move", {"to": to}, "")
            turn["content"] = thought
            moved = _moved(game.move(to))
            parts: list[dict[str, Json]] = [
                {"type": "text", "text": moved},
                {"type": "image", "image": game.picture(self._blank)},
            ]
            said += [turn, {**result, "content": parts}]
        return said


def _thought(game: Game) -> str:
    """What a player says before it acts: its own cell, and that of the gem that is wanted."""
    return f"At {named(game.player)}, {game.wanted} at {named(game.target)}."


def _moved(could: bool) -> str:
    return "You move." if could else "The wall is there."


def _table(session: Session) -> _Table:
    assert session.environment is not None
    table: _Table = session.environment.state
    return table
