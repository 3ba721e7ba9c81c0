"""The states of a request and the only ways between them. A transition that is not in the table is a bug and raises."""

from enum import StrEnum


class RequestState(StrEnum):
    """Where a request is."""

    PENDING = "pending"  # made; no hook was called yet
    RUNNING = "running"  # the engine samples, or is about to
    TOOL_CALLING = "tool_calling"  # the tools of one turn run
    INTERACTING = "interacting"  # the environment answers a turn without tool calls
    COMPLETED = "completed"  # it ended and its reward is known
    FAILED = "failed"  # the machinery did not do its work; `failure` says whose
    ABORTED = "aborted"  # stopped from outside; its tokens are kept


_ENDS = frozenset({RequestState.COMPLETED, RequestState.FAILED, RequestState.ABORTED})

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.PENDING: _ENDS | {RequestState.RUNNING},
    RequestState.RUNNING: _ENDS | {RequestState.TOOL_CALLING, RequestState.INTERACTING},
    RequestState.TOOL_CALLING: _ENDS | {RequestState.RUNNING},
    RequestState.INTERACTING: _ENDS | {RequestState.RUNNING},
    RequestState.COMPLETED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.ABORTED: frozenset({RequestState.RUNNING}),  # driven on
}


class TransitionError(RuntimeError):
    """A request was moved in a way that the table does not allow."""


def check_transition(request_id: str, old: RequestState, new: RequestState) -> None:
    """Raises TransitionError unless `old -> new` is in the table."""
    if new not in TRANSITIONS[old]:
        raise TransitionError(f"{request_id}: {old} -> {new} is not a transition of a request")
