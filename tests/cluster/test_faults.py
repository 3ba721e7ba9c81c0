"""Workers that are killed, crash, hang or fail while others wait, a controller that is killed, Ray that cannot start:
one line that names what happened, and nothing left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_help import STORE, Probe
from paths import SUPPORT
from processes import alive, descendants, gone, until

from agentrl.cluster.errors import ClusterError, WorkerLost
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pool import ResourcePool
from agentrl.cluster.session import Session
from agentrl.errors import UserError

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(cpus=3, object_store=STORE) as session:
        yield session


@pytest.fixture
def group(session: Session, tmp_path: Path) -> Iterator[WorkerGroup]:
    with ResourcePool(2) as pool:
        group = WorkerGroup(pool, Probe, name="probe", logs=tmp_path, timeout=120)
        yield group
        group.close()


@pytest.fixture
def collective(session: Session, tmp_path: Path) -> Iterator[WorkerGroup]:
    with ResourcePool(2) as pool:
        group = WorkerGroup(pool, Probe, name="probe", logs=tmp_path, timeout=120, collective=True)
        yield group
        group.close()


def test_a_worker_killed_while_the_other_waits_for_it(collective: WorkerGroup, tmp_path: Path) -> None:
    first, second = collective.workers
    assert collective.total() == [3.0, 3.0]
    with pytest.raises(WorkerLost) as caught:
        collective.end("SIGKILL", 1)
    said = str(caught.value)
    assert said.startswith(f"worker 1 of 'probe' (pid {second.pid}, node {second.node}) died in 'end': it was killed")
    assert said.endswith(f"the end of {tmp_path}/probe_1.log: worker 1 is made | the last thing it said")
    assert isinstance(caught.value, UserError)
    assert gone([first.pid])  # it hung in the collective
    with pytest.raises(WorkerLost, match=re.escape(said)):
        collective.total()


def test_a_worker_that_crashes_leaves_its_stack(group: WorkerGroup) -> None:
    where = r"it crashed \(Segmentation fault\) at end \(cluster_help\.py:\d+\)[^;]*"  # callers follow: see warm_ray
    with pytest.raises(WorkerLost, match=rf"died in 'end': {where}; .* thing it said$"):
        group.end("SIGSEGV", 0)


def test_a_worker_killed_between_two_calls(group: WorkerGroup) -> None:
    os.kill(group.workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"worker 0 of 'probe' .* died in 'notes'"):
        group.notes()


def test_the_call_that_it_died_in_is_named_whichever_is_waited_for(group: WorkerGroup) -> None:
    import ray

    done, running, queued = group.note.future(1), group.slow(600), group.notes.future()
    ray.wait(list(done._refs), num_returns=2)
    os.kill(group.workers[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"worker 1 of 'probe' .* died in 'slow': it was killed"):
        queued.result()
    with pytest.raises(WorkerLost, match="died in 'slow'"):
        running.result()


def test_a_worker_that_hangs_is_told_from_those_that_wait_for_it(collective: WorkerGroup, tmp_path: Path) -> None:
    collective.total()
    collective.timeout = 3.0
    with pytest.raises(WorkerLost) as caught:
        collective.end("sleep", 1)
    said = str(caught.value)
    assert said.startswith("no answer to 'end' from rank 0, 1 of 'probe' within 3 seconds (cluster.timeout); worker 1")
    assert re.search(
        r"worker 1 of 'probe' \(pid \d+, node [\d.]+\) stands at sleep_long \(cluster_help\.py:\d+\)", said
    )
    assert re.search(r"; worker 0 .* stands at all_reduce ", said)
    assert "in all_reduce" in (tmp_path / "probe_0.log").read_text()
    assert gone([process.pid for process in collective.workers])


def test_a_call_waits_for_those_before_it(group: WorkerGroup) -> None:
    group.timeout = 3.0
    calls = [group.slow(0.8) for _ in range(5)]
    elsewhere = threading.Thread(target=lambda: [call.result() for call in calls[:4]])
    elsewhere.start()
    assert calls[4].result() == [0, 1]  # after four seconds, but never three without an answer
    elsewhere.join()


def test_a_worker_that_makes_progress_is_waited_for(group: WorkerGroup) -> None:
    group.timeout = 2.0
    assert group.works(3.5, 3.0).result() == [0, 1]
    with pytest.raises(WorkerLost, match=r"no answer to 'works' from rank 0, 1 of 'probe' within 2 seconds"):
        group.works(60.0, 1.0).result()


def test_one_that_raises_while_the_other_waits_for_it(group: WorkerGroup) -> None:
    with pytest.raises(UserError, match=r"^rank 1 cannot go on$"):
        group.end("raise", 1)
    with pytest.raises(WorkerLost, match=r"the group 'probe' ended when worker 1 .* failed: rank 1 cannot go on"):
        group.total()


def test_the_kernels_killings_are_counted(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.cluster.post_mortem.oom_kills", lambda: group.workers[0].oom_kills + 1)
    with pytest.raises(WorkerLost, match="the kernel killed a process of its machine since, for memory ran out"):
        group.end("SIGKILL", 0)


CONTROLLER = """
    import os, signal, sys, time
    from pathlib import Path

    sys.path.insert(0, {tests!r})
    from cluster_help import STORE, Probe
    from agentrl.cluster.group import WorkerGroup
    from agentrl.cluster.pool import ResourcePool
    from agentrl.cluster.session import Session

    asked = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    with Session(cpus=2, object_store=STORE) as session, ResourcePool(2) as pool:
        group = WorkerGroup(pool, Probe, name="probe", logs=Path({logs!r}))
        print(session.folder, *(process.pid for process in group.workers), flush=True)
        while len(asked) < 2:
            time.sleep(0.05)
        assert [about["place"][0] for about in group.about()] == [0, 1]
        print("whole", asked, flush=True)
        time.sleep(1000)
