"""Runs inside of the workers of a vLLM server on a CPU (`--worker-extension-cls agentrl_worker.Reload`).

There every linear layer computes with a packed copy of its weights. `reload_weights` of vLLM 0.32 packs what it loads;
an output layer that shares the weights of the embedding is not loaded, and would go on with the copy of the old ones.
"""

from typing import Any


class Reload:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def agentrl_reload(self, weights_path: str) -> None:
        """Load the weights of the whole model from a folder, and pack those again that layers keep beside their
        copy."""
        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]
        for module in self.model_runner.get_model().modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
                module.quant_method.process_weights_after_loading(module)
