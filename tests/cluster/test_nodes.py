"""An existing cluster of two Ray nodes, joined by its address: it is used, and left as it was."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cluster_help import STORE, Probe
from processes import alive, command, descendants, gone, until
from warm_ray import COMMAND

from agentrl.cluster.errors import ClusterError, WorkerLost
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pool import ResourcePool
from agentrl.cluster.session import GRACE_SECONDS, Session
from agentrl.process_tree import ProcessTree

pytestmark = pytest.mark.ray
START = [*COMMAND, "start", "--block", "--disable-usage-stats", "--include-log-monitor=false"]
SECONDS = 180.0


@contextmanager
def node(folder: Path, *arguments: str) -> Iterator[ProcessTree]:
    """A machine of a cluster, as `ray start` makes it."""
    environment = {**os.environ, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "start.log").open("wb") as log:
        command = [*START, f"--object-store-memory={STORE}", *arguments]
        tree = ProcessTree(command, log, environment, grace=GRACE_SECONDS, folder=folder)
    try:
        yield tree
    finally:
        tree.end()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two machines with two CPUs each."""
    with ExitStack() as stack:
        folders = [Path(tempfile.mkdtemp(prefix="agentrl-test-", dir="/tmp")) for _ in range(2)]
        for folder in folders:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        head = (
            "--head",
            "--port=0",
            "--include-dashboard=false",
            "--no-monitor",
            "--num-cpus=2",
            f"--temp-dir={folders[0]}",
        )
        stack.enter_context(node(folders[0], *head))
        said = folders[0] / "ray_current_cluster"
        until(lambda: said.is_file() and said.read_text().strip())
        address = said.read_text().strip()
        stack.enter_context(node(folders[1], f"--address={address}", "--num-cpus=2"))
        log = folders[1] / "start.log"
        until(lambda: "Ray runtime started" in log.read_text())
        yield address


@pytest.fixture
def session(cluster: str) -> Iterator[Session]:
    with Session(address=cluster) as session:
        yield session


def test_workers_over_both_nodes(session: Session, tmp_path: Path) -> None:
    with (
        ResourcePool(4, nodes=2) as pool,
        WorkerGroup(pool, Probe, name="probe", logs=tmp_path, collective=True) as group,
    ):
        ids = [process.node_id for process in group.workers]
        assert ids[0] == ids[1] != ids[2] == ids[3]
        told = group.environment()
        assert [(env["RANK"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) for env in told] == [
            ("0", "0", "2"),
            ("1", "1", "2"),
            ("2", "0", "2"),
            ("3", "1", "2"),
        ]
        assert {env["MASTER_ADDR"] for env in told} == {group.workers[0].node}
        assert group.total() == [10.0] * 4
        with pytest.raises(
            ClusterError, match=r"needed: one node with 1 CPU; free: node .* with 0 CPUs; node .* with 0"
        ):
            ResourcePool(1, patience=0.5)
        with pytest.raises(WorkerLost, match=r"worker 3 .* died in 'end'.*probe_3\.log: .*the last thing it said"):
            group.end("SIGKILL", 3)
        assert gone([process.pid for process in group.workers])


def test_one_node_cannot_hold_what_two_can(session: Session) -> None:
    with pytest.raises(
        ClusterError, match=r"needed: one node with 3 CPUs; there: node .* with 2 CPUs; node .*2 CPUs\."
    ):
        ResourcePool(3)
    with pytest.raises(ClusterError, match=r"needed: 3 nodes with 1 CPU each; there: "):
        ResourcePool(3, nodes=3)


def test_a_cluster_is_left_as_it_was(cluster: str, tmp_path: Path) -> None:
    import ray

    with Session(address=cluster), ResourcePool(3, nodes=2) as pool:
        assert pool.by_node == [2, 1]
        group = WorkerGroup(pool, Probe, name="probe", logs=tmp_path)
        pids = [process.pid for process in group.workers]
        assert all(map(alive, pids))
    assert gone(pids)  # the session ended without a word from the group
    with Session(address=cluster):
        until(lambda: ray.available_resources().get("CPU") == 4.0)
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"^no Ray cluster at '127\.0\.0\.1:9': .*refused; start one"):
        Session(address="127.0.0.1:9")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:10")
    with pytest.raises(ClusterError, match=r"^no Ray cluster at '127\.0\.0\.1:10': "):
        Session(address="auto")


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ClusterError, match="is 'auto' or HOST:PORT of a Ray head"):
        Session(address=address)


def test_ray_that_ends_in_mid_run(tmp_path: Path) -> None:
    with Session(cpus=1, object_store=STORE) as session, ResourcePool(1) as pool:
        group = WorkerGroup(pool, Probe, name="probe", logs=tmp_path)
        call = group.slow(600)
        ours = [process for process in descendants() if str(session.folder) in command(process)]
        next(process for process in ours if "raylet_socket_name" in command(process)).kill()
        with pytest.raises(WorkerLost, match=r"worker 0 .* died in 'slow': Ray (itself has ended|has lost touch)"):
            call.result()
        until(lambda: not session.alive)
    assert not session.folder.exists()
    assert gone([process.pid for process in ours])
