"""Reward functions that hang, raise and exit, for the tests of threads and processes."""

import os
import threading
import time
from pathlib import Path

free = threading.Event()
"""Lets every call that hangs here return."""


def hang(sample) -> float:
    free.wait()
    return 1.0


def hang_when_told(sample) -> float:
    if sample.task.data["hang"]:
        free.wait()
    return 1.0


def stops(sample) -> float:
    return next(iter(()))


def where(sample, scale: float = 1.0) -> float:
    return scale * os.getpid()


def hang_in_a_process(sample, mark: str) -> float:
    Path(mark).write_text(str(os.getpid()))
    while sample.task.data["hang"]:
        time.sleep(0.01)
    return 1.0


def crash(sample) -> float:
    os._exit(7)


def leave(sample) -> float:
    raise SystemExit("enough")


def setting(sample) -> float:
    return float(os.environ["AGENTRL_TEST_SETTING"])


def places(samples) -> list[float]:
    return [float(len(s.answer)) for s in samples]


def picky(sample) -> float:
    """Fails for every seventh length."""
    if sample.tokens % 7 == 0:
        raise ValueError("a length that I do not like")
    return len(sample.answer) / 100


def strict(sample) -> float:
    """Takes 2 off a turn."""
    return -2.0 * sample.turns
