"""The same attacks in both sandboxes, that of the tool `python` and `agent.sandbox`, as whoever runs this."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_tools.sandbox import Limits
from agentrl_tools.sandbox.bwrap import BwrapSandbox
from agentrl_tools.sandbox.system import find_bwrap, sandbox_config
from paths import ROOT
from sandbox_help import MARK

from agentrl.containment.bubblewrap import ORDINARY_USER
from agentrl.containment.program import MIB, Bounds, ProgramSandbox
from agentrl.plugins.agent import AgentClient, ProgramAgent
from agentrl.plugins.types import Task

KINDS = ("tool", "agent")
LIMITS = Limits(memory=160 * MIB, processes=24, disk=8 * MIB, files=300, cpu_seconds=2.0, image_bytes=MARK)
BOUNDS = Bounds(memory=160 * MIB, processes=24, temporary=8 * MIB, shared=16 * MIB, files=300)
ANSWER = b"the gateway"
PRELUDE = """
import ctypes, errno, fcntl, json, os, platform, signal, socket, stat, sys, termios, time
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def call(x86_64, aarch64, *arguments):
    number = {"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]
    return checked(libc.syscall(*(ctypes.c_long(one) if isinstance(one, int) else one for one in (number, *arguments))))
def refused_if(condition):
    if condition: raise PermissionError("refused")
"""
NEW_USER = 0x10000000
REFUSED = {
    "core_pattern": "open('/proc/sys/kernel/core_pattern', 'r+')",
    "sysrq-trigger": "os.open('/proc/sysrq-trigger', os.O_WRONLY)",
    "any file of /proc outside of processes": """
        reached = []
        for folder, folders, names in os.walk('/proc'):
            if folder == '/proc':
                folders[:] = [name for name in folders if not name.isdigit()]
            for name in names:
                try:
                    os.close(os.open(f'{folder}/{name}', os.O_WRONLY | os.O_NONBLOCK))
                    reached.append(f'{folder}/{name}')
                except OSError: pass
        refused_if(not reached)
        raise RuntimeError(reached[:20])
    """,
    "mount": "checked(libc.mount(b'none', b'/tmp', b'tmpfs', ctypes.c_ulong(0), None))",
    "the newer calls of mount": "call(430, 430, ctypes.c_char_p(b'tmpfs'), 0)",
    "a user namespace by unshare": f"call(272, 97, {NEW_USER})",
    "a user namespace by clone": f"call(56, 220, {NEW_USER} | signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0)",
    "a user namespace by clone3": f"""
        arguments = (ctypes.c_uint64 * 11)({NEW_USER}, 0, 0, 0, signal.SIGCHLD)
        call(435, 435, ctypes.byref(arguments), 88) or os._exit(0)
    """,
    "another namespace": "call(308, 268, os.open('/proc/self/ns/net', os.O_RDONLY), 0)",
    "capabilities": "refused_if(all(int(line.split()[1], 16) == 0 for line in open('/proc/self/status') if "
    "line.startswith(('CapEff', 'CapPrm', 'CapBnd'))))",
    "a setuid program's rights": "refused_if(libc.prctl(39, 0, 0, 0, 0) == 1)",
    "ptrace": "call(101, 117, 0, 0, 0, 0)",
    "the supervisor's memory": "open('/proc/1/mem', 'rb')",
    "the supervisor's descriptors": "os.readlink('/proc/1/fd/0')",
    "keyctl: the session's keyring": "call(250, 219, 0, -3, 0)",
    "add_key": "call(248, 217, ctypes.c_char_p(b'user'), ctypes.c_char_p(b'x'), ctypes.c_char_p(b'y'), 1, -2)",
    "request_key": "call(249, 218, ctypes.c_char_p(b'user'), ctypes.c_char_p(b'agentrl-test'), None, 0)",
    "the list of keys": "refused_if(not open('/proc/keys').read())",
    "a host's file": "os.stat(SECRET)",
    "a host's folder": "refused_if(not os.listdir(os.path.dirname(SECRET)))",
    "a host's shadow file": "os.stat('/etc/shadow')",
    **{f"writing to {place}": f"open('{place}/x', 'w')" for place in ("/", "/etc", "/usr", "/usr/lib", "/dev", "/var")},
    "the host's network": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "another network": "socket.create_connection(('192.0.2.1', 80), 2)",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect(ABSTRACT)",
    "a packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "a netlink socket of the firewall": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)",
    "typing into a terminal": "os.open('/dev/tty', os.O_RDWR)",
    "typing into a terminal of its own": """
        try: fcntl.ioctl(os.openpty()[1], termios.TIOCSTI, b'x')
        except OSError as error:
            refused_if(error.errno == errno.EPERM)
            raise RuntimeError(error)
    """,
    "a device node": "os.mknod('/tmp/node', stat.S_IFCHR | 0o600, os.makedev(1, 1))",
    "devices": "refused_if(not set(os.listdir('/dev')) - {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'ptmx', "
    "'pts', 'fd', 'stdin', 'stdout', 'stderr', 'shm', 'core', 'console'})",
    "memory without a name": "call(319, 279, ctypes.c_char_p(b'x'), 0)",
    "System V's shared memory": "call(29, 194, 0, 4096, 0o1600)",
}
"""By name: Python that raises an OSError where it is refused; what else it raises is a mistake of ours."""
FILL = """
written = 0
try:
    for n in range(200):
        with open(f'{PLACE}/{n}', 'wb', 0) as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    print('stopped', error.errno == errno.ENOSPC, written >> 20 <= 16)
"""
BOMBS = {
    "forks without end": (  # ended: a copy spoke in the interpreter's place, before any limit was passed
        "while True:\n    try: os.fork()\n    except OSError: pass", ("cpu", "processes", "memory", "ended")),
    "memory": ("for n in range(10):\n    if os.fork() == 0:\n        kept = bytearray(60 << 20)\n        break\n"
               "time.sleep(60)", ("memory",)),
    "files without end": ("for n in range(5000): open(f'/tmp/{n}', 'w').close()\ntime.sleep(60)", ("files",)),
    "a full /tmp": (FILL.replace("{PLACE}", "/tmp"), ("stopped True True",)),
    "a full /dev/shm": (FILL.replace("{PLACE}", "/dev/shm"), ("stopped True True",)),
}  # fmt: skip
"""By name: Python, and what is told of it: one of these."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the attacks reach for: a file, a port and an abstract socket."""

    secret: str
    port: int
    abstract: str

    def script(self, code: str) -> str:
        """A whole script: the helpers, the names of these, the code."""
        names = {"SECRET": self.secret, "PORT": self.port, "ABSTRACT": self.abstract}
        return PRELUDE + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + code

    def refusals(self) -> str:
        """A script that attacks process 1, tries all of `REFUSED`, and prints what was not refused."""
        table = {name: textwrap.dedent(code).strip() for name, code in REFUSED.items()}
        return self.script(
            "for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):\n"
            "    os.kill(1, number); os.kill(os.getppid(), number)\n"
            f"time.sleep(0.2)\nfound = {{}}\nfor name, code in {table!r}.items():\n"
            "    try: exec(code); found[name] = 'REACHED'\n"
            "    except OSError: pass\n    except Exception as error: found[name] = repr(error)\n"
            "print(json.dumps(found), end='')"
        )


@asynccontextmanager
async def host() -> AsyncIterator[Host]:
    """Something to reach for."""
    abstract = f"\0agentrl-test-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        os.chmod(folder, 0o755)
        secret = Path(folder, "secret")
        secret.write_text("hunter2")
        unnamed.bind(abstract)
        unnamed.listen()
        yield Host(str(secret), server.getsockname()[1], abstract)


async def told(kind: str, code: str, *, ordinary: bool) -> str:
    """Run code in one of the `KINDS`, and return what it printed, and why it was ended. ordinary: as an ordinary user
    although we are root."""
    return await (_in_tool if kind == "tool" else _in_agent)(code, ordinary)


async def _in_tool(code: str, ordinary: bool) -> str:
    sandbox = BwrapSandbox(LIMITS, pool=0)
    sandbox._config = sandbox_config(find_bwrap(), LIMITS, (), ordinary=ordinary)
    try:
        async with sandbox.session() as session:
            execution = await session.run(code)
            again = await session.run("1 + 1")
    finally:
        await sandbox.close()
    assert again.value == "2", again
    assert execution.error is None or execution.stop, execution
    return f"{execution.stdout}{execution.stop or ''}"


async def _in_agent(code: str, ordinary: bool) -> str:
    """Also hold that the gateway is reached and the working folder written, and that nothing is left."""
    asked = "import urllib.request, os\nopen('mine', 'w').write(os.environ['HOME'] == os.getcwd() and '1' or '')\n"
    asked += "assert urllib.request.urlopen(os.environ['OPENAI_BASE_URL']).read() == b'the gateway'\n"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        agent = ProgramAgent(
            (sys.executable, "-c", asked + code), sandbox=ProgramSandbox(bounds=BOUNDS, ordinary=ordinary)
        )
        path = f"{folder}/gateway"
        async with await asyncio.start_unix_server(_answer, path):
            client = AgentClient(
                f"http://127.0.0.1:{free.getsockname()[1]}/v1", "", "", "key", "model", (), (), _no_tool, 60, path
            )
            outcome = await agent.solve(Task("t", {}), client)
        assert outcome.folder is not None
        mine = Path(outcome.folder, "mine")
        assert mine.is_file() and mine.read_text() == "1", outcome  # noqa: PT018
        await agent.release(outcome)
        assert not Path(outcome.folder).exists()
    return outcome.output if outcome.exit_code == 0 else f"{outcome.output} exit code {outcome.exit_code}"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(ANSWER), ANSWER))
    writer.close()


