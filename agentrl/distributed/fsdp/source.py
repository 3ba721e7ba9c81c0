"""Where rank 0 has the weights from: the files of a model, read one tensor at a time, or, where those are not what the
model's modules hold, the model read whole."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from agentrl.models.streamed import NotStreamed, Read

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """model: modules whose parameters and buffers `read` gives the values of, on the CPU; nothing else may be done with
    them. known: what the other ranks are to be told of the model, small and picklable. note: what people are to know.
    """

    model: Any
    read: Read
    known: Any = None
    note: str = ""


def open_source(stream: Callable[[], tuple[Any, Read]], whole: Callable[[], Any]) -> Source:
    """stream: may raise NotStreamed; then `whole` loads the model."""
    try:
        model, read = stream()
        note = ""
    except NotStreamed as why:
        model, read = whole(), Tensor.detach
        note = f"read whole by the first ({why})"
        _log.warning("the model is %s", note)
    return Source(model, read, getattr(model, "generation_config", None), note)
