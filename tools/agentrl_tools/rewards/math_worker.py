"""The process that compares expressions for `math_verify`: a request a line on stdin, two replies a request on stdout.

It is a process of its own because an expression may keep sympy, or one huge integer power, busy for ever: only a
process can be stopped then. Time is CPU time, so that a busy machine makes nobody's answer wrong.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

_LONGEST = 20_000  # characters of an answer that are looked at: the last ones
_GRACE = 2  # CPU seconds after the timer before the kernel ends the process, where no Python code runs in between


class _OutOfTime(BaseException):
    """Not an Exception, so that nobody's `except Exception` keeps it."""


def main() -> None:
    """Run until stdin ends. First argument: CPU seconds for a request; second: MiB of memory."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2]) * 2**20
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    import math_verify  # noqa: F401 - paid before any limit counts

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGVTALRM, _ring)
    for line in sys.stdin:
        _serve(json.loads(line), seconds, out)


def _ring(number: int, frame: Any) -> None:
    raise _OutOfTime


def _serve(request: dict[str, str], seconds: float, out: Any) -> None:
    """Reply `{"gold": bool}` once the truth is read, then `{"right": bool}` or `{"late": true}`."""
    from math_verify import verify

    def say(**reply: object) -> None:
        out.write(json.dumps(reply) + "\n")
        out.flush()

    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + seconds) + _GRACE
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        gold = _read(request["gold"])
        say(gold=bool(gold))
        if gold:
            said = _read(request["answer"][-_LONGEST:])
            say(right=bool(said) and bool(verify(gold, said, timeout_seconds=None)))
    except (_OutOfTime, RecursionError, MemoryError):
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        say(late=True)
    except Exception as error:  # noqa: BLE001 - the boundary of the process: foreign code on a model's text
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        say(error=f"{type(error).__name__}: {error}"[:500])
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _read(text: str) -> list[Any]:
    """The expression that a text marks, or else holds; empty where there is none."""
    from math_verify import parse

    from agentrl_tools.rewards.truth import marked

    mark = marked(text)
    for written in [text] if mark is None or "\\boxed" in text else [f"${mark.strip().strip('$')}$", mark]:
        if found := parse(written, parsing_timeout=None):
            return list(found)
    return []


if __name__ == "__main__":
    main()