"""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of its own, with two workers, in a process group of its own as a terminal makes it."""
    script = textwrap.dedent(CONTROLLER).format(tests=str(SUPPORT), logs=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.communicate()


def begun(controller: "subprocess.Popen[str]") -> tuple[Path, list[int]]:
    """Ray's folder and all processes of a run, once its workers are there."""
    folder, *workers = controller.stdout.readline().split()
    processes = [process.pid for process in descendants(controller.pid)]
    assert {int(pid) for pid in workers} <= set(processes)
    assert len(processes) > 5  # the supervisor, Ray's own, the workers
    assert Path(folder).is_dir()
    return Path(folder), processes


def test_signals_to_the_process_group_leave_the_workers_alone_and_a_kill_leaves_nothing(
    controller: "subprocess.Popen[str]",
) -> None:
    folder, processes = begun(controller)
    shared = set(os.listdir("/dev/shm"))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(controller.pid, number)
    assert controller.stdout.readline().startswith("whole [")  # after a call to the workers
    assert all(map(alive, processes))
    controller.kill()
    assert gone(processes)
    until(lambda: not folder.exists())
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "plasma" in name} == set()
    assert controller.stderr.read() == ""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the files of a Ray go that this test starts; nobody else's do."""
    folder = tempfile.mkdtemp(prefix="t-", dir="/tmp")  # a short path, for sockets lie in it
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had no session yet."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)


def test_ray_that_does_not_start_says_why(unconnected: None, place: Path) -> None:
    with pytest.raises(ClusterError, match=r"^Ray did not start on this machine: .*must be nonnegative") as caught:
        Session(cpus=-1, object_store=STORE)
    assert "\n" not in str(caught.value)
    assert list(place.iterdir()) == []


def test_ray_that_takes_too_long_is_ended(unconnected: None, place: Path) -> None:
    before = set(descendants())
    with pytest.raises(ClusterError, match=r"^Ray did not start on this machine in time: "):
        Session(cpus=1, object_store=STORE, timeout=0.2)
    assert list(place.iterdir()) == []
    assert set(descendants()) <= before


def test_one_session_at_a_time(session: Session) -> None:
    with pytest.raises(ClusterError, match="connected to Ray already"):
        Session(address=session.address)
    assert len(os.listdir(session.folder)) > 0
