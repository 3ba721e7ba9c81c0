"""Read a YAML recipe and command-line overrides into a checked model; every mistake is one line that names its key.

A recipe may have `extends: other.yaml`, relative to its own file, or the name of a recipe that ships: mappings merge,
lists and scalars replace, and an empty mapping (`args: {}`) empties what the other file has there.
`sft.new_model.chat_template` in a file is relative to that file too, because it ships beside the recipe, and so is
`model.chat_template`, where such a file is there. Every other path (`env.source`, `model.path`, `output`) is relative
to the working directory, in a file as on the command line.
"""

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from agentrl.errors import UserError, nearest
from agentrl.jsonable import Json
from agentrl.recipe.document import GIVEN, Document, Key, Reference, describe, dotted, move, read_document, read_file
from agentrl.recipe.mistakes import explain
from agentrl.recipe.previous import modernize
from agentrl.recipe.secrets import masked, secret_values
from agentrl.recipe.shipped import shipped_recipes
from agentrl.secrets import remember
from agentrl.terminal import terminal

Model = TypeVar("Model", bound=BaseModel)

RENAMED: dict[str, str] = {}
"""Old key -> new key, both dotted and outside of lists. The old one is still read, with a line, until RENAMED_UNTIL."""
RENAMED_UNTIL = "0.3.0"

SHORT: dict[Key, str] = {
    ("algorithm",): "preset",
    ("algorithm", "advantage"): "name",
    ("algorithm", "loss"): "name",
    ("agent",): "name",
    ("teacher",): "path",
}
"""Section for which a text may stand -> the key that the text then is."""
COMMAND_LINE = "command line"
_BESIDE_THE_RECIPE: tuple[Key, ...] = (("sft", "new_model", "chat_template"),)
"""Keys whose paths are relative to the recipe that names them."""
_BESIDE_IF_THERE: tuple[Key, ...] = (("model", "chat_template"),)
"""Those that are where such a file is there, and else to the working directory."""


def read_recipe(
    model: type[Model], path: str | Path | None, overrides: Sequence[str]
) -> tuple[Model, dict[Key, Reference]]:
    """Read a recipe as a `model`; None: one that says nothing. Returns it, and what stood in the file where a `${VAR}`
    was. Raises UserError."""
    file = _existing(Path(path)) if path is not None else COMMAND_LINE
    document = _extended(file, ()) if isinstance(file, Path) else Document({})
    for text in overrides:
        _override(document, text)
    if isinstance(file, Path) and not document.value:
        raise UserError(f"{file}: is empty; a recipe has at least one key, such as `extends: gsm8k_tool`")
    _put_variables(document)
    remember(secret_values(document.references))
    try:
        # JSON mode is strict about types (no text for a number, no true for 1) and takes lists where tuples are kept.
        recipe = model.model_validate_json(json.dumps(document.value), strict=True)
    except ValidationError as error:
        raise UserError(explain(error, document, str(file), model)) from None
    return recipe, document.references


def _existing(path: Path, where: str = "") -> Path:
    """A file: `path`, or the recipe of that name that ships. where: begins the UserError."""
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{where}{path}: is a folder, expected a recipe file{_files_in(path, '')}")
    shipped = shipped_recipes()
    if str(path) in shipped:
        return shipped[str(path)]
    folder = path.parent if path.parent.is_dir() else Path(".")
    raise UserError(f"{where}{path}: no such recipe file{_files_in(folder, path.name)}")


def _files_in(folder: Path, name: str) -> str:
    """A hint: recipes of the folder, or recipes that ship, with a name like `name`; without one all of the folder."""
    folders = [folder, *([folder / "recipes"] if (folder / "recipes").is_dir() else [])]
    files = {p.name: str(p) for d in folders for p in d.iterdir() if p.suffix in (".yaml", ".yml")}
    shipped = list(shipped_recipes())
    close = [files[c] for c in difflib.get_close_matches(name, files, n=2, cutoff=0.5)]
    if close := close or difflib.get_close_matches(Path(name).stem, shipped, n=2, cutoff=0.5):
        return "; did you mean " + " or ".join(close) + "?"
    if not name:
        return f"; known: {', '.join(sorted(files.values()) or shipped)}"
    nearest = ", ".join(difflib.get_close_matches(name, shipped, n=3, cutoff=0.0))
    return f"; the nearest that ship are {nearest}; `agentrl recipes` lists all"


