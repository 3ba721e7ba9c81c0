"""An existing cluster of two Ray nodes, joined by its address: it is used, and left as it was."""

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cluster_help import STORE, Holder, Probe
from paths import RECIPES
from processes import alive, gone, until
from warm_ray import COMMAND

from agentrl.checkpoint.run_folder import RunFolder
from agentrl.cluster.errors import ClusterError, WorkerLost
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pool import Node, ResourcePool, cluster_nodes, own_id
from agentrl.cluster.session import GRACE_SECONDS, Session
from agentrl.containment.process_tree import ProcessTree
from agentrl.engine.servers.remote import RemoteNodes, RemoteServer, shared_places
from agentrl.engine.sglang.command import SglangPlan
from agentrl.engine.vllm.command import VllmPlan
from agentrl.errors import UserError
from agentrl.training.run import train
from agentrl.weights.request import ServerRank, cpu_place

pytestmark = pytest.mark.ray
START = [*COMMAND, "start", "--block", "--disable-usage-stats", "--include-log-monitor=false"]
SECONDS = 180.0
START_SECONDS = 60.0


@contextmanager
def node(folder: Path, *arguments: str) -> Iterator[None]:
    """A machine of a cluster, as `ray start` makes it. Raises RuntimeError with its log if it does not come up."""
    environment = {**os.environ, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [*START, f"--object-store-memory={STORE}", *arguments]
    log = folder / "start.log"
    with log.open("wb") as written:
        tree = ProcessTree(command, written, environment, grace=GRACE_SECONDS, folder=folder)
    try:
        end = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in log.read_bytes():
            if not tree.running or time.monotonic() > end:
                raise RuntimeError(f"no node was started by {' '.join(command)}:\n{log.read_text()}")
            time.sleep(0.05)
        yield
    finally:
        tree.end()


@contextmanager
def two_nodes() -> Iterator[str]:
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
        yield address


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Of `two_nodes`, which Ray does not always start while tests beside this one start theirs: three tries."""
    with ExitStack() as stack:
        for left in (2, 1, 0):
            try:
                address = stack.enter_context(two_nodes())
                break
            except (RuntimeError, TimeoutError):
                if not left:
                    raise
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


SERVES = """
import http.server, os, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers.get("Authorization") else 401)
        self.end_headers()
    def log_message(self, *args):
        pass
