"""An environment of agentrl as a task of Inspect, in an interpreter that has `inspect_ai` and `aiohttp`, not agentrl.

    inspect eval inspect_task.py -T recipe=text_game --model ...
    inspect eval inspect_task.py -T url=http://127.0.0.1:8000 -T split=train --model ...

The environment is served by `agentrl env serve`, which is started here where a recipe is named. A sample is a rollout
there: its tools run, its limits hold and its reward is paid as in training; the model is asked by Inspect.
"""

import atexit
import json
import re
import subprocess
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from typing import Any

import aiohttp
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    get_model,
)
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolCall, ToolInfo, ToolParams
from inspect_ai.util import store

REWARD = "agentrl_reward"
"""Where a sample's store keeps what its rollout was paid."""
_URL = re.compile(r"http://[^\s/]+:\d+")
_AT_ONCE = 1000  # samples that one request lists


@task  # type: ignore[untyped-decorator]
def agentrl(
    url: str = "", recipe: str = "", split: str = "test", limit: int = 0, key: str = "", program: str = "agentrl"
) -> Task:
    """url: of an environment that is served; or recipe: one to serve meanwhile, by `program`. limit: samples at most.
    key: of the server, where it asks for one."""
    if bool(url) == bool(recipe):
        raise ValueError("give either url, of `agentrl env serve`, or recipe")
    where = url.rstrip("/") if url else _serve(program, recipe)
    (name,) = _asked(f"{where}/list_environments", key)
    count = _asked(f"{where}/{name}/num_tasks", key, {"split": split})["num_tasks"]
    count = min(count, limit) if limit else count
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        bounds = {"split": split, "start": len(rows), "stop": min(count, len(rows) + _AT_ONCE)}
        rows += _asked(f"{where}/{name}/task_range", key, bounds)["tasks"]
    samples = [Sample(input=f"{split} {row['id']}", id=row["id"], metadata={"index": row["index"]}) for row in rows]
    return Task(dataset=samples, solver=rollout(where, split, key), scorer=reward(), name=name)


@solver  # type: ignore[untyped-decorator]
def rollout(url: str, split: str, key: str) -> Solver:
    """Plays a task; the messages of the environment take the place of the sample's input."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.ws_connect(f"{url}/ws", max_msg_size=0) as socket,
        ):
            begin = {"split": split, "index": state.metadata["index"], "seed": state.epoch}
            view = await _told(socket, "reset", begin)
            state.messages = _messages(view, ())
            listing = await _told(socket, "step", {"type": "list_tools"})
            tools = [_tool(row) for row in listing["observation"]["tools"]]
            paid = float(view["reward"] or 0.0)
            while not view["done"]:
                state.output = await get_model().generate(state.messages, tools=tools)
                said = state.output.message
                state.messages.append(said)
                calls = [{"name": call.function, "arguments": call.arguments} for call in said.tool_calls or ()]
                view = await _told(socket, "step", {"message": said.text, "tool_calls": calls})
                state.messages += _messages(view, said.tool_calls or ())
                paid += float(view["reward"] or 0.0)
            store().set(REWARD, paid)
        state.completed = True
        return state

    return solve


@scorer(metrics=[mean(), stderr()])  # type: ignore[untyped-decorator]
def reward() -> Scorer:
    """The rollout's reward; 0 where a limit of Inspect cut it short."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=store().get(REWARD, 0.0), answer=state.output.completion)

    return score


async def _told(socket: aiohttp.ClientWebSocketResponse, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """What the server answers. Raises RuntimeError: it is an error, whose sample Inspect counts as one."""
    await socket.send_str(json.dumps({"type": kind, "data": data}))
    answer = await socket.receive()
    if answer.type is not aiohttp.WSMsgType.TEXT:
        raise RuntimeError(f"the server ended the session ({answer.type.name})")
    said = json.loads(answer.data)
    if said["type"] == "error":
        raise RuntimeError(said["data"]["message"])
    told: dict[str, Any] = said["data"]
    return told


def _messages(view: dict[str, Any], calls: Sequence[ToolCall]) -> list[ChatMessage]:
    """What the environment said. Results come in the order of the calls."""
    found: list[ChatMessage] = []
    open_calls = list(calls)
    for message in view["observation"]["messages"]:
        role, text = message["role"], message["content"]
        if role == "tool":
            call = open_calls.pop(0) if open_calls else None
            found.append(
                ChatMessageTool(
                    content=text, tool_call_id=call.id if call else None, function=call.function if call else None
                )
            )
        else:
            kinds = {"system": ChatMessageSystem, "assistant": ChatMessageAssistant}
            found.append(kinds.get(role, ChatMessageUser)(content=text))
    return found


def _tool(row: dict[str, Any]) -> ToolInfo:
    schema = row["input_schema"]
    parameters = ToolParams.model_validate(
        {"properties": schema.get("properties", {}), "required": schema.get("required", [])}
    )
    return ToolInfo(name=row["name"], description=row["description"], parameters=parameters)


def _asked(url: str, key: str, data: dict[str, Any] | None = None) -> Any:
    """What a path of the server answers. Raises ValueError."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    body = None if data is None else json.dumps(data).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answers {error.code}: {error.read(300).decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{url} does not answer as `agentrl env serve` does: {error}") from None


def _serve(program: str, recipe: str) -> str:
    """Serve a recipe until this process ends, and return the address. Raises ValueError."""
    command = [program, "env", "serve", recipe, "--port", "0"]
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise ValueError(f"{program} cannot be started: {error.strerror}: name it by program=PATH") from None
    atexit.register(server.wait)
    atexit.register(server.terminate)  # before it is waited for
    lines: list[str] = []
    assert server.stdout is not None
    for line in server.stdout:
        lines.append(line.strip())
        if found := _URL.search(line):
            # Read on, or the server stands still once the pipe is full.
            threading.Thread(target=deque, args=(server.stdout, 0), daemon=True).start()
            return found[0]
    raise ValueError(f"{' '.join(command)} ended: {' '.join(lines[-3:])[-300:]}")
