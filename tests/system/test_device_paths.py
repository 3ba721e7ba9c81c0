"""What runs on a GPU, on a pretended one (pretend_gpu.py): every tensor lies where it belongs, and what is computed is
what the CPU computes. Kernels that want a real one are stood in for by what they are documented to do."""

import asyncio
import base64
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import late_copies as late_copies_help
import numpy as np
import pytest
import torch
from late_copies import LateTransfers, late_copies
from learner_help import make_groups, make_model, make_recipe
from pretend_gpu import GPU, OnGpu, flash, pretending, to_gpu
from torch import Tensor
from torch.multiprocessing import reductions
from torch.nn.attention import varlen
from train_help import small
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MambaConfig, MambaForCausalLM

from agentrl.checkpoint import roles, sharded
from agentrl.cluster.host import ProcessInfo, interface_of
from agentrl.cluster.spawn import environments
from agentrl.compute import tree_attention
from agentrl.compute.batch import Batch
from agentrl.compute.value_head import value_forward
from agentrl.distributed.remote import RemotePublisher
from agentrl.engine.base import Sampling
from agentrl.engine.local import block_runner
from agentrl.engine.local import engine as local_engine
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.servers.client import Sessions
from agentrl.engine.servers.sync import Sync
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.errors import UserError
from agentrl.learner import actor
from agentrl.learner.critic import Critic
from agentrl.learner.learner import Learner
from agentrl.learner.metrics import MicroBatchMetrics, mismatch_columns
from agentrl.learner.roles import LocalRoles
from agentrl.models import allocator
from agentrl.models.lora import add_adapter
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import CriticSection
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.recipe.sections.model import LoraSection
from agentrl.training.interrupt import Interrupts
from agentrl.training.run import run_with_restarts
from agentrl.training.setup import Start, set_up
from agentrl.weights.group import agree_with_servers
from agentrl.weights.request import ServerRank, WeightRequest, WeightResult, cpu_place
from agentrl.weights.source import ModelWeights
from agentrl.weights.transports import shared_memory

pytestmark = pytest.mark.slow

