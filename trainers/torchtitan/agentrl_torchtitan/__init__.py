"""torchtitan as a trainer of agentrl, `cluster.trainer: torchtitan`: the policy is torchtitan's Qwen3, divided and
computed by torchtitan; losses, optimizer, checkpoints, the sending of weights and the other roles are agentrl's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.distributed.remote import RayRoles
from agentrl.errors import UserError
from agentrl.recipe.schema import Recipe

if TYPE_CHECKING:
    from agentrl.distributed.worker import TrainWorker


@dataclass(frozen=True, slots=True)
class TitanArgs:
    """`cluster.trainer.args`: how torchtitan divides the work among the workers; what is left shards the weights."""

    tensor_parallel: int = 1
    """Neighbouring workers that share each layer's matrices, and the same samples."""
    replicate: int = 1
    """Copies of the sharded weights (HSDP)."""
    attention: Literal["auto", "flex", "varlen", "sdpa"] = "auto"
    """flex, varlen: sequences packed into one row, on GPUs. sdpa: each padded to the longest. auto: flex on GPUs, else
    sdpa."""

    def __post_init__(self) -> None:
        if min(self.tensor_parallel, self.replicate) < 1:
            raise ValueError("tensor_parallel and replicate are numbers of workers, 1 or more")


class TitanRoles(RayRoles):
    """The role host: Ray workers, whose actor is torchtitan's model. Raises UserError: see `refuse`."""

    def __init__(
        self,
        recipe: Recipe,
        begins: Recipe,
        logs: Path,
        say: Callable[[str], None],
        phase: Callable[[str], None],
        args: TitanArgs,
    ) -> None:
        refuse(recipe, args)
        self._args = args
        super().__init__(divided(recipe, args), divided(begins, args), logs, say, phase)

    def worker_class(self) -> "type[TrainWorker]":
        """The class of the workers, with these arguments."""
        from agentrl_torchtitan.worker import TitanWorker

        return type("TitanWorker", (TitanWorker,), {"args": self._args})


def divided(recipe: Recipe, args: TitanArgs) -> Recipe:
    """The recipe as agentrl's workers read it: which of them have the same samples, and how its own roles are
    sharded."""
    shard = recipe.cluster.size // args.replicate if args.replicate > 1 else 0
    return recipe.changed(cluster={"trainer": None, "tensor_parallel": args.tensor_parallel, "shard": shard})


def refuse(recipe: Recipe, args: TitanArgs) -> None:
    """Raise UserError for what a recipe asks for and torchtitan, or this package, does not do."""
    shares = args.tensor_parallel * args.replicate
    if recipe.cluster.size % shares:
        raise UserError(
            f"cluster.trainer.args: tensor_parallel {args.tensor_parallel} times replicate {args.replicate} does not "
            f"divide the {recipe.cluster.size} workers"
        )
    asked = {
        "model.lora": recipe.model.lora is not None,
        "model.freeze": bool(recipe.model.freeze),
        "algorithm.routing_replay": recipe.algorithm.routing_replay,
    }
    if given := [key for key, value in asked.items() if value]:
        raise UserError(f"the trainer torchtitan does not do {' and '.join(given)}: leave it out, or cluster.trainer")
