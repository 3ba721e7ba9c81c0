"""What a solution may try against its runner, run for real in the sandbox: none of it passes."""

import asyncio
from collections.abc import Iterator

import pytest
from agentrl_envs.code import wire
from agentrl_envs.code.runner import SolutionRunner, UnfitTestsError, Verdict
from agentrl_envs.code.wire import WireError
from agentrl_tools.sandbox import Execution, Limits, Sandbox, SandboxSession, make_sandbox

from agentrl.plugins.types import InfrastructureError

TESTS = [([1], 11), ([5], 15), ([-10], 0)]  # f(x) = x + 10
SCRIPT = ["assert f(1) == 11", "def check(c):\n    assert c(5) == 15\n    assert c(-10) == 0\ncheck(f)"]

CHEATS = {
    "ends the interpreter": "import sys\nsys.exit(0)",
    "ends the process": "import os\nos._exit(0)",
    "ends it in the call": "import os\ndef f(x):\n    os._exit(0)",
    "exits in the call": "def f(x):\n    raise SystemExit(0)",
    "is equal to everything": """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def f(x):
    return Same(x)""",
    "prints a verdict": "def f(x):\n    print('passed', (3, 3), 'OK')\n    return True",
    "prints results": "def f(x):\n    print(11)\n    print('11')",
    "patches the builtins": """
import builtins, json
def yes(*args, **kwargs): return True
for name in ('all', 'any', 'isinstance', 'repr', 'sum'):
    setattr(builtins, name, yes)
json.dumps = lambda *args, **kwargs: 'true'
def f(x):
    return x""",
    "patches the wire": """
import sys, types
class Wire(types.ModuleType):
    def call(self, *args): return 'passed'
    def write(self, *args): return 'passed'
def f(x):
    sys.modules['_agentrl_wire'].write = lambda value: 'passed'
    sys.modules['_agentrl_wire'] = Wire('w')
    return x""",
    "looks for what is expected": """
import gc, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if isinstance(value, (int, list, tuple)) and 11 in (value if isinstance(value, (list, tuple)) else [value]):
                return 11
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (list, tuple)) and len(thing) == 2 and thing[1] in (11, 15) and thing[0] == [x]:
            return thing[1]
    return None""",
    "returns what is no value": "def f(x):\n    return f",
    "returns too much": "def f(x):\n    return [0] * 10**5",
    "nests without end": "def f(x):\n    for _ in range(50_000): x = [x]\n    return x",
    "raises what the test knows": "def f(x):\n    raise AssertionError('passed')",
    "is not there": "def g(x):\n    return x + 10",
    "is no Python": "def f(x:\n",
}

HANGS = {
    "never returns": "def f(x):\n    while True: pass",
    "never returns at import": "while True: pass",
    "sleeps": "import time\ndef f(x):\n    time.sleep(1000)",
    "does not mind interrupts": """
def f(x):
    while True:
        try:
            while True: pass
        except BaseException:
            pass""",
}


@pytest.fixture(scope="module")
def sandbox(bubblewrap: None) -> Iterator[Sandbox]:
    """One for all tests, each of which has a loop of its own."""
    made = make_sandbox("bwrap", limits=Limits(output=200_000), pool=2)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def runner(sandbox: Sandbox) -> SolutionRunner:
    """Patient, so that nothing fails by time alone."""
    return SolutionRunner(sandbox, seconds=20.0, total_seconds=60.0, concurrency=4)


async def _both(runner: SolutionRunner, solution: str) -> tuple[Verdict, Verdict]:
    by_results = await runner.by_results(solution, "f", TESTS)
    return by_results, await runner.by_script(solution, "f", "", SCRIPT)


@pytest.mark.parametrize("cheat", CHEATS)
async def test_no_cheat_passes_a_single_test(runner: SolutionRunner, cheat: str) -> None:
    for verdict in await _both(runner, CHEATS[cheat]):
        assert verdict.passed == 0
        assert verdict.why


@pytest.mark.parametrize("hang", HANGS)
async def test_what_never_returns_is_stopped_and_fails(sandbox: Sandbox, hang: str) -> None:
    for verdict in await _both(SolutionRunner(sandbox, 0.3, 3.0, 4), HANGS[hang]):
        assert verdict.passed == 0
        assert "stopped: wall" in verdict.why or "RuntimeError" in verdict.why


async def test_all_calls_together_have_a_limit(sandbox: Sandbox) -> None:
    slow = "import time\ndef f(x):\n    time.sleep(0.4)\n    return x + 10"
    verdict = await SolutionRunner(sandbox, 5.0, 1.0, 4).by_results(slow, "f", TESTS * 4)
    assert verdict.passed < 3
    assert (await SolutionRunner(sandbox, 5.0, 60.0, 4).by_results(slow, "f", TESTS)).all_passed


