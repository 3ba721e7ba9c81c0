"""An order of tasks that goes by what earlier ones came to."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from agentrl.plugins.types import Json, Task


class Order(ABC):
    """Chooses the next task of a run. One object serves a run, made with `data.order.args`.

    Entry-point group `agentrl.orders`. An order that does not depend on results is a function instead: of the tasks,
    the seed and the number of the epoch, to the indices of the tasks in their order.
    """

    @abstractmethod
    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        """Take the tasks to choose from, and `train.seed`; called once, before anything else."""

    @abstractmethod
    def draw(self, number: int, left_out: AbstractSet[int]) -> int:
        """The index of the next task, none of `left_out`. number: of tasks that were drawn before; the
        same again, with one more in `left_out`, where `data.filter` does not keep what was drawn.

        A resumed run must draw what an uninterrupted one would: take random numbers from (seed, number).
        """

    def learn(self, index: int, solved: float, rewards: Sequence[float]) -> None:  # noqa: B027 - a hook with a default
        """Take what a task came to: the share of its samples that the environment calls solved, 0 to 1, and their
        rewards. Called before the step's update, in the order in which the tasks were drawn."""

    def state(self) -> Mapping[str, Json]:
        """What `restore` needs, as JSON; a checkpoint keeps it."""
        return {}

    def restore(self, state: Mapping[str, Json]) -> None:  # noqa: B027 - a hook with a default
        """Go on from what `state` returned."""
