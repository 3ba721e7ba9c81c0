"""The kinds of jobs that are trained on, each drawn from a seed in a size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from agentrl_envs.terminal_tasks.job import Hidden, Job, Step

WORDS = ("lime", "plum", "pear", "fig", "kiwi", "date", "grape", "mango", "peach", "lemon", "melon", "apple")
FOLDERS = ("notes", "data", "logs", "src", "old", "mail")
ENDINGS = ("txt", "md", "csv", "log", "py", "json")
KEYS = ("port", "level", "size", "limit", "retries", "depth")
NUMBERS = ("10", "20", "30", "40", "50", "60", "70", "80")
LEVELS = ("ERROR", "WARN", "INFO", "DEBUG")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large jobs are: least and most."""

    files: tuple[int, int]
    """In a folder."""
    lines: tuple[int, int]
    """Of a file."""


Draw = Callable[[Random, Sizes], Job]


def names(rng: Random, count: int) -> list[str]:
    """Different names of files, without endings; numbered beyond the words that there are."""
    known = [*WORDS, *(f"{word}{number}" for number in range(1, 9) for word in WORDS)]
    return rng.sample(known[: max(len(WORDS), count)], count)


def folder_of(rng: Random, sizes: Sizes, ending: str) -> list[str]:
    """Names of files with various endings, some of them, and not all, with `ending`; sorted as `ls` does."""
    count = rng.randint(max(3, sizes.files[0]), sizes.files[1])
    others = [other for other in ENDINGS if other != ending]
    chosen = [ending, rng.choice(others), *(rng.choice((ending, *others[:2])) for _ in range(count - 2))]
    return sorted(f"{name}.{end}" for name, end in zip(names(rng, count), chosen, strict=True))


def lines(rng: Random, sizes: Sizes, draw: Callable[[int], str]) -> list[str]:
    """Lines of a file."""
    return [draw(number) for number in range(rng.randint(*sizes.lines))]


def text(lines: Sequence[str]) -> str:
    """Lines as a file holds them."""
    return "".join(f"{line}\n" for line in lines)


def count(rng: Random, sizes: Sizes) -> Job:
    """Count the files of an ending."""
    folder, ending = rng.choice(FOLDERS), rng.choice(ENDINGS)
    files = folder_of(rng, sizes, ending)
    number = str(sum(name.endswith(f".{ending}") for name in files))
    return Job(
        f"Count the {ending} files in {folder} and write the number to count.",
        {f"{folder}/{name}": "x\n" for name in files},
        {"count": (number,)},
        (Step(f"ls {folder}/*.{ending} | wc -l >count"),),
        (
            Step(f"ls {folder}/* | wc -l >count"),
            Step(f"ls {folder}/*.{ending} | wc -l", number),
            Step(f"ls {folder}/*.{ending} >count"),
        ),
    )


def find(rng: Random, sizes: Sizes) -> Job:
    """Find the file that holds a word."""
    folder, wanted = rng.choice(FOLDERS), rng.choice(WORDS)
    others = [word for word in WORDS if word != wanted]
    files = sorted(f"{name}.txt" for name in names(rng, rng.randint(max(2, sizes.files[0]), sizes.files[1])))
    holder = rng.choice(files)
    held = {f"{folder}/{name}": wanted if name == holder else rng.choice(others) for name in files}
    return Job(
        f"Find the file in {folder} that holds {wanted} and write its name to found.",
        {path: f"{word}\n" for path, word in held.items()},
        {"found": (holder, f"{folder}/{holder}")},
        (Step(f"grep -l {wanted} {folder}/* >found"),),
        (
            Step(f"grep {wanted} {folder}/* >found"),
            Step(f"grep -l {wanted} {folder}/*", f"{folder}/{holder}"),
            Step(f"ls {folder}/* >found"),
        ),
    )


def extract(rng: Random, sizes: Sizes) -> Job:
    """Take a column out of a table."""
    name, column = rng.choice(WORDS), rng.randint(1, 4)
    wrong = rng.choice([number for number in range(1, 5) if number != column])
    rows = lines(rng, sizes, lambda number: ",".join((rng.choice(WORDS), *rng.sample(NUMBERS, 2), rng.choice(KEYS))))
    cells = [row.split(",")[column - 1] for row in rows]
    return Job(
        f"Write column {column} of {name}.csv to column.",
        {f"{name}.csv": text(rows)},
        {"column": (text(cells),)},
        (Step(f"cut -d, -f{column} {name}.csv >column"),),
        (
            Step(f"cut -f{column} {name}.csv >column"),
            Step(f"cut -d, -f{column} {name}.csv", "\n".join(cells)),
            Step(f"cut -d, -f{wrong} {name}.csv >column"),
        ),
    )


