"""Kinds of jobs that are never trained on, and those of git, which a workspace may lack."""

from collections.abc import Sequence
from random import Random

from agentrl_envs.terminal_tasks.job import Hidden, Job, Step
from agentrl_envs.terminal_tasks.kinds import (
    ENDINGS,
    FOLDERS,
    NUMBERS,
    WORDS,
    Draw,
    Sizes,
    folder_of,
    lines,
    names,
    text,
)


def ordered(rng: Random, sizes: Sizes) -> Job:
    """Sort lines."""
    name = rng.choice(WORDS)
    rows = [*lines(rng, sizes, lambda number: rng.choice(WORDS)), "plum", "date"]
    return Job(
        f"Sort the lines of {name}.txt into sorted.",
        {f"{name}.txt": text(rows)},
        {"sorted": (text(sorted(rows)),), f"{name}.txt": (text(rows),)},
        (Step(f"sort {name}.txt >sorted"),),
        (Step(f"sort -r {name}.txt >sorted"), Step(f"sort {name}.txt", "\n".join(sorted(rows)))),
    )


def different(rng: Random, sizes: Sizes) -> Job:
    """Count different lines."""
    name = rng.choice(WORDS)
    rows = [*lines(rng, sizes, lambda number: rng.choice(WORDS)), "plum", "fig", "plum"]
    return Job(
        f"Count the different lines of {name}.txt and write the number to count.",
        {f"{name}.txt": text(rows)},
        {"count": (str(len(set(rows))),)},
        (Step(f"sort -u {name}.txt | wc -l >count"),),
        (Step(f"wc -l <{name}.txt >count"), Step(f"uniq {name}.txt >count")),
    )


def largest(rng: Random, sizes: Sizes) -> Job:
    """Name the largest file."""
    folder = rng.choice(FOLDERS)
    files = names(rng, rng.randint(max(2, sizes.files[0]), sizes.files[1]))
    lengths = dict(zip(files, rng.sample(range(1, 200), len(files)), strict=True))
    most = max(files, key=lambda name: lengths[name])
    return Job(
        f"Write the name of the largest file in {folder} to found.",
        {f"{folder}/{name}": "x" * length for name, length in lengths.items()},
        {"found": (most, f"{folder}/{most}")},
        (Step(f"ls -S {folder} | head -n 1 >found"),),
        (Step(f"ls -S {folder} >found"), Step(f"ls -S {folder} | tail -n 1 >found")),
    )


def moved(rng: Random, sizes: Sizes) -> Job:
    """Move the files of an ending to a new folder."""
    folder, target = rng.sample(FOLDERS, 2)
    ending = rng.choice(ENDINGS)
    files = folder_of(rng, sizes, ending)
    goal: dict[str, tuple[str, ...] | None] = {}
    for name in files:
        here = f"{folder}/{name}"
        goal[here] = None if name.endswith(f".{ending}") else ("x",)
        if name.endswith(f".{ending}"):
            goal[f"{target}/{name}"] = ("x",)
    return Job(
        f"Move the {ending} files of {folder} to a new folder {target}.",
        {f"{folder}/{name}": "x\n" for name in files},
        goal,
        (Step(f"mkdir {target}"), Step(f"mv {folder}/*.{ending} {target}")),
        (Step(f"mv {folder}/* {target}"), Step(f"cp {folder}/*.{ending} {target}")),
    )


def added(rng: Random, sizes: Sizes) -> Job:
    """Add up a column."""
    name = rng.choice(WORDS)
    numbers = [*rng.sample(NUMBERS, 2), *lines(rng, sizes, lambda number: rng.choice(NUMBERS))]
    rows = [f"{rng.choice(WORDS)},{number}" for number in numbers]
    total = str(sum(map(int, numbers)))
    return Job(
        f"Add up column 2 of {name}.csv and write the sum to sum.",
        {f"{name}.csv": text(rows)},
        {"sum": (total,)},
        (Step(f"cut -d, -f2 {name}.csv | paste -sd+ | sed 's/.*/echo $((&))/' | sh >sum"),),
        (Step(f"cut -d, -f2 {name}.csv >sum"), Step(f"wc -l <{name}.csv >sum")),
    )


_REPOSITORY = """
git init -q -b main {folder} && cd {folder} && git config user.name agent && git config user.email agent@localhost
export GIT_AUTHOR_DATE=2026-01-01T00:00:00Z GIT_COMMITTER_DATE=2026-01-01T00:00:00Z
{commits}
"""


def _repository(folder: str, words: Sequence[str]) -> str:
    """A script that makes a repository with a commit for each word."""
    commits = "\n".join(f"echo {word} >{word}.txt; git add -A; git commit -qm 'Add {word}'" for word in words)
    return _REPOSITORY.format(folder=folder, commits=commits)


def last_message(rng: Random, sizes: Sizes) -> Job:
    """Read the history of a repository."""
    folder = rng.choice((*FOLDERS, *WORDS))
    words = names(rng, rng.randint(max(2, sizes.files[0]), sizes.files[1]))
    return Job(
        f"Write the message of the last commit of {folder} to message.",
        {},
        {"message": (f"Add {words[-1]}",)},
        (Step(f"git -C {folder} log -1 --format=%s >message"),),
        (Step(f"git -C {folder} log --format=%s >message"), Step(f"ls {folder} >message")),
        setup=_repository(folder, words),
    )


def committed(rng: Random, sizes: Sizes) -> Job:
    """Commit what is new. Neither configuration nor hooks are captured, which could say what git does."""
    folder, message = rng.choice(FOLDERS), rng.choice(WORDS)
    words = names(rng, rng.randint(max(3, sizes.files[0]), sizes.files[1] + 1))
    listed = "".join(f"{word}.txt\n" for word in sorted(words))
    return Job(
        f"Commit all files of {folder} with the message {message}.",
        {},
        {},
        (Step(f"cd {folder}"), Step("git add -A"), Step(f"git commit -qm {message}")),
        (Step("git stash -q -u"), Step("git reset -q --hard")),
        setup=f"{_repository(folder, words[1:])}echo {words[0]} >{words[0]}.txt",
        captured=tuple(f"{folder}/.git/{part}" for part in ("objects", "refs", "HEAD", "packed-refs")),
        hidden=(
            Hidden(f"git -C {folder} log -1 --format=%s", message),
            Hidden(f"git -C {folder} ls-tree --name-only HEAD", listed),
            Hidden(f"git -C {folder} rev-list --count HEAD", str(len(words))),
        ),
    )


UNSEEN: dict[str, Draw] = {
    "sort": ordered, "different": different, "largest": largest, "move": moved, "add": added,
}  # fmt: skip
GIT: dict[str, Draw] = {"last_message": last_message, "commit": committed}
