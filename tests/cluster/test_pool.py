"""Which machines can hold which workers, and what is said where they cannot. Real pools: test_cluster_nodes."""

import pytest

from agentrl.cluster import pool as pools
from agentrl.cluster.errors import ClusterError
from agentrl.cluster.pool import Node, ResourcePool, fits


@pytest.mark.parametrize(
    ("by_node", "places", "fit"),
    [
        ([2], [2], True),
        ([2], [1, 1], False),
        ([1, 1], [2], False),  # each takes a machine of its own
        ([3, 2], [2, 3], True),
        ([3, 3], [2, 9], False),
        ([1], [], False),
    ],
)
def test_what_fits(by_node: list[int], places: list[int], fit: bool) -> None:
    assert fits(by_node, places) is fit


@pytest.mark.parametrize(("workers", "nodes", "by_node"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (3, 1, [3])])
def test_workers_are_spread_evenly(workers: int, nodes: int, by_node: list[int]) -> None:
    assert pools.spread(workers, nodes) == by_node


@pytest.mark.parametrize(("workers", "nodes"), [(0, 1), (1, 2), (2, 0)])
def test_numbers_that_make_no_sense(workers: int, nodes: int) -> None:
    with pytest.raises(ClusterError, match=f"{workers} workers cannot lie on {nodes} nodes"):
        ResourcePool(workers, nodes)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    found = [
        Node("10.0.0.1", {"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}),
        Node("10.0.0.2", {"CPU": 8.0}, {"CPU": 1.0}),
    ]
    monkeypatch.setattr(pools, "cluster_nodes", lambda: found)
    return found


def test_what_no_machine_has_is_refused_at_once(machines: list[Node]) -> None:
    with pytest.raises(ClusterError) as caught:
        ResourcePool(8, gpu=True, patience=1000)
    assert str(caught.value) == (
        "needed: one node with 8 CPUs and 8 GPUs; there: node 10.0.0.1 with 8 CPUs and 4 GPUs; "
        "node 10.0.0.2 with 8 CPUs. "
        "Lower cluster.workers (or cluster.nodes, cluster.gpus), or add machines to the cluster"
    )


def test_gpus_count_with_the_cpus_beside_them(machines: list[Node]) -> None:
    machines[0].total["CPU"] = 2.0
    with pytest.raises(ClusterError, match="needed: one node with 3 CPUs and 3 GPUs; there: "):
        ResourcePool(3, gpu=True)


def test_machines_that_are_too_few(machines: list[Node]) -> None:
    with pytest.raises(ClusterError, match="needed: 3 nodes with 1 CPU each; there: "):
        ResourcePool(3, nodes=3)


def test_what_others_use_is_refused_after_a_while(machines: list[Node]) -> None:
    with pytest.raises(ClusterError, match=r"needed: 2 nodes with 2 CPUs each; free: .*10\.0\.0\.2 with 1 CPU\. "):
        ResourcePool(4, nodes=2, patience=0.1)
