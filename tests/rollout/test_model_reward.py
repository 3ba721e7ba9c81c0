"""The reward model: packed scores are those of single sequences, and every misfit is one clear line."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_help import save_tokenizer
from meeting import meet
from processes import eventually
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)
from warm import on_ranks

from agentrl.compute.batch import Batch
from agentrl.compute.classifier import ModuleScores, RewardModel, SequenceScores, choose, scoring_batch
from agentrl.compute.micro_batches import EMPTY
from agentrl.compute.packing import micro_batches
from agentrl.errors import UserError
from agentrl.models import embedded_path
from agentrl.plugins.reward import Sample
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import RewardsSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.recipe.sections.train import TrainSection
from agentrl.rollout.model_reward import ModelReward, translation
from agentrl.rollout.scorer import Scorer

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.2,
    "num_labels": 1,
}  # fmt: skip


def make_classifier(family: str = "qwen3", **keys: Any) -> Any:
    torch.manual_seed(0)
    match family:
        case "qwen3":
            model: Any = Qwen3ForSequenceClassification(Qwen3Config(**SIZES, head_dim=16, **keys))
        case "gpt2":
            sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "num_labels": 1}
            model = GPT2ForSequenceClassification(GPT2Config(**sizes, **keys))
        case "windowed":
            model = MistralForSequenceClassification(MistralConfig(**SIZES, sliding_window=4, **keys))
        case _:
            sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
            model = BertForSequenceClassification(BertConfig(**sizes, **keys))
    return model.eval()


def rows_of(shapes: list[tuple[int, list[int]]], seed: int = 0) -> tuple[list[np.ndarray], list[int]]:
    """Groups of (prompt length, answer lengths), ids from 2 on."""
    rng = np.random.default_rng(seed)
    rows, groups = [], []
    for group, (prompt, answers) in enumerate(shapes):
        opening = rng.integers(2, VOCABULARY, prompt)
        for answer in answers:
            rows.append(np.concatenate([opening, rng.integers(2, VOCABULARY, answer)]).astype(np.int32))
            groups.append(group)
    return rows, groups


def separate(model: Any, rows: list[np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        return np.array([float(model(input_ids=torch.from_numpy(r.astype(np.int64))[None]).logits[0, 0]) for r in rows])


class Held:
    """A model behind RewardModel's loading, which other tests go through."""

    def __init__(self, way: Any, model: Any, tokens: int) -> None:
        recipe = Recipe(train=TrainSection(micro_batch_tokens=tokens), rewards=RewardsSection(model="held"))
        self.scores = RewardModel(recipe, way(model)).scores


SHAPES = [(9, [12, 5, 1, 7]), (4, [3]), (15, [30, 2]), (1, [6, 0, 6])]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("tokens", [10_000, 40, 1])
@pytest.mark.parametrize("pad", [None, 0, 7])
@pytest.mark.parametrize(
    ("family", "way"),
    [("qwen3", ModuleScores), ("gpt2", ModuleScores), ("qwen3", SequenceScores), ("bert", SequenceScores)],
)
def test_scores_are_those_of_single_sequences(family: str, way: Any, pad: int | None, tokens: int) -> None:
    model = make_classifier(family, pad_token_id=pad)
    rows, groups = rows_of(SHAPES)
    rows[0][-3:] = 7  # padding at the end, where 7 is padding
    rows[5][4] = 7  # in the middle
    rows[8][:] = 7  # nothing else
    found = Held(way, model, tokens).scores(scoring_batch(rows, groups))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, separate(model, rows), atol=1e-5)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(0, 15), min_size=1, max_size=5)), max_size=5),
    st.integers(1, 60),
    st.integers(0, 5),
)
def test_any_split_scores_every_sample_once(shapes: list[Any], tokens: int, seed: int) -> None:
    model = make_classifier(pad_token_id=3)
    rows, groups = rows_of(shapes, seed)
    batch = scoring_batch(rows, groups)
    np.testing.assert_allclose(Held(ModuleScores, model, tokens).scores(batch), separate(model, rows), atol=1e-5)


