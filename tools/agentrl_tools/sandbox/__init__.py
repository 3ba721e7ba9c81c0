"""Code that a model wrote, run apart from everything else: `make_sandbox`, and the types it deals in."""

from agentrl_tools.sandbox.base import Execution, Limits, Sandbox, SandboxSession, Stop
from agentrl_tools.sandbox.make import make_sandbox

__all__ = ["Execution", "Limits", "Sandbox", "SandboxSession", "Stop", "make_sandbox"]
