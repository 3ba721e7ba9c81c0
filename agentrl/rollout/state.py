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

    nexts: tuple["RequestState", ...]  # its row of the table


_ENDS = (RequestState.COMPLETED, RequestState.FAILED, RequestState.ABORTED)

TRANSITIONS: dict[RequestState, tuple[RequestState, ...]] = {
    RequestState.PENDING: (RequestState.RUNNING, *_ENDS),
    RequestState.RUNNING: (RequestState.TOOL_CALLING, RequestState.INTERACTING, *_ENDS),
    RequestState.TOOL_CALLING: (RequestState.RUNNING, *_ENDS),
    RequestState.INTERACTING: (RequestState.RUNNING, *_ENDS),
    RequestState.COMPLETED: (),
    RequestState.FAILED: (),
    RequestState.ABORTED: (RequestState.RUNNING,),  # driven on
}

for _state, _nexts in TRANSITIONS.items():
    _state.nexts = _nexts  # an enum hashes in Python, so looking it up costs more than a turn's bookkeeping should


class TransitionError(RuntimeError):
    """A request was moved in a way that the table does not allow."""
