"""A model that sees: trainer, engine and transformers agree, packed or not, wherever pictures stand."""

import asyncio

import numpy as np
import pytest
import torch
from vision_help import GEMMAS, KINDS, RECURRENT, picture, prompt, seeing_model, sequence, template, trajectory

from agentrl.compute.batch import Batch
from agentrl.compute.forward import ModuleForward, SequenceForward, choose
from agentrl.compute.packing import bins, micro_batches
from agentrl.engine.base import EngineError, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.local.vision_runner import VisionRecomputeRunner, VisionRunner
from agentrl.fine_tuning.new_model import bare_tokenizer
from agentrl.images import STORE, keyed
from agentrl.models.vision import Vision

RNG = np.random.default_rng(0)
SQUARE, WIDE, TALL = picture(0), picture(1, 48, 16), picture(2, 16, 64)


def text(n):
    return RNG.integers(20, 250, n).tolist()


@pytest.fixture(scope="module", params=KINDS)
def any_model(request):
    return seeing_model(request.param)[0]


@pytest.fixture(scope="module")
def model():
    return seeing_model()[0]


def trajectories(model):
    """A group whose samples share pictures at their beginning, differ in them, or have none."""
    pre, later = text(9), text(12)
    sampled_pad = [model.image_input.placeholder, 30, model.image_input.placeholder]
    return [
        trajectory(model, pre, SQUARE, later, answer=text(5)),
        trajectory(model, pre, SQUARE, later, WIDE, text(2), answer=text(4)),
        trajectory(model, pre, SQUARE, later, TALL, text(2), SQUARE, answer=text(3)),
        trajectory(model, pre, picture(3), later, answer=text(5)),
        trajectory(model, pre, later, answer=text(6)),
        trajectory(model, pre, SQUARE, answer=sampled_pad),
    ]


@pytest.mark.quick_cases(2)
def test_logits_are_those_of_transformers(any_model):
    model = any_model
    ids, spans = sequence(model, text(5), SQUARE, text(4), WIDE, TALL, text(3), SQUARE, text(6))
    pad = model.image_input.placeholder
    images = model.image_input.processor(images=[STORE.load(span.hash) for span in spans], return_tensors="pt")
    images.pop("num_soft_tokens_per_image", None)
    row = torch.tensor([ids])
    with torch.no_grad():
        wanted = model(input_ids=row, mm_token_type_ids=(row == pad).int(), **images).logits[0].log_softmax(-1)
        both = [
            Vision(model).logits(prompt(model, *parts)).log_softmax(-1)
            for parts in ([ids[: spans[0].start - 1], SQUARE], [ids[: spans[0].start - 1], picture(9)])
        ]
        found = Vision(model).logits(keyed(ids, spans)).log_softmax(-1)
    assert (found - wanted).abs().max() < 1e-5
    assert (both[0][-1] - both[1][-1]).abs().max() > 0.01, "the picture is read"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("any_model", [kind for kind in KINDS if kind not in (*GEMMAS, *RECURRENT)], indirect=True)
def test_packed_and_separate_sequences_agree_with_their_gradients(any_model):
    model = any_model
    made = trajectories(model)
    batch = Batch.from_trajectories(made, [0] * len(made))
    (packed,) = micro_batches(batch, 100_000)
    assert len(packed.ids) < batch.offsets[-1] - 60, "what samples share is laid out once"
    forward, description = choose(model)
    assert isinstance(forward, ModuleForward)
    assert "images" in description
    parameters = dict(model.named_parameters())

    def gradients(logprobs):
        found = torch.autograd.grad(logprobs.sum(), list(parameters.values()), allow_unused=True)
        return dict(zip(parameters, found, strict=True))

    together = forward(packed, 1.0)[0]
    alone = torch.cat([forward(row, 1.0)[0] for t in made for row in micro_batches(Batch.from_trajectories([t]), 9999)])
    plain = SequenceForward(model)(packed, 1.0)[0]
    by_source = together[torch.from_numpy(np.argsort(packed.source))]
    assert (together - plain).abs().max() < 1e-5
    assert (by_source - alone).abs().max() < 1e-5
    first, second = gradients(together), gradients(plain)
    assert any("visual" in name and grad is not None for name, grad in first.items())
    for name, grad in first.items():
        if grad is not None:
            assert torch.allclose(grad, second[name], atol=1e-3 * float(second[name].abs().max()) + 1e-6), name


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("qwen2_5_vl", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}),
        *((kind, {}) for kind in (*GEMMAS, *RECURRENT)),
    ],
)
def test_a_model_with_other_layers_is_computed_one_sequence_at_a_time(kind, changed):
    model, _ = seeing_model(kind, **changed)
    forward, description = choose(model)
    assert isinstance(forward, SequenceForward)
    assert description.startswith("one sequence at a time")
    assert ("linear_attention" if kind in RECURRENT else "sliding_attention") in description


