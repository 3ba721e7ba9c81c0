"""`ResourcePool`: the CPUs or GPUs of n workers over one or several nodes, held until `release`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from agentrl.cluster.errors import ClusterError
from agentrl.cluster.session import Session

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Resources = dict[str, float]
POLL_SECONDS = 0.2
NODE_SHARE = 0.001
"""Of the resource with a node's name, of which each node has 1: asking for it says where."""
_NODE_ID = "ray.io/node-id"  # label that Ray gives each machine
RESERVE_SECONDS = 30.0
"""Minimum time for Ray to reserve what it reported as free."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    address: str
    """Its address, as Ray knows it."""
    total: Resources
    """All its resources, by Ray's names."""
    free: Resources
    """Those not reserved."""
    id: str = ""
    """Ray's name of it."""


@dataclass(frozen=True)
class Home:
    """What the table of a run's devices says about the controller's machine, whose GPUs are not the workers' alone."""

    address: str
    """Its address, as Ray knows it."""
    workers: frozenset[str] | None = None
    """Names of the GPUs that workers there are to have, and the first ones are there; None: any but `engine`."""
    engine: frozenset[str] = frozenset()
    """Names of GPUs of the engine that are not the workers' too; they are reserved beside `workers`."""

    @property
    def here(self) -> bool:
        """Whether the first workers lie there."""
        return self.workers is not None


class ResourcePool:
    """Slots for `workers` workers, spread evenly over `nodes` machines (the first ones hold one more if that does not
    divide).

    gpu: each worker gets `each` GPUs of its own, beside its CPU. home: the controller's machine and its GPUs, where an
    engine has some of them. elsewhere: on other machines than the controller's alone. patience: seconds to wait for
    resources that others use; what no machine has is refused at once. Raises ClusterError with what is needed and what
    exists."""

    def __init__(
        self,
        workers: int,
        nodes: int = 1,
        *,
        gpu: bool = False,
        each: int = 1,
        home: Home | None = None,
        elsewhere: bool = False,
        patience: float = 10.0,
    ) -> None:
        if not 1 <= nodes <= workers:
            raise ClusterError(f"{workers} workers cannot lie on {nodes} nodes; each node takes at least one")
        self.workers, self.gpu, self._each, self._home = workers, gpu, each, home
        self._not_on = own_id() if elsewhere else None
        self.by_node = spread(workers, nodes)
        self._held: PlacementGroup | None = None
        self._group: str | None = None
        self._check(lambda node: node.total, "there")
        for address in [home.address] if home is not None else [n.address for n in self._nodes() if elsewhere and gpu]:
            _check_whole(address)
        until = time.monotonic() + patience
        while not self._fits(lambda node: node.free, self._nodes()):
            if time.monotonic() > until:
                self._check(lambda node: node.free, "free")
            time.sleep(POLL_SECONDS)
        self._hold(max(patience, RESERVE_SECONDS))

    def __enter__(self) -> "ResourcePool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def needs(self, workers: int = 1) -> Resources:
        """The resources that `workers` workers take of one node."""
        return {"CPU": float(workers), **({"GPU": float(workers * self._each)} if self.gpu else {})}

    def release(self) -> None:
        """Release the resources. Close the groups in the pool first."""
        import ray

        if self._held is not None and Session.reachable():
            ray.util.remove_placement_group(self._held)
        self._held = None

    def take(self, group: str) -> "ResourcePool":
        """Claim the slots for a group; a pool holds one at a time. Roles that share processes are objects of one
        worker."""
        if self._group is not None:
            raise ClusterError(f"the pool holds the group {self._group!r}; make another pool for {group!r}")
        self._group = group
        return self

    def give(self) -> None:
        """Free the slots for another group, after this one has ended."""
        self._group = None

    def place(self, node: int) -> dict[str, object]:
        """Ray's options for an actor on the pool's node number `node`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._held is None:
            raise ClusterError("the pool was released; make another one")
        needs = self.needs()
        return {
            "num_cpus": needs["CPU"],
            "num_gpus": needs.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._held, placement_group_bundle_index=node),
        }

    def _hold(self, timeout: float) -> None:
        """Reserve one bundle a node: all of them or none."""
        import ray

        bundles = [self.needs(workers) for workers in self.by_node]
        if self._home is not None and self._home.here:
            bundles[0] = self._first()
        self._held = ray.util.placement_group(
            bundles,
            strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK",
            bundle_label_selector=[{_NODE_ID: f"!{self._not_on}"}] * len(bundles) if self._not_on else None,
        )
        if not self._held.wait(timeout):
            self.release()
            self._check(lambda node: node.free, "free")
            raise ClusterError(f"Ray did not set {self._needed()} aside within {timeout:.0f} seconds; see `ray status`")

    def _first(self) -> Resources:
        """The resources that are reserved on the controller's machine: with those of the engine, so that nobody
        else takes them, and its name, so that the first bundle lies there."""
        assert self._home is not None
        needs = self.needs(self.by_node[0])
        needs["GPU"] = needs.get("GPU", 0.0) + len(self._home.engine)
        return needs | {f"node:{self._home.address}": NODE_SHARE}

    def check_devices(self, given: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Raise ClusterError where Ray gave workers other GPUs of the controller's machine than the run's table of
        devices says: an engine has those, or would take others'. given: node's address and GPUs' names, by rank."""
        home = self._home
        if home is None:
            return
        names = {name for node, gpus in given if node == home.address for name in gpus}
        if (home.workers is not None and names != home.workers) or names & home.engine:
            planned = "any" if home.workers is None else ", ".join(sorted(home.workers))
            raise ClusterError(
                f"Ray gave the workers the GPUs {', '.join(sorted(names))} of {home.address}, where the run's table "
                f"says {planned}, and {', '.join(sorted(home.engine)) or 'the same'} for the engine: something else "
                "holds GPUs of this machine; free them, or start the servers yourself (engine.args.urls)"
            )

    def _fits(self, has: Callable[[Node], Resources], nodes: list[Node]) -> bool:
        """Whether these nodes have what is needed."""
        by_node = self.by_node
        if self._home is not None and self._home.here:
            first = [node for node in nodes if node.address == self._home.address]
            if not first or any(has(first[0]).get(name, 0.0) < amount for name, amount in self._first().items()):
                return False
            by_node, nodes = by_node[1:], [node for node in nodes if node not in first]
        return fits(by_node, [self._places(has(node)) for node in nodes])

    def _places(self, resources: Resources) -> int:
        """How many workers a node can hold."""
        return int(min(resources.get(name, 0.0) / amount for name, amount in self.needs().items()))

    def _nodes(self) -> list[Node]:
        """The machines that workers may lie on."""
        return [node for node in cluster_nodes() if node.id != self._not_on]

    def _check(self, has: Callable[[Node], Resources], word: str) -> None:
        nodes = self._nodes()
        if not self._fits(has, nodes):
            lower = "cluster.workers (or cluster.nodes, cluster.gpus)"
            lower = "engine.args.servers (or engine.args.remote_nodes)" if self._not_on else lower
            found = "; ".join(f"node {node.address} with {_amounts(has(node))}" for node in nodes) or "no other node"
            raise ClusterError(
                f"needed: {self._needed()}; {word}: {found}. Lower {lower}, or add machines to the cluster"
            )

    def _needed(self) -> str:
        most = _amounts(self.needs(self.by_node[0]))
        needed = f"one node with {most}" if len(self.by_node) == 1 else f"{len(self.by_node)} nodes with {most} each"
        if self._home is not None and self._home.here:
            needed += f", the first of them {self._home.address}"
            needed += f" with {len(self._home.engine)} GPUs more for the engine" if self._home.engine else ""
        return f"{needed}, other than this one" if self._not_on else needed


