"""A model that sees is trained in every way that one which reads text is: adapters, checkpointing, a reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_help import ADAPTED, merged_state, stirred
from vision_help import groups, picture, prompt, save_seeing, sequence, trajectory

from agentrl.checkpoint.checkpoints import save_model
from agentrl.compute.batch import Batch
from agentrl.compute.classifier import RewardModel, SequenceScores, scoring_batch
from agentrl.compute.forward import ModuleForward, SequenceForward, choose
from agentrl.compute.packing import micro_batches
from agentrl.compute.value_head import SequenceValues
from agentrl.engine.base import Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.errors import UserError
from agentrl.fine_tuning.pairs import Pair, PairReader
from agentrl.fine_tuning.reward_model import RewardTrainer
from agentrl.learner.actor import Actor
from agentrl.learner.columns import with_streams
from agentrl.learner.learner import Learner
from agentrl.learner.roles import LocalRoles
from agentrl.learner.teacher import Guide, Teacher
from agentrl.models import lora
from agentrl.models.image_input import check_sight
from agentrl.models.load import check_roles, load_model, load_scorer, load_tokenizer
from agentrl.models.vision import Vision
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import LoraSection, ModelSection
from agentrl.rollout.model_reward import translation
from agentrl.rollout.scorer import _sample
from agentrl.trajectory import Trajectory

BOTH = {**ADAPTED, "targets": [*ADAPTED.get("targets", ["all-linear"]), "vision"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing(tmp_path_factory.mktemp("seeing"))


def load(folder: Path, **section: Any) -> Any:
    return load_model(ModelSection.model_validate({"path": str(folder), "device": "cpu", **section}))[0]


def row(model: Any) -> Any:
    (packed,) = micro_batches(Batch.from_groups(groups(model)), 100_000)
    return packed


def gradients(model: Any, forward: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    forward(row(model), 1.0)[0].square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * max(1.0, float(gradient.abs().max())), name


def recipe(folder: Path, **sections: Any) -> Recipe:
    model = {"path": str(folder), "device": "cpu", **sections.pop("model", {})}
    train = {"lr": 1e-2, "steps": 3, "micro_batch_tokens": 100, **sections.pop("train", {})}
    return Recipe.model_validate({"model": model, "train": train, **sections})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("section", [{}, {"lora": BOTH}, {"freeze": ["vision"]}])
def test_layers_computed_again_give_the_same_gradients(section: dict[str, Any], folder: Path) -> None:
    """Those of the tower, and the language model's, to which deeper features are added between layers."""
    plain, again = (stirred(load(folder, **section)) for _ in range(2))
    forward, said = choose(again, checkpointing=True, offload=True)
    assert isinstance(forward, ModuleForward), said
    calls: list[str] = []
    again.model.language_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append("text"))
    again.model.visual.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append("vision"))
    wanted = gradients(plain, ModuleForward(plain))
    same(gradients(again, forward), wanted)
    trained = "freeze" not in section
    assert calls == ["vision", "text", "text", *["vision"] * trained]
    assert any("visual" in name for name in wanted) == trained


@pytest.mark.slow
def test_an_adapter_leaves_the_tower_alone_unless_it_is_asked_for(folder: Path) -> None:
    language = lora.layers(load(folder, lora=ADAPTED))
    both = lora.layers(load(folder, lora=BOTH))
    assert language
    assert not any("visual" in name for name in language)
    assert set(language) < set(both)
    assert all("visual" in name for name in set(both) - set(language))
    with pytest.raises(UserError, match=r"no linear layer 'qkv' .*of its vision tower by vision"):
        load(folder, lora={**ADAPTED, "targets": ["qkv"]})
    with pytest.raises(UserError, match=r"^model.lora.targets: vision: Qwen3ForCausalLM has no vision tower"):
        load_model(ModelSection(lora=LoraSection(targets=BOTH["targets"])))
    with pytest.raises(ValueError, match=r"`freeze` has vision, and lora.targets too"):
        ModelSection(path="x", freeze=("vision",), lora=LoraSection(targets=BOTH["targets"]))


