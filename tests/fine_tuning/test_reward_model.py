"""Reward models: pairs of files and of rollouts, the loss of Bradley-Terry, a folder that `rewards.model` reads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_help import quiet, refused
from learner_help import make_groups
from train_help import write_lines
from transformers import AutoModelForSequenceClassification

from agentrl.chat.load import load_chat
from agentrl.checkpoint.checkpoints import save_model
from agentrl.compute.classifier import RewardModel, scoring_batch
from agentrl.errors import UserError
from agentrl.fine_tuning import reward_model
from agentrl.fine_tuning.pairs import Pair, PairReader, held_out
from agentrl.fine_tuning.reward_model import RewardTrainer, train_reward_model
from agentrl.models.load import load_scorer
from agentrl.plugins.reward import Sample
from agentrl.plugins.types import Task
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import RewardsSection
from agentrl.recipe.sections.eval import EvalSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.recipe.sections.sft import RewardModelSection
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.recipe.sections.train import TrainSection
from agentrl.rollout.journal import Journal
from agentrl.rollout.model_reward import translation
from agentrl.trajectory import Group

SHORT = RolloutSection(max_tokens=1024, max_turn_tokens=64)
ROW: dict[str, Any] = {"prompt": "What is 2 plus 3?", "chosen": "The answer is 5.", "rejected": "Tom has 5 apples."}


def make_recipe(source: Path | str, output: Path | None = None, tokens: int = 16384, **section: Any) -> Recipe:
    return Recipe(
        model=ModelSection(device="cpu"),
        reward_model=RewardModelSection(source=(str(source),), **section),
        eval=EvalSection(every=2),
        train=TrainSection(threads=1, micro_batch_tokens=tokens),
        output=str(output) if output else None,
    )


def many(count: int) -> list[Any]:
    """Pairs that differ by how the answer begins, in several forms."""
    rows: list[Any] = []
    for i in range(count):
        user, good, bad = f"What is {i} plus 3?", f"The answer is {i + 3}.", f"Tom has {i + 3} apples."
        asked = {"role": "user", "content": user}
        if i % 3 == 0:
            rows.append({"prompt": user, "chosen": good, "rejected": bad})
        else:
            said = [[{"role": "assistant", "content": text}] for text in (good, bad)]
            chosen, rejected = said if i % 3 == 1 else ([asked, *each] for each in said)
            rows.append({"messages": [asked], "chosen": chosen, "rejected": rejected})
    return rows


@pytest.fixture(scope="module")
def start() -> tuple[Any, Any]:
    """The embedded model with a new head, and its tokenizer."""
    return load_scorer(ModelSection(device="cpu"))


def made_pairs(tokenizer: Any, folder: Path, rows: list[Any]) -> list[Pair]:
    return PairReader(tokenizer, 1024).read(RewardModelSection(source=(str(write_lines(folder / "p.jsonl", rows)),)))


@pytest.mark.slow
def test_a_feature_is_learned_and_the_run_folder_says_so(tmp_path: Path) -> None:
    source, console = write_lines(tmp_path / "pairs.jsonl", many(96)), quiet()
    recipe = make_recipe(source, tmp_path / "run", batch=16, lr=1e-3, held_out=0.2)
    result = train_reward_model(recipe, console=console)
    assert result.metrics["eval/accuracy"] > 0.9
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 4, 5]
    assert rows[0]["eval/loss"] > rows[-1]["eval/loss"]
    assert all({"train/loss", "train/accuracy", "train/lr", "train/grad_norm"} <= row.keys() for row in rows[1:])
    assert Recipe.load(tmp_path / "run" / "recipe.yaml") == recipe
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "76 pairs to learn from, 20 held out" in said
    assert said.rstrip().endswith(str(tmp_path / "run" / "model"))
    model, _ = load_scorer(ModelSection(path=str(result.folder), device="cpu"))  # whose head is kept
    assert model.config.architectures == ["Qwen3ForSequenceClassification"]
    found = AutoModelForSequenceClassification.from_pretrained(result.folder)
    assert torch.equal(model.score.weight, found.score.weight)


def test_rewards_model_gives_the_scores_of_the_trainer(tmp_path: Path) -> None:
    recipe = make_recipe("none", tokens=300)
    model, tokenizer = load_scorer(recipe.model, 3)
    pairs = made_pairs(tokenizer, tmp_path, many(8))
    trainer = RewardTrainer(recipe, recipe.reward_model, model)  # type: ignore[arg-type]
    trainer.gradient(pairs)
    trainer.optimizer.step(1e-3)
    save_model(model, tokenizer, tmp_path / "model")
    used = recipe.model_copy(update={"rewards": RewardsSection(model=str(tmp_path / "model")), "rollout": SHORT})
    translate = translation(used, tokenizer)
    rows = [translate(Sample(Task("t", {}), (), ids=ids)) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    found = RewardModel(used).scores(scoring_batch(rows, [0] * len(rows)))
    with torch.no_grad():
        wanted = trainer.scores(pairs).flatten().numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert wanted.std() > 0.01


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("tokens", [10_000, 200, 1])
def test_loss_and_gradient_are_those_of_pairs_one_at_a_time(start: Any, tmp_path: Path, tokens: int) -> None:
    model, tokenizer = start
    pairs = made_pairs(tokenizer, tmp_path, many(5))
    pairs.append(Pair(pairs[0].chosen[:-4], pairs[0].chosen, ""))  # one is the beginning of the other
    recipe = make_recipe("none", tokens=tokens)
    trainer = RewardTrainer(recipe, recipe.reward_model, model)  # type: ignore[arg-type]
    found, gradients = trainer.gradient(pairs), taken(model)
    losses, right = [], 0
    for pair in pairs:
        chosen, rejected = (
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 0]
            for ids in (pair.chosen, pair.rejected)
        )
        losses.append(torch.log(1 + torch.exp(rejected - chosen)))
        right += int(chosen > rejected)
    loss = torch.stack(losses).mean()
    torch.autograd.backward(loss)
    assert found == {"loss": pytest.approx(float(loss.detach()), abs=1e-6), "accuracy": right / 6}
    assert trainer.evaluate(pairs) == pytest.approx(found, abs=1e-6)
    plain = taken(model)
    scale = float(plain.abs().max())
    assert scale > 1e-3
    torch.testing.assert_close(gradients, plain, atol=1e-5 * max(1.0, scale), rtol=1e-4)


def taken(model: Any) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def test_a_row_has_the_ids_of_a_rollout_that_says_the_same(start: Any, tmp_path: Path) -> None:
    _, tokenizer = start
    (pair,) = made_pairs(tokenizer, tmp_path, [ROW])
    opening = load_chat(tokenizer, model_path="", kind="bridge", tools=[]).render(
        [{"role": "user", "content": ROW["prompt"]}], []
    )
    for ids, text in ((pair.chosen, ROW["chosen"]), (pair.rejected, ROW["rejected"])):
        assert ids.tolist() == [*opening, *tokenizer.encode(f"{text}<|im_end|>")]
    asked = {"role": "user", "content": ROW["prompt"]}
    whole = [[asked, {"role": "assistant", "content": ROW[name]}] for name in ("chosen", "rejected")]
    for form in (
        {"prompt": [asked], "chosen": whole[0][1], "rejected": whole[1][1:]},
        {"prompt": ROW["prompt"], "chosen": whole[0], "rejected": whole[1], "messages": whole[0]},
        {"chosen": whole[0], "rejected": whole[1]},
    ):
        (same,) = made_pairs(tokenizer, tmp_path, [form])
        assert (same.chosen.tolist(), same.rejected.tolist()) == (pair.chosen.tolist(), pair.rejected.tolist())
        assert same.prompt == pair.prompt


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("not an object", "is not an object"),
        ({"chosen": "a", "rejected": "b"}, "chosen: begins with an assistant's message; give the `prompt`"),
        ({"prompt": "a", "rejected": "b"}, "has no 'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "rejected: is neither text nor a list of messages"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt: is neither text nor a list of messages"),
        ({**ROW, "chosen": [{"role": "bot", "content": ""}]}, "chosen, message 1 has the role 'bot': expected system"),
        ({**ROW, "chosen": [{"role": "user", "content": ""}]}, "chosen: does not end with an assistant's message"),
        ({**ROW, "chosen": [{"role": "assistant", "content": 3}]}, "its content is neither text nor a list"),
        ({**ROW, "chosen": CALL}, "chosen, message 1: the arguments of add are no JSON object"),
        ({**ROW, "chosen": {**CALL, "tool_calls": 3}}, "chosen, message 1: a tool call without the `name`"),
        ({**ROW, "chosen": [{"role": "assistant", "content": [3]}]}, "the chat template does not render it: "),
        ({**ROW, "tools": [3]}, "`tools` holds what is no schema of a function"),
        ({**ROW, "chosen": ROW["rejected"]}, "chosen and rejected are the same conversation"),
        ({**ROW, "chosen": "apples " * 2000}, "the model reads 1024"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_with_its_number(start: Any, tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        made_pairs(start[1], tmp_path, [ROW, row])
    assert f"{tmp_path / 'p.jsonl'}, line 2: " in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def run_folder(path: Path, rewards: list[list[float]]) -> list[Group]:
    """A run folder with a group of rollouts for each row of rewards, of the embedded model."""
    groups = [
        replace(group, trajectories=tuple(replace(t, task=Task(f"t{i}", {})) for t in group.trajectories))
        for i, group in enumerate(make_groups(rewards))
    ]
    path.mkdir()
    (path / "recipe.yaml").write_text(dump_recipe(Recipe()))
    journal = Journal(TrajectoriesSection(), lambda: path / "trajectories")
    (path / "trajectories").mkdir()
    journal.step(1, groups)
    return groups


def test_rollouts_of_a_task_are_pairs_by_their_rewards(start: Any, tmp_path: Path) -> None:
    groups = run_folder(tmp_path / "run", [[1, 0, 0.5], [0, 0, 0], [0, 1, 0, 1, 0]])
    reader = PairReader(start[1], 1024)
    pairs = reader.read(RewardModelSection(source=(str(tmp_path / "run"),), pairs_per_group=3))
    assert len(pairs) == 6
    first = [t.ids.tolist() for t in groups[0].trajectories]
    wanted = [(first[0], first[1]), (first[0], first[2]), (first[2], first[1])]
    assert sorted((p.chosen.tolist(), p.rejected.tolist()) for p in pairs[:3]) == sorted(wanted)
    rewards = {tuple(t.ids.tolist()): t.reward for t in groups[2].trajectories}
    assert {(rewards[tuple(p.chosen)], rewards[tuple(p.rejected)]) for p in pairs[3:]} == {(1.0, 0.0)}
    assert len({p.prompt for p in pairs}) == 2
    training, held = held_out(pairs, 0.1, 0)
    assert (len(training), len(held)) == (3, 3)
    assert {p.prompt for p in training} & {p.prompt for p in held} == set()
    with pytest.raises(
        UserError, match=r"samples \d and \d of task t0: a conversation has \d+ tokens, the model reads 5"
    ):
        PairReader(start[1], 5).read(RewardModelSection(source=(str(tmp_path / "run"),)))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "pairs.jsonl, line 2: is not JSON"),
        (["reward_model.source=absent.jsonl"], "absent.jsonl: cannot be read"),
        (["reward_model.source=equal"], "no two rollouts of a task have different rewards"),
        (["reward_model.source=good.jsonl"], "leaves nothing to learn from: the 1 pairs have 1 prompt;"),
        (["reward_model=null"], "the recipe has no `reward_model` section"),
        (["cluster.workers=2"], "cluster: a reward model is trained in one process"),
        (["model.lora={}"], "model.lora: a reward model is trained whole"),
        (["model.compile=true"], "model.compile: the layers of a reward model are not compiled"),
        (["model.path=./none"], "model.path: ./none is no folder"),
    ],
)
def test_the_command_refuses_in_one_line_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "equal", [[1, 1], [0, 0]])
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(ROW)}\nnot json\n")
    write_lines(tmp_path / "good.jsonl", [ROW])
    (tmp_path / "r.yaml").write_text("reward_model: {source: pairs.jsonl}\nmodel: {device: cpu}\n")
    assert said in refused(capsys, "reward-model", "r.yaml", *changes)
    assert not (tmp_path / "runs").exists()


def test_its_trainer_allocates_expandable_segments_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(reward_model, "expand_segments", asked.append)
    recipe = make_recipe(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"absent\.jsonl: cannot be read"):
        train_reward_model(recipe)
    assert asked == [recipe]
