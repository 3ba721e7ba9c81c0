"""What a request FAILED of, in one line that a person can act on."""

import traceback
from pathlib import Path

from agentrl.engine.base import EngineError
from agentrl.errors import PluginExitError, UserError
from agentrl.plugins.exits import one_line, said, text_of
from agentrl.plugins.types import InfrastructureError
from agentrl.rollout.deadline import CancelledFromWithinError, DeadlineExceededError
from agentrl.rollout.hooks import PluginError

_OURS = 2_000  # characters of a line that says by itself what to do
_PLAIN = UserError, PluginError, EngineError, InfrastructureError, CancelledFromWithinError


def describe(error: BaseException) -> str:
    """One line: what was raised, and where."""
    if isinstance(error, DeadlineExceededError):
        return "took too long (rollout.turn_timeout, rollout.timeout)"
    if isinstance(error, _PLAIN):
        return one_line(text_of(error), _OURS)
    if isinstance(error, PluginExitError) and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return said(error) + place
