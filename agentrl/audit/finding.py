"""`Finding`: something wrong with an environment, with tasks to look at; and the `Report` of an audit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.jsonable import Json

VERSION = 1
"""Of the JSON of a report."""
TASKS = 8
"""Tasks that a finding names, at most."""


class Severity(StrEnum):
    """What becomes of a run on the environment."""

    HIGH = "high"
    """The reward is paid for something else than the task, or held-out results say nothing."""
    MEDIUM = "medium"
    """A run loses much by it."""
    LOW = "low"
    """Worth a look."""
    INFO = "info"
    """Nothing is wrong: something could not be examined, or is good to know."""

    @property
    def rank(self) -> int:
        """0 for the most severe."""
        return list(Severity).index(self)


KINDS: Mapping[str, str] = {
    "oracle": "the verifier refuses what the environment itself calls right, nothing stands where an answer should, or "
    "the limits cut it short",
    "no_oracle": "no right answer is known: give `demonstrate`, `solve`, or a field such as `answer` to the tasks",
    "nothing": "an empty answer passes a test such as `answer in truth`, or a part is paid to everybody",
    "random": "the verifier hardly looks at the answer, or the calls alone are paid",
    "echo": "what the task itself says is the answer",
    "constant": "one answer is right for most tasks, or the verifier takes it for what it is not",
    "injecting": "the verifier reads more than one answer, or runs, matches or obeys what the model wrote",
    "calling": "each call is paid, so that calls without need are",
    "tampering": "what decides about the reward lies where the agent can write; see docs/internals/grading.md",
    "wrong_answer": "the verifier compares too loosely: parts of texts, rounded numbers, prefixes",
    "ignores": "the reward does not depend on the conversation",
    "reachable": "a result, an error or a reply holds the stored answer",
    "exposed": "files of the solution or of the tests lie in the workspace",
    "twice": "tasks are drawn from too few, or rows were copied",
    "contradictory": "one opening has several stored answers",
    "held_out": "held-out tasks were drawn as the training ones were, or the split was made after rows were copied",
    "unsteady_tasks": "tasks are drawn from a generator without a fixed seed, or in the order of a set",
    "unseeded": "a hook draws from a global generator, the clock, a set, or counts on a class; `session.rng` is seeded",
    "flicker": "the reward is drawn at random, or reads what changes between two looks",
    "leak_after": "what one rollout leaves on `self` or in a module reaches the next; keep it in `session.state`",
    "leak_together": "what is per rollout lies on `self` or in a module; keep it in `session.state`",
    "constant_part": "a part of the reward is the same in every rollout that was played",
    "difficulty": "for this model the tasks are too hard or too easy: groups of equal rewards teach nothing",
    "unused_tool": "no demonstration calls it: the model must learn to leave it alone",
    "schema": "the model knows of a tool what its schema says",
    "long_prompt": "openings leave little room for answers: raise rollout.max_tokens, or shorten them",
    "slow": "a hook takes long: all rollouts of a step wait for the slowest",
    "blocking": "an async hook computes or sleeps without `await`, and every other rollout waits",
    "left_behind": "`release` and `close` do not free what `create` and the calls took",
    "fails": "a hook raises for what a model may well do: such a rollout is lost, and not paid 0",
    "tool_fails": "a tool raises on arguments that its schema allows; ArgumentError tells the model what is wrong",
    "hangs": "a hook never comes back, and holds the event loop",
    "exits": "code of the environment ended its process",
    "prints": "code of the environment prints without end",
    "not_carried": "its source has more than the adapter carries",
    "not_examined": "raise --seconds, or give what is missing",
}
"""By kind of finding: the cause to look for. `docs/audit.md` has the bound of each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, wherever it was seen."""

    kind: str
    """One of KINDS."""
    severity: Severity
    """How bad it is."""
    line: str
    """What was seen, with its figure."""
    tasks: tuple[str, ...] = ()
    """Ids of tasks to look at."""
    shown: str = ""
    """What was said or answered there, shortened."""

    @property
    def cause(self) -> str:
        """The cause to look for."""
        return KINDS[self.kind]

    def written(self) -> dict[str, Json]:
        """The finding as JSON."""
        return {
            "kind": self.kind,
            "severity": str(self.severity),
            "line": self.line,
            "cause": self.cause,
            "tasks": list(self.tasks),
            "shown": self.shown,
        }

    @classmethod
    def read(cls, given: Mapping[str, Json]) -> "Finding":
        """The finding of its JSON."""
        severity = Severity(given["severity"])
        return cls(given["kind"], severity, given["line"], tuple(given["tasks"]), given["shown"])


def found(kind: str, severity: Severity, line: str, tasks: Sequence[str] = (), shown: object = "") -> Finding:
    """A finding, its tasks and texts cut to what fits a page."""
    assert kind in KINDS, kind
    text = str(shown)
    return Finding(kind, severity, line[:400], tuple(dict.fromkeys(tasks))[:TASKS], text[:600])


@dataclass(frozen=True, slots=True)
class Row:
    """What one way to play came to."""

    policy: str
    """The policy, such as `echo`."""
    attempt: str
    """Which of its attempts, such as `last number`."""
    tasks: int
    """How many were played."""
    reward: float
    """Mean reward."""
    solved: float
    """Share that counts as solved."""

    def written(self) -> dict[str, Json]:
        """The row as JSON."""
        return {name: getattr(self, name) for name in ("policy", "attempt", "tasks", "reward", "solved")}


@dataclass(slots=True)
class Report:
    """What an audit came to."""

    subject: str
    """The environment or recipe, as it was asked for."""
    findings: list[Finding] = field(default_factory=list)
    """The most severe first, once the audit is over."""
    rows: list[Row] = field(default_factory=list)
    """Every attempt, in the order in which they were played."""
    splits: dict[str, int] = field(default_factory=dict)
    """Tasks of each split."""
    plays: int = 0
    """Rollouts that were played."""
    seconds: float = 0.0
    """Wall time."""

    def worst(self) -> Severity:
        """The severity of the worst finding; INFO where there is none."""
        return min((finding.severity for finding in self.findings), key=lambda s: s.rank, default=Severity.INFO)

    def sort(self) -> None:
        """Put the most severe findings first."""
        self.findings.sort(key=lambda finding: finding.severity.rank)

    def best(self) -> list[Row]:
        """Of each policy the attempt that earned most."""
        rows: dict[str, Row] = {}
        for row in self.rows:
            if row.policy not in rows or (row.solved, row.reward) > (rows[row.policy].solved, rows[row.policy].reward):
                rows[row.policy] = row
        return list(rows.values())

    def json(self) -> dict[str, Json]:
        """The report as JSON."""
        return {
            "version": VERSION,
            "subject": self.subject,
            "worst": str(self.worst()),
            "splits": dict(self.splits),
            "plays": self.plays,
            "seconds": round(self.seconds, 2),
            "findings": [finding.written() for finding in self.findings],
            "policies": [row.written() for row in self.rows],
        }
