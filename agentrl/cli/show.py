"""`agentrl show`: conversations of a run in the terminal."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from agentrl.cli.common import Text, console
from agentrl.errors import UserError, nearest
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from agentrl.rollout.trajectory_file import Record, Stored, Told

_MARKS = {True: "solved", False: "unsolved"}
_STYLES = {"trained": "green", "sampled, not trained": "yellow", "read": "dim"}


def show_command(
    run: Annotated[str, Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[
        int | None, Option("--step", min=0, help="This step; without it the newest, or all that --task asks for.")
    ] = None,
    split: Annotated[Text, Option("--split", metavar="NAME", help="Evaluations of this split, not training.")] = None,
    task: Annotated[Text, Option("--task", metavar="ID", help="Samples of this task alone.")] = None,
    unsolved: Annotated[
        bool, Option("--unsolved", help="Samples that do not solve their task; of a step, that earned below the mean.")
    ] = False,
    failed: Annotated[
        bool, Option("--failed", help="Rollouts that the machinery failed, with whose error it was.")
    ] = False,
    tokens: Annotated[
        bool, Option("--tokens", help="The tokens as the model saw them, those that are trained in green.")
    ] = False,
    in_flight: Annotated[bool, Option("--in-flight", help="Samples of the step that is not whole.")] = False,
    limit: Annotated[int, Option("--limit", min=0, help="Samples that are printed; 0: all.")] = 10,
) -> None:
    """Print conversations of a run: the newest step's, or those that are asked for."""
    from agentrl.rollout.trajectory_file import read_records

    files = _files(Path(run), step, split, in_flight, all_steps=task is not None or failed)
    printer = _Printer(Path(run) if tokens else None)
    if unsolved and failed:
        raise UserError("--unsolved and --failed exclude each other: a rollout that failed was never scored")
    shown = left = 0
    seen: set[str] = set()
    for one in files:
        facts = _facts(one.path)
        seen.update(fact.task for fact in facts)
        of_task = [(i, fact) for i, fact in enumerate(facts) if task in (None, fact.task)]
        chosen = [i for i, fact in of_task if (fact.failed or not failed) and (fact.unsolved or not unsolved)]
        now = chosen[: limit - shown] if limit else chosen
        left += len(chosen) - len(now)
        shown += len(now)
        records = read_records(one.path, tokens=tokens) if now else []
        for index in now:
            _print(printer, records[index], one)
    if task is not None and task not in seen:
        raise UserError(f"--task {task}: no sample of it is stored there{nearest(task, seen)}")
    if left:
        printer.say(f"{left} more: --limit 0 prints all of them", "dim")
    elif not shown:
        none = "every sample there is solved" if unsolved else "no sample is stored there"
        printer.say("no rollout failed there" if failed else none)


class _Fact(NamedTuple):
    """What chooses a sample."""

    task: str
    """Id of its task."""
    failed: bool
    """Whether the machinery failed it."""
    unsolved: bool
    """Whether it was scored, and does not solve its task."""


def _facts(path: Path) -> list[_Fact]:
    """What chooses each sample of a file."""
    from agentrl.eval.why import is_unsolved, solving_reward
    from agentrl.rollout.trajectory_file import read_records, read_rows

    if path.suffix == ".parquet":
        rows = read_rows(path, ["task", "boundary", "reward", "solved"])
    else:
        rows = [record | {"boundary": record.get("failure")} for record in read_records(path)]
    below = solving_reward(path)
    return [_Fact(str(row["task"]), bool(row["boundary"]), is_unsolved(row, below)) for row in rows]


def _print(printer: "_Printer", record: "Record", file: "Stored") -> None:
    try:
        printer.sample(record, file)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{file.path}: damaged: one of its samples cannot be shown ({why})") from error


def _files(run: Path, step: int | None, split: str | None, in_flight: bool, all_steps: bool) -> "list[Stored]":
    """The files to read, the newest first. Raises UserError."""
    from agentrl.checkpoint.run_folder import TRAJECTORIES
    from agentrl.rollout.stored import of_step
    from agentrl.rollout.trajectory_file import IN_FLIGHT, TRAIN, Stored, stored_files

    folder = run / TRAJECTORIES
    if not folder.is_dir():
        raise UserError(f"{run}: not a run folder with stored conversations ({TRAJECTORIES}/ is missing)")
    if in_flight:
        path = folder / IN_FLIGHT
        if not path.exists():
            raise UserError(f"{run}: nothing is in flight there: every step that began is whole")
        return [Stored(TRAIN, -1, False, path)]
    stored = stored_files(folder)
    splits = sorted({one.split for one in stored if one.evaluation})
    if split is not None and split not in splits:
        raise UserError(f"--split {split}: no evaluation of it is stored in {folder}{nearest(split, splits)}")
    found = [one for one in stored if one.evaluation == (split is not None) and split in (None, one.split)]
    if not found:
        told = f"; evaluations are: --split {', '.join(splits)}" if splits else ""
        raise UserError(f"{folder}: holds no training step{told}")
    found = found if step is None else of_step(found, step, folder)
    return found[::-1] if all_steps else found[-1:]


