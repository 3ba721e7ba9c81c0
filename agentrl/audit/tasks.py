"""Findings about tasks alone: twice, near held-out ones, unsteady, too long; and about the schemas of tools."""

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from agentrl.audit.answer import ASIDE, Oracle
from agentrl.audit.finding import Finding, Severity, found
from agentrl.audit.policy import plain
from agentrl.audit.subject import shortened, text_of
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Message, Task

GRAM = 8
"""Words of an n-gram."""
COMMON = 5
"""An n-gram, its numbers left out, that more tasks than this have is the template's."""
NEAR = 0.6
"""A held-out task is near a training one that holds this share of its n-grams."""
FEWEST = 4
"""N-grams of its own that a task needs to be compared."""
TWICE = 0.05
"""Share of a split's tasks that may open like another one."""
ROOM = 0.75
"""Share of the tokens of a rollout that an opening may take."""
CHARACTERS = 4.0
"""Of a token, where no tokenizer is known."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a task asks."""

    task: Task
    text: str
    """What the model is told."""
    hidden: str = ""
    """What it may find out: by tools, replies or images. Tasks that differ in it are two."""

    opened: bool = False
    """Whether `text` is an opening of a task that has more to it: nothing follows from what two of them share."""

    @property
    def key(self) -> str:
        """What is equal of tasks that ask the same, whatever their case."""
        return f"{' '.join(self.text.casefold().split())}\n{self.hidden}" if self.text.strip() or self.hidden else ""


def split_findings(splits: Mapping[str, Sequence[Asked]], oracle: Oracle) -> list[Finding]:
    """Tasks that come twice, contradict each other, or stand in two splits. splits: each with what its tasks ask."""
    found_ones: list[Finding] = []
    for split, tasks in splits.items():
        found_ones += _ids(split, tasks)
        found_ones += _twice(split, tasks, oracle)
    train = splits.get("train", ())
    for split, tasks in splits.items():
        if split != "train":
            found_ones += _held_out(split, tasks, train)
    return found_ones


def _ids(split: str, tasks: Sequence[Asked]) -> list[Finding]:
    counts = Counter(one.task.id for one in tasks)
    again = [name for name, count in counts.items() if count > 1]
    if not again:
        return []
    return [found("twice", Severity.HIGH, f"{split}: {len(again):,} ids are those of several tasks", again)]


def _twice(split: str, tasks: Sequence[Asked], oracle: Oracle) -> list[Finding]:
    groups: defaultdict[str, list[Task]] = defaultdict(list)
    for one in tasks:
        groups[one.key].append(one.task)
    groups.pop("", None)
    several = [group for group in groups.values() if len(group) > 1]
    findings: list[Finding] = []
    exact = {one.task.id: one.text for one in tasks}
    apart = [group for group in several if _contradict(group, exact, oracle)]
    if apart:
        first = apart[0]
        shown = " | ".join(f"{task.id}: {shortened(', '.join(oracle.truths(task)), 80)}" for task in first[:4])
        line = f"{split}: {len(apart):,} openings come with different stored answers"
        findings.append(found("contradictory", Severity.HIGH, line, [task.id for task in first], shown))
    copies = sum(len(group) - 1 for group in several)
    if copies and copies / len(tasks) >= TWICE:
        many = split != "train" or copies / len(tasks) >= 0.5  # of held-out ones intervals become too narrow
        severity = Severity.MEDIUM if many else Severity.LOW
        line = f"{split}: {copies:,} of {len(tasks):,} tasks ask what another one asks"
        findings.append(found("twice", severity, line, [task.id for group in several for task in group]))
    return findings


def _contradict(group: Sequence[Task], exact: Mapping[str, str], oracle: Oracle) -> bool:
    """Whether tasks of the very same text have different answers."""
    first = [task for task in group if exact[task.id] == exact[group[0].id]]
    return len({_answers(oracle, task) for task in first}) > 1


def _answers(oracle: Oracle, task: Task) -> tuple[str, ...]:
    return tuple(sorted(map(plain, oracle.truths(task))))


