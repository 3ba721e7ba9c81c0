"""The reward of an object: its own `get_reward` or `reward`, and functions as TRL calls them."""

import inspect
from collections.abc import Callable, Mapping, Sequence

from agentrl.errors import UserError
from agentrl.plugins.registry import load_path
from agentrl.plugins.types import Json, Message
from agentrl_envs.object.methods import Live

RewardFunction = Callable[..., object]


def load_functions(paths: Sequence[str]) -> dict[str, RewardFunction]:
    """Load functions by the name of the reward part that each fills, its own. Raises UserError."""
    functions: dict[str, RewardFunction] = {}
    for path in paths:
        function = load_path(path, f"env.args.rewards: {path}")
        if not callable(function) or isinstance(function, type):
            raise UserError(f"env.args.rewards: {path} is not a function")
        wanted = inspect.signature(function).parameters.get("completion_ids")
        if wanted is not None and wanted.default is wanted.empty:
            raise UserError(f"env.args.rewards: {path} asks for completion_ids; rewards see messages here, not tokens")
        name = getattr(function, "__name__", path)
        if name in functions:
            raise UserError(f"env.args.rewards: two functions are called {name!r}")
        functions[name] = function
    return functions


async def call_function(
    function: RewardFunction, live: Live, row: Mapping[str, Json], messages: Sequence[Message]
) -> float | None:
    """What it says of one finished conversation, given the lists of one entry that TRL gives: `prompts`,
    `completions`, `environments`, and every column of the row. What it logs goes nowhere. None: this sample does not
    concern it."""
    given: dict[str, Json] = {column: [value] for column, value in row.items() if column != "prompt"}
    given |= {
        "prompts": [list(messages[: live.opening])],
        "completions": [list(messages[live.opening :])],
        "environments": [live.made],
        "trainer_state": None,
        "log_extra": _forget,
        "log_metric": _forget,
    }
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = {p.name for p in parameters}
        given = {key: value for key, value in given.items() if key in known}
    if inspect.iscoroutinefunction(function):
        values = await function(**given)
    else:
        values = await live.lane.call(function, **given)
    values = list(values)
    if len(values) != 1:
        raise ValueError(f"{function.__name__} returned {len(values)} rewards for one conversation")
    value: float | None = values[0]
    return value


def _forget(*args: object, **kwargs: Json) -> None:
    """Drop what a reward function logs."""
