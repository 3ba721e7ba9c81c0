"""`Link`: one session of an OpenEnv server, a WebSocket that holds the state of a rollout there.

The server is a stranger: its messages are bounded before they are parsed, whatever it sends instead of an answer ends
the rollout alone, and how long it may take is up to the deadline of whoever asks.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from agentrl.errors import InfrastructureError
from agentrl.gateway.bounds import IN_LOOP, check_shape, off_loop
from agentrl.gateway.call import GatewayError
from agentrl.jsonable import Json

LARGEST = 8 << 20
"""Bytes of one message of a server."""
CONNECT_SECONDS = 20.0
"""Time in which a connection must stand."""
_CLOSING = aiohttp.ClientWSTimeout(ws_close=2.0)  # how long a server may take to say goodbye
OVER = "OVER"
"""The code of a step that was not sent: the episode had ended."""
FULL = "CAPACITY_REACHED"
"""What a server says that has no room for one more session."""
_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # between two attempts to get a session


class RefusedError(Exception):
    """The server answered a message with an error. code: OpenEnv's name for its kind."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Observed:
    """What a server answers to `reset` and `step`."""

    observation: Mapping[str, Json]
    """The environment's own fields."""
    reward: float | None = None
    """Of this step; None: the environment says nothing about it."""
    done: bool = False
    """Whether the episode is over."""

    @classmethod
    def read(cls, data: Mapping[str, Json], place: str) -> "Observed":
        """Read an answer. Raises InfrastructureError for what is none."""
        observation, reward, done = data.get("observation", {}), data.get("reward"), data.get("done", False)
        if not isinstance(observation, Mapping):
            raise InfrastructureError(f"{place} sent an observation of type {type(observation).__name__}")
        if reward is not None and not isinstance(reward, int | float):
            raise InfrastructureError(f"{place} sent a reward of type {type(reward).__name__}")
        return cls(observation, None if reward is None else float(reward), done is True)


@dataclass(slots=True)
class Link:
    """One session. `ask` is called by one at a time, in turn."""

    place: str
    """The address, for errors."""
    socket: aiohttp.ClientWebSocketResponse
    """Open, until something went wrong."""
    rewards: list[float] = field(default_factory=list)
    """Those of the steps, in order."""
    broken: bool = False
    """Whether an answer is missing: a later one would be taken for that of the next question."""
    over: bool = False
    """Whether the episode has ended: a further call of the same turn must earn nothing."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def observe(self, kind: str, data: Mapping[str, Json]) -> Observed:
        """Reset the environment, or make a step in it. Raises as `ask`."""
        observed = Observed.read(await self.ask(kind, data, "observation"), self.place)
        if observed.reward is not None and kind == "step":
            self.rewards.append(observed.reward)
        return observed

    async def ask(self, kind: str, data: Mapping[str, Json] | None, answer: str) -> Mapping[str, Json]:
        """Send a message, and return what the server answers. answer: the type of message that is expected.

        Raises RefusedError where the server answers with an error, InfrastructureError where it cannot be asked or
        understood."""
        message: dict[str, Json] = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        async with self._turn:
            if self.broken:
                raise InfrastructureError(f"{self.place}: an answer of its session is missing")
            if self.over and kind == "step":
                raise RefusedError(OVER, "the episode is over")
            self.broken = True
            with suppress(ConnectionError):  # why it closed the connection may be waiting to be read
                await self.socket.send_str(json.dumps(message))
            received = await self._receive()
            said = received.get("data")
            if not isinstance(said, Mapping) or received.get("type") not in (answer, "error"):
                raise InfrastructureError(f"{self.place} answered {kind} by {str(received)[:80]!r}")
            self.broken = False
            if kind in ("reset", "step"):
                self.over = said.get("done") is True
        if received["type"] == "error":
            raise RefusedError(str(said.get("code", ""))[:80], str(said.get("message", "no reason given"))[:1000])
        return said

    async def _receive(self) -> Mapping[str, Json]:
        message = await self.socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise InfrastructureError(f"{self.place} {_ended(self.socket, message)}")
        text: str = message.data
        try:
            value = read(text) if len(text) <= IN_LOOP else await off_loop(read, text)
        except ValueError as error:
            raise InfrastructureError(f"{self.place} sent what cannot be read: {error}") from None
        if not isinstance(value, Mapping):
            raise InfrastructureError(f"{self.place} sent {type(value).__name__}, no message")
        return value

    async def close(self) -> None:
        """End the session at the server, and the connection."""
        with suppress(OSError, RuntimeError, aiohttp.ClientError):
            if not self.broken and not self.socket.closed:
                await self.socket.send_str('{"type": "close"}')
            await self.socket.close()


def read(text: str) -> Json:
    """JSON of bounded size and depth. Raises ValueError."""
    try:
        check_shape(text.encode("utf-8", "surrogatepass"), "its message")
    except GatewayError as error:
        raise ValueError(str(error)) from None
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _ended(socket: aiohttp.ClientWebSocketResponse, message: aiohttp.WSMessage) -> str:
    if message.type is aiohttp.WSMsgType.ERROR:
        return f"broke the connection: {message.data or socket.exception() or 'no reason given'}"
    if message.type is aiohttp.WSMsgType.BINARY:
        return "sent bytes, where its protocol has texts"
    return f"closed the session (code {socket.close_code})"


async def opened(http: aiohttp.ClientSession, url: str, reset: Mapping[str, Json]) -> tuple[Link, Observed]:
    """A session and what its environment shows at first. url: of the WebSocket. While the server is full, it is asked
    again, until whoever waits for this gives up. Raises RefusedError and InfrastructureError."""
    pause = _PAUSE
    while True:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                socket = await http.ws_connect(url, max_msg_size=LARGEST, timeout=_CLOSING)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise InfrastructureError(f"{url} cannot be reached: {error or type(error).__name__}") from None
        link = Link(url, socket)
        try:
            return link, await link.observe("reset", reset)
        except RefusedError as error:
            await link.close()
            if error.code != FULL:
                raise
        except BaseException:
            await link.close()
            raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
