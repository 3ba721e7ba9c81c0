"""LoRA: only an adapter is trained, and everything around it sees the model that trainer and engine agree on."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_help import alone
from lora_help import ADAPTED, save_adapter, stirred, tiny
from packing_help import TorchForward, make_deep
from tiny_models import qwen3
from train_help import metrics, records, small
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

import agentrl
from agentrl.cli.main import run
from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.forward import BlockForward, ModuleForward, SequenceForward, _probe, choose
from agentrl.compute.packing import pack
from agentrl.engine.base import Sampling
from agentrl.engine.local.block_runner import BlockRunner
from agentrl.engine.local.choose import runner_for
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.local.module_runner import ModuleRunner
from agentrl.errors import UserError
from agentrl.models import embedded_path, lora
from agentrl.models.load import load_model, resolve
from agentrl.models.memory import plan_memory
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import LoraSection, ModelSection
from agentrl.rollout.player import Player
from agentrl.training.run import resume_run
from agentrl.weights.source import ModelWeights

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def model() -> Any:
    return stirred(tiny())


def plain() -> Any:
    return load_model(ModelSection())[0]


def batch() -> Batch:
    """Two groups with a shared prompt, and two answers of another advantage each."""
    rng = np.random.default_rng(3)
    rows, prompts = [], []
    for prompt in (6, 9):
        opening = rng.integers(3, 300, prompt)
        for answer in (5, 8):
            rows.append(np.concatenate([opening, rng.integers(3, 300, answer)]))
            prompts.append(prompt)
    mask = [np.arange(len(row)) >= prompt for row, prompt in zip(rows, prompts, strict=True)]
    total = sum(map(len, rows))
    made = Batch(
        np.cumsum([0, *map(len, rows)]),
        {
            "ids": np.concatenate(rows).astype(np.int32),
            "loss_mask": np.concatenate(mask).astype(np.uint8),
            "logprobs": np.zeros(total, np.float32),
        },
        {"prompt_length": np.array(prompts, np.int32), "group": np.array([0, 0, 1, 1], np.int64)},
    )
    advantage = np.array([1, -1, 0.5, -0.5], np.float32)
    return made.with_samples(advantage=advantage).with_tokens(advantages=made.spread(advantage))


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"model": {"lora": ADAPTED}, "train": {"lr": 1e-2, "steps": 5}, **sections})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(3, 40)[None]).logits
    return found


@pytest.mark.parametrize("way", [BlockForward, TorchForward, ModuleForward])
def test_every_forward_gives_the_modules_log_probs_and_gradients(model: Any, way: Any) -> None:
    """Gradients reach the adapter alone, and are those of the plain module."""
    found = {}
    for kind in (way, SequenceForward):
        model.zero_grad()
        logprobs, entropies = kind(model)(_probe(832), 0.8)
        (logprobs.square().sum() + entropies.sum()).backward()
        found[kind] = logprobs.detach(), [p.grad.clone() for p in lora.adapter_parameters(model)]
    torch.testing.assert_close(found[way][0], found[SequenceForward][0], rtol=1e-4, atol=1e-5)
    for ours, plain in zip(found[way][1], found[SequenceForward][1], strict=True):  # rounded as the largest is
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=max(1e-4, 1e-5 * float(plain.abs().max())))
    own = {id(p) for p in lora.adapter_parameters(model)}
    assert {id(p) for p in model.parameters() if p.grad is not None} == own


@pytest.mark.slow
@pytest.mark.parametrize("way", [BlockForward, TorchForward, ModuleForward])
def test_deep_trees_with_an_adapter_and_without(model: Any, way: Any) -> None:
    """The adapter's gradients are those of the plain module; with it off, log-probs are the reference's."""
    deep = make_deep(4)
    row = pack(deep, prefix_trees(deep, least=1))
    found = {}
    for kind in (way, SequenceForward):
        model.zero_grad()
        (kind(model)(row, 0.8)[0] / 50).square().sum().backward()
        found[kind] = [p.grad.clone() for p in lora.adapter_parameters(model)]
    torch.testing.assert_close(found[way], found[SequenceForward], rtol=1e-5, atol=1e-5)
    with torch.no_grad(), lora.switched_off(model):
        reference = way(model)(row, 1.0)[0]
        torch.testing.assert_close(reference, SequenceForward(plain())(row, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_the_fast_ways_serve_an_adapter_and_say_when_they_do_not(model: Any) -> None:
    assert choose(model)[1] == "own forward"
    assert type(runner_for(model)) is BlockRunner
    assert "its adapter has dropout" in choose(tiny(dropout=0.1))[1]
    half = load_model(ModelSection(dtype="bfloat16", lora=LoraSection(**ADAPTED)))[0]
    assert {p.dtype for p in lora.adapter_parameters(half)} == {torch.float32}
    assert type(runner_for(stirred(half))) is ModuleRunner


def test_only_the_adapter_changes_in_a_step() -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learner = alone(model, recipe())
    said = [learner.update(batch()) for _ in range(3)]
    after = model.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if ".lora_" in name}
    trained = sum(p.numel() for p in lora.adapter_parameters(model))
    assert {row["train/parameters"] for row in said} == {trained}
    assert sum(p.numel() for p in learner.actor.optimizer.masters) == trained
    base = {name: tensor for name, tensor, layer in lora.plain_tensors(model)}
    for name, tensor in plain().state_dict().items():
        assert torch.equal(base[name], tensor)


def test_the_reference_is_the_model_with_its_adapter_off() -> None:
    learner = alone(stirred(tiny()), recipe(algorithm={"kl_coef": 0.1}))
    found = learner.reference.logprobs(batch())
    np.testing.assert_allclose(found, alone(plain(), Recipe()).actor.logprobs(batch()), atol=1e-5)
    assert np.abs(found - learner.actor.logprobs(batch())).max() > 0.01
    assert learner.update(batch())["train/kl"] > 0.001
    assert all(p.requires_grad for p in lora.adapter_parameters(learner.actor.model))


def test_dropout_works_in_the_update_alone() -> None:
    learner = alone(stirred(tiny(dropout=0.5)), recipe())
    before = learner.actor.logprobs(batch())
    np.testing.assert_array_equal(before, learner.actor.logprobs(batch()))
    weighed = batch().with_tokens(logprobs=before)
    assert learner.update(weighed)["mismatch/logprob_max"] > 0.01
    np.testing.assert_array_equal(learner.actor.logprobs(batch()), learner.actor.logprobs(batch()))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("overlap", [False, True])
async def test_the_engine_samples_from_what_is_trained(overlap: bool) -> None:
    model = tiny()
    engine = LocalEngine(model, max_batch=4, max_context=64, overlap=overlap)
    learner = alone(model, recipe())
    sampling = Sampling(temperature=1.0, max_tokens=12, seed=5)
    answers = []
    for version in range(3):
        if version:
            learner.update(batch())
            await engine.update_weights(version)
        answer = await engine.generate([5, 6, 7, 8], sampling, str(version))
        answers.append(answer)
        ids = np.array([5, 6, 7, 8, *answer.ids])
        with torch.no_grad():
            wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        own = wanted[torch.arange(3, len(ids) - 1), torch.from_numpy(ids[4:])]
        np.testing.assert_allclose(answer.logprobs, own.numpy(), atol=1e-4)
    assert answers[0].logprobs != answers[2].logprobs
    await engine.close()


def untied() -> Any:
    model = qwen3(tie_word_embeddings=False, attention_bias=True)
    lora.add_adapter(model, LoraSection(rank=2, alpha=4), "nowhere")
    return stirred(model)


@pytest.mark.parametrize("make", [lambda: stirred(tiny()), untied], ids=["tied", "untied"])
def test_servers_are_sent_merged_weights_by_the_bases_names(make: Any) -> None:
    model = make()
    weights = ModelWeights(model)
    sent = dict(weights)
    receiver = Qwen3ForCausalLM(model.config).eval()
    assert list(sent) == list(dict(ModelWeights(receiver)))
    receiver.load_state_dict(sent, strict=False)
    torch.testing.assert_close(logits(receiver), logits(model), rtol=1e-4, atol=1e-4)
    with lora.switched_off(model):  # as while a reference is asked for
        assert all(torch.equal(sent[name], tensor) for name, tensor in weights)
    with torch.no_grad():
        lora.adapter_parameters(model)[0].add_(1)
    assert not weights.intact()


def small_lora(output: Path, **changes: Any) -> Recipe:
    return small(output, **{"model__lora": ADAPTED, "train__lr": 5e-3, "algorithm__kl_coef": 0.01, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three steps by recipes/gsm8k_tool.yaml's parts, each saved."""
    return agentrl.train(small_lora(tmp_path_factory.mktemp("lora") / "whole", train__save_every=1, train__keep=9))


