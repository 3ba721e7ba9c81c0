"""Runs inside of the workers of a vLLM server on a CPU (`--worker-extension-cls agentrl_worker.Reload`).

There every linear layer computes with a packed copy of its weights. `reload_weights` of vLLM 0.32 packs what it loads;
an output layer that shares the weights of the embedding is not loaded, and would go on with the copy of the old ones.
Experts are packed where they are loaded for the first time alone: where the kernel is there already, what is loaded
again is copied over the packed weights as it is.
"""

from typing import Any


class Reload:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def agentrl_reload(self, weights_path: str) -> None:
        """Load the weights of the whole model from a folder, and pack those again that layers keep beside their
        copy."""
        modules = list(self.model_runner.get_model().modules())
        for module in modules:
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]
        for module in modules:
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
                module.quant_method.process_weights_after_loading(module)
