"""Groups, models and trajectories for tests of the learner and its roles."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import qwen3

from agentrl.compute.batch import Batch
from agentrl.learner.learner import Learner
from agentrl.learner.roles import LocalRoles
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.recipe.sections.train import TrainSection
from agentrl.trajectory import FinishReason, Group, Trajectory, Turn, check_invariants

VOCABULARY = 64


def alone(model: Any, recipe: Recipe) -> Any:
    """All of it in this process, on `model`, in place."""
    return Learner(recipe, LocalRoles(recipe, model))


def make_model(dtype: torch.dtype = torch.float32) -> Any:
    model = qwen3(vocab_size=VOCABULARY, tie_word_embeddings=True, initializer_range=0.2)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def make_recipe(algorithm: dict[str, Any] | None = None, path: str = "tiny", **train: Any) -> Recipe:
    return Recipe(
        model=ModelSection(path=path),
        rollout=RolloutSection(n=4, tasks=4),
        algorithm=AlgorithmSection(**(algorithm or {})),
        train=TrainSection(**{"lr": 1e-3, "steps": 10, **train}),
    )


def trajectory(
    prompt: np.ndarray, answer: np.ndarray, reward: float, sample: int, rng: np.random.Generator
) -> Trajectory:
    """Sampled, two ids of a tool, sampled again."""
    ids = np.concatenate([prompt, answer]).astype(np.int32)
    cut = len(prompt) + len(answer) // 2
    turns = (Turn(len(prompt), cut - 1), Turn(cut + 1, len(ids)))
    mask = np.zeros(len(ids), np.uint8)
    for turn in turns:
        mask[turn.start : turn.end] = 1
    made = Trajectory(
        request_id=f"r{sample}", task=Task("t", {}), sample=sample, ids=ids, loss_mask=mask,
        logprobs=np.where(mask, -rng.random(len(ids)) * 3, 0).astype(np.float32),
        weight_version=np.where(mask, 0, -1).astype(np.int32), prompt_length=len(prompt), turns=turns, messages=(),
        rewards={"answer": reward}, finish=FinishReason.STOP,
    )  # fmt: skip
    check_invariants(made)
    return made


def make_groups(rewards: list[list[float]], seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    groups = []
    for row in rewards:
        prompt = rng.integers(0, VOCABULARY, 9)
        samples = [
            trajectory(prompt, rng.integers(0, VOCABULARY, int(rng.integers(6, 20))), reward, i, rng)
            for i, reward in enumerate(row)
        ]
        groups.append(Group(Task("t", {}), tuple(samples)))
    return groups


REWARDS: list[list[float]] = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1], [0.5, 0.25, 0, 0]]


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def learned(recipe: Recipe, groups: list[Group], steps: int = 1) -> tuple[torch.Tensor, dict[str, float]]:
    learner = alone(make_model(), recipe)
    for _ in range(steps):
        metrics = learner.learn(groups)
    return weights(learner.actor.model), metrics


def actor_batch(groups: list[Group]) -> Any:

    return Batch.from_groups(groups)


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(65 + i): i for i in range(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="A"))
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="A").save_pretrained(folder)


def trajectory_of(
    turns: list[tuple[int, int, float]], length: int, rewards: dict[str, float], **keys: Any
) -> Trajectory:
    mask = np.zeros(length, np.uint8)
    for start, end, _ in turns:
        mask[start:end] = 1
    return Trajectory(
        request_id="r", task=Task("t", {}), sample=0, ids=np.arange(length, dtype=np.int32), loss_mask=mask,
        logprobs=np.zeros(length, np.float32), weight_version=np.where(mask, 0, -1).astype(np.int32), prompt_length=2,
        turns=tuple(Turn(*turn) for turn in turns), messages=(), rewards=rewards, finish=FinishReason.STOP, **keys,
    )  # fmt: skip


TWO_TURNS = trajectory_of([(2, 4, 0.5), (6, 9, 0.25)], 10, {"answer": 1.0, "step": 0.75}, weights={"step": 2.0})
