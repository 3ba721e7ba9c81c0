"""`SamplingProcesses`: the embedded engine's scheduler in several processes, which read the weights from shared memory.

A conversation stays on its process, and those that begin alike are on the same one. Where the last bits of a row depend
on what is computed beside it, a process waits after a step in which a turn ended until the event loop has given it what
follows, as a step in the loop's own thread does; so with tools that answer at once its batches, and with them what it
samples, do not depend on time. Meanwhile the others compute.

The processes are forked by the nursery, a process that was forked itself before there was anything to lose: it holds
the model, does nothing else, and makes a new one in place of one that died. All of them end with this process.
"""

import asyncio
import ctypes
import gc
import math
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.engine.base import ConstraintError, EngineError, Generation, GenerationFinish, tell
from agentrl.engine.grammar import Grammars
from agentrl.engine.local.runner import Runner, Work
from agentrl.engine.local.scheduler import Scheduler
from agentrl.engine.local.slots import Request

RETURN_TICKS = 4
"""Iterations of the event loop in which the next turns of an instant tool arrive."""
DEATHS = 3
"""Deaths of one process, without a turn that ended in between, after which its requests fail."""
APART = 8
"""Conversations by which a process may have more than the least busy one, so that equal prompts are computed once."""
CLOSE_SECONDS = 10.0
PROBE_TOKENS = 127
SLOW_SECONDS = 0.5
GAIN = 1.25
"""Quotient of durations from which on several processes are worth it."""
GONE = "the sampling processes are gone"
_ALIGNMENT = 64
_HEADER = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
Command = tuple[Any, ...]
"""Its name, and what belongs to it. It is pickled: both ends are ours."""


