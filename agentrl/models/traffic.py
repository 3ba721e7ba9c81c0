"""What FSDP2 moves between workers in a pass, from the model's shape: bytes that each worker receives."""

from dataclasses import dataclass

from agentrl.models.memory import REDUCE_BYTES, Setting
from agentrl.models.shape import Shape


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one micro-batch. forward: weights gathered for a pass without gradients. update: those of a pass with
    gradients, which gathers every layer again backwards. gradients: averaged over the workers that hold one copy."""

    forward: int
    update: int
    gradients: int

    @classmethod
    def of(cls, shape: Shape, how: Setting) -> "Traffic":
        layers = shape.parameters - shape.root
        trained = shape.adapter or shape.parameters

        def received(numbers: int, size: int) -> int:
            return numbers * size * (how.shard - 1) // how.shard

        return cls(
            forward=received(shape.parameters, how.compute),
            update=received(2 * layers + shape.root, how.compute),
            gradients=received(trained, REDUCE_BYTES),
        )


def into_node(received: int, workers: int, nodes: int) -> float:
    """Of what each of `workers` workers receives, the bytes that come into each of their `nodes` machines: what one of
    its workers has received, the others take from it."""
    whole = received * workers / (workers - 1)
    return whole * (1 - 1 / nodes)
