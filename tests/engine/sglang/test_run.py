"""A whole run over a real server: the recipe of the local engine, with `engine.name=sglang`."""

import asyncio
import json
from pathlib import Path

import torch
from paths import RECIPES
from sglang_help import tiny

from agentrl.chat.load import load_chat
from agentrl.engine.base import Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.plugins.registry import make_tool
from agentrl.recipe.sections.env import ToolSection
from agentrl.training.run import train

RECIPE = str(RECIPES / "gsm8k_tool.yaml")


def test_a_run_trains_through_a_real_server(sglang_url: str, tmp_path: Path) -> None:
    """Weights follow each step: the trainer's log-probs of what was sampled equal the server's, step after step."""
    result = train(
        RECIPE,
        overrides=[
            "engine.name=sglang", f"engine.args.urls=[{sglang_url}]", "train.steps=2", "rollout.tasks=6", "rollout.n=4",
            "train.lr=1e-3", "eval.tasks=2", "eval.every=0", "eval.splits=[test]", "train.threads=1",
            f"output={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    assert result.steps == 2
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    apart = [row["mismatch/logprob_max"] for row in rows[1:] if "mismatch/logprob_max" in row]
    assert apart, "no step had anything to learn from"
    assert max(apart) < 1e-3
    assert all(row["stop/error"] == 0 for row in rows[1:] if "stop/error" in row)


async def test_calls_are_parsed_alike_whatever_sampled_them(sglang_url: str) -> None:
    """Parsing is ours: the same ids are the same calls, and the server is never asked for any."""
    torch.set_num_threads(1)
    model, tokenizer = tiny()
    schema = make_tool(ToolSection(name="calculator")).schema
    chat = load_chat(tokenizer, model_path="tiny", kind="auto", chat_template=None, tools=[schema])
    prompts = [
        chat.render([{"role": "user", "content": text}], [schema])
        for text in (
            "Tom has 12 apples and buys 7 more. How many apples does he have?",
            "A box holds 24 pens. How many pens are in 6 boxes?",
            "Ann had 50 coins and gave away 18. How many coins are left?",
        )
    ]
    remote, local = SglangEngine(model, max_batch=8, urls=(sglang_url,)), LocalEngine(model, max_batch=8)
    sampling = Sampling(64, temperature=0.0, stop_ids=tuple(chat.stop_ids))
    try:
        parsed = []
        for engine in (remote, local):
            made = await asyncio.gather(*(engine.generate(p, sampling, f"{i}") for i, p in enumerate(prompts)))
            parsed.append([chat.parse(m.ids) for m in made])
    finally:
        await remote.close()
        await local.close()
    assert parsed[0] == parsed[1]
    assert any(turn.calls for turn in parsed[0])
