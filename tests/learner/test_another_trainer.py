"""docs/another_trainer.md: a role host of another make learns what ours does, and carries a whole run."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from learner_help import REWARDS, alone, make_groups, make_model, make_recipe, save_tokenizer, weights
from paths import ROOT
from tiny_models import qwen3
from toy_trainer import ToyActor, ToyRoles, ToyWeights
from train_help import metrics, small
from transformers import AutoModelForCausalLM

import agentrl
from agentrl.checkpoint.roles import load_roles, save_roles
from agentrl.cli import main
from agentrl.cli.try_ import kind_of
from agentrl.errors import UserError
from agentrl.learner import roles
from agentrl.learner.learner import Learner
from agentrl.learner.roles import RoleHost
from agentrl.plugins import registry
from agentrl.plugins.registry import Plugin
from agentrl.testing import check_trainer
from agentrl.training.preflight import lacking
from agentrl.training.run import resume_run
from agentrl.weights.publisher import Publisher
from agentrl.weights.request import WeightRequest, WeightResult

PAGE = ROOT / "docs" / "another_trainer.md"


class Toy:
    """The roles of a toy actor on a given model."""

    reference = critic = reward_model = None
    teachers: ClassVar[dict[int, Any]] = {}
    pools: ClassVar[dict[str, str]] = {}

    def __init__(self, recipe: Any, model: Any) -> None:
        self.actor = ToyActor(recipe, model)


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def breach(**members: Any) -> Any:
    """The toy's roles, whose actor or host has other members: those of the actor begin with `actor_`."""

    def make(*about: Any) -> ToyRoles:
        host = ToyRoles(*about)
        for name, member in members.items():
            owner, name = (host.actor, name.removeprefix("actor_")) if name.startswith("actor_") else (host, name)
            setattr(owner, name, member.__get__(owner))
        return host

    return make


def reversed_order(actor: Any, batch: Any) -> Any:
    found = ToyActor.logprobs(actor, batch)
    sampled = batch.tokens["loss_mask"] == 1
    found[sampled] = found[sampled][::-1]
    return found


def fills_all(actor: Any, batch: Any) -> Any:
    return ToyActor.logprobs(actor, batch) - (batch.tokens["loss_mask"] == 0).astype("float32")


def reads_all(actor: Any, batch: Any, rate: float) -> Any:
    read = batch.tokens["weight"] != 0
    mask = (read | (batch.tokens["loss_mask"] == 1)).astype(np.uint8)
    mask[batch.offsets[:-1]] = 0  # nothing is before them
    return ToyActor.update(actor, batch.with_tokens(loss_mask=mask), rate)


def moves_nothing(actor: Any, batch: Any, rate: float) -> Any:
    return ToyActor.update(actor, batch, 0.0)


def counts_nothing(actor: Any, batch: Any, rate: float) -> Any:
    found = ToyActor.update(actor, batch, rate)
    actor.updates = 0
    return found


def scales(actor: Any, batch: Any, rate: float) -> Any:
    return ToyActor.update(actor, batch.with_tokens(weight=batch.tokens["weight"] * 2), rate)


def forgets(host: Any, folder: Path) -> None:
    load_roles({"actor": host.actor}, folder)
    for adam in host.actor.optimizer.adam:
        for state in adam.state.values():
            state["exp_avg"].zero_()


def stale(host: Any) -> Any:
    if not hasattr(host, "first"):
        host.first = [(name, tensor.clone()) for name, tensor in ToyWeights(host.actor)]
    return host.first


def renamed(host: Any) -> Any:
    return [(name.replace("model.layers", "decoder"), tensor) for name, tensor in ToyWeights(host.actor)]


def takes_all(host: Any, folder: Path) -> None:
    if (folder / "trainer").exists():
        load_roles({"actor": host.actor}, folder)


def raises(host: Any) -> Any:
    raise ValueError("first\nsecond")


def leaves(host: Any) -> Any:
    raise SystemExit(0)


class SendsZeros(Publisher):
    def publish(self, request: WeightRequest) -> WeightResult | None:
        with torch.no_grad():
            for p in self._model.parameters():
                p.zero_()
        return super().publish(request)


class SaysNothingFailed(Publisher):
    def publish(self, request: WeightRequest) -> WeightResult | None:
        super().publish(request)
        return WeightResult({})


class RaisesAtServer(Publisher):
    def publish(self, request: WeightRequest) -> WeightResult | None:
        found = super().publish(request)
        if found and found.failed:
            raise ConnectionError("a server is gone")
        return found


