"""Seconds a step beside TRL: one environment class, written for TRL's `environment_factory`, run unchanged by both.

    python benchmarks/vs_trl.py [--steps 8] [--rounds 2] [--delay 0.2] [--threads 1] [--quick]

A step is 32 rollouts (4 tasks, 8 samples each) of two tool calls and an answer, and one update by GRPO, by the same
tiny model (made by this script, and shown in a few hundred steps how to call the tool), with the same settings:
so many threads, float32, temperature 1, at most 32 tokens a turn, no KL, one optimizer step. TRL runs `GRPOTrainer`
with transformers' `generate`; here the environment is `env: {name: object}`, and as many processes as threads sample.
Each side runs in a process of its own; the sides take turns, and a step's time is the median of all rounds without each
round's first two. CPU time is that of that process alone. Where one side sampled over a tenth more tokens than the
other, the row says so, and the ratios are of a token. Three rows: a tool that answers at once, one that takes `--delay`
seconds, and resets of which one in twenty raises.

It needs the package's extra `test`, which brings TRL.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl import Tracker

TASKS, SAMPLES, TURNS, TURN_TOKENS, LR = 4, 8, 3, 32, 1e-5
WARM_UP = 2
WARM_STEPS = 150
"""Batches of demonstrations that the model has seen: with fewer its turns run into limits, which are not alike."""
SIDE_COLUMNS = "  s/step  cpu-s  tokens"
EQUAL = 1.1
"""Work that differs by a factor of at most this counts as equal."""
ONE_IN = 20
"""One reset in so many raises, where faults are planted."""


class Scales:
    """An environment as TRL's documentation writes them: `reset`, tools with docstrings, `get_reward`."""

    resets = 0

    def __init__(self, delay: float = 0.0, faults: bool = False) -> None:
        self._delay, self._faults = delay, faults

    def reset(self, shelf: int = 0, **row: Any) -> None:
        """Begin a task."""
        type(self).resets += 1
        if self._faults and type(self).resets % ONE_IN == 0:
            raise ConnectionError("the scales do not answer")
        self._shelf, self._weights = shelf, []

    def weigh(self, box: int):  # no annotated result: TRL would put it into the prompt, agentrl does not
        """Weigh a box.

        Args:
            box: The number of the box.
        """
        time.sleep(self._delay)
        self._weights.append((box * 37 + self._shelf * 11) % 900 + 100)
        return str(self._weights[-1])

    def get_reward(self) -> float:
        return max(self._weights, default=0) / 1000


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shelves = [rng.randrange(1, 100) for _ in range(count)]
    return [
        {"prompt": [{"role": "user", "content": f"Find a heavy box on shelf {n}. Weigh two."}], "shelf": n}
        for n in shelves
    ]


def demonstration(row: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    scales, messages = Scales(), list(row["prompt"])
    scales.reset(**row)
    for box in (rng.randrange(10, 100), rng.randrange(10, 100)):
        call = {"type": "function", "function": {"name": "weigh", "arguments": {"box": box}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "weigh", "content": scales.weigh(box)})
    return [*messages, {"role": "assistant", "content": "Two boxes are weighed."}]


def make_model(folder: Path, steps: int) -> None:
    """Save a tokenizer and a model of 0.9 million parameters that has seen `steps` batches of demonstrations."""
    import torch
    import trl
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agentrl.fine_tuning.new_model import train_tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    chat = template.read_text(encoding="utf-8")
    rng = random.Random(0)
    talks = [demonstration(row, rng) for row in rows(1000, seed=1)]
    bare = train_tokenizer([], 0, chat, 1 << 30)

    def rendered(tokenizer: Any, talk: list[dict[str, Any]], **how: Any) -> Any:
        return tokenizer.apply_chat_template(talk, tools=[Scales().weigh], **how)

    tokenizer = train_tokenizer((rendered(bare, talk, tokenize=False) for talk in talks), 512, chat, 1024)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=640, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=1024, initializer_range=0.04,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    how = {"return_dict": True, "return_assistant_tokens_mask": True}
    marked = (template.parent / "qwen2_5_training.jinja").read_text(encoding="utf-8")  # the same, answers marked
    encoded = [rendered(tokenizer, talk, chat_template=marked, **how) for talk in talks]
    warm_up(model, [(torch.tensor(e["input_ids"]), torch.tensor(e["assistant_masks"])) for e in encoded], steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_up(model: Any, talks: list[tuple[Any, Any]], steps: int) -> None:
    """Train on the answers in `talks` (ids and a mask of answers, int64 [n] each), four a step."""
    import torch

    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.2)
    for step in range(steps):
        ids, answers = zip(*(talks[(step * 4 + i) % len(talks)] for i in range(4)), strict=True)
        labels = pad(list(ids)).masked_fill(pad(list(answers)) == 0, -100)
        model(input_ids=pad(list(ids)), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    delay: float = 0.0
    faults: bool = False


class Clock:
    """The wall and CPU time between the ends of steps, and the tokens sampled in each; as JSON lines in `path`."""

    def __init__(self, path: str) -> None:
        self.path, self.last = Path(path), (0.0, 0.0)
        self.begin()

    def begin(self) -> None:
        self.last = time.perf_counter(), time.process_time()

    def step(self, tokens: float, reward: float) -> None:
        now = time.perf_counter(), time.process_time()
        row = [now[0] - self.last[0], now[1] - self.last[1], tokens, reward]
        self.last = now
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class ClockTracker(Tracker):
    """A tracker of ours that tells the clock; found by the import path `vs_trl:ClockTracker`."""

    def start(self, folder: Path, recipe: Any) -> None:
        self.clock = Clock(os.environ["VS_TRL_STEPS"])

    def log(self, step: int, metrics: Any) -> None:
        if step:
            self.clock.step(metrics["rollout/tokens"], metrics["reward/mean"])


def run_agentrl(case: Case, model: str, steps: int, out: str, threads: int) -> None:
    from agentrl import Recipe, train

    os.environ["VS_TRL_STEPS"] = out
    folder = Path(out).with_suffix("")
    source = {}
    for split, seed in (("train", 2), ("test", 3)):
        file = source[split] = f"{folder}_{split}.jsonl"
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows(400, seed)), encoding="utf-8")
    train(
        Recipe.model_validate(
            {
                "model": {"path": model},
                "env": {
                    "name": "object",
                    "source": source["train"],
                    "args": {
                        "factory": "vs_trl:Scales",
                        "args": {"delay": case.delay, "faults": case.faults},
                        "splits": source,
                    },
                },
                "rollout": {"tasks": TASKS, "n": SAMPLES, "max_turns": TURNS, "max_turn_tokens": TURN_TOKENS},
                "train": {"steps": steps, "lr": LR, "save_every": 0, "threads": threads, "betas": [0.9, 0.999]},
                "engine": {"args": {"processes": threads}},
                "eval": {"every": 0, "splits": []},
                "track": {"trackers": ["vs_trl:ClockTracker"]},
                "output": str(folder),
            }
        )
    )


