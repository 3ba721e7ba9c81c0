"""A group of real Ray actors: what each is told, how it is called, what its errors become."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster_help import Probe, Rows, Silent
from processes import gone

from agentrl.cluster.dispatch import register
from agentrl.cluster.errors import ClusterError
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pool import ResourcePool
from agentrl.cluster.session import Session
from agentrl.cluster.worker import Worker
from agentrl.errors import UserError

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def session(ray_address: str) -> Iterator[Session]:
    with Session(ray_address) as session:
        yield session


@pytest.fixture(scope="module")
def group(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    logs = tmp_path_factory.mktemp("logs")
    with (
        ResourcePool(3) as pool,
        WorkerGroup(pool, Probe, "told", name="probe", logs=logs, collective=True) as group,
    ):
        yield group


def test_handlers_of_signals_stay(session: Session) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_workers_know_their_place(group: WorkerGroup) -> None:
    told = group.environment()
    assert [(env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) for env in told] == [
        (str(rank), "3", str(rank), "3") for rank in range(3)
    ]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in told}) == 1
    about = group.about()
    assert [one["place"] for one in about] == [(rank, 3, told[0]["MASTER_ADDR"]) for rank in range(3)]
    assert [one["pid"] for one in about] == [process.pid for process in group.workers]
    assert {one["folder"] for one in about} == {os.getcwd()}
    assert {one["said"] for one in about} == {("told",)}


def test_threads_share_the_cores(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with ResourcePool(1) as pool, WorkerGroup(pool, Probe, name="one", logs=tmp_path) as group:
        told = group.environment()[0]
        assert told["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
        assert told["HF_HUB_OFFLINE"] == "1"
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with ResourcePool(1) as pool, WorkerGroup(pool, Probe, name="two", logs=tmp_path) as group:
        assert group.environment()[0]["OMP_NUM_THREADS"] == "7"


def test_each_has_a_log(group: WorkerGroup) -> None:
    group.square(1.0, rows=Rows(np.arange(4)))
    for rank, log in enumerate(group.logs):
        assert log.name == f"probe_{rank}.log"
        assert f"worker {rank} is made\n" in log.read_text()
    assert "worker 0 has 2 rows" in group.logs[0].read_text()


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_split_of_any_size(group: WorkerGroup, count: int) -> None:
    rows = Rows(np.arange(count, dtype=np.float64))
    assert group.square(2.0, rows).tolist() == [2.0 * value**2 for value in range(count)]


def test_other_ways_to_call(group: WorkerGroup) -> None:
    assert group.size(np.zeros(10, np.uint8), times=2) == [20, 21, 22]
    assert group.each([1, 2, 3], more=[10, 20, 30]) == [(0, 11), (1, 22), (2, 33)]
    assert group.first("word") == "word of 0"
    assert group.own("a", "b", "c") == ("kept", ["c0", None, "a2"])


def test_sharing_ranks_have_a_part_together(session: Session, tmp_path: Path) -> None:
    with (
        ResourcePool(2) as pool,
        WorkerGroup(pool, Probe, name="pairs", logs=tmp_path, sharing=2) as group,
    ):
        assert group.square(1.0, Rows(np.arange(3.0))).tolist() == [0.0, 1.0, 4.0]
        assert ["has 3 rows" in log.read_text() for log in group.logs] == [True, True]
    with (
        ResourcePool(3) as pool,
        pytest.raises(ClusterError, match="2 workers that share data have to divide the 3 of"),
    ):
        WorkerGroup(pool, Probe, name="odd", logs=tmp_path, sharing=2)


def test_a_collective(group: WorkerGroup) -> None:
    assert group.total() == [6.0, 6.0, 6.0]


def test_futures_of_groups_in_pools_of_their_own(group: WorkerGroup, tmp_path: Path) -> None:
    with ResourcePool(1) as pool, WorkerGroup(pool, Probe, name="other", logs=tmp_path) as other:
        slow = group.slow(0.5)  # not blocking
        quick = other.first.future("meanwhile")
        assert quick.result() == "meanwhile of 0"
        assert slow.result() == [0, 1, 2]
        assert other.workers[0].pid not in {process.pid for process in group.workers}


def test_threads_are_seen_in_one_order(group: WorkerGroup) -> None:
    def call(first: int) -> None:
        for number in range(first, first + 20):
            group.note(number)

    threads = [threading.Thread(target=call, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = group.notes()
    assert sorted(seen[0]) == [*range(20), *range(100, 120), *range(200, 220)]
    assert seen[0] == seen[1] == seen[2]


def test_what_all_are_given_travels_once(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    put, sizes = ray.put, []

    def counted(value: object) -> object:
        sizes.append(value)
        return put(value)

    monkeypatch.setattr(ray, "put", counted)
    assert group.size(np.zeros(1_000_000, np.uint8)) == [1_000_000, 1_000_001, 1_000_002]
    assert len(sizes) == 1
    group.notes()
    group.each([1, 2, 3])
    assert len(sizes) == 1


def test_a_user_error_arrives_as_it_was(group: WorkerGroup) -> None:
    with pytest.raises(UserError, match=r"^no such user$") as caught:
        group.fail("user", 1)
    assert type(caught.value) is UserError
    assert group.total() == [6.0, 6.0, 6.0]  # the others had answered, so the group goes on


def test_another_error_brings_its_traceback(group: WorkerGroup) -> None:
    with pytest.raises(KeyError, match="no such key") as caught:
        group.fail("key", 2)
    note = caught.value.__notes__[0]
    assert f"worker 2 of 'probe' (pid {group.workers[2].pid}, node {group.workers[2].node}) in 'fail'" in note
    assert "cluster_help.py" in note


def test_an_error_that_cannot_travel_goes_as_text(group: WorkerGroup) -> None:
    with pytest.raises(RuntimeError, match=r"^UnpicklableError: no such unpicklable\n"):
        group.fail("unpicklable", 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_an_error_arrives_though_the_log_cannot_take_it(session: Session, tmp_path: Path) -> None:
    (tmp_path / "full_0.log").symlink_to("/dev/full")
    with (
        ResourcePool(1) as pool,
        WorkerGroup(pool, Silent, name="full", logs=tmp_path) as group,
        pytest.raises(UserError, match=r"^no such user$"),
    ):
        group.fail("user", 0)


def test_memory_that_ran_out_names_worker_call_and_remedy(group: WorkerGroup) -> None:
    with pytest.raises(ClusterError) as caught:
        group.fail("memory", 1)
    said = str(caught.value)
    assert said.startswith(f"worker 1 of 'probe' (pid {group.workers[1].pid},")
    assert "ran out of memory in 'fail'" in said
    assert said.endswith(Probe.memory_advice)
    assert "\n" not in said


def test_a_worker_that_refuses_to_be_made(session: Session, tmp_path: Path) -> None:
    with ResourcePool(1) as pool:
        with pytest.raises(UserError, match=r"^this recipe will not do$"):
            WorkerGroup(pool, Probe, name="refused", logs=tmp_path, refuse=0)
        with WorkerGroup(pool, Probe, name="accepted", logs=tmp_path) as group:  # its place is free again
            assert group.first("word") == "word of 0"


def test_a_group_that_is_closed(session: Session, tmp_path: Path) -> None:
    with ResourcePool(1) as pool:
        group = WorkerGroup(pool, Probe, name="closed", logs=tmp_path)
        with pytest.raises(ClusterError, match="the pool holds the group 'closed'; make another pool for 'second'"):
            WorkerGroup(pool, Probe, name="second", logs=tmp_path)
        pids = [process.pid for process in group.workers]
        group.close()
        assert gone(pids)
        with pytest.raises(ClusterError, match="the group 'closed' was closed"):
            group.first("word")
        group.close()


def test_names_that_are_none(group: WorkerGroup, session: Session, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="no registered method 'helper'"):
        group.helper()

    class Clash(Worker):
        @register()
        def close(self) -> None: ...

    with ResourcePool(1) as pool, pytest.raises(TypeError, match="Clash registers 'close'"):
        WorkerGroup(pool, Clash, name="clash", logs=tmp_path)


def test_what_cannot_travel_is_refused_at_once(session: Session, tmp_path: Path) -> None:
    with ResourcePool(1) as pool, pytest.raises(TypeError, match="an argument of Probe cannot go to another process"):
        WorkerGroup(pool, Probe, threading.Lock(), name="lock", logs=tmp_path)
