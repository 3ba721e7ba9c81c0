"""What the tasks of an environment store as right, how it is said, and the oracle that says it."""

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from agentrl.audit.subject import Play, Script, Seat, Subject, Voice, guarded
from agentrl.errors import UserError
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Task
from agentrl.testing.agent import call, plain_text

NAMES = re.compile(
    r"(golden_?|correct_?|final_?|right_?|expected_?|true_?|target_?)?(answers?|targets?|truths?|labels?|solutions?|"
    r"outputs?|results?|ground_truth|gold(en)?|expected|reference|correct|secret|word|sql|choice|entry)$"
)
"""Names of fields that may hold what is right; others are tried after them."""
FORMS = (
    "{x}", "#### {x}", "\\boxed{{{x}}}", "<answer>{x}</answer>", "Answer: {x}", "The answer is {x}.",
    '{{"answer": "{x}"}}', "```\n{x}\n```", "```python\n{x}\n```",
)  # fmt: skip
ASIDE = re.compile(r"(^|\.)(id|uid|index|split|seed|kind|source|row|task_id|data_source|ability|level|difficulty)$")
"""Names of fields that say where a task comes from."""
_LONG = 4_000  # characters of a stored answer
_FIELDS = 10  # that are tried
_PROBED = 4  # tasks
_AFRESH = 2  # fields that are tried in an environment made anew
COUNTED = 2_000
"""Tasks whose stored answers are counted."""


@dataclass(frozen=True, slots=True)
class Form:
    """How an answer is said."""

    text: str = "{x}"
    """The final turn, `{x}` in place of the answer."""
    tool: str = ""
    """The tool that takes the answer, in place of a text."""
    parameter: str = ""
    """Its parameter."""
    kind: str = "string"
    """The JSON type of that."""

    def turns(self, answer: str) -> list[str]:
        """The turns that say `answer`."""
        if self.tool:
            return [call(self.tool, **{self.parameter: _typed(answer, self.kind)}), "Done."]
        return [plain_text(self.text.format(x=answer))]

    def shown(self) -> str:
        """The form for people."""
        return f"{self.tool}({self.parameter}=...)" if self.tool else self.text.format(x="...")


def _typed(answer: str, kind: str) -> Json:
    try:
        value = json.loads(answer)
    except ValueError:
        return answer
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {"integer": isinstance(value, int) and number, "number": number, "boolean": isinstance(value, bool)}
    return value if fits.get(kind, False) else answer


@dataclass(slots=True)
class Stored:
    """What tasks hold that may be right: in their data, and beside them."""

    env: Environment
    """Whose tasks they are."""
    found: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By task what was found already; an empty list stands for a place that is empty."""
    error: str = ""
    """What the environment raised when it was asked; empty: nothing."""

    def of(self, task: Task) -> dict[str, list[str]]:
        """The values of a task that may be answers, by path."""
        if task.id not in self.found:
            beside: Mapping[str, Json] = {}
            try:
                beside = guarded(f"stored of task {task.id}", lambda: dict(self.env.stored(task)))
            except UserError as error:
                self.error = self.error or str(error)
            self.found[task.id] = dict((*leaves(task), *_leaves(beside, "")))
        return self.found[task.id]

    def fields(self, tasks: Sequence[Task]) -> list[str]:
        """Paths that all tasks have, those whose name says that they hold what is right first."""
        shared = Counter(path for task in tasks for path, values in self.of(task).items() if values)
        every = [path for path, count in shared.items() if count == len(tasks)]
        named = list(filter(_names_answer, every))
        rest = [path for path in every if path not in named and not ASIDE.search(path)]
        return [*named, *rest]

    def named(self, tasks: Sequence[Task]) -> list[str]:
        """Those whose name says it."""
        return list(filter(_names_answer, self.fields(tasks)))

    def empty(self, tasks: Sequence[Task]) -> str:
        """A path where all tasks should hold what is right, and where there is nothing; empty: none is."""
        named = (path for path, values in self.of(tasks[0]).items() if not values and _names_answer(path))
        return next((path for path in named if all(self.of(task).get(path) == [] for task in tasks)), "")


def _names_answer(path: str) -> bool:
    return NAMES.search(path.rpartition(".")[2].lower()) is not None


@dataclass(slots=True)
class Oracle:
    """How tasks are done well, as far as that is known."""

    origin: str = ""
    """`demonstrate`, `solve`, or the field that is read; empty: nothing is known."""
    form: Form | None = None
    """How a final answer is said; None: not known."""
    field: str = ""
    """The path of the stored answer in a task; empty: not known."""
    stored: Stored | None = None
    """What tasks hold; its environment demonstrates or solves."""
    cut: bool = False
    """Whether nothing is known because there was no time to try all that they hold, in all forms."""

    def truths(self, task: Task) -> list[str]:
        """The stored answers of a task; none where they are not known."""
        return self.stored.of(task).get(self.field, []) if self.field and self.stored is not None else []

    def script(self, task: Task) -> Script:
        """The player that does a task well. Raises UserError: it is not known how."""
        if self.origin == "solve":
            return self._solver()
        if self.origin == "demonstrate":
            return self.demonstrated(task)
        truths = self.truths(task)
        if not truths or self.form is None:
            raise UserError(f"task {task.id} has no {self.field or 'stored answer'}")
        return self.form.turns(truths[0])

    def demonstrated(self, task: Task) -> list[str]:
        """The turns of the demonstration of a task. Raises UserError."""
        assert self.stored is not None, "demonstrations come from an environment"
        env = self.stored.env
        said = guarded(f"demonstrate of task {task.id}", lambda: list(env.demonstrate(task, Random(task.id), "clean")))
        turns = list(turns_of(said))
        if not turns:
            raise UserError(f"demonstrate of task {task.id} has no turn of the assistant")
        return turns

    def after_work(self, task: Task, answer: str) -> list[str] | None:
        """The oracle's turns with another answer at their end; None: it is not known which part that is."""
        truths = self.truths(task)
        if self.form is None or not truths:
            return None
        if self.origin != "demonstrate":
            return self.form.turns(answer)
        turns = self.demonstrated(task)
        if self.form.tool:
            return [*turns[:-1], *self.form.turns(answer)] if len(turns) == 1 else None
        return [*turns[:-1], *self.form.turns(answer)]

    def _solver(self) -> Voice:
        stored = self.stored

        async def voice(seat: Seat) -> str:
            assert stored is not None
            workspace = seat.request.workspace
            if workspace is not None:
                await stored.env.solve(seat.task, workspace, seat.number)
            return "Done."

        return voice