print(os.environ.get("CUDA_VISIBLE_DEVICES"), "are its GPUs", flush=True)
print("serving as", os.getpid(), flush=True)
address = sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(address, Healthy).serve_forever()
"""


def served_by(log: Path) -> int:
    """The process ID that the last server said."""
    return int(log.read_text().rpartition("serving as ")[2].split()[0])


async def test_servers_on_another_machine(cluster: str, tmp_path: Path) -> None:
    import ray

    plan = SglangPlan((sys.executable, "-c", SERVES), "model", "float32", {}, 1, 1, 1, cpu=True, key="secret")
    with Session(address=cluster):
        nodes = RemoteNodes(cluster, servers=2, nodes=1, ranks=1)
        servers = [RemoteServer(nodes, plan, i, tmp_path / f"server_{i}.log") for i in range(2)]
        assert not any(server.running for server in servers)
        await asyncio.gather(*(server.start(SECONDS, lambda line: None) for server in servers))
        here, pids = ray.get_runtime_context().get_node_id(), [served_by(server.log) for server in servers]
        assert {node.id == here: node.free.get("CPU", 0.0) for node in cluster_nodes()} == {True: 2.0, False: 0.0}
        assert [alive(pid) and server.running for pid, server in zip(pids, servers, strict=True)] == [True, True]
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: not servers[0].running)
        assert servers[0].reason() == f"the command ended with exit code -9 (log: {tmp_path}/server_0.log)"
        (tmp_path / "run").mkdir()
        servers[1].move_log(tmp_path / "run" / "server.log")
        assert servers[1].log == tmp_path / "run" / "server.log"
        await servers[0].stop()
        await servers[0].start(SECONDS, lambda line: None)
        pids.append(served_by(servers[0].log))
        assert servers[0].running
        assert pids[2] != pids[0]
        with pytest.raises(UserError, match=r"remote_nodes: needed: one node with 1 CPU, other than this one; free: "):
            RemoteNodes(cluster, servers=1, nodes=1, ranks=1)
        await servers[0].stop()
        servers[1].kill()
        until(lambda: gone(pids))
        assert not any(server.running for server in servers)
        nodes.close()
        until(lambda: ray.available_resources().get("CPU") == 4.0)


async def test_a_server_on_another_machine_with_gpus(cluster: str, tmp_path: Path) -> None:
    """It gets as many as it has ranks; a machine whose GPUs are shared by fraction is refused."""
    import ray

    flags = {"tp-size": 2}
    plan = SglangPlan((sys.executable, "-c", SERVES), "model", "float32", flags, 1, 1, 1, cpu=True, key="secret")
    with node(tmp_path, f"--address={cluster}", "--num-cpus=2", "--num-gpus=3"), Session(address=cluster):
        until(lambda: 3.0 in [node.total.get("GPU") for node in cluster_nodes()])
        half = ray.remote(num_gpus=0.5, num_cpus=0)(Holder).remote()
        ray.get(half.ready.remote())
        with pytest.raises(UserError, match=r"2\.5 GPUs of .* are shared by fraction"):
            RemoteNodes(cluster, servers=1, nodes=1, ranks=2)
        ray.kill(half)
        until(lambda: ray.available_resources().get("GPU") == 3.0)
        with pytest.raises(UserError, match=r"one node with 2 CPUs and 4 GPUs, other than this one; there: node"):
            RemoteNodes(cluster, servers=2, nodes=1, ranks=2)
        nodes = RemoteNodes(cluster, servers=1, nodes=1, ranks=2)
        server = RemoteServer(nodes, plan, 0, tmp_path / "server.log")
        await server.start(SECONDS, lambda line: None)
        said = server.log.read_text()
        assert "--tp-size 2 --base-gpu-id 0" in said
        assert re.search(r"^\d,\d are its GPUs", said, re.M)
        await server.stop()
        nodes.close()


async def test_servers_share_the_gpus_of_workers_on_every_machine(cluster: str, tmp_path: Path) -> None:
    """Nothing is reserved for them: each has its GPUs by number, and is known by Ray's name of its machine."""
    flags = {"tp-size": 2}
    plan = SglangPlan((sys.executable, "-c", SERVES), "model", "float32", flags, 1, 1, 1, cpu=True, key="secret")
    with node(tmp_path, f"--address={cluster}", "--num-cpus=2", "--num-gpus=4"), Session(address=cluster):
        until(lambda: 4.0 in [node.total.get("GPU") for node in cluster_nodes()])
        with pytest.raises(UserError, match=r"with GPUs, of which there are 1: set remote_nodes"):
            RemoteNodes(cluster, servers=2, nodes=2, ranks=2, shared=True)
        with pytest.raises(UserError, match=r"3 servers of 2 GPUs do not fit node .*, which has 4"):
            RemoteNodes(cluster, servers=3, nodes=1, ranks=2, shared=True)
        (there,) = [node.id for node in cluster_nodes() if node.total.get("GPU") == 4.0]
        with ResourcePool(2, gpu=True, each=2):  # the workers'
            nodes = RemoteNodes(cluster, servers=2, nodes=1, ranks=2, shared=True)
            servers = [RemoteServer(nodes, plan, i, tmp_path / f"server_{i}.log") for i in range(2)]
            await asyncio.gather(*(server.start(SECONDS, lambda line: None) for server in servers))
            places = [tuple(ServerRank(there, gpu) for gpu in pair) for pair in ("01", "23")]
            assert [server.places for server in servers] == places
            for server, first in zip(servers, (0, 2), strict=True):
                assert re.search(rf"--base-gpu-id {first}\b", server.log.read_text())
            os.kill(served_by(servers[1].log), signal.SIGKILL)
            until(lambda: not servers[1].running)
            await servers[1].stop()
            await servers[1].start(SECONDS, lambda line: None)
            assert servers[1].places == places[1]
            await asyncio.gather(*(server.stop() for server in servers))
            nodes.close()


