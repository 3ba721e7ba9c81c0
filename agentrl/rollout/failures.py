"""What a request FAILED of, in one line that a person can act on."""

import traceback
from pathlib import Path

from agentrl.engine.base import EngineError
from agentrl.errors import UserError
from agentrl.plugins.types import InfrastructureError
from agentrl.rollout.hooks import PluginError
from agentrl.rollout.watch import DeadlineExceededError

_LINE = 500  # characters of a foreign error's text


def describe(error: BaseException) -> str:
    """One line: what was raised, and where."""
    if isinstance(error, DeadlineExceededError):
        return "took too long (rollout.turn_timeout, rollout.timeout)"
    if isinstance(error, UserError | PluginError | EngineError | InfrastructureError):
        return " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LINE] + place
