"""Write what `test_verl.py` compares with: what TRL computes of the step in `verl_0_9_1.json`, as JSON on stdout.

Run by hand, with trl 1.16.0 (the loss of `GRPOTrainer` is called on an object that has what it reads, and no model):

    python tests/algo/trl_arrays.py > tests/algo/trl_1_16_0.json
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer

STEP = json.loads(Path(__file__).with_name("verl_0_9_1.json").read_text())
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "cispo": {"epsilon_high": 1.3},
    "sapo": {},
    "luspo": {"importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "grpo with a KL": {"loss_type": "grpo", "beta": 0.1},
    "grpo with an unbiased KL": {"loss_type": "grpo", "beta": 0.1},
    "grpo with delta": {"loss_type": "grpo"},
    "gspo with delta": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "grpo with OPSM": {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
    "vespo": {},
}
ARGS: dict[str, dict[str, Any]] = {
    "grpo with an unbiased KL": {"use_bias_correction_kl": True},
    "grpo with delta": {"delta": 1.4},
    "gspo with delta": {"delta": 1.4},
}


def main() -> None:
    """Call TRL's loss for each case, with tool results masked in the middle of samples."""
    mask, old, new, reference = (torch.tensor(STEP[name]) for name in ("mask", "old", "new", "reference"))
    advantages = torch.tensor(STEP["advantages"]["grpo"])
    low, high = STEP["clip"]
    found = {}
    for name, changes in CASES.items():
        logprobs = new.clone().requires_grad_()
        trainer = SimpleNamespace(
            loss_type=name, importance_sampling_level="token", beta=0.0, epsilon_low=low, epsilon_high=high,
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False,
            _entropy_bonus_enabled=False, max_completion_length=mask.shape[1], current_gradient_accumulation_steps=1,
            model=SimpleNamespace(training=True), _metrics=defaultdict(lambda: defaultdict(list)),
            args=SimpleNamespace(
                delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
                steps_per_generation=1, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
            ),
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask, get_gamma_weights=GRPOTrainer.get_gamma_weights,
            _get_per_token_logps_and_entropies=lambda *_, new=logprobs, **__: (new, torch.zeros_like(old), None),
        )  # fmt: skip
        vars(trainer).update(changes)
        vars(trainer.args).update(ARGS.get(name, {}))
        ids = torch.zeros_like(mask).long()
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
            "completion_mask": torch.ones_like(mask), "tool_mask": mask, "advantages": advantages,
            "old_per_token_logps": old, "ref_per_token_logps": reference, "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        loss.backward()
        found[name] = {"loss": loss.item(), "gradient": logprobs.grad.tolist()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