async def test_a_server_over_two_machines(cluster: str, tmp_path: Path) -> None:
    """Its parts meet at the first one's machine; where one ends, the server has."""
    plan = SglangPlan(
        (sys.executable, "-c", SERVES), "model", "float32", {"tp-size": 4, "nnodes": 2}, 1, 1, 1, cpu=True, key="secret"
    )
    with node(tmp_path, f"--address={cluster}", "--num-cpus=2"), Session(address=cluster):
        until(lambda: len(cluster_nodes()) == 3)
        nodes = RemoteNodes(cluster, servers=2, nodes=2, ranks=2, parts=2)
        servers = [RemoteServer(nodes, plan, i, tmp_path / f"server_{i}.log") for i in range(2)]
        await asyncio.gather(*(server.start(SECONDS, lambda line: None) for server in servers))
        logs = [[server.log, server.log.with_stem(f"{server.log.stem}_node_1")] for server in servers]
        flags = re.compile(r"--(?:nnodes|node-rank|dist-init-addr) (\S+)")
        found = [[flags.findall(log.read_text()) for log in of] for of in logs]
        for (first, second), server in zip(found, servers, strict=True):
            assert [first[:2], second[:2]] == [["2", "0"], ["2", "1"]]
            assert first[2] == second[2]
            assert server.running
        assert found[0][0][2] != found[1][0][2]
        pids = [served_by(log) for of in logs for log in of]
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: not servers[0].running)
        assert servers[1].running
        assert servers[0].reason() == f"the command ended with exit code -9 (log: {tmp_path}/server_0_node_1.log)"
        await servers[0].stop()
        until(lambda: gone(pids[:2]))
        await servers[0].start(SECONDS, lambda line: None)
        assert servers[0].running
        (tmp_path / "run").mkdir()
        servers[1].move_log(tmp_path / "run" / "sglang_1.log")
        assert (tmp_path / "run" / "sglang_1_node_1.log").exists()
        await asyncio.gather(*(server.stop() for server in servers))
        until(lambda: gone(pids))
        nodes.close()


async def test_a_part_that_answers_nothing_is_a_part_of_its_server(cluster: str, tmp_path: Path) -> None:
    """vLLM's parts beside the first serve nothing: one is there as long as its process is."""
    joined = tmp_path / "joined"
    silent = (
        f"import os, sys, time\nif '--headless' in sys.argv: {{}}\n"
        f"while not os.path.exists({str(joined)!r}): time.sleep(0.05)\n{SERVES}"
    )
    flags = {"tensor-parallel-size": 2, "nnodes": 2}
    waits = f"print('serving as', os.getpid(), flush=True); open({str(joined)!r}, 'w'); time.sleep(600)"
    ends = "sys.exit('Error: no room')"
    plans = [
        VllmPlan((sys.executable, "-c", silent.format(what)), "m", "float32", flags, 1, 1, 1, cpu=True, key="k")
        for what in (waits, ends)
    ]
    with Session(address=cluster):
        nodes = RemoteNodes(cluster, servers=1, nodes=2, ranks=2, shared=True, parts=2)
        server = RemoteServer(nodes, plans[0], 0, tmp_path / "server.log")
        await server.start(SECONDS, lambda line: None)
        assert server.running
        said = [tmp_path / name for name in ("server.log", "server_node_1.log")]
        meetings = [re.search(r"--master-addr (\S+) --master-port (\d+)", log.read_text()) for log in said]
        assert len({meeting and meeting.groups() for meeting in meetings}) == 1
        os.kill(served_by(said[1]), signal.SIGKILL)
        until(lambda: not server.running)
        assert server.reason() == f"the command ended with exit code -9 (log: {said[1]})"
        await server.stop()
        joined.unlink()
        with pytest.raises(UserError, match=r"Error: no room \(log: .*_node_1\.log\), on another machine"):
            await RemoteServer(nodes, plans[1], 0, tmp_path / "server.log").start(SECONDS, lambda line: None)
        nodes.close()


async def test_servers_over_two_machines_share_them_with_workers(cluster: str, tmp_path: Path) -> None:
    """Each has a rank on each machine, at a place of its own, and with it a worker that feeds it."""
    flags = {"tp-size": 2, "nnodes": 2}
    plan = SglangPlan((sys.executable, "-c", SERVES), "model", "float32", flags, 1, 1, 1, cpu=True, key="secret")
    with Session(address=cluster), ResourcePool(4, nodes=2):  # the workers'
        nodes = RemoteNodes(cluster, servers=2, nodes=2, ranks=2, shared=True, parts=2)
        servers = [RemoteServer(nodes, plan, i, tmp_path / f"server_{i}.log") for i in range(2)]
        await asyncio.gather(*(server.start(SECONDS, lambda line: None) for server in servers))
        machines = sorted((node.id for node in cluster_nodes()), key=lambda name: name != own_id())
        for i, server in enumerate(servers):
            assert server.places == tuple(ServerRank(machine, cpu_place(i)) for machine in machines)
            assert "--node-rank 1" in server.log.with_stem(f"server_{i}_node_1").read_text()
        await asyncio.gather(*(server.stop() for server in servers))
        nodes.close()


