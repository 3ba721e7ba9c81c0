"""Servers in containers, which do not end with the client that starts them. A stand-in for docker runs them."""

import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import SUPPORT
from processes import until
from sglang_server_help import FAKE, started

from agentrl.engine.servers.launch import launch_command
from agentrl.engine.sglang.command import SGLANG, SglangPlan
from agentrl.errors import UserError

RUNTIME = SUPPORT / "container_runtime.py"


@pytest.fixture
def docker(bubblewrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in, by docker's name; whatever it runs ends with the test."""
    containers = tmp_path / "containers"
    containers.mkdir()
    monkeypatch.setenv("STAND_IN_CONTAINERS", str(containers))
    program = tmp_path / "docker"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{RUNTIME}" "$@"\n')
    program.chmod(0o755)
    yield program
    for state in containers.iterdir():
        os.killpg(int(state.read_text()), signal.SIGKILL)


def plan(command: str, model_path: str = "org/model", **more: str) -> SglangPlan:
    return SglangPlan(command=launch_command(command, None, SGLANG), model_path=model_path, dtype="float32", flags={},
                      max_batch=4, token_bytes=1, context=64, cpu=True, env=more, grace=5.0)  # fmt: skip


def test_what_is_added_to_the_command(docker: Path, tmp_path: Path) -> None:
    command = f"{docker} run --gpus all --network=host --ipc host image python3 -m sglang.launch_server"
    words, removal = plan(command, str(tmp_path), HF_TOKEN="x").launch(31000, 0)
    name = words[words.index("--name") + 1]
    assert removal == [str(docker), "rm", "--force", name]
    before, at, after = words[:2], words.index("image"), words[words.index("image") :]
    assert before == [str(docker), "run"]
    options = words[2:at]
    assert options[options.index("--gpus") :] == ["--gpus", "all", "--network=host", "--ipc", "host"]
    assert {"--rm", "--init", f"{tmp_path}:{tmp_path}:ro"} <= set(options)
    assert options.count("--network=host") == 1  # the recipe has it
    passed = {options[i + 1] for i, word in enumerate(options) if word == "--env"}
    assert {"SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_USE_CPU_ENGINE", "HF_TOKEN"} <= passed  # not "=": ps shows words
    assert after[:4] == ["image", "python3", "-m", "sglang.launch_server"]
    assert after[after.index("--model-path") + 1] == str(tmp_path)
    other, _ = plan(command).launch(31000, 1)
    assert name not in other
    assert "--volume" not in other  # a name of the hub
    assert plan("env python3 -m x").launch(1, 0)[1] == []


@pytest.mark.parametrize(("option", "line"), [("--name mine", "leave --name out"), ("-d", "leave -d out")])
def test_what_a_run_cannot_end_is_refused(docker: Path, option: str, line: str) -> None:
    with pytest.raises(UserError, match=f"engine.args.command: {line}"):
        plan(f"{docker} run {option} image serve")


@pytest.mark.parametrize("how", ["stop", "kill", "client", "run"])
async def test_a_container_ends_however_its_run_does(docker: Path, tmp_path: Path, how: str) -> None:
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    command = f"{docker} run --volume {tmp_path}:{tmp_path} image {sys.executable} {program} {tmp_path / 'ids'}"
    server = await started(plan(command), tmp_path / "log")
    (state,) = (tmp_path / "containers").iterdir()
    daemon, tree = int(state.read_text()), server._tree
    assert tree is not None
    if how == "stop":
        await server.stop()
    elif how == "kill":
        server.kill()
    elif how == "client":
        (client,) = [int(p) for p in Path(f"/proc/{tree.pid}/task/{tree.pid}/children").read_text().split()]
        os.kill(client, signal.SIGKILL)
    else:
        tree.ask_to_end()  # as when the run is killed
    until(lambda: not Path(f"/proc/{daemon}/cmdline").exists() or not Path(f"/proc/{daemon}/cmdline").read_bytes())
    until(lambda: not answers(server.url))
    until(lambda: tree.gone)
    assert "it serves" in (tmp_path / "log").read_text()
    await server.stop()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
