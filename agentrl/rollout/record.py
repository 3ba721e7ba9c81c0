"""A trajectory as one JSON object: a line of `trajectories/*.jsonl`. It holds what people and viewers read."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.rollout.trajectory import Trajectory


def record(trajectory: Trajectory, *, tokens: bool = False, solved: bool | None = None) -> dict[str, Any]:
    """The object; every value can be written as JSON. tokens: with ids, mask, logprobs and versions a token.
    solved: the environment's word, None where it was not asked for."""
    t = trajectory
    line: dict[str, Any] = {
        "request": t.request_id,
        "task": t.task.id,
        "data": _plain(t.task.data),
        "sample": t.sample,
        "reward": t.reward,
        "rewards": dict(t.rewards),
        "weights": dict(t.weights),
        "solved": solved,
        "finish": str(t.finish),
        "failure": None if t.failure is None else {"boundary": str(t.failure.boundary), "message": t.failure.message},
        "turns": [{"start": turn.start, "end": turn.end, "reward": turn.reward} for turn in t.turns],
        "tokens": {"prompt": t.prompt_length, "sampled": t.sampled_tokens, "all": len(t.ids)},
        "messages": _plain(t.messages),
        "tools": list(t.tools),
        "tool_uses": [
            {
                "name": u.name,
                "turn": u.turn,
                "seconds": round(u.seconds, 6),
                "error": u.error,
                "cut": u.cut,
                "metrics": dict(u.metrics),
            }
            for u in t.tool_uses
        ],
        "seconds": {name: round(value, 6) for name, value in t.seconds.items()},
        "extra": _plain(t.extra),
    }
    if tokens:
        line["ids"] = t.ids.tolist()
        line["loss_mask"] = t.loss_mask.tolist()
        line["logprobs"] = [round(p, 6) for p in t.logprobs.tolist()]
        line["weight_version"] = t.weight_version.tolist()
    return line


def _plain(value: Any) -> Any:
    """JSON's own types, of anything: what has no such form (an image, an object) is written as its name."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"
