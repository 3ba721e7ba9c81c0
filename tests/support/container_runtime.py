"""A stand-in for `docker`, as far as servers in containers need it: bubblewrap makes the container, which is nobody's
child, with files, processes and shared memory of its own; the network is this machine's.

    container_runtime.py run [OPTIONS] IMAGE COMMAND [ARGUMENT ...]      IMAGE is ignored: it is this machine's programs
    container_runtime.py rm --force NAME

Like docker's client, `run` shows the output until the container ends, and the container goes on when the client is
killed. What lies elsewhere than programs is seen by --volume alone. STAND_IN_CONTAINERS: a folder for what runs.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["STAND_IN_CONTAINERS"])
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", sys.prefix, sys.base_prefix)
VALUED = ("--name", "--env", "--volume")


def run(words: list[str]) -> int:
    options: list[tuple[str, str]] = []
    while words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        options.append((name, words.pop(0) if name in VALUED and not value else value))
    given = dict(options)
    assert {"--rm", "--init", "--name"} <= given.keys(), "nobody could end it, or reap its children"
    assert given["--network"] == "host"
    box = ["bwrap", "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--dev", "/dev", "--proc", "/proc"]
    box += ["--ro-bind", "/sys", "/sys", "--tmpfs", "/tmp", "--clearenv", "--setenv", "PATH", os.environ["PATH"]]
    for place in filter(os.path.exists, PROGRAMS):
        box += ["--ro-bind", place, place]
    for volume in (value for name, value in options if name == "--volume"):
        source, target, *mode = volume.split(":")
        box += ["--ro-bind" if mode == ["ro"] else "--bind", source, target]
    for name in (value for name, value in options if name == "--env"):
        box += ["--setenv", name, os.environ[name]]
    daemon = os.fork()
    if daemon == 0:
        _be_the_daemon(STATE / given["--name"], [*box, "--", *words[1:]])
    return os.waitstatus_to_exitcode(os.waitpid(daemon, 0)[1])


def _be_the_daemon(state: Path, command: list[str]) -> None:
    os.setsid()  # no signal to the client's group reaches it
    state.write_text(str(os.getpid()))
    code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    state.unlink(missing_ok=True)
    os._exit(code & 0x7F)


def remove(name: str) -> int:
    state = STATE / name
    if not state.exists():
        return 1
    os.killpg(int(state.read_text()), signal.SIGKILL)
    state.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", *words]:
            sys.exit(run(words))
        case ["rm", "--force", name]:
            sys.exit(remove(name))
        case _:
            sys.exit(f"no such command: {sys.argv[1:]}")
