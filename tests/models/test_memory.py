"""What a recipe needs is said from a model's configuration alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from big_shapes import BIG
from held_memory import Held
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen2Config, Qwen3Config
from vision_help import picture

from agentrl.cli.main import run
from agentrl.compute import kernels
from agentrl.compute.activation_checkpointing import blocks_of
from agentrl.errors import UserError
from agentrl.images import STORE
from agentrl.models import embedded_path, memory
from agentrl.models.load import load_model, resolve_types
from agentrl.models.memory import Setting, Traffic, plan, plan_memory, plan_pools
from agentrl.models.shape import Shape
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import LoraSection, ModelSection
from agentrl.training import preflight

SMALL = Qwen2Config(  # Qwen2.5-0.5B's shapes
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
PARAMETERS = 494_032_768  # as its card says: 0.49 B


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with those shapes and a tokenizer, and no weights."""
    AutoTokenizer.from_pretrained(embedded_path()).save_pretrained(tmp_path / "qwen")
    SMALL.save_pretrained(tmp_path / "qwen")
    return tmp_path / "qwen"


def recipe(folder: Path, **sections: Any) -> Recipe:
    return Recipe.model_validate({"model": {"path": str(folder), "dtype": "bfloat16"}, **sections})


def test_parameters_are_counted_without_loading_them(folder: Path) -> None:
    plan = plan_memory(recipe(folder))
    assert plan.parameters == PARAMETERS
    assert (plan.weights, plan.gradients, plan.optimizer) == (2 * PARAMETERS, 4 * PARAMETERS, 12 * PARAMETERS)
    assert (plan.reference, plan.critic, plan.reward_model, plan.gathered) == (0, 0, 0, 0)
    assert plan.cache_token == 2 * 24 * 2 * 64 * 2


@pytest.mark.slow
def test_the_embedded_model_is_counted_right() -> None:
    plan = plan_memory(Recipe.model_validate({"algorithm": {"kl_coef": 0.1}}))
    model, _ = load_model(Recipe().model)
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    assert plan.reference == plan.weights == 4 * plan.parameters
    assert plan.optimizer == 8 * plan.parameters
    section = {"dtype": "bfloat16"}
    for reference, size in ((None, 2), ({"every": 9}, 2), ({"ema": 0.9}, 2 + 4)):
        algorithm = {"kl_coef": 0.1, "reference": reference}
        half = plan_memory(Recipe.model_validate({"model": section, "algorithm": algorithm}))
        assert half.reference == size * half.parameters


def test_a_model_that_is_not_here_has_no_plan() -> None:
    assert plan_memory(Recipe.model_validate({"model": {"path": "nobody/nothing-7B"}})) is None


def test_a_shape_is_that_of_the_module() -> None:
    """Blocks are what FSDP2 gathers one by one; the root is the rest."""
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    shape, model = Shape.of(config), AutoModelForCausalLM.from_config(config)
    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
    assert (shape.layers, shape.layer) == (3, blocks[0])
    assert shape.root == 2 * 96 * 32 + 32
    assert shape.parameters == shape.root + sum(blocks) == sum(p.numel() for p in model.parameters())
    assert shape.kv == 2 * 3 * 2 * 16


def test_shards_divide_what_stays_and_layers_are_whole_while_they_run(folder: Path) -> None:
    alone = plan_memory(recipe(folder))
    spread = plan_memory(recipe(folder, cluster={"workers": 4}, algorithm={"kl_coef": 0.1}))
    copies = plan_memory(recipe(folder, cluster={"workers": 4, "shard": 2}, algorithm={"kl_coef": 0.1}))
    assert 4 * spread.weights == 2 * copies.weights == alone.weights
    assert 4 * spread.optimizer == alone.optimizer
    assert spread.reference == spread.weights
    shape = Shape.of(SMALL)
    assert spread.gathered == max(2 * (shape.root + 2 * shape.layer) + 2 * shape.root + 6 * shape.layer, shape.root * 8)
    assert spread.activations == alone.activations


def test_what_is_offloaded_is_on_the_cpu(folder: Path) -> None:
    here = plan_memory(recipe(folder, cluster={"workers": 2}))
    there = plan_memory(recipe(folder, cluster={"workers": 2, "offload": True}))
    assert here.host == 0
    assert there.host == here.weights + here.gradients + here.optimizer
    assert there.device == here.gathered + here.activations + here.logits < here.device


