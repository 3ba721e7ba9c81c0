"""Find functions and packages of others in an image: `python3 -I copies.py`, JSON on standard input.

It is `{"files": {file name: {function: text}}, "packages": [names], "without": [folders]}`. Printed is a JSON line
each: `["function", file name, function]` where a file of that name has the text, or defines a function of that name at
its top; `["package", name]` where a folder from which Python imports, one of vendored packages or a wheel has it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_SYSTEM = ("/proc", "/sys", "/dev")
_IMPORTED = re.compile(r"(.*/)?(site-packages|dist-packages|_?vendor(ed|ized)?|python3(\.\d+)?)")
_WHEELS = (".whl", ".egg")


def packages(folder: str, folders: list[str], files: list[str]) -> Iterator[str]:
    """Names of what can be imported from a folder, where it is one from which Python imports."""
    if _IMPORTED.fullmatch(folder):
        yield from folders
        yield from (name[: -len(".py")] for name in files if name.endswith(".py"))


def packed(path: str) -> Iterator[str]:
    """The same of a wheel."""
    try:
        with zipfile.ZipFile(path) as wheel:
            members = wheel.namelist()
    except (OSError, zipfile.BadZipFile):
        return
    for member in members:
        folder, _, name = member.rpartition("/")
        above, _, below = folder.rpartition("/")
        if name.endswith(".py"):
            if not folder or _IMPORTED.fullmatch(folder):
                yield name[: -len(".py")]
            if folder and (not above or _IMPORTED.fullmatch(above)):
                yield below


def same(path: str, functions: dict[str, str]) -> Iterator[str]:
    """The functions that a file has, in this or another version."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = file.read()
    except OSError:
        return
    for name, text in functions.items():
        if text in found or re.search(rf"^def {name}\b", found, re.MULTILINE):
            yield name


def main() -> None:
    """Search all folders from / on."""
    asked: dict[str, Any] = json.load(sys.stdin)
    without = {*_SYSTEM, *asked["without"]}
    wanted, said = set(asked["packages"]), set[tuple[str, ...]]()
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in without]
        found: list[tuple[str, ...]] = [("package", name) for name in wanted & {*packages(folder, folders, files)}]
        for name in files:
            path = os.path.join(folder, name)
            if name in asked["files"]:
                found += [("function", name, one) for one in same(path, asked["files"][name])]
            elif name.endswith(_WHEELS):
                found += [("package", one) for one in wanted & {*packed(path)}]
        for one in found:
            if one not in said:
                print(json.dumps(one), flush=True)
        said.update(found)


if __name__ == "__main__":
    main()