def test_a_group_is_not_merged_over_different_pictures(model):
    pre = text(20)
    made = [trajectory(model, pre, picture(i), text(3), answer=text(2)) for i in (4, 4, 5)]
    assert all((made[0].ids[:25] == t.ids[:25]).all() for t in made)
    batch = Batch.from_trajectories(made, [0] * 3)
    (packed,) = micro_batches(batch, 9999)
    shared = 21  # the tokens before the first placeholder
    assert len(packed.ids) < batch.offsets[-1] - shared
    paths = {tuple(packed.ids[np.concatenate([np.arange(a, b) for a, b in p.spans])]) for p in packed.paths}
    assert len({path[shared:25] for path in paths}) == 2


def test_a_batch_keeps_pictures_through_selection_and_split(model):
    made = trajectories(model)
    batch = Batch.from_trajectories(made, [0] * len(made))
    parts = batch.distribute(2)
    joined = Batch.concat(parts.parts).select(np.argsort(parts.order))
    assert (joined.tokens["keyed_ids"] == batch.tokens["keyed_ids"]).all()
    assert "keyed_ids" not in Batch.from_trajectories([made[4]]).tokens


def test_workers_share_what_features_cost(model):
    """One conversation with a picture of 48 features costs as much as all others together."""
    seen = trajectory(model, text(4), picture(5, 128, 96), answer=text(6))
    read = [trajectory(model, text(40), answer=text(20)) for _ in range(4)]
    batch = Batch.from_trajectories([read[0], seen, *read[1:]])
    assert sorted(map(len, batch.distribute(2).parts)) == [2, 3]
    costly = batch.with_image_cost(4 * 60 / 48)
    assert [list(part.lengths) for part in costly.distribute(2).parts if len(part) == 1] == [[len(seen.ids)]]
    assert (
        Batch.from_trajectories(read).with_image_cost(5.0).tokens.keys() == Batch.from_trajectories(read).tokens.keys()
    )


def test_micro_batches_share_what_features_cost(model):
    """Two long texts and four pictures of as many tokens as one of them, in rows of about as many tokens or as much
    cost; where the bound of tokens leaves no choice, rows are no more for it."""
    seen = [trajectory(model, text(2), picture(i, 128, 64), answer=text(4)) for i in range(4)]
    batch = Batch.from_trajectories([*(trajectory(model, text(100), answer=text(60)) for _ in range(2)), *seen])
    costly = batch.with_image_cost(4.0)

    def pictures_of(batch, tokens):
        rows = bins(batch, tokens)
        assert all(sum(tree.tokens for tree in row) <= tokens for row in rows)
        assert sorted(i for row in rows for tree in row for i in tree.samples) == list(range(6))
        return [sum(int(i) >= 2 for tree in row for i in tree.samples) for row in rows]

    assert sorted(pictures_of(batch, 200)) == [0, 0, 4]
    assert sorted(pictures_of(costly, 200)) == [1, 1, 2]
    assert pictures_of(costly, 200)[0] == 2, "the costliest comes first"
    assert sorted(pictures_of(costly, 160)) == [0, 0, 4]


def test_a_frozen_tower_has_no_gradient_and_is_computed_once(model):
    other, _ = seeing_model()
    other.model.visual.requires_grad_(False)
    calls = []
    other.model.visual.register_forward_hook(lambda *_: calls.append(1))
    forward = ModuleForward(other)
    (packed,) = micro_batches(Batch.from_trajectories(trajectories(other)), 9999)
    for _ in range(2):
        forward(packed, 1.0)[0].sum().backward()
    assert len(calls) == 1
    assert all(p.grad is None for p in other.model.visual.parameters())
    assert other.model.language_model.layers[0].mlp.up_proj.weight.grad is not None