async def _no_tool(name: str, arguments: object) -> str:
    raise AssertionError("no tool is called")


async def all_told() -> dict[str, str]:
    """What every attack in both sandboxes came to."""
    found = {}
    async with host() as here:
        for kind in KINDS:
            found[f"{kind}: refused"] = await told(kind, here.refusals(), ordinary=False)
            for name, (code, _) in BOMBS.items():
                found[f"{kind}: {name}"] = await told(kind, here.script(code), ordinary=False)
    return found


_ENTER = """
import os, subprocess, sys
shown, command = sys.argv[1].split(":"), sys.argv[2:]
handles = [os.open(folder, os.O_PATH) for folder in shown]
for folder, handle in zip(shown, handles):
    parts = folder.split("/")
    for n in range(2, len(parts)):
        closed = "/".join(parts[:n])
        if os.path.isdir(closed) and not os.stat(closed).st_mode & 1:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "none", closed], check=True)
    if not os.path.exists(folder):
        os.makedirs(folder)
        subprocess.run(["mount", "-c", "--bind", f"/proc/self/fd/{handle}", folder], check=True, pass_fds=[handle])
os.execvp("setpriv", ["setpriv", "--reuid", "UID", "--regid", "UID", "--clear-groups", *command])
"""


def as_ordinary_user(script: str, *folders: Path) -> Any:
    """The JSON that a script prints in a process that is nobody's, in which this checkout, this Python and some folders
    lie where they are."""
    needed = filter(os.path.isdir, (ROOT, sys.prefix, sys.base_prefix, *folders, *filter(None, sys.path)))
    shown = ":".join(dict.fromkeys(map(os.path.realpath, needed)))
    enter = _ENTER.replace("UID", str(ORDINARY_USER))
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", enter, shown]
    done = subprocess.run(
        [*command, sys.executable, "-c", script], capture_output=True, text=True, cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONPATH": str(ROOT / "tests" / "support")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
