"""Batches for benchmarks, shaped like those of a rollout, with random tokens and advantages."""

import numpy as np

from agentrl.compute.batch import Batch


def make_batch(groups: int, samples: int, prompt: int, answer: int, vocabulary: int, seed: int = 0) -> Batch:
    """Return a batch of `groups` prompts of about `prompt` tokens, each with `samples` answers of about `answer` tokens
    (25 % more or less).

    Log-probs are those of a uniform distribution over `vocabulary`; advantages are standard normal, one per sample.
    """
    rng = np.random.default_rng(seed)
    rows, prompts = [], []
    for _ in range(groups):
        opening = rng.integers(1, vocabulary, int(rng.integers(prompt * 3 // 4, prompt * 5 // 4 + 1)))
        for _ in range(samples):
            length = int(rng.integers(max(1, answer * 3 // 4), answer * 5 // 4 + 1))
            rows.append(np.concatenate([opening, rng.integers(1, vocabulary, length)]))
            prompts.append(len(opening))
    mask = np.concatenate([np.arange(len(row)) >= p for row, p in zip(rows, prompts, strict=True)]).astype(np.uint8)
    batch = Batch(
        np.cumsum([0, *(len(row) for row in rows)]),
        {
            "ids": np.concatenate(rows).astype(np.int32),
            "loss_mask": mask,
            "logprobs": (-np.log(vocabulary) * mask).astype(np.float32),
        },
        {"prompt_length": np.array(prompts, np.int32), "group": np.repeat(np.arange(groups), samples)},
    )
    return batch.with_tokens(advantages=batch.spread(rng.normal(size=len(batch)).astype(np.float32)))
