"""LoRA (arXiv:2106.09685) by peft: an adapter in the linear layers of a model, which alone is trained.

The invariant: the base's weights never change, and how the adapter is kept shows nowhere else. A layer computes with
`weight_of`; the merged model has the names of the base (`merged_tensors`); on disk an adapter has peft's own format.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl.errors import UserError, nearest
from agentrl.models.vision import towers
from agentrl.recipe.sections.model import LoraSection
from agentrl.remote import fetched, is_remote

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
ALL = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of every tensor's name in peft's files."""

FOREIGN = {"use_dora": False, "use_rslora": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}
"""What peft can do besides, and its value where an adapter does without."""


def add_adapter(model: "PreTrainedModel", section: LoraSection, base: str, seed: int = 0) -> None:
    """Put an adapter into `model`, in place: new, which changes nothing yet, or the one in `section.start`.

    Only its parameters, float32, want gradients from then on. base: what adapter files are to name as their base model.
    seed: what a new one's values depend on, beside the names of its layers.
    Raises UserError: targets that the model has not, a start that does not fit.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=target_names(model, section.layers, section.exclude, section.vision),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(config, model, ADAPTER)
    for parameter in adapter_parameters(model):
        parameter.data = parameter.data.float()
    if section.start is not None:
        start = fetched(section.start, "model.lora.start") if is_remote(section.start) else Path(section.start)
        _load(model, section, start.expanduser())
    else:
        _begin(model, seed)


def target_names(
    model: "PreTrainedModel", targets: tuple[str, ...], exclude: tuple[str, ...] = (), vision: bool = False
) -> list[str]:
    """The full names of the layers that get an adapter: those whose name ends with one of `targets`, unless one
    of `exclude` stands in it between dots. vision: also those of the vision tower."""
    head, seeing = model.get_output_embeddings(), towers(model)
    if vision and not seeing:
        raise UserError(f"model.lora.targets: vision: {type(model).__name__} has no vision tower: leave it out")
    tower = {id(module) for each in seeing for module in each.modules()} if not vision else set()
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    linear = [name for name in linear if id(model.get_submodule(name)) not in tower]
    if ALL in targets:
        if not linear:
            raise UserError(f"model.lora: {type(model).__name__} has no plain nn.Linear layer")
        found = {ALL: linear}
    else:
        found = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    known = sorted({name.rpartition(".")[2] for name in linear})
    if missing := next((target for target, names in found.items() if not names), None):
        raise UserError(
            f"model.lora.targets: {type(model).__name__} has no linear layer {missing!r} that can take an adapter"
            f"{nearest(missing, known)}; it has {', '.join(known)}"
            f"{', and those of its vision tower by vision' if tower else ''}"
        )
    chosen = {name for names in found.values() for name in names}
    without = {part: {name for name in chosen if f".{part}." in f".{name}."} for part in exclude}
    if idle := next((part for part, names in without.items() if not names), None):
        raise UserError(f"model.lora.exclude: no layer that would take an adapter has {idle!r} in its name")
    left = [name for name in linear if name in chosen and not any(name in names for names in without.values())]
    if not left:
        raise UserError("model.lora.exclude: it leaves no layer that takes an adapter")
    return left if ALL in targets else sorted(left)


def is_adapted(module: object) -> bool:
    """Whether this layer has an adapter."""
    return hasattr(module, "base_layer") and ADAPTER in getattr(module, "lora_A", ())


def layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by name; empty: the model has none."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The matrices A and B of every layer with an adapter, in the order of `adapter_state`."""
    return [matrix.weight for layer in layers(model).values() for matrix in _matrices(layer)]


def weight_of(layer: Any) -> Tensor:
    """The effective weight of a linear layer, [out, in]: merged with its adapter if that is on, with gradients
    to the adapter, and without its dropout."""
    weight: Tensor = layer.weight
    return merged(layer) if is_adapted(layer) and not layer.disable_adapters else weight