def test_a_shared_prompt_is_computed_once_and_the_parts_of_a_batch_join() -> None:
    rows, groups = rows_of([(20, [5, 5, 5])])
    batch = scoring_batch(rows, groups)
    assert len(next(iter(micro_batches(batch, 1000))).ids) == 20 + 15
    rows, groups = rows_of(SHAPES)
    batch, held = scoring_batch(rows, groups), Held(ModuleScores, make_classifier(), 10_000)
    for parts in (2, 3):
        partition = batch.distribute(parts)
        joined = partition.join([held.scores(part) for part in partition.parts])
        np.testing.assert_allclose(joined, held.scores(batch), atol=1e-5)
    assert len(held.scores(batch.select([]))) == 0


@pytest.mark.parametrize(
    ("family", "way", "said"),
    [
        ("qwen3", ModuleScores, "packed"),
        ("gpt2", ModuleScores, "packed"),
        ("bert", SequenceScores, "one sequence at a time"),
        ("windowed", SequenceScores, "one sequence at a time"),
    ],
)
def test_the_fastest_exact_way_is_chosen_and_said(family: str, way: type, said: str) -> None:
    found, line = choose(make_classifier(family))
    assert found is way
    assert said in line


def test_a_rank_without_samples_keeps_up_with_the_others() -> None:
    calls = []
    model = make_classifier()
    model.model.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        assert SequenceScores(model, lambda count: 3)(EMPTY).shape == (0,)
        assert len(calls) == 3
        assert ModuleScores(model)(EMPTY).shape == (0,)
        assert len(calls) == 4


def score_as_one_of_two(rank: int, root: Path) -> None:
    """A gloo rank that scores its part of the batch by a sharded reward model."""
    from agentrl.compute.micro_batches import TorchProcessGroup
    from agentrl.distributed.fsdp.build import build_reward_model
    from agentrl.distributed.fsdp.mesh import make_context
    from agentrl.recipe.sections.cluster import ClusterSection

    meet(rank, root / "meeting")
    found = {}
    for family in FAMILIES:
        recipe = make_recipe(str(root / family)).model_copy(update={"train": TrainSection(micro_batch_tokens=40)})
        made = build_reward_model(recipe, make_context(ClusterSection(workers=2), torch.device("cpu")))
        assert all(hasattr(p, "to_local") for p in made.model.parameters())
        reward = RewardModel(recipe, made.forward, TorchProcessGroup(), made.description)
        rows, groups = rows_of(SHAPES)
        for parts in (2, 1):  # then the second rank has nothing to do
            partition = scoring_batch(rows, groups).distribute(parts)
            own = partition.parts[rank] if rank < parts else partition.parts[0].select([])
            gathered: list[Any] = [None, None]
            dist.all_gather_object(gathered, reward.scores(own))
            found[family, parts] = partition.join(gathered[:parts])
    if rank == 0:
        torch.save(found, root / "found.pt")
    dist.destroy_process_group()


FAMILIES = ("qwen3", "bert")


@pytest.mark.slow
def test_sharded_over_two_ranks_it_scores_alike(tmp_path: Path) -> None:
    for family in FAMILIES:
        saved(tmp_path / family, make_classifier(family, pad_token_id=7))
    on_ranks(score_as_one_of_two, tmp_path)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    for (family, _), scores in found.items():
        wanted = separate(make_classifier(family, pad_token_id=7), rows_of(SHAPES)[0])
        np.testing.assert_allclose(scores, wanted, atol=1e-5)
    assert len(found) == 4


