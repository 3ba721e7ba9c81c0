"""A podman of a test's own: its API on a Unix socket, its files in a folder that goes with it, an image of busybox."""

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

IMAGE = "localhost/agentrl-test:1"
NEEDS = {"podman": "podman", "runc": "runc", "conmon": "conmon", "busybox": "busybox-static"}
"""Program: the package of the distribution that has it."""
CONFIG = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
"""
PASSWD = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n"
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{0}/root"
runroot = "{0}/run"
"""
READY_SECONDS = 20.0


@dataclass
class Podman:
    """A service that runs."""

    folder: Path
    address: str
    process: "subprocess.Popen[bytes]"

    def command(self, *words: str) -> list[str]:
        """A command line of podman on the same images and containers."""
        return ["podman", "--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run", *words]

    def run(self, *words: str, data: bytes = b"", check: bool = True) -> str:
        """What a command says."""
        done = subprocess.run(self.command(*words), input=data, env=self.env, capture_output=True, check=False)
        assert done.returncode == 0 or not check, done.stderr.decode()[-2000:]
        return done.stdout.decode()

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "CONTAINERS_CONF": f"{self.folder}/containers.conf"}

    @property
    def own_env(self) -> dict[str, str]:
        """Variables by which any podman command uses the same images and containers."""
        return {
            "CONTAINERS_CONF": f"{self.folder}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.folder}/storage.conf",
        }

    def containers(self) -> list[str]:
        """The ids of all containers."""
        return self.run("ps", "-aq").split()

    def images(self) -> list[str]:
        """The names of all images."""
        return self.run("images", "--format", "{{.Repository}}:{{.Tag}}").split()


def root_folder() -> bytes:
    """A tar of a root folder with busybox."""
    buffer = io.BytesIO()
    busybox = Path(shutil.which("busybox") or "")
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("bin", "etc", "tmp", "root", "proc", "sys", "dev", "home", "home/agent", "var"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            info.uid = info.gid = 1000 if name == "home/agent" else 0
            tar.addfile(info)
        tar.add(busybox, "bin/busybox")
        names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
        for name in set(names) - {"busybox"}:
            info = tarfile.TarInfo(f"bin/{name}")
            info.type, info.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(info)
        for name, text in {"etc/passwd": PASSWD, "etc/group": "root:x:0:\nagent:x:1000:\n"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


@contextmanager
def podman_service(image: bool = True, megabytes: int = 0) -> Iterator[Podman]:
    """Skips where podman is missing, or does not work here. megabytes: of a disk of its own; 0: this machine's."""
    if missing := [package for program, package in NEEDS.items() if shutil.which(program) is None]:
        pytest.skip(f"needs the system packages {', '.join(missing)}")
    folder = Path(tempfile.mkdtemp(prefix="agentrl-podman-"))
    disk = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    if megabytes and subprocess.run(disk, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("no file system can be mounted here")
    (folder / "containers.conf").write_text(CONFIG)
    (folder / "storage.conf").write_text(STORAGE.format(folder))
    podman = start(folder)
    try:
        if image:
            _have_image(podman)
        yield podman
    finally:
        stop(podman)
        subprocess.run(podman.command("rm", "-af"), env=podman.env, capture_output=True, check=False)
        for mounted in (f"{folder}/root/overlay", *([folder] if megabytes else [])):
            subprocess.run(["umount", mounted], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def start(folder: Path) -> Podman:
    """Start a service on the files in a folder."""
    socket = folder / "podman.sock"
    socket.unlink(missing_ok=True)
    podman = Podman(folder, f"unix://{socket}", None)  # type: ignore[arg-type]
    with (folder / "log.txt").open("ab") as log:
        podman.process = subprocess.Popen(
            podman.command("system", "service", "--time=0", podman.address),
            env={**podman.env, "HTTP_PROXY": "http://name:secret-of-the-host@127.0.0.1:9"},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            cwd=folder,  # conmon leaves a file `oom` where it stands
        )  # fmt: skip
    end = time.monotonic() + READY_SECONDS
    while not socket.exists():
        if podman.process.poll() is not None or time.monotonic() > end:
            stop(podman)
            pytest.skip(f"podman does not serve here: {(folder / 'log.txt').read_text()[-500:]}")
        time.sleep(0.05)
    return podman


def stop(podman: Podman) -> None:
    """End the service; its containers run on."""
    podman.process.kill()
    podman.process.wait()


def _have_image(podman: Podman) -> None:
    podman.run("import", "-", IMAGE, data=root_folder())
    tried = subprocess.run(
        podman.command("run", "--rm", "--network=none", IMAGE, "true"), env=podman.env, capture_output=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"podman runs no container here: {tried.stderr.decode()[-500:]}")
