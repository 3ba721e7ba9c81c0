"""`release` comes exactly once for every `create` that was begun: after success, failure, deadline and cancellation."""

import asyncio

import pytest
from fakes import TASK, Echo, Env, Hooks, ScriptedEngine, call, make_driver
from processes import eventually

from agentrl.containment import deadline as timer
from agentrl.rollout import hooks as hooks_module
from agentrl.rollout.request import RequestState


async def hang(*_, **__):
    await asyncio.Event().wait()


async def cancel_when(driver, request, reached):
    driving = asyncio.create_task(driver.drive(request))
    await eventually(reached)
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving


async def test_the_environment_comes_first_and_is_released_last():
    order = []

    def note(name):
        return lambda session, **_: order.append(name)

    env = Env(create=lambda session: order.append("+env") or [{"role": "user", "content": "?"}], release=note("-env"))
    tools = [Echo(name=n, create=note(f"+{n}"), release=note(f"-{n}")) for n in ("a", "b")]
    driver = make_driver(["4"], env, tools)
    await driver.drive(driver.request(TASK, 0))
    assert order == ["+env", "+a", "+b", "-b", "-a", "-env"]


@pytest.mark.parametrize("where", ["env.create", "a.create", "generate", "a.execute", "env.execute", "env.calc_reward"])
async def test_cancelled_anywhere_it_releases_what_was_begun(where):
    hooks = Hooks()
    plugin, _, hook = where.partition(".")
    env = Env(hooks, **({hook: hang} if plugin == "env" else {}))
    tool = Echo(hooks, name="a", **({hook: hang} if plugin == "a" else {}))
    engine = ScriptedEngine([call("a"), "4"], seconds=60 if where == "generate" else 0)
    driver = make_driver(engine, env, [tool])
    request = driver.request(TASK, 0)
    await cancel_when(driver, request, lambda: hooks.total(plugin, hook) or engine.stopping)
    hooks.check()
    assert hooks.total("a", "create") == (0 if where == "env.create" else 1)
    assert (request.state, engine.finished[request.id]) == (RequestState.ABORTED, 1)


async def test_cancelled_while_two_tools_run_it_ends_both():
    ended = []

    async def wait(session, **_):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    hooks = Hooks()
    driver = make_driver([call("a") * 2], Env(hooks), [Echo(hooks, name="a", execute=wait)])
    await cancel_when(driver, driver.request(TASK, 0), lambda: hooks.total("a", "execute") == 2)
    assert ended == [1, 1]
    hooks.check()


async def test_a_release_goes_on_when_its_request_is_cancelled_twice():
    hooks, released = Hooks(), []

    async def slowly(session, **_):
        await asyncio.sleep(0.05)
        released.append(1)

    driver = make_driver(["4"], Env(hooks, execute=hang, release=slowly))
    driving = asyncio.create_task(driver.drive(driver.request(TASK, 0)))
    for _ in range(3):
        await asyncio.sleep(0.01)
        driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    assert released == [1]
    hooks.check()


async def test_cancelled_in_its_release_it_is_aborted():
    hooks = Hooks()
    over, released = asyncio.Event(), []

    async def slowly(session, **_):
        await over.wait()
        released.append(1)

    driver = make_driver(["4"], Env(hooks, release=slowly))
    request = driver.request(TASK, 0)
    driving = asyncio.create_task(driver.drive(request))
    await eventually(lambda: hooks.total("env", "release"))
    driving.cancel()
    await asyncio.sleep(0)
    over.set()
    with pytest.raises(asyncio.CancelledError):
        await driving
    assert released == [1]
    assert request.state is RequestState.ABORTED
    hooks.check()


async def test_a_release_that_raises_or_hangs_is_said_and_the_others_follow(monkeypatch):
    monkeypatch.setattr(hooks_module, "RELEASE_SECONDS", 0.02)
    hooks = Hooks()
    tools = [Echo(hooks, name="a", release=RuntimeError("stuck")), Echo(hooks, name="b", release=hang)]
    driver = make_driver(["4"], Env(hooks), tools)
    t = await driver.drive(driver.request(TASK, 0))
    assert t.valid
    assert t.extra["release_errors"] == ("b.release: took longer than 0.02 s", "a.release: RuntimeError: stuck")
    hooks.check()


async def test_a_release_that_ignores_its_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr(hooks_module, "RELEASE_SECONDS", 0.01)
    monkeypatch.setattr(hooks_module, "GRACE", 0.01)
    monkeypatch.setattr(timer, "GRACE", 0.01)
    over = asyncio.Event()

    async def stubborn(session, **_):
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    driver = make_driver(["4"], Env(release=stubborn))
    t = await driver.drive(driver.request(TASK, 0))
    assert t.valid
    assert "left behind" in t.extra["release_errors"][0]
    over.set()


async def test_create_that_fails_half_way_releases_what_came_before_and_itself():
    hooks = Hooks()
    tools = [Echo(hooks, name=n, create=RuntimeError("no") if n == "b" else None) for n in ("a", "b", "c")]
    driver = make_driver(["4"], Env(hooks), tools)
    await driver.drive(driver.request(TASK, 0))
    assert [hooks.total(n, "release") for n in ("env", "a", "b", "c")] == [1, 1, 1, 0]
    assert hooks.total("env", "calc_reward") == 0


async def test_sessions_are_per_plugin_with_a_random_stream_that_repeats():
    seen = {}

    def note(name, result=None):
        def act(session, **_):
            session.state = name
            seen.setdefault(name, []).append((session.rng.random(), session.id))
            return result

        return act

    states = []
    env = Env(
        create=note("env", [{"role": "user", "content": "?"}]), calc_reward=lambda s: states.append(s.state) or 1.0
    )
    tool = Echo(create=note("tool"), calc_reward=lambda s: states.append(s.state))
    driver = make_driver(["4"] * 4, env, [tool])
    for sample in (0, 1, 0):
        await driver.drive(driver.request(TASK, sample, seed=3))
    assert states == ["env", "tool"] * 3
    first = [[number for number, _ in seen[name]] for name in ("env", "tool")]
    assert [numbers[0] == numbers[2] for numbers in first] == [True, True]
    assert len({numbers[i] for numbers in first for i in (0, 1)}) == 4
    assert len({i for _, i in seen["env"]}) == 3
