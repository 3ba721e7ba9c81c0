"""Arguments that are like others: inputs on which nobody has looked at a function."""

import ast
from random import Random

from agentrl.jsonable import Json


def varied(positional: str, named: str, rng: Random) -> tuple[str, str]:
    """A call's arguments as literals, one of them changed; as they were where none can be."""
    values: list[Json] = ast.literal_eval(positional)
    places = [i for i, value in enumerate(values) if _can_vary(value)]
    if not places:
        return positional, named
    place = rng.choice(places)
    values[place] = vary(values[place], rng)
    return repr(values), named


def vary(value: Json, rng: Random) -> Json:
    """A value of the same type that is near to another one."""
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, 0))
    if isinstance(value, float):
        return rng.choice((value + 1.0, -value, value / 2))
    if isinstance(value, str | bytes):
        return rng.choice((value[1:], value[:-1], value[::-1], 2 * value, value.swapcase()))
    if isinstance(value, list | tuple) and value:
        items = list(value)
        place = rng.randrange(len(items))
        if _can_vary(items[place]) and rng.random() < 0.5:
            items[place] = vary(items[place], rng)
        else:
            del items[place]
        return type(value)(items)
    return value


def _can_vary(value: Json) -> bool:
    return isinstance(value, int | float | str | bytes | list | tuple) and not isinstance(value, bool) and bool(value)
