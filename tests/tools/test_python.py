"""The tool `python`: what a model reads, its metrics, and its place in the driver."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from agentrl_tools.python import MAX_CODE, Python, execution_text, unfenced
from agentrl_tools.sandbox import Execution, Limits, Stop

from agentrl import InfrastructureError, Session, Task, ToolResponse, UserError
from agentrl.plugins.registry import make_tool
from agentrl.recipe.sections.env import ToolSection

pytestmark = pytest.mark.usefixtures("bubblewrap")


@pytest.fixture
async def tool() -> AsyncIterator[Python]:
    tool = Python(backend="bwrap", seconds=2, cpu_seconds=2, memory_mb=192, pool=1)
    yield tool
    await tool.close()


@pytest.fixture
async def session(tool: Python) -> AsyncIterator[Session]:
    session = Session("r/0", Task("t", {}), random.Random(0), 0.0)
    await tool.create(session)
    yield session
    await tool.release(session)
    assert session.state is None


async def ask(tool: Python, session: Session, code: str) -> ToolResponse:
    return await tool.execute(session, **tool.check({"code": code}))


async def test_state_is_kept_and_ends_with_the_request(tool: Python, session: Session) -> None:
    assert (await ask(tool, session, "x = 6")).text == "[no output]"
    response = await ask(tool, session, "print('six')\nx * 7")
    assert response.text == "six\n42"
    assert not response.error
    assert response.metrics == {"exceptions": 0, "timeouts": 0, "stops": 0, "restarts": 0}
    other = Session("r/1", Task("t", {}), random.Random(0), 0.0)
    await tool.create(other)
    assert "NameError" in (await ask(tool, other, "x")).text
    await tool.release(other)


async def test_what_goes_wrong_is_told_and_counted(tool: Python, session: Session) -> None:
    response = await ask(tool, session, "print('so far')\n1 / 0")
    assert response.text.startswith("so far\nTraceback")
    assert response.error
    assert response.metrics["exceptions"] == 1
    response = await ask(tool, session, "import os\nos._exit(1)")
    assert response.text == (
        "[Stopped: the interpreter's process ended; the interpreter was started anew: variables are gone.]"
    )
    assert response.metrics["restarts"] == 1
    response = await ask(tool, session, "x" * (MAX_CODE + 1))
    assert response.error
    assert str(MAX_CODE) in response.text
    assert (await ask(tool, session, "2")).text == "2"


async def test_a_timeout_is_told(session: Session, tool: Python) -> None:
    response = await ask(tool, session, "import time\ntime.sleep(60)")
    assert response.text.endswith("[Stopped: it ran for more than 2 seconds; variables are kept.]")
    assert response.metrics["timeouts"] == 1
    assert (await ask(tool, session, "time.__name__")).text == "'time'"


async def test_images(tool: Python, session: Session) -> None:
    response = await ask(tool, session, "display(b'\\x89PNG\\r\\n\\x1a\\nA')")
    assert response.images == (b"\x89PNG\r\n\x1a\nA",)
    assert response.text == "[1 image]"


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ("```python\nx\n```", "x"),
        ("```\nx\ny\n```\n", "x\ny"),
        ("  ```py\nif x:\n    y\n  ```", "if x:\n    y"),
        ("x = '```'", "x = '```'"),
        ("print(1)", "print(1)"),
    ],
)
def test_fences_are_taken_off(written: str, code: str) -> None:
    assert unfenced(written) == code


def test_what_a_model_reads() -> None:
    execution = Execution(
        stdout="a\n", stderr="w\n", value="1", images=(b"x", b"y"), stop=Stop.CPU, cut=True, lost_before=True
    )
    assert execution_text(execution, Limits()).splitlines() == [
        "[The former call was cut off and the interpreter started anew: earlier variables are gone.]",
        "a", "[stderr]", "w", "1", "[2 images]",
        "[Stopped: it used more than 10 seconds of CPU time; variables are kept.]",
        "[Some of the output was left out.]",
    ]  # fmt: skip
    for stop in Stop:
        assert "{" not in execution_text(Execution(stop=stop, lost=True), Limits())


async def test_it_is_installed_and_refuses_bad_arguments() -> None:
    tool = make_tool(ToolSection(name="python", args={"seconds": 1.5}))
    assert isinstance(tool, Python)
    assert tool.schema["function"]["parameters"]["required"] == ["code"]
    await tool.close()
    with pytest.raises(UserError, match="seconds must be above 0"):
        Python(seconds=0)
    with pytest.raises(UserError, match="did you mean 'bwrap'"):
        Python(backend="bwarp")


async def test_many_requests_at_once(tool: Python) -> None:
    async def one(n: int) -> str:
        session = Session(f"r/{n}", Task("t", {}), random.Random(0), 0.0)
        await tool.create(session)
        try:
            await ask(tool, session, f"n = {n}")
            return (await ask(tool, session, "n")).text
        finally:
            await tool.release(session)

    assert await asyncio.gather(*(one(n) for n in range(20))) == [str(n) for n in range(20)]


async def test_release_without_create_and_a_sandbox_that_fails(tool: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("r/0", Task("t", {}), random.Random(0), 0.0)
    monkeypatch.setitem(tool.sandbox._config, "before", ["--no-such-option"])  # type: ignore[attr-defined]
    with pytest.raises(InfrastructureError):
        await tool.create(session)
    await tool.release(session)