def test_moments_and_inputs_of_layers_lie_on_the_cpu_until_they_are_needed(folder: Path) -> None:
    model = {"path": str(folder), "checkpointing": True}
    here, there = (
        plan_memory(Recipe.model_validate({"model": model, "cluster": {"offload": offload}}))
        for offload in ((), ("optimizer", "activations"))
    )
    assert here is not None
    pinned = (1 << 26) * 23  # 16,384 x 4 x 896 bytes, rounded up to a power of two
    assert (there.moments, there.saved) == (8 * PARAMETERS, pinned)
    assert there.host == there.moments + there.saved
    assert here.activations - there.activations == 16384 * 4 * 896 * 22
    state = 8 * PARAMETERS  # weights and gradients; beside them the larger of activations and three buckets
    assert there.stepped == 3 * 8 * 151936 * 896  # the embeddings are a bucket of their own
    assert there.device == state + max(there.activations + there.logits, there.stepped)
    assert here.device == state + 8 * PARAMETERS + here.activations + here.logits


def test_mixed_precision_recomputing_and_shared_sequences_make_activations_small() -> None:
    shape = Shape.of(SMALL)
    plain = plan(shape, Setting(size=4, compute=4, tokens=1000)).activations
    a_layer = 1000 * 4 * (16 * 896 + 4 * 4864)
    assert plain == 24 * a_layer
    assert plan(shape, Setting(size=4, compute=2, tokens=1000)).activations == plain // 2
    assert plan(shape, Setting(tokens=1000, sequence=4)).activations == plain // 4
    assert plan(shape, Setting(tokens=1000, checkpointing=True)).activations == a_layer + 24 * 1000 * 4 * 896


def test_dealt_experts_are_not_gathered_and_their_tokens_travel() -> None:
    config = BIG["qwen3-30b-a3b"]
    shape, setting = Shape.of(config), Setting(size=4, compute=2, shard=8, tokens=1000, checkpointing=True)
    experts = 48 * 128 * 3 * 2048 * 768
    assert (shape.experts, shape.routed) == (experts, 8)
    whole, dealt = Traffic.of(shape, setting), Traffic.of(shape, replace(setting, dealt=8))
    assert whole.tokens == 0
    assert dealt.tokens == 6 * 48 * 1000 * 8 * 2048 * 2 * 7 // 8  # there and back: forward, again, and gradients
    assert whole.gradients - dealt.gradients == pytest.approx(4 * experts * 7 / 8)
    assert whole.update - dealt.update == pytest.approx(2 * 2 * experts * 7 / 8)
    root = shape.root * (2 * 2 + 4)  # its gradients come last: then no layer is gathered any more
    assert plan(shape, replace(setting, dealt=8)).gathered == root
    assert plan(shape, setting).gathered > root


@pytest.mark.slow
def test_experts_that_workers_cannot_share_are_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (("dense", SMALL), ("mixture", BIG["qwen3-30b-a3b"])):
        AutoTokenizer.from_pretrained(embedded_path()).save_pretrained(tmp_path / name)
        config.save_pretrained(tmp_path / name)
    given = "recipes/gsm8k_tool_8gpu.yaml", "cluster.gpus=3", "cluster.expert_parallel=3"
    said = said_by_check(capsys, *given, f"model.path={tmp_path / 'dense'}")
    assert "cluster.expert_parallel is 3, and the model has no experts (qwen2): leave it at 1" in said
    said = said_by_check(capsys, *given, f"model.path={tmp_path / 'mixture'}")
    assert "cluster.expert_parallel: 128 experts are not shared evenly by 3 workers" in said


def test_a_tower_is_counted_apart_and_a_frozen_one_is_not_trained() -> None:
    frozen, trained = (
        plan_memory(Recipe.model_validate({"model": {"path": "tiny_vision", "freeze": freeze}}))
        for freeze in (["vision"], [])
    )
    model, _ = load_model(Recipe.model_validate({"model": {"path": "tiny_vision", "freeze": ["vision"]}}).model)
    assert frozen.parameters == trained.parameters == sum(p.numel() for p in model.parameters())
    assert frozen.gradients == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert frozen.optimizer < trained.optimizer
    assert frozen.tower < trained.tower