@pytest.mark.slow
@pytest.mark.parametrize("vision", [False, True])
def test_an_adapter_is_merged_alike_everywhere(vision: bool, folder: Path, tmp_path: Path) -> None:
    """Packed or not, in the checkpoint, started again from its folder, and switched off."""
    section = BOTH if vision else ADAPTED
    model, base = stirred(load(folder, lora=section)), load(folder)
    merged = load(folder)
    merged.load_state_dict(merged_state(model))
    wanted = gradients(model, SequenceForward(model))
    same(gradients(model, ModuleForward(model)), wanted)
    assert all(".lora_" in name for name in wanted)
    shown = row(model)
    with torch.no_grad():
        found = ModuleForward(model)(shown, 1.0)[0]
        assert (found - ModuleForward(merged)(shown, 1.0)[0]).abs().max() < 1e-4
        assert (found - ModuleForward(base)(shown, 1.0)[0]).abs().max() > 1e-2
        with lora.switched_off(model):
            assert (ModuleForward(model)(shown, 1.0)[0] - ModuleForward(base)(shown, 1.0)[0]).abs().max() < 1e-5
    place = LocalRoles(recipe(folder, model={"lora": section}), model)
    place.save(tmp_path).result()
    again = load(folder, lora={**section, "start": str(tmp_path / "adapter")})
    whole = load(tmp_path)
    with torch.no_grad():
        for other in (again, whole):
            assert (found - ModuleForward(other)(shown, 1.0)[0]).abs().max() < 1e-4


async def test_the_engine_samples_with_the_adapter_as_it_is_now(folder: Path) -> None:
    model = load(folder, lora=BOTH)
    engine = LocalEngine(model, max_batch=2)
    ids = prompt(model, [30, 40, 50], picture(0), [60])
    said = []
    for version in range(2):
        said.append((await engine.generate(ids, Sampling(1, temperature=0), f"{version}")).logprobs[0])
        with torch.no_grad():
            assert abs(float(Vision(model).logits(ids)[-1].log_softmax(-1).max()) - said[-1]) < 1e-4
        engine.finish(f"{version}")
        stirred(model)
        await engine.update_weights(version + 1)
    assert abs(said[0] - said[1]) > 1e-3
    await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("section", [{}, {"lora": ADAPTED}, {"lora": BOTH}])
def test_the_reference_is_the_model_before_training(section: dict[str, Any], folder: Path) -> None:
    wanted = recipe(folder, model=section, algorithm={"kl_coef": 0.1})
    model = load(folder, **section)
    roles = LocalRoles(wanted, model)
    learner = Learner(wanted, roles)
    metrics = [learner.learn(groups(model, seed)) for seed in range(2)]
    assert abs(metrics[0]["train/kl"]) < 1e-6 < metrics[1]["train/kl"]
    batch = Batch.from_groups(groups(model))
    fresh = Actor(load(folder), recipe(folder))
    assert abs(roles.reference.logprobs(batch) - fresh.logprobs(batch)).max() < 1e-5


def test_a_reference_that_follows_sees_as_the_policy_does(folder: Path) -> None:
    """Its features are those of its weights now, although it keeps them from one step to the next."""
    wanted = recipe(folder, algorithm={"kl_coef": 0.1, "reference": {"every": 1}})
    model = load(folder)
    roles = LocalRoles(wanted, model)
    learner, shown = Learner(wanted, roles), groups(model)
    for _ in range(2):
        learner.learn(shown)
    batch = Batch.from_groups(shown)
    assert abs(roles.reference.logprobs(batch) - roles.actor.logprobs(batch)).max() < 1e-5


def checked(asks: Recipe) -> Recipe:
    """As before a run."""
    check_sight(asks)
    check_roles(asks, load_tokenizer(asks.model).image_input)
    return asks


GAE = {"algorithm": {"advantage": "gae"}}
DISTILL = {"algorithm": {"streams": {"distill": 1}}}