def test_servers_over_machines_take_the_lowest_gpus_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Node(name, {"GPU": 4.0}, {}, name) for name in "dcba"]
    monkeypatch.setattr("agentrl.engine.servers.remote.cluster_nodes", lambda: found)
    monkeypatch.setattr("agentrl.engine.servers.remote.own_id", lambda: "c")
    places = shared_places(servers=4, nodes=4, ranks=4, parts=2)
    lower, upper = (0, 1), (2, 3)
    assert places == [
        [(name, gpus, False) for name in pair] for pair in ("ca", "bd") for gpus in (lower, upper)
    ]  # fmt: skip
    with pytest.raises(ClusterError, match="2 servers of 4 GPUs do not fit node c, which has 4"):
        shared_places(servers=4, nodes=4, ranks=8, parts=2)


async def test_a_server_that_does_not_start_on_another_machine(cluster: str, tmp_path: Path) -> None:
    plan = SglangPlan(
        (sys.executable, "-c", "exit('Error: no room')"), "model", "float32", {}, 1, 1, 1, cpu=True, key="secret"
    )
    with Session(address=cluster):
        nodes = RemoteNodes(cluster, servers=1, nodes=1, ranks=1)
        with pytest.raises(UserError, match=r"ended as it started: Error: no room \(log: .*\), on another machine"):
            await RemoteServer(nodes, plan, 0, tmp_path / "server.log").start(SECONDS, lambda line: None)
        nodes.close()


SHARED = [
    "engine.args.remote_nodes=2", "engine.args.servers=2", "engine.sleep=true", "cluster.nodes=2", "cluster.workers=2",
]  # fmt: skip
OVER_BOTH = ["engine.args={remote_nodes: 2, flags: {tp-size: 2, nnodes: 2}}", *SHARED[2:]]
VLLM_OVER_BOTH = [
    "engine.name=vllm",
    "engine.args={remote_nodes: 2, flags: {tensor-parallel-size: 2, nnodes: 2}, weights: from_disk}",
    *SHARED[2:],
]


@pytest.mark.long
@pytest.mark.usefixtures("sglang_venv")
@pytest.mark.parametrize(
    "where",
    [
        ["engine.args.remote_nodes=1", "cluster.workers=1"],
        SHARED,
        OVER_BOTH,
    ],
    ids=["one of them", "all, shared with workers", "one server over all, shared with workers"],
)
def test_a_run_trains_with_servers_on_machines(
    where: list[str], cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(cluster, tmp_path, *where)
    said = " ".join(capsys.readouterr().out.split())
    assert ("weights: from_tensor (each rank of a server shares" in said) == (where is OVER_BOTH)
    assert "max-running-requests" in (tmp_path / "run" / "sglang_0.log").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("sglang_venv")
def test_a_run_trains_with_a_server_over_two_machines(cluster: str, tmp_path: Path) -> None:
    with node(tmp_path, f"--address={cluster}", "--num-cpus=2"):
        with Session(address=cluster):
            until(lambda: len(cluster_nodes()) == 3)
        trained(cluster, tmp_path, "cluster.workers=1", "engine.args={remote_nodes: 2, flags: {tp-size: 2, nnodes: 2}}")
        assert "--node-rank 1" in (tmp_path / "run" / "sglang_0_node_1.log").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("vllm_venv")
def test_a_run_trains_with_a_vllm_server_over_two_machines(cluster: str, tmp_path: Path) -> None:
    trained(cluster, tmp_path, *VLLM_OVER_BOTH)
    assert "--headless" in (tmp_path / "run" / "vllm_0_node_1.log").read_text()


def trained(cluster: str, folder: Path, *overrides: str) -> None:
    """Train two steps on the cluster, which sample with the trainer's weights."""
    import ray

    result = train(
        str(RECIPES / "gsm8k_tool.yaml"),
        overrides=[
            "engine.name=sglang", *overrides, f"cluster.address={cluster}",
            "train.steps=2", "rollout.tasks=4", "rollout.n=4", "train.lr=1e-3", "eval.every=0", "eval.splits=[]",
            "train.threads=1", f"output={folder / 'run'}",
        ],
    )  # fmt: skip
    rows = RunFolder(result.folder).metrics()
    assert [row["rollout/failed"] for row in rows[1:]] == [0, 0]
    assert max(row.get("mismatch/logprob_max", 0.0) for row in rows[1:]) < 1e-3
    assert not ray.is_initialized()
