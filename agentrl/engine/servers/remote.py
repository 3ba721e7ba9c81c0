"""Servers on other machines of a Ray cluster: each is a `Server` in an actor there, with GPUs of its own; one that
computes on several machines is a `Server` on each.

Ray ends the actors with the run, however that ends, and a server ends with its actor's process.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.addresses import url_of
from agentrl.cluster.errors import ClusterError
from agentrl.cluster.placement import names_of
from agentrl.cluster.pool import ResourcePool, cluster_nodes, own_id, spread
from agentrl.cluster.post_mortem import cause_of_death
from agentrl.cluster.session import Session
from agentrl.cluster.spawn import FORWARDED, SPAWN_SECONDS
from agentrl.containment.process_tree import END_SECONDS
from agentrl.engine.servers.client import Sessions
from agentrl.engine.servers.launch import LaunchPlan, Part
from agentrl.engine.servers.server import POLL_SECONDS, LaunchedServer, Server, free_port
from agentrl.errors import UserError
from agentrl.models.download import DOWNLOADING
from agentrl.weights.request import ServerRank, cpu_place

Started = tuple[str, str]
"""URL of a server, and why it did not start (empty: it serves)."""
REASON_SECONDS = 5.0
"""Time for another machine to say why a server ended, or to move its log."""


class ServerHost:
    """The actor of one server. plan: as the controller made it. environment: variables of the controller that servers
    anywhere get. log: file for its output, on this machine. shared: the GPUs that it shares with workers, or its places
    among theirs where they have none, `cpu` (None: it has what Ray gave the actor)."""

    def __init__(
        self,
        plan: LaunchPlan,
        index: int,
        log: str,
        environment: dict[str, str],
        shared: Sequence[int] | None = None,
        cpu: bool = False,
    ) -> None:
        import ray

        os.environ.update(environment)
        given = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        numbers = range(len(given)) if shared is None else shared
        devices = () if cpu else numbers
        here = replace(
            plan, listen=ray.util.get_node_ip_address(), devices=[devices] * (index + 1), cpu=not len(devices)
        )
        names = map(cpu_place, numbers) if cpu else map(str, given) if shared is None else names_of(numbers)
        node = ray.get_runtime_context().get_node_id()
        self._places = tuple(ServerRank(node, name) for name in names)
        self._sessions = Sessions(here.key)
        self._plan, self._index, self._log = here, index, Path(log)
        self._server = Server(here, index, self._log, self._sessions)
        self._doing = ""

    async def meeting(self) -> str:
        """An address of this machine that is free."""
        return url_of(self._plan.host, free_port(self._plan.host)).removeprefix("http://")

    async def start(self, timeout: float, part: Part | None) -> Started:
        """Start the server, or this machine's part of it; of one that answers nothing return when it has ended."""
        plan = replace(self._plan, part=part)
        self._server = Server(plan, self._index, self._log, self._sessions)
        try:
            await self._server.start(timeout, self._do)
        except UserError as error:
            return "", str(error)
        if plan.answers:
            return self._server.url, ""
        return "", await self.ended()

    async def places(self) -> tuple[ServerRank, ...]:
        """Where its ranks on this machine are, as far as it is known."""
        return self._places

    def _do(self, line: str) -> None:
        self._doing = line

    async def doing(self) -> str:
        """What it does as it starts."""
        return self._doing

    async def ended(self) -> str:
        """Wait until the server's process has ended; return why. Shortens its log as long as it runs."""
        while self._server.running:
            await asyncio.sleep(POLL_SECONDS)
            self._server.shorten_log()
        return f"{self._server.reason()} (log: {self._server.log})"

    async def move_log(self, path: str) -> str:
        """Move the log to `path` if this machine has its folder; return where it lies."""
        if Path(path).parent.is_dir():
            self._server.move_log(Path(path))
        return str(self._server.log)

    async def stop(self) -> None:
        """End the server."""
        await self._server.stop()
        await self._sessions.close()


