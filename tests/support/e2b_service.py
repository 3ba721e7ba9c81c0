"""A service that speaks E2B's wire: its control API, and the daemon of its sandboxes (envd: Connect with JSON, files).

A sandbox is a real one, of bubblewrap as root: a file system in memory over this machine's programs, and its processes.
Snapshots are tars of it. What the wire is was read from the SDK.
"""

import asyncio
import base64
import contextlib
import fcntl
import io
import json
import os
import pty
import shutil
import struct
import subprocess
import tarfile
import termios
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from serving import serving

KEY = "e2b_" + "0" * 40
_END = 2
_HOME = "/home/user"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ACCOUNTS = {"root": (0, "/root"), "user": (1000, _HOME)}
_NEEDS = ("bwrap", "nsenter", "setpriv", "setsid", "find", "tar", "bash", "awk")


@dataclass
class Box:
    """A sandbox."""

    id: str
    template: str
    metadata: dict[str, str]
    env: dict[str, str]
    network: Any
    end: datetime
    child: int = 0
    """The process whose namespaces programs join."""
    holder: "subprocess.Popen[bytes] | None" = None
    running: dict[int, "Program"] = field(default_factory=dict)

    def inside(self, *words: str, cwd: str = "/") -> list[str]:
        """A command line in it."""
        join = [f"--{namespace}" for namespace in ("mount", "pid", "net", "ipc", "root")]
        return ["nsenter", f"--target={self.child}", *join, "--", "env", "-C", cwd, *words]

    def run(self, *words: str, data: bytes = b"") -> bytes:
        done = subprocess.run(self.inside(*words), input=data, capture_output=True, check=True)
        return done.stdout

    def kill(self) -> None:
        for program in list(self.running.values()):
            program.end()
        if self.holder is not None:
            self.holder.kill()
            self.holder.wait()


@dataclass
class Program:
    """What runs in a sandbox."""

    process: asyncio.subprocess.Process
    terminal: int | None = None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        if self.terminal is not None:
            os.close(self.terminal)
            self.terminal = None