def turns_of(messages: Sequence[Message]) -> Iterator[str]:
    """The assistant's turns of a demonstration, those of a tool's conversations after the call that held them."""
    for message in messages:
        if message["role"] == "assistant":
            content = message.get("content")
            lines = [plain_text(content)] if isinstance(content, str) and content else []
            for made in message.get("tool_calls") or []:
                arguments = made["function"]["arguments"]
                if isinstance(arguments, str):
                    lines.append(f"/{made['function']['name']} {arguments}".replace("\n", " "))
                else:
                    lines.append(call(made["function"]["name"], **arguments))
            yield "\n".join(lines)
        elif held := message.get("conversation"):
            yield from turns_of(held)


def leaves(task: Task) -> Iterator[tuple[str, list[str]]]:
    """The values of a task that may be answers, by path: texts, and lists of them."""
    yield from _leaves(task.data, "")
    yield from _leaves(task.create_kwargs, "create_kwargs")
    for name, kwargs in task.tools_kwargs.items():
        for hook in ("create_kwargs", "calc_reward_kwargs", "execute_kwargs"):
            yield from _leaves(getattr(kwargs, hook), f"{name}.{hook}")


def _leaves(value: object, path: str, depth: int = 4) -> Iterator[tuple[str, list[str]]]:
    if isinstance(value, Mapping) and depth:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key), depth - 1)
    elif isinstance(value, list | tuple):
        if value and all(isinstance(item, str | int | float) for item in value):
            yield path, [_plain(item) for item in value]
    elif isinstance(value, str | int | float) and len(text := _plain(value)) <= _LONG and text.strip():
        yield path, [text]
    elif value is None:
        yield path, []


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def forms_of(tools: Mapping[str, Tool]) -> list[Form]:
    """The ways in which an answer may be said: texts, and tools that take one value."""
    forms = [Form(text) for text in FORMS]
    for name, tool in tools.items():
        properties = tool.parameters.get("properties", {})
        needed = [key for key in properties if key in tool.parameters.get("required", properties)]
        if len(needed) == 1 and isinstance(properties[needed[0]], Mapping):
            kind = str(properties[needed[0]].get("type", "string"))
            forms.append(Form(tool=name, parameter=needed[0], kind=kind))
    return forms


