"""`Outcome`: what an evaluation needs to know of one sample, from memory or from disk."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from agentrl.errors import UserError
from agentrl.eval.scan import read_findings
from agentrl.jsonable import dumps, loads
from agentrl.plugins.types import Json
from agentrl.rollout.trajectory_file import Row, read_records, read_rows
from agentrl.trajectory import UNKNOWN, FinishReason, Group, Trajectory

COLUMNS = (
    "environment", "task", "group", "sample", "reward", "rewards", "solved", "finish", "boundary", "error",
    "sampled_tokens", "turns", "tools", "tool_uses", "seconds", "task_data", "extra",
)  # fmt: skip
"""Columns of a stored sample that its outcome is read from: not its messages, nor its tokens."""


class Call(NamedTuple):
    """A call of a tool."""

    tool: str
    """The tool's name; UNKNOWN for one that does not exist."""
    wrong: bool
    """Whether it ended with an error."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one sample of a held-out task ended."""

    group: int
    """Index of its task in the evaluation."""
    task: str
    """Id of its task."""
    sample: int
    """Index of this sample among those of its task."""
    solved: bool | None
    """Whether the task is solved; None where the sample failed."""
    reward: float
    """The weighted sum of its reward parts."""
    rewards: Mapping[str, float]
    """Reward parts by name, before weighting."""
    finish: str
    """Why it ended, a FinishReason."""
    failure: str | None
    """`boundary: message` of a sample that the machinery failed, else None."""
    turns: int
    """Number of assistant turns."""
    tokens: int
    """Number of sampled tokens."""
    calls: tuple[Call, ...]
    """Every call of a tool, in order."""
    seconds: float
    """Wall time."""
    usage: Mapping[str, int] = field(default_factory=dict)
    """What an endpoint counted: `input`, `cached_input` and `output` tokens; empty where there is none."""
    data: Mapping[str, Json] = field(default_factory=dict)
    """The task's data."""
    environment: str = ""
    """Name of its environment."""
    findings: Mapping[str, float] = field(default_factory=dict)
    """What scanners looked for (`agentrl scan`): 1 where it was found, else 0."""

    @property
    def valid(self) -> bool:
        """Whether it counts: it neither failed nor was aborted."""
        return self.failure is None

    @classmethod
    def of(cls, t: Trajectory, group: int, solved: bool | None, environment: str = "") -> "Outcome":
        """That of a trajectory."""
        lost = None if t.failure is None else f"{t.failure.boundary}: {t.failure.message}"
        if lost is None and not t.valid:
            lost = str(t.finish)
        return cls(
            group=group,
            task=t.task.id,
            sample=t.sample,
            solved=solved,
            reward=t.reward,
            rewards=t.rewards,
            finish=str(t.finish),
            failure=lost,
            turns=len(t.turns),
            tokens=t.sampled_tokens,
            calls=tuple(
                Call(use.name if use.name in t.tools else UNKNOWN, use.error is not None) for use in t.tool_uses
            ),
            seconds=t.seconds.get("total", 0.0),
            usage=t.extra.get("usage", {}),
            data=t.task.data,
            environment=environment,
        )

    @classmethod
    def read(cls, row: Row) -> "Outcome":
        """That of a stored sample by COLUMNS. Raises ValueError, TypeError, AttributeError, LookupError:
        damaged."""
        lost = None if row["boundary"] is None else f"{row['boundary']}: {row['error'] or ''}"
        if lost is None and row["finish"] in (FinishReason.ERROR, FinishReason.ABORTED):
            lost = row["finish"]
        data, extra = loads(row["task_data"]), loads(row["extra"])
        if not isinstance(data, dict) or None in (row["task"], row["group"], row["sample"], row["finish"]):
            raise ValueError("it lacks its task's data, or its place")
        if lost is None and row["solved"] is None:
            raise ValueError("whether its task is solved is not known")
        return cls(
            group=row["group"],
            task=row["task"],
            sample=row["sample"],
            solved=row["solved"],
            reward=row["reward"] or 0.0,
            rewards={part["name"]: part["value"] for part in row["rewards"]},
            finish=row["finish"],
            failure=lost,
            turns=len(row["turns"]),
            tokens=row["sampled_tokens"],
            calls=tuple(
                Call(use["name"] if use["name"] in row["tools"] else UNKNOWN, use["error"] is not None)
                for use in row["tool_uses"]
            ),
            seconds=float(row["seconds"]["total"]),
            usage={name: int(count) for name, count in extra.get("usage", {}).items()},
            data=data,
            environment=row["environment"],
        )


def outcomes_of(groups: Sequence[Group], solved: Callable[[Trajectory], bool]) -> list[Outcome]:
    """Those of groups. solved: asked of every valid trajectory."""
    return [
        Outcome.of(t, index, solved(t) if t.valid else None)
        for index, group in enumerate(groups)
        for t in (*group.trajectories, *group.failed)
    ]


def read_outcomes(path: Path) -> list[Outcome]:
    """Those of a stored evaluation, of whatever version. Raises UserError: it is damaged."""
    try:
        rows = read_rows(path, COLUMNS) if path.suffix == ".parquet" else _of_lines(path)
        scanned = read_findings(path)
        return [
            replace(Outcome.read(row), findings={name: float(one[index] is not None) for name, one in scanned.items()})
            for index, row in enumerate(rows)
        ]
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{path}: damaged: one of its samples cannot be read ({why})") from error


def _of_lines(path: Path) -> list[Row]:
    """Rows of a file of an older version, which had neither groups nor an environment."""
    places: dict[str, int] = {}
    found = []
    for record in read_records(path):
        failure = record.get("failure") or {}
        found.append(
            {
                "environment": "",
                "task": record["task"],
                "group": places.setdefault(record["task"], len(places)),
                "sample": record.get("sample", 0),
                "reward": record["reward"],
                "rewards": [{"name": name, "value": value} for name, value in record.get("rewards", {}).items()],
                "solved": record.get("solved"),
                "finish": record["finish"],
                "boundary": failure.get("boundary"),
                "error": failure.get("message"),
                "sampled_tokens": record.get("tokens", {}).get("sampled", 0),
                "turns": record.get("turns", []),
                "tools": [use["name"] for use in record.get("tool_uses", [])],
                "tool_uses": record.get("tool_uses", []),
                "seconds": {"total": record.get("seconds", {}).get("total", 0.0)},
                "task_data": dumps(record.get("data", {})),
                "extra": "{}",
            }
        )
    return found


def by_task(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """The samples of each task together, in the order of the tasks and samples."""
    found: dict[int, list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: (one.group, one.sample)):
        found.setdefault(one.group, []).append(one)
    return list(found.values())