class NeverResumes(Publisher):
    def publish(self, request: WeightRequest) -> WeightResult | None:
        found = super().publish(request)
        for url in request.urls:
            urlopen(Request(f"{url}/pause_generation", b"{}", method="POST")).close()
        return found


class OnlySaysItSleeps(Publisher):
    def sleep(self, urls: Any, senders: Any = None) -> dict[str, str]:
        return {}


def with_publisher(kind: type[Publisher]) -> Any:
    def weights(host: Any) -> ToyWeights:
        host.actor.optimizer.gather()
        found = ToyWeights(host.actor)
        found.publisher = kind(host.actor.model)
        return found

    return breach(weights=weights)


BREACHES = {
    "reversed_order": (breach(actor_logprobs=reversed_order), "nats from log softmax"),
    "fills_all": (breach(actor_logprobs=fills_all), "is not 0 at 13 tokens that were not sampled"),
    "reads_all": (breach(actor_update=reads_all), "takes something from tokens whose loss_mask is 0"),
    "moves_nothing": (breach(actor_update=moves_nothing), "actor.logprobs are the same after an update"),
    "counts_nothing": (breach(actor_update=counts_nothing), "actor.updates went from 0 to 0"),
    "scales": (breach(actor_update=scales), "the gradient norm of update 3 is .*; ours is"),
    "forgets": (breach(load=forgets), "does not bring back all that an update depends on"),
    "stale": (breach(weights=stale), "weights.. after an update is .* they are not its weights"),
    "renamed": (breach(weights=renamed), "lacks [0-9]+ of the model's tensors: model.layers"),
    "takes_all": (breach(load=takes_all), "took a folder without a checkpoint"),
    "raises": (breach(weights=raises), "weights raised ValueError: first"),
    "leaves": (breach(weights=leaves), "weights raised SystemExit: 0"),
    "SendsZeros": (with_publisher(SendsZeros), "publish sent other weights than weights"),
    "SaysNothingFailed": (with_publisher(SaysNothingFailed), "publish says that no server failed; http.* did"),
    "RaisesAtServer": (with_publisher(RaisesAtServer), "publisher.publish raised ConnectionError: a server is gone"),
    "NeverResumes": (with_publisher(NeverResumes), "publish did not resume the server"),
    "OnlySaysItSleeps": (with_publisher(OnlySaysItSleeps), "sleep says that the server sleeps; it was not asked to"),
}


@pytest.mark.slow
def test_the_toy_keeps_the_contract(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["try", "toy_trainer:ToyRoles", "--model", model]) == 0
    assert "'toy_trainer:ToyRoles' keeps the contract" in capsys.readouterr().out


@pytest.mark.slow
def test_a_publisher_that_sends_sleeps_and_wakes_keeps_the_contract(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.made", with_publisher(Publisher), raising=False)
    check_trainer(f"{__name__}:made", model=model)


@pytest.mark.slow
def test_two_ranks_that_are_no_copies_keep_the_contract(tmp_path: Path) -> None:
    qwen3(vocab_size=64, tie_word_embeddings=False, initializer_range=0.2).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    check_trainer("pipeline_trainer:PipelineRoles", model=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["toy_trainer:ToyRoles", "worker=2"], "cluster.worker: unknown key; did you mean 'cluster.workers'?"),
        (["toy_trainer:ToyRoles", "workers"], "workers: expected KEY=VALUE"),
        (["toy_trainer:ToyRoles", "--args", "workers=2"], "a trainer takes keys of `cluster`, such as workers=2"),
        (["toy_trainer:ToyRoles", "--model", "/no/model"], "model.path: /no/model is no folder"),
        ([f"{__name__}:makes_nothing"], "which lacks actor, close, "),
    ],
)
def test_what_cannot_be_tried_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["try", *arguments]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_one_that_is_installed_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Plugin("trainers", "mine", "toy_trainer:ToyRoles", "mine", "1")
    monkeypatch.setattr(registry, "installed", lambda group: [mine] if group == "trainers" else [])
    assert kind_of("mine") == "trainer"
    with pytest.raises(UserError, match="trainer or recipe 'min' is installed; did you mean 'mine'"):
        kind_of("min")


def makes_nothing(*about: object) -> RoleHost:
    return cast("RoleHost", SimpleNamespace())


@pytest.mark.slow
@pytest.mark.parametrize("name", BREACHES)
def test_a_promise_that_is_not_kept_is_said_in_one_line(name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = BREACHES[name]
    monkeypatch.setattr(f"{__name__}.made", make, raising=False)
    with pytest.raises(AssertionError, match=said) as raised:
        check_trainer(f"{__name__}:made", model=model)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(("trainer ", "cluster.trainer "))


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
