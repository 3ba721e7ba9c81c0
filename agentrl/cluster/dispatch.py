"""`Dispatch`: how the arguments of one call reach many workers, and how their outputs become one result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

F = TypeVar("F", bound=Callable[..., object])

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of a single call."""
MARK = "__agentrl_registered__"


@dataclass(frozen=True)
class Shape:
    """The size of a group. Ranks with the same r // sharing work on the same part of the data."""

    workers: int
    """Ranks of the group."""
    sharing: int = 1
    """Ranks that share a part of the data."""

    @property
    def parts(self) -> int:
        """Number of parts that data are split into."""
        return self.workers // self.sharing


Scatter = Callable[[Shape, tuple[object, ...], dict[str, object]], tuple[list[Arguments | None], Any]]
"""The arguments of each rank (None: not called), and a context for `Gather`. An object that several ranks share
is sent once."""
Gather = Callable[[Shape, list[object], Any], object]
"""The result, from one output a rank (None for ranks not called) and the context of `Scatter`."""


@dataclass(frozen=True)
class Dispatch:
    """A mode of calling a group. `ONE_TO_ALL`, `ALL_TO_ALL`, `RANK_ZERO` and `SPLIT` ship; users may define others.

    What `scatter` raises is raised before anything is sent.
    """

    name: str
    """For errors."""
    scatter: Scatter
    """Make the arguments of each rank."""
    gather: Gather
    """Make the result of the ranks' outputs."""


class Parts(Protocol):
    """Data that were split."""

    @property
    def parts(self) -> Sequence[object]:
        """One entry a part, any of which may be empty."""

    def join(self, outputs: list[object]) -> object:
        """Join the outputs of the parts."""


@runtime_checkable
class Distributable(Protocol):
    """Data that can be split."""

    def distribute(self, parts: int) -> Parts:
        """Split the data into `parts` parts."""


def register(dispatch: "Dispatch | None" = None, *, blocking: bool = True) -> Callable[[F], F]:
    """Mark a method of a `Worker` as callable through its group. dispatch: ONE_TO_ALL if not given.
    blocking: False returns a `Future` at once, as `group.method.future(...)` always does."""
    if dispatch is not None and not isinstance(dispatch, Dispatch):
        raise TypeError(f"register() takes a Dispatch, as in @register(dispatch=SPLIT), not {dispatch!r}")

    def mark(method: F) -> F:
        setattr(method, MARK, (dispatch or ONE_TO_ALL, blocking))
        return method

    return mark


def registered(worker_class: type) -> dict[str, tuple[Dispatch, bool]]:
    """The marked methods of a class and its bases: name -> (dispatch, blocking). A method that is overridden
    without a mark keeps that of its base."""
    found: dict[str, tuple[Dispatch, bool]] = {}
    for base in reversed(worker_class.__mro__):
        for name, member in vars(base).items():
            if mark := getattr(member, MARK, None):
                found[name] = mark
    return found


def _named(args: tuple[object, ...], kwargs: dict[str, object]) -> list[tuple[int | str, object]]:
    return [*enumerate(args), *kwargs.items()]


def _outputs(shape: Shape, outputs: list[object], context: object) -> list[object]:
    return outputs


def _to_all(shape: Shape, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[Arguments | None], None]:
    same = (args, kwargs)
    return [same] * shape.workers, None


def _one_each(shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Arguments | None], None]:
    for name, value in _named(args, kwargs):
        if not isinstance(value, list | tuple) or len(value) != shape.workers:
            raise TypeError(f"argument {name} must be a list of {shape.workers} entries, one a worker, not {value!r}")
    return [
        (tuple(value[rank] for value in args), {name: value[rank] for name, value in kwargs.items()})
        for rank in range(shape.workers)
    ], None


def _to_first(shape: Shape, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[Arguments | None], None]:
    return [(args, kwargs), *[None] * (shape.workers - 1)], None


def _split(shape: Shape, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[Arguments | None], Any]:
    partitions: dict[int | str, Parts] = {
        key: value.distribute(shape.parts) for key, value in _named(args, kwargs) if isinstance(value, Distributable)
    }
    if not partitions:
        raise TypeError("one argument of a split call must have `distribute(parts)`, such as a Batch")
    for partition in partitions.values():
        if len(partition.parts) != shape.parts:
            raise ValueError(f"distribute({shape.parts}) gave {len(partition.parts)} parts")
    calls: list[Arguments] = [
        (
            tuple(partitions[index].parts[part] if index in partitions else value for index, value in enumerate(args)),
            {name: partitions[name].parts[part] if name in partitions else value for name, value in kwargs.items()},
        )
        for part in range(shape.parts)
    ]
    return [calls[rank // shape.sharing] for rank in range(shape.workers)], next(iter(partitions.values()))


ONE_TO_ALL = Dispatch("one_to_all", _to_all, _outputs)
"""Send the same arguments to every worker; return their outputs by rank."""
ALL_TO_ALL = Dispatch("all_to_all", _one_each, _outputs)
"""Take a list with one entry a worker for each argument; return the outputs by rank."""
RANK_ZERO = Dispatch("rank_zero", _to_first, lambda shape, outputs, context: outputs[0])
"""Call worker 0 only; return its output."""
SPLIT = Dispatch("split", _split, lambda shape, outputs, partition: partition.join(outputs[:: shape.sharing]))
"""Split arguments with `distribute` over the data-parallel parts and send the others to all; return the outputs as
joined by the first partition. No size has to divide the number of workers: that is up to `distribute`."""