def test_the_estimate_of_a_tower_is_near_what_its_backward_pass_keeps() -> None:
    model, _ = load_model(ModelSection(path="tiny_vision"))
    keys = [STORE.put(picture(seed, 128, 128)) for seed in range(4)]
    pixels, grids = zip(*(model.image_input.pixels(key) for key in keys), strict=True)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    given = torch.from_numpy(np.concatenate(pixels)), torch.tensor(grids)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = model.model.get_image_features(*given, return_dict=True)
    tokens = sum(len(features) for features in made.pooler_output)
    estimate = plan(Shape.of(model.config), Setting(tokens=tokens)).tower
    assert 0.7 < estimate / sum(kept.values()) < 1.4


def test_an_adapter_alone_has_gradients_and_an_optimizer(folder: Path) -> None:
    section = {"path": str(folder), "dtype": "bfloat16", "lora": {"rank": 8, "targets": ["q_proj"]}}
    plan = plan_memory(Recipe.model_validate({"model": section, "algorithm": {"kl_coef": 0.1}}))
    adapter = 24 * 8 * (896 + 14 * 64)
    assert (plan.trained, plan.gradients, plan.optimizer) == (adapter, 4 * adapter, 8 * adapter)
    assert plan.weights == 2 * PARAMETERS + 4 * adapter
    assert plan.reference == 0


