"""A docstring as a description and the arguments' descriptions, in the styles of Google, numpy and Sphinx."""

import re
from dataclasses import dataclass
from textwrap import dedent

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|References|See Also|Warnings?)\s*:?$"
)
_TAKES_ARGUMENTS = ("Args", "Arguments", "Parameters", "Params")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")  # name: text, name (type): text; numpy: name : type
_SPHINX = re.compile(
    r":(\w+)(?:\s+[^:]*?)?(?:\s+(\w+))?:\s*(.*)$"
)  # :param x: text, :param int x: text, :returns: text


@dataclass(frozen=True, slots=True)
class Docstring:
    description: str
    arguments: dict[str, str]


def read_docstring(text: str) -> Docstring:
    """`text` as `inspect.getdoc` gives it. Lines of the description are kept; an argument's lines are joined."""
    lines = text.strip().splitlines()
    start = next((i for i in range(len(lines)) if _heading(lines, i)), len(lines))
    head, arguments = _sphinx(lines[:start])
    for i in range(start, len(lines)):
        if _heading(lines, i) in _TAKES_ARGUMENTS:
            end = next((j for j in range(i + 1, len(lines)) if _heading(lines, j)), len(lines))
            ruled = _is_rule(lines[i + 1]) if i + 1 < len(lines) else False
            arguments |= _entries(lines[i + 1 + ruled : end], numpy=ruled)
    return Docstring("\n".join(head).strip(), arguments)


def _heading(lines: list[str], i: int) -> str | None:
    """The section that begins at line `i`: `Args:`, or `Parameters` over a rule of dashes."""
    match = _SECTION.match(lines[i])
    if not match:
        return None
    ruled = i + 1 < len(lines) and _is_rule(lines[i + 1])
    return match.group(1) if ruled or lines[i].rstrip().endswith(":") else None


def _is_rule(line: str) -> bool:
    return len(line.strip()) >= 3 and set(line.strip()) == {"-"}


def _entries(lines: list[str], numpy: bool) -> dict[str, str]:
    """Entries begin where the indent is least; what is indented more belongs to the entry before."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in dedent("\n".join(lines)).splitlines():
        if line[:1].strip():
            if numpy:
                name, text = re.split(r"[\s:,]", line, maxsplit=1)[0], ""
            elif match := _ENTRY.match(line):
                name, text = match.groups()
            else:
                name, text = "", ""
            if name:
                found[name] = [text]
        elif name and line.strip():
            found[name].append(line.strip())
    return {name: " ".join(parts).strip() for name, parts in found.items()}


def _sphinx(lines: list[str]) -> tuple[list[str], dict[str, str]]:
    head: list[str] = []
    arguments: dict[str, str] = {}
    name: str | None = None
    fields = False
    for line in lines:
        if _SPHINX.match(line):
            fields = True
            field = re.match(r":param(?:\s+[^:]*?)?\s+(\w+):\s*(.*)$", line)
            name = field.group(1) if field else None
            if field:
                arguments[field.group(1)] = field.group(2)
        elif fields and line.strip() and name:
            arguments[name] += " " + line.strip()
        elif not fields:
            head.append(line)
    return head, arguments
