"""`math_verify`: real expressions, and such as would keep a process busy for ever."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from agentrl_tools.rewards.math_verify import MathVerify
from processes import children

from agentrl import InfrastructureError, Sample, Task, UserError

SLOW = "$" + "+".join(f"x^{{{n}}}" for n in range(4000)) + "$"


def sample(truth: str, said: str) -> Sample:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": said})
    return Sample(Task("t-1", {"ground_truth": truth}), messages)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def reward() -> AsyncIterator[MathVerify]:
    made = MathVerify(workers=1, seconds=1.0)
    yield made
    await made.close()


def _workers() -> set[int]:
    """The worker processes of this process."""
    return set(children("agentrl_tools.rewards.math_worker"))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("truth", "said", "score"),
    [
        ("72", "so #### 72", 1.0),
        ("1,234", "<answer>1234</answer>", 1.0),
        ("\\frac{1}{2}", "The answer is $0.5$", 1.0),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", 1.0),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1.0),
        ("\\sqrt{8}", "$2\\sqrt{2}$", 1.0),
        ("work\n#### 72", "\\boxed{72}", 1.0),
        ("72", "12 and then #### 73", 0.0),
        ("72", "", 0.0),
        ("72", "no idea", 0.0),
        ("72", "\\boxed{" + "{" * 5000, 0.0),
        ("72", "(" * 5000 + "72", 0.0),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_equal_as_mathematics(reward: MathVerify, truth: str, said: str, score: float) -> None:
    assert await reward.score(sample(truth, said)) == score


@pytest.mark.slow
@pytest.mark.parametrize("said", ["$9^{9^{9^{9}}}$", "\\boxed{(((9^9)^9)^9)^{9999999}}", "\\boxed{1000000000!}"])
@pytest.mark.asyncio(loop_scope="module")
async def test_what_never_ends_is_stopped_and_the_next_works(reward: MathVerify, said: str) -> None:
    assert await reward.score(sample("5", said)) == 0.0
    assert await reward.score(sample("5", "#### 5")) == 1.0
    assert len(_workers()) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_many_at_once_in_any_thread(reward: MathVerify) -> None:
    asked = [sample("\\frac{1}{2}", f"$\\frac{{{n}}}{{{2 * n + n % 2}}}$") for n in range(1, 101)]
    scores = await asyncio.gather(*map(reward.score, asked))
    assert scores == [float(n % 2 == 0) for n in range(1, 101)]
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(reward.score(asked[1]))))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert found == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize(("truth", "why"), [("", "holds no expression"), (SLOW, "took too long to read")])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_truth_that_cannot_be_read_raises(reward: MathVerify, truth: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        await reward.score(sample(truth, "5"))


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_process_that_is_killed_is_replaced(reward: MathVerify) -> None:
    assert await reward.score(sample("5", "#### 5")) == 1.0
    going = asyncio.ensure_future(reward.score(sample("5", "$9^{9^{9^{9}}}$")))
    await asyncio.sleep(0.3)
    for pid in _workers():
        os.kill(pid, signal.SIGKILL)
    assert await going == 0.0
    assert await reward.score(sample("5", "#### 5")) == 1.0
    for pid in _workers():
        os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert await reward.score(sample("5", "#### 5")) == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_process_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = MathVerify(workers=1)
    monkeypatch.setattr(reward._pool, "_command", [sys.executable, "-c", "raise ValueError('no such thing')"])
    with pytest.raises(InfrastructureError, match="ValueError: no such thing"):
        await reward.score(sample("5", "5"))
    await reward.close()


@pytest.mark.slow
async def test_close_ends_what_is_going_on() -> None:
    before = _workers()
    reward = MathVerify(workers=2, seconds=30.0)
    assert await reward.score(sample("5", "#### 5")) == 1.0
    going = asyncio.ensure_future(reward.score(sample("5", "$9^{9^{9^{9}}}$")))
    await asyncio.sleep(0.3)
    async with asyncio.timeout(25):  # below the seconds that the expression would be given
        await reward.close()
    with pytest.raises(InfrastructureError):
        await going
    assert _workers() == before


def test_without_its_package_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'agentrl\[math\]'$"):
        MathVerify()


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="seconds must be above 0"):
        MathVerify(seconds=0)
