"""Tokens a second and model FLOPs utilisation of the sharded update, on all GPUs of this machine or on n of them.

    python benchmarks/gpu/train.py                              a shape of 1.5 billion parameters, random weights
    python benchmarks/gpu/train.py --gpus 2 --shape 7B --micro-batch 32768 model.checkpointing=true
    python benchmarks/gpu/train.py --model FOLDER cluster.offload=true model.lora.rank=16

Ray workers with FSDP2, one a GPU, GRPO with one update a step on packed random tokens, groups that share a prompt. The
first rounds warm up. mfu: see agentrl/compute/flops.py; what is computed again under checkpointing does not count.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from need import need

NAME = "training on GPUs"
SHAPES: dict[str, dict[str, int]] = {  # of Qwen2.5, by the names of its configuration
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4},
}  # fmt: skip
WARM_UP = 2
MICRO_BATCH = 16384
FILLED = 0.8  # of a GPU's memory


def make_model(shape: str, folder: Path) -> str:
    """A folder with random weights of that shape, and the tokenizer of the embedded model."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from agentrl.models import embedded_path

    config = Qwen2Config(vocab_size=151936, tie_word_embeddings=shape != "7B", **SHAPES[shape])
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_path()).save_pretrained(folder)
    return str(folder)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from time import perf_counter

    from batches import make_batch

    from agentrl.compute.flops import Workload, utilisation
    from agentrl.distributed.remote import RayRoles
    from agentrl.learner.learner import Learner
    from agentrl.models.load import resolve_types
    from agentrl.models.memory import plan_memory
    from agentrl.models.shape import read_shape
    from agentrl.recipe.schema import Recipe

    model = options.model or make_model(options.shape, folder / "model")
    recipe = Recipe.load(
        str(Path(__file__).parents[2] / "recipes" / "gsm8k_tool.yaml"),
        [
            f"model.path={model}", "model.dtype=bfloat16", f"cluster.gpus={options.gpus}", "train.lr=1e-6",
            f"train.micro_batch_tokens={options.micro_batch or MICRO_BATCH}", *options.overrides,
        ],
    )  # fmt: skip
    recipe = resolve_types(recipe if options.micro_batch else fitting(recipe))
    shape, plan = read_shape(recipe.model), plan_memory(recipe)
    assert shape is not None
    assert plan is not None
    batch = make_batch(options.groups * options.gpus, 8, options.prompt, options.answer, shape.vocabulary)
    with ExitStack() as stack:
        place = RayRoles(recipe, recipe, folder / "logs")
        stack.callback(place.close)
        learner, seconds = Learner(recipe, place), []
        for _ in range(WARM_UP + options.rounds):
            began = perf_counter()
            learner.update(batch)
            seconds.append(perf_counter() - began)
        middle = statistics.median(seconds[WARM_UP:])
        work = place.role_costs["actor"]
        need, memory = Workload.of(batch), place.measure()
    return {
        "gpus": options.gpus, "parameters": plan.parameters, "micro_batch_tokens": recipe.train.micro_batch_tokens,
        "packed_tokens": need.tokens, "seconds": middle,
        "tokens_per_s": need.tokens / middle, "tokens_per_s_gpu": need.tokens / middle / options.gpus,
        **utilisation(work.cost.update(need), middle, work.peak), **memory, "planned_gb": plan.device / 1e9,
    }  # fmt: skip


def fitting(recipe: Any) -> Any:
    """With micro-batches that leave a share of the smallest GPU free, by the plan that `agentrl check` shows."""
    import torch

    from agentrl.models.memory import plan_memory

    room = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    while (plan := plan_memory(recipe)) and plan.device > FILLED * room and recipe.train.micro_batch_tokens > 2048:
        recipe = recipe.changed(train={"micro_batch_tokens": recipe.train.micro_batch_tokens // 2})
    return recipe


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="0: all that are here")
    parser.add_argument("--model", help="a folder or hub name, instead of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--micro-batch", type=int, default=0, help=f"packed tokens; 0: up to {MICRO_BATCH}, what fits")
    parser.add_argument("--groups", type=int, default=8, help="of 8 samples, a GPU")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the recipe")
    options = parser.parse_intermixed_args(arguments)
    need(NAME, max(1, options.gpus), sglang=False)
    if not options.gpus:
        import torch

        options.gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        for key, value in measure(options, Path(folder)).items():
            print(f"{key:24} {value:14.4g}" if isinstance(value, float) else f"{key:24} {json.dumps(value):>14}")


if __name__ == "__main__":
    main()
