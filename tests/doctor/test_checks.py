"""Each check fails where its fault is planted, and names what to change; `test_examine.py` has them all pass."""

import copy
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl_tools.calculator import Calculator
from PIL.Image import Transpose
from train_help import small
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.checkpoint.roles import save_roles
from agentrl.compute import tree_attention
from agentrl.compute.flops import longest_update
from agentrl.compute.forward import BlockForward
from agentrl.doctor import computing, machine, running, sampling
from agentrl.doctor.check import Check, CheckError, Finding, NotHereError, Status, perform
from agentrl.doctor.checks import CHECKS
from agentrl.doctor.subject import Subject, first_layers
from agentrl.doctor.trainer import HereTrainer
from agentrl.engine.local.engine import LocalEngine
from agentrl.errors import UserError
from agentrl.images import STORE
from agentrl.learner.actor import Actor
from agentrl.learner.roles import LocalRoles
from agentrl.models.load import load_model, load_tokenizer
from agentrl.models.vision import Vision
from agentrl.recipe.schema import Recipe

BY_NAME = {check.name: check for check in CHECKS}
Patch = pytest.MonkeyPatch


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: Patch) -> Iterator[Subject]:
    monkeypatch.setattr(machine, "TIMED_SECONDS", 0.01)
    made = Subject(small(), tmp_path)
    yield made
    made.close()


def finding(name: str, subject: Subject) -> Finding:
    return perform(BY_NAME[name], subject)


def test_every_check_has_its_remedy_and_rests_on_what_comes_before() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for place, check in enumerate(CHECKS):
        assert check.remedy
        assert set(check.needs) <= set(names[:place])


def no_gpu_build(subject: Subject, patch: Patch, folder: Path) -> None:
    on_path(patch, folder, "nvidia-smi", "echo 580.65.06")


def too_few_gpus(subject: Subject, patch: Patch, folder: Path) -> None:
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    subject.recipe = small(cluster__gpus=8)


def old_package(subject: Subject, patch: Patch, folder: Path) -> None:
    patch.setattr(machine.metadata, "requires", lambda name: ["torch>=99", "numpy>=2; extra == 'x'"])


def old_driver(subject: Subject, patch: Patch, folder: Path) -> None:
    on_path(patch, folder, "nvidia-smi", "echo 525.60.13")
    patch.setattr(torch.version, "cuda", "13.0")


def other_nccl(subject: Subject, patch: Patch, folder: Path) -> None:
    program(folder / "bin" / "python", """echo '{"nvidia-nccl-cu13": "2.30.7", "sglang": "0.5.23"}'""")
    args = {"venv": str(folder), "weights": "from_distributed"}
    subject.recipe = small(engine__name="sglang", engine__args=args)


def no_compilers(subject: Subject, patch: Patch, folder: Path) -> None:
    program(folder / "bin" / "python", """echo '{"sglang": "0.5.23"}'""")
    program(folder / "cuda" / "bin" / "nvcc", "")
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setenv("PATH", str(folder / "none"))
    patch.setenv("CUDA_HOME", str(folder / "cuda"))
    subject.recipe = small(engine__name="sglang", engine__args={"venv": str(folder)})