class _Printer:
    """Prints samples. run: the folder whose tokenizer decodes tokens; None to print messages."""

    def __init__(self, run: Path | None) -> None:
        self._out = console()
        self._images = Path()
        self._tokenizer = None if run is None else _tokenizer(run)

    def say(self, text: str, style: str | None = None) -> None:
        """Print one line or text."""
        self._out.print(text, markup=False, soft_wrap=True, style=style)

    def sample(self, record: "Record", file: "Stored") -> None:
        """Print one sample: what it was, every conversation, what it took."""
        from agentrl.images import FOLDER as IMAGES
        from agentrl.rollout.trajectory_file import conversations

        if self._tokenizer is not None and "ids" not in record:
            raise UserError(f"{file.path}: holds no tokens: an older version wrote it, or its step is not whole")
        self._images = file.path.parent.parent / IMAGES
        place = "in flight" if file.step < 0 else f"{file.split}, step {file.step}"
        self.say(f"== {place} · {_of(record)} · {_ending(record)}", "bold")
        if failure := record.get("failure"):
            self.say(f"failed ({failure['boundary']}): {failure['message']}", "red")
        for told in conversations(record):
            if told.heading:
                self.say(f"-- {told.heading}", "bold")
            if self._tokenizer is None:
                for message in told.messages:
                    self._message(message)
            else:
                self._tokens(record, told)
        for line in _calls(record):
            self.say(line, "yellow")
        self._workspace(record)
        self.say(f"({_cost(record)})\n", "dim")

    def _workspace(self, record: "Record") -> None:
        """Print what the sample changed in its workspace."""
        kept = (record.get("extra") or {}).get("workspace")
        if not isinstance(kept, dict):
            return
        changes = kept.get("changes") or ()
        self.say(f"-- files: {len(changes)}{' or more' if kept.get('more') else ''} changed", "bold")
        for kind, path, size in changes:
            self.say(f"{_plain(kind)} {_plain(path)}" + (f" ({size:,} bytes)" if size else ""), "yellow")
        if kept.get("diff"):
            self.say(_plain(str(kept["diff"]).rstrip("\n")))

    def _message(self, message: Mapping[str, Json]) -> None:
        name = f" {message['name']}" if message.get("name") else ""
        self.say(f"[{message['role']}{name}]", "bold")
        if reasoning := message.get("reasoning_content"):
            self.say(_plain(reasoning), "dim")
        from agentrl.cli.try_show import image_line
        from agentrl.images import is_kept

        content, calls = message.get("content"), message.get("tool_calls")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(part, dict) and is_kept(part):
                file = self._images / f"{part['image']}.png"
                self.say(image_line(file) if file.is_file() else f"(image whose file is gone: {file})", "dim")
                continue
            if text or not calls:
                self.say(_plain(text if isinstance(text, str) else part))
        for call in calls if isinstance(calls, list) else [calls] if calls else []:
            self.say(f"-> {_called(call)}", "cyan")

    def _tokens(self, record: "Record", told: "Told") -> None:
        for start, end, kind in _spans(record, told):
            facts = [f"{end - start} tokens"]
            if kind != "read":
                facts.append(f"weights {record['weight_version'][start]}")
                facts.append(f"log-prob {_mean(record['logprobs'][start:end])}")
            if kind == "trained" and record["trainer_logprobs"]:
                facts.append(f"trainer {_mean(record['trainer_logprobs'][start:end])}")
            if kind == "trained" and record["advantages"]:
                facts.append(f"advantage {_mean(record['advantages'][start:end], sign='+')}")
            self.say(f"[{kind}: {', '.join(facts)}]", "bold")
            self.say(self._decoded(record, start, end), _STYLES[kind])

    def _decoded(self, record: "Record", start: int, end: int) -> str:
        """Tokens as text, an image by its name in place of its placeholders."""
        assert self._tokenizer is not None
        found, at, ids = "", start, record["ids"]
        for image in record["images"] or ():
            first, after = image["start"], image["start"] + image["tokens"]
            if at <= first and after <= end:
                found += self._tokenizer.decode(ids[at:first], skip_special_tokens=False)
                found += f"[image {image['hash'][:12]}: {image['tokens']} tokens]"
                at = after
        text: str = self._tokenizer.decode(ids[at:end], skip_special_tokens=False)
        return found + text


