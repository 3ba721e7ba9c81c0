"""A constraint as servers take it. Their library is another than ours, and does not tell which ids it allowed."""

import json
from typing import Any

from agentrl.constraint import Constraint, Shape
from agentrl.engine.base import ConstraintError
from agentrl.plugins.types import Json


def json_only(constraint: Constraint) -> str | None:
    """The schema where the whole turn is JSON of it; None where there is text around it, or a thought."""
    (first, *others) = constraint.shapes
    plain = not others and not first.before and not first.after and constraint.thought is None
    return first.schema if plain else None


def structural_tag(constraint: Constraint) -> str:
    """The constraint as a structural tag, which SGLang and vLLM both give to xgrammar, as JSON text. Raises
    ConstraintError."""
    if constraint.opener:
        raise ConstraintError(
            "rollout.strict_calls: servers are not asked for it; use the engine local or transformers"
        )
    shapes = _either([_sequence(_parts(shape)) for shape in constraint.shapes])
    if constraint.thought is None:
        return _written(shapes)
    opening, closing = constraint.thought
    begin = "" if constraint.begun else opening
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": closing}
    gap = {"type": "regex", "pattern": "\\n{0,2}"}
    behind = _sequence([thought, gap, shapes])
    return _written(behind if constraint.begun else _either([behind, shapes]))


def _parts(shape: Shape) -> list[dict[str, Json]]:
    value: dict[str, Json] = {"type": "json_schema", "json_schema": json.loads(shape.schema)}
    texts: list[Any] = [{"type": "const_string", "value": text} for text in (shape.before, shape.after)]
    return [part for part in (texts[0], value, texts[1]) if part.get("value") != ""]


def _sequence(elements: list[dict[str, Json]]) -> dict[str, Json]:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _either(elements: list[dict[str, Json]]) -> dict[str, Json]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _written(form: dict[str, Json]) -> str:
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
