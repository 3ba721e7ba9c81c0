"""Test a solution by calling it in a sandbox. Expected results and the verdict never enter that sandbox.

Whatever a solution does in its interpreter, the only thing that comes out is what a call claims to return. A sandbox
that cannot serve raises InfrastructureError, which is no verdict.
"""

import asyncio
import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl_tools.loops import PerLoop
from agentrl_tools.sandbox import Sandbox, SandboxSession

from agentrl.plugins.types import Json
from agentrl_envs.code import director, wire
from agentrl_envs.code.wire import WireError

_WIRE = "_agentrl_wire"
_IMPORT = "from agentrl_envs.code.wire import"
_DIRECTOR_SECONDS = 10.0  # for the tests themselves, between two calls of the solution


class CallFailedError(Exception):
    """A call of the solution returned no value. raised: name of the exception that it raised, or ""."""

    def __init__(self, why: str, raised: str = "") -> None:
        super().__init__(why)
        self.raised = raised


class UnfitTestsError(Exception):
    """The tests cannot tell a right solution from a wrong one. The text says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of testing one solution."""

    passed: int
    """Tests that passed."""
    total: int
    """All tests."""
    why: str = ""
    """The first test that failed, for people."""

    @property
    def all_passed(self) -> bool:
        """True where every test passed."""
        return self.passed == self.total


class SolutionRunner:
    """Runs solutions against tests. seconds: limit of one call of a solution; total_seconds: of all its calls.
    concurrency: solutions tested at once."""

    def __init__(self, sandbox: Sandbox, seconds: float, total_seconds: float, concurrency: int) -> None:
        self._sandbox, self._seconds, self._total_seconds = sandbox, seconds, total_seconds
        self._places = PerLoop(lambda: asyncio.Semaphore(concurrency))

    async def by_results(self, solution: str, name: str, tests: Sequence[tuple[Sequence[object], object]]) -> Verdict:
        """Test by (arguments, expected result); results are compared in this process."""
        passed, why = 0, ""
        async with self._places.here(), self._sandbox.session() as session:
            candidate = Candidate(session, solution, name, self._seconds, self._total_seconds)
            for arguments, expected in tests:
                try:
                    result = await candidate.call(arguments, {})
                except CallFailedError as error:
                    why = why or f"{name}{_shown(arguments)}: {error}"
                    continue
                if equal(result, expected):
                    passed += 1
                else:
                    why = why or f"{name}{_shown(arguments)} is {result!r:.80}, not {expected!r:.80}"
        return Verdict(passed, len(tests), why)

    async def by_script(self, solution: str, name: str, setup: str, tests: Sequence[str]) -> Verdict:
        """Test by Python texts, each run by itself. Raises UnfitTestsError."""
        passed, why, calls = 0, "", 0
        async with self._places.here(), self._sandbox.session() as ours, self._sandbox.session() as session:
            candidate = Candidate(session, solution, name, self._seconds, self._total_seconds)
            for text in tests:
                failed = await _Script(ours, candidate).run(setup, text, name)
                passed += failed is None
                why = why or failed or ""
            calls = candidate.calls
        if tests and not calls and passed:
            raise UnfitTestsError(f"the tests never call {name}")
        return Verdict(passed, len(tests), why)


class Candidate:
    """A solution in an interpreter of its own."""

    def __init__(self, session: SandboxSession, solution: str, name: str, seconds: float, total_seconds: float) -> None:
        self.calls = 0
        self._session, self._solution, self._name = session, solution, name
        self._seconds, self._left = seconds, total_seconds
        self._begun = False
        self._dead = ""

    async def call(self, arguments: Sequence[Json], named: Mapping[str, Json]) -> Json:
        """What the call claims to return. Raises CallFailedError; after a call that was stopped, always."""
        return wire.read(await self.call_text(wire.write((list(arguments), dict(named)))))

    async def call_text(self, arguments: str) -> str:
        """Call like `call`, with arguments and result as texts of `wire`; the text returned is readable."""
        self.calls += 1
        if not self._begun:
            self._begun = True
            await self._run(self._solution)  # one that raises may have defined the function all the same
            await self._run(_installed(inspect.getsource(wire)))
        value, error = await self._run(f"__import__({_WIRE!r}).call(globals(), {self._name!r}, {arguments!r})")
        if error is not None:
            last = error.strip().splitlines()[-1] if error.strip() else "an exception"
            raise CallFailedError(last[:200], raised=last.partition(":")[0].strip())
        text = (value or "").strip("'\"")
        try:
            wire.read(text)
        except WireError as unreadable:
            raise CallFailedError("what it returned cannot be read") from unreadable
        return text

    async def _run(self, code: str) -> tuple[str | None, str | None]:
        """The value and the error of running `code`."""
        if self._dead or self._left <= 0:
            raise CallFailedError(self._dead or "out of time")
        began = time.monotonic()
        execution = await self._session.run(code, seconds=min(self._seconds, self._left))
        self._left -= time.monotonic() - began
        if execution.stop is not None or execution.lost or execution.lost_before:
            self._dead = f"stopped: {execution.stop or 'its interpreter was lost'}"
            raise CallFailedError(self._dead)
        return execution.value, execution.error


class _Script:
    """Runs one test's text by `director.py` in the session `ours`, while the candidate is in another."""

    def __init__(self, ours: SandboxSession, candidate: Candidate) -> None:
        self._ours, self._candidate = ours, candidate

    async def run(self, setup: str, text: str, name: str) -> str | None:
        """None if the test passed, else why it failed."""
        source = inspect.getsource(director)
        own = [line for line in source.splitlines() if not line.startswith(_IMPORT)]
        source = inspect.getsource(wire) + "\n".join(own)
        await self._ours.run(_installed(source))
        start = f"_director = __import__({_WIRE!r}).Director({setup!r}, {text!r}, {name!r})\n_director.step()"
        return await self._follow(start)

    async def _follow(self, code: str) -> str | None:
        while True:
            execution = await self._ours.run(code, seconds=_DIRECTOR_SECONDS)
            if execution.value is None:
                return f"the test did not end: {execution.stop or execution.error or 'no value'}"[:200]
            kind, what = wire.read(execution.value.strip("'\""))
            if kind == "unfit":
                raise UnfitTestsError(f"a test passes an argument that cannot be sent: {what}")
            if kind != "call":
                return None if kind == "passed" else what or "failed"
            code = await self._answer(what)

    async def _answer(self, arguments: str) -> str:
        try:
            return f"_director.step(value={await self._candidate.call_text(arguments)!r})"
        except CallFailedError as error:
            return f"_director.step(error={error.raised or 'RuntimeError'!r})"


def equal(result: object, expected: object) -> bool:
    """Compare plain values by `==`."""
    try:
        return bool(result == expected)
    except RecursionError:
        return False


def _installed(source: str) -> str:
    """Code that installs `source` as a module of its own, apart from the solution's names."""
    return (
        f"import sys, types\nsys.modules[{_WIRE!r}] = types.ModuleType({_WIRE!r})\n"
        f"exec({source!r}, sys.modules[{_WIRE!r}].__dict__)"
    )


def _shown(arguments: Sequence[object]) -> str:
    return "(" + ", ".join(f"{a!r:.60}" for a in arguments) + ")"
