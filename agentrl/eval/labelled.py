"""Stored conversations as others read them: rows of `agentrl sft`, and pairs of `agentrl reward-model`."""

from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path

from agentrl.checkpoint.run_folder import TRAJECTORIES
from agentrl.errors import UserError, nearest
from agentrl.eval.notes import Notes, read_notes, rows_of
from agentrl.images import FOLDER as IMAGES
from agentrl.images import shown
from agentrl.plugins.types import Json
from agentrl.rollout.trajectory_file import Record, path_to, read_records, read_schemas, stored_files

_PAIRS = 8  # of one group


def conversation(record: Record, path: Path, unlearned: Collection[int] = ()) -> Iterator[dict[str, Json]]:
    """Yield the conversations of a record as `agentrl sft` reads them, images in them; of a tree each, whole.

    path: its file. unlearned: the turns that are not learned.
    """
    pictures, tools = path.parent.parent / IMAGES, tools_of(record, path)
    segments = record.get("segments") or []
    parents = [segment["parent"] for segment in segments]
    for leaf in sorted(set(range(len(parents))) - set(parents)) or [-1]:
        way = path_to(leaf, parents)
        messages = [m for index in way for m in record["branches"][index]] if way else record["messages"]
        turns = [
            index
            for index, turn in enumerate(record.get("turns") or [])
            if not way or any(segments[s]["start"] <= turn["start"] < segments[s]["end"] for s in way)
        ]
        yield {"messages": _weighted([shown(m, pictures) for m in messages], turns, unlearned), **tools}


def tools_of(record: Record, path: Path) -> dict[str, Json]:
    """`tools`: the schemas of the tools that a sample had; nothing where one of them is not stored."""
    names = list(record.get("tools") or [])
    if path.suffix != ".parquet" or not names:
        return {}
    known = {one["function"]["name"]: one for one in _schemas(path, path.stat().st_mtime_ns)}
    return {"tools": [known[name] for name in names]} if all(name in known for name in names) else {}


@lru_cache(maxsize=4)
def _schemas(path: Path, version: int) -> list[dict[str, Json]]:
    return read_schemas(path)


def _weighted(messages: list[Json], turns: list[int], unlearned: Collection[int]) -> list[Json]:
    """Messages, those of turns that are not learned with a weight of 0. Turns are matched from the end: an opening may
    hold messages of an assistant that were not sampled."""
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for at, turn in zip(reversed(said), reversed(turns), strict=False):
        if turn in unlearned:
            messages[at] = {**messages[at], "weight": 0}
    return messages


class Labelled:
    """The samples of a run folder that people gave one of two labels."""

    def __init__(self, folder: Path, good: str = "good", bad: str = "bad") -> None:
        """Raises UserError: none has the label `good`, or a file is damaged."""
        self.folder, self.good, self.bad = folder, good, bad
        said = read_notes(folder)
        every = {label for one in said.values() for label, _ in one.labels}
        if good not in every:
            hint = nearest(good, every) if every else ", nor another: put them on in `agentrl view`"
            raise UserError(f"{folder}: no sample has the label {good!r}{hint}")
        self._groups: dict[tuple[Path, Json, str], list[tuple[Record, Notes]]] = {}
        for file in stored_files(folder / TRAJECTORIES):
            rows = rows_of(file.path, said)
            for row, record in enumerate(read_records(file.path)) if rows else ():
                if row in rows and not record.get("failure"):
                    one = said[rows[row]]
                    key = file.path, record.get("group"), record["task"]
                    self._groups.setdefault(key, []).append((record, one))

    def conversations(self) -> list[dict[str, Json]]:
        """Those labelled `good`, as `agentrl sft` reads them; their turns that are labelled `bad` are not learned."""
        each = [
            conversation(record, path, said.turns(self.bad))
            for (path, _, _), group in self._groups.items()
            for record, said in group
            if said.labelled(self.good)
        ]
        return [row for rows in each for row in rows]

    def pairs(self) -> list[dict[str, Json]]:
        """One labelled `good` and one labelled `bad` of the same group, as `agentrl reward-model` reads them. Trees
        and conversations with images, which it learns from runs alone, are left out."""
        found: list[dict[str, Json]] = []
        for (path, _, _), group in self._groups.items():
            tools = tools_of(group[0][0], path)
            plain = [(record["messages"], said) for record, said in group if _is_plain(record)]
            chosen, rejected = (
                [messages for messages, said in plain if said.labelled(label)] for label in (self.good, self.bad)
            )
            both = [{"chosen": one, "rejected": other, **tools} for one in chosen for other in rejected if one != other]
            found += both[:_PAIRS]
        return found


def _is_plain(record: Record) -> bool:
    contents = [message.get("content") for message in record["messages"]]
    return not record.get("segments") and not any(isinstance(content, list) for content in contents)