def old_compiler(subject: Subject, patch: Patch, folder: Path) -> None:
    """The first one that a server finds, that of CUDA_HOME."""
    program(folder / "bin" / "python", """echo '{"sglang": "0.5.23", "nvidia-cuda-runtime": "13.0.96"}'""")
    program(folder / "bin" / "ninja", "")
    program(folder / "bin" / "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    program(folder / "cuda" / "bin" / "nvcc", "echo Cuda compilation tools, release 12.8, V12.8.93")
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setenv("CUDA_HOME", str(folder / "cuda"))
    subject.recipe = small(engine__name="sglang", engine__args={"venv": str(folder)})


def broken_venv(subject: Subject, patch: Patch, folder: Path) -> None:
    program(folder / "bin" / "python", "exit 127")
    subject.recipe = small(engine__name="sglang", engine__args={"venv": str(folder)})


def wrong_product(subject: Subject, patch: Patch, folder: Path) -> None:
    patch.setattr(machine, "linear", lambda a, b: 1.01 * (a @ b.t()))


def wrong_packing(subject: Subject, patch: Patch, folder: Path) -> None:
    right = BlockForward.__call__
    patch.setattr(BlockForward, "__call__", lambda self, packed, t: [x + 0.1 for x in right(self, packed, t)])


def wrong_attention(subject: Subject, patch: Patch, folder: Path) -> None:
    right = tree_attention._long
    patch.setattr(tree_attention, "_long", lambda q, k, v, plan, scale: right(q, k, v, plan, 1.1 * scale))


def wrong_half(subject: Subject, patch: Patch, folder: Path) -> None:
    right = computing._logprobs

    def half(way: Any, probe: Any) -> torch.Tensor:
        found = right(way, probe)
        dtype = next(way.model.parameters()).dtype
        return found * torch.nan if dtype == torch.bfloat16 else found

    patch.setattr(computing, "_logprobs", half)


def idle_adapter(subject: Subject, patch: Patch, folder: Path) -> None:
    patch.setattr(computing, "adapter_parameters", lambda model: [])


def deaf_to_adapters(subject: Subject, patch: Patch, folder: Path) -> None:
    patch.setattr("agentrl.models.block.weight_of", lambda layer: layer.weight)


def no_start(subject: Subject, patch: Patch, folder: Path) -> None:
    subject.recipe = small(engine__args={"cache_bytes": 10})


def too_few_logprobs(subject: Subject, patch: Patch, folder: Path) -> None:
    wrong_turns(patch, lambda turn: turn.logprobs.pop())


def wrong_logprobs(subject: Subject, patch: Patch, folder: Path) -> None:
    wrong_turns(patch, lambda turn: turn.logprobs.__setitem__(slice(None), [p - 0.1 for p in turn.logprobs]))


def wrong_tokens(subject: Subject, patch: Patch, folder: Path) -> None:
    """Not the likeliest ones, with the log-probs that the trainer gives them."""
    right = LocalEngine.generate

    async def sampled(self: Any, ids: Any, sampling: Any, name: str) -> Any:
        return await right(self, ids, replace(sampling, temperature=1.0, seed=0), name)

    patch.setattr(LocalEngine, "generate", sampled)


def no_update(subject: Subject, patch: Patch, folder: Path) -> None:
    async def nothing(self: Any, version: int, weights: Any = None) -> None: ...

    patch.setattr(LocalEngine, "update_weights", nothing)


def unnoticed(subject: Subject, patch: Patch, folder: Path) -> None:
    @contextmanager
    def unchanged(self: Any, prompt: Any, ids: Any) -> Iterator[None]:
        yield

    patch.setattr(HereTrainer, "changed", unchanged)


def sleepless(subject: Subject, patch: Patch, folder: Path) -> None:
    async def nothing(self: Any) -> None: ...

    patch.setattr(LocalEngine, "sleep", nothing)


def wakes_wrong(subject: Subject, patch: Patch, folder: Path) -> None:
    right = LocalEngine.wake

    async def wake(self: Any) -> None:
        with torch.no_grad():
            self._model.lm_head.weight.mul_(0.5)
        self.runner.refresh()
        subject.player.model = intact
        await right(self)

    intact = copy.deepcopy(subject.model)
    patch.setattr(LocalEngine, "wake", wake)


Fault = Callable[[Subject, Patch, Path], None]
FAULTS: list[tuple[str, Fault, str, str]] = [
    ("devices", no_gpu_build, r"has an NVIDIA driver \(580.65.06\), and torch \S+ sees no GPU", "package torch"),
    ("devices", too_few_gpus, "the recipe needs 9 GPUs on this machine .*, 2 here", "cluster.gpus"),
    ("versions", old_package, "torch is 2.*; >=99 is needed", "package torch"),
    ("versions", old_driver, "needs driver 580; the driver is 525.60.13", "NVIDIA driver"),
    ("versions", other_nccl, "NCCL is None here and 2.30.7 in the server's", "engine.args.weights"),
    ("versions", no_compilers, "compiles kernels as it runs, and finds no ninja$", "pip install ninja"),
    (
        "versions",
        old_compiler,
        r"finds no nvcc of CUDA 13 or newer \(\S+/cuda/bin/nvcc is of 12\)$",
        "name its folder in CUDA_HOME",
    ),
    ("versions", broken_venv, "its Python does not run", "engine.args.venv"),
    ("arithmetic", wrong_product, "a float32 matrix product is wrong", "model.dtype"),
    ("packing", wrong_packing, "packed rows do not give the log-probs", "model.path"),
    ("attention", wrong_attention, "long buckets: it differs by", "package torch"),
    ("bfloat16", wrong_half, "log-probs in bfloat16 are off by nan", "model.dtype"),
    ("lora", idle_adapter, "the adapter changes nothing", "model.lora.targets"),
    ("engine", no_start, "raise engine.args.cache_bytes", "engine.args"),
    ("engine", too_few_logprobs, "returned 32 tokens with 31 log-probs", "engine.args"),
    ("parity", wrong_logprobs, "engine and trainer differ: 0.1 nats in the mean", "model.dtype"),
    ("parity", wrong_tokens, "less likely than the likeliest", "model.dtype"),
    ("weights", no_update, "after an update engine and trainer differ", "engine.args.weights"),
    ("weights", unnoticed, "wrong weights were not noticed", "engine.args.weights"),
    ("sleep", sleepless, "the engine gave back 0.0 MB", "engine.sleep"),
    ("sleep", wakes_wrong, "once awake engine and trainer differ", "engine.sleep"),
    ("transports", no_update, "after an update engine and trainer differ", "engine.args.weights"),
]


LONG = ("lora", "engine", "weights", "sleep", "transports")
"""Checks that start an engine more than once, or wait for one."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plant", "line", "remedy"),
    [
        pytest.param(*fault, id=f"{fault[0]}-{fault[1].__name__}", marks=[pytest.mark.slow] * (fault[0] in LONG))
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_found(
    name: str, plant: Fault, line: str, remedy: str, subject: Subject, monkeypatch: Patch, tmp_path: Path
) -> None:
    plant(subject, monkeypatch, tmp_path)
    found = finding(name, subject)
    assert found.status is Status.FAILED, found
    assert remedy in found.remedy
    with pytest.raises(AssertionError, match=line):
        raise AssertionError(found.figure)


def test_what_auto_stands_for_on_a_gpu_is_what_is_examined(tmp_path: Path, monkeypatch: Patch) -> None:
    """Servers are launched in the type that the run's would be."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Subject(small(), tmp_path).recipe.model.compute == "bfloat16"
    assert Subject(small(cluster__gpus=8), tmp_path).half


@pytest.mark.slow
def test_a_server_that_rounds_is_no_fault_where_the_trainer_keeps_float32(subject: Subject, monkeypatch: Patch) -> None:
    wrong_turns(monkeypatch, lambda turn: turn.logprobs.__setitem__(slice(None), [p - 0.02 for p in turn.logprobs]))
    assert finding("parity", subject).status is Status.FAILED
    subject.recipe = small(model__compute="bfloat16")
    assert finding("parity", subject).status is Status.OK


@pytest.mark.slow
def test_the_check_of_an_adapter_leaves_the_recipes_own(subject: Subject) -> None:
    subject.recipe = recipe = small(model__lora={"rank": 2})
    assert finding("lora", subject).status is Status.OK
    assert subject.recipe is recipe


@pytest.mark.slow
def test_servers_are_tried_on_devices_of_their_own(subject: Subject, monkeypatch: Patch) -> None:
    """As in a run; and here, wherever the run's are to be."""
    args = {"servers": 2, "remote_nodes": 2, "venv": "/none"}
    given: list[Any] = []

    def made(section: Any, *_: Any, **options: Any) -> Any:
        given.append((section.args, options["devices"]))
        raise UserError("no more is needed")

    monkeypatch.setattr("agentrl.rollout.player.make_engine", made)
    for count in (2, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(UserError, match="no more is needed"):
            subject.build(small(engine__name="sglang", engine__args=args, model__device="cpu"))
        with pytest.raises(UserError, match="no more is needed"):
            subject.build(small(engine__name="sglang", engine__args=args))
    one = {"servers": 1, "venv": "/none"}
    assert given == [(one, ((0,),)), (one, ((1,),)), (one, ((0,),)), (one, ())]  # the last one has to share


def test_a_server_over_machines_is_tried_over_as_many(subject: Subject) -> None:
    servers = {"servers": 4, "remote_nodes": 4, "flags": {"tp_size": 16, "nnodes": 2}}
    subject.recipe = small(engine__name="sglang", engine__args=servers, cluster__gpus=8, cluster__address="head:1")
    tried = subject._alone(subject.recipe).engine.args
    assert (tried["servers"], tried["remote_nodes"]) == (1, 2)


@pytest.fixture
def seeing(subject: Subject) -> Subject:
    """Of a model that sees."""
    subject.recipe = Recipe.model_validate({"model": {"path": "tiny_vision"}, "env": {"name": "vision_game"}})
    return subject


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engine", "parity", "weights", "transports"])
def test_a_model_that_sees_is_shown_a_picture(name: str, seeing: Subject) -> None:
    found = finding(name, seeing)
    assert found.status is Status.OK, found
    assert min(sampling.prompt_of(seeing)) < 0
    if name == "parity":
        assert re.search(r"about a picture, which upside down would change them by 0\.\d", found.figure)


@pytest.mark.slow
def test_the_features_of_another_picture_are_noticed(seeing: Subject, monkeypatch: Patch) -> None:
    right = Vision._encode

    def turned(self: Any, keys: Any) -> Any:
        images = [STORE.load(STORE.of_key(key)).transpose(Transpose.FLIP_TOP_BOTTOM) for key in keys]
        return right(self, [STORE.put(image) for image in images] if self._keep else keys)  # the engine alone keeps

    monkeypatch.setattr(Vision, "_encode", turned)
    found = finding("parity", seeing)
    assert found.status is Status.FAILED
    assert found.figure.startswith("engine and trainer differ: ")


@pytest.mark.slow
def test_a_picture_that_neither_sees_is_noticed(seeing: Subject, monkeypatch: Patch) -> None:
    right = Vision._encode

    def blind(self: Any, keys: Any) -> Any:
        return [(0 * made, tuple(0 * layer for layer in deep)) for made, deep in right(self, keys)]

    monkeypatch.setattr(Vision, "_encode", blind)
    found = finding("parity", seeing)
    assert found.status is Status.FAILED
    assert found.figure == "engine and trainer do not see the picture: upside down it changes no log-prob"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def on_path(patch: Patch, folder: Path, name: str, text: str) -> None:
    program(folder / "programs" / name, text)
    patch.setenv("PATH", f"{folder / 'programs'}{os.pathsep}{os.environ['PATH']}")


def wrong_turns(patch: Patch, spoil: Callable[[Any], Any]) -> None:
    right = LocalEngine.generate

    async def spoiled(self: Any, *arguments: Any) -> Any:
        turn = await right(self, *arguments)
        spoil(turn)
        return turn

    patch.setattr(LocalEngine, "generate", spoiled)


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("devices", {"model__device": "cuda:1"}, "no GPU, which the recipe asks for"),
        ("devices", {"cluster__gpus": 2}, "no GPU, which the recipe asks for"),
        ("engine", {"engine__name": "sglang"}, "say where servers run"),
    ],
)
def test_what_the_machine_does_not_have_is_no_failure(
    name: str, changes: dict[str, Any], line: str, subject: Subject, monkeypatch: Patch
) -> None:
    monkeypatch.delenv("AGENTRL_SGLANG_VENV", raising=False)
    subject.recipe = small(**changes)
    found = finding(name, subject)
    assert found.status is Status.ABSENT
    assert line in found.figure


