"""Adapters as peft itself merges and saves them: what ours are compared with."""

from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor

from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.models.lora import ADAPTER
from agentrl.recipe.sections.model import LoraSection, ModelSection


def merged_state(model: Any) -> dict[str, Tensor]:
    """The state dict of the base with the adapter merged into it; `model` may have none."""
    state = {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if ".lora_" not in name
    }
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            state[f"{name}.weight"] = state[f"{name}.weight"] + layer.get_delta_weight(ADAPTER).detach()
    return state


def save_adapter(model: Any, folder: Path) -> None:
    """A folder that `PeftModel.from_pretrained` loads over the base."""
    model.peft_config[ADAPTER].save_pretrained(folder)
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    save_file(
        {f"base_model.model.{name}": t.contiguous() for name, t in state.items()}, folder / "adapter_model.safetensors"
    )


ADAPTED = {"rank": 4, "alpha": 8}


def stirred(model: Any) -> Any:
    """With an adapter that does something: a new one's B is 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lora.adapter_parameters(model):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    return load_model(ModelSection(lora=LoraSection.model_validate({**ADAPTED, **changes})))[0]
