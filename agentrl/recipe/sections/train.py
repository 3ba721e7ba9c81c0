"""`train`: steps, optimizer and checkpoints."""

from typing import Annotated, Literal

from pydantic import model_validator

from agentrl.recipe.sections.section import (
    Above0,
    AtLeast0,
    Count,
    Fraction,
    Positive,
    Section,
    Steps,
    Tokens,
    Unit,
    Warmup,
    steps_of,
)


class TrainSection(Section):
    """Steps, optimizer and checkpoints."""

    steps: Steps = 100
    """Training steps, each of one batch of samples."""
    lr: Above0 = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup: Warmup = 0.0
    """Where the learning rate rises from 0 to its peak: a number of steps, or, below 1, a share of `steps`."""
    min_lr_ratio: Fraction = 0.0
    """Where cosine and linear end, as a share of the peak."""
    cycles: Positive = 1
    """Times that cosine and linear fall from the peak to the end (warm restarts)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of AdamW's two moving averages."""
    weight_decay: AtLeast0 = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Above0 = 1.0
    """Gradients with a larger norm are scaled down to it."""
    mini_batches: Annotated[Positive, Unit("updates per epoch")] = 1
    """Optimizer updates in each epoch, each on its part of the step's samples."""
    epochs: Annotated[Positive, Unit("passes")] = 1
    """Passes over a step's samples."""
    micro_batch_tokens: Tokens = 16384
    """Packed tokens of one forward pass. It bounds memory and changes no gradient."""
    check_memory: bool = True
    """Whether a run is refused whose memory, as `agentrl check` estimates it, does not fit the GPUs of this machine."""
    save_every: Steps = 50
    """Steps between checkpoints; 0: at the end only."""
    keep: Annotated[Positive, Unit("checkpoints")] = 2
    """Newest checkpoints to keep, besides the best one."""
    mirror: str | None = None
    """A URL that fsspec opens (s3://BUCKET/runs/a, gs://...), to which the run folder is copied after each checkpoint
    while the run goes on; `--resume URL` goes on from it on any machine. null: none."""
    seed: int = 0
    """Seed of all randomness of a run."""
    threads: Annotated[Count, Unit("threads")] = 0
    """Threads of torch on a CPU; 0: one for each core."""

    @property
    def warmup_steps(self) -> int:
        """The steps of the warm-up."""
        return steps_of(self.warmup, self.steps)

    @model_validator(mode="after")
    def _falling(self) -> "TrainSection":
        if self.schedule == "constant" and (self.cycles > 1 or self.min_lr_ratio):
            key = "cycles" if self.cycles > 1 else "min_lr_ratio"
            raise ValueError(f"{key} has no effect with the schedule constant: choose cosine or linear")
        return self