def test_an_engine_with_one_way_to_take_weights_has_no_others(subject: Subject) -> None:
    subject.recipe = small(engine__name="doctor_plugins:fine")
    with pytest.raises(UserError, match="is not a class derived from"):
        sampling.transports(subject)


@pytest.mark.parametrize("on", [False, True])
def test_a_server_on_a_cpu_frees_nothing(on: bool, subject: Subject) -> None:
    subject.recipe = small(engine__name="sglang", engine__sleep=on)
    with pytest.raises(NotHereError, match="frees nothing" if on else "engine.sleep is off"):
        sampling.sleep(subject)


def saved(folder: Path) -> Path:
    """A run folder with a checkpoint."""
    roles = LocalRoles(Recipe(), load_model(Recipe().model)[0]).roles
    Checkpoints(folder / "checkpoints", 1).save(3, lambda path: save_roles(roles, path), {})
    return folder


def test_a_damaged_checkpoint_is_found(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="no whole checkpoint was left"):
        running.check_saved(tmp_path)
    saved(tmp_path)
    assert running.check_saved(tmp_path) == 3
    path = tmp_path / "checkpoints" / "step_3" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        running.check_saved(tmp_path)


class Apart:
    """Roles of other processes, which compute something else."""

    def __init__(self, recipe: Recipe, *rest: Any) -> None:
        alone = recipe.model_copy(update={"cluster": Recipe().cluster})
        self.actor: Any = LocalRoles(alone, load_model(recipe.model)[0]).actor
        right = self.actor.logprobs
        self.actor.logprobs = lambda batch: right(batch) + np.float32(0.01)

    def close(self) -> None: ...