def spread(workers: int, nodes: int) -> list[int]:
    """The number of workers on each node."""
    return [workers // nodes + (node < workers % nodes) for node in range(nodes)]


def fits(by_node: list[int], places: list[int]) -> bool:
    """Whether each number of workers fits on a node of its own. places: the slots of each node."""
    return len(by_node) <= len(places) and all(
        need <= has for need, has in zip(sorted(by_node, reverse=True), sorted(places, reverse=True), strict=False)
    )


def cluster_nodes() -> list[Node]:
    """The machines that are alive."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Node(node["NodeManagerAddress"], dict(node["Resources"]), dict(free.get(node["NodeID"], {})), node["NodeID"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def own_address() -> str:
    """This machine's address, as Ray knows it."""
    import ray

    return str(ray.util.get_node_ip_address())


def own_id() -> str:
    """Ray's name of this machine."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _check_whole(address: str) -> None:
    """Raise ClusterError where a machine's GPUs are shared by fraction: a server takes whole ones."""
    found = [node for node in cluster_nodes() if node.address == address]
    for amount in (amount for node in found for amount in (node.total.get("GPU", 0.0), node.free.get("GPU", 0.0))):
        if amount != int(amount):
            raise ClusterError(
                f"{amount:g} GPUs of {address} are shared by fraction, and the run's engine takes whole ones there: "
                "end what shares them, or start the servers yourself (engine.args.urls)"
            )


def _amounts(resources: Resources) -> str:
    return " and ".join(
        f"{resources.get(name, 0.0):g} {name}{'s' * (resources.get(name, 0.0) != 1)}"
        for name in ("CPU", "GPU")
        if name in resources or name == "CPU"
    )