def _base() -> bytes:
    """The files of the template `base`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, owner in {"home": 0, "home/user": 1000, "root": 0, "tmp": 0, "var": 0, "etc": 1000}.items():
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755, owner, owner
            tar.addfile(info)
        accounts = "".join(f"{name}:x:{uid}:{uid}::{home}:/bin/bash\n" for name, (uid, home) in _ACCOUNTS.items())
        for name, text in {"etc/passwd": accounts, "etc/group": "root:x:0:\nuser:x:1000:\n"}.items():
            info = tarfile.TarInfo(name)
            info.size, info.uid, info.gid = len(text), 1000, 1000
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _holder(name: str, ready: int) -> list[str]:
    shown: list[str] = []
    for top in ("bin", "sbin", "lib", "lib64"):
        place = Path(f"/{top}")
        if place.is_symlink():
            shown += ["--symlink", f"usr/{top}", str(place)]
        elif place.is_dir():
            shown += ["--ro-bind", str(place), str(place)]
    apart = [f"--unshare-{namespace}" for namespace in ("pid", "net", "ipc", "uts")]
    return ["bwrap", *apart, "--hostname", name, "--die-with-parent", "--ro-bind", "/usr", "/usr", *shown,
            "--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--proc", "/proc", "--dev", "/dev",
            "--info-fd", str(ready), "--cap-add", "ALL",
            "/bin/sh", "-c", "echo ready; while :; do sleep 86400; done"]  # fmt: skip


class Service:
    """faults: by path of a request, what its next answers come to: `hang`, `cut`, a status, or `nonsense`."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.templates: dict[str, bytes] = {"base": _base()}
        self.names: dict[str, str] = {}
        self.faults: dict[str, list[str]] = {}
        self.created: list[dict[str, Any]] = []
        self.snapshot_modes: list[Any] = []
        self.full_only = False
        """Refuse snapshots without processes, as the service does where they are not enabled."""

    def routes(self) -> dict[str, Any]:
        return {
            "POST /v2/sandboxes": self.create,
            "GET /v2/sandboxes": self.listed,
            "DELETE /sandboxes/{id}": self.deleted,
            "POST /sandboxes/{id}/timeout": self.renewed,
            "POST /sandboxes/{id}/snapshots": self.snapshot,
            "GET /snapshots": self.snapshots,
            "DELETE /templates/{id}": self.dropped,
            "POST /process.Process/Start": self.start,
            "POST /process.Process/SendInput": self.send_input,
            "POST /process.Process/Update": self.update,
            "GET /files": self.download,
            "POST /files": self.upload,
            "GET /health": self.health,
        }

    @web.middleware
    async def faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        fault = self.faults.get(request.path) or self.faults.get("*") or [""]
        word = fault.pop(0) if len(fault) > 1 else fault[0]
        if word == "hang":
            await asyncio.sleep(3600)
        if word == "cut":
            assert request.transport is not None
            request.transport.abort()
        if word == "nonsense":
            return web.Response(text="<html>\n", content_type="text/html")
        if word.isdigit():
            return web.json_response({"code": int(word), "message": "out of order"}, status=int(word))
        inside = request.path.startswith(("/process.", "/files", "/health"))
        if inside and request.headers.get("E2b-Sandbox-Id") not in self.boxes:
            told = {
                "sandboxId": request.headers.get("E2b-Sandbox-Id"),
                "message": "The sandbox was not found",
                "code": 502,
            }
            return web.json_response(told, status=502)
        if inside and request.headers.get("X-Access-Token") != "token-of-" + request.headers["E2b-Sandbox-Id"]:
            return web.json_response({"code": 401, "message": "unauthorized access"}, status=401)
        if not inside and request.headers.get("X-API-KEY") != KEY:
            return web.json_response({"code": 401, "message": "Invalid API key"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    # The control API

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.created.append(asked)
        template = asked["templateID"].removesuffix(":default")
        content = self.templates.get(template)
        if content is None:
            return web.json_response({"code": 404, "message": f"template '{template}' not found"}, status=404)
        name = "i" + uuid.uuid4().hex[:19]
        end = datetime.now(UTC) + timedelta(seconds=asked.get("timeout", 300))
        box = Box(name, template, asked.get("metadata") or {}, asked.get("envVars") or {}, asked.get("network"), end)
        await asyncio.to_thread(self._boot, box, content)
        self.boxes[name] = box
        said = {"templateID": template, "sandboxID": name, "clientID": "c", "envdVersion": "0.6.9",
                "envdAccessToken": f"token-of-{name}", "domain": None}  # fmt: skip
        return web.json_response(said, status=201)

    def _boot(self, box: Box, content: bytes) -> None:
        reading, writing = os.pipe()
        box.holder = subprocess.Popen(
            _holder(box.id, writing),
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={"PATH": _PATH},
        )
        os.close(writing)
        with os.fdopen(reading) as told:
            box.child = json.loads(told.read())["child-pid"]
        assert box.holder.stdout is not None
        assert box.holder.stdout.readline() == b"ready\n"
        box.run("tar", "-C", "/", "-xpf", "-", "--numeric-owner", data=content)

    async def listed(self, request: web.Request) -> web.Response:
        from urllib.parse import parse_qsl, unquote

        wanted = {unquote(key): unquote(value) for key, value in parse_qsl(request.query.get("metadata", ""))}
        rows = [self._row(box) for box in self.boxes.values() if wanted.items() <= box.metadata.items()]
        start, limit = int(request.query.get("nextToken") or 0), int(request.query.get("limit", 100))
        headers = {"X-Next-Token": str(start + limit)} if start + limit < len(rows) else {}
        return web.json_response(rows[start : start + limit], headers=headers)

    def _row(self, box: Box) -> dict[str, Any]:
        return {"templateID": box.template, "sandboxID": box.id, "clientID": "c", "startedAt": "2026-01-01T00:00:00Z",
                "endAt": box.end.isoformat(), "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024, "state": "running",
                "envdVersion": "0.6.9", "metadata": box.metadata}  # fmt: skip

    async def deleted(self, request: web.Request) -> web.Response:
        box = self.boxes.pop(request.match_info["id"], None)
        if box is None:
            return web.json_response({"code": 404, "message": "not found"}, status=404)
        await asyncio.to_thread(box.kill)
        return web.Response(status=204)

    async def renewed(self, request: web.Request) -> web.Response:
        box = self.boxes[request.match_info["id"]]
        box.end = datetime.now(UTC) + timedelta(seconds=(await request.json())["timeout"])
        return web.Response(status=204)

    async def snapshot(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.snapshot_modes.append(asked.get("memory"))
        if self.full_only and asked.get("memory") is False:
            return web.json_response({"code": 400, "message": "snapshot_filesystem_only_disabled"}, status=400)
        box = self.boxes[request.match_info["id"]]
        words = (
            "tar",
            "-C",
            "/",
            "--one-file-system",
            "-cpf",
            "-",
            "--exclude=./proc",
            "--exclude=./dev",
            "--exclude=./usr",
            "--exclude=./etc/alternatives",
            ".",
        )
        self.templates[asked["name"]] = await asyncio.to_thread(box.run, *words)
        name = f"team/{asked['name']}:default"
        self.templates[name.removesuffix(":default")] = self.templates[asked["name"]]
        self.names[name] = asked["name"]
        return web.json_response({"snapshotID": name, "names": [name]}, status=201)

    async def snapshots(self, request: web.Request) -> web.Response:
        return web.json_response([{"snapshotID": name, "names": [name]} for name in self.names])

    async def dropped(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name not in self.names:
            return web.json_response({"code": 404, "message": "not found"}, status=404)
        del self.templates[self.names.pop(name)], self.templates[name.removesuffix(":default")]
        return web.Response(status=204)

    # The daemon of a sandbox

    def _box(self, request: web.Request) -> Box:
        return self.boxes[request.headers["E2b-Sandbox-Id"]]

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def start(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        assert body[0] == 0
        assert struct.unpack(">I", body[1:5])[0] == len(body) - 5
        asked, box = json.loads(body[5:]), self._box(request)
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        user = _user(request.headers.get("Authorization"))
        if user not in _ACCOUNTS:
            await _ended(
                response,
                {"code": "unauthenticated", "message": f"error looking up user '{user}': user: unknown user {user}"},
            )
            return response
        program = await self._launch(box, user, asked)
        box.running[program.process.pid] = program
        try:
            await _sent(response, {"event": {"start": {"pid": program.process.pid}}})
            await self._carry(program, response)
            code = await program.process.wait()
            status = {"exitCode": code, "exited": True} if code >= 0 else {"exitCode": -1}
            await _sent(response, {"event": {"end": {**status, "status": f"exit status {code}"}}})
            await _ended(response)
            box.running.pop(program.process.pid).end()
        except (ConnectionError, asyncio.CancelledError):
            pass  # a program runs on where nobody listens
        return response

    async def _launch(self, box: Box, user: str, asked: dict[str, Any]) -> Program:
        uid, home = _ACCOUNTS[user]
        config = asked["process"]
        env = {"PATH": _PATH, "HOME": home, "USER": user, "LOGNAME": user, **box.env, **config.get("envs", {})}
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        words, cwd = [*become, config["cmd"], *config.get("args", [])], config.get("cwd", home)
        if "pty" not in asked:
            stdin = subprocess.PIPE if asked.get("stdin") else subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(
                *box.inside(*words, cwd=cwd), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
            )
            return Program(process)
        ours, theirs = pty.openpty()
        _resize(ours, asked["pty"]["size"])
        process = await asyncio.create_subprocess_exec(
            *box.inside("setsid", "--ctty", "--wait", *words, cwd=cwd),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        return Program(process, ours)

    async def _carry(self, program: Program, response: web.StreamResponse) -> None:
        lock = asyncio.Lock()

        async def carry(name: str, read: Callable[[], Any]) -> None:
            while data := await read():
                async with lock:
                    await _sent(response, {"event": {"data": {name: base64.b64encode(data).decode()}}})

        if program.terminal is not None:
            loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
            ours = os.fdopen(os.dup(program.terminal), "rb", 0)
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), ours)
            try:
                with contextlib.suppress(OSError):  # nobody has it open any more
                    await carry("pty", lambda: reader.read(1 << 15))
            finally:
                transport.close()
            return
        out, err = program.process.stdout, program.process.stderr
        assert out is not None
        assert err is not None
        await asyncio.gather(carry("stdout", lambda: out.read(1 << 15)), carry("stderr", lambda: err.read(1 << 15)))

    async def send_input(self, request: web.Request) -> web.Response:
        asked = await request.json()
        program = self._box(request).running.get(asked["process"]["pid"])
        if program is None:
            return web.json_response({"code": "not_found", "message": "process not found"}, status=404)
        if "pty" in asked["input"]:
            assert program.terminal is not None
            try:
                os.write(program.terminal, base64.b64decode(asked["input"]["pty"]))
            except OSError as error:
                return web.json_response({"code": "internal", "message": f"error writing to tty: {error}"}, status=500)
            return web.json_response({})
        assert program.process.stdin is not None
        try:
            program.process.stdin.write(base64.b64decode(asked["input"]["stdin"]))
            await program.process.stdin.drain()
        except ConnectionError as error:
            return web.json_response({"code": "internal", "message": f"error writing to stdin: {error}"}, status=500)
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        asked = await request.json()
        terminal = self._box(request).running[asked["process"]["pid"]].terminal
        assert terminal is not None
        _resize(terminal, asked["pty"]["size"])
        return web.json_response({})

    async def download(self, request: web.Request) -> web.StreamResponse:
        try:
            data = await asyncio.to_thread(self._box(request).run, "cat", request.query["path"])
        except subprocess.CalledProcessError:
            return web.json_response({"code": 404, "message": "path does not exist"}, status=404)
        return web.Response(body=data, content_type="application/octet-stream")

    async def upload(self, request: web.Request) -> web.Response:
        path, user = request.query["path"], request.query["username"]
        part = await (await request.multipart()).next()
        data = bytes(await part.read())  # type: ignore[union-attr]
        owner = _ACCOUNTS[user][0]
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1" && chown "$2:$2" "$1"'
        await asyncio.to_thread(self._box(request).run, "sh", "-c", script, "sh", path, str(owner), data=data)
        return web.json_response([{"path": path, "name": Path(path).name, "type": "file"}])

    async def close(self) -> None:
        for box in self.boxes.values():
            await asyncio.to_thread(box.kill)


def _user(header: str | None) -> str:
    if header is None:
        return "user"
    return base64.b64decode(header.removeprefix("Basic ")).decode().removesuffix(":")


def _resize(terminal: int, size: dict[str, int]) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0))


async def _sent(response: web.StreamResponse, message: dict[str, Any], flags: int = 0) -> None:
    data = json.dumps(message).encode()
    await response.write(struct.pack(">BI", flags, len(data)) + data)


async def _ended(response: web.StreamResponse, error: dict[str, str] | None = None) -> None:
    await _sent(response, {"error": error} if error else {}, _END)
    await response.write_eof()


@asynccontextmanager
async def e2b_service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    """Skips where no sandbox can be made."""
    if missing := [program for program in _NEEDS if shutil.which(program) is None]:
        pytest.skip(f"needs the programs {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root, whose programs enter the sandboxes")
    service = Service()
    async with serving(
        service.routes(), middlewares=[service.faulty], client_max_size=1 << 30, handler_cancellation=True
    ) as url:
        for name, value in {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": KEY}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("E2B_DEBUG", raising=False)
        try:
            yield service
        finally:
            await service.close()
