"""Root folders for containers, of this machine's own programs: there is no registry to take one from."""

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from podman_help import root_folder

PYTHON_IMAGE = "localhost/agentrl-python:1"
_LEFT_OUT = re.compile(
    r"/(test|idlelib|lib2to3|ensurepip|tkinter|turtledemo|__pycache__|config-[^/]*|dist-packages)(/|$)"
)


def python_root(*programs: str) -> bytes:
    """A tar of it, with further programs of this machine. Skips where the system has no Python 3."""
    python = Path("/usr/bin/python3").resolve()
    if not python.is_file():
        pytest.skip("needs the system's own Python (apt-get install python3)")
    library = Path("/usr/lib") / python.name
    modules = sorted((library / "lib-dynload").glob("*.so"))
    linked = subprocess.run(["ldd", python, *modules, *programs], capture_output=True, text=True, check=True).stdout
    buffer = io.BytesIO(root_folder())
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        tar.dereference = True
        own = tarfile.TarInfo("usr/local/bin")
        own.type, own.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(own)
        for path in sorted(set(re.findall(r"(/\S+\.so\S*) \(0x", linked))):
            tar.add(path)
        tar.add(python, "usr/bin/python3")
        for program in programs:
            tar.add(program)
        tar.add(library, filter=lambda member: None if _LEFT_OUT.search(f"/{member.name}") else member)
    return buffer.getvalue()


GNU_IMAGE = "localhost/agentrl-gnu:1"
_GNU = (
    "bash dash awk base64 basename cat chmod chown cmp cp cut date dd df diff dirname echo env expr false find grep",
    "gzip head id ln ls mkdir mkfifo mktemp mv nl paste printenv printf ps pwd readlink rm rmdir script sed seq setsid",
    "sleep sort stat stty sync tac tail tar tee test touch tr true tty uniq wc xargs yes",
)


def gnu_root(*programs: str) -> bytes:
    """A tar of one as Debian has it, without busybox, with further programs. Skips where one is missing."""
    found = {name: shutil.which(name) for name in (*" ".join(_GNU).split(), *programs)}
    if missing := [name for name, place in found.items() if place is None]:
        pytest.skip(f"needs the programs {', '.join(missing)}")
    places = {name: Path(str(place)).resolve() for name, place in found.items()}
    linked = subprocess.run(["ldd", *places.values()], capture_output=True, text=True, check=True).stdout
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(root_folder())) as base, tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.dereference = True
        for member in base:
            if not member.name.startswith("bin/"):
                if member.name.startswith("etc"):
                    member.uid = member.gid = 1000  # tests change it
                tar.addfile(member, base.extractfile(member))
        for path in sorted(set(re.findall(r"(/\S+\.so\S*) \(0x", linked))):
            tar.add(path)
        for name, place in places.items():
            tar.add(place, f"bin/{name}")
        shell = tarfile.TarInfo("bin/sh")
        shell.type, shell.linkname = tarfile.SYMTYPE, "dash"
        tar.addfile(shell)
    return buffer.getvalue()
