"""verifiers 0.4 (`verifiers.v1`): tasksets, harnesses and environments, played by their own code.

Each agent of an episode talks to the gateway under the rollout's key. An environment with several seats, or several
runs of one, says by a header which seat a call is for, and that what an untrainable seat samples is not trained.
"""

import asyncio
import contextlib
import copy
import itertools
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from verifiers import v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

ROLE = "X-Agentrl-Role"
TRAIN = "X-Agentrl-Train"
_keys = itertools.count()


class Adapter:
    """config: the environment's, as `[env]` of a run of verifiers: `taskset: {id: ...}`, `id`, seats by name. splits:
    what the taskset's config is for each held-out split (`{test: {split: test}}`); without any, the last `held_out`
    tasks, a fifth at most, are `test`. most: tasks of a taskset that is infinite. path: a folder to import from."""

    def __init__(
        self,
        config: dict[str, Any],
        splits: dict[str, dict[str, Any]] | None = None,
        held_out: int = 64,
        most: int = 10_000,
        path: str = "",
    ) -> None:
        if path:
            sys.path.insert(0, os.path.abspath(path))
            os.environ["PYTHONPATH"] = os.path.abspath(path)  # of the tool servers that it starts
        self.config = config
        self.env = load_environment(_config(config))
        self.tasks: dict[str, _Tasks] = {}
        if splits:
            self.tasks["train"] = _Tasks(self.env.taskset, most)
            for split, changes in splits.items():
                taskset = {**config.get("taskset", {}), **changes}
                self.tasks[split] = _Tasks(load_environment(_config({**config, "taskset": taskset})).taskset, most)
        else:
            every = _Tasks(self.env.taskset, most)
            first = len(every) - min(held_out, len(every) // 5)
            self.tasks["train"], self.tasks["test"] = every.part(0, first), every.part(first, len(every))
        self.serving: contextlib.AsyncExitStack | None = None
        self.starting = asyncio.Lock()

    def describe(self) -> dict[str, Any]:
        """See docs/foreign.md."""
        return {
            "name": self.env.config.env_id.replace("/", "-"),
            "splits": {split: len(tasks) for split, tasks in self.tasks.items()},
            "cannot": {
                "turn rewards": "verifiers scores whole traces",
                "token ids": "its train client's own tokens are not used: the gateway's are",
            },
        }

    def task(self, split: str, index: int) -> dict[str, Any]:
        """A task's data, and its opening as messages."""
        data = self.tasks[split][index].data
        prompt = data.prompt if data.prompt is not None else ""
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message.model_dump(mode="json", exclude_none=True) for message in prompt]
        )
        if data.system_prompt:
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        row = data.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        return {**row, "id": f"{split}-{data.idx}", "messages": messages}

    async def play(self, task: dict[str, Any], client: dict[str, Any]) -> dict[str, Any]:
        """One episode: the rewards of what is trained, its metrics, and each seat's rewards."""
        async with self.starting:
            if self.serving is None:
                serving = contextlib.AsyncExitStack()
                await serving.enter_async_context(self.env.serving())
                self.serving = serving
        with _key(client["api_key"]) as variable:
            endpoint = vf.EvalClientConfig(base_url=client["base_url"], api_key_var=variable)
            context = vf.ModelContext(model=client["model"], client=endpoint)
            episode = await _seated(self.env).run_episode(self.tasks[task["split"]][task["index"]], context)
        if not episode.ok:
            raise RuntimeError(_why(episode))
        return _result(episode, _seats(self.env))


def _config(config: dict[str, Any]) -> Any:
    """The config of an environment, its plugins resolved. Seats run on this machine unless they say where."""
    data = resolve_env_config(copy.deepcopy(config))
    for name, seat in _agents(data):
        if "runtime" not in (config.get(name) or {}):
            setattr(data, name, seat.model_copy(update={"runtime": vf.SubprocessConfig()}))
    return data


def _agents(config: Any) -> list[tuple[str, Any]]:
    """The seats of an environment's config."""
    return [(name, value) for name, value in config if isinstance(value, vf.AgentConfig)]