class RemoteNodes:
    """The machines of a cluster, other than this one, that `servers` servers are spread over, and what is reserved
    there for them until `close`. shared: all machines with GPUs, this one too if it has any, or as many on CPUs;
    nothing is reserved, since the workers' GPUs are the servers' too, from the first on.

    address: of the cluster. ranks: GPUs of each server, where the machines have any; else it computes on CPUs. parts:
    machines that each server computes on, which divides nodes, and nodes servers x parts. Raises UserError: the cluster
    cannot be reached, or has no room.
    """

    def __init__(
        self, address: str, servers: int, nodes: int, ranks: int, shared: bool = False, parts: int = 1
    ) -> None:
        self._stack, self._pool, self.parts = ExitStack(), None, parts
        try:
            if not Session.reachable():
                self._stack.enter_context(Session(address))
            if shared:
                self._places = shared_places(servers, nodes, ranks, parts)
                return
            gpu = any(node.total.get("GPU", 0.0) >= 1.0 for node in cluster_nodes() if node.id != own_id())
            pool = ResourcePool(servers * parts, nodes, gpu=gpu, each=ranks // parts, elsewhere=True)
            self._pool = self._stack.enter_context(pool)
            first = enumerate(pool.by_node[::parts])
            self._first_node = [parts * group for group, count in first for _ in range(count)]
        except ClusterError as error:
            self.close()
            raise UserError(f"engine.args.remote_nodes: {error}") from error
        except BaseException:
            self.close()
            raise

    def actor(self, index: int, rank: int, *args: object) -> Any:
        """Start the actor of part `rank` of server `index` with these arguments of `ServerHost`."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._pool is not None:
            where = self._pool.place(self._first_node[index] + rank)
        else:
            node, *shared = self._places[index][rank]
            where = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
            args = (*args, *shared)
        return ray.remote(ServerHost).options(max_restarts=0, **where).remote(*args)

    def close(self) -> None:
        """Release what is reserved."""
        self._stack.close()


def shared_places(servers: int, nodes: int, ranks: int, parts: int) -> list[list[tuple[str, tuple[int, ...], bool]]]:
    """For each part of each server Ray's name of its machine, its GPUs there, and whether there are none: then they
    are its places among the workers. Raises ClusterError where these are not as many machines as the workers are on,
    or one has too few GPUs."""
    found = cluster_nodes()
    on_gpus = [node for node in found if node.total.get("GPU", 0.0) >= 1.0]
    machines = sorted(on_gpus or found, key=lambda node: (node.id != own_id(), node.id))
    machines = machines if on_gpus else machines[:nodes]
    if len(machines) != nodes:
        raise ClusterError(
            "servers that share the workers' GPUs (engine.sleep) are launched on all machines of the cluster with "
            f"GPUs, of which there are {len(machines)}: set remote_nodes and cluster.nodes to that"
        )
    groups, each = [machines[i : i + parts] for i in range(0, nodes, parts)], ranks // parts
    places: list[list[tuple[str, tuple[int, ...], bool]]] = []
    for group, count in zip(groups, spread(servers, len(groups)), strict=True):
        for node in group:
            if on_gpus and (there := int(node.total["GPU"])) < count * each:
                raise ClusterError(f"{count} servers of {each} GPUs do not fit node {node.address}, which has {there}")
        for i in range(count):
            places.append([(node.id, tuple(range(i * each, (i + 1) * each)), not on_gpus) for node in group])
    return places


class RemoteServer(LaunchedServer):
    """Server `index` of a run, on one of `nodes`. log: file for its output there."""

    def __init__(self, nodes: RemoteNodes, plan: LaunchPlan, index: int, log: Path) -> None:
        self._nodes, self._plan, self._index = nodes, plan, index
        self._name = f"engine {plan.program.name}"
        self._actors: list[Any] = []
        self._ended: list[Any] = []  # Ray's references to the reasons why its parts ended
        self.log, self.url = log, ""
        self.places: tuple[ServerRank, ...] = ()

    @property
    def running(self) -> bool:
        """See `LaunchedServer`."""
        import ray

        return bool(self._ended) and Session.reachable() and not ray.wait(self._ended, timeout=0)[0]

    async def start(self, timeout: float, phase: Callable[[str], None]) -> None:
        """See `LaunchedServer`."""
        environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        self._actors = [
            self._nodes.actor(self._index, rank, self._plan, self._index, str(_part_of(self.log, rank)), environment)
            for rank in range(self._nodes.parts)
        ]
        starting = asyncio.ensure_future(self._start(timeout))
        begun, limit = time.monotonic(), timeout + SPAWN_SECONDS
        try:
            while not (await asyncio.wait({starting}, timeout=POLL_SECONDS))[0]:
                if (waited := time.monotonic() - begun) > limit:
                    raise UserError(
                        f"{self._name}: no server on another machine within {limit:g} seconds; see `ray status`, and "
                        "whether every machine has agentrl"
                    )
                phase(doing := await self._doing(waited))
                begun = time.monotonic() if doing.startswith(DOWNLOADING) else begun
            self.url, why = starting.result()
            known = [] if why else [await _answer(actor.places.remote()) for actor in self._actors]
            self.places = tuple(place for of in known for place in of)
        except UserError:
            self.kill()
            raise
        finally:
            starting.cancel()
        if why:
            self.kill()
            raise UserError(f"{why}, on another machine")
        self._ended = [actor.ended.remote() for actor in self._actors]

    async def _start(self, timeout: float) -> Started:
        """Start all parts; what the first says once all serve that answer, or one that does not start."""
        first, count = self._actors[0], len(self._actors)
        meeting = await _answer(first.meeting.remote()) if count > 1 else ""
        parts = [Part(rank, count, meeting) if meeting else None for rank in range(count)]
        asked: list[asyncio.Future[Started]] = [
            asyncio.ensure_future(_answer(actor.start.remote(timeout, part)))
            for actor, part in zip(self._actors, parts, strict=True)
        ]
        answering = [one for one, part in zip(asked, parts, strict=True) if replace(self._plan, part=part).answers]
        try:
            while not all(one.done() for one in answering):
                done, _ = await asyncio.wait(
                    [one for one in asked if not one.done()], return_when=asyncio.FIRST_COMPLETED
                )
                if refusal := next((one.result() for one in done if one.result()[1]), None):
                    return refusal
            return asked[0].result()
        finally:
            for one in asked:
                one.cancel()

    async def _doing(self, waited: float) -> str:
        """What the server does; its machine may still be starting the actor."""
        asked = asyncio.ensure_future(_answer(self._actors[0].doing.remote()))
        done, _ = await asyncio.wait({asked}, timeout=POLL_SECONDS)
        asked.cancel()
        return (asked.result() if done and asked.exception() is None else "") or f"{waited:3.0f} s"

    async def stop(self) -> None:
        """See `LaunchedServer`."""
        if self._actors and Session.reachable():
            asked = [asyncio.ensure_future(_answer(actor.stop.remote())) for actor in self._actors]
            done, late = await asyncio.wait(asked, timeout=2 * END_SECONDS)
            for task in late:
                task.cancel()
            for task in done:
                task.exception()  # its machine may be gone
        self.kill()

    def kill(self) -> None:
        """See `LaunchedServer`."""
        import ray

        actors, self._actors, self._ended = self._actors, [], []
        if Session.reachable():
            for actor in actors:
                ray.kill(actor)

    def move_log(self, path: Path) -> None:
        """See `LaunchedServer`."""
        import ray

        moving = [actor.move_log.remote(str(_part_of(path, rank))) for rank, actor in enumerate(self._actors)]
        try:
            self.log = Path(ray.get(moving, timeout=REASON_SECONDS)[0])
        except ray.exceptions.RayError:  # the server is gone, which is found out by what needs it
            return

    def shorten_log(self) -> None:
        """Do nothing: the actor does it."""

    def reason(self) -> str:
        """See `LaunchedServer`."""
        import ray

        if not self._ended:
            return "it was ended"
        try:
            first = (ray.wait(self._ended, timeout=REASON_SECONDS)[0] or self._ended)[0]
            return str(ray.get(first, timeout=0))
        except ray.exceptions.RayError as error:
            return cause_of_death(error)


def _part_of(log: Path, rank: int) -> Path:
    """The log of a part of a server."""
    return log if rank == 0 else log.with_stem(f"{log.stem}_node_{rank}")


async def _answer(reference: Any) -> Any:
    """Await Ray's answer. Raises UserError where the actor is gone."""
    import ray

    try:
        return await reference
    except ray.exceptions.RayError as error:
        raise UserError(f"engine: a server's machine does not answer: {cause_of_death(error)}") from error
