"""From a YAML file and command-line overrides to a checked `Recipe`; every mistake is one line that names its key.

A recipe may say `extends: other.yaml`, relative to the file that says so: mappings merge, lists and scalars replace,
and an empty mapping (`args: {}`) empties what the other file has there.
`sft.new_model.chat_template` in a file is relative to that file too, because it ships beside the recipe. Every other
path (`env.source`, `model.path`, `output`) is relative to the working directory, in a file as on the command line.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.errors import UserError, nearest
from agentrl.recipe.document import Document, Key, describe, dotted, dump, read_document, read_file
from agentrl.recipe.mistakes import explain
from agentrl.recipe.schema import Recipe
from agentrl.recipe.secrets import masked

COMMAND_LINE = "command line"
_BESIDE_THE_RECIPE: tuple[Key, ...] = (("sft", "new_model", "chat_template"),)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, extend, override and check a recipe.

    overrides: `rollout.n=16`, `env.args.names=[a, b]`, `tools.0.args.max_operations=4` (or `tools.calculator.args...`);
    the value is YAML. An override replaces the value at its key. Raises UserError.
    """
    file = _existing(Path(path))
    document = _extended(file, ())
    for text in overrides:
        _override(document, text)
    try:
        # JSON mode is strict about types (no text for a number, no true for 1) and takes lists where tuples are kept.
        recipe = Recipe.model_validate_json(json.dumps(document.value), strict=True)
    except ValidationError as error:
        raise UserError(explain(error, document, str(file))) from None
    return recipe.with_references(document.references)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, every key, with `${VAR}` where one stood; `load_recipe` reads it back to an equal one."""
    return dump(recipe.written())


def show_recipe(recipe: Recipe) -> str:
    """The recipe as YAML for people: `dump_recipe` without the values of secrets."""
    return dump(masked(recipe.written()))


def recipe_name(path: str | Path) -> str:
    """The name that run folders carry: the file's, without its ending."""
    return Path(path).stem


def _existing(path: Path, said_by: str = "") -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{said_by}{path}: is a folder, wants a recipe file{_files_in(path, '')}")
    folder = path.parent if path.parent.is_dir() else Path(".")
    raise UserError(f"{said_by}{path}: no such recipe file{_files_in(folder, path.name)}")


def _files_in(folder: Path, name: str) -> str:
    folders = [folder, *([folder / "recipes"] if (folder / "recipes").is_dir() else [])]
    files = {p.name: str(p) for d in folders for p in d.iterdir() if p.suffix in (".yaml", ".yml")}
    close = difflib.get_close_matches(name, files, n=2, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(files[c] for c in close) + "?"
    return f"; known: {', '.join(sorted(files.values()))}" if files else ""


def _extended(path: Path, seen: tuple[Path, ...]) -> Document:
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise UserError(f"{path}: extends: files extend each other in a circle: {chain}")
    document = read_file(path)
    parent = document.value.pop("extends", None)
    document.references.pop(("extends",), None)
    _anchor_paths(document, path)
    if parent is None:
        return document
    where = document.origins[("extends",)]
    if not isinstance(parent, str):
        raise UserError(f"{where}: extends: wants the path of one recipe, got {describe(parent)}")
    base = _extended(_existing(path.parent / parent, f"{where}: extends: "), (*seen, path.resolve()))
    kept = {key: reference for key, reference in base.references.items() if _stands(key, document.value)}
    merged = _merged(base.value, document.value)
    return Document(merged, base.origins | document.origins, kept | document.references)


def _anchor_paths(document: Document, file: Path) -> None:
    for key in _BESIDE_THE_RECIPE:
        place: Any = document.value
        for part in key[:-1]:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or not isinstance(place.get(key[-1]), str):
            continue
        path = Path(place[str(key[-1])])
        place[str(key[-1])] = anchored = str((file.parent / path).resolve())
        if (reference := document.references.get(key)) is not None:
            text = reference.text if path.is_absolute() else f"{file.parent.resolve()}/{reference.text}"
            document.references[key] = replace(reference, text=text, value=anchored)


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    value = dict(base)
    for name, new in top.items():
        old = value.get(name)
        value[name] = _merged(old, new) if isinstance(old, dict) and isinstance(new, dict) and new else new
    return value


def _stands(key: Key, top: Any) -> bool:
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
        raise UserError(f"{COMMAND_LINE}: {text!r} is no override; write key=value, such as rollout.n=16")
    given = read_document(raw, f"{COMMAND_LINE}: {name}", numbered=False)
    parts = name.split(".")
    place: Any = document.value
    key: Key = ()
    for i, part in enumerate(parts):
        step = _step(place, part, key, name)
        key = (*key, step)
        if i == len(parts) - 1:
            _put(place, step, given.value)
        else:
            place = _descend(place, step)
    document.origins[key] = COMMAND_LINE
    document.origins.update({(*key, *below): COMMAND_LINE for below in given.origins})
    for gone in [former for former in document.references if former[: len(key)] == key]:
        del document.references[gone]
    document.references.update({(*key, *below): reference for below, reference in given.references.items()})


def _step(place: Any, part: str, key: Key, name: str) -> str | int:
    """The key or index that `part` means in `place`. A list entry is found by its index or by its `name`."""
    if isinstance(place, dict):
        return part
    if not isinstance(place, list):
        raise UserError(f"{COMMAND_LINE}: {name}: {dotted(key)} is {describe(place)}, so nothing lies below it")
    if part.isdecimal() and int(part) <= len(place):
        return int(part)
    names = [_name_of(entry) for entry in place]
    if part in names:
        return names.index(part)
    entries = "1 entry" if len(place) == 1 else f"{len(place)} entries"
    known = nearest(part, [n for n in names if n])
    raise UserError(f"{COMMAND_LINE}: {name}: {dotted(key)} has {entries}, and {part!r} is none of them{known}")


def _name_of(entry: Any) -> str | None:
    return entry if isinstance(entry, str) else entry.get("name") if isinstance(entry, dict) else None


def _put(place: Any, step: str | int, value: Any) -> None:
    if isinstance(place, list) and step == len(place):
        place.append(value)
    else:
        place[step] = value


def _descend(place: Any, step: str | int) -> Any:
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
