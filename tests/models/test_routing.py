"""Routing replay: the experts that the engine chose, recorded exactly and used again by the trainer."""

import copy
import json
import sys
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_help import REWARDS, make_groups, make_recipe
from learner_help import make_model as make_dense
from sglang_help import StandIn
from train_help import metrics, small
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from vision_help import picture, prompt, seeing_model, trajectory
from vllm_help import VllmStandIn

import agentrl
from agentrl.compute.batch import Batch
from agentrl.engine.base import EngineError, Generation, GenerationFinish, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.servers.answer import Answer
from agentrl.engine.servers.client import ServerError
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.engine.sglang.wire import Reader
from agentrl.engine.vllm.kind import VllmEngine
from agentrl.engine.vllm.wire import VllmReader
from agentrl.errors import UserError
from agentrl.learner.actor import Actor
from agentrl.learner.learner import Learner
from agentrl.learner.roles import LocalRoles
from agentrl.models.load import resolve
from agentrl.models.routing import Routing, ServedExperts
from agentrl.models.vision import Vision
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.rollout.request import AsyncRolloutRequest

LAYERS, EXPERTS, EACH = 2, 8, 2
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": EACH, "initializer_range": 0.2,
    "max_position_embeddings": 1024,
}  # fmt: skip


def make_mixture(family: str = "qwen3_moe", **sizes: Any) -> Any:
    torch.manual_seed(0)
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES | sizes, num_local_experts=EXPERTS)).eval()
    moe = {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | moe | sizes)).eval()


def chosen(model: Any, ids: Any) -> np.ndarray:
    """What the routers choose for a sequence on its own, [T, layers, experts a token]."""
    with Routing.of(model).recording() as taken, torch.no_grad():
        model(input_ids=torch.tensor(np.array(ids, np.int64))[None])
    return torch.stack([layer for layer in taken if layer is not None], 1).numpy()


def mixture_batch(model: Any, other: bool = False) -> Batch:
    """Groups with the experts that `model` chooses for each sample alone; or with the next expert in place of each."""
    batch = Batch.from_groups(make_groups(REWARDS))
    experts = np.concatenate([chosen(model, batch.tokens["ids"][batch.span(i)]) for i in range(len(batch))])
    batch = batch.with_tokens(experts=((experts + other) % EXPERTS).astype(np.int16))
    weights = batch.spread(np.full(len(batch), 1 / batch.sampled.sum(), np.float32))
    return batch.with_tokens(weight=weights, advantages=batch.spread(batch.samples["reward"] - 0.5))


def replaying(**algorithm: Any) -> Recipe:
    return make_recipe({"routing_replay": True, **algorithm})


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
async def test_the_engine_tells_what_it_chose_over_turns_and_shared_prompts(family: str) -> None:
    model = make_mixture(family)
    engine = LocalEngine(model, max_batch=4, routing_replay=True)
    prompt = list(range(5, 25))
    for name in "ab":  # the second takes over what the first computed of the prompt
        first = await engine.generate(prompt, Sampling(8, seed=ord(name)), name)
        ids = [*prompt, *first.ids, 3, 4, 5]
        second = await engine.generate(ids, Sampling(8, seed=1), name)
        assert second.experts is not None
        assert len(second.experts) == len(ids) + len(second.ids) - 1
        assert np.array_equal(second.experts, chosen(model, [*ids, *second.ids])[:-1])
    await engine.close()
    silent = LocalEngine(model, max_batch=1)
    assert (await silent.generate(prompt, Sampling(2), "c")).experts is None


def seen(model: Any, ids: np.ndarray) -> np.ndarray:
    """What the routers choose for a sequence of keyed ids on its own, [T, layers, experts a token]."""
    with Routing.of(model).recording() as taken, torch.no_grad():
        Vision(model).logits(ids)
    return torch.stack([layer for layer in taken if layer is not None], 1).numpy()


