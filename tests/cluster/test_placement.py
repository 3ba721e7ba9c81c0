"""Which part of a run gets which device: the table, on machines that are pretended, and Ray that follows it."""

from pathlib import Path
from typing import Any

import pytest
from cluster_help import STORE, Holder, Probe
from paths import ROOT
from processes import command, descendants, gone, until

from agentrl.cluster.errors import ClusterError, WorkerLost
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.placement import Launched, named, names_of, place
from agentrl.cluster.pool import Home, ResourcePool, own_address
from agentrl.cluster.session import Session
from agentrl.distributed.remote import _home, _session
from agentrl.engine.base import engine_class
from agentrl.recipe.schema import Recipe

ADDRESS = "cluster.address=10.0.0.1:6379"
CRITIC = "critic={}"
LAYOUTS: list[tuple[str, int, list[str], list[tuple[int | None, str, str]]]] = [
    # what, GPUs here, overrides, [(machine, part, devices)]
    ("no gpu", 0, ["engine.name=local"], [(0, "actor, engine local", "")]),
    ("no gpu, a server", 0, [], [(0, "actor", ""), (0, "server 0", "")]),
    ("no gpu, workers", 0, ["cluster.workers=2"], [(0, "actor", ""), (0, "server 0", "")]),
    ("one gpu, embedded engine", 1, ["engine.name=local"], [(0, "actor, engine local", "0")]),
    ("one gpu, shared", 1, ["engine.sleep=true"], [(0, "actor", "0"), (0, "server 0", "0")]),
    ("two gpus, one process", 2, [], [(0, "actor", "0"), (0, "server 0", "1")]),
    ("trainer on the last", 2, ["model.device=cuda:1"], [(0, "actor", "1"), (0, "server 0", "0")]),
    ("the trainer's own is shared", 4, ["model.device=cuda:2", "engine.sleep=true"],
     [(0, "actor", "2"), (0, "server 0", "2")]),
    ("neighbours beside the trainer", 4, ["model.device=cuda:1", "tp-size=2"],
     [(0, "actor", "1"), (0, "server 0 of 2 ranks", "2-3")]),
    ("trainer on a cpu", 1, ["model.device=cpu"], [(0, "actor", ""), (0, "server 0", "0")]),
    ("four and four", 8, ["cluster.gpus=4", "servers=4"],
     [(0, "actor", "0-3"), *((0, f"server {i}", str(4 + i)) for i in range(4))]),
    ("four and two of two", 8, ["cluster.gpus=4", "servers=2", "tp-size=2"],
     [(0, "actor", "0-3"), (0, "server 0 of 2 ranks", "4-5"), (0, "server 1 of 2 ranks", "6-7")]),
    ("pipeline parallel", 8, ["cluster.gpus=4", "tp_size=2", "pp_size=2"],
     [(0, "actor", "0-3"), (0, "server 0 of 4 ranks", "4-7")]),
    ("eight, shared by eight", 8, ["cluster.gpus=8", "servers=8", "engine.sleep=true"],
     [(0, "actor", "0-7"), *((0, f"server {i}", str(i)) for i in range(8))]),
    ("eight servers, four workers, shared", 8, ["cluster.gpus=4", "servers=8", "engine.sleep=true"],
     [(0, "actor", "0-3"), *((0, f"server {i}", str(i)) for i in range(8))]),
    ("the recipe says where servers begin", 8, ["cluster.gpus=4", "servers=2", "base-gpu-id=6"],
     [(0, "actor", "0-3"), (0, "server 0", "6"), (0, "server 1", "7")]),
    ("a pool", 8, ["cluster.gpus=4", CRITIC, "algorithm.kl_coef=0.1", "cluster.pools=[{roles: [critic], workers: 2}]"],
     [(0, "actor, reference", "0-3"), (0, "critic", "4-5"), (0, "server 0", "6")]),
    ("two machines", 8, [ADDRESS, "cluster.nodes=2", "cluster.gpus=4", "servers=4"],
     [(0, "actor", "0-3"), (1, "actor", "0-3"), *((0, f"server {i}", str(4 + i)) for i in range(4))]),
    ("two machines, shared", 8, [ADDRESS, "cluster.nodes=2", "cluster.gpus=8", "servers=8", "engine.sleep=true"],
     [(0, "actor", "0-7"), (1, "actor", "0-7"), *((0, f"server {i}", str(i)) for i in range(8))]),
    ("a machine beside the cluster", 2, [ADDRESS, "cluster.gpus=8", "servers=2"],
     [(None, "actor", ""), (0, "server 0", "0"), (0, "server 1", "1")]),
    ("a cluster's pool", 8, [ADDRESS, "cluster.gpus=4", CRITIC, "cluster.pools=[{roles: [critic]}]"],
     [(0, "actor", "0-3"), (None, "critic", ""), (0, "server 0", "4")]),
    ("servers on other machines", 4, [ADDRESS, "cluster.gpus=4", "servers=8", "remote_nodes=2", "tp-size=2"],
     [(0, "actor", "0-3"), (None, "8 servers on other machines, of 2 ranks", "")]),
    ("servers on other machines, none here", 0, [ADDRESS, "cluster.workers=2", "servers=2", "remote_nodes=1"],
     [(0, "actor", ""), (1, "2 servers on other machines", "")]),
    ("servers elsewhere", 8, ["cluster.gpus=8", "urls"], [(0, "actor", "0-7")]),
    ("workers, embedded engine", 4, ["cluster.gpus=3", "engine.name=local"],
     [(0, "actor", "0-2"), (0, "engine local", "3")]),
    ("the embedded engine's device is named", 4, ["cluster.gpus=3", "engine.name=local", "model.device=cuda:1"],
     [(0, "actor", "0, 2-3"), (0, "engine local", "1")]),
    ("workers share with the embedded engine", 2, ["cluster.gpus=2", "engine.name=local", "engine.sleep=true"],
     [(0, "actor", "0-1"), (0, "engine local", "0")]),
]  # fmt: skip