def _seats(env: Any) -> bool:
    """Whether seats are told apart: one that plays once needs no name."""
    return not isinstance(env, vf.SingleAgentEnv)


class _Tasks:
    """The tasks of a taskset by number, read as far as they are needed where it is infinite."""

    def __init__(self, taskset: Any, most: int, bounds: tuple[int, int] | None = None) -> None:
        self._source: Iterator[Any] = iter(taskset)
        self._read: list[Any] = []
        if taskset.bounded:
            self._read = list(self._source)
            most = len(self._read)
        self._first, self._end = bounds or (0, most)

    def part(self, first: int, end: int) -> "_Tasks":
        part = copy.copy(self)
        part._first, part._end = first, end
        return part

    def __len__(self) -> int:
        return self._end - self._first

    def __getitem__(self, index: int) -> Any:
        number = self._first + index
        while len(self._read) <= number:
            self._read.append(next(self._source))
        return self._read[number]


@contextlib.contextmanager
def _key(key: str) -> Iterator[str]:
    """The name of an environment variable that holds a rollout's key, which is how verifiers takes one."""
    name = f"AGENTRL_API_KEY_{next(_keys)}"
    os.environ[name] = key
    try:
        yield name
    finally:
        os.environ.pop(name, None)


def _seated(env: Any) -> Any:
    """The environment for one episode, whose agents say for which seat they call."""
    if not _seats(env):
        return env
    own = copy.copy(env)
    make = env._episode_agents
    own._episode_agents = lambda *args, **kwargs: _with_seats(make(*args, **kwargs))
    return own


def _with_seats(agents: Any) -> Any:
    agents._agents = {name: _Seat(name, agent) for name, agent in agents._agents.items()}
    return agents


class _Seat:
    """An agent, whose every run calls for a seat of its own: `solver`, then `solver-2`."""

    def __init__(self, name: str, agent: Any) -> None:
        self.__dict__.update(_name=name, _agent=agent, _runs=itertools.count(1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._agent, name, value)

    def _seated(self) -> tuple[Any, str]:
        number = next(self._runs)
        seat = self._name if number == 1 else f"{self._name}-{number}"
        agent = copy.copy(self._agent)
        client = agent.ctx.client
        headers = {**client.headers, ROLE: seat, **({} if agent.trainable else {TRAIN: "0"})}
        if client.api_key_var.startswith("AGENTRL_API_KEY_"):  # else the seat has a model of its own
            agent.ctx = vf.ModelContext(
                agent.ctx.model, client.model_copy(update={"headers": headers}), agent.ctx.sampling
            )
        return agent, seat

    async def run(self, task: Any, **options: Any) -> Any:
        agent, seat = self._seated()
        trace = await agent.run(task, **options)
        trace.info["agentrl_seat"] = seat
        return trace

    @contextlib.asynccontextmanager
    async def provision(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        async with self._agent.provision(*args, **options) as box:
            try:
                yield box
            finally:  # a run in it says that it is borrowed, and verifiers 0.4 does not remove what is
                box.info.borrowed = False

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator[Any]:
        agent, seat = self._seated()
        async with agent.interaction(task, **options) as interaction:
            interaction.trace.info["agentrl_seat"] = seat
            yield interaction


def _why(episode: Any) -> str:
    """Say the first error of the runs in an episode that is not valid, and its own, which often follows from that."""
    errors = [*[error for trace in episode.traces for error in trace.errors][:1], *episode.errors[:1]]
    return "; ".join(f"{e.type}: {e.message}" for e in errors) or "the episode is not valid, and says no error"


def _result(episode: Any, seats: bool) -> dict[str, Any]:
    """Rewards, metrics and seats of an episode: means over the traces that are trained, and each one's own."""
    trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    result: dict[str, Any] = {
        "rewards": _means([{n: r.value for n, r in trace.rewards.items() if r is not None} for trace in trained]),
        "metrics": _means([{n: m for n, m in trace.metrics.items() if m is not None} for trace in trained]),
    }
    if seats:
        result["seats"] = {trace.info["agentrl_seat"]: trace.reward for trace in trained}
    return result


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}
