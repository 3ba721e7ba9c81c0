"""`AgentDriver`: rollouts whose conversations somebody else holds, an agent that talks to the gateway.

The environment's hooks, rewards, deadlines, retries and boundaries of errors are those of the built-in driver. The
agent's calls of the model come in by HTTP with the rollout's own key, and grow a tree of conversations.
"""

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from agentrl.chat.base import Chat, Constraining, ParsedCall, ParsedTurn, Streaming, StrictlyCalling
from agentrl.constraint import Constraint
from agentrl.containment.deadline import DeadlineExceededError, DeadlineTimer
from agentrl.engine.base import ConstraintError, Engine, EngineError, Generation, GenerationFinish, OnTokens, Sampling
from agentrl.engine.stops import StopWatch, shown
from agentrl.errors import UserError, describe
from agentrl.gateway.bounds import IN_LOOP, off_loop
from agentrl.gateway.call import Call, Completion, Feed, Finish, GatewayError, Origin
from agentrl.gateway.chat_completions import tool_call
from agentrl.gateway.server import Gateway
from agentrl.images import ImageError, all_stored, check_count, keyed, sent
from agentrl.plugins.agent import Agent, AgentClient, Outcome
from agentrl.plugins.types import Content, InfrastructureError, Json, Message, Task
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout import hooks
from agentrl.rollout.calls import Caller, as_text, assistant_message, bounded
from agentrl.rollout.conversation import Conversation, Seed, nth
from agentrl.rollout.conversation_tree import ConversationTree, Counts, Node, Train, untrained
from agentrl.rollout.driver import Driver, takes_images
from agentrl.rollout.request import AsyncRolloutRequest, Opening
from agentrl.trajectory import Boundary, FinishReason, Trajectory, Turn

MAX_TOTAL_TOKENS = 65_536
"""Tokens of a rollout, all of its branches together, where `rollout.max_total_tokens` says none."""
_ROLES = 16  # seats of a rollout, each of which has metrics
_RETRIED = 64  # calls whose digests are kept, so that one that is sent again is known
_LAST_WORDS = 300  # characters of a program's output in an error


@dataclass(slots=True, eq=False)
class AgentRequest(AsyncRolloutRequest):
    """A rollout of an agent: its tokens are those of a tree."""

    tree: ConversationTree = field(init=False)
    """Its calls."""
    train: Train = "all"
    """`agent.train`."""
    outcome: Outcome = field(default_factory=Outcome)
    """What its agent came to, once it has ended."""

    @property
    def turn_count(self) -> int:
        return len(self.tree.answered)

    def last_turn(self, conversation: Conversation) -> int:
        return self.turn_count - 1

    @property
    def sampled_tokens(self) -> int:
        return sum(len(node.ids) for node in self.tree.answered)

    @property
    def conversation_ids(self) -> Sequence[int]:
        answered = self.tree.answered
        return answered[-1].branch.ids[: answered[-1].end] if answered else self.main.ids

    @property
    def turns(self) -> list[Turn]:
        return [turn for _, _, turn in self.tree.segments(self.train)]

    def add_step_reward(self, conversation: Conversation, reward: float) -> None:
        if answered := self.tree.answered:
            answered[-1].reward += reward
            conversation.step_rewards.append(reward)

    def trajectory(self, weights: Mapping[str, float] = {}) -> Trajectory:
        self._flatten()
        return super(AgentRequest, self).trajectory(weights)

    def _flatten(self) -> None:
        """Write the tree down as flat tokens, in the order in which the calls began."""
        main = self.main
        for column in (main.ids, main.logprobs, main.versions, main.version_counts):
            del column[:]
        self.segments, self.segment_messages, main.images, main.allowed = [], [], [], []
        for node, segment, _ in self.tree.segments(self.train):
            assert node.generation is not None
            main.add_bridge(node.given.ids, node.given.images)
            main.add_sampled(node.generation)
            main.open_turn = None
            self.segments.append(segment)
            self.segment_messages.append(node.added)
        if all(segment.parent == index - 1 for index, segment in enumerate(self.segments)):  # it never branched
            main.messages[:] = [message for messages in self.segment_messages for message in messages]
            self.segments, self.segment_messages = [], []
        main.prompt_length = len(answered[0].given.ids) if (answered := self.tree.answered) else 0
        counts = self.tree.counts
        why = [untrained(node, self.train) for node in self.tree.answered]
        counts.auxiliary, counts.unreceived = sum(map(bool, why)), why.count("unreceived")
        self.extra["gateway"] = {name: getattr(counts, name) for name in Counts.__slots__}
        if ignored := Counter(name for node in self.tree.nodes for name in node.call.ignored):
            self.extra["ignored_fields"] = dict(sorted(ignored.items()))