def run_trl(case: Case, model: str, steps: int, out: str, threads: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    clock = Clock(out)

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
            if logs and "completions/mean_length" in logs:
                clock.step(logs["completions/mean_length"] * TASKS * SAMPLES, logs["reward"])

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list(rows(400, seed=2)),
        environment_factory=lambda: Scales(case.delay, case.faults),
        callbacks=[Steps()],
        args=GRPOConfig(
            output_dir=str(Path(out).with_suffix("")), max_steps=steps, learning_rate=LR, lr_scheduler_type="constant",
            per_device_train_batch_size=TASKS * SAMPLES, num_generations=SAMPLES, gradient_accumulation_steps=1,
            max_completion_length=TURNS * 2 * TURN_TOKENS, max_tool_calling_iterations=TURNS - 1, temperature=1.0,
            beta=0.0, loss_type="dapo",
            bf16=False, use_cpu=True, gradient_checkpointing=False, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        ),
    )  # fmt: skip
    trainer.train()


SIDES = {"agentrl": run_agentrl, "trl": run_trl}


@dataclass
class Measured:
    """Steps of one side in one case."""

    steps: list[list[float]]
    error: str = ""

    def middle(self, column: int) -> float:
        return statistics.median(row[column] for row in self.steps)


def measure(side: str, case: Case, model: str, options: argparse.Namespace, folder: Path) -> Measured:
    out = folder / f"{side}_{len(list(folder.iterdir()))}.jsonl"
    given = {"side": side, "model": model, "steps": options.steps, "out": out, "delay": case.delay}
    given["threads"] = options.threads
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in given.items())]
    command += ["--faults"] if case.faults else []
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    env |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return Measured(found, "" if done.returncode == 0 else said[-1] if said else f"exit {done.returncode}")


def compare(case: Case, model: str, options: argparse.Namespace, folder: Path) -> None:
    """Print a line of the table."""
    found = {side: Measured([]) for side in SIDES}
    for _ in range(options.rounds):
        for side in SIDES:
            if not found[side].error:
                one = measure(side, case, model, options, folder)
                found[side].steps += one.steps if one.error else one.steps[WARM_UP:]
                found[side].error = one.error
    ours, theirs = found["agentrl"], found["trl"]
    if ours.error:
        raise SystemExit(f"agentrl failed: {ours.error}")
    cells = [f"{case.name:34}", f"{ours.middle(0):8.2f} {ours.middle(1):6.2f} {ours.middle(2):7.0f}  "]
    if theirs.error:
        print(*cells, f"  TRL ends in step {len(theirs.steps) + 1}: {theirs.error}", flush=True)
        return
    more = ours.middle(2) / theirs.middle(2)
    equal = 1 / EQUAL < more < EQUAL
    ratios = [theirs.middle(column) / ours.middle(column) * (1.0 if equal else more) for column in (0, 1)]
    cells.append(f"{theirs.middle(0):8.2f} {theirs.middle(1):6.2f} {theirs.middle(2):7.0f}  ")
    print(*cells, f"{ratios[0]:7.1f} {ratios[1]:6.1f}{'' if equal else '  unequal work: of a token'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of a round, with two to warm up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds that the slow tool takes")
    parser.add_argument("--threads", type=int, default=1, help="of either side")
    parser.add_argument("--quick", action="store_true", help="three steps of one round")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help="use this folder instead of making a model")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--faults", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        warnings.filterwarnings("ignore")
        case = Case("", options.delay, options.faults)
        SIDES[options.side](case, options.model, options.steps, options.out, options.threads)
        return
    if options.quick:
        options.steps, options.rounds = WARM_UP + 1, 1
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or f"{folder}/model"
        if not options.model:
            make_model(Path(model), WARM_STEPS)
        print(f"{'':35}agentrl{'':20}TRL{'':20}times faster, load {os.getloadavg()[0]:.1f}")
        print(f"{'tool and resets':35}{SIDE_COLUMNS:27}{SIDE_COLUMNS:23}   wall    cpu", flush=True)
        for case in (
            Case("instant tool"),
            Case(f"tool of {options.delay:g} s", options.delay),
            Case(f"instant tool, 1 of {ONE_IN} resets raises", faults=True),
        ):
            compare(case, model, options, Path(folder))


if __name__ == "__main__":
    main()
