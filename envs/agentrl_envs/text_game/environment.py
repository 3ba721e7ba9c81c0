"""The environment `text_game`: a map to walk through move by move, paid for progress and for the goal."""

from collections.abc import Mapping, Sequence
from random import Random

from agentrl.errors import UserError, nearest
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, Session, Task, ToolResponse
from agentrl_envs.conversation import check_generated, check_split, check_style, generated_tasks
from agentrl_envs.text_game.demonstrations import STYLES, delegated, demonstrate, summarize
from agentrl_envs.text_game.game import VIEWS, Game, Outcome
from agentrl_envs.text_game.maps import HELD_OUT_SIZE, SPLITS, TRAIN_SIZE, task
from agentrl_envs.text_game.world import Direction, World

TASK = "Find the key, open the door, reach the goal."
LEGEND = "# is wall, @ you, K the key, D the door, G the goal."
REMINDER = "Call move."


class Move(Tool):
    """One move of the game that the environment's session holds."""

    name = "move"
    description = "Move one step. You take the key where it lies, and with it the door opens when you walk into it."
    parameters: Mapping[str, Json] = {
        "type": "object",
        "properties": {
            "to": {"type": "string", "enum": [d.value for d in Direction], "description": "Where you want to go."}
        },
        "required": ["to"],
    }

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        assert session.environment is not None
        outcome = session.environment.state.move(Direction(arguments["to"]))
        return ToolResponse(
            outcome.text, reward=outcome.progress, metrics={"illegal": float(not outcome.legal)}, done=outcome.over
        )


class TextGame(Environment):
    """A game of two rooms, a key, a locked door and a goal.

    source: `generated`, which is all there is. view: what is told after every move, `compass` (the way to the next
    target and the open ways, in words) or `map` (the map, drawn). slack: turns that may be used for each move of the
    shortest way; one more is given. seed: of the training maps. delegate: moves that each sub-agent makes in
    demonstrations, which call the tool `delegate` for all of them; 0: none does.

    Rewards: `goal`, 1 when it is reached; `short`, then, the share of the turns that were needed; and step rewards
    that add up to the progress made, at most 1. So the best game is worth 3.
    """

    name = "text_game"
    reward_parts = ("goal", "short")
    splits = SPLITS[1:]

    def __init__(
        self, source: str = "generated", view: str = "compass", slack: float = 1.5, seed: int = 0, delegate: int = 0
    ) -> None:
        check_generated(self, source)
        if view not in VIEWS:
            raise UserError(f"env.args.view: text_game has no view {view!r}{nearest(view, VIEWS)}")
        if not slack >= 1:
            raise UserError(f"env.args.slack is {slack}: below 1 no game can be won")
        if delegate < 0:
            raise UserError(f"env.args.delegate is {delegate}: it must be 0 or more")
        self._delegate = delegate
        self._view, self._slack, self._seed = view, slack, seed
        self._tools = (Move(),)

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        return generated_tasks(split, TRAIN_SIZE, HELD_OUT_SIZE, self._seed, task)

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        session.state = game = self.game(session.task)
        opening = f"{TASK} {LEGEND}\n" if self._view == "map" else f"{TASK} "
        return [{"role": "user", "content": opening + game.view(game)}]

    async def execute(self, session: Session, message: Message) -> Reply:
        """Count a turn without a move as used, and remind the player."""
        outcome: Outcome = session.state.waste(REMINDER)
        return Reply(({"role": "user", "content": outcome.text},), done=outcome.over)

    def state_key(self, session: Session) -> str:
        game: Game = session.state
        return f"{game.position} {game.has_key} {game.opened}"

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        game: Game = session.state
        return {"goal": float(game.won), "short": game.shortest / game.used if game.won else 0.0}

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        """Decide by the goal alone: neither progress nor a short way makes up for it."""
        return rewards.get("goal", 0.0) >= 1.0

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        """A game played in a style of `demonstrations.STYLES`."""
        check_style(self, style, STYLES)
        game = self.game(task)
        view = game.view(game)
        said = demonstrate(game, rng, style, REMINDER)
        return delegated(view, said, self._delegate, rng, style) if self._delegate else said

    def summarize(self, task: Task, messages: Sequence[Message], rng: Random, style: str) -> str:
        return summarize(messages, rng, style)

    def game(self, task: Task) -> Game:
        """A task's game, at its start."""
        return Game.begin(World.read(task.data["map"]), VIEWS[self._view], self._slack)
