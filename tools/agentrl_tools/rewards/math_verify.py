"""`math_verify`: 1.0 where the final answer equals the truth as mathematics, by the package of that name."""

import asyncio
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from agentrl.containment.threads import in_thread
from agentrl.plugins.reward import Reward, Sample
from agentrl.plugins.types import InfrastructureError, Json
from agentrl_tools.extras import require
from agentrl_tools.rewards.truth import marked, truth_of


class MathVerify(Reward):
    """1.0 where the answer equals the truth as mathematics, else 0.0.

    Free-form maths (fractions, roots, sets, intervals, equations): `1/2`, `0.5` and `\\frac{1}{2}` are equal.

    truth: the field of the task's data that holds it. seconds: of CPU for one answer; one that needs more is not right.
    workers: processes (0: one a core, at most 4). memory_mb: of each. A truth that cannot be read raises.
    """

    name = "math_verify"

    def __init__(self, truth: str | None = None, seconds: float = 5.0, workers: int = 0, memory_mb: int = 2048) -> None:
        if seconds <= 0 or workers < 0 or memory_mb < 256:
            raise ValueError("seconds must be above 0, workers 0 or more, memory_mb 256 or more")
        require("math_verify", "math")
        self._truth = truth
        self._pool = MathPool(workers or min(4, os.cpu_count() or 1), seconds, memory_mb)

    async def score(self, sample: Sample) -> float:
        gold = str(truth_of(sample.task, self._truth))
        written = gold if marked(gold) is not None or "$" in gold else f"${gold}$"
        loop = asyncio.get_running_loop()
        right = await loop.run_in_executor(self._pool.threads, self._pool.compare, written, sample.answer)
        return 1.0 if right else 0.0

    async def close(self) -> None:
        await in_thread(self._pool.close)


WALL = 120.0  # seconds a reply may take on a machine that is busy with other things


class MathPool:
    """workers: processes at once; each starts when first needed. seconds, memory_mb: of each, as in the worker."""

    def __init__(self, workers: int, seconds: float, memory_mb: int) -> None:
        self._command = [sys.executable, "-m", "agentrl_tools.rewards.math_worker", str(seconds), str(memory_mb)]
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self.threads = ThreadPoolExecutor(workers, "math_verify")
        self._closed = threading.Event()
        self._live: set[_Worker] = set()

    def compare(self, gold: str, answer: str) -> bool:
        """Whether the answer equals the truth; an answer that takes too long does not. Blocks: call it in
        `threads`.

        Raises ValueError for a truth that cannot be read, InfrastructureError when processes die of something else.
        """
        try:
            return self._compare(gold, answer)
        except InfrastructureError:
            if self._closed.is_set():
                raise
        return self._compare(gold, answer)

    def _compare(self, gold: str, answer: str) -> bool:
        worker = self._idle.get()
        try:
            if worker is None or worker.over:
                worker = self._start()
            return worker.compare(gold, answer)
        finally:
            if worker is not None and (worker.over or self._closed.is_set()):
                worker.stop()
                self._live.discard(worker)
            self._idle.put(worker)

    def _start(self) -> "_Worker":
        worker = _Worker(self._command)
        self._live.add(worker)
        if self._closed.is_set():
            raise InfrastructureError("math_verify is closed")
        return worker

    def close(self) -> None:
        """Kill all processes, whatever they do."""
        self._closed.set()
        for worker in list(self._live):
            worker.kill()
        self.threads.shutdown(wait=True, cancel_futures=True)
        for worker in list(self._live):
            worker.stop()


class _Worker:
    def __init__(self, command: list[str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0
        )
        self._unread = b""

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def compare(self, gold: str, answer: str) -> bool:
        self._send({"gold": gold, "answer": answer})
        first = self._reply()
        if not first.get("gold"):
            why = "took too long to read" if first.get("late") else "holds no expression"
            raise ValueError(f"the ground truth {gold!r:.80} {why}")
        return bool(self._reply().get("right"))

    def _send(self, request: dict[str, str]) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError as error:
            self.stop()
            raise InfrastructureError("the process of math_verify is gone") from error

    def _reply(self) -> dict[str, Json]:
        """The next line. A process that the kernel ended for its CPU time was late; any other end is an
        error."""
        end = time.monotonic() + WALL
        stream = self._process.stdout
        assert stream is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
            piece = stream.read(65536) if ready else None
            if piece:
                self._unread += piece
                continue
            last = self._last_words()
            self.stop()
            if ready and self._process.returncode == -signal.SIGXCPU:
                return {"late": True}
            why = f"ended with {self._process.returncode}: {last}" if ready else f"says nothing for {WALL:g} s"
            raise InfrastructureError(f"the process of math_verify {why}")
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Json] = json.loads(line)
        if "error" in reply:
            raise InfrastructureError(f"math_verify raised {reply['error']}")
        return reply

    def _last_words(self) -> str:
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 500))
        return self._said.read().decode(errors="replace").strip().rpartition("\n")[2]

    def kill(self) -> None:
        """Kill the process; the thread that waits for its reply gets an error, and does the rest."""
        self._process.kill()

    def stop(self) -> None:
        """End it, and free what it held. Its output is closed a moment before its status is known: wait that moment."""
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()