def rename(rng: Random, sizes: Sizes) -> Job:
    """Give files another ending."""
    folder = rng.choice(FOLDERS)
    ending, new = rng.sample(ENDINGS, 2)
    files = [name for name in folder_of(rng, sizes, ending) if not name.endswith(f".{new}")]
    before = {f"{folder}/{name}": f"{number}\n" for number, name in enumerate(files)}
    goal: dict[str, tuple[str, ...] | None] = {}
    for path, content in before.items():
        renamed = path.endswith(f".{ending}")
        goal[path] = None if renamed else (content,)
        if renamed:
            goal[f"{path.removesuffix(ending)}{new}"] = (content,)
    return Job(
        f"Rename the {ending} files in {folder} to {new}.",
        before,
        goal,
        (Step(f"for f in {folder}/*.{ending}; do mv $f ${{f%.{ending}}}.{new}; done"),),
        (
            Step(f"for f in {folder}/*.{ending}; do cp $f ${{f%.{ending}}}.{new}; done"),
            Step(f"for f in {folder}/*.{ending}; do mv $f $f.{new}; done"),
            Step(f"for f in {folder}/*.{ending}; do mv $f {new}; done"),
        ),
    )


def config(rng: Random, sizes: Sizes) -> Job:
    """Set a value of a configuration."""
    name = rng.choice(WORDS)
    key, other, *_ = keys = rng.sample(KEYS, rng.randint(3, len(KEYS)))
    rng.shuffle(keys)
    new = rng.choice(NUMBERS)
    filler = lines(rng, sizes, lambda number: f"# {rng.choice(WORDS)}") if sizes.lines[0] > 10 else []
    values = {each: rng.choice([number for number in NUMBERS if number != new]) for each in keys}
    before = [*filler, *(f"{each}={value}" for each, value in values.items())]
    after = [*filler, *(f"{each}={value}" for each, value in (values | {key: new}).items())]
    return Job(
        f"Set {key} to {new} in {name}.conf.",
        {f"{name}.conf": text(before)},
        {f"{name}.conf": (text(after),)},
        (Step(f"sed -i s/{key}=.*/{key}={new}/ {name}.conf"),),
        (
            Step(f"echo {key}={new} >{name}.conf"),
            Step(f"sed s/{key}=.*/{key}={new}/ {name}.conf", "\n".join(after)),
            Step(f"sed -i s/{other}=.*/{other}={new}/ {name}.conf"),
        ),
    )


def filtered(rng: Random, sizes: Sizes) -> Job:
    """Keep the lines of a level."""
    name = rng.choice(WORDS)
    level, other = rng.sample(LEVELS, 2)
    log = [f"{level} {rng.choice(WORDS)}", f"{other} {rng.choice(WORDS)}"]
    log += lines(rng, sizes, lambda number: f"{rng.choice(LEVELS)} {rng.choice(WORDS)}")
    rng.shuffle(log)
    kept = [line for line in log if line.startswith(level)]
    return Job(
        f"Write the {level} lines of {name}.log to lines.",
        {f"{name}.log": text(log)},
        {"lines": (text(kept),)},
        (Step(f"grep {level} {name}.log >lines"),),
        (
            Step(f"grep -v {level} {name}.log >lines"),
            Step(f"grep {level} {name}.log", "\n".join(kept)),
            Step(f"grep {other} {name}.log >lines"),
        ),
    )


_SLIPS = (("echo", "ecko"), ("do", "od"), ("done", "don"), ("in", "ni"))


def repair(rng: Random, sizes: Sizes) -> Job:
    """Repair a script in which one word is misspelt: it must be looked at."""
    name, word = rng.choice(WORDS), rng.choice(WORDS)
    right, slip = rng.choice(_SLIPS)
    turns = " ".join(str(number) for number in range(1, rng.randint(2, 3) + (sizes.lines[0] > 10) * 5))
    good = [f"for i in {turns}", "do", f"echo {word} $1", "done"]
    bad = [" ".join(slip if part == right else part for part in line.split(" ")) for line in good]
    fixed = f"sed -i s/{slip}/{right}/ {name}.sh"
    others = [(a, b) for a, b in _SLIPS if b != slip]
    wrong = rng.choice(others)
    times = len(turns.split())
    return Job(
        f"Repair the script {name}.sh.",
        {f"{name}.sh": text(bad)},
        {},
        (Step(f"cat {name}.sh", "\n".join(bad)), Step(fixed)),
        (
            Step(f"sed -i s/{wrong[1]}/{wrong[0]}/ {name}.sh"),
            Step(f"sed -i s/{right}/{slip}/ {name}.sh"),
            Step(f"echo {right} >{name}.sh"),
        ),
        captured=(f"{name}.sh",),
        hidden=tuple(Hidden(f"sh {name}.sh {given}", f"{word} {given}\n" * times) for given in ("7", "x")),
    )


KINDS: dict[str, Draw] = {
    "count": count, "find": find, "extract": extract, "rename": rename, "config": config, "filter": filtered,
    "repair": repair,
}  # fmt: skip