def _extended(path: Path, seen: tuple[Path, ...]) -> Document:
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise UserError(f"{path}: extends: files extend each other in a circle: {chain}")
    document = read_file(path)
    _rename(document)
    for line in modernize(document):
        _say(f"{line}; the old key is read until {RENAMED_UNTIL}")
    parent = document.value.pop("extends", None)
    document.references.pop(("extends",), None)
    _anchor_paths(document, path)
    if parent is None:
        return document
    where = document.origins[("extends",)]
    if not isinstance(parent, str):
        raise UserError(f"{where}: extends: expected the path of one recipe, got {describe(parent)}")
    beside = path.parent / parent
    named = Path(parent) if parent in shipped_recipes() and not beside.exists() else beside
    base = _extended(_existing(named, f"{where}: extends: "), (*seen, path.resolve()))
    for key in SHORT:
        if _mapping_at(document.value, key):
            _write_out(base, key)
    kept = {key: reference for key, reference in base.references.items() if _stands(key, document.value)}
    merged = _merged(base.value, document.value)
    return Document(merged, base.origins | document.origins, kept | document.references)


def _mapping_at(tree: object, key: Key) -> dict[str, Json] | None:
    """The mapping that lies at `key`; None where something else does, or nothing."""
    for part in key:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def _write_out(document: Document, key: Key) -> None:
    """Make a section of the text that stands for one at `key`, if one does, so that others of its keys can be set."""
    place = _mapping_at(document.value, key[:-1])
    if place is None or not isinstance(text := place.get(str(key[-1])), str):
        return
    name = SHORT[key]
    place[str(key[-1])] = {name: text}
    if key in document.origins:
        document.origins[(*key, name)] = document.origins[key]
    if key in document.references:
        document.references[(*key, name)] = document.references.pop(key)


def _rename(document: Document) -> None:
    """Move what stands at an old key to the new one. Raises UserError where both are there."""
    for old, new in RENAMED.items():
        source, target = tuple(old.split(".")), tuple(new.split("."))
        place = _mapping_at(document.value, source[:-1])
        if place is None or source[-1] not in place:
            continue
        where = document.origins[source]
        there: Json = document.value
        for part in target[:-1]:
            there = there.setdefault(part, {})
            if not isinstance(there, dict):
                raise UserError(f"{where}: {old} is now {new}, which cannot stand in {describe(there)}")
        if target[-1] in there:
            raise UserError(f"{where}: {old} is the old name of {new}, which is given too: leave out {old}")
        there[target[-1]] = place.pop(source[-1])
        move(document.origins, source, target)
        move(document.references, source, target)
        _say_renamed(where, old, new)


def _say_renamed(where: str, old: str, new: str) -> None:
    _say(f"{where}: {old} is now called {new}; the old name is read until {RENAMED_UNTIL}")


@cache  # a run reads its recipe more than once
def _say(line: str) -> None:
    terminal(stderr=True).print(line, style="yellow", markup=False, soft_wrap=True)


def _anchor_paths(document: Document, file: Path) -> None:
    """Make paths that are relative to `file` absolute."""
    for key in (*_BESIDE_THE_RECIPE, *_BESIDE_IF_THERE):
        place = _mapping_at(document.value, key[:-1])
        if place is None or not isinstance(place.get(str(key[-1])), str):
            continue
        path = Path(place[str(key[-1])])
        if key in _BESIDE_IF_THERE and not (file.parent / path).is_file():
            continue
        place[str(key[-1])] = anchored = str((file.parent / path).resolve())
        if (reference := document.references.get(key)) is not None:
            text = reference.text if path.is_absolute() else f"{file.parent.resolve()}/{reference.text}"
            document.references[key] = replace(reference, text=text, value=anchored)


def _merged(base: Mapping[str, Json], top: Mapping[str, Json]) -> dict[str, Json]:
    value = dict(base)
    for name, new in top.items():
        old = value.get(name)
        value[name] = _merged(old, new) if isinstance(old, dict) and isinstance(new, dict) and new else new
    return value


def _stands(key: Key, top: Json) -> bool:
    """Whether what lies at `key` is still there once `top` is merged over it."""
    place = top
    for part in key:
        if not isinstance(place, dict) or (not place and place is not top):
            return False
        if part not in place:
            return True
        place = place[part]
    return False