def merged(layer: Any, whole: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
    """Weight + scaling x B A of a layer with an adapter, summed in float32, whether the adapter is on or off.

    whole: applied to each tensor first, for example to gather its shards.
    """
    a, b = (whole(matrix.weight) for matrix in _matrices(layer))
    weight = whole(layer.base_layer.weight)
    return torch.add(weight.float(), b.float() @ a.float(), alpha=layer.scaling[ADAPTER]).to(weight.dtype)


def has_dropout(model: nn.Module) -> bool:
    """Whether any layer of the adapter has dropout."""
    return any(not isinstance(layer.lora_dropout[ADAPTER], nn.Identity) for layer in layers(model).values())


@contextmanager
def dropping_out(model: nn.Module) -> Iterator[None]:
    """Apply the adapter's dropout inside the block."""
    drops = [layer.lora_dropout[ADAPTER] for layer in layers(model).values()]
    for drop in drops:
        drop.train()
    try:
        yield
    finally:
        for drop in drops:
            drop.eval()


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Inside the block `model` is its base.

    peft's `enable_adapters` would also take the adapter's wish for gradients away for a while, and what FSDP2 learns
    about its parameters in the first pass it never learns again.
    """
    found = layers(model).values()
    for layer in found:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in found:
            layer._disable_adapters = False


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Of the model as it would be without an adapter: name, parameter or buffer, and the layer whose adapter it is to
    be `merged` with (None: it stands for itself)."""
    found = layers(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner, inside, leaf = name.rpartition(".base_layer.")
        if inside and owner in found:
            yield f"{owner}.{leaf}", tensor, found[owner] if leaf == "weight" else None
        elif name.partition(".lora_")[0] not in found:
            yield name, tensor, None


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by their names in peft's files."""
    return {
        f"{PREFIX}{name}.lora_{letter}.weight": matrix.weight.detach()
        for name, layer in layers(model).items()
        for letter, matrix in zip("AB", _matrices(layer), strict=True)
    }


def adapter_config(model: Any) -> dict[str, Any]:
    """The content of peft's adapter_config.json."""
    found = {**model.peft_config[ADAPTER].to_dict(), "inference_mode": True}
    return dict(json.loads(json.dumps(found, default=lambda value: sorted(value))))


def describe(model: nn.Module) -> str:
    """One line about the adapter."""
    found = layers(model)
    own = sum(p.numel() for p in adapter_parameters(model))
    rank = next(iter(found.values())).r[ADAPTER]
    total = sum(p.numel() for p in model.parameters())
    return f"LoRA of rank {rank} on {len(found)} layers: {own:,} parameters train, {total - own:,} stay as they are"


def _matrices(layer: Any) -> tuple[Any, Any]:
    return layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]


@torch.no_grad()
def _begin(model: nn.Module, seed: int) -> None:
    """A uniform in +-1/sqrt(inputs), as peft begins, and B 0. They are the same in any process, on any device, whatever
    was drawn before: each layer has a generator of its own."""
    for name, layer in layers(model).items():
        a, b = _matrices(layer)
        if a.weight.is_meta:
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        own = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = a.weight.shape[1] ** -0.5
        a.weight.copy_(torch.empty(a.weight.shape).uniform_(-bound, bound, generator=own))
        b.weight.zero_()


@torch.no_grad()
def _load(model: "PreTrainedModel", section: LoraSection, folder: Path) -> None:
    config, state = _read(folder)
    where = f"model.lora.start: {folder}"
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where} is a {config.get('peft_type')} adapter, not LoRA")
    if other := [key for key, plain in FOREIGN.items() if config.get(key, plain) not in (plain, None)]:
        raise UserError(f"{where} has {other[0]}: {config[other[0]]!r}, which is not supported")
    for ours, theirs in (("rank", "r"), ("alpha", "lora_alpha")):
        if config.get(theirs) != getattr(section, ours):
            wanted = f"{where} has {ours} {config.get(theirs)}, model.lora.{ours} is {getattr(section, ours)}"
            raise UserError(f"{wanted}: make them equal")
    own = adapter_state(model)
    if odd := sorted(own.keys() ^ state.keys()):
        lacks = "lacks" if odd[0] in own else "has"
        raise UserError(f"{where} does not fit model.lora.targets: it {lacks} {odd[0]} (and {len(odd) - 1} more)")
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            shapes = f"{list(state[name].shape)}, the model wants {list(tensor.shape)}"
            raise UserError(f"{where} is of another model: {name} is {shapes}")
        tensor.copy_(state[name])


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return config, load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"model.lora.start: {folder} is no folder of peft's format: {error}") from error