@pytest.mark.slow
def test_workers_that_compute_something_else_are_found(subject: Subject, monkeypatch: Patch) -> None:
    monkeypatch.setattr(running, "RayRoles", Apart)
    found = finding("workers", subject)
    assert found.status is Status.FAILED
    assert "log-probs of 2 workers differ from those of one process by 0.01 nats" in found.figure


def test_too_little_shared_memory_is_found(subject: Subject, monkeypatch: Patch) -> None:
    usage = shutil._ntuple_diskusage(64 << 20, 0, 64 << 20)  # type: ignore[attr-defined]
    monkeypatch.setattr(running.shutil, "disk_usage", lambda path: usage)
    found = finding("workers", subject)
    assert (found.status, found.remedy) == (Status.FAILED, "/dev/shm: make it larger (docker run --shm-size=8g)")


@pytest.mark.slow
def test_a_broken_sandbox_is_found(subject: Subject, monkeypatch: Patch, tmp_path: Path) -> None:
    on_path(monkeypatch, tmp_path, "bwrap", "echo 'no permission' >&2; exit 1")
    found = finding("sandbox", subject)
    assert found.status is Status.FAILED
    assert "bubblewrap" in found.remedy


def test_a_sandbox_that_nobody_asks_for_may_be_absent(subject: Subject, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert finding("sandbox", subject).status is Status.ABSENT
    for asks in ({"tools": ["python"]}, {"agent": {"command": ["/bin/sh"], "sandbox": True}}):
        subject.recipe = small(**asks)
        assert finding("sandbox", subject).status is Status.FAILED


@pytest.mark.parametrize(("said", "line"), [("41", "instead of 42"), ("REACHED the network\n42", "is not confined")])
def test_code_that_is_not_confined_is_found(said: str, line: str, subject: Subject, monkeypatch: Patch) -> None:
    async def answers(tool: Any) -> str:
        return said

    monkeypatch.setattr(machine, "_try_tool", answers)
    monkeypatch.setattr(machine, "make_tool", lambda section: Calculator())
    found = finding("sandbox", subject)
    assert found.status is Status.FAILED
    assert line in found.figure


GOOD = {"step": 1, "rollout/trajectories": 8, "rollout/failed": 0, "time/rollout_s": 2.0, "time/train_s": 1.0,
        "time/sync_s": 0.5}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"not_finite": ["train/loss"]}, "not finite: train/loss"),
        ({"rollout/trajectories": 0, "rollout/failed": 8}, "all 8 samples failed"),
        ({"mismatch/logprob_mean": 0.4}, "differ by 0.4 nats"),
    ],
)
def test_a_step_that_went_wrong_is_found(change: dict[str, Any], line: str) -> None:
    running.check_step(GOOD)
    with pytest.raises(CheckError, match=line):
        running.check_step({**GOOD, **change})


