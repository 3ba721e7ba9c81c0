"""`Placement`: one table that says which devices each part of a run gets, made from the recipe before anything starts.

`agentrl check` prints it. Ray's workers and the servers that a run launches both follow it: a Ray that the run starts
is shown the trainer's devices alone; of a cluster that runs already the servers' devices are reserved with the workers'
(`pool.Home`). Two parts share a device only under `engine.sleep`.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from itertools import islice
from typing import Literal

from agentrl.recipe.schema import Recipe

VISIBLE = "CUDA_VISIBLE_DEVICES"
HERE = 0
"""Number of the controller's machine."""
Kind = Literal["trainer", "server", "embedded"]


@dataclass(frozen=True, slots=True)
class Launched:
    """The servers that an engine launches."""

    servers: int = 0
    """How many."""
    elsewhere: int = 0
    """How many are launched on other machines."""
    ranks: int = 1
    """GPUs of each (tensor x pipeline parallelism), which are neighbours."""
    first: int | None = None
    """Device of the first server, where the recipe names it."""
    share: float | None = None
    """Share of a device's memory that a server takes; None: the server finds it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A part of a run, and its devices on one machine."""

    kind: Kind
    """Whether it trains, samples in processes of its own, or samples in the run's own process."""
    part: str
    """Its roles, or the server's number."""
    node: int | None
    """Number of the machine, 0 is this one; None: wherever Ray has room."""
    devices: tuple[int, ...]
    """Numbers of its GPUs, as torch counts those that are visible on the machine; empty: none, or not known before."""
    workers: int = 1
    """Its processes on this machine, or on all where `node` is None."""
    share: float | None = None
    """Share of each device's memory that it takes (servers)."""
    memory: int | None = None
    """Bytes that it is expected to take of each device; None: not known."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes that parts are expected to take of each of their devices; None: not known."""

    actor: int | None = None
    """The actor's workers, with the roles that share their processes."""
    pools: tuple[int | None, ...] = ()
    """The workers of each of `cluster.pools`."""
    weights: int | None = None
    """The policy's weights alone, whole: of an engine that keeps a copy."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The table of a run."""

    rows: tuple[Row, ...]
    """Parts of the run: the trainer's, then the engine's."""
    shared: bool
    """Whether the engine gives its memory back while the trainer works, and so may have the same devices."""

    def devices(self, kind: Kind) -> tuple[int, ...]:
        """The devices of this machine that parts of a kind get, in order."""
        return tuple(sorted({d for row in self.rows if row.kind == kind and row.node == HERE for d in row.devices}))

    @property
    def engine(self) -> tuple[int, ...]:
        """The devices of this machine that the engine gets, in order."""
        return tuple(sorted({*self.devices("server"), *self.devices("embedded")}))

    @property
    def servers(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each server launched here; none, of one on CPUs."""
        return tuple(row.devices for row in self.rows if row.kind == "server" and row.node == HERE)

    @property
    def embedded(self) -> int | None:
        """The device of an engine in this process that has one of its own."""
        return next(iter(self.devices("embedded")), None)

    def lacking(self, here: int) -> list[str]:
        """List, one line each, what keeps the table from this machine with `here` visible GPUs."""
        trainer, engine = self.devices("trainer"), self.engine
        if (both := sorted(set(trainer) & set(engine))) and not self.shared:
            return [
                f"{named(both)} would be both the trainer's and the engine's: give each its own "
                "(engine.args.flags.base-gpu-id, model.device), or share with engine.sleep=true"
            ]
        needed = max((device + 1 for device in (*trainer, *engine)), default=0)
        if needed <= here:
            return []
        how = "which share them" if self.shared else "each has its own"
        parts = f"{len(trainer)} of the trainer, {len(engine)} of the engine, {how}"
        if not trainer or not engine:
            parts = f"all of the {'trainer' if trainer else 'engine'}"
        return [f"needs {needed} GPUs on this machine ({parts}), {here} here"]


def named(devices: Sequence[int]) -> str:
    """Devices in words, such as `GPUs 0-3` or `GPU 5`."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"GPU{'s' if len(devices) > 1 else ''} {text}"


def visible() -> list[str] | None:
    """The names of the GPUs that this process is shown, by number (CUDA_VISIBLE_DEVICES); None: all there are,
    named by their numbers."""
    shown = os.environ.get(VISIBLE)
    return None if shown is None else [name for name in shown.split(",") if name]


def names_of(devices: Sequence[int]) -> list[str]:
    """The names by which CUDA_VISIBLE_DEVICES and Ray know these devices."""
    shown = visible()
    return [shown[d] if shown is not None and d < len(shown) else str(d) for d in devices]


def place(
    recipe: Recipe, launched: Launched, here: int, *, expected: Expected = Expected(), member: bool = False
) -> Placement:
    """The table of a run on this machine with `here` visible GPUs; what it lacks is told by `lacking`.

    The trainer gets the lowest devices, the actor's group first; the engine the next ones, or the same
    with `engine.sleep`. A device that the recipe names (`model.device`, the flag `base-gpu-id`) goes to the part that
    it is named for. member: whether this machine is sure to be one of the cluster at `cluster.address`; otherwise it is
    taken for one if it has the devices.
    """
    shared, own = recipe.engine.sleep, _own_device(recipe, here)
    embedded = recipe.cluster.used and recipe.engine.name == "local" and own is not None
    named_device = own if embedded and not shared and recipe.model.device != "auto" else None
    reserved = set() if named_device is None else {named_device}
    if recipe.cluster.gpus:
        wanted = recipe.cluster.gpus + (0 if shared else launched.servers * launched.ranks + embedded)
        at_home = recipe.cluster.address is None or member or here >= wanted
        rows = _workers(recipe, expected, reserved, at_home)
    elif recipe.cluster.used:
        rows = [Row("trainer", part, HERE, (), workers) for part, workers, _ in _groups(recipe, expected)]
    else:
        part = ", ".join((*recipe.roles, *(("engine local",) if recipe.engine.name == "local" else ())))
        rows = [Row("trainer", part, HERE, () if own is None else (own,), memory=expected.actor)]
    taken = {device for row in rows if row.node == HERE for device in row.devices}
    if embedded and own is not None:
        device = own if shared or reserved else _free(taken, 1)
        rows.append(Row("embedded", "engine local", HERE, (device,), memory=expected.weights))
    return Placement((*rows, *_servers(recipe, launched, here, taken)), shared)


def _own_device(recipe: Recipe, here: int) -> int | None:
    """The GPU that `model.device` stands for in this process; None: it computes on the CPU."""
    kind, _, number = recipe.model.device.partition(":")
    if kind == "auto":
        return 0 if here else None
    return int(number or 0) if kind == "cuda" and (number.isdigit() or not number) else None


def _groups(recipe: Recipe, expected: Expected) -> list[tuple[str, int, int | None]]:
    """(roles, workers, memory) of each group of workers: the actor's, then those apart."""
    cluster, roles = recipe.cluster, list(recipe.roles)
    apart = [(", ".join(pool.roles), pool.workers) for pool in cluster.pools]
    roles = [role for role in roles if all(role not in pool.roles for pool in cluster.pools)]
    memory = (expected.actor, *expected.pools, *(None for _ in cluster.pools))
    return [(*group, size) for group, size in zip([(", ".join(roles), cluster.size), *apart], memory, strict=False)]


def _workers(recipe: Recipe, expected: Expected, reserved: set[int], at_home: bool) -> list[Row]:
    """The rows of workers with a GPU each. Of a cluster that runs already, Ray chooses the machine of groups
    apart, and of all where this machine is not part of it."""
    (part, size, memory), *pools = _groups(recipe, expected)
    cluster, taken = recipe.cluster, set(reserved)
    rows = [Row("trainer", part, None, (), size, memory=memory)]
    if at_home:
        rows = [
            Row(
                "trainer", part, node, _lowest(taken if node == HERE else (), cluster.gpus), cluster.gpus, memory=memory
            )
            for node in range(cluster.nodes)
        ]
        taken.update(rows[0].devices)
    for roles, workers, each in pools:
        known = at_home and cluster.address is None
        devices = _lowest(taken, workers) if known else ()
        taken.update(devices)
        rows.append(Row("trainer", roles, HERE if known else None, devices, workers, memory=each))
    return rows


def _servers(recipe: Recipe, launched: Launched, here: int, taken: set[int]) -> list[Row]:
    """The rows of launched servers. Without a GPU on this machine they run on CPUs, unless the recipe trains on
    GPUs: then they lack them."""
    on_gpus = here > 0 or recipe.cluster.gpus > 0 or recipe.model.device.startswith("cuda")
    rows, ranks = [], launched.ranks
    first = launched.first if launched.first is not None else min(taken, default=0) if recipe.engine.sleep else None
    for i in range(launched.servers):
        devices: tuple[int, ...] = ()
        if on_gpus:
            start = _free(taken, ranks) if first is None else first + i * ranks
            devices = tuple(range(start, start + ranks))
            taken = taken | set(devices)
        part = f"server {i}" + (f" of {ranks} ranks" if ranks > 1 else "")
        rows.append(Row("server", part, HERE, devices, share=launched.share if devices else None))
    if launched.elsewhere:
        where = "the workers' machines" if recipe.engine.sleep else "other machines"
        part = f"{launched.elsewhere} servers on {where}" + (f", of {ranks} ranks" if ranks > 1 else "")
        places = launched.elsewhere * ranks
        rows.append(Row("server", part, None if on_gpus else 1, (), places, launched.share if on_gpus else None))
    return rows


def _lowest(taken: Collection[int], count: int) -> tuple[int, ...]:
    """The lowest devices that are free."""
    return tuple(islice((device for device in count_from() if device not in taken), count))


def _free(taken: set[int], count: int) -> int:
    """The lowest device from which on so many neighbours are free."""
    return next(i for i in count_from() if taken.isdisjoint(range(i, i + count)))