def saved(folder: Path, model: Any, tokenizer: Any = None) -> str:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def make_recipe(path: str, **rollout: Any) -> Recipe:
    return Recipe(
        model=ModelSection(path="tiny"),
        rewards=RewardsSection(model=path),
        rollout=RolloutSection(**{"max_tokens": 256, "max_turn_tokens": 64, **rollout}),
    )


@pytest.fixture(scope="module")
def policy() -> Any:
    return AutoTokenizer.from_pretrained(embedded_path())


def test_it_is_loaded_from_its_folder(tmp_path: Path) -> None:
    model = make_classifier(pad_token_id=5)
    rows, groups = rows_of(SHAPES)
    reward = RewardModel(make_recipe(saved(tmp_path, model)))
    np.testing.assert_allclose(reward.scores(scoring_batch(rows, groups)), separate(model, rows), atol=1e-5)
    assert reward.description.startswith("packed")
    assert not any(p.requires_grad for p in reward.forward.model.parameters())


def test_what_is_no_reward_model_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    causal = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    two = Qwen3Config(**{**SIZES, "num_labels": 2}, head_dim=16)
    broken = tmp_path / "broken"
    saved(broken, make_classifier())
    (broken / "model.safetensors").write_bytes(b"no weights")
    paths = {
        str(tmp_path / "nothing"): "is not a folder",
        str(tmp_path / "file"): "is not a folder",
        str(tmp_path): "holds no config.json",
        saved(tmp_path / "causal", causal): "no weights for score.weight",
        saved(tmp_path / "two", Qwen3ForSequenceClassification(two)): "has 2 labels",
        str(broken): "its weights cannot be loaded",
    }
    for path, line in paths.items():
        with pytest.raises(UserError, match=line) as raised:
            RewardModel(make_recipe(path))
        assert str(raised.value).startswith(f"rewards.model: {path}")
        assert "\n" not in str(raised.value)


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **keys: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nmore lines")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    with pytest.raises(
        UserError, match=r"its configuration cannot be loaded \(a hub name needs the net.*connect to .*'$"
    ):
        RewardModel(make_recipe("somebody/model"))


MESSAGES: list[Any] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]


def sample(ids: Any = (), messages: Any = MESSAGES) -> Sample:
    return Sample(Task("t", {}), messages, ids=ids)


def classifier_for(tokenizer: Any, **keys: Any) -> Any:
    size = max(tokenizer.get_vocab().values()) + 1
    return Qwen3ForSequenceClassification(Qwen3Config(**{**SIZES, "vocab_size": size, **keys}, head_dim=16)).eval()


def test_with_the_policys_tokens_ids_are_taken_as_they_are(tmp_path: Path, policy: Any) -> None:
    for name, tokenizer in (("with", policy), ("without", None)):
        path = saved(tmp_path / name, classifier_for(policy), tokenizer)
        found = translation(make_recipe(path), policy)(sample(np.array([5, 6, 9], np.int32)))
        assert found.tolist() == [5, 6, 9]
    grown = AutoTokenizer.from_pretrained(embedded_path())
    grown.add_tokens(["<score>"])
    path = saved(tmp_path / "grown", classifier_for(grown), grown)
    assert translation(make_recipe(path), policy)(sample([4, 4])).tolist() == [4, 4]