async def find_oracle(subject: Subject, tasks: Sequence[Task], until: float) -> Oracle:
    """How the tasks are done well: by demonstrations, a solution for workspaces, or what they store.

    until: when the search among stored values ends, on the clock of `time.monotonic`.
    """
    env, looked = subject.env, list(tasks[:_PROBED])
    stored = Stored(env)
    if overridden(env, "demonstrate"):
        oracle = Oracle("demonstrate", stored=stored)
        turns: dict[str, list[str]] = {}
        for task in looked:
            with contextlib.suppress(UserError):  # of data that is read, say, or of a part of a mixture
                turns[task.id] = oracle.demonstrated(task)
        if turns:
            return _with_form(oracle, stored, [task for task in looked if task.id in turns], list(turns.values()))
    if overridden(env, "solve") and subject.workspaces is not None:
        return Oracle("solve", stored=stored)
    oracle = await _by_field(subject, stored, looked, until)
    return oracle if oracle.origin or oracle.cut else await _by_field_afresh(subject, stored, looked, until)


def overridden(env: Environment, hook: str) -> bool:
    """Whether a class of the environment defines a hook that `Environment` has only as a place to fill."""
    return getattr(type(env), hook, None) is not getattr(Environment, hook)


def _with_form(oracle: Oracle, stored: Stored, tasks: Sequence[Task], turns: Sequence[Sequence[str]]) -> Oracle:
    """The oracle with the field whose value ends all demonstrations, and how they say it."""
    for path in stored.fields(tasks):
        oracle.field = path
        found: set[str] = set()
        for task, said in zip(tasks, turns, strict=True):
            form = _form_in(said[-1], oracle.truths(task))
            if form is None:
                break
            found.add(form)
        else:
            oracle.form = Form(sorted(found, key=len)[0])
            return oracle
    oracle.field = ""
    return oracle


def _form_in(text: str, truths: Sequence[str]) -> str | None:
    """A final turn with `{x}` in place of the answer that it ends by; None: it holds none."""
    if text.startswith("/") and not text.startswith("//"):
        return None  # a call
    for truth in sorted(truths, key=len, reverse=True):
        spots = list(re.finditer(rf"(?<!\w){re.escape(truth)}(?!\w)", text))
        if spots and len(truth) <= _LONG:
            before, after = text[: spots[-1].start()], text[spots[-1].end() :]
            before = before.rpartition("\n")[2] if "<" not in before else before
            return f"{_escaped(before)}{{x}}{_escaped(after)}"
    return None


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


async def _by_field(subject: Subject, stored: Stored, tasks: Sequence[Task], until: float) -> Oracle:
    """The oracle that reads what tasks store: the field and form that solve most of them."""
    best, best_key = Oracle(stored=stored), (0.0, 0.0)
    if not tasks:
        return best
    base = await _tried(subject, tasks, lambda task: [""], until)
    forms = forms_of(subject.tools_of(tasks[0]))
    for path in stored.fields(tasks)[:_FIELDS]:
        for form in forms:
            if time.monotonic() > until:
                return best if best_key[0] > 0.0 else Oracle(stored=stored, cut=True)
            oracle = Oracle(path, form, path, stored)
            plays = await _tried(subject, tasks, oracle.script, until)
            key = _score(plays)
            if key > max(best_key, _score(base)) and (key[0] > 0.0 or _names_answer(path)):
                best, best_key = oracle, key
            if key[0] == 1.0 and _score(base)[0] < 1.0:
                return oracle
    return best


async def _by_field_afresh(subject: Subject, stored: Stored, tasks: Sequence[Task], until: float) -> Oracle:
    """As `_by_field`, each attempt in an environment made anew: what earlier rollouts left may keep it from paying."""
    forms = forms_of(subject.tools_of(tasks[0])) if tasks else []
    for path in stored.fields(tasks)[:_AFRESH] if tasks else ():
        for form in forms:
            if time.monotonic() > until:
                return Oracle(stored=stored)
            oracle = Oracle(path, form, path, stored)
            fresh = await subject.again()
            try:
                play = (await _tried(fresh, tasks[:1], oracle.script, until))[0]
            finally:
                await fresh.close()
            if play.solved:
                return oracle
    return Oracle(stored=stored)


async def _tried(subject: Subject, tasks: Sequence[Task], script: Callable[[Task], Any], until: float) -> list[Play]:
    return await subject.play_each(tasks, script, label="the search for the right answer", until=until)


def _score(plays: Sequence[Play]) -> tuple[float, float]:
    solved = sum(play.solved for play in plays) / len(plays)
    return solved, sum(play.reward for play in plays) / len(plays)


def counted(oracle: Oracle, tasks: Sequence[Task], seconds: float = 2.0) -> Counter[str]:
    """How often each stored answer is right, over the first tasks of a split."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    for index in range(min(len(tasks), COUNTED)):
        if time.monotonic() > end:
            break
        if truths := oracle.truths(tasks[index]):
            counts[truths[0]] += 1
    return counts
