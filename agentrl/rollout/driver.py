"""`Driver.drive` takes one request from its first hook to its last, and is the one caller of every plugin.

Whatever happens: the hooks of what was created are closed exactly once, the engine forgets the request, and what the
machinery did wrong ends this request alone, as FAILED with its boundary. What is paid once a turn does not depend on
how many tokens came before it: the request's own growing ids go to the engine as they are.
"""

import asyncio
import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from agentrl.chat.base import Chat, ParsedTurn, Seeing, StrictlyCalling
from agentrl.constraint import Constraint
from agentrl.containment.deadline import GRACE, CancelledFromWithinError, DeadlineExceededError, DeadlineTimer
from agentrl.engine.base import ConstraintError, Engine, EngineError, Generation, GenerationFinish, Sampling
from agentrl.errors import EnvironmentLostError, UserError, WorkspaceError, contained, describe, nearest
from agentrl.images import ImageSpan, all_stored, check_count, hashes, keyed, without_last_image
from agentrl.plugins.environment import Environment
from agentrl.plugins.span import begin_sample
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import offered
from agentrl.plugins.types import ArgumentError, Conversed, InfrastructureError, Json, Message, Reply, Task
from agentrl.recipe.sections.rollout import CompactSection, RolloutSection
from agentrl.rollout import hooks
from agentrl.rollout.calls import Caller, as_text, assistant_message, bounded
from agentrl.rollout.compaction import COUNTS, asked, reopened, threshold
from agentrl.rollout.conversation import Conversation, Seed, derive, nth
from agentrl.rollout.request import AsyncRolloutRequest, Opening, RequestState, TransitionError
from agentrl.rollout.scorer import Scorer
from agentrl.rollout.trajectory_file import note_schemas
from agentrl.rollout.workspaces import Workspaces
from agentrl.trajectory import Boundary, Failure, FinishReason, InvariantError, Trajectory, check_invariants

_DRIVER = Boundary.INFRASTRUCTURE, "driver"
_CHAT = Boundary.INFRASTRUCTURE, "chat"
_ENGINE = Boundary.ENGINE, "engine"
_OWN_BOUNDARIES = {WorkspaceError: Boundary.WORKSPACE, EnvironmentLostError: Boundary.ENVIRONMENT}
_ENDS = RequestState.FAILED, RequestState.ABORTED
_AROUND = 8  # tokens before and after a place, in an error about it
_log = logging.getLogger("agentrl.rollout")


