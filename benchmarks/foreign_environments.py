"""Seconds a rollout of other people's environments: by our driver, and by a loop in their own interpreter.

    python benchmarks/foreign_environments.py --python VENV/bin/python [--verifiers VENV/bin/python] [--rollouts 60]
        [--only NAME ...]

VENV is made by `scripts/environments/install`, that of verifiers by `scripts/verifiers/install`. No model plays: each
turn is one that the environment's demonstrations take, or the same words. The loop makes the same calls, by the same
adapter or by OpenEnv's own client, without a second process, a driver, a gateway or deadlines. Where code holds its
conversations itself (verifiers, Inspect), an endpoint on loopback answers its calls. Rollouts of our side run eight at
a time, and so do the loop's of verifiers.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from random import Random
from typing import Any

from agentrl_envs.foreign.agent import ForeignAgent
from agentrl_envs.foreign.environment import ForeignEnvironment
from agentrl_envs.openenv.environment import OpenEnv

from agentrl.audit.answer import turns_of
from agentrl.gateway.server import Gateway
from agentrl.plugins.environment import Environment
from agentrl.recipe.sections.agent import AgentSection
from agentrl.testing import call
from agentrl.testing.play import Holder, Stage

ROOT = Path(__file__).parent.parent
SUPPORT = ROOT / "tests/support"
sys.path.append(str(SUPPORT))
AT_ONCE = 8
PLAYED: dict[str, tuple[str, dict[str, Any], str]] = {
    "reasoning-gym chain_sum": ("reasoning_gym", {"dataset": "chain_sum"}, "stored"),
    "textarena TicTacToe": ("textarena", {"game": "TicTacToe-v0", "players": 2}, "random"),
    "MiniWoB++ click-button": ("miniwob", {"task": "click-button", "tools": ["click"]}, "named"),
    "Gymnasium FrozenLake": ("gymnasium", {"env": "FrozenLake-v1", "options": {"is_slippery": False}}, ""),
    "BFCL simple_python": ("bfcl", {"categories": ["simple_python"], "train": ["simple_python"]}, "stored"),
    "BFCL multi_turn_base": ("bfcl", {"categories": ["multi_turn_base"], "train": ["multi_turn_base"]}, "stored"),
    "tau2, a small domain": ("tau2", {"checkout": str(SUPPORT / "tau2_small"), "domain": "shop"}, ""),
}
"""By name the adapter, its arguments, and the style of its demonstrations."""
ECHO = {"config": {"taskset": {"id": "echo_sums"}}, "path": str(SUPPORT / "verifiers_tasks")}
HELD: dict[str, tuple[str, dict[str, Any], str]] = {
    "verifiers echo_sums": ("verifiers", ECHO, "It is 11."),
    "Inspect sums": ("inspect", {"task": f"{SUPPORT / 'inspect_tasks.py'}@sums", "train": 2}, "It is 3"),
}
"""Those that hold their conversations themselves: adapter, arguments, and what the model says."""
OPENENV = "OpenEnv guess"
LAKE = [
    {"role": "assistant", "tool_calls": [{"function": {"name": "act", "arguments": {"action": way}}}]}
    for way in (1, 1, 2, 2, 1, 2)
]
LOOP = """
import asyncio, importlib.util, json, sys, time
path, args, scripts, client = sys.argv[1], *map(json.loads, sys.argv[2:5])
spec = importlib.util.spec_from_file_location("adapter", path)
module = importlib.util.module_from_spec(spec)
sys.modules["adapter"] = module
spec.loader.exec_module(module)
adapter = module.Adapter(**args)
sizes = adapter.describe()["splits"]
def task(i):
    i %= sizes["train"]
    return {"split": "train", "index": i, **adapter.task("train", i)}
def play(i):
    episode = adapter.open(task(i), 0)
    said, over = [{"role": "user", "content": ""}], False
    for message in scripts[i]:
        said.append(message)
        for made in message.get("tool_calls") or ():
            function = made["function"]
            result = episode.call(function["name"], function["arguments"])
            over = over or (isinstance(result, dict) and bool(result.get("done")))
        if over or (not message.get("tool_calls") and episode.step(message) is None):
            break
    try:
        episode.grade(said)
    except TypeError:
        episode.grade()
    if hasattr(episode, "close"):
        episode.close()
async def held():
    room = asyncio.Semaphore(8)
    async def one(i):
        async with room:
            await adapter.play(task(i), client)
    await one(0)
    started = time.perf_counter()
    await asyncio.gather(*map(one, range(scripts)))
    return (time.perf_counter() - started) / scripts
