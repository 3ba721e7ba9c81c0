"""Adapters to servers, by protocol. With the real server: test_sglang_lora.py."""

from collections.abc import Iterable
from pathlib import Path

import torch
from sglang_weights_help import FaultyServer

from agentrl.weights.lora import Adapter, LoraChannel
from agentrl.weights.sglang import SglangServer

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def tensors(step: int) -> list[tuple[str, torch.Tensor]]:
    return [(NAME, torch.full((2, 8), float(step))), (NAME.replace("_A", "_B"), torch.full((8, 2), -float(step)))]


def adapter(step: int) -> Adapter:
    return Adapter(step, CONFIG, tensors(step))


def steps(names: Iterable[str]) -> list[int]:
    """Of names such as step-3-5f2a."""
    return [int(name.split("-")[1]) for name in names]


async def test_each_step_has_an_adapter_of_its_own(session, tmp_path):
    async with FaultyServer() as server:
        channel = LoraChannel([SglangServer(server.url, session)], lambda: tmp_path)
        for step in (1, 2, 3):
            done = await channel.publish(adapter(step))
            assert (done.failed, done.good, done.bytes) == ({}, (server.url,), 128)
            assert channel.names == {server.url: list(server.adapters)[-1]}
            assert steps(channel.names.values()) == [step]
        assert steps(server.adapters) == [2, 3]  # a request may just have named the former
        for step, held in zip((2, 3), server.adapters.values(), strict=True):  # earlier ones are not written over
            assert all(torch.equal(held[name], tensor) for name, tensor in tensors(step))
        assert "/pause_generation" not in server.calls
        assert list(tmp_path.iterdir()) == []


async def test_a_server_that_does_not_see_our_files_is_sent_the_tensors(session, tmp_path, monkeypatch):
    def no_folder() -> Path:
        raise AssertionError("nothing is written for it")

    async with FaultyServer() as near, FaultyServer() as far, FaultyServer() as wide:
        wide.machines = 2
        sees = "agentrl.weights.lora.same_host"
        monkeypatch.setattr(sees, lambda url: False)
        channel = LoraChannel([SglangServer(far.url, session)], no_folder)
        await channel.publish(adapter(1))
        monkeypatch.setattr(sees, lambda url: url != far.url)
        servers = [SglangServer(s.url, session) for s in (near, far, wide)]
        channel = LoraChannel(servers, lambda: tmp_path, channel)
        view = [(name, torch.cat([tensor, tensor])[: len(tensor)]) for name, tensor in tensors(2)]
        assert not (await channel.publish(Adapter(2, CONFIG, view))).failed
        by_value = "/load_lora_adapter_from_tensors"
        for server, call in ((near, "/load_lora_adapter"), (far, by_value), (wide, by_value)):
            assert {c for c in server.calls if "/load_lora" in c} == {call}
            held = server.adapters[channel.names[server.url]]
            assert all(torch.equal(held[name], tensor) for name, tensor in tensors(2))
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in held.values() if server is not near)


async def test_what_requests_sample_from_stays_while_there_is_room(session, tmp_path):
    async with FaultyServer() as server:
        server.room = 4
        channel = LoraChannel([SglangServer(server.url, session)], lambda: tmp_path)
        await channel.publish(adapter(1))
        keep = {server.url: frozenset(channel.names.values())}
        for step in (2, 3):
            await channel.publish(adapter(step), keep)
        assert steps(server.adapters) == [1, 2, 3]
        await channel.publish(adapter(4), keep)
        assert steps(server.adapters) == [3, 4]  # dropping the first waited for its requests
        again = LoraChannel([SglangServer(server.url, session)], lambda: tmp_path, previous=channel)
        await again.publish(adapter(5))
        assert steps(server.adapters) == [4, 5]


async def test_an_adapter_that_came_although_the_call_failed_is_not_in_the_way(session, tmp_path):
    async with FaultyServer() as server:
        channel = LoraChannel([SglangServer(server.url, session)], lambda: tmp_path)
        await channel.publish(adapter(1))
        assert not (await channel.publish(adapter(1))).failed
        assert len(server.adapters) == 2


async def test_a_server_that_refuses_an_adapter_goes_on_with_its_former_one(session, tmp_path):
    async with FaultyServer({"/load_lora_adapter": (1, 400)}) as bad, FaultyServer() as good:
        channel = LoraChannel([SglangServer(s.url, session) for s in (bad, good)], lambda: tmp_path)
        await channel.publish(adapter(1))
        done = await channel.publish(adapter(2))
        assert (done.good, list(done.failed)) == ((good.url,), [bad.url])
        assert steps(channel.names[s.url] for s in (bad, good)) == [1, 2]
        assert not (await channel.publish(adapter(3))).failed
        assert steps([channel.names[bad.url]]) == [3]


async def test_a_server_without_lora_is_told_what_to_start_with(session, tmp_path):
    async with FaultyServer() as server:
        server.takes_adapters = False
        done = await LoraChannel([SglangServer(server.url, session)], lambda: tmp_path).publish(adapter(1))
        assert "--enable-lora" in done.failed[server.url]
