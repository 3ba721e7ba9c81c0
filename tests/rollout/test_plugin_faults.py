"""Every hook of every kind of plugin, doing whatever strangers' code does: its own samples fail or are told, by the
boundary that it stands behind, and no sample is lost. What the metrics, the journal and the hooks count is the same."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from itertools import count, product

import pytest
from fakes import CharChat, Echo, Env, Hooks, ScriptedEngine, call, make_driver

from agentrl.checkpoint.run_folder import RunFolder
from agentrl.containment import deadline as timer
from agentrl.containment.event_loop import run
from agentrl.data.prompts import measure_prompts
from agentrl.errors import UserError
from agentrl.plugins.reward import GroupReward, Reward
from agentrl.plugins.rewards import Rewards
from agentrl.plugins.types import Reply, Task, ToolResponse
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout import hooks as hooks_module
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import roll_out
from agentrl.rollout.journal import Journal
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.scorer import Scorer
from agentrl.rollout.trajectory_file import read_records
from agentrl.trajectory import Boundary, FinishReason

BAD, GOOD, N = "bad", "good", 2
FUSSY = {"turn_timeout": 0.2, "tool_timeout": 0.1, "timeout": 0.4, "retries": 0}
ENVIRONMENT, TOOL, REWARD = Boundary.ENVIRONMENT, Boundary.TOOL, Boundary.REWARD


class UnspeakableError(Exception):
    def __str__(self):
        raise SystemExit("no words")


class NoFloat:
    def __float__(self):
        raise KeyboardInterrupt


def raises(kind, *args):
    async def act(*_, **__):
        raise kind(*args)

    return act


def raises_at_once(*_, **__):
    sys.exit(0)


async def hangs(*_, **__):
    await asyncio.Event().wait()


async def leaves_in_a_task(*_, **__):
    await asyncio.create_task(raises(SystemExit, 0)())


async def leaves_in_a_task_group(*_, **__):
    async with asyncio.TaskGroup() as group:
        group.create_task(raises(KeyboardInterrupt)())
        await asyncio.Event().wait()


async def leaves_a_task_that_exits(*_, **__):
    STRAYS.append(asyncio.create_task(raises(SystemExit, 3)()))
    asyncio.get_running_loop().call_soon(sys.exit, 4)
    await asyncio.sleep(0)
    raise ValueError("and fails")


async def cancels_itself_and_waits(*_, **__):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def cancels_itself(*_, **__):
    asyncio.current_task().cancel()


async def cancels_itself_and_fails(*_, **__):
    asyncio.current_task().cancel()
    raise ValueError("and fails")


async def cancels_itself_later(*_, **__):
    asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
    await asyncio.sleep(60)


STRAYS: list[asyncio.Task] = []
RECURSIVE: list = []
RECURSIVE += [RECURSIVE, RECURSIVE]
DEEP: list = []
for _ in range(5_000):
    DEEP = [DEEP]

RAISED = {
    "Exception": raises(RuntimeError, "boom\nand more"),
    "unspeakable": raises(UnspeakableError),
    "exit": raises(SystemExit, 0),
    "exit-at-once": raises_at_once,
    "Ctrl-C": raises(KeyboardInterrupt),
    "panic": raises(BaseException, "panic"),
    "GeneratorExit": raises(GeneratorExit),
    "group": raises(BaseExceptionGroup, "both", [SystemExit(1), ValueError("v")]),
    "CancelledError": raises(asyncio.CancelledError),
    "exit-in-task": leaves_in_a_task,
    "exit-in-group": leaves_in_a_task_group,
    "exit-in-stray": leaves_a_task_that_exits,
    "hang": hangs,
}
CANCELS = {
    "self-cancel": cancels_itself_and_waits,
    "self-cancel-at-end": cancels_itself,
    "self-cancel-and-fail": cancels_itself_and_fails,
    "self-cancel-later": cancels_itself_later,
}
VALUES = {
    "None": None, "nan": float("nan"), "huge": 10**400, "1e308": 1e308, "text": "text", "object": object(),
    "mixed-keys": {1: 0.5, "a": 1.0}, "recursive": RECURSIVE, "no-float": NoFloat(),
}  # fmt: skip

FAILS = {
    "env.create": ENVIRONMENT, "env.execute": ENVIRONMENT, "env.calc_reward": REWARD, "env.release": None,
    "tool.create": TOOL, "tool.execute": None, "tool.calc_reward": REWARD, "tool.release": None,
    "sample": REWARD, "group": REWARD,
}  # fmt: skip
HARMLESS = {
    ("tool.calc_reward", "None"),
    ("tool.execute", "text"),
    *product(("tool.create", "env.release", "tool.release"), VALUES),
}

CASES = [
    *((hook, name, act, FAILS[hook]) for hook in FAILS for name, act in RAISED.items()),
    *((h, name, act, TOOL if h == "tool.execute" else FAILS[h]) for h in FAILS for name, act in CANCELS.items()),
    *((h, name, lambda *_, v=v, **__: v, None if (h, name) in HARMLESS else FAILS[h] or TOOL)
      for h in FAILS for name, v in VALUES.items()),
    *(("tool.execute", f"response-{name}", lambda *_, v=v, **__: v, fails) for name, v, fails in (
        ("metric-huge", ToolResponse("x", metrics={"m": 10**400}), None),
        ("metric-nan", ToolResponse("x", metrics={"m": float("nan")}), None),
        ("metric-keys", ToolResponse("x", metrics={"m": 1.0, 3: 2.0}), None),
        ("metrics-recursive", ToolResponse("x", metrics={"m": RECURSIVE}), None),
        ("metrics-none", ToolResponse("x", metrics=None), None),
        ("images", ToolResponse("x", images=7), None),
        ("reward-1e308", ToolResponse("x", reward=1e308), REWARD),
        ("reward-huge", ToolResponse("x", reward=10**400), REWARD),
        ("reward-text", ToolResponse("x", reward="high"), REWARD),
    )),
    *(("env.execute", f"reply-{name}", lambda *_, v=v, **__: v, ENVIRONMENT) for name, v in (
        ("reward", Reply(done=True, reward=1e308)), ("recursive", Reply((RECURSIVE,))), ("text", Reply("so")),
        ("no-role", Reply(({"content": "so"},))), ("endless", Reply(count(), done=True)),
    )),
    ("group", "values-endless", lambda *_, **__: count(), REWARD),
    ("group", "values-few", lambda *_, **__: [1.0], REWARD),
    ("group", "values-bad", lambda *_, **__: [1.0, 1e308], REWARD),
    ("env.create", "message-deep", lambda *_, **__: [{"role": "user", "content": "?", "more": DEEP}], None),
    ("env.create", "message-recursive", lambda *_, **__: [{"role": "user", "content": "?", "more": RECURSIVE}], None),
]  # fmt: skip


class Judge(Reward):
    name = "judge"

    def __init__(self, act):
        self.act = act

    async def score(self, sample):
        return await on_bad(self.act, sample.task, 0.25, sample)


class Rank(GroupReward):
    name = "rank"

    def __init__(self, act):
        self.act = act

    async def score(self, samples):
        return await on_bad(self.act, samples[0].task, [0.5] * len(samples), samples)


async def on_bad(act, task, usual, *args, **kwargs):
    """What a hook does: `act` for the bad task alone."""
    if act is None or task.id != BAD:
        return usual
    result = act(*args, **kwargs)
    return await result if asyncio.iscoroutine(result) else result


def hook_of(act, usual):
    async def hook(session, *args, **kwargs):
        return await on_bad(act, session.task, usual, session, *args, **kwargs)

    return hook


def troupe(hook, act, hooks, script, limits):
    """A driver whose one bad plugin is that of `hook`."""
    usual = {
        "env.create": [{"role": "user", "content": "?"}], "env.execute": Reply(done=True), "env.calc_reward": 1.0,
        "env.release": None, "tool.create": None, "tool.execute": ToolResponse("ok", metrics={"hits": 1.0}),
        "tool.calc_reward": {"style": 0.125}, "tool.release": None,
    }  # fmt: skip
    acts = {name: hook_of(act if name == hook else None, value) for name, value in usual.items()}
    env, tool = (
        kind(hooks, **{name.partition(".")[2]: a for name, a in acts.items() if name.startswith(which)})
        for kind, which in ((Env, "env."), (Echo, "tool."))
    )
    plain = make_driver(ScriptedEngine(script), env, [tool], concurrency=2, **limits)
    rewards = Rewards({"judge": Judge(act if hook == "sample" else None)},
                      {"rank": Rank(act if hook == "group" else None)}, {})  # fmt: skip
    scorer = Scorer(rewards, plain.limits.turn_timeout)
    return Driver(
        engine=plain.engine, chat=plain.chat, environment=env, tools=[tool], limits=plain.limits, scorer=scorer
    )


def two_turns(_, turn):
    return call("echo") if turn == 0 else "4"


def strict(line):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def agree(groups, hooks, folder, failed):
    """The counts of groups, metrics, journal and hooks agree; `failed` samples of the bad task did, by boundary."""
    metrics = rollout_metrics(groups)
    RunFolder(folder).append_metrics({"step": 1, **metrics})
    (row,) = map(strict, (folder / "metrics.jsonl").read_text().splitlines())
    assert "not_finite" not in row
    Journal(TrajectoriesSection(), lambda: folder).step(1, groups)
    lines = read_records(folder / "step_1.parquet")
    by = Counter(line["failure"]["boundary"] for line in lines if line["failure"])
    assert by == Counter({str(boundary): n for boundary, n in failed.items()})
    lost = sum(failed.values())
    assert len(lines) == sum(row[f"stop/{reason}"] for reason in FinishReason) == 2 * N
    assert (
        (row["rollout/failed"], row["rollout/trajectories"])
        == (row["stop/error"], 2 * N - lost)
        == (lost, 2 * N - lost)
    )
    assert {name: n for name, n in row.items() if name.startswith("rollout/failed/")} == {
        f"rollout/failed/{boundary}": n for boundary, n in by.items()
    }
    assert {line["task"] for line in lines if line["failure"]} <= {BAD}
    assert all(not any(line["rewards"]) for line in lines if line["failure"])
    assert hooks.total("env", "create") == hooks.total("env", "release") == 2 * N + row["rollout/retried"]
    assert hooks.total("echo", "create") == hooks.total("echo", "release")
    hooks.check()
    return row, lines


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(hooks_module, "RELEASE_SECONDS", 0.05)
    for module in (hooks_module, timer):
        monkeypatch.setattr(module, "GRACE", 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "name", "act", "boundary"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_fault_of_a_plugin_costs_its_own_samples_and_is_counted(hook, name, act, boundary, tmp_path, hasty):
    hooks = Hooks()
    waits = name == "hang"
    driver = troupe(hook, act, hooks, two_turns, FUSSY if waits else {"retries": 1})
    groups = run(roll_out(driver, [Task(BAD, {}), Task(GOOD, {})], N))
    row, lines = agree(groups, hooks, tmp_path, {boundary: N} if boundary else {})
    bad = [line for line in lines if line["task"] == BAD]
    for line in bad if boundary else ():
        assert line["failure"]["message"]
        assert "\n" not in line["failure"]["message"]
        assert len(line["failure"]["message"]) < 700
    retried = boundary and not waits and hook != "group"
    assert row["rollout/retried"] == (N if retried else 0)
    told = [m["content"] for line in bad for m in line["messages"] if m["role"] == "tool"]
    if hook == "tool.execute" and boundary is None and name not in ("text", "response-metrics-none"):
        assert len(told) == N
        assert all(text.startswith("Error: ") for text in told)
        assert row["tool/echo/errors"] == N
    misdone = hook.endswith(".release") and name in (*RAISED, *CANCELS)
    assert row["rollout/release_errors"] == (N if misdone else 0)


DATA = {
    "recursive": {"data": RECURSIVE}, "deep": {"data": DEEP}, "nan": {"x": float("nan"), "y": [float("inf")]},
    "huge": {"x": 10**5000}, "mixed": {1: 2, "a": {None: 3}}, "long": {"x": range(10**9)},
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_task_data_of_any_kind_is_played_and_written_down(name, tmp_path, hasty):
    hooks = Hooks()
    driver = troupe("", None, hooks, two_turns, {})
    groups = run(roll_out(driver, [Task(BAD, DATA[name]), Task(GOOD, {})], N))
    agree(groups, hooks, tmp_path, {})


@pytest.mark.parametrize("depth", [600, 100_000])
def test_a_call_of_nested_brackets_is_told_to_the_model(depth, tmp_path, hasty):
    def script(name, turn):
        nested = f'<call>echo {{"text": {"[" * depth}{"]" * depth}}}</call>'
        return two_turns(name, turn) if name.startswith(GOOD) or turn else nested

    hooks = Hooks()
    limits = {"max_turn_tokens": 300_000, "max_tokens": 1_000_000}
    groups = run(roll_out(troupe("", None, hooks, script, limits), [Task(BAD, {}), Task(GOOD, {})], N))
    row, lines = agree(groups, hooks, tmp_path, {})
    told = [m["content"] for line in lines if line["task"] == BAD for m in line["messages"] if m["role"] == "tool"]
    assert len(told) == N
    assert all(text.startswith("Error: ") for text in told)
    assert row["tool/echo/errors"] == N


def by_hand(kind):
    def handler(number, frame):
        raise kind(number)

    return handler


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("task", [False, True], ids=["in the hook", "in a task of its own"])
def test_what_the_handler_of_a_signal_raises_ends_the_run_wherever_it_comes(kind, task, hasty):
    async def sends(*_, **__):
        os.kill(os.getpid(), signal.SIGUSR1)

    async def in_a_task(*_, **__):
        await asyncio.create_task(sends())

    former = signal.signal(signal.SIGUSR1, by_hand(kind))
    try:
        with pytest.raises(kind):
            run(
                roll_out(
                    troupe("tool.execute", in_a_task if task else sends, Hooks(), two_turns, {}), [Task(BAD, {})], N
                )
            )
    finally:
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize("act", CANCELS)
def test_a_tool_that_cancels_itself_beside_another_call_fails_its_sample(act, tmp_path, hasty):
    def script(name, turn):
        return call("echo") * 2 if turn == 0 else "4"

    hooks = Hooks()
    driver = troupe("tool.execute", CANCELS[act], hooks, script, {"retries": 0})
    groups = run(roll_out(driver, [Task(BAD, {}), Task(GOOD, {})], N))
    _, lines = agree(groups, hooks, tmp_path, {TOOL: N})
    assert all("echo.execute: it cancelled the task" in line["failure"]["message"] for line in lines if line["failure"])


def test_an_engine_and_a_chat_that_exit_fail_their_requests(tmp_path, hasty):
    hooks = Hooks()
    driver = troupe("", None, hooks, two_turns, {"retries": 0})
    driver.engine.finish = raises_at_once
    driver.chat.parse = raises_at_once
    groups = run(roll_out(driver, [Task(BAD, {})], 2 * N))
    agree(groups, hooks, tmp_path, {Boundary.INFRASTRUCTURE: 2 * N})
    assert all("SystemExit" in t.extra["engine_finish"] for group in groups for t in group.failed)


def test_the_loop_gives_what_its_own_work_raises():
    with pytest.raises(SystemExit):
        run(raises(SystemExit, 5)())


@pytest.mark.parametrize("act", [name for name in (*RAISED, *CANCELS, *VALUES) if name != "hang"])
def test_prompts_are_measured_whatever_create_does(act, hasty):
    does = {**RAISED, **CANCELS, **{name: lambda *_, v=v, **__: v for name, v in VALUES.items()}}[act]
    env = Env(create=hook_of(does, [{"role": "user", "content": "?"}]))
    lengths = run(measure_prompts(env, [], CharChat(), [Task(BAD, {}), Task(GOOD, {})], 100))
    assert lengths.lengths[0] == 0 or act == "self-cancel-at-end"
    assert lengths.lengths[1] > 0


def test_what_a_plugin_does_to_the_event_loop_is_one_line_that_names_it(caplog: pytest.LogCaptureFixture) -> None:
    async def dies() -> None:
        raise KeyError("in the background")

    async def work() -> int:
        asyncio.get_running_loop().stop()
        for _ in range(2):
            asyncio.create_task(dies())  # noqa: RUF006
            await asyncio.sleep(0.01)
        return 3

    async def cancelled() -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(1)

    assert run(work()) == 3
    said = [record.message for record in caplog.records if record.name == "agentrl.plugins"]
    assert [line.partition(" stops the event loop")[1] != "" for line in said] == [True, False]
    assert "dies) raised KeyError: 'in the background'" in said[1]
    with pytest.raises(
        UserError, match=r"cancelled \(test_plugin_faults.py:\d+\) cancelled the task that the run is in"
    ):
        run(cancelled())