@pytest.mark.slow
def test_a_run_trains_an_adapter(whole: Any) -> None:
    rows = metrics(whole.folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["mismatch/logprob_max"] < 1e-3 for row in rows if row.get("train/updates"))
    assert {row["train/parameters"] for row in rows[1:]} == {sum(p.numel() for p in lora.adapter_parameters(tiny()))}


@pytest.mark.slow
def test_a_checkpoint_is_a_whole_model_with_the_adapter_beside_it(whole: Any) -> None:
    from peft import PeftModel

    merged = AutoModelForCausalLM.from_pretrained(whole.checkpoint, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(embedded_path(), dtype=torch.float32)
    before = logits(base)
    adapted = PeftModel.from_pretrained(base, whole.checkpoint / "adapter")
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=1e-4, atol=1e-4)
    assert float((before - logits(merged)).abs().max()) > 1e-3
    ours = tiny(start=str(whole.checkpoint / "adapter"))
    torch.testing.assert_close(logits(ours), logits(adapted), rtol=0, atol=0)
    assert sorted(merged.state_dict()) == sorted(plain().state_dict())


@pytest.mark.slow
def test_a_resumed_run_is_the_run(whole: Any, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(whole.folder, again)
    for step in (2, 3):
        shutil.rmtree(again / "checkpoints" / f"step_{step}")
    resumed = resume_run(str(again))
    for ours, theirs in zip(metrics(whole.folder), metrics(again), strict=True):
        timeless = {k for k in ours if k.startswith(("train/loss", "train/grad", "train/kl", "rollout/reward"))}
        assert {k: ours[k] for k in timeless} == pytest.approx({k: theirs[k] for k in timeless}, rel=1e-3, abs=2e-5)
    for step in (2, 3):
        ours, theirs = (records(f, f"step_{step}") for f in (whole.folder, again))
        assert [t["messages"] for t in ours] == [t["messages"] for t in theirs]
    first, second = (tiny(start=str(r.checkpoint / "adapter")) for r in (whole, resumed))
    for a, b in zip(lora.adapter_parameters(first), lora.adapter_parameters(second), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_what_is_saved_of_a_step_is_restored_to_the_bit(whole: Any) -> None:
    first = alone(tiny(), recipe())
    first.update(batch())
    folder = whole.folder.parent / "bits"
    save_adapter(first.actor.model, folder)
    second = alone(tiny(start=str(folder)), recipe())
    second.actor.optimizer.load_named_state(copy.deepcopy(first.actor.optimizer.named_state()))
    second.steps = first.steps
    for learner in (first, second):
        learner.update(batch())
    for a, b in zip(
        lora.adapter_parameters(first.actor.model), lora.adapter_parameters(second.actor.model), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.slow
async def test_a_checkpoint_plays_without_a_second_adapter(whole: Any) -> None:
    """As `agentrl eval RUN/recipe.yaml --model RUN/checkpoints/step_3` does, whose recipe says model.lora."""
    player = await Player.build(load_recipe(str(whole.folder / "recipe.yaml")), str(whole.checkpoint))
    assert not lora.layers(player.model)
    wanted = logits(tiny(start=str(whole.checkpoint / "adapter")))
    torch.testing.assert_close(logits(player.model), wanted, rtol=1e-4, atol=1e-4)
    await player.close()


@pytest.mark.slow
def test_the_memory_plan_counts_the_adapter_alone(capsys: pytest.CaptureFixture[str]) -> None:
    own = sum(p.numel() for p in lora.adapter_parameters(tiny()))
    base = sum(p.numel() for p in plain().parameters())
    changes = {"model": {"lora": ADAPTED, "dtype": "bfloat16"}, "algorithm": {"kl_coef": 0.1}}
    plan = plan_memory(Recipe.model_validate(changes))
    assert (plan.parameters, plan.trained) == (base + own, own)
    assert (plan.weights, plan.gradients, plan.optimizer) == (2 * base + 4 * own, 4 * own, 8 * own)
    assert plan.reference == 0
    assert run(["check", "recipes/gsm8k_tool.yaml", "model.lora.rank=4"]) == 0
    assert f"of which {own / 1e6:.2f} M are trained (LoRA)" in capsys.readouterr().out


def test_a_new_adapter_follows_from_the_seed_and_its_layers_names_alone() -> None:
    """Not from what the process has drawn before, nor from which other layers have one."""
    first, other = (
        lora.adapter_state(load_model(ModelSection(lora=LoraSection(**ADAPTED)), seed)[0]) for seed in (3, 4)
    )
    torch.rand(7)
    again = lora.adapter_state(load_model(ModelSection(lora=LoraSection(targets=("v_proj",), **ADAPTED)), 3)[0])
    assert 0 < len(again) < len(first)
    for name, tensor in again.items():
        assert torch.equal(tensor, first[name])
    downs = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in downs)
    assert len({float(first[name][0, 0]) for name in downs}) == len(downs)
    wide = first[next(name for name in downs if "q_proj" in name)]
    assert 0.9 < float(wide.abs().max()) * wide.shape[1] ** 0.5 <= 1  # peft's bound
    assert not any(tensor.any() for name, tensor in first.items() if "lora_B" in name)


def test_targets_are_one_or_several_names() -> None:
    for text, names in (("q_proj", ["q_proj"]), ("[q_proj, mlp.up_proj]", ["q_proj", "up_proj"]), ("all-linear", None)):
        section = load_recipe("recipes/gsm8k_tool.yaml", [f"model.lora.targets={text}"]).model
        found = lora.layers(load_model(section)[0])
        assert {name.rpartition(".")[2] for name in found} == set(names or ALL)
        assert "lm_head" not in found
    section = load_recipe("recipes/gsm8k_tool.yaml", ["model.lora.exclude=[layers.0, mlp]"]).model
    left = lora.layers(load_model(section)[0])
    assert left
    assert not any(".layers.0." in name or ".mlp." in name for name in left)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"targets": ["q_porj"]}, "no linear layer 'q_porj'.*q_proj"),
        ({"targets": ["lm_head"]}, "no linear layer 'lm_head'"),
        ({"exclude": ["lm_head"]}, "model.lora.exclude: no layer that would take an adapter has 'lm_head' in its name"),
        ({"exclude": ["layers"]}, "model.lora.exclude: it leaves no layer"),
        ({"start": "/nowhere"}, "/nowhere is no folder of peft's format"),
    ],
)
def test_what_does_not_fit_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny(**changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("change", "section", "said"),
    [
        ({}, {"rank": 8}, "has rank 4, model.lora.rank is 8"),
        ({}, {"alpha": 9}, "has alpha 8, model.lora.alpha is 9"),
        ({}, {"targets": ["q_proj"]}, "does not fit model.lora.targets: it has .*down_proj"),
        ({"peft_type": "IA3"}, {}, "is a IA3 adapter"),
        ({"use_dora": True}, {}, "use_dora: True, which is not supported"),
    ],
)
def test_a_foreign_adapter_is_turned_down(
    change: dict[str, Any], section: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_adapter(tiny(), tmp_path / "a")
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(UserError, match=said):
        tiny(start=str(tmp_path / "a"), **section)


def test_an_adapter_as_a_model_is_told_where_it_belongs(tmp_path: Path) -> None:
    save_adapter(tiny(), tmp_path / "a")
    with pytest.raises(UserError, match=r"is an adapter: name its base model there \(.*tiny\).*model.lora.start="):
        resolve(str(tmp_path / "a"))
