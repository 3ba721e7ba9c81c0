"""`AgentDriver`: rollouts whose conversations somebody else holds, an agent that talks to the gateway.

The environment's hooks, rewards, deadlines, retries and boundaries of errors are those of the built-in driver. The
agent's calls of the model come in by HTTP with the rollout's own key, and grow a tree of conversations.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agentrl.chat.base import Chat, ParsedCall, Streaming
from agentrl.engine.base import Engine, EngineError, Generation, GenerationFinish, Sampling
from agentrl.errors import UserError, describe
from agentrl.gateway.call import Call, Completion, Feed, Finish, GatewayError, Origin
from agentrl.gateway.chat_completions import tool_call
from agentrl.gateway.server import Gateway
from agentrl.images import ImageError, all_stored, check_count, keyed, sent
from agentrl.plugins.agent import Agent, AgentClient, Outcome
from agentrl.plugins.types import Content, InfrastructureError, Json, Message, Task
from agentrl.recipe.schema import AgentSection, RolloutSection
from agentrl.rollout import hooks
from agentrl.rollout.calls import Caller, as_text, assistant_message, bounded
from agentrl.rollout.conversation_tree import ConversationTree, Counts, Node
from agentrl.rollout.deadline import DeadlineExceededError, DeadlineTimer
from agentrl.rollout.driver import Driver, takes_images
from agentrl.rollout.request import AsyncRolloutRequest, Opening, Seed, nth
from agentrl.trajectory import Boundary, FinishReason, Trajectory, Turn

_RETRIED = 64  # calls whose bodies are kept, so that one that is sent again is known


@dataclass(slots=True, eq=False)
class AgentRequest(AsyncRolloutRequest):
    """A rollout of an agent: its tokens are those of a tree."""

    tree: ConversationTree = field(init=False)
    """Its calls."""
    train_auxiliary: bool = False
    """`agent.train_auxiliary`."""
    outcome: Outcome = field(default_factory=Outcome)
    """What its agent came to, once it has ended."""

    @property
    def turn_count(self) -> int:
        return len(self.tree.answered)

    @property
    def last_turn(self) -> int:
        return self.turn_count - 1

    @property
    def sampled_tokens(self) -> int:
        return sum(len(node.ids) for node in self.tree.answered)

    @property
    def conversation_ids(self) -> Sequence[int]:
        answered = self.tree.answered
        return answered[-1].branch.ids[: answered[-1].end] if answered else self.ids

    @property
    def turns(self) -> list[Turn]:
        return [turn for _, _, turn in self.tree.segments(self.train_auxiliary)]

    def add_step_reward(self, reward: float) -> None:
        if answered := self.tree.answered:
            answered[-1].reward += reward
            self.step_rewards.append(reward)

    def trajectory(self, weights: Mapping[str, float] = {}) -> Trajectory:
        self._flatten()
        return super(AgentRequest, self).trajectory(weights)

    def _flatten(self) -> None:
        """Write the tree down as flat tokens, in the order in which the calls began."""
        for column in (self.ids, self.logprobs, self.versions, self.version_counts):
            del column[:]
        self.segments, self.told, self.images = [], [], []
        for node, segment, _ in self.tree.segments(self.train_auxiliary):
            assert node.generation is not None
            self.add_bridge(node.given.ids, node.given.images)
            self.add_sampled(node.generation)
            self.open_turn = None
            self.segments.append(segment)
            self.told.append(node.added)
        self.prompt_length = len(answered[0].given.ids) if (answered := self.tree.answered) else 0
        counts = self.tree.counts
        counts.auxiliary = sum(1 for _ in self.tree.auxiliary())
        self.extra["gateway"] = {name: getattr(counts, name) for name in Counts.__slots__}


class TreeEndpoint(ABC):
    """Answers calls out of a tree of conversations; a subclass says what a call may be, and what becomes of it.

    tree: of what was said so far; its name begins the ids of completions.
    """

    def __init__(self, tree: ConversationTree, engine: Engine, chat: Chat, limits: RolloutSection) -> None:
        self.tree, self.engine, self.chat, self.limits = tree, engine, chat, limits
        self._given: dict[bytes, asyncio.Task[Any]] = {}
        self._sent_again: set[str] = set()  # ids of completions

    @property
    def images(self) -> bool:
        """See `Endpoint.images`."""
        return takes_images(self.engine, self.chat)

    async def complete(self, call: Call, origin: Origin, feed: Feed | None = None) -> Completion:
        """See `Endpoint.complete`. A call that an SDK sends again joins the first."""
        if origin.retry and (first := self._given.get(origin.body)) is not None:
            self.tree.counts.retries += 1
            found: Completion = await asyncio.shield(first)
            self._sent_again.add(found.id)
            return found
        self._given.pop(origin.body, None)
        task = asyncio.current_task()
        assert task is not None, "the gateway gives each call a task of its own"
        self._given[origin.body] = task
        if len(self._given) > _RETRIED:
            self._given = dict(list(self._given.items())[-_RETRIED:])
        return await self._sampled(call, feed)

    def count(self, call: Call) -> int:
        """See `Endpoint.count`."""
        return self.tree.measure(call)

    def previous(self, completion_id: str) -> tuple[Message, ...]:
        """See `Endpoint.previous`."""
        return self._node(completion_id).conversation

    def lost(self, completion: Completion) -> None:
        """See `Endpoint.lost`."""
        if completion.id not in self._sent_again:
            self._node(completion.id).lost = True

    def check(self) -> None:  # noqa: B027 - a hook with a default
        """Raise GatewayError where no further call is allowed."""

    def too_long(self, why: str) -> GatewayError:
        """Return the error of a call for which there is no room."""
        return GatewayError(why, 400, "context_length_exceeded")

    @abstractmethod
    def sampling(self, node: Node, room: int) -> Sampling:
        """Return how to sample the answer of a call, `room` tokens at most. Raises GatewayError."""

    def failed(self, error: EngineError) -> None:  # noqa: B027 - a hook with a default
        """Note that the engine failed."""

    def answered(self, node: Node, seconds: float) -> None:  # noqa: B027 - a hook with a default
        """Note an answer, and the time that it took."""

    def _listening(self, node: Node, feed: Feed | None) -> dict[str, Any]:
        """Return what the engine is told so that `feed` gets what it samples; nothing where it or the chat cannot."""
        if feed is None or not self.engine.streams or not isinstance(self.chat, Streaming):
            return {}
        turn = self.chat.stream()
        if turn is None:
            return {}
        feed.begin(self._completion_id(node), len(node.branch.ids), turn)
        return {"on_tokens": feed.add}

    def _completion_id(self, node: Node) -> str:
        return f"{_public(self.tree.name)}-{node.index}"

    def _node(self, completion_id: str) -> Node:
        head, _, index = completion_id.rpartition("-")
        nodes = self.tree.nodes
        if head != _public(self.tree.name) or not index.isdecimal() or int(index) >= len(nodes):
            raise GatewayError(f"previous_response_id: {completion_id[:80]!r} is unknown here")
        return nodes[int(index)]

    async def _sampled(self, call: Call, feed: Feed | None) -> Completion:
        self.check()
        tree, started = self.tree, time.monotonic()
        branches = len(tree.branches)
        try:
            check_count(call.messages, self.limits.max_images)
        except ImageError as error:
            raise self.too_long(str(error)) from None
        try:
            node = tree.add(call)
        except UserError as error:
            raise GatewayError(str(error)) from None
        if 0 < branches < len(tree.branches):
            self.engine.fork(node.branch.name, tree.relatives(node))
        try:
            generation = await self._generate(node, call, feed)
        except BaseException as error:
            tree.give_up(node)
            if not isinstance(error, EngineError):
                raise
            self.failed(error)
            raise GatewayError(f"the engine failed: {error}", 500, "server_error") from error
        parsed = bounded(self.chat.parse(generation.ids))
        message = assistant_message(parsed, node.index)
        tree.answer(node, generation, message)
        finish = Finish.TOOLS if parsed.calls else Finish.STOP
        if generation.finish is not GenerationFinish.STOP and not parsed.calls:
            finish = Finish.LENGTH
        self.answered(node, time.monotonic() - started)
        return Completion(
            id=self._completion_id(node),
            message=message,
            finish=finish,
            prompt_tokens=node.end - len(generation.ids),
            completion_tokens=len(generation.ids),
            tokens=self._tokens(generation) if call.logprobs else (),
        )

    async def _generate(self, node: Node, call: Call, feed: Feed | None) -> Generation:
        """Raises EngineError, also for an answer that does not hold together."""
        limits, engine, branch = self.limits, self.engine, node.branch
        ids: Sequence[int] = keyed(branch.ids, branch.images).tolist() if branch.images else branch.ids
        most = min(limits.max_tokens, engine.max_context)
        room = min(limits.max_turn_tokens, most - len(ids), call.max_tokens or limits.max_turn_tokens)
        if room <= 0:
            raise self.too_long(
                f"the prompt has {len(ids)} tokens, of {most} (rollout.max_tokens, the model's context)"
            )
        sampling = self.sampling(node, room)
        deadline = asyncio.get_running_loop().call_later(limits.turn_timeout, engine.abort, branch.name)
        try:
            generation = await engine.generate(ids, sampling, branch.name, **self._listening(node, feed))
        finally:
            deadline.cancel()
        count, versions = len(generation.ids), generation.weight_version
        if not 0 < count <= room:
            raise EngineError(f"{count} ids came where 1 to {room} were asked for")
        if len(generation.logprobs) != count or not (isinstance(versions, int) or len(versions) == count):
            raise EngineError(f"{count} ids came with another number of logprobs or weight versions")
        return generation

    def _tokens(self, generation: Generation) -> list[tuple[str, float]]:
        decode = self.chat.decode
        return [(decode([one]), value) for one, value in zip(generation.ids, generation.logprobs, strict=True)]


class Rollout(TreeEndpoint):
    """The endpoint of one rollout's key, and what its agent is given."""

    def __init__(self, driver: "AgentDriver", request: AgentRequest) -> None:
        super().__init__(request.tree, driver.engine, driver.chat, driver.limits)
        self._driver, self._request = driver, request
        self.refused: FinishReason | None = None
        self.broken: tuple[tuple[Boundary, str], Exception] | None = None
        self.tools_done = False

    @property
    def tools(self) -> tuple[dict[str, Json], ...]:
        """See `Endpoint.tools`."""
        return self._driver.schemas(self._request)

    def check(self) -> None:
        tree, section = self.tree, self._driver.section
        if len(tree.nodes) >= section.max_calls:
            self.refused = FinishReason.MAX_TURNS
            raise GatewayError(
                f"this rollout has made its {section.max_calls} calls (agent.max_calls)", 400, "max_calls"
            )
        if tree.tokens >= section.max_total_tokens:
            raise self.too_long(f"this rollout has {tree.tokens} tokens (agent.max_total_tokens)")

    def too_long(self, why: str) -> GatewayError:
        self.refused = FinishReason.LENGTH
        return super().too_long(why)

    def sampling(self, node: Node, room: int) -> Sampling:
        limits = self.limits
        return Sampling(
            max_tokens=room, temperature=limits.temperature, top_p=limits.top_p, top_k=limits.top_k,
            stop_ids=self.chat.stop_ids, seed=nth(self._request.seed, node.index),
        )  # fmt: skip

    def failed(self, error: EngineError) -> None:
        self.broken = (Boundary.ENGINE, "engine"), error

    def answered(self, node: Node, seconds: float) -> None:
        self._request.waited("engine", time.monotonic() - seconds)
        self._request.messages[:] = node.conversation

    async def call_tool(self, name: str, arguments: Mapping[str, Json] | str) -> Content:
        """Run a tool of the task for the agent, as the built-in driver would; see `AgentClient.call_tool`."""
        request, driver = self._request, self._driver
        timer = DeadlineTimer()
        try:
            call = tool_call("", name, arguments, "call_tool")["function"]
            parsed = ParsedCall(name, call["arguments"], "")
            if isinstance(call["arguments"], str):
                parsed = ParsedCall(name, {}, call["arguments"], error="the arguments are no JSON object")
            started = time.monotonic()
            deadline = min(started + driver.limits.turn_timeout, request.deadline)
            answers = await driver.caller.answer(request, request, [parsed], deadline, timer)
        except InfrastructureError as error:
            self.broken = request.at, error
            raise
        finally:
            timer.close()
        request.waited("tools", started)
        self.tools_done = self.tools_done or answers.done
        (said,) = answers.messages if self.images else as_text(answers.messages)
        content: Content = sent(said)["content"]
        return content