async def test_a_mixture_that_sees_tells_what_it_chose_and_is_trained_with_it() -> None:
    model, _ = seeing_model("qwen3_vl_moe")
    engine = LocalEngine(model, max_batch=4, routing_replay=True)
    parts = ([30, 40, 41], picture(0), [50, 51], picture(1, 48, 16), [60])
    ids = prompt(model, *parts).tolist()
    made = [await engine.generate(ids, Sampling(6, seed=seed), str(seed)) for seed in range(2)]
    again = await engine.generate([*ids, *made[0].ids, 7, 8], Sampling(3, seed=5), "0")
    for start, told in ((ids, made[0]), (ids, made[1]), ([*ids, *made[0].ids, 7, 8], again)):
        whole = np.array([*start, *told.ids])
        assert np.array_equal(told.experts, seen(model, whole)[:-1])
    await engine.close()
    samples = []
    for told in made:
        t = trajectory(model, *parts, answer=told.ids)
        missing = np.full((1, *told.experts.shape[1:]), -1, np.int16)
        logprobs = np.concatenate([np.zeros(len(ids)), told.logprobs]).astype(np.float32)
        samples.append(replace(t, experts=np.concatenate([told.experts, missing]), logprobs=logprobs))
    batch = Batch.from_trajectories(samples, [0, 0])
    weights = batch.spread(np.full(2, 1 / batch.sampled.sum(), np.float32))
    batch = batch.with_tokens(weight=weights, advantages=batch.spread(np.array([1, -1], np.float32)))
    actor = Actor(model, replaying())
    np.testing.assert_allclose(actor.logprobs(batch), batch.tokens["logprobs"], atol=1e-4)
    found = actor.update(batch, 0.0)
    assert found.sums["mismatch/experts"] == 0
    other = batch.with_tokens(experts=((batch.tokens["experts"] + 1) % 4).astype(np.int16))
    assert np.abs(actor.logprobs(other) - batch.tokens["logprobs"]).max() > 1e-3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("stand_in", "kind"), [(StandIn, SglangEngine), (VllmStandIn, VllmEngine)])
async def test_servers_tell_it_of_every_layer(stand_in: Any, kind: Any) -> None:
    """By the protocols of SGLang 0.5.23 and vLLM 0.32 as their sources have them: no CPU build records experts."""
    model = make_mixture(mlp_only_layers=[0], vocab_size=1024)
    model.config.architectures = ["Qwen3ForCausalLM"]  # as the stand-in says
    prompt = list(range(5, 25))
    async with stand_in(model, experts=True, model_path="stand-in") as server:
        engine = kind(model, max_batch=4, urls=(server.url,), routing_replay=True)
        made = await engine.generate(prompt, Sampling(40, temperature=0.0), "a")
        assert np.array_equal(made.experts, chosen(model, [*prompt, *made.ids])[:-1])
        assert made.experts.shape[1:] == (1, EACH)
        server.experts = False
        with pytest.raises(EngineError, match="start it with --enable-return-routed-experts"):
            await engine.generate(prompt, Sampling(4), "b")
        await engine.close()


@pytest.mark.parametrize("experts", ["!", b64encode(b"12345").decode(), 7, b64encode(b"x" * 64).decode()])
def test_experts_that_cannot_be_read_are_a_malformed_answer(experts: Any) -> None:
    """And then nothing of the piece is added."""
    sglang, vllm = Answer(), Answer()
    meta = {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 3, None]], "finish_reason": {"type": "length"}}
    choice = {"token_ids": [3], "logprobs": {"content": [{"token_id": 3, "logprob": -1.0}]}, "finish_reason": "length"}
    first = json.dumps({"output_ids": [3], "meta_info": meta | {"routed_experts": experts}}).encode()
    second = json.dumps({"choices": [choice | {"routed_experts": experts}]}).encode()
    if experts != b64encode(b"x" * 64).decode():  # which may be int32
        with pytest.raises(ServerError, match="malformed: its routed_experts"):
            Reader(sglang, "u", 0).add(first)
    with pytest.raises(ServerError, match="malformed: its routed_experts"):
        VllmReader(vllm, "u", 0).add(second)
    assert sglang.ids == vllm.ids == []
    with pytest.raises(ValueError, match="3 experts of 2 tokens, 2 layers and 2 each"):
        ServedExperts((0, 1), 2, 2).recorded(np.zeros(3, np.int32), 2)


def test_launched_servers_get_the_flag() -> None:
    model = make_mixture()
    for kind in (SglangEngine, VllmEngine):
        engine = kind(model, max_batch=1, command=sys.executable, model_path="m", routing_replay=True)
        plan = engine.fleet._plan
        assert "--enable-return-routed-experts" in plan.arguments(30000, 0)
        assert ("VLLM_USE_V2_MODEL_RUNNER" in plan.env) == (kind is VllmEngine)


