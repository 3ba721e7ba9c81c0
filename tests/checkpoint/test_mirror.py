"""The copy of a run at a URL: whole checkpoints alone count, and what a store refuses ends no run."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from checkpoint_help import Role, everything, learned, same, tiny
from processes import until

from agentrl.checkpoint import disk, mirror
from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.checkpoint.mirror import Mirror, Store, fetched_run, open_mirror
from agentrl.checkpoint.roles import load_roles, save_roles
from agentrl.checkpoint.run_folder import RunFolder
from agentrl.errors import UserError


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/runs/a"
        return
    yield "memory://bucket/runs/a"
    shutil.rmtree(tmp_path, ignore_errors=True)
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


class Run:
    """A run folder whose checkpoints are mirrored. lines: what was told."""

    def __init__(self, folder: Path, url: str, resumed: bool = False, keep: int = 2) -> None:
        self.folder, self.lines = RunFolder(folder), list[str]()
        folder.mkdir(exist_ok=True)
        if not resumed:
            self.folder.write_recipe("train: {}\n")
        opened = open_mirror(url, resumed)
        assert opened is not None
        self.mirror: Mirror = opened
        self.mirror.follow(folder, self.lines.append)
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep, on_saved=self.mirror.saved)
        self.role = learned(1)

    def save(self, step: int, accuracy: float | None = None, role: Role | None = None) -> None:
        self.folder.append_metrics({"step": step})
        (self.folder.trajectories / f"step_{step}.parquet").write_bytes(b"%d" % step)
        rated = None if accuracy is None else ("test", accuracy)
        save = lambda folder: save_roles({"actor": role or self.role}, folder)  # noqa: E731
        self.checkpoints.save(step, save, {}, rated)

    def wait(self, *steps: int) -> None:
        """Until the mirror has these whole checkpoints, and no others."""
        store = self.mirror.store
        until(lambda: sorted(store.whole(store.sizes())) == sorted(steps))


def files(store: Store) -> set[str]:
    return set(store.sizes())


def below(folder: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in found.items() if not name.startswith(".")}


@pytest.mark.slow
def test_a_checkpoint_that_the_run_removes_while_it_is_copied_is_no_failure(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system has no links that would hold it."""
    run, put, removed = Run(tmp_path / "a", url), Store.put, threading.Event()

    def link(*_: object) -> None:
        raise OSError("no links here")

    def remove_then_put(store: Store, local: Path, name: str, moved: Callable[[], None]) -> None:
        if "step_1/" in name and not removed.is_set():
            disk.remove(run.folder.checkpoints / "step_1")
            removed.set()
        put(store, local, name, moved)

    monkeypatch.setattr(mirror.os, "link", link)
    monkeypatch.setattr(Store, "put", remove_then_put)
    run.save(1)
    assert removed.wait(30)
    run.save(2)
    run.wait(2)
    assert run.mirror.close() == []
    assert run.lines == []


def test_results_are_listed_while_a_checkpoint_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("metrics.jsonl", "trajectories/step_1.parquet", "checkpoints/best.json", "checkpoints/step_1/a/b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe")  # of a plugin: reading it would wait for ever
    (tmp_path / ".mirror").mkdir()
    (tmp_path / ".mirror/a").touch()
    scandir = os.scandir

    def scanned(path: Any) -> Any:
        if "step_1" in str(path):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scanned)
    assert mirror._results(tmp_path) == ["checkpoints/best.json", "metrics.jsonl", "trajectories/step_1.parquet"]


@pytest.mark.slow
def test_a_run_goes_on_from_its_mirror_on_another_machine(tmp_path: Path, url: str) -> None:
    run = Run(tmp_path / "a", url)
    run.save(1, 0.9)
    run.wait(1)
    run.save(2)
    other = learned(1, 2)
    run.save(3, role=other)
    run.save(4)
    run.save(5, 0.5, role=other)
    (tmp_path / "a/trajectories/step_1.parquet").unlink()  # track.trajectories.keep
    assert run.mirror.close() == []
    run.wait(1, 4, 5)  # the best, and the last two
    store = Store(url, "x")
    there = files(store)
    assert not any("step_3/" in name or "step_2/" in name for name in there)
    assert {"trajectories/step_1.parquet", "trajectories/step_2.parquet"} & there == {"trajectories/step_2.parquet"}
    found = fetched_run(url, str(tmp_path / "b"))
    assert below(found) == below(tmp_path / "a")
    assert not list(tmp_path.glob(".b-*"))
    saved = Checkpoints(found / "checkpoints", 2).latest()
    saved.verify()
    second = Role.of(tiny(3))
    load_roles({"actor": second}, saved.path)
    assert same(everything(second), everything(other))
    assert run.lines == []
    assert not (tmp_path / "a" / ".mirror").exists()

    going_on = Run(found, url, resumed=True)
    going_on.save(6)
    assert going_on.mirror.close() == []
    going_on.wait(1, 5, 6)
    assert fetched_run(url, str(found)) == found  # it is here already, as far as there


