"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/): orthogonal momentum for a network's matrices.

A tiny model learns to copy and to combine from far fewer examples than with AdamW. Float32 throughout, so that a CPU
without fast bfloat16 is not slowed down.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration: steep at 0, within 0.7 .. 1.2 near 1
ITERATIONS = 5


def orthogonal(matrix: Tensor) -> Tensor:
    """`matrix` (rows, columns) with its singular values pushed to about 1, its singular vectors kept."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon:
    """One momentum a matrix. `parameters` are float32 and 2-D."""

    def __init__(self, parameters: Sequence[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        self.parameters = list(parameters)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.buffers = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients: an update of root mean square about `rate` / sqrt(the smaller side)."""
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            if parameter.grad is None:
                continue
            buffer.lerp_(parameter.grad, 1 - self.momentum)
            update = orthogonal(parameter.grad.lerp(buffer, self.momentum))
            scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.mul_(1 - rate * self.weight_decay).add_(update, alpha=-rate * scale)
