"""Tokens a second and model FLOPs utilisation of the update in one process on one GPU, and where its time goes.

    python benchmarks/gpu/update.py                      a shape of 0.5 billion parameters, random weights
    python benchmarks/gpu/update.py --shape 1.5B --kernels 30 model.compile=true model.dtype=bfloat16
    python benchmarks/gpu/update.py model.checkpointing=true cluster.offload='[optimizer, activations]'

As benchmarks/gpu/train.py, which takes Ray workers, on the same batch: GRPO with one update a step on packed random
tokens, groups that share a prompt. The first rounds compile and warm up. --kernels: those of one more update that take
most time on the device.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from need import need
from train import MICRO_BATCH, SHAPES, WARM_UP, make_model

NAME = "an update on a GPU"


def measure(options: argparse.Namespace, folder: Path) -> None:
    import torch
    from batches import make_batch

    from agentrl.compute.flops import Workload, utilisation
    from agentrl.learner.learner import Learner
    from agentrl.learner.roles import LocalRoles
    from agentrl.models.load import load_model, resolve_types
    from agentrl.models.shape import read_shape
    from agentrl.recipe.schema import Recipe

    changes = [
        f"model.path={make_model(options.shape, folder)}", f"model.device={options.device}", "train.lr=1e-6",
        f"train.micro_batch_tokens={options.micro_batch}", *options.overrides,
    ]  # fmt: skip
    recipe = resolve_types(Recipe.load(str(Path(__file__).parents[2] / "recipes" / "gsm8k_tool.yaml"), changes))
    shape = read_shape(recipe.model)
    assert shape is not None
    roles = LocalRoles(recipe, load_model(recipe.model)[0])
    learner = Learner(recipe, roles)
    print(roles.actor.description)
    batch = make_batch(options.groups, 8, options.prompt, options.answer, shape.vocabulary)

    def clock() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    seconds = []
    for _ in range(WARM_UP + options.rounds):
        began = clock()
        learner.update(batch)
        seconds.append(clock() - began)
    middle, work, done = statistics.median(seconds[WARM_UP:]), roles.role_costs["actor"], Workload.of(batch)
    shown = {
        "seconds": middle,
        "first_seconds": seconds[0],
        "packed_tokens": done.tokens,
        "tokens_per_s": done.tokens / middle,
    }
    for key, value in {**shown, **utilisation(work.cost.update(done), middle, work.peak)}.items():
        print(f"{key:24} {value:14.4g}")
    if torch.cuda.is_available():
        print(f"{'peak_gb':24} {torch.cuda.max_memory_allocated() / 1e9:14.4g}")
    if options.kernels:
        show_kernels(lambda: learner.update(batch), options.kernels)


def show_kernels(work: Any, most: int) -> None:
    """Print the device's time in all, and the kernels that take most of it."""
    from torch.profiler import profile

    with profile() as found:
        work()
    on_device = [e for e in found.key_averages() if "CUDA" in str(e.device_type)]
    print(f"device {sum(e.self_device_time_total for e in on_device) / 1e3:.0f} ms")
    for event in sorted(on_device, key=lambda e: -e.self_device_time_total)[:most]:
        print(f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:6d}  {event.key[:100]}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH, help="packed tokens")
    parser.add_argument("--groups", type=int, default=8, help="of 8 samples")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="cpu: to try the script")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the recipe")
    options = parser.parse_intermixed_args(arguments)
    if options.device != "cpu":
        need(NAME, sglang=False)
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
