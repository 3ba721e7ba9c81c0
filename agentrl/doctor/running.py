"""Checks of whole runs: a checkpoint that a kill interrupts, two workers, one step of the recipe, and an estimate."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.checkpoint.run_folder import CHECKPOINTS, METRICS, RunFolder
from agentrl.cluster.session import OBJECT_STORE_MIN
from agentrl.compute.batch import Batch
from agentrl.compute.flops import TERA, Workload, longest_update
from agentrl.distributed.remote import RayRoles
from agentrl.doctor.check import CheckError, NotHereError
from agentrl.doctor.subject import Subject, embedded, small
from agentrl.errors import UserError
from agentrl.learner.roles import LocalRoles
from agentrl.models.load import embeddings, load_model
from agentrl.models.memory import plan_memory
from agentrl.models.shape import read_config
from agentrl.plugins.types import Json
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.training.run import resume_run, train

WORKERS = 2
STEP = "step.json"
"""What the step measured, in the folder that checks share."""
UPDATE = "update.json"
"""FLOP/s of an update, likewise."""
CPU_TOKENS = 2048
"""Of an update that is tried on a CPU, at most."""
MANY = 1000
"""Steps of the run that is killed: it does not get there."""
WAIT_SECONDS = 120.0
POLL_SECONDS = 0.05
GIGA = 1e9


def update(subject: Subject) -> str:
    """An update of one full micro-batch for each worker, by the recipe's own roles, at the speed that it has in a run:
    one before it compiles what is compiled."""
    subject.free(workers=False)
    recipe, config = subject.recipe, read_config(subject.recipe.model, fetch=True)
    if config is None:
        raise NotHereError("the model's configuration is not on this machine")
    roles: LocalRoles | RayRoles = subject.roles if subject.apart else _roles_here(recipe)
    tokens = min(recipe.train.micro_batch_tokens, math.inf if subject.device.type == "cuda" else CPU_TOKENS)
    length = int(min(recipe.rollout.max_tokens, tokens))
    samples = recipe.cluster.size * max(1, int(tokens) // length)
    batch = made_up(config.get_text_config().vocab_size, [length] * samples)
    for _ in range(2):
        began = time.perf_counter()
        roles.actor.update(batch, 1e-6)
        seconds = time.perf_counter() - began
    work = roles.role_costs["actor"]
    rate = work.cost.update(Workload.of(batch)) / seconds
    (subject.folder / UPDATE).write_text(json.dumps(rate), encoding="utf-8")
    share = f", {rate / work.peak:.0%} of the peak" if work.peak else ""
    count = samples * length
    return f"{count:,} tokens in {seconds:.2g} s: {count / seconds:,.0f} tokens/s, {rate / TERA:.2g} TFLOP/s{share}"


def _roles_here(recipe: Recipe) -> LocalRoles:
    model, _ = load_model(recipe.model, recipe.train.seed)
    return LocalRoles(recipe, model)


def checkpoint(subject: Subject) -> str:
    """A run is killed as it trains, and resumed from its checkpoint."""
    folder = subject.folder / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    recipe = embedded(subject.recipe, folder).changed(train={"steps": MANY, "save_every": 1})
    path = subject.folder / "killed.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    kill_after_checkpoint(path, folder)
    step = check_saved(folder)
    try:
        resume_run(str(folder), overrides=[f"train.steps={step + 1}"])
    except UserError as error:
        raise CheckError(f"the run could not be resumed from step {step}: {error}") from error
    rows = [row["step"] for row in RunFolder(folder).metrics()]
    if rows != list(range(step + 2)):
        raise CheckError(f"the resumed run wrote the steps {rows}, not each of 0 to {step + 1} once")
    return f"killed after step {step}, resumed, {step + 1} steps in {METRICS}"


def kill_after_checkpoint(recipe: Path, folder: Path) -> None:
    """Train until a checkpoint stands in `folder`, and kill the run. Raises CheckError where it ends before."""
    words = [sys.executable, "-m", "agentrl.cli.main", "train", str(recipe)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    until = time.monotonic() + WAIT_SECONDS
    while not any((folder / CHECKPOINTS).glob("step_*")):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            said, _ = process.communicate()
            raise CheckError(f"the run wrote no checkpoint: {said.strip()[-400:]}")
        time.sleep(POLL_SECONDS)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def check_saved(folder: Path) -> int:
    """The step of the newest checkpoint. Raises CheckError unless it is whole, UserError where it is damaged."""
    saved = Checkpoints(folder / CHECKPOINTS, 1).latest()
    if saved is None:
        raise CheckError(f"no whole checkpoint was left in {folder / CHECKPOINTS}")
    saved.verify()
    return saved.step


def workers(subject: Subject) -> str:
    """Two workers under Ray compute and learn what one process does."""
    gpus = torch.cuda.device_count() >= WORKERS and subject.device.type == "cuda"
    if not gpus and len(os.sched_getaffinity(0)) < WORKERS:
        raise NotHereError("one core, and no two GPUs")
    if (free := shutil.disk_usage("/dev/shm").free) < 2 * OBJECT_STORE_MIN:
        raise CheckError(
            f"/dev/shm has {free / 1e6:.0f} MB free, and Ray needs {2 * OBJECT_STORE_MIN / 1e6:.0f}",
            "/dev/shm: make it larger (docker run --shm-size=8g)",
        )
    subject.free()
    recipe = embedded(subject.recipe, subject.folder / "workers", None if gpus else "cpu")
    model, _ = load_model(recipe.model)
    alone = LocalRoles(recipe, model)
    cluster = ClusterSection(gpus=WORKERS) if gpus else ClusterSection(workers=WORKERS)
    spread = recipe.changed(cluster=cluster)
    batch = made_up(embeddings(model).shape[0], [20 + i for i in range(8)], prompt=12)
    began = time.perf_counter()
    together = RayRoles(spread, spread, subject.folder / "logs", print, print)
    try:
        started = time.perf_counter() - began
        off = 0.0
        for _ in range(2):  # the second time, after an update
            wanted, found = alone.actor.logprobs(batch), together.actor.logprobs(batch)
            off = max(off, float(np.abs(wanted - found).max()))
            for roles in (alone, together):
                roles.actor.update(batch, 1e-3)
    finally:
        together.close()
    if not off < 1e-3:
        raise CheckError(f"log-probs of {WORKERS} workers differ from those of one process by {off:.2g} nats")
    where = "GPUs" if gpus else "CPU"
    return f"{WORKERS} workers on {where} in {started:.0f} s; log-probs differ by {off:.1g} nats, before and after"


def made_up(vocabulary: int, lengths: Sequence[int], prompt: int = 1) -> Batch:
    """Samples of these lengths, in pairs that share a prompt of `prompt` tokens, with all that an update reads."""
    rng, count = np.random.default_rng(0), len(lengths)
    prompts = [rng.integers(0, vocabulary, prompt) for _ in range(-(-count // 2))]
    rows = [np.concatenate([prompts[i // 2], rng.integers(0, vocabulary, n - prompt)]) for i, n in enumerate(lengths)]
    mask = np.concatenate([np.arange(len(row)) >= prompt for row in rows])
    tokens = len(mask)
    return Batch(
        np.cumsum([0, *(len(row) for row in rows)]),
        {
            "ids": np.concatenate(rows).astype(np.int32),
            "loss_mask": mask.astype(np.uint8),
            "logprobs": np.where(mask, -1.0, 0.0).astype(np.float32),
            "advantages": np.where(mask, rng.standard_normal(tokens), 0.0).astype(np.float32),
            "weight": (mask / mask.sum()).astype(np.float32),
        },
        {"prompt_length": np.full(count, prompt, np.int32), "group": np.arange(count) // 2},
    )


def step(subject: Subject) -> str:
    """One whole step of the recipe, with few and short samples."""
    subject.free()
    folder = subject.folder / "step"
    shutil.rmtree(folder, ignore_errors=True)
    result = train(small(subject.recipe, folder))
    row = RunFolder(result.folder).metrics()[-1]
    check_step(row)
    Checkpoints(result.folder / CHECKPOINTS, 1).latest()
    (subject.folder / STEP).write_text(json.dumps(row), encoding="utf-8")
    memory = max((value for key, value in row.items() if key.startswith("memory/")), default=math.nan)
    return (
        f"{row['time/step_s']:.1f} s: sampled {row['time/rollout_s']:.1f}, trained {row['time/train_s']:.1f}, "
        f"published {row['time/sync_s']:.1f}; reward {row['reward/mean']:.2f}; {memory:.2f} GB"
    )


def check_step(row: Mapping[str, Json]) -> None:
    """Raise CheckError for metrics of a step that something is wrong with."""
    if bad := row.get("not_finite"):
        raise CheckError(f"not finite: {', '.join(bad)}", "model.dtype or train.lr")
    if not row["rollout/trajectories"]:
        raise CheckError(f"all {row['rollout/failed']} samples failed", "env, tools: see the log in the report")
    if not 0 <= row.get("mismatch/logprob_mean", 0.0) < 0.2:
        raise CheckError(
            f"engine and trainer differ by {row['mismatch/logprob_mean']:.2g} nats in the mean of the step",
            "engine.args.flags.dtype, model.dtype",
        )


def estimate(subject: Subject) -> str:
    """Time and memory of the whole run, from the step and the update that were tried and the shape of the model."""
    recipe, tried = subject.recipe, subject.folder / UPDATE
    row = json.loads((subject.folder / STEP).read_text(encoding="utf-8"))
    flops = longest_update(recipe) if tried.exists() else None
    most = math.inf if flops is None else flops / json.loads(tried.read_text(encoding="utf-8"))
    seconds = step_seconds(recipe, row, most)
    whole = seconds * recipe.train.steps
    said = f"about {seconds:.0f} s a step, {whole / 3600:.1f} h for {recipe.train.steps} steps without evaluation"
    said += "" if flops is None else f"; a step's update takes at most {most:,.2g} s"
    plan = plan_memory(recipe)
    if plan is None:
        return f"{said}; memory is not known"
    free = total_memory(subject.device)
    if plan.device > free:
        raise CheckError(
            f"{said}; the trainer needs {plan.device / GIGA:.1f} GB on each device, which has {free / GIGA:.1f}",
            "train.micro_batch_tokens (lower), model.checkpointing: true, model.lora, or more cluster.gpus",
        )
    return f"{said}; the trainer needs {plan.device / GIGA:.2g} of {free / GIGA:.0f} GB"


def total_memory(device: torch.device) -> float:
    """The bytes that a device has."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def step_seconds(recipe: Recipe, row: Mapping[str, Json], most: float) -> float:
    """Seconds of a step of the recipe, by the metrics of a small one: training in proportion to the samples, at most
    `most`, sampling to their number over that of those decoded at once, publishing as it was. A guess: few samples are
    slower each."""
    tried = small(recipe, Path()).rollout
    more = recipe.rollout.n * recipe.rollout.tasks / (tried.n * tried.tasks)
    width = recipe.engine.max_batch * int(recipe.engine.args.get("servers", 1))
    rounds = max(1.0, recipe.rollout.n * recipe.rollout.tasks / width)
    longer = recipe.rollout.max_turn_tokens / tried.max_turn_tokens
    rollout, learned = row["time/rollout_s"] * rounds * longer, min(most, row["time/train_s"] * more * longer)
    together = max(rollout, learned) if recipe.rollout.overlap != "none" else rollout + learned
    return float(together + row["time/sync_s"])