__all__ = ["late_copies"]
GROUPS = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
LONE = [[1.0], [0.0], [1.0]]
SAME = ("train/loss", "train/grad_norm", "train/entropy", "mismatch/kl")


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
    kernel_options: Any = None,
) -> Tensor:
    """What flex_attention is documented to do, over the whole mask."""
    steps = torch.arange(query.shape[2], device=query.device)
    nothing = torch.zeros((), dtype=torch.long, device=query.device)
    seen = block_mask.mask_mod(nothing, nothing, steps[:, None], steps[None, :])
    copies = query.shape[1] // key.shape[1] if enable_gqa else 1
    k, v = (x.repeat_interleave(copies, 1).float() for x in (key, value))
    scores = (query.float() @ k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).to(query.dtype)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that attended, stand-ins for those of a GPU among them."""
    found: list[str] = []
    choose = tree_attention.kernel_for

    def watched(*about: Any) -> Any:
        kernel = choose(*about)
        found.append(getattr(kernel, "__name__", "buckets"))
        return kernel

    tree_attention.kernel_fault.cache_clear()
    monkeypatch.setattr(tree_attention, "_FAULTS", {})
    monkeypatch.setattr(tree_attention, "_flex", lambda device: flex)
    monkeypatch.setattr(varlen, "varlen_attn", flash)
    monkeypatch.setattr(tree_attention, "kernel_for", watched)
    return found


def learned(model: Any, recipe: Recipe, rewards: list[list[float]]) -> tuple[dict[str, float], str]:
    place = LocalRoles(recipe, model)
    found = Learner(recipe, place).learn(make_groups(rewards))
    return {name: found[name] for name in SAME}, place.actor.description


def recipe_with(algorithm: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> Recipe:
    recipe = make_recipe(algorithm)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=model or {})})


def adapted(dtype: torch.dtype) -> Any:
    model = make_model(dtype)
    add_adapter(model, LoraSection(rank=4), "base")
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.constant_(parameter, 0.02)
    return model


STEPS: dict[str, tuple[Callable[[], Any], Recipe, list[list[float]], str]] = {
    "whole precision": (
        make_model, recipe_with({"off_policy": "sequence_tis", "loss": "cispo", "entropy_coef": 0.01}), GROUPS,
        "by_flex"),
    "half precision, computed again": (
        lambda: make_model(torch.bfloat16), recipe_with(model={"checkpointing": True}), GROUPS, "by_flex"),
    "nothing shared": (
        lambda: make_model(torch.bfloat16), recipe_with({"advantage": "reinforce_plus_plus"}), LONE, "by_flash"),
    "mixed precision": (make_model, recipe_with({"off_policy": "none"}, {"compute": "bfloat16"}), GROUPS, "by_flex"),
    "adapter and reference": (
        lambda: adapted(torch.bfloat16), recipe_with({"kl_coef": 0.1, "loss": "gspo"}), GROUPS, "by_flex"),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore:.*autocast")
def test_a_step_of_learning_is_that_of_the_cpu(name: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make, recipe, rewards, kernel = STEPS[name]
    wanted, way = learned(make(), recipe, rewards)
    with pretending(monkeypatch) as waited:
        model = to_gpu(make())
        found, same = learned(model, recipe, rewards)
    assert same == way
    assert set(chosen[-2:]) == {kernel}  # of the two layers, after the probe
    assert found == pytest.approx(wanted, rel=0.02, abs=1e-5)
    assert all(isinstance(parameter, OnGpu) for parameter in model.parameters())
    assert "index" not in waited


def test_moments_and_inputs_of_layers_are_there_while_they_are_needed_alone(
    late_copies: LateTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_with(model={"checkpointing": True})
    wanted, found = (
        learned_there(recipe.model_copy(update={"cluster": ClusterSection(offload=offload)}), monkeypatch)
        for offload in ((), ("optimizer", "activations"))
    )
    assert late_copies.order
    for name, tensor in wanted.items():
        assert type(found[name]) is (Tensor if name.startswith("exp_avg") else type(tensor)), name
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


def learned_there(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Weights and the optimizer's state after two steps on the pretended GPU."""
    with pretending(monkeypatch):
        model = to_gpu(make_model())
        monkeypatch.setattr(late_copies_help, "DEVICE", [GPU])
        place = LocalRoles(recipe, model)
        learner = Learner(recipe, place)
        for _ in range(2):
            learner.learn(make_groups(GROUPS))
        return {**dict(model.named_parameters()), **place.actor.optimizer.named_state()}


def test_the_host_reads_what_an_update_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretending(monkeypatch) as waited:
        metrics = MicroBatchMetrics()
        for number in (1.0, 2.0, 3.0):
            off = torch.full((4,), number / 10, device=GPU)
            columns = {"train/ratio": off, **mismatch_columns(off, torch.ones(4, device=GPU), corrected=True)}
            metrics.micro_batch(9, off.sum(), columns, {"mismatch/logprob_max": off})
        assert not waited
        metrics.updated(1.0, 0.1)
        assert len(waited) == 1
    assert (metrics.predictions, metrics.largest["mismatch/logprob_max"]) == (12, pytest.approx(0.3))
    assert metrics.sums["train/ratio"] == metrics.loss == pytest.approx(2.4)


def test_a_critic_learns_there(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe().model_copy(update={"critic": CriticSection()})

    def step(model: Any) -> tuple[np.ndarray, Critic]:
        critic = Critic(recipe, value_forward(model)[0])
        batch = Batch.from_groups(make_groups(GROUPS))
        tokens = int(batch.offsets[-1])
        ones = np.ones(tokens, np.float32)
        critic.update(batch.with_tokens(values=0 * ones, returns=ones, weight=ones / tokens), 0.1)
        return critic.values(batch), critic

    wanted = step(make_model())[0]
    with pretending(monkeypatch):
        found, critic = step(to_gpu(make_model()))
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert all(p.device == GPU for p in critic.model.parameters())


def gemma() -> Any:
    torch.manual_seed(0)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=256,
        )
    )  # fmt: skip


