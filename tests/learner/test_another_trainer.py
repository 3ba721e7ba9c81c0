"""docs/another_trainer.md: a role host of another make learns what ours does, and carries a whole run."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from learner_help import REWARDS, alone, make_groups, make_model, make_recipe, weights
from paths import ROOT
from toy_trainer import ToyActor
from train_help import metrics, small
from transformers import AutoModelForCausalLM

import agentrl
from agentrl.checkpoint.roles import load_roles, save_roles
from agentrl.errors import UserError
from agentrl.learner import roles
from agentrl.learner.learner import Learner
from agentrl.training.preflight import lacking
from agentrl.training.run import resume_run

PAGE = ROOT / "docs" / "another_trainer.md"


class Toy:
    """The roles of a toy actor on a given model."""

    reference = critic = reward_model = None
    teachers: ClassVar[dict[int, Any]] = {}
    pools: ClassVar[dict[str, str]] = {}

    def __init__(self, recipe: Any, model: Any) -> None:
        self.actor = ToyActor(recipe, model)


@pytest.mark.parametrize("train", [{}, {"mini_batches": 2, "epochs": 2}])
def test_it_learns_what_ours_learns(train: dict[str, int]) -> None:
    recipe, groups = make_recipe(**train), make_groups(REWARDS)
    ours = alone(make_model(), recipe)
    theirs = Learner(recipe, Toy(recipe, make_model()))
    begun = weights(ours.actor.model)
    for _ in range(3):
        wanted, found = ours.learn(groups), theirs.learn(groups)
        for key in ("train/grad_norm", "train/entropy", "mismatch/kl", "train/lr"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-3), key
    theirs.actor.optimizer.gather()
    moved = (weights(ours.actor.model) - begun).abs().max()
    assert moved > 1e-3
    assert (weights(theirs.actor.model) - weights(ours.actor.model)).abs().max() < 0.05 * moved


def test_its_state_is_saved_by_the_names_of_parameters(tmp_path: Path) -> None:
    recipe, groups = make_recipe(), make_groups(REWARDS)
    trained = Learner(recipe, Toy(recipe, make_model()))
    trained.learn(groups)
    trained.actor.optimizer.gather()
    save_roles({"actor": trained.actor}, tmp_path).result()
    again = Learner(recipe, Toy(recipe, make_model()))
    load_roles({"actor": again.actor}, tmp_path)
    again.steps = 1
    for learner in (trained, again):
        learner.learn(groups)
    for ours, theirs in zip(trained.actor.optimizer.shards, again.actor.optimizer.shards, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_it_carries_a_whole_run(tmp_path: Path) -> None:
    recipe = small(tmp_path / "run", cluster__trainer="toy_trainer:ToyRoles", train__steps=2, train__save_every=1)
    result = agentrl.train(recipe)
    rows = metrics(result.folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["mismatch/logprob_mean"] < 1e-3 for row in rows[1:])  # so the engine has its weights
    AutoModelForCausalLM.from_pretrained(result.checkpoint)
    resumed = resume_run(str(result.folder), overrides=["train.steps=3"])
    assert metrics(resumed.folder)[-1]["mismatch/logprob_mean"] < 1e-3


def unfinished(*about: object) -> object:
    return SimpleNamespace(actor=None, reference=None, critic=None, reward_model=None, teachers={}, pools={})


def failing(*about: object) -> object:
    raise OSError("no such node")


def leaving(*about: object) -> object:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("unfinished", "made SimpleNamespace, which lacks close, describe, device, in_process, load, measure, "),
        ("failing", "raised OSError: no such node"),
        ("leaving", "raised SystemExit: 3"),
        ("PAGE", "expected a class, or a function that makes a RoleHost"),
    ],
)
def test_a_trainer_that_cannot_be_made_is_one_line(made: str, said: str, tmp_path: Path) -> None:
    recipe = small(cluster__trainer=f"{__name__}:{made}")
    with pytest.raises(UserError) as raised:
        roles.make_trainer(recipe, recipe, tmp_path, print, print)
    assert str(raised.value).startswith(f"cluster.trainer '{__name__}:{made}' ")
    assert said in str(raised.value)


def test_one_that_is_not_installed_is_said_by_the_check() -> None:
    assert lacking(small(cluster__trainer="torchtitan")) == ["no trainer 'torchtitan' is installed"]


@pytest.mark.parametrize("key", ["offload", "shard", "restarts", "sequence_parallel"])
def test_keys_of_our_workers_are_refused_beside_it(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}: of our own workers, which trainer mine replaces"):
        small(cluster={"trainer": "mine", "workers": 4, key: ["optimizer"] if key == "offload" else 2})


@pytest.mark.parametrize("protocol", ["ActorRole", "ReferenceRole", "RoleHost"])
def test_the_page_names_every_method(protocol: str) -> None:
    named = set(re.findall(r"`(\w+)", PAGE.read_text(encoding="utf-8")))
    public = {name for name in vars(getattr(roles, protocol)) if not name.startswith("_")}
    assert public <= named
