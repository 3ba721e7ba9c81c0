"""`Daemon`: one Docker daemon, docker's or podman's. Every call ends within a deadline, and what the daemon does wrong
is a DaemonError."""

import asyncio
import base64
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiodocker
import aiohttp
from aiodocker.stream import Stream
from yarl import URL

from agentrl.errors import PathError, UserError, WorkspaceError
from agentrl_tools.workspaces.owner import LABEL_OWNER, LABEL_PROVIDER, is_dead

LONG_SECONDS = 600.0
"""Deadline of what depends on the size of images and files."""
_FIRST_SECONDS = 30.0  # of the first calls: a socket may start its daemon
AVOIDED_SECONDS = 30.0
"""For which a daemon that failed is asked last."""
_ANSWER = 64 << 20  # bytes of one that is not a file
_SENT_A_SECOND = 4 << 20  # bytes that a daemon takes at least
_LINE = 300
_CONNECTIONS = 0  # no limit: a program that runs holds one

T = TypeVar("T")


class DaemonError(WorkspaceError):
    """The daemon refused a call, did not answer in time, or not in its protocol. status: of HTTP; 0: none came."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Image:
    """What a container is made from, as its daemon knows it."""

    id: str
    """Of its content."""
    folder: str
    """Where its programs begin; empty: nowhere of its own."""
    user: str
    """As whom they run; empty: root."""
    env: tuple[str, ...]
    """Its environment, each `NAME=value`."""


class Daemon:
    """address: `unix://PATH`, `tcp://HOST:PORT`, `ssh://...`, or empty for DOCKER_HOST and the usual sockets. patience:
    seconds that an ordinary call may take."""

    def __init__(self, address: str, patience: float) -> None:
        self.address, self._patience = address, patience
        self.used = 0
        """Workspaces that are open, or about to be."""
        self.cores = 1
        self._avoided = 0.0
        self._docker: aiodocker.Docker | None = None

    @property
    def docker(self) -> aiodocker.Docker:
        """The client. Raises UserError where the address is none."""
        if self._docker is None:
            try:
                self._docker = _client(self.address)
            except (ValueError, AssertionError, OSError, aiodocker.DockerError) as error:
                where = self.address or "no address, no DOCKER_HOST, and no socket at the usual places"
                raise UserError(
                    f"workspace.args.address: {where}: {error or 'not found'}; start docker, or "
                    "`podman system service --time=0 unix:///run/podman.sock` and name it"
                ) from None
        return self._docker

    @property
    def is_here(self) -> bool:
        """Whether its containers are processes of this machine."""
        return (self.address or os.environ.get("DOCKER_HOST") or "unix://").startswith("unix://")

    @property
    def load(self) -> tuple[bool, float]:
        """What daemons are chosen by: those that failed of late come last, then by workspaces a core."""
        return time.monotonic() < self._avoided, self.used / self.cores

    async def start(self) -> None:
        """Connect. Raises DaemonError, UserError."""
        seconds = max(_FIRST_SECONDS, self._patience)
        await self.call("connect", self.docker.version(), seconds)
        info = await self.call("say what it is", self.docker.system.info(), seconds)
        self.cores = max(1, int(info["NCPU"])) if isinstance(info, dict) and str(info.get("NCPU")).isdigit() else 1

    async def call(self, what: str, work: Awaitable[T], seconds: float = 0.0) -> T:
        """Await `work`, for so long (0: its patience). Raises DaemonError."""
        seconds = seconds or self._patience
        try:
            async with asyncio.timeout(seconds) as clock:
                return await work
        except (UserError, WorkspaceError, PathError):
            raise
        except aiodocker.DockerError as error:
            if error.status >= 900:
                self._avoid()
            raise DaemonError(self._told(what, error.message or f"HTTP {error.status}"), error.status) from None
        except TimeoutError:
            self._avoid()
            late = f"no answer within {seconds:g} s" if clock.expired() else "it does not answer"
            raise DaemonError(self._told(what, late)) from None
        except Exception as error:  # noqa: BLE001 - whatever a client makes of what a daemon says
            self._avoid()
            raise DaemonError(self._told(what, f"{type(error).__name__}: {error}")) from None

    def _told(self, what: str, why: str) -> str:
        return f"the Docker daemon at {self.address or 'its usual socket'} failed to {what}: {line(why)}"

    def _avoid(self) -> None:
        self._avoided = time.monotonic() + AVOIDED_SECONDS

    async def json(self, what: str, path: str, params: Mapping[str, str], seconds: float = 0.0) -> Any:
        """What the daemon says of something. Raises DaemonError."""

        async def asked() -> Any:
            async with self.answer("GET", path, params, seconds=seconds) as (_, response):
                return json.loads(await _read(response, _ANSWER))

        return await self.call(what, asked(), seconds)

    @asynccontextmanager
    async def answer(
        self, method: str, path: str, params: Mapping[str, str], data: bytes | None = None, seconds: float = 0.0
    ) -> AsyncIterator[tuple[dict[str, Any], aiohttp.ClientResponse]]:
        """A call within `call`, whose answer is read piece by piece: what a header says of a path, and the answer.
        seconds: in which its beginning and each further piece must come, longer for what is sent."""
        docker = self.docker
        if docker.api_version == "auto":
            await docker.containers.list(limit=1)
        url = URL(f"{docker.docker_host}/{docker.api_version}/{path}").with_query(dict(params))
        kind = {"Content-Type": "application/x-tar"} if data is not None else {}
        quiet = (seconds or self._patience) + len(data or b"") / _SENT_A_SECOND
        limit = aiohttp.ClientTimeout(total=None, sock_read=quiet)
        async with docker.session.request(method, url, data=data, headers=kind, timeout=limit) as response:
            if response.status >= 400:
                text = (await _read(response, 1 << 16)).decode(errors="replace")
                raise aiodocker.DockerError(response.status, _message(text))
            said = response.headers.get("X-Docker-Container-Path-Stat")
            status = json.loads(base64.b64decode(said)) if said else {}
            if not isinstance(status, dict):
                raise ValueError(f"a status of a path that is none: {line(str(status))}")
            yield status, response

    async def started(self, what: str, container: str, words: Sequence[str], **options: Any) -> tuple[Any, Stream]:
        """Start a program in a container. Raises DaemonError."""

        async def begun() -> tuple[Any, Stream]:
            execution = await self.docker.containers.container(container).exec(list(words), **options)
            stream = execution.start(detach=False)
            await stream.__aenter__()
            return execution, stream

        return await self.call(what, begun())

    async def image(self, name: str, pull: bool) -> Image:
        """An image that is there, or, with `pull`, in a registry. Raises UserError, DaemonError."""
        try:
            said = await self.call("inspect an image", self.docker.images.inspect(name))
        except DaemonError as error:
            if error.status != 404:
                raise
            if pull:
                return await self._pulled(name)
            raise UserError(self._no_image(name, "it is not there")) from None
        config = said.get("Config") or {} if isinstance(said, dict) else {}
        if not isinstance(said, dict) or not isinstance(config, dict) or not isinstance(said.get("Id"), str):
            raise DaemonError(self._told("inspect an image", "an answer without its fields"))
        env = config.get("Env") or []
        return Image(
            said["Id"], str(config.get("WorkingDir") or ""), str(config.get("User") or ""), tuple(map(str, env))
        )

    async def _pulled(self, name: str) -> Image:
        try:
            await self.call("pull an image", self.docker.images.pull(name), LONG_SECONDS)
        except DaemonError as error:
            raise UserError(self._no_image(name, str(error))) from None
        return await self.image(name, pull=False)

    def _no_image(self, name: str, why: str) -> str:
        return (
            f"workspace.image: the daemon at {self.address or 'its usual socket'} has no image {name!r}, and cannot "
            f"have it ({line(why)}); build it, or import a root folder: tar -C ROOT -c . | podman import - {name}"
        )

    async def sweep(self, provider: str = "") -> None:
        """Remove the containers and images of a provider; without one those of runs that are dead. Raises
        DaemonError."""
        label = f"{LABEL_PROVIDER}={provider}" if provider else LABEL_OWNER
        filters = json.dumps({"label": [label]})
        listed = {"all": "1", "filters": filters}
        containers = await self.json("list containers", "containers/json", listed, _FIRST_SECONDS)
        for one in _chosen(containers, provider):
            await self.remove_container(one)
        images = await self.json("list images", "images/json", {"filters": filters})
        await self.remove_images(_chosen(images, provider))

    async def remove_container(self, container: str) -> None:
        """End and remove one, if it is there. Raises DaemonError."""
        removal = self.docker.containers.container(container).delete(force=True, v=True)
        try:
            await self.call("remove a container", removal, LONG_SECONDS)
        except DaemonError as error:
            if error.status not in (404, 409):  # gone, or about to be
                raise

    async def remove_images(self, names: Sequence[str]) -> list[str]:
        """Remove images, those that others are made from last. Says which are still used. Raises DaemonError."""
        left = list(names)
        while left:
            used = []
            for name in left:
                try:
                    await self.call("remove an image", self.docker.images.delete(name), LONG_SECONDS)
                except DaemonError as error:
                    if error.status == 0 or error.status >= 900:
                        raise
                    if error.status != 404:
                        used.append(name)
            if len(used) == len(left):
                break
            left = used
        return left

    async def close(self) -> None:
        """End the connections."""
        if self._docker is not None:
            await self._docker.close()
            await self._docker.connector.close()
            self._docker = None


def line(text: str) -> str:
    """Text of a daemon as a part of one line."""
    return " ".join(text.split())[:_LINE]


def _client(address: str) -> aiodocker.Docker:
    """Raises ValueError, AssertionError, OSError, DockerError."""
    if address.startswith("unix://"):
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(address.removeprefix("unix://"), limit=_CONNECTIONS)
        return aiodocker.Docker("unix://localhost", connector=connector)
    if address.startswith(("tcp://", "http://")) and os.environ.get("DOCKER_TLS_VERIFY") != "1":
        return aiodocker.Docker(address, connector=aiohttp.TCPConnector(limit=_CONNECTIONS))
    if address and "://" not in address:
        raise ValueError("an address begins with unix://, tcp:// or ssh://")
    return aiodocker.Docker(address or None)


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    data = bytearray()
    async for part in response.content.iter_chunked(1 << 18):
        data += part
        if len(data) > most:
            raise ValueError(f"an answer of more than {most >> 20} MiB")
    return bytes(data)


def _message(text: str) -> str:
    try:
        said = json.loads(text)
    except ValueError:
        return text
    return str(said.get("message") or said.get("cause") or text) if isinstance(said, dict) else text


def _chosen(listed: Any, provider: str) -> list[str]:
    """The ids of what a list names: of a provider, or of runs that are dead."""
    if not isinstance(listed, list):
        raise DaemonError(f"the Docker daemon failed to list what it has: {line(str(listed))}")
    labels = {str(one["Id"]): one.get("Labels") or {} for one in listed if isinstance(one, dict) and "Id" in one}
    if provider:
        return [name for name, has in labels.items() if has.get(LABEL_PROVIDER) == provider]
    return [name for name, has in labels.items() if is_dead(str(has.get(LABEL_OWNER, "")))]
