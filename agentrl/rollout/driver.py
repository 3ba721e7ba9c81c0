"""`Driver.drive` takes one request from its first hook to its last, and is the one caller of every plugin.

Whatever happens: the hooks of what was created are closed exactly once, the engine forgets the request, and what the
machinery did wrong ends this request alone, as FAILED with its boundary. What is paid once a turn does not depend on
how many tokens came before it: the request's own growing ids go to the engine as they are.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from agentrl.chat.base import Chat, ParsedTurn
from agentrl.engine.base import Engine, EngineError, Generation, GenerationFinish, Sampling
from agentrl.errors import UserError, contained, describe
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import offered
from agentrl.plugins.types import Message, Task
from agentrl.recipe.schema import RolloutSection
from agentrl.rollout import hooks
from agentrl.rollout.calls import Caller, as_text, assistant_message, bounded
from agentrl.rollout.deadline import GRACE, CancelledFromWithinError, DeadlineExceededError, DeadlineTimer
from agentrl.rollout.request import AsyncRolloutRequest, Opening, RequestState, Seed, TransitionError, derive, nth
from agentrl.rollout.scorer import Scorer
from agentrl.trajectory import Boundary, Failure, FinishReason, InvariantError, Trajectory, check_invariants

_DRIVER = Boundary.INFRASTRUCTURE, "driver"
_CHAT = Boundary.INFRASTRUCTURE, "chat"
_ENGINE = Boundary.ENGINE, "engine"
_ENDS = RequestState.FAILED, RequestState.ABORTED
_log = logging.getLogger("agentrl.rollout")


class Driver:
    """Serves a whole run and thousands of requests at once; what is per request lives in the request."""

    def __init__(
        self,
        *,
        engine: Engine,
        chat: Chat,
        environment: Environment,
        tools: Sequence[Tool],
        limits: RolloutSection,
        scorer: Scorer | None = None,
        occasion: str = "",
    ) -> None:
        """Build a driver. tools: those of the recipe; the environment's own come with it. scorer: the recipe's reward
        functions. occasion: what its requests are for, such as `step_3`; their ids begin with it."""
        self._engine = engine
        self._chat = chat
        self._environment = environment
        self._tools = tuple(tools)
        self._own = environment.tools()
        self._schemas = {tool.name: tool.schema for tool in (*self._tools, *self._own)}
        self.scorer = scorer or Scorer()
        self._weights = self.scorer.weights
        self._limits = limits
        self._caller = Caller(chat, limits)
        self._prefix = f"{occasion}/" if occasion else ""
        self._count = 0

    @property
    def limits(self) -> RolloutSection:
        """The recipe's section `rollout`."""
        return self._limits

    @property
    def patience(self) -> float:
        """Seconds after which a request must be over, unless a plugin ignores its cancellation."""
        hook = self._limits.turn_timeout + hooks.RELEASE_SECONDS + 3 * GRACE
        return self._limits.timeout + GRACE + hook * (len(self._tools) + len(self._own) + self.scorer.functions + 1)

    def request(
        self, task: Task, sample: int, *, seed: Seed = 0, attempt: int = 0, opening: Opening | None = None
    ) -> AsyncRolloutRequest:
        """Return a new request. Its tokens depend on `seed` (the run's and the step's), task, sample and attempt alone.

        opening: shared by the samples of a task, so that their prompt is rendered once.
        """
        self._count += 1
        own = derive(seed, task.id, sample, attempt)
        name = f"{self._prefix}{task.id}#{sample}.{self._count}"
        return AsyncRolloutRequest(name, task, sample, own, opening=opening if opening is not None else Opening())

    async def drive(self, request: AsyncRolloutRequest, *, resumable: bool = False) -> Trajectory:
        """Drive a PENDING request, or a kept ABORTED one further, to its end, in a task of its own, which is left
        behind when a plugin swallows every cancellation. Whatever goes wrong is in the trajectory: it raises
        CancelledError when it is cancelled, and TransitionError for a request in any other state. One that is ended by
        `request.own.stop` is ABORTED.

        resumable: a request that the engine aborts keeps its sessions, so that it can be driven on; whoever does not
        drive it on must `discard` it.
        """
        self._check_drivable(request)
        patience = self.patience
        task = await request.own.run(self._drive(request, resumable), patience, patience - self._limits.timeout)
        if not task.done():
            return await self._abandon(request, "it ignores its cancellation and was left behind")
        if not task.cancelled():
            return task.result()
        if request.own.stopped:
            return self._freeze(request)
        return await self._abandon(request, str(CancelledFromWithinError()))

    async def _drive(self, request: AsyncRolloutRequest, resumable: bool) -> Trajectory:
        """Drive a request; see `drive`. Raises CancelledError alone."""
        started = time.monotonic()
        request.deadline = started + self._limits.timeout - request.seconds["total"]
        timer = DeadlineTimer(request.own)
        try:
            await self._run(request, timer)
        except asyncio.CancelledError:
            if request.own.stopped:
                resumable = False
                request.end(RequestState.ABORTED, FinishReason.ABORTED)
                raise
            self._fail(request, CancelledFromWithinError())
        except BaseException as error:  # noqa: BLE001 - the boundary of every request
            self._fail(request, contained(error))
        finally:
            timer.close()
            self._forget(request)
            if not (resumable and request.state is RequestState.ABORTED):
                await self._release(request)
            request.seconds["total"] += time.monotonic() - started
        return self._freeze(request)

    def _check_drivable(self, request: AsyncRolloutRequest) -> None:
        if request.state is RequestState.PENDING or (request.state is RequestState.ABORTED and request.begun):
            return
        raise TransitionError(f"{request.id} is {request.state}, and its sessions are released: it cannot be driven")

    async def _release(self, request: AsyncRolloutRequest) -> None:
        try:
            await hooks.release_all(request)
        except asyncio.CancelledError:
            if request.state not in _ENDS:
                request.end(RequestState.ABORTED, FinishReason.ABORTED)
            raise

    async def discard(self, request: AsyncRolloutRequest) -> None:
        """Give up an aborted request that was kept: release what it holds."""
        await hooks.release_all(request)

    async def _abandon(self, request: AsyncRolloutRequest, why: str) -> Trajectory:
        """Close a request whose task came to no trajectory: FAILED, at whose code it was."""
        boundary, where = request.at
        failure = Failure(boundary, f"{where}: {why}")
        trajectory = replace(request.trajectory(), finish=FinishReason.ERROR, failure=failure, rewards={})
        self._forget(request)
        await hooks.release_all(request)
        return trajectory

    async def _run(self, request: AsyncRolloutRequest, timer: DeadlineTimer) -> None:
        if request.state is RequestState.PENDING:
            request.tools = offered(request.task, self._tools, self._environment)
            started = time.monotonic()
            await hooks.create_all(request, self._environment, timer)
            request.seconds["hooks"] += time.monotonic() - started
            self._open(request)
        for begun in request.begun:
            begun.session.deadline = request.deadline
        request.move(RequestState.RUNNING)
        finish = await self._converse(request, timer)
        if finish is FinishReason.ABORTED:
            request.end(RequestState.ABORTED, finish)
            return
        if request.turn_count == 0:
            request.at = _ENGINE
            raise EngineError(f"no token came within {self._limits.turn_timeout:g} seconds (rollout.turn_timeout)")
        started = time.monotonic()
        rewards = await hooks.calc_rewards(request, timer, self._limits.turn_timeout)
        rewards = await self.scorer.score(request, rewards, finish, timer)
        hooks.check_sum(rewards, self._weights)
        request.rewards = rewards
        request.seconds["hooks"] += time.monotonic() - started
        request.finish = finish

    async def _converse(self, request: AsyncRolloutRequest, timer: DeadlineTimer) -> FinishReason:
        """Drive turn after turn, and return why the request is over."""
        finish: FinishReason | None = None
        while finish is None:
            finish = await self._turn(request, timer)
        return finish

    def _open(self, request: AsyncRolloutRequest) -> None:
        request.at = _CHAT
        schemas = [self._schemas[name] for name in request.tools]
        ids = request.opening.render(self._chat, request.messages, schemas)
        if len(ids) >= self._most():
            request.at = Boundary.ENVIRONMENT, f"{self._environment.name}.create"
            raise UserError(
                f"the opening prompt has {len(ids)} tokens, with room for {self._most() - 1} and an answer "
                f"(rollout.max_tokens {self._limits.max_tokens}, the model's context {self._engine.max_context})"
            )
        request.open_with(ids)
        request.at = _DRIVER

    def _most(self) -> int:
        return min(self._limits.max_tokens, self._engine.max_context)

    async def _turn(self, request: AsyncRolloutRequest, timer: DeadlineTimer) -> FinishReason | None:
        """Drive one turn: sample, parse, let tools or the environment answer, and write down what they said. Why the
        request is over, or None."""
        limits, started = self._limits, time.monotonic()
        deadline = min(started + limits.turn_timeout, request.deadline)
        generation = await self._sample(request, timer, deadline)
        request.seconds["engine"] += time.monotonic() - started
        if generation is None or generation.finish is GenerationFinish.ABORT:
            return self._stopped(request, timer.expired)
        turn_ids = request.close_turn()
        request.at = _CHAT
        parsed = bounded(self._chat.parse(turn_ids))
        request.messages.append(assistant_message(parsed, request.turn_count - 1))
        room = self._most() - len(request.ids)
        if generation.finish is GenerationFinish.LENGTH and (room <= 0 or not parsed.calls):
            return FinishReason.LENGTH
        replies, finish = await (self._tool_turn if parsed.calls else self._reply)(request, timer, parsed, deadline)
        request.messages.extend(replies)
        if finish is not None:
            return finish
        if request.turn_count >= limits.max_turns:
            return FinishReason.MAX_TURNS
        request.at = _CHAT
        added = self._chat.bridge(turn_ids, replies if self._chat.images else as_text(replies))
        if len(added) >= room:
            return FinishReason.LENGTH
        request.add_bridge(added)
        request.move(RequestState.RUNNING)
        return FinishReason.TIMEOUT if time.monotonic() >= request.deadline else None

    async def _sample(self, request: AsyncRolloutRequest, timer: DeadlineTimer, deadline: float) -> Generation | None:
        """Return the engine's answer, in the request already; None when it had to be cancelled."""
        limits, engine = self._limits, self._engine
        room = min(limits.max_turn_tokens - request.turn_tokens, self._most() - len(request.ids))
        sampling = Sampling(
            max_tokens=room, temperature=limits.temperature, top_p=limits.top_p, top_k=limits.top_k,
            stop_ids=self._chat.stop_ids, seed=nth(request.seed, len(request.versions)),
        )  # fmt: skip
        request.at = _ENGINE
        try:
            work = engine.generate(request.ids, sampling, request.id)
            generation = await timer.wait(work, deadline, lambda: engine.abort(request.id))
        except DeadlineExceededError:
            return None
        if len(generation.ids) > room:
            raise EngineError(f"{len(generation.ids)} ids came where at most {room} were asked for")
        request.add_sampled(generation)
        if request.open_turn is None and generation.finish is not GenerationFinish.ABORT:
            raise EngineError(f"a turn ended by {generation.finish} without a token")
        return generation

    def _stopped(self, request: AsyncRolloutRequest, expired: bool) -> FinishReason:
        """Handle an engine that was stopped: by our own deadline, which ends the turn where it is, or from outside."""
        if not expired:
            return FinishReason.ABORTED
        if request.open_turn is not None:
            request.at = _CHAT
            parsed = bounded(self._chat.parse(request.close_turn()))
            request.messages.append(assistant_message(parsed, request.turn_count - 1))
        return FinishReason.TIMEOUT

    async def _tool_turn(
        self, request: AsyncRolloutRequest, timer: DeadlineTimer, parsed: ParsedTurn, deadline: float
    ) -> tuple[list[Message], FinishReason | None]:
        request.move(RequestState.TOOL_CALLING)
        started = time.monotonic()
        answers = await self._caller.answer(request, parsed.calls, deadline, timer)
        request.seconds["tools"] += time.monotonic() - started
        if answers.done:
            return answers.messages, FinishReason.ENV_DONE
        if answers.late:
            return answers.messages, FinishReason.TIMEOUT
        return answers.messages, FinishReason.MAX_TOOL_CALLS if answers.exhausted else None

    async def _reply(
        self, request: AsyncRolloutRequest, timer: DeadlineTimer, parsed: ParsedTurn, deadline: float
    ) -> tuple[list[Message], FinishReason | None]:
        """Let the environment answer, in `turn_timeout` seconds of its own: when it needs more, the fault is not the
        model's."""
        request.move(RequestState.INTERACTING)
        environment, started = self._environment, time.monotonic()
        request.at = Boundary.ENVIRONMENT, f"{environment.name}.execute"
        work = environment.execute(request.session_of(environment), request.messages[-1])
        try:
            reply = await timer.wait(work, min(started + self._limits.turn_timeout, request.deadline))
        except DeadlineExceededError:
            if time.monotonic() < request.deadline:
                raise
            return [], FinishReason.TIMEOUT
        request.seconds["environment"] += time.monotonic() - started
        if reply.reward is not None:
            request.add_step_reward(hooks.finite(reply.reward, "step"))
        messages = hooks.checked_messages(reply.messages)
        if reply.done:
            return messages, FinishReason.ENV_DONE if messages else FinishReason.STOP
        if not messages:
            raise hooks.PluginError("it returned no message and is not done")
        return messages, None

    def _fail(self, request: AsyncRolloutRequest, error: BaseException) -> None:
        boundary, where = request.at
        line = f"{where}: {describe(error)}"
        _log.debug("%s failed at %s", request.id, line, exc_info=error)
        request.end(RequestState.FAILED, FinishReason.ERROR, Failure(boundary, line))

    def _forget(self, request: AsyncRolloutRequest) -> None:
        self._forget_id(request, request.id)

    def _forget_id(self, request: AsyncRolloutRequest, request_id: str) -> None:
        """Let the engine free what it keeps under `request_id`, one of the request's."""
        try:
            self._engine.finish(request_id)
        except BaseException as error:  # noqa: BLE001 - boundary: its tokens are whole, so it is kept, and said
            request.extra["engine_finish"] = line = describe(contained(error))
            _log.warning("%s: engine.finish: %s", request_id, line)

    def _freeze(self, request: AsyncRolloutRequest) -> Trajectory:
        """Return the trajectory, whose invariants hold: one whose do not is FAILED, and nobody trains on it."""
        trajectory = request.trajectory(self._weights)
        ended = request.state in _ENDS
        try:
            check_invariants(trajectory)
        except InvariantError as error:
            failure = Failure(Boundary.INFRASTRUCTURE, f"invariants: {error}")
            if not ended:
                request.end(RequestState.FAILED, FinishReason.ERROR, failure)
            return replace(trajectory, finish=FinishReason.ERROR, failure=failure)
        if not ended:
            request.move(RequestState.COMPLETED)
        return trajectory