@pytest.mark.slow
def test_a_critic_sees(folder: Path) -> None:
    """Its values are those of its module on separate sequences, and depend on the picture."""
    wanted = recipe(folder, **GAE, critic={"lr": 1e-2})
    model = load(folder)
    roles = LocalRoles(wanted, model)
    learner = Learner(wanted, roles)
    losses = [learner.learn(groups(model))["critic/loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    critic = roles.critic
    assert critic.description.startswith("module with shared-prefix attention and images")
    shown, features = row(model), torch.zeros(len(row(model).predict), 2)
    slow = SequenceValues(critic.model)
    with torch.no_grad():
        assert (critic.forward(shown, features) - slow(shown, features)).abs().max() < 1e-5
        alone = [trajectory(model, [30, 40], picture(seed), answer=[50, 60, 70]) for seed in (50, 51)]
        batches = [Batch.from_trajectories([t]) for t in alone]
        values = [critic.forward(next(micro_batches(batch, 99)), torch.zeros(3, 2)) for batch in batches]
    assert (values[0] - values[1]).abs().max() > 1e-4


def test_a_reward_model_sees(folder: Path, tmp_path: Path) -> None:
    """It learns which of two pictures is preferred, and scores conversations alike wherever it is loaded."""
    wanted = recipe(folder, reward_model={"source": ["x"]}, train={"lr": 1e-2})
    assert wanted.reward_model is not None
    model, tokenizer = load_scorer(wanted.model)
    trainer = RewardTrainer(wanted, wanted.reward_model, model)
    assert trainer.way == "packed, prompts shared"
    square, other = picture(0), picture(1, 48, 16)
    asked = [prompt(model, [30, 40 + i], square, [50]) for i in range(3)]
    pairs = [Pair(ids, prompt(model, ids[:2].tolist(), other, [50]), str(i)) for i, ids in enumerate(asked)]
    before = trainer.evaluate(pairs)["loss"]
    for _ in range(4):
        trainer.gradient(pairs)
        trainer.optimizer.step(1e-2)
    assert trainer.evaluate(pairs) == {"loss": pytest.approx(0, abs=before / 2), "accuracy": 1}
    save_model(model, tokenizer, tmp_path)

    asks = checked(recipe(folder, rewards={"model": str(tmp_path)}, rollout={"max_tokens": 1000}))
    scored, translate = RewardModel(asks), translation(asks, tokenizer)
    (group, *_) = groups(model)
    rows = [translate(_sample(t)) for t in group.trajectories] + [
        ids for pair in pairs for ids in (pair.chosen, pair.rejected)
    ]
    found = scored.scores(scoring_batch(rows, [0, 0, 1, 1, 2, 2, 3, 3]))
    slow = SequenceScores(scored.model)
    with torch.no_grad():
        assert max(abs(float(slow._score(ids)) - score) for ids, score in zip(rows, found, strict=True)) < 1e-5
    assert (found[2::2] > found[3::2]).all()
    with pytest.raises(UserError, match="message 1: has an image"):
        PairReader(tokenizer, None)._pair(
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "x"}]}], "chosen": "a", "rejected": "b"}
        )


def test_a_teacher_with_a_hint_sees_the_same_pictures(folder: Path) -> None:
    """Its log-probs of the answer are those of the policy after an opening that holds the pictures and the hint."""
    wanted = checked(recipe(folder, **DISTILL, teacher={"path": "policy", "form": "sampled", "hint": "{answer}"}))
    model = load(folder)
    square, wide, answer = picture(0), picture(1, 48, 16), [50, 60, 70]
    hints = {"a": [33, 34], "b": [35]}

    def opening(name: str, *hint: int) -> list[Any]:
        return [[30, 40], square, [41, *hint]] if name == "a" else [square, wide, [42, 43, *hint]]

    samples = [
        replace(trajectory(model, *opening(name), answer=answer), task=Task(name, {"answer": name})) for name in hints
    ]
    plain = replace(trajectory(model, [20, 21, 22], answer=answer), task=Task("b", {"answer": "none"}))

    def hinted(t: Trajectory, hint: str) -> Any:
        assert hint == "{answer}"
        name = t.task.data["answer"]
        return sequence(model, *opening(name, *hints[name])) if name in hints else None

    forward = choose(model)[0]
    guide = Guide(wanted, {0: Teacher.in_process(wanted.part_teachers[0], wanted, forward)}, hinted=hinted)
    rows = [*samples, plain]
    batch = with_streams(Batch.from_trajectories(rows, [0, 1, 2]), rows, wanted, 0, lambda task: 0)
    found = guide.taught(batch, rows).tokens["teacher_logprobs"]
    with torch.no_grad():
        for index, ids in enumerate(
            [*(prompt(model, *opening(name, *hints[name])) for name in hints), np.array([20, 21, 22])]
        ):
            whole = np.concatenate([ids, answer])
            log_p = Vision(model).logits(whole).log_softmax(-1)[len(ids) - 1 : -1]
            alone = log_p.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()
            span = batch.span(index)
            np.testing.assert_allclose(found[span][-3:], alone, atol=1e-4)
    told = choose(model)[0](next(micro_batches(Batch.from_trajectories(samples[:1]), 999)), 1.0)[0]
    assert np.abs(told.detach().numpy() - found[batch.span(0)][-3:]).max() > 1e-3  # without the hint


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({**GAE, "critic": {"path": "tiny"}}, "critic.path: tiny reads text alone"),
        ({**DISTILL, "teacher": {"path": "tiny"}}, "teacher.path: tiny reads text alone"),
        ({**DISTILL, "teacher": "http://127.0.0.1:1"}, "teacher.path: a server is not yet sent images"),
        (
            {"algorithm": {"routing_replay": True}, "engine": {"name": "sglang", "args": {"urls": ["http://x"]}}},
            "algorithm.routing_replay: of a model that sees only the engine local records",
        ),
    ],
)
def test_what_would_not_see_is_refused(sections: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(UserError, match=f"^{words}"):
        checked(recipe(folder, **sections))