class _Given(NamedTuple):
    """A call that was given, by which one that is sent again is known."""

    task: asyncio.Task[Completion]
    """Answers it."""
    digest: bytes
    """A digest of its body."""

    @property
    def failed(self) -> bool:
        """Whether it came to nothing."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class TreeEndpoint(ABC):
    """Answers calls out of a tree of conversations; a subclass says what a call may be, and what becomes of it.

    tree: of what was said so far; its name begins the ids of completions.
    """

    def __init__(self, tree: ConversationTree, engine: Engine, chat: Chat, limits: RolloutSection) -> None:
        self.tree, self.engine, self.chat, self.limits = tree, engine, chat, limits
        self._given: dict[bytes, _Given] = {}

    @property
    def images(self) -> bool:
        """See `Endpoint.images`."""
        return takes_images(self.engine, self.chat)

    @property
    def context(self) -> int:
        """See `Endpoint.context`."""
        return min(self.limits.max_tokens, self.engine.max_context)

    async def complete(self, call: Call, origin: Origin, feed: Feed | None = None) -> Completion:
        """See `Endpoint.complete`. A call that is sent again joins the first: an SDK says so by the count of its
        retries, any client by a key of its own for the call."""
        name = hashlib.blake2b(origin.key.encode("utf-8", "replace"), digest_size=16, key=b"key").digest()
        name = name if origin.key else origin.digest
        first = self._given.get(name)
        if first is not None and first.digest != origin.digest:
            raise GatewayError("Idempotency-Key: it came with another request before", 422, "idempotency_error")
        if first is not None and (origin.retry or origin.key) and not first.failed:
            self.tree.counts.retries += 1
            found: Completion = await asyncio.shield(first.task)
            if (node := self._find(found.id)) is not None:
                node.sent += 1
            return found
        self._given.pop(name, None)
        task = asyncio.current_task()
        assert task is not None, "the gateway gives each call a task of its own"
        self._given[name] = _Given(task, origin.digest)
        if len(self._given) > _RETRIED:
            self._given = dict(list(self._given.items())[-_RETRIED:])
        return await self._sampled(call, origin, feed)

    def count(self, call: Call) -> int:
        """See `Endpoint.count`."""
        return self.tree.measure(call)

    def previous(self, completion_id: str) -> tuple[Message, ...]:
        """See `Endpoint.previous`."""
        node = self._find(completion_id)
        if node is None:
            raise GatewayError(f"previous_response_id: {completion_id[:80]!r} is unknown here")
        return node.conversation

    def lost(self, completion: Completion) -> None:
        """See `Endpoint.lost`."""
        if (node := self._find(completion.id)) is not None:
            node.losses += 1

    def check(self) -> None:  # noqa: B027 - a hook with a default
        """Raise GatewayError where no further call is allowed."""

    def too_long(self, why: str) -> GatewayError:
        """See `Endpoint.too_long`."""
        return GatewayError(why, 400, "context_length_exceeded")

    @abstractmethod
    def sampling(self, node: Node, room: int) -> Sampling:
        """How to sample the answer of a call, `room` tokens at most. Raises GatewayError."""

    def failed(self, error: EngineError) -> None:  # noqa: B027 - a hook with a default
        """Note that the engine failed."""

    def answered(self, node: Node, seconds: float) -> None:  # noqa: B027 - a hook with a default
        """Note an answer, and the time that it took."""

    def _listener(self, node: Node, feed: Feed | None) -> OnTokens | None:
        """What gives `feed` the ids that the engine samples; None where the engine or the chat cannot."""
        if feed is None or not self.engine.streams or not isinstance(self.chat, Streaming):
            return None
        if node.call.prompt is not None:
            return None
        turn = self.chat.stream()
        if turn is None:
            return None
        feed.begin(self._completion_id(node), len(node.branch.ids), turn)
        return feed.add

    def _completion_id(self, node: Node) -> str:
        return f"{_public(self.tree.name)}-{node.index}"

    def _find(self, completion_id: str) -> Node | None:
        head, _, index = completion_id.rpartition("-")
        nodes = self.tree.nodes
        known = head == _public(self.tree.name) and index.isdecimal() and int(index) < len(nodes)
        return nodes[int(index)] if known else None

    async def _sampled(self, call: Call, origin: Origin, feed: Feed | None) -> Completion:
        self.check()
        roles = {node.role for node in self.tree.nodes} | {origin.role} if origin.role else ()
        if len(roles) > _ROLES:
            raise GatewayError(f"X-Agentrl-Role: this rollout has {_ROLES} seats already")
        tree, started = self.tree, time.monotonic()
        if self.images:  # else the gateway took none
            try:
                check_count(call.messages, self.limits.max_images)
            except ImageError as error:
                raise self.too_long(str(error)) from None
        try:
            sought = tree.seek(call) if call.fresh <= IN_LOOP else await off_loop(tree.seek, call)
            placed = tree.place(sought) if sought.work <= IN_LOOP else await off_loop(tree.place, sought)
        except UserError as error:
            raise GatewayError(str(error)) from None
        self.check()  # others may have come meanwhile
        branches = len(tree.branches)
        node = tree.add(call, placed)
        node.train, node.role = origin.train, origin.role
        if 0 < branches < len(tree.branches):
            self.engine.fork(node.branch.name, tree.relatives(node))
        try:
            generation, stop = await self._generate(node, call, feed)
        except BaseException as error:
            tree.give_up(node)
            if isinstance(error, ConstraintError):
                raise GatewayError(str(error)) from error
            if not isinstance(error, EngineError):
                raise
            self.failed(error)
            raise GatewayError(f"the engine failed: {error}", 500, "server_error") from error
        whole = self._read(call, generation.ids)
        if call.one_call and len(whole.calls) > 1:
            generation, whole = self._first_call(node, generation, whole.calls[0])
        parsed = whole if stop is None else replace(whole, content=shown(whole.content, stop))
        message = assistant_message(parsed, node.index)
        tree.answer(node, generation, message, _repeated(message, stop))
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
            stop=stop,
            ids=generation.ids,
            tokens=self._tokens(generation) if call.logprobs else (),
        )

    def _read(self, call: Call, ids: Sequence[int]) -> ParsedTurn:
        """What was said in answer to a call."""
        if call.prompt is not None:
            return ParsedTurn(self.chat.decode(ids[:-1] if ids[-1] in self.chat.stop_ids else ids))
        parsed = bounded(self.chat.parse(ids))
        return parsed if call.may_call else _without_calls(parsed)

    def _first_call(self, node: Node, generation: Generation, first: ParsedCall) -> tuple[Generation, ParsedTurn]:
        """A turn up to the end of its first call, as if sampling had been stopped there. Raises GatewayError
        where the form of calls has no such place."""
        ids = generation.ids

        def turn(count: int) -> ParsedTurn:
            return bounded(self.chat.parse(ids[:count]))

        count = bisect_left(range(len(ids)), True, key=lambda n: turn(n).calls[:1] == (first,))
        if (parsed := turn(count)).calls != (first,):
            self.tree.give_up(node)
            raise GatewayError("one call a turn cannot be kept to with the form in which this model writes its calls")
        node.cut = True
        versions, experts = generation.weight_version, generation.experts
        return replace(
            generation,
            ids=ids[:count],
            logprobs=generation.logprobs[:count],
            weight_version=versions if isinstance(versions, int) else versions[:count],
            experts=None if experts is None else experts[: len(node.branch.ids) + count],
            allowed=None if generation.allowed is None else generation.allowed[:count],
        ), parsed

    async def _generate(self, node: Node, call: Call, feed: Feed | None) -> tuple[Generation, str | None]:
        """What was sampled, and which string of `call.stop` ended it. Raises EngineError, also for an answer
        that does not hold together."""
        limits, engine, branch = self.limits, self.engine, node.branch
        ids: Sequence[int] = keyed(branch.ids, branch.images).tolist() if branch.images else branch.ids
        most = self.context
        room = min(limits.max_turn_tokens, most - len(ids), call.max_tokens or limits.max_turn_tokens)
        if room <= 0:
            raise self.too_long(
                f"the prompt has {len(ids)} tokens, of {most} (rollout.max_tokens, the model's context)"
            )
        sampling = self.sampling(node, room)
        strict = limits.strict_calls and call.may_call and bool(call.tools)
        if strict or call.must_call or call.schema is not None:
            sampling = replace(sampling, constraint=self._constraint(call))
        deadline = asyncio.get_running_loop().call_later(limits.turn_timeout, engine.abort, branch.name)
        try:
            listener = self._listener(node, feed)
            watch = StopWatch(call.stop, self.chat.decode, listener, lambda: engine.abort(branch.name))
            listener = watch.add if call.stop and engine.streams else listener
            options = {} if listener is None else {"on_tokens": listener}
            generation = await engine.generate(ids, sampling, branch.name, **options)
        finally:
            deadline.cancel()
        count, versions = len(generation.ids), generation.weight_version
        if not 0 < count <= room:
            raise EngineError(f"{count} ids came where 1 to {room} were asked for")
        if len(generation.logprobs) != count or not (isinstance(versions, int) or len(versions) == count):
            raise EngineError(f"{count} ids came with another number of logprobs or weight versions")
        return (watch.cut(generation), watch.stop) if call.stop else (generation, None)

    def _constraint(self, call: Call) -> Constraint:
        """What an answer must look like that is forced, or else its calls. Raises GatewayError where it cannot be."""
        forced = "tool_choice" if call.must_call else "the format of the answer (a JSON schema)"
        if not call.must_call and call.schema is None:
            forced = "rollout.strict_calls"
        if not self.engine.constrains:
            raise GatewayError(f"{forced}: the engine of this run cannot keep to it; leave it out")
        offered = call.tools if call.may_call else ()
        tools = [tool for tool in offered if not call.must_call or tool["function"]["name"] in call.must_call]
        try:
            if call.must_call or call.schema is not None:
                if isinstance(self.chat, Constraining):
                    return self.chat.constraint(None if call.must_call else call.schema, tools)
            elif isinstance(self.chat, StrictlyCalling):
                return self.chat.strict(tools)
        except UserError as error:
            raise GatewayError(f"{forced}: {error}") from None
        raise GatewayError(f"{forced}: this model's chat cannot be held to it; leave it out")

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
        if tree.tokens >= (self._driver.limits.max_total_tokens or MAX_TOTAL_TOKENS):
            raise self.too_long(f"this rollout has {tree.tokens} tokens (rollout.max_total_tokens)")

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
        self._request.main.messages[:] = node.conversation

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
            deadline = min(started + driver.limits.turn_timeout, request.main.deadline)
            answers = await driver.caller.answer(request, request.main, [parsed], deadline, timer)
        except InfrastructureError as error:
            self.broken = request.main.at, error
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
        self.caller = Caller(
            self.chat, self.limits, images=self._shows
        )  # no tool holds conversations beside the agent's
        self.agent, self.gateway, self.section = agent, gateway, section

    def schemas(self, request: AgentRequest) -> tuple[dict[str, Json], ...]:
        """Schemas of the tools that the task of a rollout offers."""
        return tuple(self.offered(request.main))

    def request(
        self, task: Task, sample: int, *, seed: Seed = 0, attempt: int = 0, opening: Opening | None = None
    ) -> AsyncRolloutRequest:
        plain = super().request(task, sample, seed=seed, attempt=attempt, opening=opening)
        request = AgentRequest(plain.id, task, sample, plain.opening, plain.seed)
        request.tree = ConversationTree(plain.id, self.chat, self.section.history)
        request.train = self.section.train
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
        messages = tuple(request.main.messages)
        system = tuple(message for message in messages if message["role"] in ("system", "developer"))
        with self.gateway.serving(rollout) as key:
            while True:
                finish = await self._step(request, rollout, messages, key, timer)
                if finish is not FinishReason.STOP:
                    return finish
                following = await self._next_step(request, timer)
                if not following:
                    return FinishReason.TIMEOUT if following is None else finish
                messages = (*system, *following)

    async def _step(
        self, request: AgentRequest, rollout: "Rollout", messages: tuple[Message, ...], key: str, timer: DeadlineTimer
    ) -> FinishReason:
        """Start the agent with what it is told, and wait for its end. Raises for what fails the rollout."""
        where, finish = (Boundary.AGENT, f"agent {self.agent.name}"), FinishReason.STOP
        answered = len(request.tree.answered)
        async with AsyncExitStack() as stack:
            if request.workspace is not None and request.workspace.listens:
                request.main.at = Boundary.WORKSPACE, f"workspace {request.workspace.id}"
                listener = await request.workspace.listen(self.gateway.port)
                stack.push_async_callback(await self.gateway.serve_at(listener))
            client = self._client(request, rollout, messages, key)
            request.main.at = where
            try:
                await timer.wait(self._solve(request, client), request.main.deadline)
                finish = FinishReason.TIMEOUT if timer.expired else finish
            except DeadlineExceededError:
                finish = FinishReason.TIMEOUT
            except Exception as error:
                if rollout.broken is None and rollout.refused is None:
                    request.main.at = where
                    raise
                request.extra["agent_error"] = describe(error)
        if rollout.broken is not None:
            request.main.at, broken = rollout.broken
            raise broken
        silent = len(request.tree.answered) == answered and (rollout.refused or finish) is FinishReason.STOP
        if silent or not request.tree.answered:
            request.main.at = where
            raise UserError(f"it ended without a call of the model{_last_words(request.outcome)}")
        for created in request.created:
            created.session.outcome = request.outcome
        if rollout.tools_done:
            finish = FinishReason.ENV_DONE
        return rollout.refused or finish

    async def _next_step(self, request: AgentRequest, timer: DeadlineTimer) -> list[Message] | None:
        """What the environment asks for once the agent has ended; nothing: no more; None: the rollout's time is over.
        Raises what the hook raises."""
        environment, started = self._environment, time.monotonic()
        request.main.at = Boundary.ENVIRONMENT, f"{environment.name}.next_step"
        work = environment.next_step(request.session_of(environment))
        try:
            given = await timer.wait(work, min(started + self.limits.turn_timeout, request.main.deadline))
        except DeadlineExceededError:
            if time.monotonic() < request.main.deadline:
                raise
            return None
        request.waited("environment", started)
        return await self.checked(given)

    async def _solve(self, request: AgentRequest, client: AgentClient) -> None:
        """Let the agent do its task. What it came to is released later, also where it ended by a cancellation."""
        found = await self.agent.solve(request.task, client)
        request.outcome = outcome = found if isinstance(found, Outcome) else Outcome(returned=found)
        request.cleanups.append((f"agent {self.agent.name}", lambda: self.agent.release(outcome)))

    def _client(self, request: AgentRequest, rollout: Rollout, opening: tuple[Message, ...], key: str) -> AgentClient:
        workspace = request.workspace
        inside = self.section.sandbox is not None or (self.section.command and workspace and workspace.listens)
        url = self.gateway.sandbox_url if inside else self.gateway.url
        return AgentClient(
            base_url=f"{url}/v1",
            anthropic_url=url,
            mcp_url=f"{url}/mcp",
            api_key=key,
            model=self.gateway.model,
            messages=tuple(map(sent, opening)),
            tools=self.schemas(request),
            call_tool=rollout.call_tool,
            timeout=max(1.0, request.main.deadline - time.monotonic()),
            socket=self.gateway.socket,
            workspace=request.workspace,
        )

    def _forget(self, request: AsyncRolloutRequest) -> None:
        assert isinstance(request, AgentRequest)
        for branch in request.tree.branches:
            self._forget_id(request, branch.name)


def _last_words(outcome: Outcome) -> str:
    """How a program ended, in one line; a question where it said nothing."""
    code = "" if outcome.exit_code is None else f", with exit code {outcome.exit_code}"
    said = " ".join(outcome.output.split())[-_LAST_WORDS:]
    return f"{code}; it said {said!r}" if said else f"{code}: does it use the gateway's base URL and key?"


def _without_calls(parsed: ParsedTurn) -> ParsedTurn:
    """A turn whose calls are part of its text, as the model wrote them."""
    written = dict.fromkeys(call.raw for call in parsed.calls)
    return replace(parsed, content="\n".join([*([parsed.content] if parsed.content else []), *written]), calls=())


def _repeated(message: Message, stop: str | None) -> list[Message]:
    """How an agent may repeat an answer that a stop string ended: with the string, without white space."""
    if stop is None:
        return []
    text = str(message["content"])
    return [{**message, "content": content} for content in (text + stop, text.strip(), text.strip() + stop)]


@lru_cache
def _public(request_id: str) -> str:
    """A rollout's id as ids of completions begin with it: letters, digits and dashes alone."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in request_id)
