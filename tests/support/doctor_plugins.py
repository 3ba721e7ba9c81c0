"""Checks that go wrong in every way, and an engine that does not take weights."""

import os
import signal
import sys
import tempfile
import time
from typing import Any

from agentrl.doctor.check import Check, CheckError, NotHereError


def fails(subject: Any) -> str:
    print("what the part wrote")
    raise CheckError("it is broken", "package wheel")


def absent(subject: Any) -> str:
    raise NotHereError("no such thing")


def hangs(subject: Any) -> str:
    time.sleep(600)
    return ""


def dies(subject: Any) -> str:
    print("its last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def exits(subject: Any) -> str:
    sys.exit(3)


def fine(subject: Any) -> str:
    return "42 per second"


def leaves(subject: Any) -> str:
    """Has a folder for as long as it lasts, which is for ever."""
    with tempfile.TemporaryDirectory(prefix="of-a-check-"):
        time.sleep(600)
    return ""


LASTS = (Check("lasts", "something", leaves, "key c.d"),)
CHECKS = (
    Check("first", "something", fine, ""),
    Check("fails", "something", fails, "key a.b"),
    Check("rests", "something", fine, "", needs=("fails",)),
    Check("absent", "something", absent, "key a.b"),
    Check("hangs", "something", hangs, "key c.d", seconds=0.5),
    Check("dies", "something", dies, "key e.f"),
    Check("exits", "something", exits, "key g.h"),
    Check("last", "something", fine, ""),
)