def test_only_what_is_marked_whole_counts(tmp_path: Path) -> None:
    """A machine that is lost in the middle of a copy: the checkpoint before it is what a fresh one goes on from."""
    url = f"file://{tmp_path}/there"
    run = Run(tmp_path / "a", url)
    run.save(1)
    run.wait(1)
    killed, put = threading.Event(), run.mirror.store.put

    def stop(local: Path, name: str, *rest: Any) -> None:
        if "step_2/trainer" in name:
            killed.set()
            threading.Event().wait()  # for ever: its thread ends with the process
        put(local, name, *rest)

    run.mirror.store.put = stop  # type: ignore[method-assign]
    run.save(2)
    assert killed.wait(20)
    there = files(Store(url, "x"))
    assert any(name.startswith("checkpoints/step_2/") for name in there)
    found = fetched_run(url, str(tmp_path / "b"))
    assert [s.step for s in Checkpoints(found / "checkpoints", 2).all()] == [1]

    again = Run(found, url, resumed=True)
    again.role = learned(1, 2)
    again.save(2)
    assert again.mirror.close() == []
    again.wait(1, 2)
    assert below(fetched_run(url, str(tmp_path / "c"))) == below(found)


class Panic(BaseException):
    """What stores that are not written in Python may raise."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [PermissionError, Panic])
def test_a_store_that_refuses_is_told_once_and_made_up_for(
    tmp_path: Path, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "LAST_RETRY_SECONDS", 0.01)
    url = f"file://{tmp_path}/there"
    run = Run(tmp_path / "a", url)
    put = run.mirror.store.put
    tries: list[str] = []

    def refuse(local: Path, name: str, *rest: Any) -> None:
        tries.append(name)
        raise kind("no credentials")

    run.mirror.store.put = refuse  # type: ignore[method-assign]
    run.save(1)
    until(lambda: len(tries) > 3)
    assert run.lines == [
        f"train.mirror: {url} is not up to date: {kind.__name__}: no credentials; the run goes on, and tries again"
    ]
    run.mirror.store.put = put  # type: ignore[method-assign]
    until(lambda: len(run.lines) == 2)
    assert run.lines[1] == f"train.mirror: {url} is up to date again"
    run.wait(1)
    run.mirror.store.put = refuse  # type: ignore[method-assign]
    run.save(2)
    (line,) = run.mirror.close()
    assert line == (
        f"train.mirror: {url} lacks the last checkpoint: {kind.__name__}: no credentials; it is in {tmp_path / 'a'}"
    )
    run.wait(1)  # what is whole there stays


def test_saves_that_are_faster_than_copies_leave_whole_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that the run removes while it is copied is copied to its end, and those in between are left out."""
    url = f"file://{tmp_path}/there"
    run = Run(tmp_path / "a", url, keep=1)
    put, go, begun = run.mirror.store.put, threading.Event(), threading.Event()

    def slow(local: Path, name: str, *rest: Any) -> None:
        begun.set()
        assert go.wait(20)
        put(local, name, *rest)

    run.mirror.store.put = slow  # type: ignore[method-assign]
    run.save(1)
    assert begun.wait(20)
    marked: list[str] = []
    write = run.mirror.store.write
    monkeypatch.setattr(run.mirror.store, "write", lambda name, text: (marked.append(name), write(name, text)))
    for step in (2, 3, 4):
        run.save(step)
    go.set()
    assert run.mirror.close() == []
    assert marked == ["checkpoints/step_1.whole.json", "checkpoints/step_4.whole.json"]
    run.wait(4)
    assert run.lines == []


def test_a_copy_that_does_not_go_on_holds_up_the_end_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PATIENCE_SECONDS", 0.3)
    run = Run(tmp_path / "a", f"file://{tmp_path}/there")
    run.mirror.store.put = lambda *given: threading.Event().wait()  # type: ignore[method-assign,assignment]
    run.save(1)
    (line,) = run.mirror.close()
    assert "lacks the last checkpoint: nothing was copied for 0 seconds; it is in" in line


def other_recipe(folder: Path) -> None:
    folder.mkdir()
    (folder / "recipe.yaml").write_text("train: {steps: 7}\n")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda there, here: None, r"no run there \(recipe.yaml is missing\)"),
        (lambda there, here: other_recipe(there), "no whole checkpoint is there"),
        (lambda there, here: (Run(there.parent / "a", f"file://{there}").save(1), other_recipe(here)),
         "holds a run already; move it away, or name another by output="),
    ],
    ids=["nothing", "no checkpoint", "another run here"],
)  # fmt: skip
def test_what_cannot_be_gone_on_with_is_one_line(
    tmp_path: Path, prepare: Callable[[Path, Path], Any], why: str
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    prepare(there, here)
    if (tmp_path / "a").exists():
        until(lambda: (there / "checkpoints/step_1.whole.json").exists())
    with pytest.raises(UserError, match=f"--resume file://{there}: .*{why}") as caught:
        fetched_run(f"file://{there}", str(here))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("bucket/a", "'bucket/a' is not a URL; write one as s3://BUCKET/FOLDER"),
        ("nosuch://bucket/a", "nosuch://bucket/a cannot be opened: .*nosuch"),
    ],
)
def test_a_mirror_that_cannot_be_opened_is_one_line_before_the_run(url: str, why: str) -> None:
    with pytest.raises(UserError, match=f"train.mirror: {why}"):
        open_mirror(url, resumed=False)


def test_a_mirror_is_of_one_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", f"file://{tmp_path}/there")
    run.save(1)
    assert run.mirror.close() == []
    with pytest.raises(UserError, match=r"already holds a run; name another folder, or go on with --resume file://"):
        open_mirror(f"file://{tmp_path}/there", resumed=False)
    assert open_mirror(None, resumed=False) is None
