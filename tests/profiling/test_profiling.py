"""What a run measures of itself: arithmetic, memory by phase, traces of chosen steps."""

import gzip
import json
import runpy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT
from torch.utils.flop_counter import FlopCounterMode
from train_help import metrics, small
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from vision_help import groups, seeing_model, sequence

import agentrl
from agentrl.cluster.dispatch import ONE_TO_ALL, register, registered
from agentrl.compute import flops
from agentrl.compute.batch import Batch
from agentrl.compute.flops import (
    Cost,
    RoleCost,
    Workload,
    costs,
    known_peak,
    longest_update,
    peak_flops,
    utilisation,
)
from agentrl.compute.packing import indices, micro_batches
from agentrl.compute.value_head import CONFIDENCE_FEATURES, ValueModel
from agentrl.images import STORE, keyed
from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.models.vision import Vision
from agentrl.profiling.memory import PeakMemory
from agentrl.profiling.step import SYNC, StepProfiler
from agentrl.profiling.trace import OwnTimes, Profiler, add_own_times
from agentrl.profiling.worker import InstrumentedWorker, instrumented
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import LoraSection

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def make_model(tied: bool = True) -> Any:
    config = Qwen3Config(**SHAPE, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    return Qwen3ForCausalLM(config)


def counted(model: Any, tokens: int, backward: bool) -> int:
    """FLOPs of matrix products as torch counts them, every token attending to every one and predicting."""
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False).logits
        if backward:
            logits.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    model, tokens = make_model(tied), 40
    cost = Cost.of(model)
    assert cost.forward(Workload(tokens, tokens, tokens**2)) == counted(model, tokens, backward=False)
    assert cost.update(Workload(tokens, tokens, tokens**2)) == counted(model, tokens, backward=True)


def test_a_tower_counts_once_for_each_image() -> None:
    """As torch counts it; but for the gradient of pixels, which nobody wants."""
    model = seeing_model()[0]
    model.set_attn_implementation("eager")
    batch = Batch.from_groups(groups(model))
    work, cost = Workload.of(batch), Cost.of(model)
    shown = {span.hash: span for g in groups(model) for t in g.trajectories for span in t.images}
    assert work.images == sum(span.tokens for span in shown.values())
    assert (cost.body, cost.trained_tower) == (Cost.of(model.model.language_model).body, cost.tower)
    with FlopCounterMode(display=False) as counter:
        made = Vision(model).features(keyed(*sequence(model, *(STORE.load(key) for key in shown))))
        forward = counter.get_total_flops()
        (made.embeddings.sum() + sum(each.sum() for each in made.deep)).backward()
    pixels = 2 * model.model.visual.patch_embed.proj.weight.numel() * 4 * work.images
    alone = Workload(0, 0, 0, work.images, work.image_pairs)
    assert cost.forward(alone) == forward
    assert cost.update(alone) - pixels == counter.get_total_flops()
    model.model.visual.requires_grad_(False)
    frozen = Cost.of(model)
    assert (frozen.forward(alone), frozen.update(alone)) == (0, forward)


def test_frozen_matrices_need_no_gradient_of_their_own() -> None:
    model = make_model()
    whole = Cost.of(model)
    lora.add_adapter(model, LoraSection(rank=2, targets=("q_proj",)), "x")
    adapted = Cost.of(model)
    rank_two = 2 * 2 * (32 + 64)  # two layers, in and out
    assert adapted.trained_body == rank_two
    assert adapted.body == whole.body + rank_two
    assert adapted.trained_head == 0
    assert adapted.update(Workload(10, 10, 0)) == 4.0 * (adapted.body + adapted.head) * 10 + 2 * rank_two * 10


def test_of_experts_as_many_count_as_a_token_passes() -> None:
    shape = SHAPE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    cost = Cost.of(Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)))
    attention = 32 * 16 * (4 + 2 + 2 + 4)
    assert cost.body == 2 * (attention + 8 * 32 + 2 * 3 * 32 * 24)


