"""TRL trains on a served environment, by its `environment_factory` and OpenEnv's own client.

`python trl_openenv.py URL MODEL SITE_PACKAGES OUT`: SITE_PACKAGES holds OpenEnv, and stands behind all other packages.
"""

import json
import sys

URL, MODEL, SITE, OUT = sys.argv[1:]
sys.path.append(SITE)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from openenv.core.generic_client import GenericEnvClient  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Game:
    """One game; its public methods are the tools."""

    def __init__(self) -> None:
        self.env = GenericEnvClient(base_url=URL).sync()
        self.reward = 0.0
        self.moves = 0

    def reset(self, **row: object) -> str:
        self.reward, self.moves = 0.0, 0
        return str(self.env.reset(seed=row["seed"]).observation["text"])

    def move(self, to: str) -> str:
        """Move one step.

        Args:
            to: north, south, east or west.
        """
        self.moves += 1
        try:
            result = self.env.step({"type": "call_tool", "tool_name": "move", "arguments": {"to": to}})
        except RuntimeError as error:  # the game is over
            return str(error)
        self.reward += result.reward
        return str(result.observation["text"])

    def get_reward(self) -> float:
        return self.reward


def paid(environments: list[Game], **kwargs: object) -> list[float]:
    return [game.get_reward() for game in environments]


class Steps(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if logs and "reward" in logs:
            self.rows.append({key: value for key, value in logs.items() if isinstance(value, int | float)})


def main() -> None:
    torch.set_num_threads(1)
    steps = Steps()
    rows = [{"prompt": [{"role": "user", "content": ""}], "seed": seed} for seed in range(32)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        train_dataset=Dataset.from_list(rows),
        environment_factory=Game,
        reward_funcs=[paid],
        callbacks=[steps],
        args=GRPOConfig(
            output_dir=OUT, max_steps=2, learning_rate=1e-4, per_device_train_batch_size=8, num_generations=4,
            max_completion_length=200, max_tool_calling_iterations=4, beta=0.0, bf16=False, use_cpu=True,
            gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )  # fmt: skip
    trainer.train()
    print(json.dumps(steps.rows))


if __name__ == "__main__":
    main()
