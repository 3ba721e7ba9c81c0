"""A tool's JSON schema as prompts have it: in the form of `transformers.utils.get_json_schema`, which models know.

Keys in its order; what may be null as `nullable`; choices as `enum` with a type; each $ref replaced by what it points
to, since few templates show definitions; nothing that says no more than its absence.
"""

from collections.abc import Mapping

from agentrl.errors import UserError
from agentrl.plugins.types import Json

_ORDER = (
    "type", "properties", "required", "items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "enum",
    "nullable", "description",
)  # fmt: skip
_LEFT_OUT = frozenset({"$schema", "$id", "$anchor", "$comment", "$defs", "definitions"})
_ONE = frozenset({"items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"})
_MANY = frozenset({"prefixItems", "items", "anyOf", "oneOf", "allOf"})
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas"})
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_SUBSCHEMAS = 5_000  # more fills any prompt; a few references to references can mean billions


def prompt_schema(parameters: Mapping[str, Json]) -> dict[str, Json]:
    """The schema of a tool's arguments, rewritten; the given one is left as it is.

    Raises UserError for a schema that refers to itself or to nothing, and for one that is too large when written out.
    """
    try:
        written = _Writer(parameters).write(parameters, (), None)
    except RecursionError:
        raise UserError("its parameters are nested too deeply for a prompt") from None
    return _ordered({"type": "object", "properties": {}, **written})


def target(pointer: str, root: Mapping[str, Json]) -> Mapping[str, Json]:
    """What a JSON pointer such as `#/$defs/Place` points to. Raises UserError."""
    found: Json = root
    for part in filter(None, pointer.removeprefix("#").split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise UserError(f"$ref {pointer!r} in a tool's parameters points to nothing")
    return found


class _Writer:
    def __init__(self, root: Mapping[str, Json]) -> None:
        self._root, self._left = root, _SUBSCHEMAS

    def write(self, schema: object, above: tuple[str, ...], name: str | None) -> Json:
        """Rewrite a schema. above: the references that this stands in. name: of the property that it describes."""
        if not isinstance(schema, Mapping):  # true, false, or what only its author understands
            return schema
        self._left -= 1
        if self._left < 0:
            raise UserError("its parameters are too large for a prompt, with each $ref replaced by what it points to")
        schema, above = self._inlined(schema, above)
        schema = _with_enum(_without_null_type(schema))
        made = {key: self._value(key, value, above) for key, value in schema.items() if key not in _LEFT_OUT}
        return _ordered(_brief(_joined(made), name))

    def _inlined(
        self, schema: Mapping[str, Json], above: tuple[str, ...]
    ) -> tuple[Mapping[str, Json], tuple[str, ...]]:
        """Resolve a reference, and a choice where there is none; what stands beside them comes first."""
        while True:
            rest = dict(schema)
            if isinstance(pointer := schema.get("$ref"), str):
                del rest["$ref"]
                if pointer in above:
                    raise UserError(
                        f"its parameters refer to themselves ($ref {pointer!r}), which a prompt cannot hold: "
                        "give them a type without recursion"
                    )
                above = (*above, pointer)
                schema = _merged(target(pointer, self._root), rest) if pointer.startswith("#") else rest
            elif choice := _only_choice(schema):
                key, option, nullable = choice
                del rest[key]
                schema = {**_merged(option, rest), **({"nullable": True} if nullable else {})}
            else:
                return schema, above

    def _value(self, key: str, value: object, above: tuple[str, ...]) -> Json:
        if key in _NAMED and isinstance(value, Mapping):
            return {name: self.write(one, above, str(name)) for name, one in value.items()}
        if key in _MANY and isinstance(value, list):
            return [self.write(one, above, None) for one in value]
        return self.write(value, above, None) if key in _ONE else value


def _merged(base: Mapping[str, Json], over: Mapping[str, Json]) -> dict[str, Json]:
    below, above = base.get("properties"), over.get("properties")
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        over = {**over, "properties": {**below, **above}}
    return {**base, **over}


def _only_choice(schema: Mapping[str, Json]) -> tuple[str, Mapping[str, Json], bool] | None:
    """The keyword, its only option besides null, and whether there is a null."""
    for key in ("allOf", "anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            kept = [option for option in options if key == "allOf" or not _is_null(option)]
            if len(kept) == 1 and isinstance(kept[0], Mapping):
                return key, kept[0], len(kept) < len(options)
    return None


def _is_null(schema: object) -> bool:
    return isinstance(schema, Mapping) and (schema.get("type") == "null" or schema.get("const", "") is None)


def _without_null_type(schema: Mapping[str, Json]) -> Mapping[str, Json]:
    kinds = schema.get("type")
    if not isinstance(kinds, list) or "null" not in kinds or len(kinds) < 2:
        return schema
    rest = [kind for kind in kinds if kind != "null"]
    return {**schema, "type": rest[0] if len(rest) == 1 else rest, "nullable": True}


def _with_enum(schema: Mapping[str, Json]) -> Mapping[str, Json]:
    """A constant as the only choice; choices with their types."""
    if "const" in schema and "enum" not in schema:
        schema = {("enum" if key == "const" else key): [v] if key == "const" else v for key, v in schema.items()}
    choices = schema.get("enum")
    if "type" in schema or not isinstance(choices, list) or not all(type(value) in _TYPES for value in choices):
        return schema
    kinds = list(dict.fromkeys(_TYPES[type(value)] for value in choices))
    return {**schema, "type": kinds[0] if len(kinds) == 1 else kinds} if kinds else schema


def _joined(schema: dict[str, Json]) -> dict[str, Json]:
    """A choice of bare types as a list of them; null among other choices as `nullable`."""
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if not isinstance(options, list):
            continue
        kept = [option for option in options if not _is_null(option)]
        if not kept:
            continue
        null = {"nullable": True} if len(kept) < len(options) else {}
        rest = {name: value for name, value in schema.items() if name != key}
        kinds = [option["type"] for option in kept if isinstance(option, dict) and option.keys() == {"type"}]
        if "type" not in schema and len(kinds) == len(kept) and all(isinstance(kind, str) for kind in kinds):
            names = sorted(set(kinds))
            return {**rest, "type": names[0] if len(names) == 1 else names, **null}
        schema = {**schema, key: kept, **null}
    return schema


def _brief(schema: dict[str, Json], name: str | None) -> dict[str, Json]:
    """Drop what says nothing: what is open by default, a title that repeats the name, a null that may be null."""
    for key in ("items", "additionalProperties"):
        if key in schema and schema[key] in (True, {}):
            del schema[key]
    prefix = schema.get("prefixItems")
    if isinstance(prefix, list) and schema.get("minItems") == schema.get("maxItems") == len(prefix):
        del schema["minItems"], schema["maxItems"]
    if name is not None and _letters(schema.get("title")) == _letters(name):
        del schema["title"]
    if schema.get("nullable") is True and "default" in schema and schema["default"] is None:
        del schema["default"]
    return schema


def _letters(text: object) -> str:
    return "".join(filter(str.isalnum, text.casefold())) if isinstance(text, str) else "\n"


def _ordered(schema: Mapping[str, Json]) -> dict[str, Json]:
    keys = [*(key for key in _ORDER if key in schema), *(key for key in schema if key not in _ORDER)]
    return {key: schema[key] for key in keys}