def _override(document: Document, text: str) -> None:
    name, equals, raw = text.partition("=")
    name = name.strip()
    if not equals or not name or "" in name.split("."):
        raise UserError(f"{COMMAND_LINE}: {text!r} is not key=value, such as rollout.n=16")
    name = _new_name(name)
    given = read_document(raw, f"{COMMAND_LINE}: {name}", numbered=False)
    parts = name.split(".")
    for key in SHORT:
        if len(parts) > len(key) and key == tuple(parts[: len(key)]):
            _write_out(document, key)
    place: Json = document.value
    key = ()
    for i, part in enumerate(parts):
        step = _step(place, part, key, name)
        key = (*key, step)
        if i == len(parts) - 1:
            _put(place, step, given.value)
        else:
            place = _descend(place, step)
    document.origins[key] = COMMAND_LINE
    document.origins.update({(*key, *below): COMMAND_LINE for below in given.origins})
    for gone in [previous for previous in document.references if previous[: len(key)] == key]:
        del document.references[gone]
    document.references.update({(*key, *below): reference for below, reference in given.references.items()})


def _put_variables(document: Document) -> None:
    """Make references of the secrets that were written out on the command line, to variables of this process and those
    that it starts, so that they are written nowhere: a file is the user's own, and a run folder may be anybody's."""
    shown = masked(document.value)
    for key, where in document.origins.items():
        value = _value_at(document.value, key)
        if where != COMMAND_LINE or key in document.references or value == _value_at(shown, key):
            continue
        if isinstance(value, str | int | float):
            variable = _variable(key, str(value))
            os.environ[variable] = str(value)
            document.references[key] = Reference(f"${{{variable}}}", not isinstance(value, str), value)


def _value_at(tree: Json, key: Key) -> Json:
    for part in key:
        there = part in tree if isinstance(tree, dict) else isinstance(tree, list) and int(part) < len(tree)
        if not there:
            return None
        tree = tree[part]
    return tree


def _variable(key: Key, value: str) -> str:
    """The name of a variable for the value of a key, which none of another value has."""
    named = next(i for i in reversed(range(len(key))) if isinstance(key[i], str))
    name = GIVEN + "_".join(re.sub(r"\W", "_", str(part)).upper() for part in key[named:])
    names = chain((name,), (f"{name}_{number}" for number in count(2)))
    return next(name for name in names if os.environ.get(name, value) == value)


def _new_name(name: str) -> str:
    """The key of an override by its present name."""
    for old, new in RENAMED.items():
        if name == old or name.startswith(f"{old}."):
            _say_renamed(COMMAND_LINE, old, new)
            return new + name.removeprefix(old)
    return name


def _step(place: Json, part: str, key: Key, name: str) -> str | int:
    """The key or index that `part` stands for in `place`. A list entry is found by its index or its `name`."""
    if isinstance(place, dict):
        return part
    if not isinstance(place, list):
        raise UserError(f"{COMMAND_LINE}: {name}: {dotted(key)} is {describe(place)}, so it has no keys")
    if part.isdecimal() and int(part) <= len(place):
        return int(part)
    names = [_name_of(entry) for entry in place]
    if part in names:
        return names.index(part)
    entries = "1 entry" if len(place) == 1 else f"{len(place)} entries"
    known = nearest(part, [n for n in names if n])
    raise UserError(f"{COMMAND_LINE}: {name}: {dotted(key)} has {entries}, and {part!r} is none of them{known}")


def _name_of(entry: object) -> str | None:
    return entry if isinstance(entry, str) else entry.get("name") if isinstance(entry, dict) else None


def _put(place: Json, step: str | int, value: Json) -> None:
    if isinstance(place, list) and step == len(place):
        place.append(value)
    else:
        place[step] = value


def _descend(place: Json, step: str | int) -> Json:
    """What lies at `step`, a new mapping if it is absent; an entry that is only a name becomes `{name: ...}`."""
    if isinstance(place, list):
        if step == len(place):
            place.append({})
        elif isinstance(place[int(step)], str):
            place[int(step)] = {"name": place[int(step)]}
        return place[int(step)]
    if place.get(step) is None:
        place[step] = {}
    return place[step]
