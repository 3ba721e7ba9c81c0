"""The two ranks of a sharded trainer that publishes: each carries out orders as they come, pickled."""

import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meeting import meet
from tiny_models import qwen3
from torch.distributed.fsdp import fully_shard

from agentrl.models.lora import adapter_parameters, add_adapter
from agentrl.recipe.sections.model import LoraSection
from agentrl.weights.publisher import Publisher


def tiny(adapted: bool) -> Any:
    """67 ids: rows that two ranks cannot share evenly."""
    model = qwen3(vocab_size=67, initializer_range=0.2, tie_word_embeddings=True)
    if adapted:
        add_adapter(model, LoraSection(rank=2, alpha=4), "base")
        with torch.no_grad():
            for i, parameter in enumerate(adapter_parameters(model)):
                parameter.copy_(torch.linspace(-1, 1 + i, parameter.numel()).view_as(parameter))
    return model


def trained(model: Any) -> None:
    """A step: every weight that is trained changes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)


def sharded(kind: str) -> Any:
    model = tiny(kind == "adapted")
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return model


def out_of_memory(*arguments: Any) -> None:
    raise RuntimeError("out of memory")


def run_rank(rank: int, file: Path, orders: Connection) -> None:
    meet(rank, file)
    serve(rank, orders)
    dist.destroy_process_group()


def serve(rank: int, orders: Connection) -> None:
    """An order is a method of Publisher and its arguments, `train`, or `become` (whole | adapted): another trainer.
    `break_buckets` has those filled for other ranks fail. After each, both ranks have to be at the same place of the
    same program."""
    model: Any = None
    publisher: Any = None
    while (order := pickle.loads(orders.recv_bytes())) is not None:
        method, arguments = order
        found = None
        try:
            if method == "become":
                if publisher is not None:
                    publisher.close()
                model = sharded(*arguments)
                publisher = Publisher(model, rank)
            elif method == "train":
                trained(model)
            elif method == "break_buckets":
                publisher._opened()._buckets.fill = out_of_memory
            else:
                found = getattr(publisher, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - it is the answer
            found = error
        count = torch.tensor([float(len(method))])
        dist.all_reduce(count)  # a rank that is behind in its collectives would take this one for another
        assert count.item() == 2 * len(method)
        orders.send_bytes(pickle.dumps(found))
    publisher.close()