def test_a_batch_needs_what_its_packed_row_computes() -> None:
    """Against the row itself: its tokens, its predictions, and the pairs that its segments let attend."""
    lengths, prompts = [9, 12, 7, 5, 8, 8], [5, 5, 5, 3, 4, 4]
    rows = [np.concatenate([np.full(p, p), 10 + np.arange(n - p)]) for n, p in zip(lengths, prompts, strict=True)]
    masks = [np.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)]
    masks[4] &= False  # it predicts nothing, and is left out
    batch = Batch(
        np.cumsum([0, *lengths]),
        {"ids": np.concatenate(rows).astype(np.int32), "loss_mask": np.concatenate(masks).astype(np.uint8)},
        {"prompt_length": np.array(prompts, np.int32), "group": np.array([0, 0, 0, 1, 2, 2], np.int64)},
    )
    (packed,) = micro_batches(batch, 10_000)
    mask = np.zeros((len(packed.ids), len(packed.ids)), bool)
    for s in packed.segments:
        for i in range(s.start, s.end):
            mask[i, indices(s.prefix)] = mask[i, s.start : i + 1] = True
    assert Workload.of(batch) == Workload(len(packed.ids), len(packed.predict), int(mask.sum()))
    assert Workload.of(batch.select(np.array([4]))) == Workload(0, 0, 0)


def test_utilisation_is_the_share_of_the_peak() -> None:
    assert utilisation(6e12, 2.0, 12e12) == {"train/tflops": 3.0, "train/mfu": 0.25}
    assert utilisation(6e12, 2.0, None) == {"train/tflops": 3.0}


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA A10", 125), ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA H200", 989.4), ("NVIDIA H20", 148),
    ],
)  # fmt: skip
def test_known_gpus_are_found_by_their_names(name: str, tera: float) -> None:
    assert known_peak(name, torch.bfloat16) == pytest.approx(tera * 1e12)
    assert known_peak("Imagination 9000", torch.bfloat16) is None


def test_a_cpu_is_measured() -> None:
    found = peak_flops(torch.device("cpu"), torch.float32)
    assert found is not None
    assert 1e8 < found < 1e14
    assert peak_flops(torch.device("meta"), torch.float32) is None


def test_the_peak_of_a_phase_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = PeakMemory()
    with peaks.phase("before"):
        pass
    with peaks.phase("large"):
        torch.ones(60_000_000).sum()  # 240 MB
    with peaks.phase("after"):
        pass
    found = peaks.take()
    assert found["memory/large_gb"] > found["memory/before_gb"] + 0.2
    assert found["memory/after_gb"] < found["memory/large_gb"] - 0.2
    assert peaks.take() == {}


def test_a_peak_counts_for_every_phase_under_way() -> None:
    peaks = PeakMemory()
    inside, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with peaks.phase("other"):
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with peaks.phase("large"):
        torch.ones(60_000_000).sum()
    go_on.set()
    thread.join()
    found = peaks.take()
    assert found["memory/other_gb"] >= found["memory/large_gb"]