def _held_out(split: str, tasks: Sequence[Asked], train: Sequence[Asked]) -> list[Finding]:
    known: dict[str, str] = {}
    for one in train:
        known.setdefault(one.key, one.task.id)
    known.pop("", None)
    same = [(one.task.id, known[one.key]) for one in tasks if one.key in known]
    findings: list[Finding] = []
    if same:
        severity = Severity.HIGH if len(same) / len(tasks) >= 0.02 else Severity.MEDIUM
        line = f"{split}: {len(same):,} of {len(tasks):,} tasks ask what a task of train asks"
        findings.append(found("held_out", severity, line, [one for pair in same for one in pair]))
    near = near_pairs(tasks, train, {name for name, _ in same})
    if near and len(near) / len(tasks) >= 0.02:
        severity = Severity.HIGH if len(near) / len(tasks) >= 0.1 else Severity.MEDIUM
        line = (
            f"{split}: {len(near):,} of {len(tasks):,} tasks share {NEAR:.0%} or more of their n-grams of {GRAM} words "
            "with one task of train"
        )
        findings.append(found("held_out", severity, line, [one for pair in near for one in pair]))
    return findings


def near_pairs(tasks: Sequence[Asked], train: Sequence[Asked], without: Collection[str] = ()) -> list[tuple[str, str]]:
    """Held-out tasks, each with the training task that holds most of its n-grams, where that is NEAR or more. What many
    tasks share is their template, and does not count."""
    grams = {id(one): _grams(one.text) for one in (*tasks, *train)}
    counts = Counter(masked for one in (*tasks, *train) for masked in set(grams[id(one)].values()))
    holders: defaultdict[int, list[str]] = defaultdict(list)
    for one in train:
        for gram, masked in grams[id(one)].items():
            if counts[masked] <= COMMON:
                holders[gram].append(one.task.id)
    pairs = []
    for one in tasks:
        task = one.task
        own = [gram for gram, masked in grams[id(one)].items() if counts[masked] <= COMMON]
        if task.id in without or one.opened or len(own) < FEWEST:
            continue
        hits = Counter(holder for gram in own for holder in holders.get(gram, ()))
        if hits and hits.most_common(1)[0][1] / len(own) >= NEAR:
            pairs.append((task.id, hits.most_common(1)[0][0]))
    return pairs


def _grams(text: str) -> dict[int, int]:
    """The n-grams of a text, each with the same one without its numbers."""
    words = re.findall(r"\w+", text.lower())
    masked = ["0" if any(map(str.isdigit, word)) else word for word in words]
    spans = range(len(words) - GRAM + 1)
    return {hash(tuple(words[i : i + GRAM])): hash(tuple(masked[i : i + GRAM])) for i in spans}


def asked(
    tasks: Sequence[Task],
    openings: Mapping[str, Sequence[Message]],
    oracle: Oracle,
    hiding: bool,
    most: int,
    seconds: float,
) -> list[Asked]:
    """What the first `most` tasks of a split ask: the fields of their data that openings show, so that no opening has
    to be made; or the openings, where no field is shown. hiding: tasks have more to them than their openings."""
    end = time.monotonic() + seconds
    fields = shown_fields(tasks, openings)
    looked = []
    for index in range(min(len(tasks), most if fields or not hiding else 16)):
        if index % 64 == 0 and time.monotonic() > end:
            break
        task = tasks[index]
        if not fields and not openings.get(task.id):
            continue
        shown = (
            "\n".join(text_in(task.data.get(name)) for name in fields) if fields else opening_text(openings[task.id])
        )
        hidden = _hidden(task, fields, oracle) if hiding else ""
        if hidden is not None:
            looked.append(Asked(task, shown, hidden, hiding and not fields))
    return looked


def _hidden(task: Task, fields: Sequence[str], oracle: Oracle) -> str | None:
    """What a task's data hold beside what is shown, the stored answer and its place; None: nothing, or they name the
    place in a generator that the rest comes from."""
    if {"index", "seed"} & task.data.keys():
        return None
    rest = {k: v for k, v in task.data.items() if k not in fields and k != oracle.field and not ASIDE.search(k)}
    return json.dumps(rest, default=str, sort_keys=True) if rest else None


def hides(env: Environment, task: Task, opening: Sequence[Message], replies: bool) -> bool:
    """Whether a task may have more to it than its opening says: tools of its own, replies, images."""
    contents = [message.get("content") for message in opening]
    images = any(isinstance(content, list) and any(p.get("type") != "text" for p in content) for content in contents)
    return images or replies or bool(env.tools_for(task)) or env.uses_workspace


def opening_text(messages: Sequence[Message]) -> str:
    """What an opening says, without its system message."""
    return "\n".join(text_of(message) for message in messages if message["role"] != "system")


