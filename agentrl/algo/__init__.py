"""Advantages, policy losses, regularizers and aggregation, as pure functions of tensors."""

from agentrl.algo import advantage as _advantage  # noqa: F401 - registers the built-in estimators
from agentrl.algo import aggregation as _aggregation  # noqa: F401 - likewise
from agentrl.algo import loss as _loss  # noqa: F401 - registers the built-in losses
from agentrl.algo import returns as _returns  # noqa: F401 - likewise
from agentrl.algo.registry import advantages, aggregations, losses

__all__ = ["advantages", "aggregations", "losses"]