def _spans(record: "Record", told: "Told") -> Iterator[tuple[int, int, str]]:
    """Yield start, end and kind of the tokens of a conversation, those in a row of one kind together."""
    lengths = {len(record[name]) for name in ("ids", "loss_mask", "logprobs", "weight_version")}
    ends = [record["segments"][index]["end"] for index in told.segments]
    if len(lengths) != 1 or max(ends, default=0) > max(lengths):
        raise UserError(f"{record['request']}: damaged: its token columns are of different lengths")
    spans = [(record["segments"][index]["start"], record["segments"][index]["end"]) for index in told.segments]
    for low, high in spans or [(0, len(record["ids"]))]:
        begin = low
        for at in range(low, high):
            if at + 1 == high or _kind(record, at + 1) != _kind(record, begin):
                yield begin, at + 1, _kind(record, begin)
                begin = at + 1


def _kind(record: "Record", at: int) -> str:
    if record["loss_mask"][at]:
        return "trained"
    return "sampled, not trained" if record["weight_version"][at] >= 0 else "read"


def _mean(values: Sequence[float], sign: str = "") -> str:
    return f"{sum(values) / max(1, len(values)):{sign}.3f}"


def _of(record: "Record") -> str:
    name = record.get("environment")
    return f"{f'{name} · ' if name else ''}task {record['task']} · sample {record.get('sample', 0)}"


def _ending(record: "Record") -> str:
    reward = record["reward"]
    weights = record.get("weights", {})
    parts = [
        f"{name} {value:g}" + (f" x {weights[name]:g}" if weights.get(name, 1) != 1 else "")
        for name, value in record.get("rewards", {}).items()
    ]
    found = ["no reward" if reward is None else f"reward {reward:g}" + (f": {', '.join(parts)}" if parts else "")]
    if seats := record.get("seats"):
        found.append(f"seats: {', '.join(f'{name} {value:g}' for name, value in seats.items())}")
    found += [_MARKS[record["solved"]]] if record.get("solved") in _MARKS else []
    found.append(f"ended by {record['finish']}")
    return " · ".join([*found, *([f"not trained: {record['left_out']}"] if record.get("left_out") else [])])


_UNTRAINED = {
    "unreceived": "nobody received it",
    "unproven": "the engine does not tell which tokens it allowed",
    "marked": "marked by the agent",
    "without_tools": "its call offered no tools (agent.train: tools)",
}


def _calls(record: "Record") -> Iterator[str]:
    """Yield a line for each call of an agent that says more than that there was one."""
    for number, call in enumerate(record.get("calls") or (), 1):
        facts = [f"asked for {_plain(call['asked'])}"] if call["asked"] else []
        if why := call["untrained"]:
            facts.append(f"not trained: {_UNTRAINED.get(why, why)}")
        if facts or call["role"]:
            role = f" ({call['role']})" if call["role"] else ""
            yield f"answer {number}{role}: {' · '.join(facts) or 'trained'}"


def _cost(record: "Record") -> str:
    counts, uses = record.get("tokens", {}), record.get("tool_uses", [])
    found = [f"{counts.get('all', 0)} tokens, {counts.get('sampled', 0)} of them trained"]
    if seconds := record.get("seconds"):
        found.append(f"{seconds.get('total', 0):.2f} s")
    if uses:
        wrong = sum(use["error"] is not None for use in uses)
        found.append(f"{len(uses)} tool calls" + (f", {wrong} with an error" if wrong else ""))
    return " · ".join(found)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _called(call: Json) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _plain(call)
    return f"{_plain(function.get('name'))}({_plain(function.get('arguments'))})"


def _tokenizer(run: Path) -> Any:
    """The tokenizer of the newest checkpoint, or of the recipe's model. Raises UserError."""
    from agentrl.checkpoint.run_folder import CHECKPOINTS, RunFolder, recipe_of
    from agentrl.models.load import load_tokenizer
    from agentrl.recipe.load import load_recipe
    from agentrl.recipe.sections.model import ModelSection

    saved = {
        int(path.parent.name.removeprefix("step_")): path.parent
        for path in (run / CHECKPOINTS).glob("step_*/tokenizer_config.json")
        if path.parent.name.removeprefix("step_").isdecimal()
    }
    if saved:
        return load_tokenizer(ModelSection(path=str(saved[max(saved)])), light=True)
    if recipe_of(str(run))[1] is None:
        raise UserError(f"{run}: has no checkpoint and no recipe, by whose tokenizer --tokens could be printed")
    return load_tokenizer(ModelSection(path=load_recipe(str(RunFolder(run).recipe())).model.path), light=True)