def shown_fields(tasks: Sequence[Task], openings: Mapping[str, Sequence[Message]]) -> list[str]:
    """The fields of tasks' data that openings show, by the first tasks; none, where these are little of them."""
    tasks = [task for task in tasks[: min(len(tasks), 16)] if openings.get(task.id)]
    if not tasks:
        return []
    shown = []
    for name in tasks[0].data:
        texts = [text_in(task.data.get(name)) for task in tasks]
        if all(text and text in opening_text(openings[task.id]) for task, text in zip(tasks, texts, strict=True)):
            shown.append(name)
    whole = max((len(opening_text(openings[task.id])) for task in tasks), default=0)
    covered = max((sum(len(text_in(task.data.get(name))) for name in shown) for task in tasks), default=0)
    return shown if whole and covered >= 0.3 * whole else []


def text_in(value: object) -> str:
    """A value of a task as it may stand in an opening."""
    if isinstance(value, list) and all(isinstance(m, Mapping) and isinstance(m.get("content"), str) for m in value):
        return "\n".join(m["content"] for m in value if m.get("role") != "system")
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def length_findings(lengths: Mapping[str, int], most: int, counted: bool) -> list[Finding]:
    """Openings that leave little room. lengths: tokens by task. counted: by a tokenizer, and not estimated."""
    long = sorted((task for task in lengths if lengths[task] > ROOM * most), key=lambda task: -lengths[task])
    if not long:
        return []
    over = [task for task in long if lengths[task] >= most]
    how = "" if counted else " (estimated: no tokenizer is known)"
    severity = Severity.HIGH if len(over) * 2 > len(lengths) and counted else Severity.MEDIUM
    line = (
        f"{len(long):,} of {len(lengths):,} openings take more than {ROOM:.0%} of the {most:,} tokens of a rollout, "
        f"{len(over):,} do not fit at all; the longest has {lengths[long[0]]:,}{how}"
    )
    return [found("long_prompt", severity, line, long)]


_VAGUE = re.compile(r"(x|y|z|a|b|s|n|arg\d*|args|param\d*|p\d|val(ue)?\d*|data\d*|input\d*|foo|bar|tmp|thing|stuff)$")
_VAGUE_TOOL = re.compile(r"(tool\d*|func(tion)?\d*|f\d*|do|run_?it|helper\d*|call\d*|action\d*|foo|bar|util\d*|t\d*)$")


def schema_findings(tools: Sequence[Tool]) -> list[Finding]:
    """What a model cannot know from the schemas of tools."""
    places: defaultdict[tuple[Severity, str], list[str]] = defaultdict(list)
    for tool in tools:
        for severity, what, where in _schema(tool):
            places[severity, what].append(where)
    findings = [
        found("schema", severity, f"{len(where)} {what}: {', '.join(where[:6])}")
        for (severity, what), where in places.items()
    ]
    for a, b in combinations(tools, 2):
        if re.sub(r"[\W_]", "", a.name.lower()) == re.sub(r"[\W_]", "", b.name.lower()):
            line = f"the tools {a.name!r} and {b.name!r} have names that are read alike"
            findings.append(found("schema", Severity.MEDIUM, line))
        elif a.description.strip() and a.description.strip() == b.description.strip():
            line = f"the tools {a.name!r} and {b.name!r} have one description"
            findings.append(found("schema", Severity.MEDIUM, line))
    return findings


def _schema(tool: Tool) -> Iterator[tuple[Severity, str, str]]:
    """What is wrong with the schema of a tool: how bad it is, what, and where."""
    if not tool.description.strip():
        yield Severity.MEDIUM, "tools have no description", tool.name
    elif _VAGUE_TOOL.fullmatch(tool.name) and len(tool.description) < 20:
        yield Severity.MEDIUM, "tools have a name that says nothing, and a description that says little", tool.name
    properties = tool.parameters.get("properties", {})
    for name, schema in properties.items():
        where = f"{tool.name}.{name}"
        if not isinstance(schema, Mapping) or not (schema.keys() & {"type", "enum", "anyOf", "oneOf", "$ref", "const"}):
            yield Severity.MEDIUM, "parameters have no type", where
        elif schema.get("type") == "array" and "items" not in schema:
            yield Severity.LOW, "parameters do not say what their list holds", where
        elif schema.get("type") == "object" and not schema.keys() & {"properties", "additionalProperties"}:
            yield Severity.LOW, "parameters do not say what their object holds", where
        if isinstance(schema, Mapping) and not str(schema.get("description", "")).strip():
            if _VAGUE.fullmatch(name):
                yield Severity.MEDIUM, "parameters have a name that says nothing, and no description", where
            elif len(properties) > 1 or name not in tool.description.lower():
                yield Severity.LOW, "parameters have no description", where