def test_the_time_of_a_run_follows_from_the_step(subject: Subject) -> None:
    subject.recipe = small(rollout__tasks=16, rollout__n=8, engine__max_batch=64, train__steps=100)
    (subject.folder / running.STEP).write_text(json.dumps(GOOD))
    found = finding("estimate", subject)  # 2 rounds of 2 s, 16 times as many samples to learn from, 0.5 s to publish
    assert found.figure.startswith("about 20 s a step, 0.6 h for 100 steps")


@pytest.mark.slow
def test_the_time_of_a_step_follows_from_an_update_of_its_size(subject: Subject) -> None:
    subject.recipe = small(rollout__tasks=16, rollout__n=8, engine__max_batch=64, train__steps=100)
    found = finding("update", subject)
    assert re.fullmatch(r"2,048 tokens in \S+ s: [\d,]+ tokens/s, \S+ TFLOP/s, \d+% of the peak", found.figure)
    (subject.folder / running.STEP).write_text(json.dumps(GOOD))
    rate = json.loads((subject.folder / running.UPDATE).read_text())
    flops = longest_update(subject.recipe)
    assert flops is not None
    assert f"a step's update takes at most {flops / rate:,.2g} s" in finding("estimate", subject).figure
    (subject.folder / running.UPDATE).write_text(json.dumps(flops / 3))
    assert finding("estimate", subject).figure.startswith("about 8 s a step")  # 4 to sample, 3, and 0.5


