"""A process that is killed while it saves: a checkpoint that is whole is left, and the next is made.

A child process, forked, counts its dealings with the file system (Python's audit events) and kills itself at a given
one with SIGKILL, which no handler sees.
"""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_help import Role, everything, learn, learned, names, same, tiny

from agentrl.checkpoint import state_file
from agentrl.checkpoint.checkpoints import Checkpoints, Saved
from agentrl.checkpoint.pending import Pending
from agentrl.checkpoint.roles import load_roles, save_roles
from agentrl.errors import UserError

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.link", "os.truncate")
ENDED, NEVER = 0, 10**9
MARGIN = 65_536
"""Bytes that a disk loses by counting in pages."""


def small(seed: int = 0) -> Any:
    return tiny(seed, num_hidden_layers=1)


def save(folder: Path, role: Role, step: int) -> None:
    Checkpoints(folder, 1).save(
        step, lambda aside: save_roles({"actor": role}, aside), {"step": step}, ("test", step / 10)
    )


def forked(work: Callable[[], None]) -> int:
    """The signal that ended a child which did `work`, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the child must not go on as a second pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "it failed instead of being killed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else ENDED


def kill_at(count: int, folder: Path) -> None:
    """From now on: die at the dealing `count` (from 0) with `folder`."""
    seen = iter(range(NEVER))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and str(folder) in str(arguments[0]) and isinstance(arguments[1], str)
        if (opened or event in CHANGES) and next(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def restored(saved: Saved) -> dict[str, torch.Tensor]:
    role = Role.of(small(seed=7))
    load_roles({"actor": role}, saved.path)
    assert saved.extra == {"step": saved.step}
    for name in ("config.json", "model.safetensors"):
        assert (saved.path / name).stat().st_size
    return everything(role)


def every_kill(first: Path, save: Callable[[Path], None]) -> Iterator[Path]:
    """Copies of `first` in which `save` was killed at its first dealing with the disk, its second, ...; the last one
    was left alone."""
    ended, count = signal.SIGKILL.value, -1
    while ended:
        count += 1
        folder = first.with_name(f"killed_{count}")
        shutil.copytree(first, folder)
        ended = forked(lambda at=count, to=folder: (kill_at(at, to), save(to)))  # type: ignore[misc]
        yield folder


@pytest.mark.long
def test_killed_at_any_moment_of_a_save_the_last_whole_checkpoint_is_left(tmp_path: Path) -> None:
    role = learned(1, model=small())
    before = everything(role)
    save(tmp_path / "first", role, 1)
    learn(role, 2)
    after = everything(role)
    found = []
    for folder in every_kill(tmp_path / "first", lambda to: save(to, role, 2)):
        saved = Checkpoints(folder, 1).latest()
        assert saved is not None, names(folder)
        for place in folder.glob("step_*"):  # whatever bears the name of a checkpoint
            whole = Saved(int(place.name.removeprefix("step_")), place)
            assert same(restored(whole), {1: before, 2: after}[whole.step])
        found.append(saved.step)
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert len(found) > 20


def label(folder: Path, step: int, content: str) -> None:
    """A save of something small."""
    Checkpoints(folder, 1).save(step, lambda aside: Pending(lambda: written(aside, content)), {}, ("test", 0.5))


def written(aside: Path, content: str) -> None:
    (aside / "content").write_text(content)
    state_file.write({"x": torch.ones(1)}, aside / "trainer" / "actor")


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 2], ids=["again", "anew"])
def test_killed_at_any_moment_of_the_renames_the_next_save_cleans_up(tmp_path: Path, step: int) -> None:
    label(tmp_path / "first", 1, "first")
    found = []
    for folder in every_kill(tmp_path / "first", lambda to: label(to, step, "second")):
        saved = Checkpoints(folder, 1).latest()
        assert saved is not None, names(folder)
        found.append((saved.path / "content").read_text())
        label(folder, 3, "third")
        assert names(folder) == ["best.json", "step_3"]
    assert found == sorted(found)
    assert set(found) == {"first", "second"}


@contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    role = learned(1, model=small())
    whole = sum(p.stat().st_size for p in once(tmp_path, role).rglob("*"))
    for share in (0.0, 0.2, 0.4, 0.6, 2.0):
        with tmpfs(tmp_path / f"disk_{share}", MARGIN + int((1 + share) * whole)) as disk:
            before = everything(role)
            save(disk, role, 1)
            learn(role, 2)
            if share < 1:
                with pytest.raises(UserError, match=f"^{disk}: a checkpoint could not be written: ") as told:
                    save(disk, role, 2)
                assert str(told.value).endswith("the checkpoint of step 2 is lost, that of step 1 is kept")
                expected, there = before, ["best.json", "step_1"]
            else:
                save(disk, role, 2)
                expected, there = everything(role), ["best.json", "step_2"]
            saved = Checkpoints(disk, 1).latest()
            assert saved is not None
            assert same(restored(saved), expected)
            assert names(disk) == there


def once(tmp_path: Path, role: Role) -> Path:
    save(tmp_path / "once", role, 1)
    return tmp_path / "once"


def test_a_file_that_may_not_grow_is_one_line_too(tmp_path: Path) -> None:
    """What the operating system refuses in the middle of a file, to torch's writer and to ours."""
    role = learned(1, model=small())

    def limited(limit: int, folder: Path) -> None:
        save(folder, role, 1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(UserError, match=f"{os.strerror(errno.EFBIG)}|could not be written completely"):
            save(folder, role, 2)
        assert names(folder) == ["best.json", "step_1"]

    for limit in (300, 10_000, 60_000):
        assert forked(lambda limit=limit: limited(limit, tmp_path / f"limit_{limit}")) == ENDED  # type: ignore[misc]
