"""Write the arrays that `test_verl.py` compares with: what verl computes of an invented step, as JSON on stdout.

Run by hand where verl is installed (it is not a dependency):

    pip install --no-deps verl==0.9.1
    pip install packaging numpy ray "tensordict>=0.8,<=0.10,!=0.9.0" omegaconf codetiming
    pip install "transformers>=5.5.3,<5.11,!=5.6.0"
    python tests/algo/verl_arrays.py > tests/algo/verl_0_9_1.json
"""

import json
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo import rollout_corr_helper as rejection
from verl.workers.config import ActorConfig


class Config(dict[str, Any]):
    """What the estimators read of verl's `algorithm`."""

    gamma = 0.9


SAMPLES, LENGTH, GROUP = 12, 14, 4
CLIP_LOW, CLIP_HIGH = 0.2, 0.3
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {}, "grpo_passk": {"config": Config()}, "rloo": {}, "opo": {}, "gpg": {},
    "reinforce_plus_plus_baseline": {},
    "reinforce_plus_plus": {"config": Config()},
    "gae": {"gamma": 0.9, "lam": 0.8},
}  # fmt: skip
LOSSES = ["vanilla", "gspo", "sapo", "gpg", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov"]
MODES = ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
REJECTIONS = {
    "token_k1": "0.8_1.3", "token_k2": 0.05, "token_k3": 0.05, "seq_sum_k1": "0.6_1.5", "seq_sum_k3": 0.4,
    "seq_mean_k1": "0.9_1.1", "seq_mean_k2": 0.04, "seq_max_k2": 0.15, "seq_max_k3": 0.2,
}  # fmt: skip
KLS = ["k1", "abs", "k2", "k3", "k1+", "k3+"]


def main() -> None:
    """Invent a step, with tool results in the middle of samples, and write what verl makes of it."""
    rng = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, LENGTH + 1, (SAMPLES,), generator=rng)
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).float()
    mask[::2, 1:2] = 0.0  # holes
    mask[::3, 4:6] = 0.0
    scores = torch.randint(0, 3, (SAMPLES,), generator=rng).float()
    scores[GROUP : 2 * GROUP] = 1.0  # a group of equals
    last = (mask * torch.arange(LENGTH)).argmax(1)
    rewards = torch.zeros(SAMPLES, LENGTH).scatter(1, last[:, None], scores[:, None])
    old = -torch.rand(SAMPLES, LENGTH, generator=rng) * 2
    new = old + 0.6 * torch.randn(SAMPLES, LENGTH, generator=rng).clamp(-2, 2) * mask
    new = new.clamp(max=-1e-3)
    reference = old + 0.3 * torch.randn(SAMPLES, LENGTH, generator=rng)
    values = torch.randn(SAMPLES, LENGTH, generator=rng)
    index = np.repeat(np.arange(SAMPLES // GROUP), GROUP)
    found: dict[str, Any] = {
        "mask": mask, "scores": scores, "old": old, "new": new, "reference": reference, "values": values,
        "clip": [CLIP_LOW, CLIP_HIGH], "group": GROUP, "advantages": {}, "losses": {}, "sums": {}, "kl": {},
    }  # fmt: skip
    given = {"token_level_rewards": rewards, "response_mask": mask}
    for name, more in ESTIMATORS.items():
        known = {"values": values} if name == "gae" else {} if name == "reinforce_plus_plus" else {"index": index}
        arguments = {key: value.clone() if torch.is_tensor(value) else value for key, value in (given | known).items()}
        found["advantages"][name] = verl.get_adv_estimator_fn(name)(**arguments, **more)[0] * mask
    other = torch.rand(
        SAMPLES, generator=torch.Generator().manual_seed(8)
    )  # a second part of the reward, of less spread
    parts = {"right": scores.numpy(), "brief": other.numpy()}
    asked = {"gdpo_reward_keys": list(parts), "gdpo_reward_weights": [1.0, 0.25]}
    layout = {"prompts": torch.zeros(SAMPLES, 1), "attention_mask": torch.ones(SAMPLES, LENGTH + 1).long()}
    found["parts"] = {name: part.tolist() for name, part in parts.items()}
    found["advantages"]["gdpo"] = verl.get_adv_estimator_fn("gdpo")(
        **given, index=index, config=asked, non_tensor_batch=parts, batch=layout
    )[0]
    estimate = old.exp()  # of the sum of squared probabilities, from the token alone, as ours
    found["advantages"]["optimal_token_baseline"] = verl.get_adv_estimator_fn("tir_optimal_token_baseline")(
        **given, index=index, old_log_probs=old, sum_pi_squared=estimate
    )[0]
    plain = verl.compute_grpo_outcome_advantage(
        token_level_rewards=rewards.clone(), response_mask=mask, index=index, norm_adv_by_std_in_grpo=False
    )
    found["advantages"]["dr_grpo"] = plain[0]
    advantages = found["advantages"]["grpo"]
    for name in LOSSES:
        config = ActorConfig(
            strategy="fsdp", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=CLIP_LOW,
            clip_ratio_high=CLIP_HIGH, clip_ratio_c=20.0 if name.startswith("dppo") else 3.0,
        )  # fmt: skip
        chosen = {
            "clip_cov_ratio": 1.0,
            "clip_cov_lb": 0.1,
            "clip_cov_ub": 0.6,
            "kl_cov_ratio": 0.2,
            "ppo_kl_coef": 0.5,
        }
        config.policy_loss.__dict__.update(chosen, dro_beta=0.4)  # all candidates of clip_cov: no draw
        logprobs = new.clone().requires_grad_()
        mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
        loss, _ = verl.get_policy_loss_fn(name)(old, logprobs, advantages, mask, mode, config)
        loss.backward()
        found["losses"][name] = {"loss": loss.detach(), "gradient": logprobs.grad}
    found["rejected"] = {}
    for rule, bound in REJECTIONS.items():
        kept, _ = rejection.compute_rollout_rejection_mask(reference - old, mask, rule, bound)
        found["rejected"][rule] = mask - kept
    for mode in MODES:
        found["sums"][mode] = verl.agg_loss(new, mask, mode)
    for name in KLS:
        logprobs = new.clone().requires_grad_()
        each = verl.kl_penalty(logprobs, reference, name)
        each.sum().backward()
        found["kl"][name] = {"value": each.detach(), "gradient": logprobs.grad}
    print(json.dumps(found, default=lambda tensor: json.loads(json.dumps(tensor.tolist()))))


if __name__ == "__main__":
    main()