def mamba() -> Any:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))


@pytest.mark.parametrize(
    ("make", "sampling"),
    [
        (make_model, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}),
        (lambda: make_model(torch.bfloat16), {"temperature": 0.0}),
        (gemma, {}),
        (mamba, {}),
    ],
    ids=["own forward", "half precision", "module", "recomputed"],
)
def test_the_local_engine_samples_as_on_the_cpu(
    make: Callable[[], Any], sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "INLINE_SECONDS", 1e9)  # another thread knows nothing of what is pretended here
    monkeypatch.setattr(block_runner, "layout_of", lambda weight: None)  # as on a GPU: other products round otherwise

    async def sample(model: Any) -> list[list[int]]:
        engine = LocalEngine(model.eval(), max_batch=4, max_context=96, overlap=True)
        asked = [(list(range(1, 4 + i)), Sampling(max_tokens=4, seed=i, **sampling), f"r{i}") for i in range(3)]
        first = await asyncio.gather(*(engine.generate(*one) for one in asked))
        await engine.update_weights(1)
        again = await engine.generate([*asked[0][0], *first[0].ids, 5, 6], asked[1][1], "r0")
        await engine.close()
        return [each.ids for each in (*first, again)]

    wanted = asyncio.run(sample(make()))
    with pretending(monkeypatch) as waited:
        assert asyncio.run(sample(to_gpu(make()))) == wanted
    assert "index" not in waited


