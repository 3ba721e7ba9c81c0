"""Recipes of earlier versions: how what their keys said is written now.

Files are read, recipes of run folders above all, which hold every key: what stands at an old key moves to the new one,
and is said where it is no default. On the command line an old key is an error that names the new one.
"""

from collections.abc import Iterator

from agentrl.jsonable import Json
from agentrl.recipe.document import Document, Key, move
from agentrl.recipe.presets import PRESETS

_NOW = {
    "agent.max_total_tokens": "is now `rollout.max_total_tokens`",
    "agent.sandbox_folders": "is now a list in `agent.sandbox`",
    "agent.train_auxiliary": (
        "is now `agent.train`: every answer that somebody received is trained (`all`); `tools` leaves out those of "
        "calls without tools"
    ),
    "algorithm.gamma": "is now an argument of the advantage: `algorithm.advantage.args.gamma`",
    "algorithm.lam": "is now an argument of the advantage gae: `algorithm.advantage.args.lam`",
    "algorithm.normalize_std": (
        "was removed: for false write `algorithm.advantage: dr_grpo` (in place of grpo), for true leave it out"
    ),
    "model.lora.vision": "is now written `model.lora.targets: [all-linear, vision]`",
    "reward_model.eval_every": "is now `eval.every`",
    "reward_model.warmup_steps": "is now `train.warmup`",
    "reward_model.weight_decay": "is now `train.weight_decay`",
    "sft.stages.N.optimizer": "was removed: `sft.stages.N.muon_lr: 0.02` trains by Muon, without it AdamW does",
    "sft.stages.N.warmup_steps": "is now `sft.stages.N.warmup`",
    "teacher.url": "is now `teacher.path`, which may be the URL of a server",
    "train.warmup_ratio": "is now `train.warmup`: a number of steps, or, below 1, a share of them",
    "train.warmup_steps": "is now `train.warmup`: a number of steps, or, below 1, a share of them",
    **{
        f"eval.{key}": f"is now `eval.rollout.{key}`"
        for key in ("temperature", "top_p", "top_k", "max_turns", "max_turn_tokens", "max_tokens")
    },
}
"""Keys that are gone, N for the number of a list's entry, and what to write in their place."""
_MOVED: dict[str, tuple[str, Json]] = {
    "agent.max_total_tokens": ("rollout.max_total_tokens", 65_536),
    "algorithm.gamma": ("algorithm.advantage.args.gamma", 1.0),
    "algorithm.lam": ("algorithm.advantage.args.lam", 1.0),
    "reward_model.eval_every": ("eval.every", 50),
    "reward_model.warmup_steps": ("train.warmup", 0),
    "reward_model.weight_decay": ("train.weight_decay", 0.0),
    "teacher.url": ("teacher.path", None),
    "train.warmup_steps": ("train.warmup", 0),
    "train.warmup_ratio": ("train.warmup", 0.0),
    **{old: (old.replace("eval.", "eval.rollout.", 1), None) for old in _NOW if old.startswith("eval.")},
}
"""Old keys whose values are those of new ones, and what they said by default."""
_DISCOUNTS = {
    **dict.fromkeys(("gae", "pf_ppo_best_worst", "pf_ppo_best_random"), ("gamma", "lam")),
    **dict.fromkeys(("reinforce_plus_plus", "turn"), ("gamma",)),
}
"""Advantages, and which of the keys gamma and lam are arguments of theirs."""


def now_written(key: Key) -> str | None:
    """How what stood at an old key is written now; None where the key is not an old one."""
    return _NOW.get(".".join("N" if isinstance(part, int) else part for part in key))


def modernize(document: Document) -> list[str]:
    """Move what stands at old keys to the new ones; return a line for each that said more than its default."""
    lines = []
    origins = dict(document.origins)
    for key, said in _changes(document):
        words = now_written(key) or "is written another way now, as docs/reference/recipe.md says"
        if said:
            lines.append(f"{origins.get(key, 'recipe')}: {'.'.join(map(str, key))} {words}")
    return lines