def test_a_request_keeps_what_was_chosen_when_a_token_was_sampled() -> None:
    request = AsyncRolloutRequest("r", Task("t", {}), 0)
    request.main.ids.fromlist([1, 2])
    request.main.prompt_length = 2

    def generated(ids: list[int], experts: np.ndarray) -> Generation:
        return Generation(ids, [-1.0] * len(ids), GenerationFinish.STOP, experts=experts.astype(np.int16))

    request.main.add_sampled(generated([3, 4], np.full((3, 1, 2), 5)))
    request.main.close_turn()
    request.main.add_bridge([7])
    request.main.add_sampled(generated([8], np.full((5, 1, 2), 6)))  # weights changed: all of it was computed again
    request.main.close_turn()
    experts = request.trajectory({}).experts
    assert experts[:, 0, 0].tolist() == [5, 5, 5, 6, 6, -1]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_its_own_choice_replayed_changes_nothing(family: str) -> None:
    model = make_mixture(family)
    batch, plain = mixture_batch(model), Actor(copy.deepcopy(model), make_recipe())
    actor = Actor(model, replaying())
    np.testing.assert_allclose(actor.logprobs(batch), plain.logprobs(batch), atol=1e-5)
    found, wanted = actor.update(batch, 1e-3), plain.update(batch, 1e-3)
    assert found.sums["mismatch/experts"] == 0
    assert found.loss == pytest.approx(wanted.loss, abs=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=name)


def test_another_choice_is_taken_and_trains_the_routers() -> None:
    """Against each sample alone, with a router that is written out here."""
    model = make_mixture()
    batch = mixture_batch(model, other=True)
    actor = Actor(model, replaying())
    wanted = np.zeros(int(batch.offsets[-1]), np.float32)
    alone = copy.deepcopy(model)
    for sample in range(len(batch)):
        span = batch.span(sample)
        for layer, block in enumerate(alone.model.layers):
            experts = torch.from_numpy(batch.tokens["experts"][span][:, layer].astype(np.int64))

            def route(states: torch.Tensor, gate: Any = block.mlp.gate, experts: torch.Tensor = experts) -> Any:
                logits = states @ gate.weight.T
                scores = logits.softmax(-1).gather(-1, experts)
                return logits, scores / scores.sum(-1, keepdim=True), experts

            block.mlp.gate.forward = route
        ids = torch.from_numpy(batch.tokens["ids"][span].astype(np.int64))
        with torch.no_grad():
            log_p = alone(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        wanted[span][1:] = log_p.numpy()
    wanted *= batch.tokens["loss_mask"]
    np.testing.assert_allclose(actor.logprobs(batch), wanted, atol=1e-5)
    assert np.abs(Actor(copy.deepcopy(model), make_recipe()).logprobs(batch) - wanted).max() > 0.01
    before = model.model.layers[0].mlp.gate.weight.detach().clone()
    found = actor.update(batch, 1e-3)
    assert found.sums["mismatch/experts"] > 0
    assert (model.model.layers[0].mlp.gate.weight - before).abs().max() > 1e-4


def test_unknown_experts_are_the_routers_own_choice_also_when_activations_are_computed_again() -> None:
    model = make_mixture()
    batch = mixture_batch(model)
    unknown = batch.with_tokens(experts=np.full_like(batch.tokens["experts"], -1))
    recipe = replaying()
    checkpointed = recipe.model_copy(update={"model": recipe.model.model_copy(update={"checkpointing": True})})
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    Actor(ours, recipe).update(unknown, 1e-3)
    Actor(theirs, checkpointed).update(batch, 1e-3)
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), atol=1e-5, rtol=1e-4)


def test_after_an_update_that_fails_the_routers_choose_themselves() -> None:
    model = make_mixture()
    ids = torch.arange(5, 25)[None]
    before = model(input_ids=ids).logits
    batch = mixture_batch(model, other=True)
    actor = Actor(model, replaying())
    with pytest.raises(KeyError, match="advantages"):
        actor.update(replace(batch, tokens={k: v for k, v in batch.tokens.items() if k != "advantages"}), 1e-3)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_without_routers_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM has no router .*: set algorithm.routing_replay=false"):
        Learner(replaying(), LocalRoles(replaying(), make_dense()))
    with pytest.raises(UserError, match=r"engine 'transformers' does not tell which experts it chose"):
        agentrl.train(small(tmp_path, algorithm__routing_replay=True, engine__name="transformers"))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["none", "one_step"])
def test_a_run_with_a_mixture(tmp_path: Path, overlap: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    make_mixture(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    recipe = small(
        tmp_path / "run", model__path=str(tmp_path / "model"), algorithm__routing_replay=True, rollout__overlap=overlap
    )  # fmt: skip
    rows = metrics(agentrl.train(recipe).folder)[1:]
    assert all("mismatch/experts" in row for row in rows)
    if overlap == "none":
        assert all(row["mismatch/experts"] == 0 and row["mismatch/logprob_max"] < 1e-3 for row in rows)