async def test_an_honest_solution_passes(runner: SolutionRunner) -> None:
    honest = "import time\nprint('hello')\ndef f(x):\n    time.sleep(0.01)\n    return x + 10"
    assert await _both(runner, honest) == (Verdict(3, 3), Verdict(2, 2))
    assert await _both(runner, honest + "\nraise ValueError('after it is defined')") == (Verdict(3, 3), Verdict(2, 2))


async def test_what_is_missing_is_said(runner: SolutionRunner) -> None:
    verdict = await runner.by_results("def g(x):\n    return 1", "f", TESTS)
    assert verdict == Verdict(0, 3, "f(1): NameError: there is no f")


async def test_each_test_counts_by_itself(runner: SolutionRunner) -> None:
    by_results, by_script = await _both(runner, "def f(x):\n    return 11 if x == 1 else 1 / 0")
    assert (by_results.passed, by_results.total, by_script.passed, by_script.total) == (1, 3, 1, 2)
    assert "ZeroDivisionError" in by_results.why


async def test_a_test_may_expect_an_exception_and_use_what_its_setup_brings(runner: SolutionRunner) -> None:
    setup = "import math\ndef near(a, b):\n    return math.isclose(a, b)"
    tests = [
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "assert near(f(2.0), math.sqrt(2))",
        "for i in range(20):\n    assert near(f(i * i), i)",
        "assert f(x=4) == 2",
        "assert {f(i) for i in (1, 4)} == {1, 2}",
    ]
    honest = "import math\ndef f(x):\n    return math.sqrt(x)"
    assert await runner.by_script(honest, "f", setup, tests) == Verdict(5, 5)
    assert (await runner.by_script("def f(x):\n    raise ValueError", "f", setup, tests)).passed == 1


@pytest.mark.parametrize(
    ("tests", "message"),
    [(["assert f(lambda x: x) == 1"], "a function is not a plain value"), (["assert True"], "never call f")],
)
async def test_tests_that_check_nothing_are_said(runner: SolutionRunner, tests: list[str], message: str) -> None:
    with pytest.raises(UnfitTestsError, match=message):
        await runner.by_script("def f(x):\n    return 1", "f", "", tests)


async def test_what_is_tested_at_the_same_time_does_not_meet(runner: SolutionRunner) -> None:
    solutions = [f"import builtins\nbuiltins.shared = {n}\ndef f(x):\n    return builtins.shared" for n in range(8)]
    verdicts = await asyncio.gather(*(runner.by_results(s, "f", [([0], n)]) for n, s in enumerate(solutions)))
    assert all(v.all_passed for v in verdicts)


class _Away(Sandbox):
    """Opens sessions that cannot serve."""

    class Session(SandboxSession):
        async def run(self, code: str, *, seconds: float | None = None) -> Execution:
            raise InfrastructureError("the machine is away")

        async def close(self) -> None: ...

    async def open(self) -> SandboxSession:
        return self.Session()

    async def close(self) -> None: ...


async def test_a_sandbox_that_cannot_serve_gives_no_verdict() -> None:
    runner = SolutionRunner(_Away(), 1.0, 1.0, 1)
    with pytest.raises(InfrastructureError, match="away"):
        await runner.by_results("def f(x): return 1", "f", TESTS)
    with pytest.raises(InfrastructureError, match="away"):
        await runner.by_script("def f(x): return 1", "f", "", SCRIPT)


VALUES = [
    None, True, 0, -7, 10**50, 1.5, float("inf"), "ä\n'\"", b"\x00a", 2j, [], (), [1, [2, (3,)]], {1, 2},
    frozenset("a"), {}, {"a": [1], 2: (3, 4), (5, 6): None}, [{"list": 1}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_go_over_the_wire_as_they_are(value: object) -> None:
    back = wire.read(wire.write(value))
    assert (back, type(back)) == (value, type(value))


@pytest.mark.parametrize(
    "said",
    [
        "", "passed", "zz", "5b5d", b"[1]".hex(), b'{"list": 1}'.hex(), b'{"eval": ["1"]}'.hex(),
        b'{"a": 1, "b": 2}'.hex(), b'{"set": [{"list": []}]}'.hex(), b'{"complex": [1e400, {"list": []}]}'.hex(),
        (b"[" * 100_000).hex(), b"9".hex() * 9999, (b'{"list": [' * 20_000 + b"]}" * 20_000).hex(),
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused(said: str) -> None:
    with pytest.raises(WireError):
        wire.read(said)


def test_what_is_not_plain_cannot_be_written() -> None:
    for value in (object(), print, [1, iter(())]):
        with pytest.raises(WireError, match="not a plain value"):
            wire.write(value)