def quickest(runner: Runner, rows: int) -> int:
    """How many processes decode `rows` conversations quickest: as many as there are cores, or fewer where a step of
    each one's share takes as long. A step that takes so long that its weights are most of it is left to one.

    Each is measured with one thread. What threads gain in a single process depends on what else runs in that moment,
    and they are no help with what is between two steps, which is as long again.
    """
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    counts = [count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if count <= min(cores, rows)]
    took: dict[int, float] = {}
    torch.set_num_threads(1)
    _step_seconds(runner, 1)  # the first step lays out the weights
    for count in counts:
        took[count] = _step_seconds(runner, -(-rows // count))
        if took[1] > SLOW_SECONDS:
            break
    torch.set_num_threads(threads)
    best = min(took.values())
    if took[1] > SLOW_SECONDS or took[1] < GAIN * best:
        return 1
    return next(count for count in counts if took[count] <= best * 1.1)


def _step_seconds(runner: Runner, rows: int) -> float:
    """The least duration of a step of decoding, behind PROBE_TOKENS tokens in each row."""
    runner.resize(rows, PROBE_TOKENS + 1)
    ids, active = np.zeros(rows, np.int64), np.ones(rows, np.bool_)
    work, best = Work(ids, np.full(rows, PROBE_TOKENS), active, ()), math.inf
    for attempt in range(5):
        began = perf_counter()
        runner.forward(work)
        best = min(best, perf_counter() - began)
        if attempt and best > SLOW_SECONDS:
            break
    runner.resize(0, 0)
    return best


class SharedWeights:
    """A model's parameters and buffers in memory that forked processes share: it is moved there once, and what the
    trainer changes in place is then changed for all of them."""

    def __init__(self, model: nn.Module) -> None:
        known: dict[tuple[int, torch.Size], Tensor] = {}
        tensors = [*model.parameters(), *model.buffers()]
        size = sum(-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for t in tensors)
        memory, place = mmap.mmap(-1, max(size, _ALIGNMENT)), 0
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            key = (tensor.data_ptr(), tensor.shape)
            if key not in known and tensor.numel():
                shared = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
                known[key] = shared.view(tensor.shape).copy_(tensor.detach())
                place += -(-shared.nbytes // _ALIGNMENT) * _ALIGNMENT
            if tensor.numel():
                tensor.data = known[key]
                self._pairs.append((tensor, known[key]))

    def gather(self) -> None:
        """Copy what was put elsewhere since, such as by a `.data` that was set."""
        for tensor, shared in self._pairs:
            if tensor.data_ptr() != shared.data_ptr():
                shared.copy_(tensor.detach())


@dataclass(eq=False)
class _Process:
    """A sampling process, as this one sees it."""

    number: int
    pid: int
    socket: socket.socket
    writer: asyncio.StreamWriter | None = None
    """To its socket, once that is connected to the event loop."""
    queue: list[Command] = field(default_factory=list)
    """What it is sent next, in order."""
    requests: dict[int, Request] = field(default_factory=dict)
    """The turns that it samples, by serial number, in the order in which they came."""
    conversations: int = 0
    """Those that are bound to it."""
    held: bool = True
    """Whether it waits for `go`."""
    arrived: int = 0
    """Turns that it was given since it is held."""
    going: "asyncio.Task[None] | None" = None
    """Lets it go on, once what belongs to its next step has arrived."""
    reader: "asyncio.Task[None] | None" = None
    acknowledged: "asyncio.Future[None] | None" = None
    """Set when it has done what it was told to do at once."""
    deaths: int = 0
    """How often it was made anew since a turn ended."""
    flushing: bool = False


class SamplingProcesses:
    """count: how many. scheduler, grammars: of the engine; each process has a copy, none here computes."""

    def __init__(self, count: int, scheduler: Scheduler, grammars: Grammars | None) -> None:
        self._scheduler, self._grammars = scheduler, grammars
        self.version = 0
        self._serial = 0
        self._paused: Command | None = None
        self._where: dict[Request, tuple[_Process, int]] = {}
        self._home: dict[str, tuple[_Process, bytes | None]] = {}
        self._openings: dict[bytes, tuple[_Process, int]] = {}
        self._closed = False
        self._nursery, self._nursery_pid = self._fork_nursery()
        self._processes = [_Process(number, *self._born()) for number in range(count)]

    @property
    def pids(self) -> list[int]:
        """The process ids, in order."""
        return [p.pid for p in self._processes]

    @property
    def busy(self) -> bool:
        """Whether there is any request."""
        return bool(self._where)

    def add(self, request: Request) -> None:
        """Sample a turn; its future receives the result."""
        if self._closed:
            _fail(request, EngineError(GONE))
            return
        process = self._process_of(request)
        self._serial += 1
        process.requests[self._serial] = request
        self._where[request] = process, self._serial
        process.arrived += 1
        self._tell(process, _added(self._serial, request))

    def cancel(self, request: Request) -> None:
        """Drop a request that is no longer awaited."""
        process, serial = self._where.pop(request, (None, 0))
        if process is not None:
            del process.requests[serial]
            self._tell(process, ("cancel", serial))

    def abort(self, request_id: str | None) -> None:
        """End one conversation's turn (None: all) with what was sampled so far."""
        for process in self._processes:
            for serial, request in process.requests.items():
                if request_id in (None, request.request_id):
                    self._tell(process, ("abort", serial))

    def finish(self, request_id: str) -> None:
        """End a conversation."""
        process, opening = self._home.pop(request_id, (None, None))
        if process is None:
            return
        process.conversations -= 1
        if opening is not None and opening in self._openings:
            home, count = self._openings.pop(opening)
            if count > 1:
                self._openings[opening] = home, count - 1
        self._tell(process, ("finish", request_id))

    def fork(self, request_id: str, others: Sequence[str]) -> None:
        """Bind a new conversation to where those are that it begins like."""
        for other in others:
            if other in self._home:
                process = self._home[other][0]
                self._bind(request_id, process, None)
                self._tell(process, ("fork", request_id, tuple(others)))
                return

    async def pause(self, asleep: bool = False) -> None:
        """Wait until no process computes; none does until `resume`. asleep: free the memory of keys and values, too."""
        if asleep or self._paused is None:
            self._paused = ("sleep",) if asleep else ("pause",)
        await self._all(self._paused)

    async def update(self, version: int) -> None:
        """Take the weights of `version`, which are in shared memory now; between `pause` and `resume`."""
        self.version = version
        await self._all(("update", version))

    async def resume(self) -> None:
        """Go on."""
        self._paused = None
        await self._all(("resume",))

    async def close(self) -> None:
        """End the requests with finish `abort`, then the processes."""
        if not self._closed:
            self.abort(None)
            waiting = [request.future for request in self._where]
            if waiting:
                await asyncio.wait(waiting, timeout=CLOSE_SECONDS)
        tasks = [t for p in self._processes for t in (p.going, p.reader) if t is not None]
        self._end()
        for request in list(self._where):
            if not request.future.done():
                request.future.set_result(Generation([], [], GenerationFinish.ABORT, self.version))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self) -> None:
        """End the processes, by their sockets."""
        if self._closed:
            return
        self._closed = True
        self._nursery.close()
        for process in self._processes:
            if process.writer is not None:
                process.writer.close()
            process.socket.close()
        with suppress(ChildProcessError, ProcessLookupError):
            end = perf_counter() + CLOSE_SECONDS
            while os.waitpid(self._nursery_pid, os.WNOHANG)[0] == 0:
                if perf_counter() > end:  # it hangs; its children end with it
                    os.kill(self._nursery_pid, signal.SIGKILL)
                    os.waitpid(self._nursery_pid, 0)
                    return
                sleep(0.001)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self._end()

    # Which process

    def _process_of(self, request: Request) -> _Process:
        if (home := self._home.get(request.request_id)) is not None:
            return home[0]
        opening = request.ids.tobytes()
        least = min(self._processes, key=lambda p: p.conversations)
        process, count = self._openings.get(opening, (least, 0))
        if process.conversations - least.conversations >= APART:
            process = least
        self._openings[opening] = process, count + 1
        self._bind(request.request_id, process, opening)
        return process

    def _bind(self, request_id: str, process: _Process, opening: bytes | None) -> None:
        if request_id not in self._home:
            self._home[request_id] = process, opening
            process.conversations += 1

    # What is said

    def _tell(self, process: _Process, command: Command) -> None:
        """Send a command: with what else is said in this iteration of the loop, or with the next `go`."""
        process.queue.append(command)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a conversation is finished after its loop: that is sent with what comes next
            return
        if process.reader is None or process.reader.done():
            process.reader = loop.create_task(self._read(process), name=f"agentrl-sampling-{process.number}")
        if process.held and command[0] == "add":
            if process.going is None or process.going.done():
                process.going = loop.create_task(self._let_go(process, 0))
        elif not process.held and not process.flushing:
            process.flushing = True
            loop.call_soon(self._flush, process)

    def _flush(self, process: _Process) -> None:
        process.flushing = False
        if process.writer is None or not process.queue:
            return
        data = pickle.dumps(process.queue, protocol=5)
        process.queue = []
        process.writer.write(_HEADER.pack(len(data)) + data)

    async def _let_go(self, process: _Process, expected: int) -> None:
        """Send what arrived, and let the process go on. expected: turns that ended, whose next ones may follow; 0: it
        has nothing to do, so wait until nothing arrives any more."""
        quiet, before = 0, -1
        while quiet < RETURN_TICKS and not (expected and process.arrived >= expected):
            quiet = quiet + 1 if expected or process.arrived == before else 0
            before = process.arrived
            await asyncio.sleep(0)
        process.held, process.arrived = False, 0
        process.queue.append(("go",))
        self._flush(process)

    async def _all(self, command: Command) -> None:
        """Send a command to every process at once, and wait until all have done it."""
        if self._closed:
            raise EngineError(GONE)
        loop, waiting = asyncio.get_running_loop(), []
        for process in self._processes:
            process.acknowledged = loop.create_future()
            waiting.append(process.acknowledged)
            self._tell(process, command)
            self._flush(process)
        await asyncio.gather(*waiting)

    async def _read(self, process: _Process) -> None:
        """Take what a process says, until it dies; then make it anew."""
        while not self._closed:
            reader, process.writer = await asyncio.open_unix_connection(sock=process.socket.dup())
            self._flush(process)
            try:
                while True:
                    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                    self._take(process, pickle.loads(await reader.readexactly(size)))
            except (asyncio.IncompleteReadError, OSError):
                pass
            finally:  # also where the loop ends: the next one connects anew
                process.writer.close()
                process.writer = None
            if not self._closed:
                process.socket.close()
                self._replace(process)

    def _take(self, process: _Process, told: Iterable[Command]) -> None:
        ended = 0
        for name, *values in told:
            if name == "acknowledged":
                if process.acknowledged is not None and not process.acknowledged.done():
                    process.acknowledged.set_result(None)
            elif name == "failed":
                self._fail_all(process, EngineError(f"the local engine failed: {values[0]}"))
            elif name == "held":
                process.held, process.arrived = True, 0
                process.going = asyncio.get_running_loop().create_task(self._let_go(process, max(1, ended)))
            elif (request := process.requests.get(values[0])) is None:
                ended += name != "news"  # it was cancelled meanwhile
            elif name == "news":
                request.streamed += len(values[1])
                assert request.on_tokens is not None
                tell(request.on_tokens, values[1])
            else:
                self._where.pop(request)
                del process.requests[values[0]]
                ended, process.deaths = ended + 1, 0
                if name == "refused":
                    _fail(request, ConstraintError(values[1]))
                else:
                    deliver(request, values[1])

    def _fail_all(self, process: _Process, error: EngineError) -> None:
        for request in process.requests.values():
            self._where.pop(request)
            _fail(request, error)
        process.requests.clear()

    def _replace(self, process: _Process) -> None:
        """Make a process anew, and give it the turns of the one that died."""
        why = self._cause(process.pid)
        process.deaths += 1
        if process.deaths > DEATHS:
            self._fail_all(
                process, EngineError(f"the sampling process {process.number} {why}, {DEATHS} times in a row")
            )
        for serial, request in list(process.requests.items()):
            if request.streamed:  # what was told cannot be taken back
                del process.requests[serial], self._where[request]
                _fail(request, EngineError(f"the sampling process {process.number} {why}"))
        try:
            process.pid, process.socket = self._born()
        except OSError as error:
            gone = EngineError(f"{GONE}: {error}")
            for p in self._processes:
                self._fail_all(p, gone)
                if p.acknowledged is not None and not p.acknowledged.done():
                    p.acknowledged.set_exception(gone)
            self._end()
            return
        paused = [self._paused] if self._paused is not None else []
        added = [_added(serial, request) for serial, request in process.requests.items()]
        process.queue, process.held = [("update", self.version), *paused, *added], False
        process.queue.append(("go",))

    # The processes

    def _fork_nursery(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which the nursery needs
            pid = os.fork()
        if pid == 0:
            gc.freeze()  # what is not looked at is not copied
            try:
                _nurse(theirs, self._scheduler, self._grammars)
            finally:  # whatever is raised: nothing of the run may go on in a copy of it
                os._exit(1)
        theirs.close()
        ours.settimeout(CLOSE_SECONDS)
        return ours, pid

    def _born(self) -> tuple[int, socket.socket]:
        """The pid and the socket of a new process. Raises OSError: the nursery is gone."""
        self._nursery.send(b"+")
        told, descriptors, _, _ = socket.recv_fds(self._nursery, 64, 1)
        if not descriptors:
            raise OSError("their nursery has ended")
        return int(told), socket.socket(fileno=descriptors[0])

    def _cause(self, pid: int) -> str:
        try:
            self._nursery.send(str(pid).encode())
            code = int(self._nursery.recv(64) or b"0")
        except OSError:
            return "died"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def deliver(request: Request, generation: Generation) -> None:
    """Give a request its result, the last of its ids first to who reads along."""
    if not request.future.done():
        new = generation.ids[request.streamed :]
        if request.on_tokens is not None and new:
            request.streamed += len(new)
            tell(request.on_tokens, new)
        request.future.set_result(generation)


def _fail(request: Request, error: Exception) -> None:
    if not request.future.done():
        request.future.set_exception(error)


def _added(serial: int, r: Request) -> Command:
    ids = r.ids.astype(np.int64).tobytes()
    return "add", serial, r.request_id, ids, r.sampling, r.key, r.room, r.on_tokens is not None


def _nurse(control: socket.socket, scheduler: Scheduler, grammars: Grammars | None) -> NoReturn:
    """Fork a process for each `+`, and tell how one ended; end with whoever asks."""
    _leave(control)
    torch.set_num_threads(1)
    children, nursery = set[int](), os.getpid()
    while True:
        asked = control.recv(64)
        if not asked:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os._exit(0)
        if asked != b"+":
            children.discard(int(asked))
            code = 0
            with suppress(ChildProcessError):
                code = os.waitstatus_to_exitcode(os.waitpid(int(asked), 0)[1])
            control.send(str(code).encode())
            continue
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            control.close()
            ours.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != nursery:  # it ended before that
                os._exit(0)
            _Worker(theirs, scheduler, grammars).run()
        children.add(pid)
        theirs.close()
        socket.send_fds(control, [str(pid).encode()], [ours.fileno()])
        ours.close()


def _leave(kept: socket.socket) -> None:
    """Let go of all that a forked process has of its parent: signals, terminal, files, sockets and locks."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_DFL)
    with suppress(OSError):
        os.setsid()
    asyncio.events._set_running_loop(None)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, closefd=False) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))  # noqa: SIM115
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) > 2 and number != kept.fileno():
            with suppress(OSError):
                os.close(number)


class _Worker:
    """A sampling process, from within: the scheduler's steps, and between them what the engine says."""

    def __init__(self, pipe: socket.socket, scheduler: Scheduler, grammars: Grammars | None) -> None:
        self._socket, self._scheduler, self._grammars = pipe, scheduler, grammars
        self._requests: dict[int, Request] = {}
        self._serials: dict[Request, int] = {}
        self._loop = asyncio.new_event_loop()  # of futures that nobody awaits
        self._held, self._paused = True, False
        self._told: list[Command] = []

    def run(self) -> NoReturn:
        """Work until the other end is gone."""
        try:
            while True:
                idle = self._held or self._paused or not self._scheduler.busy
                for commands in self._received(wait=idle):
                    for command in commands:
                        self._take(*command)
                if not (self._held or self._paused) and self._scheduler.busy:
                    self._step()
                if self._told:
                    told, self._told = self._told, []
                    data = pickle.dumps(told, protocol=5)
                    self._socket.sendall(_HEADER.pack(len(data)) + data)
        except (EOFError, OSError):
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the boundary: the engine makes another one
            os.write(2, f"agentrl: a sampling process failed: {type(error).__name__}: {error}\n".encode())
            os._exit(1)

    def _received(self, wait: bool) -> Iterator[list[Command]]:
        while wait or select.select([self._socket], [], [], 0)[0]:
            (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
            yield pickle.loads(self._exactly(size))
            wait = False

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _take(self, name: str, *values: Any) -> None:
        scheduler = self._scheduler
        if name == "add":
            self._add(*values)
        elif name == "go":
            self._held = False
        elif name == "finish":
            scheduler.finish(values[0])
        elif name == "fork":
            scheduler.forks[values[0]] = values[1]
        elif name in ("cancel", "abort"):
            request = self._requests.pop(values[0], None)
            if request is not None:
                del self._serials[request]
            if request is not None and name == "cancel":
                scheduler.cancel(request)
            elif request is not None:
                self._told.append(("done", values[0], scheduler.stop(request)))
        else:
            if name == "update":
                scheduler.retract()
                scheduler.runner.refresh()
                scheduler.version = values[0]
            else:
                self._paused = name != "resume"
            if name == "sleep":
                scheduler.retract()
                scheduler.runner.clear()
            self._told.append(("acknowledged",))

    def _add(self, serial: int, request_id: str, ids: bytes, sampling: Any, key: int, room: int, reads: bool) -> None:
        matcher = None
        if sampling.constraint is not None:
            try:
                if self._grammars is None:
                    raise ConstraintError("the engine was given no tokenizer to read a schema by")
                matcher = self._grammars.matcher(sampling)
            except ConstraintError as error:
                self._told.append(("refused", serial, str(error)))
                return
        on_tokens = _unread if reads else None
        prompt = np.frombuffer(ids, np.int64)
        future: asyncio.Future[Generation] = self._loop.create_future()
        request = Request(request_id, prompt, sampling, key, room, future, on_tokens=on_tokens, matcher=matcher)
        self._requests[serial], self._serials[request] = request, serial
        self._scheduler.add(request)

    def _step(self) -> None:
        scheduler = self._scheduler
        try:
            plan = scheduler.plan()
            if plan is None:
                return
            over = scheduler.commit(plan, *scheduler.compute(plan))
            for request, new in scheduler.news() if scheduler.streaming else ():
                request.streamed += len(new)
                self._told.append(("news", self._serials[request], new))
        except Exception as error:  # noqa: BLE001 - the boundary `engine`: it fails the requests, not the process
            scheduler.reset()
            self._requests.clear()
            self._serials.clear()
            self._told += [("failed", f"{type(error).__name__}: {error}"), ("held",)]
            self._held = True
            return
        for request, generation in over:
            serial = self._serials.pop(request)
            del self._requests[serial]
            if request.matcher is not None and request.matcher.error is not None:
                self._told.append(("refused", serial, f"the answer: {request.matcher.error}"))
            else:
                self._told.append(("done", serial, generation))
        if over and not scheduler.runner.batch_invariant:
            self._told.append(("held",))
            self._held = True


def _unread(ids: Sequence[int]) -> None:
    """Marks a request that is read along in another process."""