def recipe_of(overrides: list[str]) -> Recipe:
    flags, args, rest = [], [], ["engine.name=sglang"]
    for given in overrides:
        key = given.partition("=")[0]
        if "." in key or key in ("critic",):
            rest.append(given)
        elif key == "urls":
            args.append("urls: [http://a:1]")
        elif key in ("servers", "remote_nodes"):
            args.append(given.replace("=", ": "))
        else:
            flags.append(given.replace("=", ": "))
    if flags or args:
        rest.append(
            "engine.args={" + ", ".join([*args, *(["flags: {" + ", ".join(flags) + "}"] if flags else [])]) + "}"
        )
    return Recipe.load(str(ROOT / "recipes" / "gsm8k_tool.yaml"), rest)


def placed(recipe: Recipe, here: int) -> Any:
    return place(recipe, engine_class(recipe.engine.name).launched(recipe.engine.args), here)


@pytest.mark.parametrize(("here", "overrides", "rows"), [row[1:] for row in LAYOUTS], ids=[row[0] for row in LAYOUTS])
def test_each_part_gets_its_devices(here: int, overrides: list[str], rows: list[tuple[int | None, str, str]]) -> None:
    table = placed(recipe_of(overrides), here)
    found = [(row.node, row.part, named(row.devices).partition(" ")[2]) for row in table.rows]
    assert found == rows
    assert table.lacking(here) == []


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_have_a_place_on_eight_gpus(path: Path) -> None:
    recipe = Recipe.load(str(path))
    table = placed(recipe, 8)
    assert table.lacking(8) == []
    devices = [device for row in table.rows if row.kind == "server" for device in row.devices]
    assert len(devices) == len(set(devices))


@pytest.mark.parametrize(
    ("here", "overrides", "said"),
    [
        (1, [], "needs 2 GPUs on this machine (1 of the trainer, 1 of the engine, each has its own), 1 here"),
        (4, ["cluster.gpus=4", "servers=4"], "needs 8 GPUs on this machine (4 of the trainer, 4 of the engine, each"),
        (4, ["cluster.gpus=8", "engine.sleep=true"], "needs 8 GPUs .*8 of the trainer, 1 of the engine, which share"),
        (8, ["cluster.gpus=4", "base-gpu-id=2"], "GPU 2 would be both the trainer's and the engine's: give each its"),
        (1, ["cluster.gpus=1", "engine.name=local"], "needs 2 GPUs on this machine"),
        (1, [ADDRESS, "cluster.gpus=8", "servers=2"], "needs 2 GPUs on this machine (all of the engine), 1 here"),
        (0, [ADDRESS, "cluster.gpus=8"], "needs 1 GPUs on this machine (all of the engine), 0 here"),
        (0, ["model.device=cuda"], "needs 2 GPUs on this machine"),  # never a server on CPUs beside it
    ],
)
def test_what_does_not_fit_is_said(here: int, overrides: list[str], said: str) -> None:
    (line,) = placed(recipe_of(overrides), here).lacking(here)
    assert all(part in line for part in said.split(".*"))


