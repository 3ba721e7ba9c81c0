"""A YAML document as plain JSON values, and the place that every key came from.

Scalars follow the core schema of YAML 1.2, not 1.1: `1e-4` is a number; `off`, `1:30` and `2026-01-01` are text; keys
are text as written. `${VAR}` and `${VAR:-default}` in a value are replaced from the process environment; an unquoted
value is then read again, so `n: ${N:-16}` is a number and `n: "${N:-16}"` is text. `$${` stands for a plain `${`.
What was written in such a value's place is kept beside it, as a `Reference`: secrets come this way, and are written
nowhere.
"""

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from agentrl.errors import UserError
from agentrl.jsonable import Json

Key = tuple[str | int, ...]
Value = TypeVar("Value")
TAG = "tag:yaml.org,2002:"
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
GIVEN = "AGENTRL_SECRET_"
"""How the names of variables begin that stand for secrets of the command line in what is written."""
REPEATED = 10_000
"""Values that aliases (`*name`) may repeat in a document: nine lines of them can stand for billions."""
_FLOAT = re.compile(r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?")
_SCALARS = (
    ("int", re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+"), "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the class attribute that PyYAML reads


class _Dumper(yaml.SafeDumper):
    """Quotes what any reader, this one or one of YAML 1.1, would not take for text."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Represent a text; line breaks of Unicode survive in double quotes alone."""
    style = '"' if any(c in text for c in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(TAG + "str", text, style=style)


def _reference_node(dumper: yaml.SafeDumper, reference: "Reference") -> yaml.Node:
    return dumper.represent_scalar(TAG + "str", reference.text, style=None if reference.plain else '"')


_Dumper.add_representer(str, _text_node)
for _name, _pattern, _first in _SCALARS:
    _whole = re.compile(rf"^(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(TAG + _name, _whole, list(_first))
    _Dumper.add_implicit_resolver(TAG + _name, _whole, list(_first))


@dataclass(frozen=True, slots=True)
class Reference:
    """A value as it was written, with `${VAR}` in it. plain: it stood without quotes. value: what it stands for now."""

    text: str
    """The text with its `${VAR}` as written."""
    plain: bool
    value: Json = field(repr=False)

    @property
    def variables(self) -> str:
        """Those alone, without defaults and what stands around them: `${TOKEN}`."""
        return "".join(f"${{{name}}}" for name, _ in _VARIABLE.findall(self.text) if name)


_Dumper.add_representer(Reference, _reference_node)


@dataclass(frozen=True, slots=True)
class Document:
    """`value` holds JSON values only. `origins` says for each key (and list entry) where it was written, `references`
    what was written there where that was a `${VAR}`."""

    value: Json
    origins: dict[Key, str] = field(default_factory=dict)
    references: dict[Key, Reference] = field(default_factory=dict)


def dotted(key: Key) -> str:
    """A key as text, its parts joined by dots."""
    return ".".join(str(part) for part in key)


def read_document(text: str, name: str, numbered: bool = True) -> Document:
    """Parse YAML `text`. `name` (and the line, when `numbered`) stands in errors and origins. Raises UserError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        reader = _Reader(name, numbered, loader)
        return Document(reader.build(node, ()) if node else None, reader.origins, reader.references)
    except yaml.YAMLError as error:
        line = _line_of(error) if numbered else ""
        hint = "" if numbered else "; text with such characters needs quotes: NAME='\"a: b\"'"
        raise UserError(f"{name}{line}: not valid YAML: {_problem_of(error)}{hint}") from None
    except RecursionError:
        raise UserError(f"{name}: not valid YAML: nested too deeply") from None
    finally:
        loader.dispose()


def read_file(path: Path) -> Document:
    """Parse a YAML file whose top is a mapping (or empty). Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    document = read_document(text, str(path))
    if document.value is None:
        return Document({})
    if not isinstance(document.value, dict):
        raise UserError(f"{path}: expected `key: value` lines at the top, got {describe(document.value)}")
    return document


def dump(value: object) -> str:
    """YAML that `read_document` reads back to an equal value, whatever the environment holds; a Reference in
    `value` is written as the reference that it is."""
    return yaml.dump(_escaped(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def move(table: dict[Key, Value], source: Key, target: Key) -> None:
    """Give what a table holds of a key, and of what lies below it, another key."""
    for key in [key for key in table if key[: len(source)] == source]:
        table[(*target, *key[len(source) :])] = table.pop(key)


def describe(value: object) -> str:
    """A value for an error message: its kind and a short form."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value if len(value) <= 40 else value[:37] + '...'!r}"
    return "a list" if isinstance(value, list | tuple) else "a mapping"


class _Reader:
    def __init__(self, name: str, numbered: bool, loader: _Loader) -> None:
        self.name, self.numbered, self.loader = name, numbered, loader
        self.origins: dict[Key, str] = {}
        self.references: dict[Key, Reference] = {}
        self.open: set[int] = set()
        self.built: set[int] = set()
        self.repeated = 0

    def build(self, node: yaml.Node, key: Key) -> Json:
        if id(node) in self.open:
            raise UserError(f"{_place(self.where(node), key)}: an alias refers to itself")
        self.repeated += id(node) in self.built
        if self.repeated > REPEATED:
            raise UserError(f"{self.where(node)}: aliases repeat more than {REPEATED:,} values: write them out")
        self.built.add(id(node))
        self.origins[key] = self.where(node)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, key)
        self.open.add(id(node))
        value = self.mapping(node, key) if isinstance(node, yaml.MappingNode) else self.sequence(node, key)
        self.open.remove(id(node))
        return value

    def mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Json]:
        self.refuse_tag(node, key, "map")
        value: dict[str, Json] = {}
        for name_node, value_node in node.value:
            where = self.where(name_node)
            if not isinstance(name_node, yaml.ScalarNode):
                raise UserError(f"{_place(where, key)}: a key must be text")
            name = name_node.value
            path = (*key, name)
            if name in value:
                raise UserError(f"{_place(where, path)}: given twice in one mapping")
            if name == "<<" and name_node.style is None:
                raise UserError(f"{_place(where, path)}: merge keys are not supported; use `extends` at the top")
            value[name] = self.build(value_node, path)
            self.origins[path] = where
        return value

    def sequence(self, node: yaml.Node, key: Key) -> list[Json]:
        self.refuse_tag(node, key, "seq")
        return [self.build(child, (*key, i)) for i, child in enumerate(node.value)]

    def scalar(self, node: yaml.ScalarNode, key: Key) -> Json:
        if "${" not in node.value:
            return self.read(node, node.value, node.tag, key)
        text, tag = self.interpolate(node.value, key, self.where(node)), node.tag
        if node.style is None and tag == TAG + "str":
            tag = self.loader.resolve(yaml.ScalarNode, text, (True, False))
        value = self.read(node, text, tag, key)
        reference = Reference(node.value, node.style is None, value)
        if reference.variables:
            self.references[key] = reference
        return value

    def read(self, node: yaml.ScalarNode, text: str, tag: str, key: Key) -> Json:
        """The value of a scalar whose text is `text`, once its variables are replaced."""
        match tag.removeprefix(TAG):
            case "str":
                return text
            case "int" if _SCALARS[0][1].fullmatch(text):
                return self.whole(text.replace("_", ""), self.where(node), key)
            case "float" if _FLOAT.fullmatch(text):
                number = float(text.replace("_", ""))
                return number if math.isfinite(number) else text
            case "bool":
                return text.lower() == "true"
            case "null":
                return None
        raise UserError(f"{_place(self.where(node), key)}: tag {tag.replace(TAG, '!!')} is not supported here")

    def whole(self, digits: str, where: str, key: Key) -> int:
        try:
            return int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
        except ValueError:  # Python reads no number of more than some thousand digits
            raise UserError(f"{_place(where, key)}: a number of {len(digits):,} digits is too long") from None

    def interpolate(self, text: str, key: Key, where: str) -> str:
        def value_of(match: re.Match[str]) -> str:
            variable, default = match.groups()
            if variable is None:
                return "${"
            if value := os.environ.get(variable) or default:
                return value
            if default is not None:
                return ""
            hint = f"set it, or write ${{{variable}:-default}}"
            if variable.startswith(GIVEN):
                hint = "its value was given on the command line, and was not written down: set it"
            raise UserError(f"{_place(where, key)}: the environment variable {variable} is not set; {hint}")

        return _VARIABLE.sub(value_of, text)

    def where(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.numbered else self.name

    def refuse_tag(self, node: yaml.Node, key: Key, kind: str) -> None:
        if node.tag != TAG + kind:
            tag = node.tag.replace(TAG, "!!")
            raise UserError(f"{_place(self.where(node), key)}: tag {tag} is not supported here")


def _place(where: str, key: Key) -> str:
    return f"{where}: {dotted(key)}" if key else where


def _escaped(value: object) -> Json:
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    return [_escaped(v) for v in value] if isinstance(value, list | tuple) else value


def _line_of(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f":{mark.line + 1}" if mark else ""


def _problem_of(error: yaml.YAMLError) -> str:
    text = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return " ".join(str(text).split())
