"""`agentrl.span`: what it keeps, for whom, and that it costs nothing where nobody keeps it."""

import asyncio

import pytest

import agentrl
from agentrl.plugins import span as module
from agentrl.plugins.span import begin_sample, kept_steps, take_step


def test_it_stands_on_the_step_unless_a_sample_is_driven() -> None:
    of_sample: list[tuple[str, float, float]] = []

    async def tool(name: str) -> None:
        async with agentrl.span(name):
            await asyncio.sleep(0)
        await asyncio.to_thread(in_thread)

    def in_thread() -> None:
        with agentrl.span("thread"):
            pass

    async def drive() -> None:
        begin_sample(lambda *told: of_sample.append(told))
        await tool("tool")

    async def step() -> None:
        async with agentrl.span("step"):
            await asyncio.gather(drive())

    with kept_steps():
        asyncio.run(step())
        with pytest.raises(ValueError, match="within"), agentrl.span("x" * 200):
            raise ValueError("within")
        kept = take_step()
        assert take_step() == []
    assert [name for name, _, _ in kept] == ["step", "x" * 80]
    assert [name for name, _, _ in of_sample] == ["tool", "thread"]
    (_, start, end), (_, first, last) = kept[0], of_sample[0]
    assert start <= first <= last <= end


def test_it_is_bounded_and_nothing_is_kept_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    with agentrl.span("nowhere"):
        assert take_step() == []
    with kept_steps():
        for _ in range(5):
            with agentrl.span("a"):
                pass
        assert len(take_step()) == 3
    assert take_step() == []
