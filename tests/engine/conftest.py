"""What the tests of engines over stand-in servers share."""

import asyncio
from typing import Any

import pytest
import torch
from sglang_help import GREEDY, PROMPT, tiny

from agentrl.engine.base import Generation
from agentrl.engine.local.engine import LocalEngine


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    """The embedded model and its tokenizer."""
    torch.set_num_threads(1)
    return tiny()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second tries come soon."""
    monkeypatch.setattr("agentrl.engine.servers.engine.BACK_OFF_SECONDS", (0.01, 0.1))
    monkeypatch.setattr("agentrl.engine.servers.fleet.FIRST_RETRY_SECONDS", 0.1)


@pytest.fixture(scope="module")
def expected(parts: tuple[Any, Any]) -> Generation:
    """What the embedded engine says after PROMPT."""

    async def once() -> Generation:
        engine = LocalEngine(parts[0], max_batch=4)
        made = await engine.generate(PROMPT, GREEDY, "x")
        await engine.close()
        return made

    return asyncio.run(once())
