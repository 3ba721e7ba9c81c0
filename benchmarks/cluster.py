"""Cost of the cluster path compared with one process, on the same work: ratios of seconds, all measured in one run.

    python benchmarks/cluster.py                          the embedded model
    python benchmarks/cluster.py --hidden 512 --layers 8  a larger one with random weights
    python benchmarks/cluster.py --workers 1 2 4 train.micro_batch_tokens=4096
    python benchmarks/cluster.py --hidden 256 --experts 8 a mixture of experts, also with its layers divided

one process     the trainer of `cluster.workers: 1`, with our own forward
module forward  one process with the forward that sharded weights use; the ratios are relative to this
n workers       Ray, FSDP2 over gloo, n processes; 1 worker shows the overhead of the path itself
experts, matrices  n workers with cluster.expert_parallel or cluster.tensor_parallel of n

Each process has one thread. start-up: from the recipe to roles that can be called. logprobs: of the batch. update: a
step of the learner on the batch (GRPO, one update). hand-over: copying the policy's weights to another model in this
process, as for the engine `local`. All but start-up are the best of the rounds. mfu: of update, relative to the peak
that each process measures for its own core at the start.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from batches import make_batch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.compute.batch import Batch
from agentrl.compute.flops import Workload, utilisation
from agentrl.compute.forward import ModuleForward
from agentrl.learner.learner import Learner
from agentrl.learner.roles import LocalRoles, RoleHost
from agentrl.models import embedded_path
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe

PARTS = ("start-up", "logprobs", "update", "hand-over")


def make_model(hidden: int, layers: int, experts: int, folder: Path) -> str:
    """Save a model with random weights, the embedded model's tokenizer and a vocabulary of 32768; return the folder.

    experts: of each layer, as wide as a dense layer together, of which a token uses two; 0: the layers are dense."""
    sizes: dict[str, Any] = {
        "vocab_size": 32768, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 64), "num_key_value_heads": max(1, hidden // 128), "head_dim": 64,
        "tie_word_embeddings": True,
    }  # fmt: skip
    if experts:
        mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * hidden // experts}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture)).save_pretrained(folder)
    else:
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_path()).save_pretrained(folder)
    return str(folder)


def start_here(recipe: Recipe, module: bool) -> RoleHost:
    model = load_model(recipe.model)[0]
    role_host = LocalRoles(recipe, model)
    if module:
        role_host.actor.forward = ModuleForward(model)
    return role_host


def start_workers(recipe: Recipe, cluster: dict[str, int], logs: Path) -> RoleHost:
    from agentrl.distributed.remote import RayRoles

    spread = recipe.changed(cluster=cluster)
    return RayRoles(spread, spread, logs)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def hand_over(role_host: RoleHost, target: Any) -> None:
    """Copy the policy's weights into the model `target`, by name."""
    weights = role_host.weights()
    into = target.state_dict()
    source = (
        role_host.model.state_dict().items() if isinstance(role_host, LocalRoles) else weights
    )  # in one process, the engine shares the model
    with torch.no_grad():
        for name, tensor in source:
            into[name].copy_(tensor)


def measure(recipe: Recipe, start: Callable[[], RoleHost], batch: Batch, rounds: int) -> dict[str, float]:
    """The seconds of each part, and the MFU of the update."""
    with ExitStack() as stack:
        began = time.perf_counter()
        role_host = start()
        stack.callback(role_host.close)
        found = {"start-up": time.perf_counter() - began}
        learner, target = Learner(recipe, role_host), load_model(recipe.model)[0]
        works: dict[str, Callable[[], Any]] = {
            "logprobs": lambda: learner.actor.logprobs(batch),
            "update": lambda: learner.update(batch),
            "hand-over": lambda: hand_over(role_host, target),
        }
        for name, work in works.items():
            work()
            found[name] = min(timed(work) for _ in range(rounds))
        work = role_host.role_costs["actor"]
        return found | utilisation(work.cost.update(Workload.of(batch)), found["update"], work.peak)


def show(rows: dict[str, dict[str, float]], batch: Batch) -> None:
    base = rows["module forward"]
    table = Table("", *(f"{part}" for part in PARTS), "mfu", title=f"{Workload.of(batch).tokens:,} packed tokens")
    for name, row in rows.items():
        cells = [f"{row[part]:.3f} s  {row[part] / base[part]:.2f}x" for part in PARTS]
        table.add_row(name, *cells, f"{row.get('train/mfu', 0):.1%}")
    Console(width=140).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=96)
    parser.add_argument("--hidden", type=int, default=0, help="of a model with random weights; 0: the embedded model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=0, help="of each layer of that model; 0: none")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the recipe")
    options = parser.parse_intermixed_args(arguments)
    if options.experts and not options.hidden:
        parser.error("--experts is of a model with random weights: give --hidden")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, place = "tiny", Path(folder) / "model"
        if options.hidden:
            model = make_model(options.hidden, options.layers, options.experts, place)
        overrides = [f"model.path={model}", "train.threads=1", "train.lr=1e-6", *options.overrides]
        recipe = Recipe.load(str(Path(__file__).parents[1] / "recipes" / "gsm8k_tool.yaml"), overrides)
        vocabulary = load_model(recipe.model)[0].get_input_embeddings().weight.shape[0]
        batch = make_batch(options.groups, options.samples, options.prompt, options.answer, vocabulary)
        sides: dict[str, Callable[[], RoleHost]] = {
            "one process": lambda: start_here(recipe, module=False),
            "module forward": lambda: start_here(recipe, module=True),
        }
        clusters: dict[str, dict[str, int]] = {}
        for n in options.workers:
            clusters[f"{n} worker{'s' if n > 1 else ''}"] = {"workers": n}
            if options.experts and n > 1:
                clusters[f"{n} workers, experts"] = {"workers": n, "expert_parallel": n}
                clusters[f"{n} workers, matrices"] = {"workers": n, "tensor_parallel": n}
        for name, cluster in clusters.items():
            sides[name] = partial(start_workers, recipe, cluster, Path(folder) / f"logs of {name}")
        show({name: measure(recipe, start, batch, options.rounds) for name, start in sides.items()}, batch)


if __name__ == "__main__":
    main()
