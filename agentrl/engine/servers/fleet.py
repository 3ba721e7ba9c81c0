"""`Fleet`: the servers of a run. It launches and admits them, monitors those that have requests, takes out one that
fails, and lets it in again once it is healthy and holds the weights of the trainer's current step.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.engine.servers.adapters import AdapterNeeds, why_merged
from agentrl.engine.servers.admission import Admission
from agentrl.engine.servers.client import Client, LateError, LostAdapterError, ServerError, Sessions
from agentrl.engine.servers.identity import ServerFacts
from agentrl.engine.servers.kind import ServerKind
from agentrl.engine.servers.launch import LaunchPlan, nccl_installed, plain_flags, venv_of
from agentrl.engine.servers.pool import Member, Pool
from agentrl.engine.servers.remote import RemoteNodes, RemoteServer
from agentrl.engine.servers.server import LaunchedServer, Server
from agentrl.engine.servers.settings import Settings
from agentrl.engine.servers.sync import Sync
from agentrl.errors import UserError
from agentrl.weights.kinds import folder_for
from agentrl.weights.scratch import LOGS, Scratch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FAULTS = 3
"""Failed requests in a row that take a server out although it answers."""
ALIVE_SECONDS, UPDATE_SECONDS = 5.0, 30.0
"""Time for a server to answer when a request on it failed, and before an update, each twice. An event loop of ours that
stands still does not shorten it."""
LATE_SECONDS = 1.0
"""Delay of the monitor from which on the event loop stood still, not the servers."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 30.0
"""Shortest and longest time between two tries to bring a server back."""


