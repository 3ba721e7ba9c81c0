"""`check_tool`: what the driver relies on in a tool, tried with real sessions."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.plugins.tool import Tool
from agentrl.plugins.types import ArgumentError, Conversed, Json, Message, Session, Task, ToolKwargs, ToolResponse
from agentrl.testing.agent import ANSWER
from agentrl.testing.agent import call as call_line
from agentrl.testing.hooks import (
    first_difference,
    hook,
    made_tool,
    number,
    require,
    require_hooks,
    require_no_growth,
    require_schema,
    run_checks,
    session,
)
from agentrl.testing.play import Alone, Stage

_HELD = 16  # turns of conversations that a call of a tool may hold
Call = Mapping[str, Json] | tuple[Mapping[str, Json], str]
"""The arguments of a call, or those and a text that its answer must hold."""


def check_tool(
    tool: Tool | type[Tool] | str,
    calls: Sequence[Call] = (),
    *,
    wrong: Sequence[Mapping[str, Json]] = (),
    create_kwargs: Mapping[str, Json] | None = None,
    execute_kwargs: Mapping[str, Json] | None = None,
    deterministic: bool = True,
    sessions: int = 16,
) -> None:
    """Raise AssertionError, one line, for the first promise that a tool does not keep.

    tool: an object, a class that needs no argument, or an installed name. calls: made one after the other in every
    session; none may be refused. wrong: calls that must be refused, after which the right ones still work.
    create_kwargs, execute_kwargs: what a task would hand over; of a tool that converses also the `converse` of its own
    tests (by default every conversation is answered alike). deterministic: whether a session alone decides what is
    answered (by the calls and `session.rng`): False for a tool that asks the world. sessions: how many at once.

    Checked: async hooks and what they take; name, description, schema; rewards and metrics are finite numbers;
    `release` works after no call, after refused calls, after a cancelled call; sessions do not share state, one after
    the other or at once; nothing is kept of those that were released; the driver itself can play it.
    """
    __tracebackhide__ = True

    async def work() -> None:
        contract = _Contract(made_tool(tool), calls, wrong, create_kwargs, execute_kwargs)
        await _check(contract, deterministic, sessions)

    run_checks(work)


async def _check(contract: "_Contract", deterministic: bool, sessions: int) -> None:
    try:
        await _promises(contract, deterministic, sessions)
    finally:
        await contract.tool.close()


async def _promises(contract: "_Contract", deterministic: bool, sessions: int) -> None:
    require_hooks(contract.tool, contract.what)
    require_schema(contract.tool)
    await contract.end_early()
    alone = await contract.play(0)
    again = await contract.play(1)
    if deterministic:
        _compare(alone, again, contract.what, "a second session answered otherwise than the first")
    results = await asyncio.gather(*(contract.play_among(2 + i, sessions) for i in range(sessions)))
    for result in results if deterministic else ():
        _compare(alone, result, contract.what, f"{sessions} sessions at once answered otherwise than one alone")
    await contract.play_refused()
    if contract.calls:
        await contract.cancel()
    await require_no_growth(
        contract.tool, contract.what, lambda: asyncio.gather(*(contract.play(i) for i in range(sessions)))
    )
    await contract.drive()


def _compare(expected: list[object], got: list[object], what: str, how: str) -> None:
    at = first_difference(expected, got)
    if at is not None:
        is_call = at < len(expected) - 1
        where = f"call {at + 1}: {expected[at]!r}, then {got[at]!r}" if is_call else "calc_reward"
        raise AssertionError(
            f"{what}: {how} ({where}): keep what is per request in session.state and draw from session.rng, or say "
            f"deterministic=False"
        )


class _Answered:
    """A `Converse` whose conversations all come to ANSWER."""

    depth = 0
    tools: tuple[str, ...] = ()

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[str] = (),
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> Conversed:
        answer: Message = {"role": "assistant", "content": ANSWER}
        return Conversed((*messages, answer), "stop", 1)


class _Contract:
    """A tool, and the calls to try it with."""

    def __init__(
        self,
        tool: Tool,
        calls: Sequence[Call],
        wrong: Sequence[Mapping[str, Json]],
        create_kwargs: Mapping[str, Json] | None,
        execute_kwargs: Mapping[str, Json] | None,
    ) -> None:
        self.tool = tool
        self.what = f"tool {getattr(tool, 'name', type(tool).__name__)!r}"
        self.calls = [call if isinstance(call, tuple) else (call, "") for call in calls]
        self.wrong = list(wrong)
        hidden = {**({"converse": _Answered()} if tool.converses else {}), **(execute_kwargs or {})}
        self.kwargs = ToolKwargs(create_kwargs=dict(create_kwargs or {}), execute_kwargs=hidden)
        self.task = Task("check", {}, tools_kwargs={getattr(tool, "name", ""): self.kwargs})

    async def begin(self, index: int) -> Session:
        begun = session(self.task, index)
        await hook(self.tool.create(begun, **self.kwargs.create_kwargs), f"{self.what}: `create`")
        return begun

    async def release(self, begun: Session, when: str) -> None:
        await hook(self.tool.release(begun), f"{self.what}: `release` {when}")

    async def end_early(self) -> None:
        """Check a request that ends before the first call."""
        await self.release(await self.begin(0), "after a session without a call")

    async def play(self, index: int) -> list[object]:
        """Make every call and read the reward, in a session of its own; return what came of them as plain values."""
        begun = await self.begin(index)
        came: list[object] = [await self.answer(begun, i) for i in range(len(self.calls))]
        came.append(await self.reward(begun))
        await self.release(begun, "after its calls")
        return came

    async def play_among(self, index: int, sessions: int) -> list[object]:
        """Play as `play` does, while others do the same; alone it was right."""
        try:
            return await self.play(index)
        except AssertionError as error:
            raise AssertionError(
                f"{error}; one alone was right, {sessions} sessions at once are not: keep what is per request in "
                f"session.state"
            ) from error

    async def answer(self, begun: Session, index: int) -> tuple[object, ...]:
        arguments, words = self.calls[index]
        what = f"{self.what}: call {index + 1} with {dict(arguments)!r}"
        response = await self.execute(begun, arguments, what)
        require(not response.error, f"{what} was refused: {response.text!r}")
        require(words in response.text, f"{what}: its answer must hold {words!r}, got {response.text!r}")
        if response.reward is not None:
            number(response.reward, f"{what}: its reward")
        for key, value in response.metrics.items():
            number(value, f"{what}: its metric {key!r}")
        return response.text, response.reward, dict(response.metrics), response.done

    async def execute(self, begun: Session, arguments: Mapping[str, Json], what: str) -> ToolResponse:
        try:
            checked = self.tool.check(arguments)
        except ArgumentError as error:
            raise AssertionError(f"{what} was refused: {error}") from error
        result: Any = await hook(self.tool.execute(begun, **checked, **self.kwargs.execute_kwargs), what)
        if isinstance(result, str):
            return ToolResponse(result)
        require(isinstance(result, ToolResponse), f"{what}: it must return text or a ToolResponse, got {result!r}")
        require(isinstance(result.text, str), f"{what}: ToolResponse.text must be text, got {result.text!r}")
        assert isinstance(result, ToolResponse)
        return result

    async def reward(self, begun: Session) -> dict[str, float]:
        value = await hook(self.tool.calc_reward(begun), f"{self.what}: `calc_reward`")
        parts = {} if value is None else value if isinstance(value, Mapping) else {self.tool.name: value}
        return {str(k): number(v, f"{self.what}: `calc_reward`, part {k!r},") for k, v in parts.items()}

    async def play_refused(self) -> None:
        """Check that the wrong calls are refused, in whatever way the driver understands, and the session goes on."""
        begun = await self.begin(0)
        for arguments in self.wrong:
            require(
                await self.refuses(begun, arguments), f"{self.what}: the call with {dict(arguments)!r} was not refused"
            )
        for index in range(len(self.calls) if self.wrong else 0):
            await self.answer(begun, index)
        await self.release(begun, "after calls that were refused")

    async def refuses(self, begun: Session, arguments: Mapping[str, Json]) -> bool:
        try:
            checked = self.tool.check(arguments)
            result = await self.tool.execute(begun, **checked, **self.kwargs.execute_kwargs)
        except Exception:  # noqa: BLE001 - the driver tells the model, whatever a tool raises
            return True
        return isinstance(result, ToolResponse) and result.error

    async def cancel(self) -> None:
        """Check that `release` works after a call that was cancelled."""
        begun = await self.begin(0)
        arguments = self.tool.check(self.calls[0][0])
        work = asyncio.ensure_future(self.tool.execute(begun, **arguments, **self.kwargs.execute_kwargs))
        await asyncio.sleep(0)
        work.cancel()
        done, _ = await asyncio.wait({work}, timeout=10)
        require(done, f"{self.what}: a cancelled call did not end within 10 seconds: do not swallow CancelledError")
        if not work.cancelled():
            work.exception()
        await self.release(begun, "after a cancelled call")

    async def drive(self) -> None:
        """Check that the driver itself plays all calls as one request, which must not fail."""
        lines = [call_line(self.tool.name, **arguments) for arguments, _ in self.calls]
        turns = (_HELD if self.tool.converses else 1) * len(lines)
        stage = Stage(Alone(), [self.tool], changes={"max_turns": turns + 1, "max_tool_calls": len(lines) + 1})
        played = await stage.play(self.task, lambda task: [*lines, "done"])
        require(played.failure is None, f"{self.what}: {played.failure.message if played.failure else ''}")
        errors = [use.error for use in played.tool_uses if use.error]
        require(not errors, f"{self.what}: under the driver, a call was answered by an error: {errors[:1]}")
        require("release_errors" not in played.extra, f"{self.what}: {played.extra.get('release_errors')}")
