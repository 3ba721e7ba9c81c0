"""Servers that fail while weights come: told apart from those that did not, and never left serving a part."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang_weights_help import BUCKET, TENSORS, FaultyServer, Weights, channel_to, opened, tiny

from agentrl import addresses
from agentrl.addresses import on_this_machine, same_host
from agentrl.engine.servers.server import free_port
from agentrl.errors import UserError
from agentrl.weights.channel import WeightChannel, open_channel
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.sglang import SglangServer
from agentrl.weights.source import ModelWeights, buckets
from agentrl.weights.transports.disk import DiskTransport
from agentrl.weights.transports.nccl import GroupTransport
from agentrl.weights.transports.shared_memory import SharedBucket, SharedMemoryTransport
from agentrl.weights.verify import Fingerprint

FAULTS = {
    "/pause_generation": (0, 500),
    "/begin_weight_update": (0, 400),
    "/update_weights_from_tensor": (1, 500),
    "/end_weight_update": (0, 500),
    "/update_weight_version": (1, 500),
    "/continue_generation": (0, 500),
}


@pytest.mark.parametrize("path", FAULTS)
async def test_a_server_that_fails_at_any_call_is_bad_until_a_whole_update(path: str, session):
    async with FaultyServer({path: FAULTS[path]}) as bad, FaultyServer() as good:
        channel = channel_to([bad, good], session, SharedMemoryTransport(BUCKET))
        done = await channel.publish(1, Weights(TENSORS))
        assert done.good == (good.url,)
        assert list(done.failed) == [bad.url]
        assert bad.url + path in done.failed[bad.url]
        assert "no luck" in done.failed[bad.url]
        assert channel.versions == {bad.url: None, good.url: 1}
        assert good.calls.count("/update_weights_from_tensor") == 3
        assert (good.version, good.paused, good.open) == ("1", False, False)
        assert bad.paused == (path != "/pause_generation")  # it serves only where nothing of the update reached it
        assert not await channel.resume()
        assert bad.paused == (path != "/pause_generation")

        done = await channel.publish(2, Weights(TENSORS))
        assert (done.failed, set(done.good)) == ({}, {bad.url, good.url})
        assert (bad.version, bad.paused, bad.open) == ("2", False, False)


async def test_nothing_more_is_sent_to_a_server_that_failed(session):
    async with FaultyServer({"/update_weights_from_tensor": (0, 500)}) as bad:
        channel = channel_to([bad], session, SharedMemoryTransport(BUCKET))
        read: list[int] = []
        done = await channel.publish(1, Weights(TENSORS, before=read.append))
        assert bad.calls.count("/update_weights_from_tensor") == 1
        assert read == list(range(6))  # to the end: other ranks gather in step
        assert done.failed
        assert bad.version == "partial-1"


async def test_weights_that_change_while_they_are_sent_are_never_sampled_from(session):
    """An optimizer in another thread: what arrived is of no step. (Fused AdamW does not count torch's versions up.)"""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    class Trained(ModelWeights):
        def __iter__(self):
            for i, item in enumerate(super().__iter__()):
                if i == 2:
                    model(torch.ones(4)).sum().backward()
                    optimizer.step()
                yield item

    async with FaultyServer() as server:
        channel = channel_to([server], session, SharedMemoryTransport(BUCKET))
        weights = Trained(model)
        done = await channel.publish(1, weights)
        assert done.failed == {server.url: "the trainer changed its weights while they were sent"}
        assert (server.version, server.paused) == ("partial-1", True)
        calls = len(server.calls)
        with pytest.raises(WeightUpdateError, match="no longer those of step 1"):
            await channel.publish(1, ModelWeights(model, stamp=weights.stamp))
        assert len(server.calls) == calls
        assert not (await channel.publish(2, ModelWeights(model))).failed


async def test_one_that_never_answers_is_given_up(session):
    async with FaultyServer({"/update_weights_from_tensor": (0, None)}) as stuck, FaultyServer() as good:
        done = await channel_to([stuck, good], session, SharedMemoryTransport(BUCKET), timeout=0.5).publish(
            1, Weights(TENSORS)
        )
        assert done.good == (good.url,)
        assert "did not answer" in done.failed[stuck.url]


async def test_one_that_is_gone(session, tmp_path):
    async with FaultyServer() as good:
        gone = FaultyServer()
        gone.url = f"http://127.0.0.1:{free_port()}"
        done = await channel_to([gone, good], session, DiskTransport(tmp_path)).publish(1, Weights(TENSORS))
        assert done.good == (good.url,)
        assert gone.url in done.failed[gone.url]
        with pytest.raises(WeightUpdateError, match=gone.url):
            await open_channel([good.url, gone.url], session, folder=tmp_path)


async def test_servers_that_hold_different_weights_are_told_apart(session):
    class Other(FaultyServer):
        def _do(self, path: str, body: Any) -> Any:
            from aiohttp import web

            if path == "/weights_checker":
                return web.json_response({"success": True, "ranks": [{"checksums": {"a": "2"}}, {"checksums": {}}]})
            return super()._do(path, body)

    async with FaultyServer() as one, Other() as two:
        channel = WeightChannel([SglangServer(s.url, session) for s in (one, two)], SharedMemoryTransport(BUCKET))
        done = await channel.publish(1, Weights(TENSORS))
        assert len(done.good) == 1
        assert "other weights than the servers like it" in next(iter(done.failed.values()))
        assert not (await channel.publish(2, Weights(TENSORS))).failed  # compared again only after many updates


@pytest.mark.slow
async def test_a_group_that_does_not_form_is_one_line(session):
    async with FaultyServer({"/init_weights_update_group": (0, 400)}) as bad:
        channel = channel_to([bad], session, GroupTransport(timeout=1.0))
        done = await channel.publish(1, Weights(TENSORS))
        assert "no luck" in done.failed[bad.url]
        assert bad.version == "partial-1"


async def test_folders_are_whole_and_old_ones_go(session, tmp_path):
    async with FaultyServer() as server:
        transport = DiskTransport(tmp_path, keep=2, shard_bytes=BUCKET)
        channel = channel_to([server], session, transport)
        for version in (8, 9, 10, 11):
            await channel.publish(version, Weights(TENSORS))
        (own,) = tmp_path.iterdir()
        assert sorted(f.name for f in own.iterdir()) == ["version_10", "version_11"]
        found: dict[str, torch.Tensor] = {}
        for shard in sorted((own / "version_11").glob("*.safetensors")):
            found |= load_file(shard)
        assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in TENSORS}
        await channel.close()
        assert not own.exists()


