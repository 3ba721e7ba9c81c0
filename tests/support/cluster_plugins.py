"""A loss to which things happen in the middle of a worker's update, when a test asks for them by a file."""

import os
import signal
import time
from pathlib import Path

from train_plugins import StopsAfterThree

from agentrl.algo import losses
from agentrl.algo.loss import ppo_clip
from agentrl.algo.terms import LossTerms, Tokens
from agentrl.errors import UserError
from agentrl.recipe.sections.algorithm import AlgorithmSection

FATES = "AGENTRL_TEST_FATES"
"""The folder of the files. Each is used once."""


@losses.register("fateful", vanishes_with_advantage=True)
def fateful(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """ppo_clip, until a file `<fate>_<rank>` is there: kill, stop, memory, user, wait."""
    rank = os.environ.get("RANK", "0")
    for fate in ("kill", "stop", "memory", "user", "wait"):
        file = Path(os.environ[FATES]) / f"{fate}_{rank}"
        if file.exists():
            file.rename(file.with_name(f"{fate}_met"))
            _meet(fate)
    return ppo_clip(tokens, config)


def _meet(fate: str) -> None:
    match fate:
        case "kill":
            print("about to be killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "memory":
            raise MemoryError("Unable to allocate 7.00 GiB")
        case "user":
            raise UserError("the loss wants another recipe")
        case "wait":
            time.sleep(2.0)


class StopsAfterTwo(StopsAfterThree):
    last = 2