def test_an_update_that_fails_is_found(subject: Subject, monkeypatch: Patch) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Actor, "update", full)
    found = finding("update", subject)
    assert (found.status, found.remedy) == (Status.FAILED, "train.micro_batch_tokens, model.checkpointing")


def test_a_model_that_does_not_fit_is_found(subject: Subject, monkeypatch: Patch) -> None:
    (subject.folder / running.STEP).write_text(json.dumps(GOOD))
    monkeypatch.setattr(running, "total_memory", lambda device: 1e6)
    found = finding("estimate", subject)
    assert found.status is Status.FAILED
    assert "train.micro_batch_tokens" in found.remedy


def test_whatever_a_part_raises_is_a_finding(subject: Subject) -> None:
    def raises(subject: Subject) -> str:
        raise SystemExit(3)

    found = perform(Check("x", "a part", raises, "key a.b"), subject)
    assert (found.status, found.remedy) == (Status.FAILED, "key a.b")


@pytest.mark.ray
@pytest.mark.long
def test_a_recipe_of_workers_is_tried_through_its_roles(subject: Subject, monkeypatch: Patch) -> None:
    """Sharded, as in a run: no check has the whole model in this process, and none copies a state."""
    subject.recipe = small(cluster__workers=2, engine__sleep=True)
    plain = copy.deepcopy

    def copied(value: Any, *memo: Any) -> Any:
        assert not isinstance(value, torch.nn.Module | OrderedDict), type(value)
        return plain(value, *memo)

    monkeypatch.setattr(copy, "deepcopy", copied)
    for name in ("engine", "parity", "weights", "sleep"):
        found = finding(name, subject)
        assert found.status is Status.OK, found
    assert finding("transports", subject).status is Status.ABSENT
    assert "4,096 tokens in " in finding("update", subject).figure  # 2,048 a worker
    monkeypatch.setattr(type(subject.roles.actor), "update", lambda self, batch, rate: None)
    found = finding("weights", subject)
    assert "change log-probs by 0 nats only" in found.figure, found


def test_of_a_model_that_no_process_has_whole_the_first_layers_are_looked_at(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    whole = Qwen3ForCausalLM(config)
    whole.save_pretrained(tmp_path)
    load_tokenizer(Recipe().model).save_pretrained(tmp_path)
    section = Recipe().model.model_copy(update={"path": str(tmp_path)})
    found = load_model(first_layers(section))[0]
    names = dict(found.named_parameters())
    assert len(found.model.layers) == found.config.num_hidden_layers == 2
    assert all(torch.equal(names[name], dict(whole.named_parameters())[name]) for name in names)
    assert first_layers(Recipe().model).config["num_hidden_layers"] == 2
