"""Stored conversations as others read them: rows of `agentrl sft`, and pairs of `agentrl reward-model`."""

from collections.abc import Collection, Iterator
from pathlib import Path

from agentrl.checkpoint.run_folder import TRAJECTORIES
from agentrl.errors import UserError, nearest
from agentrl.eval.notes import Notes, read_notes, rows_of
from agentrl.images import FOLDER as IMAGES
from agentrl.images import shown
from agentrl.plugins.types import Json
from agentrl.rollout.trajectory_file import Record, path_to, read_records, stored_files

_PAIRS = 8  # of one group


def conversation(record: Record, pictures: Path, unlearned: Collection[int] = ()) -> Iterator[dict[str, Json]]:
    """Yield the conversations of a record as `agentrl sft` reads them, images in them; of a tree each, whole.

    pictures: the folder of its images. unlearned: the turns that are not learned.
    """
    segments = record.get("segments") or []
    parents = [segment["parent"] for segment in segments]
    for leaf in sorted(set(range(len(parents))) - set(parents)) or [-1]:
        path = path_to(leaf, parents)
        messages = [m for index in path for m in record["branches"][index]] if path else record["messages"]
        turns = [
            index
            for index, turn in enumerate(record.get("turns") or [])
            if not path or any(segments[s]["start"] <= turn["start"] < segments[s]["end"] for s in path)
        ]
        yield {"messages": _weighted([shown(m, pictures) for m in messages], turns, unlearned)}


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
        self._groups: dict[tuple[str, Json, str], list[tuple[Record, Notes]]] = {}
        for file in stored_files(folder / TRAJECTORIES):
            rows = rows_of(file.path, said)
            for row, record in enumerate(read_records(file.path)) if rows else ():
                if row in rows and not record.get("failure"):
                    one = said[rows[row]]
                    key = file.path.name, record.get("group"), record["task"]
                    self._groups.setdefault(key, []).append((record, one))

    def conversations(self) -> list[dict[str, Json]]:
        """Those labelled `good`, as `agentrl sft` reads them; their turns that are labelled `bad` are not learned."""
        each = [
            conversation(record, self.folder / IMAGES, said.turns(self.bad))
            for group in self._groups.values()
            for record, said in group
            if said.labelled(self.good)
        ]
        return [row for rows in each for row in rows]

    def pairs(self) -> list[dict[str, Json]]:
        """One labelled `good` and one labelled `bad` of the same group, as `agentrl reward-model` reads them. Trees
        and conversations with images, which it learns from runs alone, are left out."""
        found: list[dict[str, Json]] = []
        for group in self._groups.values():
            plain = [(record["messages"], said) for record, said in group if _is_plain(record)]
            chosen, rejected = (
                [messages for messages, said in plain if said.labelled(label)] for label in (self.good, self.bad)
            )
            both = [{"chosen": one, "rejected": other} for one in chosen for other in rejected if one != other]
            found += both[:_PAIRS]
        return found


def _is_plain(record: Record) -> bool:
    contents = [message.get("content") for message in record["messages"]]
    return not record.get("segments") and not any(isinstance(content, list) for content in contents)