class Fleet:
    """kind: what the servers speak. plan: how to launch servers; None where `settings.urls` names them.
    adapter: what the run's adapter needs of them. cluster: address of the Ray cluster that has other machines.
    limit: requests in flight on one server. say, phase: called with lines that stay, and with what goes on. shared:
    whether servers on the cluster's machines share GPUs with the run's workers."""

    def __init__(
        self,
        kind: ServerKind,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        settings: Settings,
        plan: LaunchPlan | None,
        adapter: AdapterNeeds | None,
        cluster: str | None,
        limit: int,
        say: Callable[[str], None],
        phase: Callable[[str], None],
        shared: bool = False,
    ) -> None:
        self._shared = shared
        self._kind, self._program = kind, kind.plan.program
        self._settings, self._plan, self._say, self._phase = settings, plan, say, phase
        self._adapter = adapter
        self._sessions = Sessions(settings.key(plan, self._program.key_variable))
        self._logs, self._weights = Scratch(LOGS), folder_for(self._program.name, model)
        self._launched: list[LaunchedServer] = []
        self._servers: dict[Member, LaunchedServer] = {}
        self._cluster = cluster
        self._remote: RemoteNodes | None = None
        self._restarts: dict[Member, int] = {}
        self._recovering: dict[Member, asyncio.Task[None]] = {}
        self._monitor: asyncio.Task[None] | None = None
        self._all_out_since: float | None = None
        self.pool = Pool((Member(Client(url, self._sessions)) for url in settings.urls), limit)
        self.sync = Sync(self._program.name, model, self._sessions, self._weights.path, settings.weights, say)
        self._admission = Admission(kind, model, tokenizer, self.sync, say, settings.start_timeout)
        self.version = 0
        self._epoch = 0  # counts updates: a server that was sent weights before one is not let in after it
        self.max_context = 0
        self.paused = False  # no sign of life is expected

    @property
    def mark(self) -> tuple[int, int, bool]:
        """What is the same at two times only if no weights were sent in between."""
        return self._epoch, self.version, self.paused

    async def start(self) -> None:
        """Start and admit all servers. Raises UserError, one line; then nothing that was launched is left."""
        try:
            if self._plan is not None:
                await self._launch(self._plan)
            members = self.pool.members
            facts = await asyncio.gather(*(self._admission.identify(member.client) for member in members))
            self._choose_content(facts)
            await asyncio.gather(*map(self._admit_first, members, facts))
        except ServerError as error:
            await self.close()
            raise UserError(f"engine: {error}") from error
        except BaseException:
            await self.close()
            raise
        self.max_context = min(f.max_context for f in facts)
        where = self._launched_where() if self._plan else "at " + ", ".join(m.url for m in self.pool.members)
        seeds = "" if all(f.features.seeds for f in facts) else ", without seeds (no deterministic inference)"
        self._say(f"engine: {len(facts)} {self._program.title} {facts[0].version} server(s) {where}{seeds}")

    async def _launch(self, plan: LaunchPlan) -> None:
        logs = Path(self._settings.log_dir) if self._settings.log_dir else self._logs.path()
        name, title = self._program.name, self._program.title
        count, nodes, where = self._settings.servers, self._settings.remote_nodes, f"output in {logs}"
        files = [logs / f"{name}_{i}.log" for i in range(count)]
        servers: list[LaunchedServer]
        if nodes:
            assert self._cluster is not None  # `Settings.plan` has seen to it
            ranks = self._kind.launched(count, plain_flags(self._settings.flags)).ranks
            self._remote = remote = RemoteNodes(self._cluster, count, nodes, ranks, self._shared, self._settings.parts)
            servers, where = [RemoteServer(remote, plan, i, file) for i, file in enumerate(files)], f"{where} there"
            title = f"{title} server(s) on {nodes} {'' if self._shared else 'other '}machine(s)"
        else:
            servers, title = (
                [Server(plan, i, file, self._sessions) for i, file in enumerate(files)],
                f"{title} server(s)",
            )
        self._say(f"engine: starting {len(servers)} {title}, {where}")
        self._launched = servers
        await _all(*(s.start(self._settings.start_timeout, self._phase_of(i)) for i, s in enumerate(servers)))
        for server in servers:
            member = Member(Client(server.url, self._sessions))
            self._servers[member] = server
            self.pool.members.append(member)
            self._know(server)
        if (venv := venv_of(plan.command)) is not None:
            self.sync.nccl = nccl_installed(venv)

    def _know(self, server: LaunchedServer) -> None:
        """Say where the server at this address is: who shares its GPU sends to it."""
        if server.places:
            self.sync.places[server.url] = server.places

    def _launched_where(self) -> str:
        if self._remote is not None:
            return f"launched with a key, at {', '.join(member.url for member in self.pool.members)}"
        return f"launched, on {self._plan.host} with a key" if self._plan and self._plan.key else "launched"

    def _phase_of(self, index: int) -> Callable[[str], None]:
        return lambda line: self._phase(f"starting {self._program.name} server {index}: {line}")

    def _choose_content(self, facts: Sequence[ServerFacts]) -> None:
        if self._adapter is None:
            return
        rooms = [(m.url, f.adapters) for m, f in zip(self.pool.members, facts, strict=True)]
        reason = why_merged(self._adapter, rooms)
        if reason is None:
            self.sync.adapt([url for url, _ in rooms] if self._plan is None else [])
        else:
            self._say(f"engine: the adapter is merged, and whole weights are sent: {reason}")

    async def _admit_first(self, member: Member, facts: ServerFacts) -> None:
        await self._admission.first(member.client, facts, self.version)
        member.features = facts.features
        self.pool.let_in(member)

    def monitor(self) -> None:
        """Start the health monitor, unless it runs in this event loop."""
        monitor = self._monitor
        if monitor is None or monitor.done() or monitor.get_loop() is not asyncio.get_running_loop():
            self._recovering.clear()
            self._monitor = asyncio.create_task(self._monitor_health(), name="agentrl-server-health")

    async def report_failure(self, member: Member, error: ServerError) -> None:
        """Take a server on which a request failed out, if it is gone or failed too often."""
        if member.out is not None:
            return
        if not isinstance(error, LateError):  # a connection takes long also where this event loop stands still
            member.faults += 1
        server = self._servers.get(member)
        if server is not None and not server.running:
            self._take_out(member, f"it ended: {server.reason()}")
        elif member.faults >= FAULTS or isinstance(error, LostAdapterError):
            self._take_out(member, str(error))
        else:
            await self._check_alive(member, error)

    async def _check_alive(self, member: Member, why: ServerError) -> None:
        """Take out a server that does not answer."""
        if await self._asked(member, ALIVE_SECONDS) is not None:
            self._take_out(member, str(why))

    async def _check_before_update(self, member: Member) -> None:
        """Take out a server that has ended or refuses to answer. One that is merely late is sent the weights, which has
        a deadline of its own."""
        server = self._servers.get(member)
        if server is not None and not server.running:
            self._take_out(member, f"it ended: {server.reason()}")
            return
        error = await self._asked(member, UPDATE_SECONDS)
        if error is not None and not isinstance(error, LateError):
            self._take_out(member, str(error))

    async def _asked(self, member: Member, seconds: float) -> ServerError | None:
        """Ask a server for a sign of life, twice where it is late. Returns why there is none."""
        error: ServerError | None = None
        for _ in range(2):
            try:
                await member.client.check_answers(self._kind.alive, timeout=seconds)
            except LateError as late:
                error = late
            except ServerError as found:
                return found
            else:
                return None
        return error

    async def update(self, version: int, mode: str) -> None:
        """Send our weights to every server that is up; one that does not take them whole is out. Raises UserError when
        none is left."""
        self._epoch += 1
        await asyncio.gather(*map(self._check_before_update, self.pool.up))
        members = self.pool.up
        self.paused = True
        try:
            keep = {m.url: frozenset(c.adapter for c in m.calls if c.adapter) for m in members}
            failed = await self.sync.send([m.client for m in members], version, mode, keep) if members else {}
        finally:
            self.paused = False
        self.version = version
        now = time.monotonic()
        for member in members:
            member.last_seen = now
        self._out_of(members, failed, f"the weights of step {version} did not arrive whole")
        self._end_broken(failed)
        if not self.pool.up:
            raise UserError(f"engine: no server has the weights of step {version}: {self.reasons()}")

    async def sleep(self) -> None:
        """Have every server pause and release its memory; one that does not is out."""
        self.paused = True
        self._out_of(self.pool.up, await self.sync.sleep([m.client for m in self.pool.up]), "it did not go to sleep")

    async def wake(self) -> None:
        """Have every server take its memory back; one that cannot serve is out until the next update."""
        self._out_of(self.pool.up, await self.sync.wake(), "it did not wake")
        self.paused = False

    def _out_of(self, members: Sequence[Member], failed: Mapping[str, str], what: str) -> None:
        for member in members:
            if why := failed.get(member.url):
                self._take_out(member, f"{what}: {why}")

    def _end_broken(self, failed: Mapping[str, str]) -> None:
        """End launched servers that take no weights any more once an update has failed: they are started again."""
        for member, server in self._servers.items():
            if self._kind.breaks and member.url in failed and server.running:
                server.kill()

    def keep_logs(self, folder: Path) -> None:
        """Move the logs of launched servers, which go on, to `folder`, unless the recipe says where they lie."""
        if self._settings.log_dir is None:
            for server in self._launched:
                server.move_log(_free(folder, server.log.stem))

    def reasons(self) -> str:
        """Say why each server that is out is."""
        return "; ".join(f"{m.url}: {m.out}" for m in self.pool.members if m.out is not None)

    async def close(self) -> None:
        for task in (self._monitor, *self._recovering.values()):
            if task is not None and not task.get_loop().is_closed():
                task.cancel()
        await self.sync.close()
        await asyncio.gather(*(server.stop() for server in self._launched))
        if self._remote is not None:
            self._remote.close()
        await self._sessions.close()
        self._weights.close()
        self._logs.close()

    def kill(self) -> None:
        """End what was launched, at once and without an event loop."""
        for server in self._launched:
            server.kill()

    def _take_out(self, member: Member, why: str) -> None:
        if member.out is None:
            self._say(f"engine: {member.url} is taken out: {why}")
            self.pool.take_out(member, why)

    async def _monitor_health(self) -> None:
        """Take out servers that stall and bring others back, while requests are in flight or a server is out."""
        tick, last = min(1.0, self._settings.stall / 4), time.monotonic()
        while self.pool.in_flight or self.pool.waiting or len(self.pool.up) < len(self.pool.members):
            now = time.monotonic()
            if now - last > tick + LATE_SECONDS:  # the event loop stood still, not the servers
                for member in self.pool.members:
                    member.last_seen = now
            last = now
            self._take_out_stalled(now)
            for member in self.pool.members:
                task = self._recovering.get(member)
                if member.out is not None and (task is None or task.done()) and self._recoverable(member):
                    self._recovering[member] = asyncio.create_task(self._bring_back(member))
            self._give_up_waiting()
            for server in self._servers.values():
                server.shorten_log()
            await asyncio.sleep(tick)

    def _take_out_stalled(self, now: float) -> None:
        for member in self.pool.up:
            if self.paused or not member.calls:
                continue
            silent = now - max(member.last_seen, max(call.start for call in member.calls))
            if silent > self._settings.stall:
                self._take_out(member, f"no sign of life for {silent:.0f} seconds, with {len(member.calls)} requests")

    def _recoverable(self, member: Member) -> bool:
        """Whether a server that is out may come back; one that we did not launch always may."""
        server = self._servers.get(member)
        return server is None or server.running or self._restarts.get(member, 0) < self._settings.restarts

    def _give_up_waiting(self) -> None:
        if self.pool.up or self.paused:
            self._all_out_since = None
            return
        now = time.monotonic()
        self._all_out_since = self._all_out_since or now
        lost = not any(map(self._recoverable, self.pool.members))
        starting = any(m in self._servers and not t.done() for m, t in self._recovering.items())
        if lost or (now - self._all_out_since > self._settings.patience and not starting):
            self.pool.fail_waiting(ServerError(f"no {self._program.title} server is left: {self.reasons()}"))

    async def _bring_back(self, member: Member) -> None:
        """Try until it is in again, at growing intervals."""
        delay = FIRST_RETRY_SECONDS
        while member.out is not None and self._recoverable(member):
            await asyncio.sleep(delay)
            delay = min(LAST_RETRY_SECONDS, 2 * delay)
            try:
                await self._restart_if_ended(member)
                epoch, version = self._epoch, self.version
                facts = await self._admission.again(member.client, version)
                if facts.max_context < self.max_context:
                    raise ServerError(f"{member.url} came back with a context of {facts.max_context} tokens only")
            except (ServerError, UserError) as error:
                member.out = str(error)
                continue
            if epoch == self._epoch:
                member.features = facts.features
                self.pool.let_in(member)
                self._say(f"engine: {member.url} is back, with the weights of step {version}")

    async def _restart_if_ended(self, member: Member) -> None:
        server = self._servers.get(member)
        if server is None or server.running:
            return
        self._restarts[member] = self._restarts.get(member, 0) + 1
        await server.stop()
        await server.start(self._settings.start_timeout, self._phase_of(self._launched.index(server)))
        member.client = Client(server.url, self._sessions)
        self._know(server)


def _free(folder: Path, name: str) -> Path:
    """A path for a log that no file has: a resumed run keeps its earlier logs."""
    names = chain([name], (f"{name}_{i}" for i in count(2)))
    return next(path for path in (folder / f"{n}.log" for n in names) if not path.exists())


async def _all(*work: Coroutine[object, None, None]) -> None:
    """Await all of it; raise the first error once the rest was cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except* (UserError, ServerError) as errors:
        raise errors.exceptions[0] from None