def takes_images(engine: Engine, chat: Chat) -> bool:
    """Whether messages may hold images."""
    return chat.images and (engine.images or not isinstance(chat, Seeing))


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
        label: str = "",
        workspaces: Workspaces | None = None,
    ) -> None:
        """Build a driver. tools: those of the recipe; the environment's own come with it. scorer: the recipe's reward
        functions. label: what its requests are for, such as `step_3`; their ids begin with it. workspaces: where each
        request's is opened."""
        self.workspaces = workspaces
        self.engine = engine
        """Samples tokens."""
        self.chat = chat
        """Converts messages to ids and back."""
        self._environment = environment
        self._tools = tuple(tools)
        self._own = environment.tools()
        self._schemas = {id(tool): tool.schema for tool in (*self._tools, *self._own)}
        note_schemas(self._schemas.values())
        self.scorer = scorer or Scorer()
        self._weights = self.scorer.weights
        self.limits = limits
        """The recipe's section `rollout`."""
        self._seeing = chat if isinstance(chat, Seeing) and engine.images else None
        self._blind = isinstance(chat, Seeing) and self._seeing is None
        self._shows = takes_images(engine, chat)
        self.caller = Caller(chat, limits, self._make_converse, images=self._seeing is not None)
        """Runs the calls of tools."""
        self._prefix = f"{label}/" if label else ""
        self._count = 0
        if limits.strict_calls:
            if not (engine.constrains and engine.in_process):
                raise UserError(
                    f"rollout.strict_calls: {type(engine).__name__} does not hold calls to schemas and tell which ids "
                    "that allowed, which the trainer has to know; use the engine local or transformers, or leave it out"
                )
            if self._schemas:
                constraint = self._strict(Conversation(), list(self._schemas.values()))
                try:
                    engine.check_constraint(Sampling(1, stop_ids=chat.stop_ids, constraint=constraint))
                except ConstraintError as error:
                    raise UserError(f"rollout.strict_calls: {error}") from None

    @property
    def patience(self) -> float:
        """Seconds after which a request must be over, unless a plugin ignores its cancellation."""
        hook = self.limits.turn_timeout + hooks.RELEASE_SECONDS + 3 * GRACE
        return self.limits.timeout + GRACE + hook * (len(self._tools) + len(self._own) + self.scorer.functions + 1)

    def request(
        self, task: Task, sample: int, *, seed: Seed = 0, attempt: int = 0, opening: Opening | None = None
    ) -> AsyncRolloutRequest:
        """A new request. Its tokens depend on `seed` (the run's and the step's), task, sample and attempt alone.

        opening: shared by the samples of a task, so that their prompt is rendered once.
        """
        self._count += 1
        own = derive(seed, task.id, sample, attempt)
        name = f"{self._prefix}{task.id}#{sample}.{self._count}"
        return AsyncRolloutRequest(name, task, sample, opening if opening is not None else Opening(), seed=own)

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
        task = await request.own.run(self._drive(request, resumable), patience, patience - self.limits.timeout)
        if not task.done():
            return await self._abandon(request, "it ignores its cancellation and was left behind")
        if not task.cancelled():
            return task.result()
        if request.own.stopped:
            return self._freeze(request)
        return await self._abandon(request, str(CancelledFromWithinError()))

    async def _drive(self, request: AsyncRolloutRequest, resumable: bool) -> Trajectory:
        """Drive a request; see `drive`. Raises CancelledError alone."""
        begin_sample(request.named)
        started = time.monotonic()
        allowed = min(self.limits.timeout, request.task.seconds or math.inf)
        request.main.deadline = started + allowed - request.seconds["total"]
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
            if not (resumable and request.state is RequestState.ABORTED and not request.aborted_in_tool):
                await self._release(request)
            request.seconds["total"] += time.monotonic() - started
        return self._freeze(request)

    def _check_drivable(self, request: AsyncRolloutRequest) -> None:
        if request.state is RequestState.PENDING or (request.state is RequestState.ABORTED and request.created):
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
        boundary, where = request.main.at
        failure = Failure(boundary, f"{where}: {why}")
        trajectory = replace(request.trajectory(), finish=FinishReason.ERROR, failure=failure, rewards={})
        self._forget(request)
        await hooks.release_all(request)
        return trajectory

    async def _run(self, request: AsyncRolloutRequest, timer: DeadlineTimer) -> None:
        if request.state is RequestState.PENDING:
            request.main.tools = offered(request.task, self._tools, self._environment)
            started = time.monotonic()
            await hooks.create_all(request, self._environment, timer, self.checked, self.workspaces)
            request.waited("hooks", started)
            self._open(request)
        for created in request.created:
            created.session.deadline = request.main.deadline
        request.move(RequestState.RUNNING)
        finish = await self._converse(request, timer)
        if finish is FinishReason.ABORTED:
            request.end(RequestState.ABORTED, finish)
            return
        if request.turn_count == 0:
            request.main.at = _ENGINE
            raise EngineError(f"no token came within {self.limits.turn_timeout:g} seconds (rollout.turn_timeout)")
        started = time.monotonic()
        await hooks.end_workspace(request, timer, self.limits.turn_timeout)
        rewards = await hooks.calc_rewards(request, timer, self.limits.turn_timeout)
        rewards = await self.scorer.score(request, rewards, finish, timer)
        hooks.check_sum(rewards, self._weights)
        request.rewards = rewards
        request.waited("hooks", started)
        request.finish = finish

    async def _converse(self, request: AsyncRolloutRequest, timer: DeadlineTimer) -> FinishReason:
        return await self._turns(request, request.main, timer)

    async def _turns(
        self, request: AsyncRolloutRequest, conversation: Conversation, timer: DeadlineTimer
    ) -> FinishReason:
        """Drive turn after turn, and return why the conversation is over."""
        finish: FinishReason | None = None
        while finish is None:
            finish = await self._turn(request, conversation, timer)
        return finish

    def _open(self, request: AsyncRolloutRequest) -> None:
        request.main.at = _CHAT
        main = request.main
        ids = request.opening.render(self.chat, main.messages, self.offered(main))
        if len(ids) >= (most := self._most(main)):
            request.main.at = Boundary.ENVIRONMENT, f"{self._environment.name}.create"
            raise UserError(
                f"the opening prompt has {len(ids)} tokens, with room for {most - 1} and an answer "
                f"(rollout.max_tokens {self.limits.max_tokens}, the model's context {self.engine.max_context})"
            )
        request.main.open_with(ids, self._images_in(ids, request.main.messages))
        request.main.opening_messages = tuple(request.main.messages)
        request.main.at = _DRIVER

    def _images_in(self, ids: Sequence[int], messages: Sequence[Message]) -> Sequence[ImageSpan]:
        """Where the images of messages stand in their ids."""
        return () if self._seeing is None else self._seeing.images_in(ids, messages)

    async def checked(self, given: object, what: str = "messages") -> list[Message]:
        """Messages of an environment or a tool, with their images in the store. Raises PluginError, and
        ImageError for what is no image, or none that the model takes, and for more than a conversation may hold."""
        messages = hooks.checked_messages(given, what)
        check_count(messages, self.limits.max_images)
        return await self._shown(messages)

    async def _shown(self, messages: list[Message]) -> list[Message]:
        """Messages with their images in the store. Raises as `checked`."""
        if self._seeing is not None:
            return await all_stored(messages, self._seeing.image_tokens)
        if self._blind and hashes(messages):
            raise UserError("its messages hold images, which the engine does not take: choose one that does")
        return messages

    def offered(self, conversation: Conversation) -> list[dict[str, Json]]:
        """The schemas of a conversation's tools; of those that a task alone has, made anew."""
        found = [self._schemas.get(id(tool)) or tool.schema for tool in conversation.tools.values()]
        if any(id(tool) not in self._schemas for tool in conversation.tools.values()):
            note_schemas(found)
        return found

    def _strict(self, conversation: Conversation, tools: Sequence[dict[str, Json]]) -> Constraint:
        """What holds the calls of a conversation to its tools. Raises UserError."""
        if conversation.strict is None:
            if not isinstance(self.chat, StrictlyCalling):
                raise UserError("rollout.strict_calls: this model's chat cannot be held to schemas; leave it out")
            try:
                conversation.strict = self.chat.strict(tools)
            except UserError as error:
                raise UserError(f"rollout.strict_calls: {error}") from None
        return conversation.strict

    def _most(self, conversation: Conversation) -> int:
        """The tokens that a conversation may have."""
        most = min(self.limits.max_tokens, self.engine.max_context)
        return min(most, conversation.max_tokens) if conversation.max_tokens else most

    def _room(self, request: AsyncRolloutRequest, conversation: Conversation) -> int:
        """The tokens that a conversation may still have."""
        return self._within_total(request, self._most(conversation) - len(conversation.ids))

    def _within_total(self, request: AsyncRolloutRequest, room: int) -> int:
        """`room`, or what is left of the tokens of all conversations together where that is less."""
        total = self.limits.max_total_tokens
        return room if total is None else min(room, total - request.total_tokens - request.reserved)

    async def _turn(
        self, request: AsyncRolloutRequest, conversation: Conversation, timer: DeadlineTimer
    ) -> FinishReason | None:
        """Drive one turn: sample, parse, let tools or the environment answer, and write down what they said. Why the
        conversation is over, or None."""
        limits, started = self.limits, time.monotonic()
        deadline = min(started + limits.turn_timeout, conversation.deadline)
        request.begin_turn(conversation)
        if conversation.is_main:
            conversation.state_key = self._state_of(request)
        generation = await self._sample(request, conversation, timer, deadline)
        if conversation.is_main:
            request.waited("engine", started)
        if generation is None or generation.finish is GenerationFinish.ABORT:
            return self._stopped(conversation, timer.expired)
        turn_ids = conversation.close_turn()
        conversation.at = _CHAT
        parsed = bounded(self.chat.parse(turn_ids))
        conversation.messages.append(assistant_message(parsed, conversation.orders[-1]))
        if conversation.summarizing:
            return self._go_on_from(request, conversation, parsed.content.strip())
        if generation.finish is GenerationFinish.LENGTH and (
            self._room(request, conversation) <= 0 or not parsed.calls
        ):
            return FinishReason.LENGTH
        replies, finish = await (self._tool_turn if parsed.calls else self._reply)(
            request, conversation, timer, parsed, deadline
        )
        return finish if finish is not None else self._add_replies(request, conversation, turn_ids, replies)

    def _state_of(self, request: AsyncRolloutRequest) -> str:
        """The environment's name of the state that a turn begins in."""
        request.main.at = Boundary.ENVIRONMENT, f"{self._environment.name}.state_key"
        found = self._environment.state_key(request.session_of(self._environment))
        if not isinstance(found, str):
            raise TypeError(f"expected a text, got {type(found).__name__}")
        request.main.at = _DRIVER
        return found

    def _add_replies(
        self, request: AsyncRolloutRequest, conversation: Conversation, turn_ids: list[int], replies: list[Message]
    ) -> FinishReason | None:
        """Write down what follows a turn, the request for a summary where one is due. Why the conversation is over, or
        None."""
        conversation.at = _CHAT
        if request.turns_started >= self.limits.max_turns or 0 < conversation.max_turns <= conversation.turns_taken:
            return FinishReason.MAX_TURNS
        room = self._room(request, conversation)
        said, added = self._fitted(turn_ids, replies, room)
        if said is not replies:
            conversation.messages[len(conversation.messages) - len(replies) :] = said
            replies = said
        section = self.limits.compact
        if section is not None and self._summary_due(section, request, conversation, len(added)):
            said = asked(section, replies)
            added = self._bridge(turn_ids, said)
            if len(added) < room:
                conversation.messages[len(conversation.messages) - len(replies) :] = replies = said
                conversation.summarizing = True
        if len(added) >= room:
            return FinishReason.LENGTH
        conversation.add_bridge(added, self._images_in(added, replies))
        if conversation.is_main:
            request.move(RequestState.RUNNING)
        return FinishReason.TIMEOUT if time.monotonic() >= conversation.deadline else None

    def _bridge(self, turn_ids: list[int], replies: list[Message]) -> list[int]:
        return self.chat.bridge(turn_ids, replies if self._shows else as_text(replies))

    def _fitted(self, turn_ids: list[int], replies: list[Message], room: int) -> tuple[list[Message], list[int]]:
        """The replies and their ids. Where they do not fit, their images are left out, the last first, which is
        told in words."""
        said, added = replies, self._bridge(turn_ids, replies)
        while self._seeing is not None and len(added) >= room and (shorter := without_last_image(said)) is not None:
            said, added = shorter, self._bridge(turn_ids, shorter)
        return (said, added) if len(added) < room else (replies, added)

    def _summary_due(
        self, section: CompactSection, request: AsyncRolloutRequest, conversation: Conversation, new: int
    ) -> bool:
        """Whether a conversation that `new` tokens are added to is to be summarized: it nears its limit, and
        both the summary and a turn after it are allowed."""
        if (
            len(conversation.ids) + new < threshold(section, self._most(conversation))
            or request.summaries >= section.most
        ):
            return False
        left = self.limits.max_turns - request.turns_started
        return min(left, conversation.max_turns - conversation.turns_taken if conversation.max_turns else left) >= 2

    def _go_on_from(
        self, request: AsyncRolloutRequest, conversation: Conversation, summary: str
    ) -> FinishReason | None:
        """Begin a conversation anew from its summary. It is over where that is empty or leaves no room."""
        section = self.limits.compact
        assert section is not None, "a summary was asked for"
        request.summaries += 1
        messages = reopened(section, conversation.opening_messages, summary, conversation.messages)
        ids = array("i", self.chat.render(messages, self.offered(conversation)) if summary else ())
        if not 0 < len(ids) < self._within_total(request, self._most(conversation)):
            request.summaries_failed += 1
            return FinishReason.LENGTH
        if request.turns_started >= self.limits.max_turns:  # other conversations have used up what was left
            return FinishReason.MAX_TURNS
        past = conversation.begin_anew(request.branch_name())
        request.branches.append(past)
        self._forget_id(request, past.name)
        conversation.messages[:] = messages
        conversation.open_with(ids, self._images_in(ids, messages))
        return FinishReason.TIMEOUT if time.monotonic() >= conversation.deadline else None

    async def _sample(
        self, request: AsyncRolloutRequest, conversation: Conversation, timer: DeadlineTimer, deadline: float
    ) -> Generation | None:
        """The engine's answer, in the conversation already; None when it had to be cancelled."""
        limits, engine = self.limits, self.engine
        room = min(limits.max_turn_tokens - conversation.turn_tokens, self._room(request, conversation))
        sampling = Sampling(
            max_tokens=room, temperature=limits.temperature, top_p=limits.top_p, top_k=limits.top_k,
            stop_ids=self.chat.stop_ids, seed=nth(conversation.seed, len(conversation.versions)),
        )  # fmt: skip
        if limits.strict_calls and not conversation.summarizing and (tools := self.offered(conversation)):
            begun = conversation.ids[conversation.open_turn :] if conversation.open_turn is not None else ()
            sampling = replace(sampling, constraint=self._strict(conversation, tools), said=tuple(begun))
        conversation.at = _ENGINE
        request.reserved += room
        try:
            prompt: Sequence[int] = conversation.ids
            if conversation.images:
                prompt = keyed(conversation.ids, conversation.images).tolist()
            work = engine.generate(prompt, sampling, conversation.name)
            generation = await timer.wait(work, deadline, lambda: engine.abort(conversation.name))
        except DeadlineExceededError:
            return None
        finally:
            request.reserved -= room
        if len(generation.ids) > room:
            raise EngineError(f"{len(generation.ids)} ids came where at most {room} were asked for")
        conversation.add_sampled(generation)
        if generation.usage:
            request.extra["usage"] = dict(Counter(request.extra.get("usage", {})) + Counter(generation.usage))
        if conversation.open_turn is None and generation.finish is not GenerationFinish.ABORT:
            raise EngineError(f"a turn ended by {generation.finish} without a token")
        return generation

    def _stopped(self, conversation: Conversation, expired: bool) -> FinishReason:
        """Handle an engine that was stopped: by our own deadline, which ends the turn where it is, or from outside."""
        if not expired:
            return FinishReason.ABORTED
        if conversation.open_turn is not None:
            conversation.at = _CHAT
            parsed = bounded(self.chat.parse(conversation.close_turn()))
            conversation.messages.append(assistant_message(parsed, conversation.orders[-1]))
        return FinishReason.TIMEOUT

    async def _tool_turn(
        self,
        request: AsyncRolloutRequest,
        conversation: Conversation,
        timer: DeadlineTimer,
        parsed: ParsedTurn,
        deadline: float,
    ) -> tuple[list[Message], FinishReason | None]:
        """Let the tools answer; their messages are in the conversation already."""
        if conversation.is_main:
            request.move(RequestState.TOOL_CALLING)
        started = time.monotonic()
        answers = await self.caller.answer(request, conversation, parsed.calls, deadline, timer)
        if conversation.is_main:
            request.waited("tools", started)
        conversation.messages.extend(answers.messages)
        if request.aborted_in_tool:
            return answers.messages, FinishReason.ABORTED
        if answers.done:
            return answers.messages, FinishReason.ENV_DONE
        if answers.late:
            return answers.messages, FinishReason.TIMEOUT
        return answers.messages, FinishReason.MAX_TOOL_CALLS if answers.exhausted else None

    async def _reply(
        self,
        request: AsyncRolloutRequest,
        conversation: Conversation,
        timer: DeadlineTimer,
        parsed: ParsedTurn,
        deadline: float,
    ) -> tuple[list[Message], FinishReason | None]:
        """Let the environment answer, in `turn_timeout` seconds of its own: when it needs more, the fault is not the
        model's. Its messages are in the conversation already. A conversation of a tool is over."""
        if not conversation.is_main:
            return [], FinishReason.STOP
        request.move(RequestState.INTERACTING)
        environment, started = self._environment, time.monotonic()
        request.main.at = Boundary.ENVIRONMENT, f"{environment.name}.execute"
        work = environment.execute(request.session_of(environment), request.main.messages[-1])
        try:
            reply = await timer.wait(work, min(started + self.limits.turn_timeout, request.main.deadline))
        except DeadlineExceededError:
            if time.monotonic() < request.main.deadline:
                raise
            return [], FinishReason.TIMEOUT
        request.waited("environment", started)
        if not isinstance(reply, Reply):
            kind = type(reply).__name__
            raise hooks.PluginError(f"it returned {kind}, not a Reply; Reply(done=True) ends the episode")
        if reply.reward is not None:
            request.add_step_reward(conversation, hooks.finite(reply.reward, "step"))
        messages = await self._shown(self._fewer(conversation, hooks.checked_messages(reply.messages)))
        request.main.messages.extend(messages)
        if reply.done:
            return messages, FinishReason.ENV_DONE if messages else FinishReason.STOP
        if not messages:
            raise hooks.PluginError("it returned no message and is not done")
        return messages, None

    def _fewer(self, conversation: Conversation, messages: list[Message]) -> list[Message]:
        """Messages with no more images than the conversation may hold, the last left out, which is told in
        words."""
        most = self.limits.max_images - len(hashes(conversation.messages))
        while len(hashes(messages)) > max(0, most) and (fewer := without_last_image(messages)) is not None:
            messages = fewer
        return messages

    def _fail(self, request: AsyncRolloutRequest, error: BaseException) -> None:
        boundary, where = request.main.at
        for kind, own in _OWN_BOUNDARIES.items():
            boundary = own if isinstance(error, kind) else boundary
        line = f"{where}: {describe(error)}"
        _log.debug("%s failed at %s", request.id, line, exc_info=error)
        request.end(RequestState.FAILED, FinishReason.ERROR, Failure(boundary, line))

    def _make_converse(
        self, request: AsyncRolloutRequest, conversation: Conversation, index: int, deadline: float
    ) -> "_Converse":
        return _Converse(
            self, request, conversation, derive(conversation.seed, len(conversation.versions), index), deadline
        )

    async def hold(self, request: AsyncRolloutRequest, conversation: Conversation) -> FinishReason:
        """Drive a conversation of a tool, a branch of the request, to its end. Where the machinery fails, so does the
        request, whatever the tool makes of the InfrastructureError that this raises."""
        timer = DeadlineTimer()
        try:
            conversation.at = _CHAT
            ids = array("i", self.chat.render(conversation.messages, self.offered(conversation)))
            if len(ids) >= self._room(request, conversation):
                room = max(0, self._room(request, conversation) - 1)
                raise ArgumentError(f"it begins with {len(ids)} tokens, with room for {room} and an answer")
            conversation.open_with(ids, self._images_in(ids, conversation.messages))
            request.branches.append(conversation)
            finish = await self._turns(request, conversation, timer)
        except (ArgumentError, asyncio.CancelledError):
            raise
        except BaseException as error:
            request.broken = request.broken or (conversation.at, contained(error))
            raise InfrastructureError(f"the conversation failed: {describe(request.broken[1])}") from error
        finally:
            timer.close()
            self._forget_id(request, conversation.name)
        if finish is FinishReason.ABORTED:
            request.aborted_in_tool = True
            raise InfrastructureError("the conversation was aborted")
        return finish

    def _forget(self, request: AsyncRolloutRequest) -> None:
        self._forget_id(request, request.main.name)
        for branch in request.branches:
            self._forget_id(request, branch.name)

    def _forget_id(self, request: AsyncRolloutRequest, request_id: str) -> None:
        """Let the engine free what it keeps under `request_id`, one of the request's."""
        try:
            self.engine.finish(request_id)
        except BaseException as error:  # noqa: BLE001 - boundary: its tokens are whole, so it is kept, and said
            request.extra["engine_finish"] = line = describe(contained(error))
            _log.warning("%s: engine.finish: %s", request_id, line)

    def _freeze(self, request: AsyncRolloutRequest) -> Trajectory:
        """The trajectory, whose invariants hold: one whose do not is FAILED, and nobody trains on it."""
        if self.limits.compact is not None:
            request.extra |= dict(zip(COUNTS, (request.summaries, request.summaries_failed), strict=True))
        trajectory = request.trajectory(self._weights)
        ended = request.state in _ENDS
        try:
            check_invariants(trajectory)
        except InvariantError as error:
            near = "" if error.token is None else self._around(trajectory, error.token)
            failure = Failure(Boundary.INFRASTRUCTURE, f"invariants: {error}{near}")
            if not ended:
                request.end(RequestState.FAILED, FinishReason.ERROR, failure)
            return replace(trajectory, finish=FinishReason.ERROR, failure=failure)
        if not ended:
            request.move(RequestState.COMPLETED)
        return trajectory

    def _around(self, trajectory: Trajectory, token: int) -> str:
        """The tokens around one, as ids and as text."""
        ids = [int(i) for i in trajectory.ids[max(0, token - _AROUND) : token + _AROUND]]
        try:
            text = repr(self.chat.decode(ids))
        except Exception as found:  # noqa: BLE001 - ids that no tokenizer knows may be what is wrong
            text = describe(found, place=False)
        return f", among {ids}: {text}"


