"""Two workers learn what one process learns: the same losses and weights over six steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster_train_help import UNEVEN, on_cluster, save_tiny, two_workers
from learner_help import make_groups
from lora_help import merged_state
from safetensors import safe_open
from train_help import steady
from vision_help import groups, save_seeing

from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.cluster.errors import ClusterError
from agentrl.cluster.group import WorkerGroup
from agentrl.compute.batch import Batch
from agentrl.distributed.remote import RayRoles, RemoteWeights
from agentrl.errors import UserError
from agentrl.images import FOLDER, STORE
from agentrl.learner.learner import Learner
from agentrl.learner.metrics import policy_metrics
from agentrl.learner.roles import LocalRoles, RoleHost
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe

pytestmark = pytest.mark.ray
STEPS = 6
Rows = list[dict[str, float]]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def workers(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    with two_workers(ray_address, tmp_path_factory.mktemp("logs")) as group:
        yield group


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def job(path: Path, **sections: Any) -> Recipe:
    """micro_batch_tokens: so few that a rank makes several passes, and not every rank as many."""
    train = {"lr": 1e-3, "steps": STEPS, "micro_batch_tokens": 150, "threads": 1, **sections.pop("train", {})}
    model = {"path": str(path), "device": "cpu", **sections.pop("model", {})}
    cluster = {"workers": 2, **sections.pop("cluster", {})}
    return Recipe.model_validate({"model": model, "train": train, "cluster": cluster, **sections})


def learn(recipe: Recipe, role_host: RoleHost, steps: range = range(STEPS)) -> Rows:
    learner = Learner(recipe, role_host)
    learner.steps = steps.start
    return [{**learner.learn(make_groups(UNEVEN, seed)), **of_tokens(learner)} for seed in steps]


def of_tokens(learner: Learner) -> dict[str, float]:
    """What an update made of each token, each weighed by its place."""
    assert any(made.logprobs is not None for made in learner.learned)
    columns = {
        "logprobs": [np.zeros(1) if made.logprobs is None else made.logprobs for made in learner.learned],
        "advantages": [made.advantages for made in learner.learned],
    }
    joined = {name: np.concatenate(each) for name, each in columns.items()}
    return {
        f"tokens/{name}": float(np.cos(np.arange(len(column))) @ column) / len(column)
        for name, column in joined.items()
    }


def here(recipe: Recipe) -> tuple[Rows, Weights]:
    """In a process that has drawn other random numbers before."""
    torch.manual_seed(99)
    model = load_model(recipe.model, recipe.train.seed)[0]
    rows = learn(recipe, LocalRoles(recipe, model))
    return rows, {name: tensor.detach().clone() for name, tensor in merged_state(model).items()}


def there(recipe: Recipe, workers: WorkerGroup | None, logs: Path) -> tuple[Rows, Weights]:
    with on_cluster(recipe, logs, workers) as role_host:
        rows = learn(recipe, role_host)
        return rows, weights_of(role_host)


def weights_of(role_host: RayRoles) -> Weights:
    """Whole, as the engine `local` is given them."""
    found = role_host.weights()
    assert isinstance(found, RemoteWeights)
    return {name: tensor.clone() for name, tensor in found}


def same_rows(ours: Rows, theirs: Rows, tolerance: float) -> None:
    """But for what tells how the work was split, and how long it took."""
    for step, (mine, other) in enumerate(zip(map(steady, ours), map(steady, theirs), strict=True)):
        assert mine.keys() == other.keys()
        for name in mine.keys() - {"train/tokens"}:
            assert mine[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), (step, name)


def same_weights(ours: Weights, theirs: Weights, tolerance: float) -> None:
    assert set(theirs) <= set(ours)
    for name, tensor in theirs.items():
        assert float((tensor - ours[name]).abs().max()) <= tolerance, name


LORA = {"model": {"lora": {"rank": 4, "alpha": 8}}, "train": {"lr": 1e-2}}
CRITIC = {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3}}
MANY = {"train": {"mini_batches": 3, "epochs": 2, "schedule": "cosine", "warmup": 3, "weight_decay": 0.1}}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "mini-batches and epochs": MANY,
    "reference": {"algorithm": {"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100, "entropy_coef": 0.01}},
    "a reference that is a moving average": {
        "algorithm": {"kl_coef": 0.5, "reference": {"every": 2, "ema": 0.3}},
        "cluster": {"offload": True},
    },
    "lora": LORA,
    "lora, reference in the reward": {
        **LORA,
        "algorithm": {
            "advantage": {"name": "reinforce_plus_plus", "args": {"gamma": 0.99}},
            "kl_coef": 0.1,
            "kl_in": "reward",
        },
    },
    "chosen over the whole update": {
        "algorithm": {"loss": {"name": "clip_cov", "args": {"share": 0.2, "low": 0.01}}, "top_entropy": 0.4},
        "train": {"mini_batches": 2},
    },
    "hsdp": {"cluster": {"shard": 1}},
    "offload": {"cluster": {"offload": True}},
    "checkpointing": {"model": {"checkpointing": True}},
    "critic": {**CRITIC, "train": {"mini_batches": 2}},
    "sequence parallel": {"cluster": {"sequence_parallel": 2}},
    "sequence parallel, critic": {**CRITIC, "cluster": {"sequence_parallel": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_two_workers_learn_what_one_process_learns(case: str, workers: WorkerGroup, tiny: Path, tmp_path: Path) -> None:
    recipe = job(tiny, **CASES[case])
    ours, our_weights = here(recipe)
    theirs, their_weights = there(recipe, workers, tmp_path)
    same_rows(ours, theirs, 1e-4)
    same_weights(our_weights, their_weights, 1e-4)


@pytest.mark.parametrize("model", [{"dtype": "bfloat16"}, {"compute": "bfloat16"}], ids=["weights", "compute"])
def test_in_bfloat16_they_stay_within_bounds(
    model: dict[str, Any], workers: WorkerGroup, tiny: Path, tmp_path: Path
) -> None:
    """Metrics within 0.05 (of 5 decimal digits, bfloat16 keeps 2 to 3); of the weights, which six updates of 1e-3 move
    by 6e-3 at most, or by one step of bfloat16, 2 ** -7 from 1 on, the mean within 2e-4. The reference is an average of
    float32."""
    recipe = job(tiny, model=model, algorithm={"kl_coef": 0.1, "reference": {"ema": 0.9}})
    ours, our_weights = here(recipe)
    theirs, their_weights = there(recipe, workers, tmp_path)
    same_rows(ours, theirs, 0.05)
    for name, weights in their_weights.items():
        largest = torch.where(weights.abs().maximum(our_weights[name].abs()) >= 1, 2**-7, 6e-3)
        assert bool(((weights - our_weights[name]).abs() <= largest).all()), name
    apart = torch.cat([(our_weights[name].float() - w.float()).abs().flatten() for name, w in their_weights.items()])
    assert float(apart.mean()) < 2e-4


def test_a_critic_and_a_reference_in_a_pool_of_their_own(workers: WorkerGroup, tiny: Path, tmp_path: Path) -> None:
    """One worker beside the actor's one: processes that this test starts itself."""
    pools = ({"roles": ["critic", "reference"], "workers": 1},)
    recipe = job(
        tiny,
        algorithm={"advantage": "gae", "kl_coef": 0.1, "kl_in": "reward"},
        critic={"lr": 1e-3},
        cluster={"workers": 1, "pools": pools},
    )
    ours, our_weights = here(recipe)
    with on_cluster(recipe, tmp_path) as role_host:
        theirs, their_weights = learn(recipe, role_host), weights_of(role_host)
        devices = {role: work.devices for role, work in role_host.role_costs.items()}
    assert devices == {"actor": "trainer", "critic": "critic_reference", "reference": "critic_reference"}
    assert sorted(log.name for log in tmp_path.iterdir()) == ["critic_reference_0.log", "trainer_0.log"]
    same_rows(ours, theirs, 1e-4)
    same_weights(our_weights, their_weights, 1e-4)