if client is None:
    play(0)
    started = time.perf_counter()
    for i in range(len(scripts)):
        play(i)
    print((time.perf_counter() - started) / len(scripts))
else:
    print(asyncio.run(held()))
"""
OPENENV_LOOP = """
import asyncio, sys, time
from openenv.core.generic_client import GenericEnvClient
url, count = sys.argv[1], int(sys.argv[2])
async def play(i):
    async with GenericEnvClient(base_url=url) as env:
        await env.reset(split="train", index=i % 20)
        await env.step({"number": i % 20 % 7})
async def main():
    await play(0)
    started = time.perf_counter()
    for i in range(count):
        await play(i)
    return (time.perf_counter() - started) / count
print(asyncio.run(main()))
"""


async def ours(stage: Stage, env: Environment, scripts: Sequence[Sequence[str]], at_once: int = AT_ONCE) -> float:
    """Seconds a rollout of the tasks in order."""
    tasks, room = env.tasks("train"), asyncio.Semaphore(at_once)

    async def one(i: int) -> None:
        async with room:
            played = await stage.play(tasks[i % len(tasks)], lambda _: list(scripts[i]))
            assert played.failure is None, played.failure

    await one(0)
    started = time.perf_counter()
    await asyncio.gather(*map(one, range(len(scripts))))
    return (time.perf_counter() - started) / len(scripts)


def looped(python: str, *given: object) -> float:
    """What a loop prints."""
    command = [python, *map(str, given)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _adapter(module: str) -> str:
    return str(ROOT / f"envs/agentrl_envs/foreign/adapters/{module}.py")


async def played(python: str, module: str, args: dict[str, Any], style: str, count: int) -> tuple[float, float]:
    """Both sides of an environment that our driver plays."""
    env = await asyncio.to_thread(ForeignEnvironment, python, module, args)
    try:
        tasks = env.tasks("train")
        if module == "gymnasium":
            shown = [LAKE] * count
        else:
            shown = [list(env.demonstrate(tasks[i % len(tasks)], Random(i), style)) for i in range(count)]
        scripts = [[message for message in messages if message["role"] == "assistant"] for messages in shown]
        mine = await ours(Stage(env), env, [list(turns_of(script)) for script in scripts])
    finally:
        await env.close()
    return mine, looped(python, "-c", LOOP, _adapter(module), json.dumps(args), json.dumps(scripts), "null")


async def held(python: str, module: str, args: dict[str, Any], says: str, count: int) -> tuple[float, float]:
    """Both sides of one that holds its conversations itself."""
    from endpoint import completion, served

    async with AsyncExitStack() as stack:
        given: dict[str, Any] = {"python": python, "module": module, "args": args}
        env, gateway = await asyncio.to_thread(lambda: ForeignEnvironment(**given)), Gateway()
        stack.push_async_callback(env.close)
        agent = ForeignAgent(**given)
        stack.push_async_callback(agent.close)
        await gateway.start()
        stack.push_async_callback(gateway.close)
        stage = Stage(env, holder=Holder(agent, AgentSection(name="foreign"), gateway))
        mine = await ours(stage, env, [[says]] * count)
    with served(lambda body: completion(says)) as url:
        client = json.dumps({"base_url": url, "api_key": "any", "model": "good-model"})
        return mine, looped(python, "-c", LOOP, _adapter(module), json.dumps(args), count, client)


async def openenv(python: str, count: int) -> tuple[float, float]:
    """Both sides of a server of OpenEnv, which plays four at once."""
    from openenv_help import real_servers

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(real_servers(str(Path(python).parent.parent), folder, "guess"))["guess"]
        env = await asyncio.to_thread(OpenEnv, url)
        mine = await ours(Stage(env), env, [[call("act", number=i % 20 % 7)] for i in range(count)], 4)
        await env.close()
        return mine, looped(python, "-c", OPENENV_LOOP, url, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("--verifiers")
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME")
    given = parser.parse_args()
    print(f"{'environment':28} {'ours, s':>10} {'their loop, s':>14}")
    for name in (*PLAYED, OPENENV, *HELD):
        python = given.verifiers if name.startswith("verifiers") else given.python
        python = sys.executable if name.startswith("tau2") else python
        if (given.only and not any(part in name for part in given.only)) or python is None:
            continue
        if name == OPENENV:
            found = asyncio.run(openenv(python, given.rollouts))
        else:
            side = held(python, *HELD[name], given.rollouts) if name in HELD else None
            found = asyncio.run(side or played(python, *PLAYED[name], given.rollouts))
        print(f"{name:28} {found[0]:10.4f} {found[1]:14.4f}", flush=True)


if __name__ == "__main__":
    main()
