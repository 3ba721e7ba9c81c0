"""Presets of `algorithm`: the settings of published methods, as the keys that they set."""

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.jsonable import Json


@dataclass(frozen=True, slots=True)
class Preset:
    """What a preset sets; a recipe's own keys come over it."""

    text: str
    """The paper, and where the preset differs from it."""
    keys: Mapping[str, Json]
    """Keys of `algorithm` and their values."""


_SYMMETRIC = {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": None}
PRESETS = {
    "grpo": Preset(
        "DeepSeekMath, arXiv:2402.03300: group-relative advantages, KL to the reference in the loss",
        {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "sequence_mean", "kl_coef": 0.04, "kl_in": "loss"}
        | _SYMMETRIC,
    ),
    "dapo": Preset(
        "arXiv:2503.14476: clip-higher, every token counts the same, dynamic sampling, overlong penalty",
        {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean", **_SYMMETRIC, "clip_high": 0.28}
        | {"dynamic_sampling": {}, "overlong": {}},
    ),
    "dr_grpo": Preset(
        "arXiv:2503.20783: no standard deviation, sums by a constant; the constant is rollout.max_tokens",
        {"advantage": "dr_grpo", "loss": "ppo_clip", "aggregation": "constant", **_SYMMETRIC},
    ),
    "gspo": Preset(
        "arXiv:2507.18071: one ratio a sample",
        {"advantage": "grpo", "loss": "gspo", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4}
        | {"clip_dual": None},
    ),
    "sapo": Preset(
        "arXiv:2511.20347: a smooth gate in place of the clip",
        {"advantage": "grpo", "loss": "sapo", "aggregation": "sequence_mean"},
    ),
    "cispo": Preset(
        "MiniMax-M1, arXiv:2506.13585: every token keeps its gradient, its weight is bounded; the paper names no bound",
        {"advantage": "grpo", "loss": "cispo", "aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
    ),
    "vespo": Preset(
        "arXiv:2602.10693: a smooth weight of the whole sample's ratio in place of the clip",
        {"advantage": "grpo", "loss": "vespo", "aggregation": "token_mean"},
    ),
    "trl": Preset(
        "the defaults of TRL 1.16's GRPOConfig: the loss of DAPO alone, no KL; where one is set, its unbiased estimate",
        {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean", "kl_estimator": "k3*"} | _SYMMETRIC,
    ),
    "gmpo": Preset(
        "arXiv:2507.20673: geometric mean of ratios that are clipped token by token",
        {"advantage": "grpo", "loss": "gmpo", "aggregation": "sequence_mean", "clip_low": 0.4, "clip_high": 0.4},
    ),
    "rloo": Preset(
        "arXiv:2402.14740: leave-one-out baseline, plain policy gradient of whole samples, KL in the reward",
        {"advantage": "rloo", "loss": "reinforce", "aggregation": "sequence_sum", "kl_coef": 0.03, "kl_in": "reward"},
    ),
    "reinforce++": Preset(
        "arXiv:2501.03262: no comparison within a task, advantages whitened over the step, KL in the reward",
        {"advantage": "reinforce_plus_plus", "loss": "ppo_clip", "kl_coef": 0.01, "kl_in": "reward"} | _SYMMETRIC,
    ),
    "ppo": Preset(
        "arXiv:1707.06347 with GAE; needs `critic: {}` beside it",
        {"advantage": {"name": "gae", "args": {"lam": 0.95}}, "loss": "ppo_clip"} | _SYMMETRIC,
    ),
    "opd": Preset(
        "on-policy distillation, arXiv:2306.13649 at lambda 1 with the reverse KL of arXiv:2306.08543: no reward is "
        "learned from; needs a `teacher` beside it",
        {"streams": {"policy": 0, "distill": 1}, "loss": "reinforce", "aggregation": "token_mean"},
    ),
    "gigpo": Preset(
        "arXiv:2505.10978: whole samples compared, and turns that began in the same state, which the environment names",
        {"advantage": "gigpo", "loss": "ppo_clip", "aggregation": "sequence_mean", "kl_coef": 0.01, "kl_in": "loss"}
        | _SYMMETRIC,
    ),
    "clip_cov": Preset(
        "arXiv:2505.22617: some tokens that would lower the entropy most carry no gradient; hardly another clip",
        {"advantage": "grpo", "loss": "clip_cov", "aggregation": "token_mean", "clip_low": 1.0, "clip_high": 1.0},
    ),
    "kl_cov": Preset(
        "arXiv:2505.22617: tokens that would lower the entropy most are pulled back; needs several updates a step",
        {"advantage": "grpo", "loss": "kl_cov", "aggregation": "token_mean"},
    ),
    "gdpo": Preset(
        "arXiv:2601.05242: each part of the reward compared by itself",
        {"advantage": "gdpo", "loss": "ppo_clip", "aggregation": "sequence_mean"} | _SYMMETRIC,
    ),
    "top_entropy": Preset(
        "arXiv:2506.01939: DAPO on the fifth of the tokens of the highest entropy; without its dynamic sampling",
        {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean", "top_entropy": 0.2}
        | {**_SYMMETRIC, "clip_high": 0.28},
    ),
    "turn": Preset(
        "credit by turn: rewards to go from a turn on, against other rollouts that reached it; for environments whose "
        "replies carry rewards",
        {"advantage": "turn", "loss": "ppo_clip", "aggregation": "constant"} | _SYMMETRIC,
    ),
}
"""Presets by name."""
