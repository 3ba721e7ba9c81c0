"""The whole algorithm on one page: GRPO with tools, from the same parts as `agentrl train`, without its conveniences.

    python examples/minimal_loop.py [RECIPE] [KEY=VALUE ...]

Each step samples a group of rollouts for every task, turns rewards into advantages, updates the policy on the tokens
that it sampled, and lets the engine sample from the new weights. What `agentrl train` adds around these lines:
checkpoints and resumption, a critic, a KL penalty, several updates per step, sampling while training, clusters.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.algo import advantages, aggregations, losses
from agentrl.algo.aggregation import token_weights
from agentrl.algo.terms import Samples, Tokens, Update
from agentrl.compute.batch import Batch
from agentrl.compute.forward import choose
from agentrl.compute.packing import micro_batches
from agentrl.data.sampler import TaskSampler
from agentrl.eval.held_out import HeldOut
from agentrl.learner.optimizer import Optimizer
from agentrl.plugins.registry import tasks_of
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.rollout.player import Player
from agentrl.trajectory import Group

RECIPE = Path(__file__).parent.parent / "recipes" / "gsm8k_tool.yaml"
SHORT = ["train.steps=5", "train.lr=5e-4", "eval.tasks=64", "eval.splits=[test]"]


class Policy:
    """A model, how its log-probs are computed, and its optimizer."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        train = recipe.train
        self.recipe, self.model = recipe, model.eval()
        self.forward, self.description = choose(model)  # the fastest forward that is exact for this model
        self.optimizer = Optimizer(model.named_parameters(), train.betas, train.weight_decay, train.max_grad_norm)

    def update(self, batch: Batch) -> tuple[float, float]:
        """Make one optimizer step on `batch`, which has advantages; return the loss and the gradient's norm."""
        algorithm, total = self.recipe.algorithm, 0.0
        compute_loss = losses.bound(algorithm.loss)
        # Each token's weight is fixed by the whole batch, so that micro-batches add up to its exact gradient.
        update = Update(batch.sampled, batch.samples["group"], self.recipe.rollout.max_tokens)
        weights = token_weights(update, aggregations.bound(algorithm.aggregation), algorithm)
        batch = batch.with_tokens(weight=batch.spread(weights))
        for packed in micro_batches(batch, self.recipe.train.micro_batch_tokens):
            # Log-probs of the sampled tokens, float32 [N]; packed.source: their indices into the token columns.
            logprobs, _ = self.forward(packed, self.recipe.rollout.temperature)
            advantage, weight = (torch.from_numpy(batch.tokens[c][packed.source]) for c in ("advantages", "weight"))
            sample = torch.from_numpy(np.searchsorted(batch.offsets, packed.source, side="right"))
            # The policy that sampled is the one that is trained: the old log-probs are these, without a gradient.
            terms = compute_loss(Tokens(logprobs, logprobs.detach(), advantage, sample), algorithm)
            loss = (weight * terms.loss).sum()
            loss.backward()
            total += float(loss.detach())
        return total, self.optimizer.step(self.recipe.train.lr)


def with_advantages(batch: Batch, config: AlgorithmSection) -> Batch:
    """Compare each sample's reward with those of its group; every sampled token gets its sample's advantage."""
    samples = Samples(
        rewards=torch.from_numpy(batch.samples["reward"]),
        groups=torch.from_numpy(batch.samples["group"]),
        lengths=torch.from_numpy(batch.sampled),
    )
    found = advantages.bound(config.advantage)(samples, config)
    return batch.with_tokens(advantages=batch.spread(found.float().numpy()))


async def train(recipe: Recipe) -> None:
    player = await Player.build(recipe)  # environment, tools, rewards, model, tokenizer, chat, engine
    try:
        policy = Policy(player.model, recipe)
        print(f"{player.describe()}\ntraining forward: {policy.description}")
        tasks = tasks_of(player.env, "train")
        sampler = TaskSampler(len(tasks), recipe.train.seed)
        held_out, _ = await HeldOut.prepare(player, recipe, recipe.eval.splits or player.env.splits)
        await evaluate(held_out, 0)
        for step in range(1, recipe.train.steps + 1):
            chosen = [tasks[i] for i in sampler.draw(recipe.rollout.tasks)]
            groups = await player.play(chosen, recipe.rollout.n, seed=(recipe.train.seed, step), label=f"step_{step}")
            loss, norm = policy.update(with_advantages(Batch.from_groups(groups), recipe.algorithm))
            await player.engine.update_weights(step)  # it shares the model: only its caches are dropped
            print(f"step {step}  reward {mean_reward(groups):.3f}  loss {loss:+.4f}  gradient norm {norm:.3f}")
        await evaluate(held_out, recipe.train.steps)
    finally:
        await player.close()


async def evaluate(held_out: HeldOut, step: int) -> None:
    """Print the accuracy on each held-out split: the same tasks and seeds at every evaluation."""
    for split in held_out.splits:
        result, _ = await held_out.play(split, after=step)
        print(f"step {step}  held-out accuracy: {split} {result.interval}")


def mean_reward(groups: Sequence[Group]) -> float:
    return float(np.mean([trajectory.reward for group in groups for trajectory in group.trajectories]))


def main(arguments: Sequence[str]) -> None:
    path = next((argument for argument in arguments if "=" not in argument), str(RECIPE))
    asyncio.run(train(load_recipe(path, [*SHORT, *(argument for argument in arguments if "=" in argument)])))


if __name__ == "__main__":
    main(sys.argv[1:])