async def test_a_folder_that_cannot_be_written_is_one_line(session, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        async with FaultyServer() as server:
            await open_channel([server.url], session, folder=tmp_path / "file", transport="from_disk")


async def test_an_unknown_transport_is_named(session, tmp_path):
    with pytest.raises(UserError, match="did you mean 'from_disk'"):
        await open_channel([], session, folder=tmp_path, transport="from_disc")


async def test_a_server_elsewhere_gets_weights_over_a_group(session, tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.weights.channel.same_host", lambda url: False)
    said: list[str] = []
    async with FaultyServer() as server:
        channel = await open_channel([server.url], session, folder=tmp_path, say=said.append)
        assert isinstance(channel.transport, GroupTransport)
        assert server.url in said[0]


async def test_memory_is_shared_with_processes_of_this_machine_alone():
    async with FaultyServer() as server:
        assert same_host(server.url)
    assert not same_host(server.url)  # nobody listens any more
    assert not same_host("http://192.0.2.1:30000")
    assert on_this_machine("localhost")
    assert not on_this_machine("no such host")


def test_memory_is_not_shared_with_a_container(monkeypatch):
    """A process that listens on this machine, but has mounts of its own."""
    port = free_port()
    listen = (
        f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", listen], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert same_host(f"http://127.0.0.1:{port}")
        ours = addresses._namespaces
        monkeypatch.setattr(
            addresses, "_namespaces", lambda pid: ours(pid) if pid != process.pid else ("mnt:[1]", "ipc:[1]")
        )
        assert not same_host(f"http://127.0.0.1:{port}")
        process.kill()


def test_buckets_are_bounded():
    sizes = [[name for name, _ in batch] for batch in buckets(TENSORS, BUCKET)]
    assert sizes == [["layer.0", "layer.1"], ["layer.2", "layer.3"], ["layer.4", "layer.5"]]
    assert [len(batch) for batch in buckets(TENSORS, 1)] == [1] * 6  # a larger tensor stands alone
    assert list(buckets([], BUCKET)) == []


def test_a_shared_bucket_is_opened_by_its_name_and_used_again():
    bucket = SharedBucket()
    mixed = [("a", torch.arange(3, dtype=torch.bfloat16)), ("b", torch.arange(5.0).view(5, 1)), ("c", torch.tensor(7))]
    for shift in (0, 1):
        batch = [(name, tensor + shift) for name, tensor in mixed]
        payload = bucket.fill(batch, torch.device("cpu"))()
        assert len(payload) < 4000  # names and places, no weights
        found = opened(payload)
        assert list(found) == ["a", "b", "c"]
        assert all(torch.equal(found[name], tensor) for name, tensor in batch)


def test_a_fingerprint_follows_fused_parts_in_any_order():
    import hashlib

    q, k, v = (torch.full((2, 2), float(i)) for i in range(3))
    parts = [("l.self_attn.v_proj.weight", v), ("l.self_attn.q_proj.weight", q), ("l.self_attn.k_proj.weight", k)]
    sent = Fingerprint(Weights(parts), True, ["float32"])
    assert [name for name, _ in sent] == [name for name, _ in parts]
    right = hashlib.sha256(torch.cat([q, k, v]).numpy().tobytes()).hexdigest()[:16]
    assert sent.differences({"l.self_attn.qkv_proj.weight": right}) == []
    assert sent.differences({"l.self_attn.qkv_proj.weight": "0" * 16}) == [
        "its l.self_attn.qkv_proj.weight is not what was sent"
    ]
    assert sent.bytes == 48


def test_the_experts_of_a_layer_are_named_as_in_checkpoints(tmp_path: Path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_experts=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(ModelWeights(model))
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


def test_the_names_of_a_model_are_asked_for_once(monkeypatch: pytest.MonkeyPatch):
    """Each question walks all modules: a fifth of a second for 36 layers if it was asked for each weight."""
    asked: list[int] = []
    monkeypatch.setattr("agentrl.weights.source.as_saved", lambda model, state: asked.append(len(state)) or dict(state))
    model = tiny()
    sent = dict(ModelWeights(model))
    assert asked == [len(sent)]


async def test_cancelling_an_update_leaves_its_server_paused(session):
    async with FaultyServer({"/update_weights_from_tensor": (0, None)}) as server:
        task = asyncio.create_task(
            channel_to([server], session, SharedMemoryTransport(BUCKET)).publish(1, Weights(TENSORS))
        )
        while "/update_weights_from_tensor" not in server.calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (server.paused, server.version) == (True, "partial-1")
