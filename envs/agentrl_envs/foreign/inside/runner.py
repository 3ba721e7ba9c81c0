"""The program in a foreign interpreter: it imports an adapter and serves its calls, as JSON lines over a socket.

usage: python runner.py SOCKET FOLDER

The first line is `{"module": ..., "args": {...}}`, and is answered by what the adapter describes. Then each line is a
call, `{"id": 3, "call": "step", "episode": 7, "given": [...]}`, and each answer has its number: `{"id": 3, "value":
...}` or `{"id": 3, "error": "ValueError: ... (file.py:12)"}`. `{"ping": 5}` is answered by `{"pong": 5}`,
whatever the adapter does. What is printed goes to standard error, never between the answers.

The calls of an episode run one after another in a thread of their own (in the main thread where a process serves one
episode alone), those of the adapter itself in the main thread; async functions run in one event loop there. It imports
only the standard library, and runs on Python 3.10 and later.
"""

import asyncio
import base64
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

LARGEST = 32 << 20
"""Bytes of one answer."""
_LINE = 400  # characters of an error
_OPTIONAL = ("task", "demonstrate", "stored", "play", "open")  # methods that an adapter may leave out
MAIN = 0
"""The episode number of calls of the adapter itself."""


class Runner:
    """Serves one adapter. alone: its episodes run in the main thread, since there is one at a time."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._writing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._lanes: dict[int, queue.SimpleQueue[Any]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._adapter: Any = None
        self._episodes: dict[int, Any] = {}
        self._alone = False

    def run(self, lines: Iterator[bytes]) -> None:
        """Import the adapter, describe it, and serve its calls until the socket closes. lines: what is read."""
        begin = json.loads(next(lines))
        self._alone = begin.get("alone", False)
        if begin.get("memory") is not None:
            most = int(begin["memory"] * 1e9)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        self._answer(0, lambda: self._begin(begin))
        threading.Thread(target=self._read, args=(lines,), name="reader", daemon=True).start()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _begin(self, begin: dict[str, Any]) -> dict[str, Any]:
        self._adapter = _attribute(begin["module"])(**begin["args"])
        described = self._adapter.describe()
        if inspect.isawaitable(described):
            described = self._loop.run_until_complete(described)
        if not isinstance(described, dict):
            raise TypeError(f"describe() returned {type(described).__name__}; expected a dictionary")
        offers = [name for name in _OPTIONAL if callable(getattr(self._adapter, name, None))]
        return {**described, "offers": offers, "python": sys.version.split()[0], "pid": os.getpid()}

    def _read(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            told = json.loads(line)
            if "ping" in told:
                self._send({"pong": told["ping"]})
            elif "cancel" in told:
                self._loop.call_soon_threadsafe(self._cancel, told["cancel"])
            else:
                self._take(told["id"], told["call"], told["episode"], told["given"])
        os._exit(0)  # nobody reads any more, whatever still runs here

    def _cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    def _take(self, number: int, call: str, episode: int, given: list[Any]) -> None:
        """Put a call where it belongs: the event loop, the main thread, or the thread of its episode."""
        if self._is_async(call):
            self._loop.call_soon_threadsafe(self._start, number, call, episode, given)
        elif episode == MAIN or self._alone:
            self._loop.call_soon_threadsafe(self._answer, number, functools.partial(self._call, call, episode, given))
        else:
            lane = self._lanes.get(episode)
            if lane is None:
                lane = self._lanes[episode] = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(lane,), name=f"episode-{episode}", daemon=True).start()
            lane.put((number, call, episode, given))
            if call == "close":
                lane.put(None)
                del self._lanes[episode]

    def _is_async(self, call: str) -> bool:
        """Whether a call awaits. An adapter is either async in its episodes or not, as its `open` or `play` says."""
        method = getattr(self._adapter, call if call in _OPTIONAL[:-1] else "open", None)
        return inspect.iscoroutinefunction(method)

    def _work(self, lane: "queue.SimpleQueue[Any]") -> None:
        while (one := lane.get()) is not None:
            number, call, episode, given = one
            self._answer(number, functools.partial(self._call, call, episode, given))

    def _start(self, number: int, call: str, episode: int, given: list[Any]) -> None:
        task = self._tasks[number] = self._loop.create_task(self._answer_async(number, call, episode, given))
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer_async(self, number: int, call: str, episode: int, given: list[Any]) -> None:
        try:
            value = self._call(call, episode, given)
            while inspect.isawaitable(value):
                value = await value
            self._send({"id": number, "value": value})
        except BaseException as error:  # noqa: BLE001 - the boundary of the process
            self._fail(number, error)

    def _answer(self, number: int, work: Callable[[], Any]) -> None:
        try:
            self._send({"id": number, "value": work()})
        except BaseException as error:  # noqa: BLE001 - the boundary of the process: an adapter may raise anything
            self._fail(number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        line = _line(error)
        traceback.print_exception(type(error), error, error.__traceback__)
        self._send({"id": number, "error": line})

    def _call(self, call: str, number: int, given: list[Any]) -> Any:
        """What the adapter or an episode returns."""
        if call in _OPTIONAL[:-1]:
            return getattr(self._adapter, call)(*given)
        if call == "open":
            return self._opened(number, self._adapter.open(*given))
        if call == "close":
            episode = self._episodes.pop(number, None)
            close = getattr(episode, "close", None)
            return close() if callable(close) else None
        episode = self._episodes[number]
        return self._with_state(episode, getattr(episode, call), given)

    def _opened(self, number: int, episode: Any) -> Any:
        if inspect.isawaitable(episode):
            return self._opened_later(number, episode)
        if not callable(getattr(episode, "grade", None)):
            raise TypeError(f"open() returned {type(episode).__name__} without a method `grade`")
        self._episodes[number] = episode
        answer = {"messages": episode.messages, "state": getattr(episode, "state", None)}
        tools = getattr(episode, "tools", None)
        return answer if tools is None else {**answer, "tools": tools}

    async def _opened_later(self, number: int, episode: Any) -> Any:
        return self._opened(number, await episode)

    def _with_state(self, episode: Any, method: Callable[..., Any], given: list[Any]) -> Any:
        """What a method returns, and how the episode names the state that it is in now."""
        value = method(*given[: _most_arguments(method)])
        if inspect.isawaitable(value):
            return self._with_state_later(episode, value)
        return {"value": value, "state": getattr(episode, "state", None)}

    async def _with_state_later(self, episode: Any, value: Any) -> Any:
        return {"value": await value, "state": getattr(episode, "state", None)}

    def _send(self, answer: dict[str, Any]) -> None:
        line = json.dumps(answer, default=_jsonable).encode("utf-8", "surrogatepass")
        if len(line) > LARGEST:
            line = json.dumps(
                {"id": answer.get("id"), "error": f"it returned {len(line)} bytes; at most {LARGEST} are carried"}
            ).encode()
        with self._writing:
            self._channel.sendall(line + b"\n")


def _attribute(path: str) -> Any:
    """The adapter that `module`, `module:name` or `file.py:name` names; `Adapter` where no name is given."""
    module, _, name = path.partition(":")
    if module.endswith(".py"):
        sys.path.append(os.path.dirname(os.path.abspath(module)))  # last: an adapter may have its package's name
        spec = importlib.util.spec_from_file_location(os.path.basename(module)[:-3] + "_adapter", module)
        if spec is None or spec.loader is None:
            raise ImportError(f"{module} is no Python file")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
    else:
        loaded = importlib.import_module(module)
    return getattr(loaded, name or "Adapter")


def _most_arguments(method: Callable[..., Any]) -> "int | None":
    """How many arguments a method takes; what it does not ask for, it is not given."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _jsonable(value: Any) -> Any:
    """What JSON has no word for: numbers and arrays of numpy, bytes of images, sets, dataclasses."""
    if isinstance(value, (bytes, bytearray)):
        kind = "jpeg" if value[:2] == b"\xff\xd8" else "png"
        return f"data:image/{kind};base64,{base64.b64encode(value).decode()}"
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    for name in ("model_dump", "tolist"):
        convert = getattr(value, name, None)
        if callable(convert) and not isinstance(value, type):
            return convert()
    raise TypeError(f"it returned {type(value).__name__}, which JSON cannot hold")


def _line(error: BaseException) -> str:
    """An exception as one line: its type, its text, and the line of code outside of this file that it comes from."""
    try:
        text = " ".join(str(error).split())[:_LINE]
    except BaseException as another:  # noqa: BLE001 - a stranger's class may do anything here
        text = f"its message cannot be read ({type(another).__name__})"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in places if place[0] != __file__]
    place = f" ({os.path.basename(own[-1][0])}:{own[-1][1]})" if own else ""
    name = type(error).__name__
    return (f"{name}: {text}" if text else name) + place


def _lines(channel: socket.socket) -> Iterator[bytes]:
    """The lines that come over a socket, until it closes."""
    with channel.makefile("rb") as stream:
        yield from stream


def main() -> None:
    """Connect, and serve."""
    path, folder = sys.argv[1:]
    sys.path[0] = folder  # in place of this file's folder
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    channel.set_inheritable(False)
    os.dup2(2, 1)  # what is printed is no answer
    sys.argv[1:] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Runner(channel).run(_lines(channel))


if __name__ == "__main__":
    main()