@pytest.mark.parametrize("first", [pytest.param("two workers", marks=pytest.mark.long), "one process"])
def test_a_run_goes_on_elsewhere_as_if_it_had_stayed(
    first: str, workers: WorkerGroup, tiny: Path, tmp_path: Path
) -> None:
    """Four of its steps on two workers and two in one process, either way round: weights, moments, the critic's too,
    and a reference that has moved, and moves again."""
    algorithm = {"advantage": "gae", "kl_coef": 0.5, "reference": {"every": 3}}
    recipe = job(tiny, algorithm=algorithm, critic={"lr": 1e-3}, train={"schedule": "cosine"})
    rows, weights = here(recipe)
    checkpoints = Checkpoints(tmp_path, 1)
    if first == "two workers":
        with on_cluster(recipe, tmp_path, workers) as role_host:
            learn(recipe, role_host, range(4))
            saved = checkpoints.save(4, role_host.save, {})
        begins = recipe.model.model_copy(update={"path": str(saved.path)})
        second = LocalRoles(recipe, load_model(begins)[0])
        second.load(saved.path)
        same_rows(rows[4:], learn(recipe, second, range(4, STEPS)), 1e-4)
        same_weights(weights, second.model.state_dict(), 1e-4)
        return
    half = LocalRoles(recipe, load_model(recipe.model)[0])
    learn(recipe, half, range(4))
    saved = checkpoints.save(4, half.save, {})
    with on_cluster(recipe, tmp_path, workers) as role_host:
        role_host.load(saved.path)
        same_rows(rows[4:], learn(recipe, role_host, range(4, STEPS)), 1e-4)
        same_weights(weights, weights_of(role_host), 1e-4)


