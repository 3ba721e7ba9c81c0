"""The watchdog: it names who holds up the event loop, also where nothing of this interpreter runs."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl.containment.event_loop import Runner
from agentrl.containment.watchdog import Frame, Watchdog, blocking_code, read_dump

AGENTRL = str(Path(sys.modules["agentrl"].__file__).parent)
EVENTS = Frame(asyncio.events.__file__, 80, "_run")
DRIVER = Frame(f"{AGENTRL}/rollout/driver.py", 7, "drive")
THREADS = Frame(f"{AGENTRL}/containment/threads.py", 7, "run")
LOADING = Frame(f"{AGENTRL}/models/load.py", 7, "load_model")
MAKING = Frame(f"{AGENTRL}/plugins/registry.py", 7, "construct")
TORCH = Frame("/site-packages/torch/load.py", 7, "load")
SCORE = Frame("/home/me/judge.py", 7, "score")
MATCH = Frame(os.__file__.replace("os.py", "re/__init__.py"), 3, "match")
SELECT = Frame(os.__file__.replace("os.py", "selectors.py"), 468, "select")


@pytest.mark.parametrize(
    ("stacks", "held", "said"),
    [
        ({1: [MATCH, SCORE, DRIVER, EVENTS]}, False, "score (judge.py:7), at match (__init__.py:3)"),
        ({1: [SCORE, EVENTS, DRIVER]}, False, "score (judge.py:7)"),
        ({1: [TORCH, LOADING, DRIVER, EVENTS]}, False, None),
        ({1: [SCORE, MAKING, DRIVER, EVENTS]}, False, None),
        ({1: [SELECT, DRIVER], 2: [MATCH, SCORE, THREADS]}, False, "score (judge.py:7), at match (__init__.py:3) in a"),
        ({1: [DRIVER, EVENTS], 2: [SCORE, THREADS]}, False, None),
        ({1: [DRIVER, EVENTS], 2: [SCORE, THREADS]}, True, "score (judge.py:7) in a thread"),
        ({1: [SELECT], 2: [SCORE, THREADS], 3: [MATCH, SCORE, THREADS]}, True, "one of score (judge.py:7) and score"),
        ({1: [SELECT, DRIVER], 2: [SCORE]}, True, None),
        ({}, True, None),
    ],
)
def test_a_plugin_is_accused_and_our_own_work_is_not(stacks, held, said):
    found = blocking_code(stacks, 1, held)
    assert (found or "").startswith(said or "\0") if said else found is None


def test_a_dump_of_faulthandler_is_read(tmp_path):
    import faulthandler

    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = read_dump(file.read())
    (frame, *_) = stacks[threading.get_ident()]
    assert (frame.file, frame.function) == (__file__, "test_a_dump_of_faulthandler_is_read")


@pytest.mark.slow
def test_who_holds_up_the_loop_is_said_once_and_a_loop_that_waits_is_not():
    said, told = [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        told.set()

    async def holds() -> None:
        assert told.wait(120)

    async def waits() -> None:
        await asyncio.sleep(1)

    loop = asyncio.new_event_loop()
    watchdog = Watchdog(say, seconds=0.4)
    try:
        with watchdog.over(loop):
            loop.run_until_complete(loop.create_task(waits()))
            assert said == []
            loop.run_until_complete(loop.create_task(holds()))
        assert len(said) == 1
        assert said[0].startswith("no request has gone on for 0.4 s, held up by holds (test_watchdog.py:")
    finally:
        watchdog.close()
        loop.close()


HOLDS = """
import ctypes, threading
from agentrl.containment import watchdog
watchdog.SECONDS = 1.0
from agentrl.plugins.reward import _Function
from agentrl.containment.event_loop import Runner

def catastrophe(sample):
    ctypes.PyDLL(None).sleep(3600)

def work(runner, function):
    async def go():
        await function.score(None)
    runner.run(go())

import agentrl.containment.event_loop as blocking
original = blocking.Watchdog
blocking.Watchdog = lambda say, ending: original(say, 1.0, ending)
work(Runner(print), _Function(catastrophe, {}))
"""


@pytest.mark.slow
def test_code_that_holds_the_interpreter_is_named_all_the_same(tmp_path):
    script = tmp_path / "holds.py"
    script.write_text(HOLDS)
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if line.startswith("agentrl: "))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert "held up by catastrophe (holds.py:9) in a thread, which holds the interpreter: " in line


def test_a_loop_without_anybody_to_tell_has_no_watchdog():
    with Runner() as runner:
        runner.run(asyncio.sleep(0))
        assert runner._watchdog is None
