"""CPU time of the driver per turn: state machine, rendering, parsing and tool dispatch, with an instant engine.

    python benchmarks/driver.py                 the whole table, a few minutes
    python benchmarks/driver.py --quick         only the extremes of the table
    python benchmarks/driver.py --chat bridge   with our own bridge on Qwen3's template (default: `renderers`' qwen3)
    python benchmarks/driver.py --chat null     without a chat: only the state machine and the dispatch

All requests are opened first and wait for each other, so that all are in flight at the same time. Then the clock starts
(CPU time of the process), the requests take their turns alternately, and the clock stops when all are about to give
their last answer. Each counted turn calls a tool that answers immediately. The cost per request (create and the opening
prompt; the last answer, reward, release and the trajectory) has a column of its own.
"""

import argparse
import asyncio
import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat.base import ParsedCall, ParsedTurn
from agentrl.chat.load import load_chat
from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.fine_tuning.new_model import train_tokenizer
from agentrl.plugins.decorator import tool
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Message, Reply, Session, Task
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import roll_out

TASKS = 20  # the requests are their samples, which share the rendered prompt
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away")


class Gate:
    """A barrier for `requests` requests. `opened`: CPU time of the process, in seconds, when the last one arrived."""

    def __init__(self, requests: int) -> None:
        self._missing = requests
        self._open = asyncio.Event()
        self.opened = 0.0

    async def arrive(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self.opened = time.process_time()
            self._open.set()
        await self._open.wait()


class InstantEngine:
    """An engine that immediately returns fixed turns: `turns` tool calls, then a turn of text."""

    max_context = 1 << 30

    def __init__(self, call: Generation, last: Generation, turns: int, first_gate: Gate, last_gate: Gate) -> None:
        self._call, self._last, self._turns = call, last, turns
        self._first_gate, self._last_gate = first_gate, last_gate
        self._taken: dict[str, int] = {}

    async def generate(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        taken = self._taken.get(request_id, 0)
        self._taken[request_id] = taken + 1
        if taken == 0:
            await self._first_gate.arrive()
        elif taken == self._turns:
            await self._last_gate.arrive()
            return self._last
        await asyncio.sleep(0)  # let the other requests take their turn
        return self._call

    def finish(self, request_id: str) -> None:
        del self._taken[request_id]


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a * b)


class Question(Environment):
    """An environment with one question after a text of about `history` tokens."""

    name = "question"

    def __init__(self, history: str) -> None:
        self._opening: list[Message] = [{"role": "user", "content": f"{history}\nWhat is 127 times 38?"}]

    def tasks(self, split: str) -> Sequence[Task]:
        raise NotImplementedError

    async def create(self, session: Session, **create_kwargs: Any) -> Sequence[Message]:
        return self._opening

    async def execute(self, session: Session, message: Message) -> Reply:
        return Reply(done=True)

    async def calc_reward(self, session: Session, **kwargs: Any) -> float:
        return 1.0


class NullChat:
    """A chat that returns fixed ids, and recognizes its two turns by their length."""

    stop_ids = (1,)
    images = False
    rewrites_history = None

    def __init__(self, history: int) -> None:
        self._history = history
        call = ParsedCall("multiply", {"a": 127, "b": 38}, "")
        self._turns = {30: ParsedTurn("", (call,)), 12: ParsedTurn("The answer is 4826.")}

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return [5] * self._history

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return [6] * 15

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        return self._turns[len(turn_ids)]

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def encode_text(self, text: str) -> list[int]:
        return [7] * len(text)


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    requests: int
    """Requests in flight."""
    turns: int
    """Tool calls per request."""
    history: int
    """Tokens before the question."""


@dataclass(frozen=True)
class Cost:
    """CPU time of the driver."""

    turn: float
    """Microseconds per turn."""
    request: float
    """Microseconds per request, without its turns."""


def measure(setting: Setting, chat: Any, call: Generation, last: Generation) -> Cost:
    """Measure one run in an event loop of its own."""
    return asyncio.run(_measure(setting, chat, call, last))


async def _measure(setting: Setting, chat: Any, call: Generation, last: Generation) -> Cost:
    opened, ended = Gate(setting.requests), Gate(setting.requests)
    limits = RolloutSection(
        max_turns=setting.turns + 1, max_tool_calls=setting.turns, max_tokens=1 << 30, concurrency=setting.requests
    )
    driver = Driver(
        engine=InstantEngine(call, last, setting.turns, opened, ended), chat=chat, limits=limits,  # type: ignore[arg-type]
        environment=Question(history_text(setting.history)), tools=[multiply],
    )  # fmt: skip
    tasks = [Task(str(i), {}) for i in range(TASKS)]
    began = time.process_time()
    groups = await roll_out(driver, tasks, setting.requests // TASKS)
    done = time.process_time()
    for group in groups:
        for trajectory in group.trajectories:
            assert len(trajectory.turns) == setting.turns + 1, trajectory
            assert trajectory.reward == 1.0
        assert not group.failed, group.failed[0].failure
    turns = ended.opened - opened.opened
    per_turn = turns / (setting.requests * setting.turns)
    return Cost(per_turn * 1e6, (done - began - turns) / setting.requests * 1e6)


def history_text(tokens: int) -> str:
    """Plain text of about `tokens` tokens."""
    return " ".join(_WORDS[i % len(_WORDS)] for i in range(tokens))


def build_chat(kind: str, history: int) -> tuple[Any, Generation, Generation]:
    """The chat, a turn that calls the tool, and a turn that answers."""
    if kind == "null":
        return NullChat(history), _generation([2] * 30), _generation([3] * 12)
    tokenizer = qwen3_tokenizer()
    chat = load_chat(tokenizer, model_path="", kind="bridge" if kind == "bridge" else "qwen3", tools=[multiply.schema])
    arguments = json.dumps({"name": "multiply", "arguments": {"a": 127, "b": 38}})
    texts = f"<tool_call>\n{arguments}\n</tool_call><|im_end|>", "The answer is 4826.<|im_end|>"
    return chat, *(_generation(tokenizer.encode(text, add_special_tokens=False)) for text in texts)  # type: ignore[return-value]


def qwen3_tokenizer() -> Any:
    """A byte-level BPE tokenizer like Qwen3's, trained on a few lines, with its template from package `trl`."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("install the test extra: the template comes from the package `trl`")
    template = Path(spec.submodule_search_locations[0], "chat_templates", "qwen3.jinja").read_text()
    return train_tokenizer([history_text(200), template, json.dumps(multiply.schema)] * 4, 2000, template, 10**9)


def _generation(ids: list[int]) -> Generation:
    return Generation(ids, [-0.5] * len(ids), GenerationFinish.STOP, 0)


def settings(quick: bool) -> list[Setting]:
    requests, turns, history = ((100, 10_000), (3, 30), (200, 20_000)) if quick else (
        (100, 1_000, 10_000), (3, 10, 30), (200, 20_000)
    )  # fmt: skip
    return [Setting(r, t, h) for h in history for t in turns for r in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--chat", choices=["qwen3", "bridge", "null"], default="qwen3")
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many runs")
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    rows = []
    print(f"{'in flight':>9} {'turns':>5} {'history':>7} {'us a turn':>10} {'us a request':>13}")
    for setting in settings(options.quick):
        chat, call, last = build_chat(options.chat, setting.history)
        repeat = options.repeat if setting.requests * setting.turns < 100_000 else 1
        costs = [measure(setting, chat, call, last) for _ in range(repeat)]
        cost = min(costs, key=lambda c: c.turn)
        rows.append({**vars(setting), "us_per_turn": cost.turn, "us_per_request": cost.request})
        print(
            f"{setting.requests:9} {setting.turns:5} {setting.history:7} {cost.turn:10.1f} {cost.request:13.1f}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