def test_devices_are_known_by_the_names_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert names_of([0, 3]) == ["0", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-1f")
    assert names_of([0, 2]) == ["4", "GPU-1f"]
    assert named([0, 1, 2, 5]) == "GPUs 0-2, 5"


@pytest.mark.ray
def test_a_ray_of_our_own_gives_workers_the_tables_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    monkeypatch.setattr("agentrl.cluster.session.object_store_bytes", lambda: STORE)
    recipe = recipe_of(["cluster.gpus=2", "engine.name=local", "model.device=cuda:0"])
    table = placed(recipe, 4)
    assert (table.devices("trainer"), table.embedded) == ((1, 2), 0)
    with (
        _session(recipe.cluster, table),
        ResourcePool(2, gpu=True, home=_home(recipe.cluster, table)) as pool,
        WorkerGroup(pool, Probe, name="probe", logs=tmp_path) as group,
    ):
        assert {env["CUDA_VISIBLE_DEVICES"] for env in group.environment()} == {"5", "3"}
        assert {gpu for process in group.workers for gpu in process.gpus} == {"5", "3"}


@pytest.mark.ray
def test_on_a_cluster_the_engines_devices_are_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six GPUs that are pretended: two workers get the first, the next two are the engine's and nobody else's."""
    import ray

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    recipe = recipe_of([ADDRESS, "cluster.gpus=2", "servers=2"])
    table = placed(recipe, 6)
    with Session(cpus=6, gpus=6, object_store=STORE):
        home = _home(recipe.cluster, table)
        assert home == Home(own_address(), frozenset("01"), frozenset("23"))
        with ResourcePool(2, gpu=True, home=home) as pool:
            with WorkerGroup(pool, Probe, name="probe", logs=tmp_path) as group:
                assert sorted(env["CUDA_VISIBLE_DEVICES"] for env in group.environment()) == ["0", "1"]
            free = ray.available_resources()["GPU"]
            assert free == 2.0
            with pytest.raises(ClusterError, match=r"needed: one node with 3 CPUs and 3 GPUs; free: .* 2 GPUs"):
                ResourcePool(3, gpu=True, patience=0.2)
        half = ray.remote(num_gpus=0.5)(Holder).remote()
        ray.get(half.ready.remote())
        with pytest.raises(ClusterError, match=r"^5\.5 GPUs of .* are shared by fraction, and the run's engine takes"):
            ResourcePool(2, gpu=True, home=home)
        ray.kill(half)
        until(lambda: ray.available_resources()["GPU"] == 6.0)
        other = ray.remote(num_gpus=1)(Holder).remote()  # somebody's, on the first
        ray.get(other.ready.remote())
        with (
            ResourcePool(2, gpu=True, home=home, patience=60.0) as pool,
            pytest.raises(
                ClusterError, match=r"Ray gave the workers the GPUs 1, 2 of .*, where the run's table says 0, 1, "
            ),
        ):
            WorkerGroup(pool, Probe, name="probe", logs=tmp_path)
        with pytest.raises(
            ClusterError, match=r"the first of them 10\.9\.9\.9 with 2 GPUs more for the engine; there: "
        ):
            ResourcePool(2, gpu=True, home=Home("10.9.9.9", home.workers, home.engine))


def test_an_engine_that_launches_nothing_needs_nothing() -> None:
    assert engine_class("local").launched({}) == Launched()


@pytest.mark.ray
def test_ray_that_ends_in_mid_run(tmp_path: Path) -> None:
    with Session(cpus=1, object_store=STORE) as session, ResourcePool(1) as pool:
        group = WorkerGroup(pool, Probe, name="probe", logs=tmp_path)
        call = group.slow(600)
        ours = [process for process in descendants() if str(session.folder) in command(process)]
        next(process for process in ours if "raylet_socket_name" in command(process)).kill()
        with pytest.raises(WorkerLost, match=r"worker 0 .* died in 'slow': Ray (itself has ended|has lost touch)"):
            call.result()
        until(lambda: not session.alive)
    assert not session.folder.exists()
    assert gone([process.pid for process in ours])
