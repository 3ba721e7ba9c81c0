"""Seconds a rollout of other people's environments: by our driver, and by a loop in their own interpreter.

    python benchmarks/foreign_environments.py --python VENV/bin/python [--rollouts 60]

VENV is made by `scripts/environments/install`. No model plays: each turn is one that the environment's demonstrations
take. The loop opens the same tasks by the same adapter and makes the same calls, without a second process, a driver or
deadlines. The rollouts of our side run eight at a time, in one process of the environment.
"""

import argparse
import asyncio
import json
import subprocess
import time
from pathlib import Path
from random import Random
from typing import Any

from agentrl_envs.foreign.environment import ForeignEnvironment

from agentrl.testing import call
from agentrl.testing.play import Stage

AT_ONCE = 8
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "reasoning-gym chain_sum": ("reasoning_gym", {"dataset": "chain_sum"}, "stored"),
    "textarena TicTacToe": ("textarena", {"game": "TicTacToe-v0", "players": 2}, "random"),
    "MiniWoB++ click-button": ("miniwob", {"task": "click-button", "tools": ["click"]}, "named"),
}
LOOP = """
import importlib.util, json, sys, time
path, args, scripts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
spec = importlib.util.spec_from_file_location("adapter", path)
module = importlib.util.module_from_spec(spec)
sys.modules["adapter"] = module
spec.loader.exec_module(module)
adapter = module.Adapter(**args)
def play(i):
    task = {"split": "train", "index": i, **adapter.task("train", i)}
    episode = adapter.open(task, 0)
    for message in scripts[i]:
        if message.get("tool_calls"):
            function = message["tool_calls"][0]["function"]
            episode.call(function["name"], function["arguments"])
        elif episode.step(message) is None:
            break
    try:
        episode.grade([*({"role": "user", "content": ""},), *scripts[i]])
    except TypeError:
        episode.grade()
    if hasattr(episode, "close"):
        episode.close()
play(0)
started = time.perf_counter()
for i in range(len(scripts)):
    play(i)
print((time.perf_counter() - started) / len(scripts))
"""


def turn(message: Any) -> str:
    calls = message.get("tool_calls")
    return call(calls[0]["function"]["name"], **calls[0]["function"]["arguments"]) if calls else message["content"]


async def ours(env: ForeignEnvironment, scripts: list[list[Any]]) -> float:
    """Seconds a rollout of the tasks in order, AT_ONCE at a time."""
    stage, tasks, room = Stage(env), env.tasks("train"), asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> None:
        async with room:
            played = await stage.play(tasks[i], lambda _: [turn(message) for message in scripts[i]])
            assert played.failure is None, played.failure

    await one(0)
    started = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(len(scripts))))
    return (time.perf_counter() - started) / len(scripts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("--rollouts", type=int, default=60)
    given = parser.parse_args()
    adapters = Path(__file__).parent.parent / "envs/agentrl_envs/foreign/adapters"
    print(f"{'environment':28} {'ours, s':>10} {'their loop, s':>14}")
    for name, (module, args, style) in CASES.items():
        env = ForeignEnvironment(given.python, module, args)
        tasks = env.tasks("train")
        shown = [env.demonstrate(tasks[i], Random(i), style) for i in range(given.rollouts)]
        scripts = [[message for message in messages if message["role"] == "assistant"] for messages in shown]
        command = [given.python, "-c", LOOP, str(adapters / f"{module}.py"), json.dumps(args), json.dumps(scripts)]
        theirs = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        mine = asyncio.run(_closed(env, scripts))
        print(f"{name:28} {mine:10.4f} {theirs:14.4f}", flush=True)


async def _closed(env: ForeignEnvironment, scripts: list[list[Any]]) -> float:
    try:
        return await ours(env, scripts)
    finally:
        await env.close()


if __name__ == "__main__":
    main()
