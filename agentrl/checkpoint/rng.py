"""The state of torch's random numbers on each rank, as tensors of a checkpoint: `rng.<rank>`, `rng_cuda.<rank>`."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

KINDS = CPU, CUDA = "rng.", "rng_cuda."


def state(rank: int) -> dict[str, Tensor]:
    found = {f"{CPU}{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found[f"{CUDA}{rank}"] = torch.cuda.get_rng_state()
    return found


def wanted(saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]], rank: int) -> dict[str, Tensor]:
    """To be filled from what was saved: this rank's, or rank 0's where there was no such rank."""
    source = rank if f"{CPU}{rank}" in saved else 0
    return {
        name: torch.zeros(saved[name][0], dtype=torch.uint8)
        for kind in (CPU, CUDA)
        if (name := f"{kind}{source}") in saved
    }


def restore(states: Mapping[str, Tensor], rank: int) -> None:
    """Go on with the saved state. A rank that did not exist before begins with one that follows from rank 0's and its
    own number: the same every time, and no other rank's."""
    if f"{CPU}{rank}" not in states:
        digest = hashlib.sha256(states[f"{CPU}0"].numpy().tobytes() + rank.to_bytes(4, "little")).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "little"))  # of the GPU's as well
        return
    torch.set_rng_state(states[f"{CPU}{rank}"])
    if torch.cuda.is_available() and f"{CUDA}{rank}" in states:
        torch.cuda.set_rng_state(states[f"{CUDA}{rank}"])
