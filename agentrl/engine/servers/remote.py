"""Servers on other machines of a Ray cluster: each is a `Server` in an actor there, with GPUs of its own.

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

from agentrl.cluster.errors import ClusterError
from agentrl.cluster.placement import names_of
from agentrl.cluster.pool import ResourcePool, cluster_nodes, own_id, spread
from agentrl.cluster.post_mortem import cause_of_death
from agentrl.cluster.session import Session
from agentrl.cluster.spawn import FORWARDED, SPAWN_SECONDS
from agentrl.containment.process_tree import END_SECONDS
from agentrl.engine.servers.client import Sessions
from agentrl.engine.servers.launch import LaunchPlan
from agentrl.engine.servers.server import POLL_SECONDS, LaunchedServer, Server
from agentrl.errors import UserError
from agentrl.models.download import DOWNLOADING
from agentrl.weights.request import ServerGpus

REASON_SECONDS = 5.0
"""Time for another machine to say why a server ended, or to move its log."""


class ServerHost:
    """The actor of one server. plan: as the controller made it. environment: variables of the controller that servers
    anywhere get. log: file for its output, on this machine. shared: the GPUs that it shares with workers (None: those
    that Ray gave the actor)."""

    def __init__(
        self,
        plan: LaunchPlan,
        index: int,
        log: str,
        environment: dict[str, str],
        shared: Sequence[int] | None = None,
    ) -> None:
        import ray

        os.environ.update(environment)
        given = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        devices = range(len(given)) if shared is None else shared
        here = replace(
            plan, listen=ray.util.get_node_ip_address(), devices=[devices] * (index + 1), cpu=not len(devices)
        )
        names = given if shared is None else names_of(shared)
        self._gpus = ServerGpus(ray.get_runtime_context().get_node_id(), tuple(map(str, names)))
        self._sessions = Sessions(here.key)
        self._server = Server(here, index, Path(log), self._sessions)
        self._doing = ""

    async def start(self, timeout: float) -> tuple[str, str, ServerGpus]:
        """Start the server; return its URL, why it did not start (empty: it serves), and its GPUs."""
        try:
            await self._server.start(timeout, self._do)
        except UserError as error:
            return "", str(error), self._gpus
        return self._server.url, "", self._gpus

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
    there for them until `close`. shared: all machines with GPUs, this one too if it has any; nothing is reserved, since
    the workers' GPUs are the servers' too, from the first on.

    address: of the cluster. ranks: GPUs of each server, where the machines have any; else it computes on CPUs. Raises
    UserError: the cluster cannot be reached, or has no room.
    """

    def __init__(self, address: str, servers: int, nodes: int, ranks: int, shared: bool = False) -> None:
        self._stack, self._pool = ExitStack(), None
        try:
            if not Session.reachable():
                self._stack.enter_context(Session(address))
            if shared:
                self._places = _shared_places(servers, nodes, ranks)
                return
            gpu = any(node.total.get("GPU", 0.0) >= 1.0 for node in cluster_nodes() if node.id != own_id())
            pool = ResourcePool(servers, nodes, gpu=gpu, each=ranks, elsewhere=True)
            self._pool = self._stack.enter_context(pool)
            self._node_of = [node for node, count in enumerate(pool.by_node) for _ in range(count)]
        except ClusterError as error:
            self.close()
            raise UserError(f"engine.args.remote_nodes: {error}") from error
        except BaseException:
            self.close()
            raise

    def actor(self, index: int, *args: object) -> Any:
        """Start the actor of server `index` with these arguments of `ServerHost`."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._pool is not None:
            where = self._pool.place(self._node_of[index])
        else:
            node, devices = self._places[index]
            where = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
            args = (*args, devices)
        return ray.remote(ServerHost).options(max_restarts=0, **where).remote(*args)

    def close(self) -> None:
        """Release what is reserved."""
        self._stack.close()


def _shared_places(servers: int, nodes: int, ranks: int) -> list[tuple[str, tuple[int, ...]]]:
    """Ray's name of the machine of each server, and its GPUs there (none: it computes on CPUs). Raises ClusterError
    where these are not as many machines as the workers are on, or one has too few GPUs."""
    found = cluster_nodes()
    on_gpus = [node for node in found if node.total.get("GPU", 0.0) >= 1.0]
    machines = sorted(on_gpus or found, key=lambda node: (node.id != own_id(), node.id))
    machines = machines if on_gpus else machines[:nodes]
    if len(machines) != nodes:
        raise ClusterError(
            "servers that share the workers' GPUs (engine.sleep) are launched on all machines of the cluster with "
            f"GPUs, of which there are {len(machines)}: set remote_nodes and cluster.nodes to that"
        )
    places: list[tuple[str, tuple[int, ...]]] = []
    for node, count in zip(machines, spread(servers, nodes), strict=True):
        if on_gpus and (there := int(node.total["GPU"])) < count * ranks:
            raise ClusterError(f"{count} servers of {ranks} GPUs do not fit node {node.address}, which has {there}")
        places += [(node.id, tuple(range(i * ranks, (i + 1) * ranks)) if on_gpus else ()) for i in range(count)]
    return places


class RemoteServer(LaunchedServer):
    """Server `index` of a run, on one of `nodes`. log: file for its output there."""

    def __init__(self, nodes: RemoteNodes, plan: LaunchPlan, index: int, log: Path) -> None:
        self._nodes, self._plan, self._index = nodes, plan, index
        self._name = f"engine {plan.program.name}"
        self._actor: Any = None
        self._ended: Any = None  # Ray's reference to the reason why it ended
        self.log, self.url = log, ""
        self.gpus: ServerGpus | None = None

    @property
    def running(self) -> bool:
        """See `LaunchedServer`."""
        import ray

        return self._ended is not None and Session.reachable() and not ray.wait([self._ended], timeout=0)[0]

    async def start(self, timeout: float, phase: Callable[[str], None]) -> None:
        """See `LaunchedServer`."""
        environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        self._actor = self._nodes.actor(self._index, self._plan, self._index, str(self.log), environment)
        starting = asyncio.ensure_future(_answer(self._actor.start.remote(timeout)))
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
            self.url, why, gpus = starting.result()
        except UserError:
            self.kill()
            raise
        finally:
            starting.cancel()
        if why:
            self.kill()
            raise UserError(f"{why}, on another machine")
        self.gpus = gpus if gpus.names else None
        self._ended = self._actor.ended.remote()

    async def _doing(self, waited: float) -> str:
        """What the server does; its machine may still be starting the actor."""
        asked = asyncio.ensure_future(_answer(self._actor.doing.remote()))
        done, _ = await asyncio.wait({asked}, timeout=POLL_SECONDS)
        asked.cancel()
        return (asked.result() if done and asked.exception() is None else "") or f"{waited:3.0f} s"

    async def stop(self) -> None:
        """See `LaunchedServer`."""
        if self._actor is not None and Session.reachable():
            asked = asyncio.ensure_future(_answer(self._actor.stop.remote()))
            done, _ = await asyncio.wait({asked}, timeout=2 * END_SECONDS)
            asked.cancel()
            for task in done:
                task.exception()  # its machine may be gone
        self.kill()

    def kill(self) -> None:
        """See `LaunchedServer`."""
        import ray

        actor, self._actor, self._ended = self._actor, None, None
        if actor is not None and Session.reachable():
            ray.kill(actor)

    def move_log(self, path: Path) -> None:
        """See `LaunchedServer`."""
        import ray

        try:
            self.log = Path(ray.get(self._actor.move_log.remote(str(path)), timeout=REASON_SECONDS))
        except ray.exceptions.RayError:  # the server is gone, which is found out by what needs it
            return

    def shorten_log(self) -> None:
        """Do nothing: the actor does it."""

    def reason(self) -> str:
        """See `LaunchedServer`."""
        import ray

        if self._ended is None:
            return "it was ended"
        try:
            return str(ray.get(self._ended, timeout=REASON_SECONDS))
        except ray.exceptions.RayError as error:
            return cause_of_death(error)


async def _answer(reference: Any) -> Any:
    """Await Ray's answer. Raises UserError where the actor is gone."""
    import ray

    try:
        return await reference
    except ray.exceptions.RayError as error:
        raise UserError(f"engine: a server's machine does not answer: {cause_of_death(error)}") from error
