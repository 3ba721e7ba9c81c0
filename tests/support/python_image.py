"""A root folder for containers, with busybox and this machine's own Python: there is no registry to take one from."""

import io
import re
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
        for path in sorted(set(re.findall(r"(/\S+\.so\S*) \(0x", linked))):
            tar.add(path)
        tar.add(python, "usr/bin/python3")
        for program in programs:
            tar.add(program)
        tar.add(library, filter=lambda member: None if _LEFT_OUT.search(f"/{member.name}") else member)
    return buffer.getvalue()
