"""TRL's trainer on an environment that `agentrl env serve` offers: `python trl_on_env_server.py URL MODEL STEPS ROWS`.

Prints what TRL logged of each step, as JSON.
"""

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, daemon=True).start()


class Client:
    """An episode at the server after another."""

    url = ""

    def __init__(self) -> None:
        self._socket: Any = None

    async def _say(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self._socket is None:
            self._socket = await aiohttp.ClientSession().ws_connect(self.url + "/ws")
        await self._socket.send_json({"type": kind, "data": data})
        said = await self._socket.receive_json()
        if said["type"] != "observation":
            raise RuntimeError(json.dumps(said))
        found: dict[str, Any] = said["data"]
        return found

    def _asked(self, kind: str, **data: Any) -> str:
        found = asyncio.run_coroutine_threadsafe(self._say(kind, data), LOOP).result()
        self._reward += found["reward"] or 0.0
        return str(found["observation"]["text"])

    def reset(self, index: int, **row: Any) -> str:
        """Begin a task, and say what the environment opens with."""
        self._reward = 0.0
        return self._asked("reset", split="train", index=index)

    def weigh(self, box: int):  # no annotated result: TRL would put it into the prompt
        """Weigh a box.

        Args:
            box: The number of the box.
        """
        return self._asked("step", type="call_tool", tool_name="weigh", arguments={"box": box})

    def get_reward(self) -> float:
        self._asked("step", message="Two boxes are weighed.")
        return self._reward


class Logs(TrainerCallback):
    """What is printed in the end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.rows.append(dict(logs))


def main(url: str, model: str, steps: int, rows: int) -> None:
    torch.set_num_threads(1)
    Client.url, logs = url, Logs()
    opening = [{"role": "user", "content": ""}]  # to whose end `reset` adds the environment's
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list([{"prompt": opening, "index": index} for index in range(rows)]),
        environment_factory=Client,
        callbacks=[logs],
        args=GRPOConfig(
            output_dir=str(Path(model) / "trl"), max_steps=steps, learning_rate=1e-5, per_device_train_batch_size=16,
            num_generations=4, gradient_accumulation_steps=1, max_completion_length=192, max_tool_calling_iterations=2,
            temperature=1.0, beta=0.0, bf16=False, use_cpu=True, gradient_checkpointing=False, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        ),
    )  # fmt: skip
    trainer.train()
    print(json.dumps(logs.rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