def test_where_the_high_water_mark_cannot_be_read_it_is_the_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.profiling.memory._RESET", Path("/proc/self/nothing"))
    peaks = PeakMemory()
    with peaks.phase("train"):
        pass
    assert peaks.take()["memory/train_gb"] > 0.1


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def test_a_trace_holds_what_its_steps_computed_and_nothing_else(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profile", "actor", 1, steps=[2])
    for step in (1, 2, 3):
        for function in (torch.sin, torch.cos):  # two calls of one step make one file
            with profiler.step(step):
                function(torch.ones(8) * step)
    assert sorted(p.name for p in (tmp_path / "profile").iterdir()) == ["step_2_actor_1.json.gz", "step_2_actor_1.txt"]
    names = [event["name"] for event in read(tmp_path / "profile" / "step_2_actor_1.json.gz") if event["ph"] == "X"]
    assert (names.count("aten::sin"), names.count("aten::cos"), names.count("aten::mul")) == (1, 1, 2)
    table = (tmp_path / "profile" / "step_2_actor_1.txt").read_text()
    assert table.startswith("step 2, actor 1: 2 recordings\n")
    assert any(line.split()[0] == "2" and line.endswith("aten::mul") for line in table.splitlines()[4:])


def test_own_times_leave_out_what_is_called() -> None:
    def event(name: str, start: float, took: float, thread: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": took}

    found: OwnTimes = {"mm": (1, 5.0, 0.0)}
    events = [
        event("linear", 0, 10), event("mm", 2, 6), event("copy", 3, 1), event("mm", 10, 4), event("linear", 1, 3, 2),
        event("gemm", 0, 7, 9, "kernel"), {"ph": "M", "name": "thread"},
    ]  # fmt: skip
    add_own_times(events, found)
    assert found == {"linear": (2, 7.0, 0.0), "mm": (3, 14.0, 0.0), "copy": (1, 1.0, 0.0), "gemm": (1, 0.0, 7.0)}


def test_own_times_are_those_that_torch_adds_up(tmp_path: Path) -> None:
    x = torch.randn(16, 16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
        torch.nn.functional.layer_norm(x @ x, (16,)).softmax(-1)
    recording.export_chrome_trace(str(tmp_path / "trace.json"))
    found: OwnTimes = {}
    add_own_times(json.loads((tmp_path / "trace.json").read_text())["traceEvents"], found)
    wanted = {entry.key: entry for entry in recording.key_averages() if entry.key in found}
    assert "aten::mm" in wanted
    for name, (calls, cpu, _) in found.items():
        assert calls == wanted[name].count
        assert cpu == pytest.approx(wanted[name].self_cpu_time_total, abs=0.1 * calls + 0.01)


def test_what_another_thread_computes_is_recorded_too(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, "engine", steps=[1])
    begin = threading.Event()
    thread = threading.Thread(target=lambda: (begin.wait(), torch.sin(torch.ones(4))))
    thread.start()
    with profiler.step(1):
        begin.set()
        thread.join()
    assert "aten::sin" in {event["name"] for event in read(tmp_path / "step_1_engine_0.json.gz")}


def test_two_roles_at_once_are_not_recorded_twice(tmp_path: Path) -> None:
    """torch ends the process when it is asked to."""
    first, second = (Profiler(tmp_path, role, steps=[1]) for role in ("engine", "actor"))
    with first.step(1), second.step(1):
        torch.sin(torch.ones(4))
    assert "1 calls were not recorded" in (tmp_path / "step_1_actor_0.txt").read_text()
    assert not (tmp_path / "step_1_actor_0.json.gz").exists()
    assert "aten::sin" in {event["name"] for event in read(tmp_path / "step_1_engine_0.json.gz")}


def test_an_error_in_a_recorded_step_is_the_callers_and_frees_the_recorder(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, "actor", steps=[1])
    with pytest.raises(ZeroDivisionError), profiler.step(1):
        1 / 0  # noqa: B018
    with profiler.step(1):
        torch.sin(torch.ones(4))
    assert (tmp_path / "step_1_actor_0.json.gz").exists()


def test_measuring_a_cpu_takes_a_moment_however_slow_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_measured_peak", flops._measured_peak.__wrapped__)  # what it finds is not kept
    clock = iter(range(100))
    monkeypatch.setattr(flops, "perf_counter", lambda: float(next(clock)))  # every product takes a second
    assert peak_flops(torch.device("cpu"), torch.float32) == 2 * 128**3


class Trainer(InstrumentedWorker):
    def __init__(self) -> None:
        self.start_measuring()

    @register(ONE_TO_ALL)
    @instrumented("actor")
    def update(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    @register(ONE_TO_ALL)
    @instrumented("actor", SYNC)
    def publish(self) -> None:
        torch.cos(torch.ones(2))

    @register(ONE_TO_ALL)
    @instrumented("critic")
    def values(self) -> None:
        torch.exp(torch.ones(60_000_000))


def test_a_worker_records_the_steps_that_it_is_told_of(tmp_path: Path) -> None:
    worker = Trainer()
    worker.update(torch.zeros(2))  # before anybody has named a folder
    worker.trace(3, str(tmp_path))
    assert worker.update(torch.zeros(2)).tolist() == [0, 0]
    worker.trace(0, str(tmp_path))
    worker.update(torch.zeros(2))
    worker.trace(3, str(tmp_path))  # another phase of the same step
    worker.publish()
    worker.trace(0, str(tmp_path))
    assert [p.name for p in sorted(tmp_path.glob("*.gz"))] == ["step_3_actor_0.json.gz"]
    names = [event["name"] for event in read(tmp_path / "step_3_actor_0.json.gz")]
    assert (names.count("aten::sin"), names.count("aten::cos")) == (1, 1)


def test_a_worker_says_what_each_phase_took() -> None:
    worker = Trainer()
    worker.publish()
    worker.values()
    found = worker.measure()
    assert found["memory/train_gb"] > found["memory/sync_gb"] + 0.2
    assert worker.measure() == {}
    assert {"measure", "trace", "update"} <= set(registered(Trainer))


class Host:
    """A role host whose roles are elsewhere."""

    in_process, device = False, "cpu"
    cost = Cost(body=10, head=3, trained_body=10, trained_head=3, pair=8)
    frozen = Cost(body=20, head=1, trained_body=0, trained_head=0, pair=4)

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.actor, self.reference, self.critic, self.reward_model = Role(), Role(), None, Role()
        self.teachers: dict[int, Any] = {}
        self.pools = {"actor": "a", "critic": "a", "reference": "b"}
        kinds = {"actor": (self.cost, 1e6, "a"), "critic": (self.cost, 1e6, "a"), "reference": (self.frozen, 5e5, "b")}
        self.role_costs = {name: RoleCost(*kind) for name, kind in kinds.items()} | {
            "reward_model": RoleCost(self.frozen, 2e3, "c")
        }

    def measure(self) -> dict[str, float]:
        return {"memory/train_actor_gb": 4.0 / (1 + len(self.recorded))}

    def trace(self, step: int, folder: Path) -> None:
        self.recorded.append(step)


class Role:
    description = "far away"

    def logprobs(self, batch: Batch) -> int:
        return len(batch)

    def update(self, batch: Batch, rate: float) -> float:
        return rate

    def scores(self, batch: Batch) -> int:
        return len(batch)


def profiled(host: Any, folder: Path, steps: tuple[int, ...] = ()) -> tuple[StepProfiler, Any]:
    profiler = StepProfiler(host, folder, steps, engine=False)
    return profiler, profiler.roles


def lone(length: int) -> Batch:
    mask = (np.arange(length) >= 2).astype(np.uint8)
    return Batch(
        np.array([0, length]), {"ids": np.zeros(length, np.int32), "loss_mask": mask},
        {"prompt_length": np.array([2], np.int32), "group": np.array([0])},
    )  # fmt: skip


def test_a_step_costs_what_its_roles_were_asked(tmp_path: Path) -> None:
    profiler, roles = profiled(Host(), tmp_path)
    with profiler.phase("train", 1):
        assert roles.actor.update(lone(6), 0.5) == 0.5
        assert roles.reference.logprobs(lone(5)) == 1
    assert (roles.actor.description, roles.critic) == ("far away", None)
    found = profiler.take(2.0)
    passes = 3 * (2 * (10 * 6 + 3 * 4) + 8 * 21) + 2 * (20 * 5 + 1 * 3) + 4 * 15
    assert found["train/tflops"] == pytest.approx(passes / 2 / 1e12)
    assert found["train/mfu"] == pytest.approx(passes / 2 / 1.5e6)  # of the devices of both, not of the reward model's
    assert found["memory/train_actor_gb"] == 4.0
    assert profiler.take(1.0)["train/tflops"] == 0


def test_a_reward_model_is_counted_over_its_own_calls(tmp_path: Path) -> None:
    """While samples are drawn, which is no time of training's."""
    profiler, roles = profiled(Host(), tmp_path)
    assert roles.reward_model.scores(lone(6)) == roles.reward_model.scores(lone(5)) == 1
    roles.actor.update(lone(6), 0.5)
    found = profiler.take(2.0)
    scored = 2 * (20 * 11 + 1 * (4 + 3)) + 4 * (21 + 15)
    took = found["time/reward_model_s"]
    assert found["reward_model/tflops"] == pytest.approx(scored / took / 1e12)
    assert found["reward_model/mfu"] == pytest.approx(scored / took / 2e3)
    assert found["train/tflops"] == pytest.approx(3 * (2 * (10 * 6 + 3 * 4) + 8 * 21) / 2 / 1e12)
    assert "reward_model/mfu" not in profiler.take(2.0)


def test_each_role_costs_what_its_own_model_is(tmp_path: Path) -> None:
    """The critic is another model here, with an output layer of one row; the reference has no adapter."""
    model, small = make_model(), make_model()
    whole = Cost.of(model)
    lora.add_adapter(model, LoraSection(rank=2, targets=("q_proj",)), "x")
    small.model.layers = small.model.layers[:1]
    found = costs(SimpleNamespace(
        actor=SimpleNamespace(model=model), reference=SimpleNamespace(model=model),
        critic=SimpleNamespace(model=ValueModel(small)), reward_model=None,
    ))  # fmt: skip
    assert list(found) == ["actor", "reference", "critic"]
    assert (found["reference"].body, found["reference"].head) == (whole.body, whole.head)
    assert found["actor"].body == whole.body + found["actor"].trained_body
    assert found["critic"].body == found["critic"].trained_body == whole.body // 2 + CONFIDENCE_FEATURES
    assert found["critic"].head == found["critic"].trained_head == 32


def test_the_peaks_of_a_run_are_described(tmp_path: Path) -> None:
    profiler, _ = profiled(Host(), tmp_path, steps=(1,))
    assert profiler.describe() == ""
    profiler.take(1.0)
    with profiler.phase("train", 1):
        pass
    assert profiler.take(1.0)["memory/train_actor_gb"] < 4
    assert "train_actor 4.00 GB" in profiler.describe()


def test_workers_are_told_of_the_steps_to_record_and_when_to_stop(tmp_path: Path) -> None:
    host = Host()
    profiler, _ = profiled(host, tmp_path, steps=(2,))
    for step in (1, 2, 3):
        with profiler.phase("train", step):
            pass
    assert host.recorded == [2, 0]


def test_roles_here_are_recorded_here(tmp_path: Path) -> None:
    host = Host()
    host.in_process = True
    profiler, roles = profiled(host, tmp_path, steps=(2,))
    for step in (1, 2):
        with profiler.phase("train", step):
            roles.actor.update(lone(4), 0.1)
    assert [p.name for p in sorted(tmp_path.glob("*.gz"))] == ["step_2_actor_0.json.gz"]


def test_the_benchmark_of_gpus_says_in_a_line_that_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "benchmarks" / "gpu" / "train.py")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [script, "--gpus", "2"])
    monkeypatch.setattr("sys.path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "training on GPUs: missing: 2 GPU(s), torch sees 0\n"


@pytest.mark.slow
def test_a_run_writes_down_what_its_steps_took_and_the_traces_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"algorithm__kl_coef": 0.01, "algorithm__entropy_coef": 0.001, "profile__steps": [2], "eval__tasks": 1}
    result = agentrl.train(small(tmp_path / "run", train__steps=2, **changes))
    steps = [row for row in metrics(result.folder) if row["step"] > 0]
    for row in steps:
        assert 0.05 < row["memory/train_gb"] < 64
        assert row["memory/rollout_gb"] > 0
        assert row["memory/sync_gb"] > 0
        assert row["train/mfu"] > 0
        assert 1e-5 < row["train/tflops"] < 10
    kinds = ("actor", "engine", "reference")
    wanted = {f"step_2_{role}_0.{ending}" for role in kinds for ending in ("json.gz", "txt")}
    assert {path.name for path in (result.folder / "profile").iterdir()} == wanted
    for role in kinds:
        names = {event["name"] for event in read(result.folder / "profile" / f"step_2_{role}_0.json.gz")}
        assert any("Backward" in name for name in names) == (role == "actor")
    assert "peak memory: rollout " in capsys.readouterr().out


def test_no_update_takes_more_than_the_longest() -> None:
    recipe = Recipe.model_validate(
        {"rollout": {"tasks": 2, "n": 4, "max_tokens": 40, "max_turn_tokens": 20, "max_tool_tokens": 9}}
    )
    cost, length = Cost.of(load_model(recipe.model)[0]), 40
    assert longest_update(recipe) == cost.update(Workload(8 * length, 8 * length, 8 * length * (length + 1) // 2))
    assert longest_update(recipe) > cost.update(Workload(8 * 30, 8 * 20, 8 * 30 * 31 // 2))
    assert longest_update(recipe.changed(model={"path": "nobody/has-this"})) is None