def test_with_other_tokens_the_conversation_is_written_anew(tmp_path: Path, policy: Any) -> None:
    save_tokenizer(tmp_path / "ours")
    ours = AutoTokenizer.from_pretrained(tmp_path / "ours")
    path = saved(tmp_path / "theirs", classifier_for(policy), policy)
    translate = translation(make_recipe(path), ours)
    wanted = policy.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    assert translate(sample([1, 2, 3])).tolist() == list(wanted)

    calculator = {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
    call = {"type": "function", "id": "call_1", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        MESSAGES[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "call_1", "name": "add"},
        MESSAGES[1],
    ]
    ids = translation(make_recipe(path), ours, [calculator])(sample(messages=messages))
    assert "add" in policy.decode(ids)
    short = saved(tmp_path / "short", classifier_for(policy, max_position_embeddings=8), policy)
    with pytest.raises(UserError, match="reads 8 tokens, a conversation has"):
        translation(make_recipe(short), ours)(sample())


def test_a_vocabulary_that_does_not_fit_is_one_clear_line(tmp_path: Path, policy: Any) -> None:
    small = saved(tmp_path / "small", make_classifier())
    with pytest.raises(UserError, match="a vocabulary of 64 and no tokenizer"):
        translation(make_recipe(small), policy)
    save_tokenizer(tmp_path / "words")
    words = AutoTokenizer.from_pretrained(tmp_path / "words")
    with pytest.raises(UserError, match="no chat template"):
        translation(make_recipe(saved(tmp_path / "words", make_classifier())), policy)
    words.chat_template = "{{ raise_exception('only user and assistant') if messages | length > 2 }}" + (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    path = saved(tmp_path / "plain", make_classifier(), words)
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
    assert translation(make_recipe(path), policy) is not None
    with pytest.raises(UserError, match=r"does not render conversations with tool calls: .*only user"):
        translation(make_recipe(path), policy, [tool])
    with pytest.raises(UserError, match=r"reads 256 tokens, but rollout.max_tokens is 512"):
        translation(make_recipe(saved(tmp_path / "fits", classifier_for(policy), policy), max_tokens=512), policy)


def as_ids(one: Sample) -> np.ndarray:
    if not len(one.ids):
        raise UserError("nothing to read")
    return np.asarray(one.ids, np.int32)


def test_groups_that_wait_are_scored_together_and_fail_alone() -> None:
    calls: list[int] = []
    go_on = threading.Event()

    def first_ids(batch: Batch) -> np.ndarray:
        calls.append(len(batch))
        assert go_on.wait(60)
        return batch.tokens["ids"][batch.offsets[:-1]].astype(np.float32)

    reward = ModelReward(as_ids, first_ids)

    async def all_of_them() -> list[Any]:
        waiting = [asyncio.create_task(reward.score([sample([i, 1]), sample([i + 10])])) for i in range(4)]
        waiting.append(asyncio.create_task(reward.score([sample()])))
        await eventually(lambda: calls)
        gone = asyncio.create_task(reward.score([sample([99])]))
        waiting.append(asyncio.create_task(reward.score([sample([50])])))
        await asyncio.sleep(0.001)
        gone.cancel()
        go_on.set()
        async with asyncio.timeout(60):
            return await asyncio.gather(*waiting, return_exceptions=True)

    found = asyncio.run(all_of_them())
    assert found[:4] == [[i, i + 10] for i in range(4)]
    assert isinstance(found[4], UserError)
    assert found[5] == [50]
    assert calls == [8, 2]
    assert asyncio.run(reward.score([sample([7])])) == [7]  # in another event loop


def test_a_broken_reward_model_is_raised_where_scores_are_waited_for() -> None:
    def broken(batch: Batch) -> np.ndarray:
        raise RuntimeError("out of memory")

    async def both() -> list[Any]:
        reward = ModelReward(as_ids, broken)
        two = (reward.score([sample([i])]) for i in (1, 2))
        return list(await asyncio.gather(*two, return_exceptions=True))

    assert [str(error) for error in asyncio.run(both())] == ["out of memory"] * 2


def test_it_fills_the_part_model_of_a_group() -> None:
    from learner_help import TWO_TURNS

    from agentrl.plugins.rewards import Rewards
    from agentrl.trajectory import Group

    reward = ModelReward(as_ids, lambda batch: batch.lengths.astype(np.float32))
    scorer = Scorer(Rewards({}, {"model": reward}, {"model": 0.5}))
    group = asyncio.run(scorer.score_group(Group(Task("t", {}), (TWO_TURNS,))))
    assert group.trajectories[0].rewards["model"] == len(TWO_TURNS.ids)
