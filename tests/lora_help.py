"""Adapters as peft itself merges and saves them: what ours are compared with."""

from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor

from agentrl.models.lora import ADAPTER


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