class _Converse:
    """What a call of a tool converses by; see `Converse`."""

    def __init__(
        self, driver: Driver, request: AsyncRolloutRequest, conversation: Conversation, seed: int, deadline: float
    ) -> None:
        self._driver, self._request, self._talk = driver, request, conversation
        self._seed, self._deadline = seed, deadline
        self._held = 0
        self._closed = False

    @property
    def depth(self) -> int:
        return self._talk.depth

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(self._talk.tools)

    def close(self) -> None:
        """See `Conversing.close`."""
        self._closed = True

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[str] = (),
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> Conversed:
        request, most = self._request, self._driver.limits.max_turns
        if self._closed or request.ended:
            raise InfrastructureError("the call is over in which conversations may be held")
        if unknown := [name for name in tools if name not in request.main.tools]:
            raise UserError(f"the task has no tool {unknown[0]!r}{nearest(unknown[0], request.main.tools)}")
        if request.turns_started >= most:
            raise ArgumentError(f"no turn is left of {most} (rollout.max_turns)")
        said = await self._driver.checked(messages)
        self._held += 1
        conversation = Conversation(
            name=request.branch_name(),
            seed=derive(self._seed, self._held),
            messages=said,
            opening_messages=tuple(said),
            tools={name: request.main.tools[name] for name in tools},
            deadline=self._deadline,
            depth=self._talk.depth + 1,
            max_turns=max_turns or 0,
            max_tokens=max_tokens or 0,
        )
        finish = await self._driver.hold(request, conversation)
        done = finish is FinishReason.ENV_DONE
        return Conversed(tuple(conversation.messages), str(finish), conversation.turns_taken, done)