def _changes(document: Document) -> Iterator[tuple[Key, bool]]:
    """Change the document, and yield each old key, and whether it said more than its default."""
    tree = document.value
    algorithm = _at(tree, "algorithm")
    for old, (new, default) in _MOVED.items():
        *above, name = old.split(".")
        place = _at(tree, *above)
        if name not in place:
            continue
        value = place.pop(name)
        if value != default or (name in ("gamma", "lam") and name in _DISCOUNTS.get(_advantage(algorithm), ())):
            _put(document, tuple(old.split(".")), tuple(new.split(".")), value)
        yield tuple(old.split(".")), value != default
    if algorithm.get("normalize_std") is True:
        yield ("algorithm", "normalize_std"), not algorithm.pop("normalize_std")
    for key, said in _values(tree):
        for table in (document.origins, document.references):
            for below in [other for other in table if other[: len(key)] == key and other != key]:
                del table[below]  # what they spoke of has another form now
        yield key, said
    for number, part in enumerate(_entries(_at(tree, "env").get("mix"))):
        if isinstance(part.get("teacher"), dict):
            key = ("env", "mix", number, "teacher")
            teacher = part["teacher"]
            part["teacher"] = name = f"mix_{number}"
            _put(document, key, ("teachers", name), teacher)
            if (url := teacher.pop("url", None)) is not None:
                _put(document, ("teachers", name, "url"), ("teachers", name, "path"), url)
            yield key, True


def _values(tree: Json) -> Iterator[tuple[Key, bool]]:
    """The keys whose values are written another way."""
    parts: dict[Key, dict[str, Json]] = {("algorithm",): _at(tree, "algorithm")}
    parts |= {("env", "mix", number): part for number, part in enumerate(_entries(_at(tree, "env").get("mix")))}
    for key, part in parts.items():
        if "streams" in part and part["streams"] is None:
            del part["streams"]
        streams = _at(part, "streams")
        for name, weight in list(streams.items()):
            if weight is None:
                del streams[name]
            elif isinstance(weight, dict) and "start" in weight:
                start, end = weight["start"], weight.get("end")
                streams[name] = start if end is None else {"0": start, str(weight.get("steps", 0)): end}
                yield (*key, "streams", name), True
    cluster, agent, lora = _at(tree, "cluster"), _at(tree, "agent"), _at(tree, "model", "lora")
    if isinstance(offload := cluster.get("offload"), dict):
        cluster["offload"] = [name for name, wanted in offload.items() if wanted]
        yield ("cluster", "offload"), any(offload.values())
    if "sandbox_folders" in agent:
        folders = agent.pop("sandbox_folders")
        agent["sandbox"] = folders if folders and agent.get("sandbox") else agent.get("sandbox", False)
        yield ("agent", "sandbox_folders"), bool(folders)
    if "vision" in lora:
        if vision := lora.pop("vision"):
            lora["targets"] = [*_listed(lora.get("targets", "all-linear")), "vision"]
        yield ("model", "lora", "vision"), bool(vision)
    for number, stage in enumerate(_entries(_at(tree, "sft").get("stages"))):
        if "optimizer" in stage:
            muon = stage.pop("optimizer") == "muon"
            stage["muon_lr"] = stage.get("muon_lr", 0.02) if muon else None
            yield ("sft", "stages", number, "optimizer"), muon
        if "warmup_steps" in stage:
            stage["warmup"] = stage.pop("warmup_steps")
            yield ("sft", "stages", number, "warmup_steps"), stage["warmup"] is not None


def _advantage(algorithm: Json) -> str:
    """The name of the advantage that a section of a recipe has."""
    preset = PRESETS.get(str(algorithm.get("preset")))
    advantage = algorithm.get("advantage", preset.keys.get("advantage") if preset is not None else None)
    return str(advantage.get("name") if isinstance(advantage, dict) else advantage)


def _put(document: Document, old: Key, new: Key, value: Json) -> None:
    """Put a value at a key, with what is known of where it was written."""
    place = document.value
    for part in new[:-1]:
        if not isinstance(place.get(part), dict):
            text = place.get(part)
            place[part] = {"name": text} if isinstance(text, str) else {}
        place = place[part]
    place[new[-1]] = value
    move(document.origins, old, new)
    move(document.references, old, new)


def _at(tree: Json, *key: str) -> dict[str, Json]:
    """The mapping at a key; an empty one where there is none."""
    for part in key:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def _entries(value: Json) -> list[dict[str, Json]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _listed(value: Json) -> list[Json]:
    return list(value) if isinstance(value, list) else [value]