def test_a_checkpoint_is_taken_from_there_and_put_back(
    chosen: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = make_recipe()
    with pretending(monkeypatch):
        place = LocalRoles(recipe, to_gpu(make_model(torch.bfloat16)))
        Learner(recipe, place).learn(make_groups(GROUPS))
        state = roles._state(place.actor, 0)
    assert not any(isinstance(tensor, OnGpu) for tensor in state.values())
    sharded.write(state, tmp_path / "trainer" / "actor")
    with pretending(monkeypatch):
        fresh = LocalRoles(recipe, to_gpu(make_model(torch.bfloat16)))
        roles.load_roles(fresh.roles, tmp_path)
        back = roles._state(fresh.actor, 0)
    kept = [name for name in state if not name.startswith("rng")]
    assert all(torch.equal(state[name], back[name]) for name in kept)
    assert any(name.startswith("exp_avg.") and state[name].any() for name in kept)


def test_a_tensor_left_on_the_cpu_is_found(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    column_at = actor.column_at
    monkeypatch.setattr(actor, "column_at", lambda batch, name, packed, device: column_at(batch, name, packed, "cpu"))
    with pretending(monkeypatch), pytest.raises(UserError, match="at least two devices"):
        learned(to_gpu(make_model()), make_recipe(), GROUPS)


def test_a_gpu_does_not_let_the_host_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretending(monkeypatch) as waited:
        there, here = torch.ones(3, device=GPU), torch.arange(3)
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        with pytest.raises(RuntimeError, match="indices"):
            here[there.long()]
        assert not waited
        assert there[here].sum().item() == 3
        assert waited == ["index", "item"]


class Unpickler(pickle.Unpickler):
    """As a server's, which opens what it knows alone."""

    KNOWN = frozenset((
        "types.SimpleNamespace", "torch.Size", "torch.Tensor", "torch.storage.TypedStorage", "torch.uint8",
        "torch.bfloat16", "torch.float32", "torch.multiprocessing.reductions.rebuild_cuda_tensor",
    ))  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        assert f"{module}.{name}" in self.KNOWN
        return (lambda *about: about) if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def test_a_bucket_on_a_gpu_is_named_by_its_uuid_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps memory once more each time it is shared: none may be shared for as long as the run lasts."""
    handed: list[Tensor] = []

    def reduce(tensor: Tensor) -> Any:
        handed.append(tensor)
        about = (Tensor, tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, tensor.dtype, 3, b"handle")
        return reductions.rebuild_cuda_tensor, (*about, tensor.numel(), 0, False, b"counter", 0, b"event", True)

    monkeypatch.setattr(reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"), raising=False)
    bucket = shared_memory.SharedBucket()
    with pretending(monkeypatch):
        weights = list(ModelWeights(to_gpu(make_model(torch.bfloat16))))
        contents = []
        for _ in range(2):
            payload = bucket.fill(weights, GPU)()
            contents.append(Unpickler(io.BytesIO(base64.b64decode(payload))).load())
        bucket.free("cuda")
    assert bucket._bytes.is_cpu
    first, second = (tensor.values.data_ptr() for tensor in handed)  # type: ignore[attr-defined]
    assert first != second
    for content in contents:
        assert content["flattened_tensor"][6] == "abc"
        assert [place.name for place in content["metadata"]] == [name for name, _ in weights]
    for place, (_, tensor) in zip(contents[1]["metadata"], weights, strict=True):
        sent = handed[1].values[place.start_idx : place.end_idx].view(place.dtype).view(place.shape)  # type: ignore[attr-defined]
        assert torch.equal(sent, tensor.values)


def test_shared_memory_lies_in_plain_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    for name in allocator.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    with allocator.plain_segments():
        assert not asked
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with allocator.plain_segments():
        assert asked == ["max_split_size_mb:64,expandable_segments:False"]
    assert asked[1:] == ["max_split_size_mb:64,expandable_segments:True"]
    found = allocator.without_expandable({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OTHER": "x"})
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}


@pytest.mark.parametrize(
    ("gpu", "chosen", "workers", "wanted"),
    [
        (True, None, 0, "expandable_segments:True"),
        (True, "max_split_size_mb:64", 0, ""),
        (True, None, 2, ""),
        (False, None, 0, ""),
    ],
)
def test_a_trainer_in_the_runs_own_process_allocates_expandable_segments_too(
    gpu: bool, chosen: str | None, workers: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [""]
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda value: settings.append(value))
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings[-1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for name in allocator.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", chosen)

    def prepare(folder: object, restarted: bool) -> Start:
        raise KeyboardInterrupt  # before anything touches CUDA

    recipe = small(cluster={"workers": workers} if workers else {})
    with pytest.raises(KeyboardInterrupt):
        run_with_restarts(recipe, "run", None, Interrupts(), prepare, set_up)
    assert settings[-1] == wanted
    with allocator.plain_segments():  # what is exported stays plain
        assert settings[-1] == wanted.replace("True", "False")


def hello(pid: int, interface: str = "") -> ProcessInfo:
    return ProcessInfo(pid=pid, node="n", node_id="n", port=1, cores=2, interface=interface, gpus=(), oom_kills=0)


def test_machines_talk_by_the_interface_that_the_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    hellos = [hello(0, "eth0"), hello(1, "ens5")]
    found = environments(hellos, [1, 1], gpu=True)
    assert [env["GLOO_SOCKET_IFNAME"] for env in found] == ["eth0", "ens5"]
    assert [env["NCCL_SOCKET_IFNAME"] for env in found] == ["=eth0", "=ens5"]
    assert {env["GLOO_SOCKET_IFNAME"] for env in environments(hellos, [2], gpu=True)} == {"lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert {env["GLOO_SOCKET_IFNAME"] for env in environments(hellos, [1, 1], gpu=True)} == {"mine"}
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") == ""


def test_older_versions_of_torch_read_our_handles() -> None:
    """Of plain memory, whose layout is as before; one of an expandable segment stays what it is."""
    assert shared_memory.readable(b"\x03c" + bytes(64)) == b"\x02c" + bytes(64)
    assert shared_memory.readable(b"\x03e123") == b"\x03e123"
    assert shared_memory.readable(b"\x01c123") == b"\x01c123"
    assert shared_memory.readable(b"") == b""


def test_workers_see_no_gpu_but_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides all but one from those that ask for one, and none from those that ask for none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    hellos = [hello(i) for i in range(2)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments(hellos, [2], gpu=False)] == ["", ""]
    assert all("CUDA_VISIBLE_DEVICES" not in e for e in environments(hellos, [2], gpu=True))
    assert [environments(hellos, [2], gpu)[0].get("PYTORCH_ALLOC_CONF") for gpu in (True, False)] == [
        "expandable_segments:True",
        None,
    ]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert "PYTORCH_ALLOC_CONF" not in environments(hellos, [2], gpu=True)[0]


def test_nccl_is_set_up_as_servers_set_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    agree_with_servers()
    assert shared_memory.os.environ["NCCL_CUMEM_ENABLE"] == "1"
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    agree_with_servers()
    assert shared_memory.os.environ["NCCL_CUMEM_ENABLE"] == "0"


class Machines:
    """Four workers on two machines, and what each call was given; the first rank of a machine finds servers near."""

    def __init__(self, nodes: str = "aabb") -> None:
        self.workers = [SimpleNamespace(node_id=node) for node in nodes]
        self.calls: list[tuple[Any, ...]] = []
        self.feeders: dict[str, tuple[int, ...]] = {}

    def near(self, urls: Sequence[str]) -> list[list[str]]:
        self.calls.append(("near", tuple(urls)))
        return [[url for url in urls if url.startswith(place)] for place in ("http://a", "no", "http://b", "no")]

    def publish(self, request: WeightRequest) -> list[WeightResult | None]:
        self.calls.append(("publish", dict(request.senders)))
        self.feeders = dict(request.feeders)
        sent = [request.of(rank).urls for rank in range(len(self.workers))]
        return [WeightResult({url: "no" for url in urls if "bad" in url}, {}, urls) if urls else None for urls in sent]

    def sleep_servers(self, urls: Sequence[str], senders: Mapping[str, int]) -> list[dict[str, str]]:
        self.calls.append(("sleep", dict(senders)))
        return [{}, {}, {"http://b:1": "no"}, {}]

    def open_publisher(self, *how: Any) -> None:
        self.calls.append(("open", *how))


def test_servers_are_sent_to_from_their_own_machine() -> None:
    """By the first rank there; those on other machines by rank 0. Each server is looked for once."""
    group = Machines()
    publisher = RemotePublisher(group, [group])  # type: ignore[arg-type, list-item]
    urls = ("http://a:1", "http://b:1", "http://b:bad", "http://c:1")
    found = publisher.publish(WeightRequest(urls, 1))
    assert group.calls == [("near", urls), ("publish", {"http://b:1": 2, "http://b:bad": 2})]
    assert found.failed == {"http://b:bad": "no"}
    assert found.messages == ("http://a:1", "http://c:1", "http://b:1", "http://b:bad")
    assert publisher.sleep(urls[:2]) == {"http://b:1": "no"}
    assert group.calls[2:] == [("sleep", {"http://b:1": 2})]


@pytest.mark.parametrize("transport", ["auto", "from_tensor"])
def test_a_server_that_shares_a_gpu_is_sent_to_from_it(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worker there, for its updates and its sleep; one that was restarted at another address too. Each server of
    several GPUs by the worker on its first."""
    monkeypatch.setattr("agentrl.distributed.remote.own_id", lambda: "a")
    group = Machines("aabb")
    for worker, gpu in zip(group.workers, "0101", strict=True):
        worker.gpus = (gpu,)
    publisher = RemotePublisher(group, [group])  # type: ignore[arg-type, list-item]
    publisher.open(None, transport)
    urls = ("http://a:0", "http://a:1", "http://b:1")
    places = {urls[0]: ranks_at("", "0"), urls[1]: ranks_at("", "1"), urls[2]: ranks_at("b", "12")}
    publisher.publish(WeightRequest(urls, 1, places=places))
    publisher.sleep(urls)
    publisher.publish(WeightRequest(("http://a:9",), 2, places={"http://a:9": ranks_at("", "1")}))
    shared = {urls[1]: 1, urls[2]: 3}
    assert group.calls[1:] == [("publish", shared), ("sleep", shared), ("publish", {"http://a:9": 1})]


def test_a_server_of_several_gpus_is_fed_on_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a worker is on each, by those workers, in the order of the server's ranks, on whichever machines. Not by
    one that sends to another server meanwhile."""
    monkeypatch.setattr("agentrl.distributed.remote.own_id", lambda: "a")
    group = Machines("aabb")
    for worker, gpu in zip(group.workers, "0101", strict=True):
        worker.gpus = (gpu,)
    publisher = RemotePublisher(group, [group])  # type: ignore[arg-type, list-item]
    urls = ("http://a:0", "http://b:0", "http://c:0")
    two, other, half = ranks_at("", "01"), ranks_at("b", "10"), ranks_at("b", "17")
    publisher.publish(WeightRequest(urls, 1, places=dict(zip(urls, (two, other, half), strict=True))))
    assert group.feeders == {urls[0]: (0, 1), urls[1]: (3, 2)}
    over = {urls[0]: (*ranks_at("", "1"), *ranks_at("b", "1")), urls[1]: (*ranks_at("", "0"), *ranks_at("b", "0"))}
    publisher.publish(WeightRequest(urls[:2], 2, places=over))
    assert group.feeders == {urls[0]: (1, 3), urls[1]: (0, 2)}
    places = {urls[0]: two, "http://a:1": ranks_at("", "1")}
    publisher.publish(WeightRequest(tuple(places), 3, places=places))
    assert group.feeders == {}


def test_without_gpus_each_rank_of_a_server_is_fed_by_a_worker_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its machine, by their order there."""
    monkeypatch.setattr("agentrl.distributed.remote.own_id", lambda: "a")
    group = Machines("aabb")
    for worker in group.workers:
        worker.gpus = ()
    publisher = RemotePublisher(group, [group])  # type: ignore[arg-type, list-item]
    first, second = cpu_place(0), cpu_place(1)
    places = {
        "http://a:0": (ServerRank("a", first), ServerRank("b", first)),
        "http://a:1": (ServerRank("a", second), ServerRank("b", second)),
    }
    publisher.publish(WeightRequest(tuple(places), 1, places=places))
    assert group.feeders == {"http://a:0": (0, 2), "http://a:1": (1, 3)}
    assert group.calls[-1] == ("publish", {"http://a:1": 1})


def ranks_at(node: str, gpus: str) -> tuple[ServerRank, ...]:
    return tuple(ServerRank(node, gpu) for gpu in gpus)


@pytest.mark.parametrize(("nodes", "transport"), [("aaaa", "auto"), ("aabb", "from_disk")])
def test_rank_0_sends_where_no_other_machine_is_better(nodes: str, transport: str) -> None:
    group = Machines(nodes)
    publisher = RemotePublisher(group, [group])  # type: ignore[arg-type, list-item]
    publisher.open(None, transport)
    publisher.publish(WeightRequest(("http://b:1",), 1))
    assert group.calls[1:] == [("publish", {})]


@pytest.mark.parametrize("call", ["update_weights", "wake"])
async def test_trainers_give_memory_back_before_servers_wake(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(name: str) -> Any:
        async def done(*about: Any) -> None:
            order.append(name)

        return done

    class Group:
        def __init__(self, name: str) -> None:
            future = SimpleNamespace(result=lambda: order.append(f"{name} freed"))
            self.make_room = SimpleNamespace(future=lambda: future)

    sync = Sync("sglang", make_model(), Sessions(), Path, "auto", print)
    sync._publisher = RemotePublisher(Group("actor"), [Group("actor"), Group("critic")])  # type: ignore[assignment, arg-type, list-item]
    engine = SglangEngine.__new__(SglangEngine)
    engine._started = engine._asleep = True
    engine._pause = "retract"
    fleet: Any = SimpleNamespace(sync=sync, update=note("servers woken"), wake=note("servers woken"))
    engine.fleet = fleet
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("here freed"))
    await (engine.update_weights(1) if call == "update_weights" else engine.wake())
    assert order == ["actor freed", "critic freed", "here freed", "servers woken"]
