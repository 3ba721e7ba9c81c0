"""The agent `foreign`: an environment that holds its conversations itself, such as those of verifiers, plays its tasks.

Its rollouts run by its own code in its own interpreter; the model answers through the gateway, under the rollout's key.
"""

from agentrl.plugins.agent import Agent, AgentClient
from agentrl.plugins.types import Json, Task
from agentrl_envs.foreign.environment import foreign_of
from agentrl_envs.foreign.pool import Pool
from agentrl_envs.foreign.process import MAIN, ForeignError


class ForeignAgent(Agent):
    """`play` of an adapter, which must be async: one process serves many rollouts. The arguments are those of the
    environment `foreign`, with which it shares its processes."""

    name = "foreign"

    def __init__(
        self,
        python: str,
        module: str,
        args: dict[str, Json] | None = None,
        processes: int = 1,
        start_seconds: float = 120.0,
        variables: dict[str, str] | None = None,
    ) -> None:
        foreign = foreign_of(python, module, args, processes, False, variables, "agent.args")
        self._pool = Pool.shared(foreign, processes, start_seconds)

    async def solve(self, task: Task, client: AgentClient) -> Json:
        """What `play` returned: rewards by name, or `rewards`, `metrics` and `seats`. Raises ForeignError."""
        process, _ = await self._pool.take()
        given = {
            "base_url": client.base_url,
            "anthropic_url": client.anthropic_url,
            "mcp_url": client.mcp_url,
            "api_key": client.api_key,
            "model": client.model,
            "timeout": client.timeout,
            "tools": list(client.tools),
        }
        try:
            played = await process.wait("play", MAIN, dict(task.data), given)
        finally:
            if self._pool.give_back(process):
                await process.end_in_thread("a rollout hung in its process, which was ended")
        if not isinstance(played, dict):
            raise ForeignError(f"play() returned {type(played).__name__}; expected rewards by name")
        return played

    async def close(self) -> None:
        await self._pool.close()