def test_roles_share_the_workers_or_have_their_own(folder: Path) -> None:
    algorithm = {"advantage": "gae", "kl_coef": 0.1}
    pools = [{"roles": ["critic"], "workers": 4}]
    together, apart = (
        recipe(folder, critic={}, algorithm=algorithm, rewards={"model": str(folder)}, cluster=cluster)
        for cluster in ({"workers": 2}, {"workers": 2, "pools": pools})
    )
    shared, rest = plan_memory(together), plan_memory(apart)
    assert shared.critic == 18 * PARAMETERS // 2
    assert shared.reward_model == 2 * PARAMETERS // 2
    assert (rest.critic, rest.reference, rest.reward_model) == (0, shared.reference, shared.reward_model)
    ((pool, own),) = plan_pools(apart)
    assert pool.roles == ("critic",)
    assert (own.weights, own.critic, own.reference) == (0, 18 * PARAMETERS // 4, 0)


def test_the_chunks_of_logits_are_those_of_the_kernel() -> None:
    assert (memory.LOGIT_ELEMENTS, memory.LOGIT_ROWS) == (kernels.CHUNK, kernels.CHUNK_ROWS)
    assert (memory.GPU_LOGIT_ROWS, memory.HEAD_SLICE) == (kernels.GPU_ROWS, kernels.SLICE)
    assert memory.GPU_HEAD_SLICE == kernels.GPU_SLICE


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_is_planned_of_the_output_layer_is_what_it_takes(kind: torch.dtype) -> None:
    """No more than planned, and not much less, on tensors without data."""
    config = Qwen3Config(vocab_size=150_000, hidden_size=1024, intermediate_size=48, num_hidden_layers=1, head_dim=16,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    for tokens in (64, 2048):
        with torch.device("meta"):
            hidden = torch.empty(tokens, 1024, dtype=kind, requires_grad=True)
            head = torch.empty(150_000, 1024, dtype=kind, requires_grad=True)
            target = torch.empty(tokens, dtype=torch.long)
        with Held() as held:
            kernels.token_logprobs(hidden, head, None, target, 0.9)[0].sum().backward()
        size = kind.itemsize
        planned = plan(Shape.of(config), Setting(size=size, compute=size, tokens=tokens)).logits
        taken = held.most - head.nbytes  # which is a view of it
        assert 0.75 * planned < taken < planned + 3 * hidden.nbytes + 4 * min(kernels.KEPT, tokens * len(head))


def test_what_is_planned_is_what_a_step_allocates() -> None:
    """Weights, gradients and moments exactly, by torch's own account, of a model that a step was made with."""
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    adam = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    adam.step()
    found = plan(Shape.of(config), Setting())
    assert found.weights == sum(p.nbytes for p in model.parameters())
    assert found.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    moments = [value for state in adam.state.values() for key, value in state.items() if key.startswith("exp_avg")]
    assert found.optimizer == sum(value.nbytes for value in moments)


def said_by_check(capsys: pytest.CaptureFixture[str], recipe: str, *overrides: str) -> str:
    assert run(["check", recipe, *overrides, "env.source=generated"]) == 0
    return capsys.readouterr().out


def test_the_recipe_of_one_gpu_says_what_it_needs_and_what_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTRL_SGLANG_VENV", raising=False)
    said = said_by_check(capsys, "recipes/gsm8k_tool_1gpu.yaml", f"model.path={folder}", "model.device=cuda:99")
    assert "494.0 M parameters" in said
    assert "optimizer       5.9 GB" in said
    assert "reference" in said
    assert "missing: model.device: cuda:99 cannot be used here" in said
    assert "missing: engine sglang: say where servers run" in said
    assert "GPUs on this machine" not in said


THREE = Qwen2Config(  # Qwen2.5-3B's
    vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


GPU_RECIPES = [
    ("1gpu", SMALL, 24), ("8gpu", THREE, 80), ("4b_1gpu", BIG["qwen3-4b"], 80), ("32b_8gpu", BIG["qwen3-32b"], 80),
    ("30b_a3b_8gpu", BIG["qwen3-30b-a3b"], 80),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "card"), GPU_RECIPES)
def test_the_recipes_for_gpus_fit_those_that_they_name(
    name: str, shape: PretrainedConfig, card: int, tmp_path: Path
) -> None:
    """State beside the servers' share, and 2 GB for CUDA; while it trains, servers that sleep keep 3 GB more."""
    shape.save_pretrained(tmp_path)
    path = f"recipes/gsm8k_tool_{name}.yaml"
    found = resolve_types(Recipe.load(path, [f"model.path={tmp_path}"]))
    planned = plan_memory(found)
    assert f" of {card} GB" in Path(path).read_text(encoding="utf-8")
    assert found.engine.sleep
    ranks = found.engine.args["flags"].get("tp-size", 1)
    assert planned.device + planned.beside(ranks) < card * 1e9
    if shape in BIG.values():
        assert f"{planned.device / 1e9:.0f} GB" in " ".join(Path(path).read_text(encoding="utf-8").split())
    assert planned.between_steps / 1e9 < card * (1 - found.engine.args["flags"]["mem-fraction-static"]) - 2


@pytest.mark.parametrize(("name", "shape"), [("1gpu", SMALL), ("8gpu", THREE)])
def test_the_tutorial_says_what_offload_saves(name: str, shape: PretrainedConfig, tmp_path: Path) -> None:
    shape.save_pretrained(tmp_path)
    table = (Path(__file__).parents[2] / "docs" / "tutorials" / "gpu.md").read_text(encoding="utf-8")
    for offload in ("[]", "[optimizer]", "[optimizer, activations]"):
        changes = [f"model.path={tmp_path}", f"cluster.offload={offload}"]
        found = plan_memory(resolve_types(Recipe.load(f"recipes/gsm8k_tool_{name}.yaml", changes)))
        label = "| nothing |" if offload == "[]" else f"| `{offload}`:"
        row = next(line for line in table.splitlines() if line.startswith(label))
        host = f"{found.host / 1e9:.1f}" if found.host else "0"
        assert f" {found.device / 1e9:.1f} + {host} |" in row


def test_what_cannot_be_read_keeps_check_from_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTRL_SGLANG_VENV", raising=False)
    command = ["check", "recipes/gsm8k_tool_1gpu.yaml", f"model.path={folder}", "env.source=os:strerror"]
    assert run(command) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: env.source: os:strerror('train') raised: ")
    assert "optimizer" in said.out
    assert "missing: engine sglang" in said.out


@pytest.mark.slow
def test_the_recipe_of_eight_gpus_says_what_each_needs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("AGENTRL_SGLANG_VENV", raising=False)
    said = said_by_check(capsys, "recipes/gsm8k_tool_8gpu.yaml", f"model.path={folder}")
    assert "8 workers, a GPU each; " in said
    assert "optimizer       494 MB" in said
    assert "gathered" in said
    assert "with activation checkpointing" in said
    assert "each worker receives 1.5 GB of weights and 1.7 GB of gradients" in said
    assert "missing: needs 8 GPUs on this machine (8 of the trainer, 8 of the engine, which share them), 0 here" in said
    assert "GPUs 0-7  actor " in said
    assert "GPU 7     server 7  0.6 of the GPU" in said
    assert "model.device" not in said  # a controller beside a cluster computes nothing
    own = said_by_check(capsys, "recipes/gsm8k_tool_8gpu.yaml", f"model.path={folder}", "engine.sleep=false")
    assert "needs 16 GPUs on this machine (8 of the trainer, 8 of the engine, each has its own), 0 here" in own
    offloaded = said_by_check(capsys, "recipes/gsm8k_tool_8gpu.yaml", f"model.path={folder}", "cluster.offload=true")
    assert "of CPU memory for each worker (cluster.offload)" in offloaded


def test_a_gpu_that_is_too_small_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tiny:
        total_memory = 4_000_000_000

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Tiny())
    said = said_by_check(capsys, "recipes/gsm8k_tool_8gpu.yaml", f"model.path={folder}")
    assert "the smallest GPU here has 4.0 GB" in said
    assert "server 0  0.6 of the GPU, 2.4 GB" in said
    assert "on this machine (" not in said


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("share", "size", "crowded"), [(0.6, 2, True), (0.1, 4, False), (0.6, 400, False)])
def test_a_server_that_finds_too_little_beside_the_trainer_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    share: float, size: int, crowded: bool,
) -> None:  # fmt: skip
    held = type("Held", (), {"total_memory": size * 10**9})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: held)
    recipe = ("recipes/gsm8k_tool_8gpu.yaml", f"model.path={folder}")
    said = said_by_check(capsys, *recipe, f"engine.args.flags.mem-fraction-static={share}")
    assert (f"missing: server 0 takes {share:g} of {size}.0 GB, and the trainer keeps" in said) is crowded
    apart = said_by_check(capsys, *recipe, "engine.sleep=false", "cluster.gpus=4", "engine.args.servers=4")
    assert "and the trainer keeps" not in apart