@pytest.mark.parametrize("form", ["full", "top_k"])
def test_teachers_teach_alike(form: str, workers: WorkerGroup, tiny: Path, tmp_path: Path) -> None:
    """A sharded one beside a whole one; the policy starts from another seed's adapter, so that they differ."""
    lora = {"model": {"lora": {"rank": 4, "alpha": 8}}, "train": {"lr": 1e-2}}
    recipe = job(
        tiny, algorithm={"streams": {"imitate": 1, "distill": 1}}, teacher={"path": str(tiny), "form": form}, **lora
    )
    local = LocalRoles(recipe, load_model(recipe.model, recipe.train.seed)[0])
    ours = learn(recipe, local, range(2))
    assert ours[1]["distill/kl"] > 0
    with on_cluster(recipe, tmp_path, workers) as role_host:
        same_rows(ours, learn(recipe, role_host, range(2)), 1e-4)


def test_a_model_that_sees_learns_alike_and_goes_on_in_one_process(workers: WorkerGroup, tmp_path: Path) -> None:
    """Workers find the pictures in the run's folder, and name their weights as the model's files do."""
    recipe = job(save_seeing(tmp_path / "seeing"), train={"micro_batch_tokens": 60}, algorithm={"kl_coef": 0.1})
    model = load_model(recipe.model)[0]
    steps = [groups(model, seed) for seed in range(3)]
    ours = Learner(recipe, LocalRoles(recipe, model))
    rows = [ours.learn(step) for step in steps]
    STORE.copy(
        (span.hash for step in steps for g in step for t in g.trajectories for span in t.images), tmp_path / FOLDER
    )
    with on_cluster(recipe, tmp_path / "logs", workers) as role_host:
        there = Learner(recipe, role_host)
        same_rows(rows[:2], [there.learn(step) for step in steps[:2]], 1e-4)
        names = [name for name, _ in role_host.weights()]
        saved = Checkpoints(tmp_path, 1).save(2, role_host.save, {})
    with safe_open(tmp_path / "seeing" / "model.safetensors", "pt") as files:
        assert sorted(names) == sorted(files.keys())
    again = LocalRoles(recipe, load_model(recipe.model.model_copy(update={"path": str(saved.path)}))[0])
    again.load(saved.path)
    learner = Learner(recipe, again)
    learner.steps = 2
    same_rows(rows[2:], [learner.learn(steps[2])], 1e-4)
    same_weights(model.state_dict(), again.model.state_dict(), 1e-4)


def test_streams_of_tokens_are_learned_alike(workers: WorkerGroup, tiny: Path, tmp_path: Path) -> None:
    """One update that imitates and distils, and reads neither advantages nor a weight of the policy's."""
    recipe, batch = job(tiny), Batch.from_groups(make_groups(UNEVEN))
    mask = batch.tokens["loss_mask"].astype(np.float32)
    wave = np.cos(np.arange(len(mask), dtype=np.float32)) * mask
    batch = batch.with_tokens(
        imitate=mask / mask.sum(), distill=wave**2 / (wave**2).sum(), teacher_logprobs=wave - 1.5 * mask
    )
    local = LocalRoles(recipe, load_model(recipe.model, recipe.train.seed)[0])
    ours = policy_metrics(local.actor.update(batch, 1e-2))
    with on_cluster(recipe, tmp_path, workers) as role_host:
        theirs = policy_metrics(role_host.actor.update(batch, 1e-2))
        same_rows([ours], [theirs], 1e-4)
        same_weights(local.model.state_dict(), weights_of(role_host), 1e-4)


def test_what_a_worker_raises_is_one_line(workers: WorkerGroup, tiny: Path, tmp_path: Path) -> None:
    """Comes last: what only one worker raises costs the group."""
    fates = workers.logs[0].parent
    for fate in ("user_0", "user_1"):
        (fates / fate).touch()
    recipe = job(tiny, algorithm={"loss": "cluster_plugins:fateful"})
    with on_cluster(recipe, tmp_path, workers) as role_host:
        learner = Learner(recipe, role_host)
        with pytest.raises(
            UserError, match=r"^algorithm.loss 'cluster_plugins:fateful': the loss wants another recipe$"
        ):
            learner.learn(make_groups(UNEVEN))
        (fates / "memory_1").touch()
        with pytest.raises(ClusterError) as memory:
            learner.learn(make_groups(UNEVEN))
    line = str(memory.value)
    assert "\n" not in line
    assert line.startswith("worker 1 of 'trainer' (pid ")
    assert (
        "ran out of memory in 'update' (MemoryError: Unable to allocate 7.00 GiB); lower train.micro_batch_tok" in line
    )