class AgentDriver(Driver):
    """agent: holds the conversations. gateway: started already. section: the recipe's `agent`."""

    def __init__(self, *, agent: Agent, gateway: Gateway, section: AgentSection, **options: Any) -> None:
        super().__init__(**options)
        self._caller = Caller(
            self._chat, self._limits, images=self._shows
        )  # no tool holds conversations beside the agent's
        self._agent, self._gateway, self.section = agent, gateway, section

    @property
    def engine(self) -> Engine:
        """The engine that samples."""
        return self._engine

    @property
    def chat(self) -> Chat:
        """Converts messages to ids and back."""
        return self._chat

    @property
    def caller(self) -> Caller:
        """Runs the calls of tools."""
        return self._caller

    def schemas(self, request: AgentRequest) -> tuple[dict[str, Json], ...]:
        """Schemas of the tools that the task of a rollout offers."""
        return tuple(self._schemas[name] for name in request.tools)

    def request(
        self, task: Task, sample: int, *, seed: Seed = 0, attempt: int = 0, opening: Opening | None = None
    ) -> AsyncRolloutRequest:
        plain = super().request(task, sample, seed=seed, attempt=attempt, opening=opening)
        request = AgentRequest(plain.id, task, sample, seed=plain.seed, opening=plain.opening)
        request.tree = ConversationTree(plain.id, self._chat, self.section.history)
        request.train_auxiliary = self.section.train_auxiliary
        return request

    async def checked(self, given: object, what: str = "messages") -> list[Message]:
        """See `Driver.checked`. What the agent makes of images is its own affair: a model that does not see refuses
        them when it is called with them."""
        return await all_stored(hooks.checked_messages(given, what))

    def _open(self, request: AsyncRolloutRequest) -> None:
        """The agent opens its conversations itself."""

    async def _converse(self, request: AsyncRolloutRequest, timer: DeadlineTimer) -> FinishReason:
        assert isinstance(request, AgentRequest)
        rollout = Rollout(self, request)
        opening = tuple(request.messages)
        where = Boundary.AGENT, f"agent {self._agent.name}"
        finish = FinishReason.STOP
        with ExitStack() as stack:
            client = self._client(request, rollout, opening, stack.enter_context(self._gateway.serving(rollout)))
            request.at = where
            try:
                await timer.wait(self._solve(request, client), request.deadline)
                finish = FinishReason.TIMEOUT if timer.expired else finish
            except DeadlineExceededError:
                finish = FinishReason.TIMEOUT
            except Exception as error:
                if rollout.broken is None and rollout.refused is None:
                    request.at = where
                    raise
                request.extra["agent_error"] = describe(error)
        if rollout.broken is not None:
            request.at, broken = rollout.broken
            raise broken
        if not request.tree.answered:
            request.at = where
            raise UserError("it ended without a call of the model: does it use the gateway's base URL and key?")
        for begun in request.begun:
            begun.session.outcome = request.outcome
        if rollout.tools_done:
            finish = FinishReason.ENV_DONE
        return rollout.refused or finish

    async def _solve(self, request: AgentRequest, client: AgentClient) -> None:
        """Let the agent do its task. What it came to is released later, also where it ended by a cancellation."""
        found = await self._agent.solve(request.task, client)
        request.outcome = outcome = found if isinstance(found, Outcome) else Outcome(returned=found)
        request.held.append((f"agent {self._agent.name}", lambda: self._agent.release(outcome)))

    def _client(self, request: AgentRequest, rollout: Rollout, opening: tuple[Message, ...], key: str) -> AgentClient:
        url = self._gateway.url
        return AgentClient(
            base_url=f"{url}/v1",
            anthropic_url=url,
            mcp_url=f"{url}/mcp",
            api_key=key,
            model=self._gateway.model,
            messages=tuple(map(sent, opening)),
            tools=self.schemas(request),
            call_tool=rollout.call_tool,
            timeout=max(1.0, request.deadline - time.monotonic()),
            socket=self._gateway.socket,
        )

    def _forget(self, request: AsyncRolloutRequest) -> None:
        assert isinstance(request, AgentRequest)
        for branch in request.tree.branches:
            self._forget_id(request, branch.name)


@lru_cache
def _public(request_id: str) -> str:
    """Return a rollout's id as ids of completions begin with it: letters, digits and dashes alone."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in request_id)