def test_a_pool_of_its_own_is_shown_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_by_check(
        capsys, "recipes/gsm8k_tool_1gpu.yaml", f"model.path={folder}", "critic={}", "algorithm.advantage=gae",
        "cluster.workers=2", "cluster.pools=[{roles: [critic], workers: 1}]",
    )  # fmt: skip
    assert "2 workers of the actor, on CPUs; " in said
    assert "1 worker of the pool (critic), on CPUs; " in said


def test_what_makes_a_gpu_faster_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "recipes/gsm8k_tool_1gpu.yaml"
    said = said_by_check(capsys, recipe, f"model.path={folder}", "engine={name: local}")
    assert "advice: norms and gates run as one kernel each with liger-kernel: pip install 'agentrl[gpu]'" in said
    assert "advice: the engine `local` decodes on one GPU" in said
    said = said_by_check(capsys, recipe, f"model.path={folder}", "engine={name: local}", "model.device=cpu")
    assert "liger-kernel" not in said
    assert "decodes on one GPU" not in said


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_refused_unless_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is loaded; what others keep of the GPU counts: a server that sleeps, its other ranks, and with an
    adapter its weights."""
    held = type("Held", (), {"total_memory": 6 * 10**9})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: held)
    monkeypatch.setattr(preflight, "lacking", lambda recipe: [])
    recipe = Recipe.load("recipes/gsm8k_tool_8gpu.yaml", [f"model.path={folder}", "env.source=generated"])
    with pytest.raises(UserError, match=r"each worker needs .*, and CUDA and a server that sleeps 5\.0 GB beside it"):
        preflight.check_run(recipe)
    preflight.check_run(recipe.changed(train={"check_memory": False}))
    plain, adapted = (
        plan_memory(resolve_types(r)) for r in (recipe, recipe.changed(model={"lora": LoraSection(rank=4)}))
    )
    assert plain.beside(0) == 1_500_000_000
    assert plain.beside(4) == 5_000_000_000 + 3 * 500_000_000
    assert adapted.beside(2) == 5_500_000_000 + adapted.parameters