def test_features_and_pixels_are_kept_up_to_their_bytes(monkeypatch):
    ids = prompt(seeing_model()[0], *(picture(seed, 32, 32) for seed in range(20, 26)))
    with torch.no_grad():
        wanted = Vision(seeing_model()[0], keep=True).features(ids).embeddings
    size = wanted.nbytes // 6 * 4  # and three further layers
    monkeypatch.setattr("agentrl.models.vision._KEPT", 2 * size)
    monkeypatch.setattr("agentrl.models.image_input._KEPT", 1)
    model, _ = seeing_model()
    vision = Vision(model, keep=True)
    for _ in range(2):
        assert torch.equal(vision.features(ids).embeddings, wanted)
        kept = [vision._known.get(key) for key in vision._known]
        assert len(kept) == 2
        assert sum(t.untyped_storage().nbytes() for made, deep in kept for t in (made, *deep)) <= 2 * size
    assert len(model.image_input._pixels) == 1


@pytest.mark.slow
async def test_the_engine_samples_what_the_trainer_computes(any_model):
    model = any_model
    engine = LocalEngine(model, max_batch=4)
    assert engine.images
    cached = not model.image_input.family.looks_ahead(model.model) and model.config.model_type not in RECURRENT
    assert isinstance(engine.runner, VisionRunner if cached else VisionRecomputeRunner)
    pre, later = text(5), text(4)
    prompts = [prompt(model, *parts) for parts in (
        [pre, SQUARE, later], [pre, SQUARE, later], [pre, WIDE, later, TALL], [pre, TALL], [pre], [pre, WIDE, later],
    )]  # fmt: skip
    vision = Vision(model)

    async def play(number, ids):
        for turn in range(3):  # the conversation goes on with another picture
            sampling = Sampling(6, temperature=float(number % 2), seed=number)
            said = await engine.generate(ids, sampling, f"r{number}")
            whole = np.concatenate([ids, said.ids])
            with torch.no_grad():
                logits = vision.logits(whole)[len(ids) - 1 : -1]
            found = logits.log_softmax(-1).gather(1, torch.tensor(said.ids)[:, None])[:, 0]
            assert (found - torch.tensor(said.logprobs)).abs().max() < 1e-4
            if number % 2 == 0:
                assert logits.argmax(-1).tolist() == said.ids
            ids = np.concatenate([whole, prompt(model, later, (SQUARE, WIDE, TALL)[turn], later)])

    await asyncio.gather(*(play(number, ids) for number, ids in enumerate(prompts)))
    await engine.close()


async def test_new_weights_drop_the_features(model):
    other, _ = seeing_model()
    engine = LocalEngine(other, max_batch=2)
    ids = prompt(other, text(5), SQUARE, text(3))
    before = await engine.generate(ids, Sampling(1, temperature=0), "a")
    engine.finish("a")
    with torch.no_grad():
        other.model.visual.merger.linear_fc2.weight.mul_(-1)
    await engine.update_weights(1)
    after = await engine.generate(ids, Sampling(1, temperature=0), "b")
    assert abs(before.logprobs[0] - after.logprobs[0]) > 1e-3
    with torch.no_grad():
        wanted = Vision(other).logits(ids)[-1].log_softmax(-1).max()
    assert abs(float(wanted) - after.logprobs[0]) < 1e-4
    await engine.close()


async def test_an_engine_of_a_model_that_reads_text_takes_no_images(model):
    from agentrl.models.load import load_model
    from agentrl.recipe.sections.model import ModelSection

    engine = LocalEngine(load_model(ModelSection())[0], max_batch=1)
    assert not engine.images
    with pytest.raises(EngineError, match="outside the model's vocabulary"):
        await engine.generate(prompt(model, SQUARE), Sampling(1), "a")
    assert STORE.holds(STORE.put(SQUARE))


@pytest.mark.quick_cases(1)
def test_what_is_saved_is_loaded_by_transformers_and_by_us(any_model, tmp_path):
    from transformers import AutoModelForImageTextToText

    from agentrl.checkpoint.huggingface import HuggingFace
    from agentrl.models.load import load_model
    from agentrl.recipe.sections.model import ModelSection

    writer = HuggingFace(any_model)
    writer.begin(tmp_path, bare_tokenizer(template()))
    writer.write(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path)
    ours, tokenizer = load_model(ModelSection(path=str(tmp_path), freeze=("vision",)))
    for made in (theirs, ours):
        pairs = zip(made.state_dict().items(), any_model.state_dict().items(), strict=True)
        assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)
    assert tokenizer.image_input.family is any_model.image_input.family
    assert Vision(ours).frozen
    assert not Vision(any_model).frozen
    with torch.no_grad():
        ids = prompt(any_model, text(3), SQUARE, text(2))
        assert (Vision(ours).logits(ids) - Vision(any_model).logits(ids)).abs().max() < 1e-5
