"""What goes wrong with workers, each one line that names the worker."""

from agentrl.errors import UserError


class ClusterError(UserError):
    """Ray, its resources or a worker's memory do not suffice, or a worker failed in a way that has a remedy."""


class WorkerLost(ClusterError):  # noqa: N818 - what happened reads better than WorkerLostError
    """A worker died or does not answer, and with it its group. The run can go on from its last checkpoint."""
