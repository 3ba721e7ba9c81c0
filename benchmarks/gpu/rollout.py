"""Tokens/s of rollouts with tools through SGLang on GPUs, by how many requests are in flight at once.

    AGENTRL_SGLANG_VENV=VENV python benchmarks/gpu/rollout.py
    AGENTRL_SGLANG_VENV=VENV python benchmarks/gpu/rollout.py --recipe recipes/gsm8k_tool_8gpu.yaml --flying 256 1024

The recipe's model, tools and servers, without a trainer. Reported for each number: sampled tokens a second, turns and
finished requests a second, and how many of them failed.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from need import need

NAME = "rollout on GPUs"
RECIPE = str(Path(__file__).parents[2] / "recipes" / "gsm8k_tool_1gpu.yaml")


async def run(options: argparse.Namespace) -> None:
    from agentrl.recipe.schema import Recipe
    from agentrl.rollout.player import Player

    most = max(options.flying)
    recipe = Recipe.load(
        options.recipe, [f"engine.max_batch={most}", f"rollout.concurrency={most}", *options.overrides]
    )
    player = await Player.build(recipe, say=print)
    try:
        tasks = player.env.tasks("train")
        await player.play([tasks[0]], 1, seed=0)  # warm up
        for flying in options.flying:
            n = recipe.rollout.n
            drawn = [tasks[i % len(tasks)] for i in range(max(1, options.rounds * flying // n))]
            player.recipe = recipe.changed(rollout={"concurrency": flying})
            began = time.perf_counter()
            groups = await player.play(drawn, n, seed=flying)
            seconds = time.perf_counter() - began
            done = [t for group in groups for t in group.trajectories]
            failed = sum(len(group.failed) for group in groups)
            tokens, turns = sum(t.sampled_tokens for t in done), sum(len(t.turns) for t in done)
            print(
                f"{flying:6} in flight  {tokens / seconds:9.0f} tokens/s  {turns / seconds:7.1f} turns/s  "
                f"{len(done) / seconds:6.1f} requests/s  {failed} failed",
                flush=True,
            )
    finally:
        await player.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--flying", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=4, help="requests of a number: so many times what is in flight")
    parser.add_argument("--overrides", nargs="*", default=[], help="KEY=VALUE of the recipe")
    options = parser.parse_args(arguments)
    need(NAME)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
