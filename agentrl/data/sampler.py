"""Which tasks come next: by an order of each epoch, or by what earlier ones came to. Resumable at any position."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from agentrl.errors import UserError, call_plugin
from agentrl.jsonable import dumps, loads
from agentrl.plugins.order import Order
from agentrl.plugins.registry import construct, load, with_arguments
from agentrl.plugins.types import Json, Task
from agentrl.recipe.sections.env import DataSection, TaskFilterSection

ORDER, FILTER = "data.order", "data.filter"


def shuffled(tasks: Sequence[object], seed: int, epoch: int) -> Sequence[int]:
    """Every task once an epoch, in an order that depends on (seed, epoch) alone."""
    order: list[int] = np.random.default_rng((seed, epoch)).permutation(len(tasks)).tolist()
    return order


def sequential(tasks: Sequence[object], seed: int, epoch: int) -> Sequence[int]:
    """Every task once an epoch, as they stand in the data."""
    return range(len(tasks))


@dataclass(slots=True)
class TaskSampler:
    """Draws indices 0..size-1, each once an epoch, in an order that depends on (seed, epoch) alone, or in another.

    `excluded` ones are passed over, such as those whose prompt does not fit; the order of the others stays.
    """

    size: int
    """Number of tasks."""
    seed: int
    """Seed of the shuffles."""
    epoch: int = 0
    """Number of epochs that are used up."""
    position: int = 0
    """Number of indices of the epoch's order that are used up."""
    excluded: frozenset[int] = frozenset()
    """Indices that are not drawn."""
    of_epoch: Callable[[int], Sequence[int]] | None = None
    """From the number of an epoch to its indices in their order. None: a shuffle."""
    order: Order | None = None
    """Chooses each task, in place of orders of epochs; an epoch is then `size` draws."""
    name: str = "shuffled"
    """The order, as the recipe names it."""
    keep: Callable[[int], bool] | None = None
    """Asked once of each index as its turn comes; one that is not kept is passed over."""
    fitting: set[int] = field(default_factory=set)
    """Those that `order` drew whose prompts were measured, and fit."""
    _order: Sequence[int] | None = None
    _kept: dict[int, bool] = field(default_factory=dict)  # what `keep` said
    _drawn: bool = False  # whether the epoch had an index that is kept

    def __post_init__(self) -> None:
        if len(self.excluded) >= self.size:
            raise ValueError("a sampler needs at least one task")

    def draw(self, count: int) -> list[int]:
        """The next `count` indices; goes on into the next epoch where this one ends. Raises UserError: what an
        order of the user's does wrong."""
        drawn: list[int] = []
        while len(drawn) < count:
            if self.order is not None:
                drawn.append(self._choose(self.order))
                self._advance(1, self.size)
            else:
                order = self._epoch_order()
                part = order[self.position : self.position + count - len(drawn)]
                found = [i for i in part if i not in self.excluded and self._keeps(i)]
                drawn += found
                self._drawn |= bool(found)
                self._advance(len(part), len(order))
        return drawn

    def _keeps(self, index: int) -> bool:
        if self.keep is None:
            return True
        if index not in self._kept:
            self._kept[index] = self.keep(index)
        return self._kept[index]

    def _advance(self, count: int, size: int) -> None:
        self.position += count
        if self.position == size:
            if self.order is None and not self._drawn:
                raise UserError(f"{FILTER} keeps none of the {size} tasks of epoch {self.epoch}")
            self._drawn = False
            self.epoch, self.position, self._order = self.epoch + 1, 0, None

    def _choose(self, order: Order) -> int:
        number = self.epoch * self.size + self.position
        while len(self.excluded) < self.size:
            index = call_plugin(self._owner, order.draw, number, self.excluded)
            if not self._is_task(index) or index in self.excluded:
                raise UserError(f"{self._owner} drew {index!r:.60}, which is no task that can be drawn")
            if self._keeps(int(index)):
                return int(index)
            self.excluded |= {int(index)}
        raise UserError(f"{self._owner}: none of the {self.size} tasks is left to draw from")

    def _epoch_order(self) -> Sequence[int]:
        if self._order is None:
            order = self.of_epoch or partial(shuffled, range(self.size), self.seed)
            found = call_plugin(self._owner, lambda: list(order(self.epoch)))
            if not self._are_tasks(found):
                wrong = next(i for i in found if not self._is_task(i))
                raise UserError(f"{self._owner}: epoch {self.epoch} has the task {wrong!r:.60} of {self.size} tasks")
            if not 0 < len(found) <= self.size or self.excluded.issuperset(found):
                held = f"{len(found)} tasks of {self.size}, {len(self.excluded)} of them left out"
                raise UserError(f"{self._owner}: epoch {self.epoch} has {held}: it needs one to train on, and no more")
            self._order = [*map(int, found)]
        return self._order

    def _are_tasks(self, found: Sequence[Any]) -> bool:
        if set(map(type, found)) == {int}:  # a million of them in a tenth of a second
            return bool(min(found) >= 0 and max(found) < self.size)
        return all(map(self._is_task, found))

    def _is_task(self, index: object) -> bool:
        return isinstance(index, int | np.integer) and not isinstance(index, bool) and 0 <= int(index) < self.size

    @property
    def _owner(self) -> str:
        return f"{ORDER} {self.name!r}"

    @property
    def progress(self) -> float:
        """Passes over the tasks so far."""
        return self.epoch + self.position / self.size

    def learn(self, index: int, solved: float, rewards: Sequence[float]) -> None:
        """Tell the order what a task came to: see `Order.learn`. Raises UserError: what it raises."""
        if self.order is not None:
            call_plugin(self._owner, self.order.learn, index, solved, rewards)

    def state(self) -> dict[str, Json]:
        """What `restore` needs. Raises UserError: what a user's order raises, or gives that is not JSON."""
        found: dict[str, Json] = {"epoch": self.epoch, "position": self.position}
        if self.order is not None:
            own = call_plugin(self._owner, self.order.state)
            found["order"] = call_plugin(f"{self._owner}: its state", lambda: loads(dumps(own)))
            found["left_out"] = sorted(self.excluded)  # those that were drawn: what comes next depends on them
        return found

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue at the position of `state`, from `state()` of a sampler of the same size, seed and order. Raises
        UserError: what the order raises."""
        self.epoch, self.position, self._order = int(state["epoch"]), int(state["position"]), None
        self._drawn = self.position > 0
        self.excluded |= frozenset(state.get("left_out", ()))
        if self.order is not None and "order" in state:
            call_plugin(self._owner, self.order.restore, state["order"])


def make_sampler(section: DataSection, tasks: Sequence[Task], seed: int) -> TaskSampler:
    """The sampler of a recipe. Raises UserError, one line: an unknown order, or arguments that it does not
    take."""
    name, args = section.order.name, section.order.args
    found = load("orders", name)
    if isinstance(found, type) and issubclass(found, Order):
        made = construct(found, args, f"{ORDER}.args")
        call_plugin(f"{ORDER} {name!r}", made.begin, tasks, seed)
        return TaskSampler(len(tasks), seed, order=made, name=name)
    if isinstance(found, type) or not callable(found):
        raise UserError(f"{ORDER} {name!r} is {type(found).__name__}; expected a function, or an Order class")
    of_epoch = with_arguments(found, 3, args, f"{ORDER}.args")
    return TaskSampler(len(tasks), seed, of_epoch=partial(of_epoch, tasks, seed), name=name)


def restrict(sampler: TaskSampler, section: DataSection, tasks: Sequence[Task]) -> None:
    """Have the sampler pass over the tasks that `data.filter` leaves out. It is asked of each task as its turn comes,
    since tasks may take long to make, of all under `data.epochs`, which wants their number. Raises UserError: which
    task it fails at, or that none is left."""
    if section.filter is None:
        return
    if section.epochs is not None:
        sampler.excluded = filtered(section, tasks)
        return
    sampler.keep = _filter_of(section.filter, tasks)
    try:
        replace(sampler, order=None).draw(1)  # a mistake is said before anything is loaded
    except UserError:
        filtered(section, tasks)  # that none is left, where it is so
        raise


def filtered(section: DataSection, tasks: Sequence[Task]) -> frozenset[int]:
    """The indices of the tasks that `data.filter` leaves out. Raises UserError: which task it fails at, or that
    none is left."""
    if section.filter is None:
        return frozenset()
    keep = _filter_of(section.filter, tasks)
    left_out = frozenset(index for index in range(len(tasks)) if not keep(index))
    if len(left_out) == len(tasks):
        raise UserError(f"{FILTER} {section.filter.name!r} keeps none of the {len(tasks)} tasks")
    return left_out


def _filter_of(section: TaskFilterSection, tasks: Sequence[Task]) -> Callable[[int], bool]:
    owner = f"{FILTER} {section.name!r}"
    function = with_arguments(load("filters", section.name), 1, section.args, f"{FILTER}.args")

    def keep(index: int) -> bool:
        task = tasks[index]
        found = call_plugin(f"{owner}: task {task.id}:", function, task)
        if not isinstance(found, bool | np.bool_):
            raise UserError(f"{owner}: task {task.id}: gave {found!r:.60}, not true or false")
        return bool(found)

    return keep


class CurriculumArgs(BaseModel):
    """Arguments of `curriculum`."""

    model_config = ConfigDict(extra="forbid")

    target: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Success rate of the tasks that are drawn most."""
    width: Annotated[float, Field(gt=0)] = 0.2
    """How far from the target a success rate may lie: the standard deviation of the bell that weights are read from."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Least weight of a task, so that what was too hard is tried again."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of a success rate that stays when it is measured again."""
    rest: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the tasks that are drawn before a task may come again."""
    by: str | None = None
    """A field of the tasks' data, such as a level: tasks with the same value have one success rate. null: each task its
    own."""


class Curriculum(Order):
    """Tasks near a success rate that is measured during training come most; those not measured yet count as on target.

    Each task is drawn with a weight that falls with the distance of its success rate from `target` like a bell, and is
    at least `floor`; it does not come again before a share `rest` of the others came.
    """

    def __init__(self, config: CurriculumArgs) -> None:
        self._config = config

    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        """Sort the tasks by `by`. Raises UserError: a task without this field."""
        self._seed, by = seed, self._config.by
        keys = [str(i) for i in range(len(tasks))] if by is None else [_field(task, by) for task in tasks]
        self._places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self._place = np.array([self._places[key] for key in keys])  # of the success rate of each task
        self._rates = np.full(len(self._places), np.nan)
        self._last = np.full(len(tasks), -1)  # the draw at which each came last

    def draw(self, number: int, left_out: AbstractSet[int]) -> int:
        """The next task: see `Order`."""
        weights = self.weights()
        weights[list(left_out)] = 0
        most = int(self._config.rest * np.count_nonzero(weights))
        resting = (self._last >= 0) & (number - self._last <= most)
        awake = np.where(resting, 0, weights)
        chosen = awake if awake.any() else weights
        index = int(np.random.default_rng((self._seed, number)).choice(len(chosen), p=chosen / chosen.sum()))
        self._last[index] = number
        return index

    def weights(self) -> npt.NDArray[np.float64]:
        """The weight of each task, float64 [tasks]."""
        config = self._config
        rates = np.where(np.isnan(self._rates), config.target, self._rates)
        bell = np.exp(-0.5 * ((rates - config.target) / config.width) ** 2)
        found: npt.NDArray[np.float64] = (config.floor + (1 - config.floor) * bell)[self._place]
        return found

    def learn(self, index: int, solved: float, rewards: Sequence[float]) -> None:
        """Measure the success rate again."""
        place, memory = self._place[index], self._config.memory
        known = self._rates[place]
        self._rates[place] = solved if np.isnan(known) else memory * known + (1 - memory) * solved

    def state(self) -> dict[str, Json]:
        """The success rates that are known, and when each task came last."""
        rates = {key: float(self._rates[place]) for key, place in self._places.items()}
        return {
            "rates": {key: rate for key, rate in rates.items() if not np.isnan(rate)},
            "last": {str(index): int(self._last[index]) for index in np.flatnonzero(self._last >= 0)},
        }

    def restore(self, state: Mapping[str, Json]) -> None:
        """Go on from `state`. Raises UserError: it is of other tasks."""
        for key, rate in state["rates"].items():
            if key not in self._places:
                raise UserError(f"the checkpoint knows the success rate of {key!r}, and no task is of that kind now")
            self._rates[self._places[key]] = float(rate)
        for index, number in state["last"].items():
            self._last[int(index)] = int(number)


def _field(task: Task, by: str) -> str:
    if by not in task.data:
        raise UserError(f"task {task.id} has no field {by!r}, which {ORDER}.args.by names")
    return str(task.data[by])
