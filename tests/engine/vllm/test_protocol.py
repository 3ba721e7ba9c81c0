"""The engine `vllm` over a server that speaks the recorded protocol: what is asked, what is read, what goes wrong."""

import asyncio
import copy
import json
import random
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import RECIPES
from processes import eventually
from sglang_help import GREEDY, PROMPT, logprobs_of
from vllm_help import VllmStandIn

from agentrl.cluster.placement import Launched
from agentrl.engine.base import EngineError, Generation, GenerationFinish, Sampling
from agentrl.engine.servers.adapters import AdapterNeeds, AdapterRoom, why_merged
from agentrl.engine.servers.answer import INTERVAL, Answer, Features, PieceEnd, Wanted
from agentrl.engine.vllm.command import VllmPlan
from agentrl.engine.vllm.inside.agentrl_guard import KEY_VARIABLE as GUARDED_BY
from agentrl.engine.vllm.inside.agentrl_guard import RequireKey
from agentrl.engine.vllm.kind import VllmEngine
from agentrl.engine.vllm.wire import VllmReader, request_body
from agentrl.errors import UserError
from agentrl.recipe.load import load_recipe
from agentrl.training.preflight import lacking
from agentrl.weights.channel import open_channel
from agentrl.weights.scratch import SHARED_MEMORY
from agentrl.weights.server import PauseMode
from agentrl.weights.vllm import VllmServer

pytestmark = pytest.mark.usefixtures("impatient")


@asynccontextmanager
async def served(parts: Any, *faults: Any, count: int = 1, engine_args: Any = None, **changes: Any) -> Any:
    """An engine over `count` stand-ins, the first of which has `faults`; (engine, stand-ins, lines said)."""
    model, tokenizer = parts
    said: list[str] = []
    async with AsyncExitStack() as stack:
        servers = [VllmStandIn(model, tokenizer, **changes) for _ in range(count)]
        for server in servers:
            await stack.enter_async_context(server)
        servers[0].faults = deque(faults)
        urls = tuple(s.url for s in servers)
        engine = VllmEngine(model, max_batch=16, tokenizer=tokenizer, say=said.append, urls=urls, **(engine_args or {}))
        stack.push_async_callback(engine.close)
        await engine.health()
        yield engine, servers, said


def same(made: Generation, expected: Generation) -> None:
    assert (made.ids, made.finish, made.weight_version) == (expected.ids, expected.finish, 0)
    assert made.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


async def test_a_healthy_server(parts: Any, expected: Generation) -> None:
    async with served(parts) as (engine, (server,), said):
        same(await engine.generate(PROMPT, GREEDY, "x"), expected)
        assert engine.max_context == 1024
        assert server.version == "0"
    assert any("vLLM 0.32.0 server(s)" in line for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "kind",
    ["cut", "no_json", "few_logprobs", "other_ids", "null_logprob", "clamped_logprob", "unknown_end", "error"],
)
async def test_a_piece_goes_wrong(parts: Any, expected: Generation, kind: str, after: int) -> None:
    """The request goes on after the tokens that came whole, which are sampled and counted once."""
    told: list[int] = []
    async with served(parts, (kind, after)) as (engine, (server,), _):
        same(await engine.generate(PROMPT, GREEDY, "x", told.extend), expected)
    assert told == expected.ids
    assert server.asked == [PROMPT, PROMPT + expected.ids[: 4 * after]]


@pytest.mark.slow
async def test_what_was_told_is_not_taken_back_when_weights_change(parts: Any, expected: Generation) -> None:
    """Of a request that ends early while new weights come, the tokens from before stay; no others were told."""
    told: list[int] = []
    async with served(parts, ("cut", 3)) as (engine, (server,), _):

        def hear(ids: Sequence[int]) -> None:
            told.extend(ids)
            engine.fleet._epoch += len(told) == 8

        same(await engine.generate(PROMPT, GREEDY, "x", hear), expected)
    assert told == expected.ids
    assert server.asked == [PROMPT, PROMPT + expected.ids[:8]]


@pytest.mark.slow
async def test_a_dead_server_leaves_its_requests_to_another(parts: Any, expected: Generation) -> None:
    async with served(parts, ("die", 2), count=2) as (engine, (_, second), said):
        for one in await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"{i}") for i in range(8))):
            same(one, expected)
        assert PROMPT + expected.ids[:8] in second.asked  # on from its tokens so far
    assert any("is taken out" in line for line in said)


async def test_new_weights_come_by_a_folder_in_shared_memory(parts: Any) -> None:
    model, tokenizer = parts
    trained = copy.deepcopy(model)
    async with served((trained, tokenizer), count=2) as (engine, servers, said):
        before = await engine.generate(PROMPT, GREEDY, "a")
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        await engine.update_weights(3)
        made = await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"{i}") for i in range(4)))
    for one in made:
        assert one.weight_version == 3
        assert one.logprobs == pytest.approx(logprobs_of(trained, PROMPT, one.ids, 1.0), abs=1e-4)
    assert made[0].ids != before.ids
    for server in servers:
        assert [Path(folder).is_relative_to(SHARED_MEMORY) for folder in server.loaded] == [True]
        assert not Path(server.loaded[0]).exists()  # once the engine is closed
        paths = [path for path, _ in server.posted]
        assert paths == ["/pause?mode=keep", "/reset_prefix_cache?reset_running_requests=true", "/resume"]
    assert any("weights: from_disk (through a folder" in line for line in said)


async def test_a_server_on_a_cpu_that_would_keep_its_output_layer_is_refused(parts: Any) -> None:
    async with served(parts, packs_again=False) as (engine, _, _):
        with pytest.raises(UserError, match=r"takes no new weights: start it with --worker-extension-cls agentrl_work"):
            await engine.update_weights(1)


@pytest.mark.parametrize(
    ("transport", "why"),
    [("from_tensor", "opens no memory of the trainer's GPU"), ("from_distributed", "vLLM joins groups of GPUs only")],
)
async def test_a_transport_between_gpus_is_refused_on_a_cpu(parts: Any, transport: str, why: str) -> None:
    async with served(parts, engine_args={"weights": transport}) as (engine, _, _):
        with pytest.raises(UserError, match=f"no server has the weights of step 1: .*{why}"):
            await engine.update_weights(1)


async def test_a_failed_update_is_never_sampled_from(parts: Any) -> None:
    async with served(parts, count=2) as (engine, (failing, good), said):
        failing.broken = True
        await engine.update_weights(1)
        asked = len(failing.asked)
        made = await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"{i}") for i in range(4)))
        assert [m.weight_version for m in made] == [1] * 4
        assert (len(failing.asked), failing.version, good.version) == (asked, "partial-1", "1")
        assert any(failing.url in line and "weights of step 1 did not arrive whole" in line for line in said)
        failing.broken = False
        await eventually(lambda: any("is back" in line for line in said))
        assert failing.version == "1"


async def test_an_update_that_reaches_nobody_is_one_line(parts: Any) -> None:
    async with served(parts) as (engine, (server,), _):
        server.broken = True
        with pytest.raises(UserError, match="no server has the weights of step 1: " + server.url) as caught:
            await engine.update_weights(1)
        assert "\n" not in str(caught.value)


async def test_aborts_name_the_request_as_the_server_does(parts: Any) -> None:
    async with served(parts) as (engine, (server,), _):
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(900, temperature=0.0), "a"))
        await eventually(lambda: server.asked)
        engine.abort("a")
        assert (await running).finish is GenerationFinish.ABORT
        assert server.calls["/abort_requests"] == 1


@pytest.mark.parametrize("sampling", [Sampling(4, top_p=0.9), Sampling(4, top_k=5)])
async def test_logprobs_that_no_trainer_computes_are_refused(parts: Any, sampling: Sampling) -> None:
    async with served(parts) as (engine, _, _):
        with pytest.raises(UserError, match=r"engine vllm: vLLM reports log-probs after top-p and top-k"):
            await engine.generate(PROMPT, sampling, "x")


def test_check_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment, one without vLLM, one with another release, sampling without log-probs."""
    monkeypatch.delenv("AGENTRL_VLLM_VENV", raising=False)
    recipe = RECIPES / "gsm8k_tool.yaml"

    def lines(*more: str) -> list[str]:
        return lacking(load_recipe(recipe, ["engine.name=vllm", *more]))

    assert ["AGENTRL_VLLM_VENV, a virtual environment that holds vLLM" in line for line in lines()] == [True]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    args = f"engine.args.venv={tmp_path}"
    (found,) = lines(args)
    assert "holds no vLLM, and 0.32 is wanted (pip install 'vllm==0.32.*'" in found
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "vllm-0.28.1.dist-info").mkdir(parents=True)
    assert "holds vLLM 0.28.1, and 0.32 is wanted" in lines(args)[0]
    (packages / "vllm-0.28.1.dist-info").rename(packages / "vllm-0.32.0+cpu.dist-info")
    assert lines(args) == []
    (found,) = lines(args, "rollout.top_p=0.9")
    assert found.startswith("engine vllm: vLLM reports log-probs after top-p and top-k")
    assert lines(args, "rollout.top_p=0.9", "rollout.temperature=0") == []
    assert lines(args, "engine.args.flags.quantization=fp8_per_tensor") == []
    (found,) = lines(args, "engine.args.flags.quantization=fp8")
    assert "weights of fp8 cannot be replaced" in found
    assert "set fp8_per_tensor or fp8_per_block" in found


async def test_another_logprobs_mode_is_refused(parts: Any) -> None:
    with pytest.raises(UserError, match=r"reports raw_logprobs, .* start it with --logprobs-mode processed_logprobs"):
        async with served(parts, logprobs_mode="raw_logprobs"):
            pass


async def test_another_model_is_refused(parts: Any) -> None:
    with pytest.raises(UserError, match=r"serves another model: .* has a smaller vocabulary"):
        async with served(parts, vocabulary=1000):
            pass


async def test_a_server_that_slept_is_asked_in_the_order_that_it_needs(parts: Any) -> None:
    """Nothing is released under a request: what was computed of it is dropped first."""
    async with served(parts) as (engine, (server,), _):
        await engine.sleep()
        assert [p for p, _ in server.posted] == [
            "/pause?mode=keep", "/reset_prefix_cache?reset_running_requests=true", "/sleep?level=2&mode=keep",
        ]  # fmt: skip
        server.posted.clear()
        await engine.update_weights(1)
        assert [p for p, _ in server.posted] == [
            "/pause?mode=keep", "/wake_up?tags=weights", "/reset_prefix_cache?reset_running_requests=true",
            "/wake_up?tags=kv_cache", "/resume",
        ]  # fmt: skip


async def test_a_server_that_is_woken_by_itself_goes_on(parts: Any) -> None:
    """Only keys and values were released, as where an adapter alone is trained: the weights are whole."""
    import aiohttp

    async with VllmStandIn(*parts) as server, aiohttp.ClientSession() as session:
        channel = await open_channel([server.url], session, folder=Path("unused"), kind="vllm", say=lambda line: None)
        channel.versions[server.url] = 0
        assert await channel.sleep(["kv_cache"]) == {}
        assert await channel.wake() == {}
        await channel.close()
    assert [p for p, _ in server.posted][-3:] == ["/release_kv_cache_memory", "/wake_up?tags=kv_cache", "/resume"]


def piece(ids: list[int], spans: Any = None, end: str | None = None) -> bytes:
    content = [{"token_id": i, "logprob": -0.5} for i in ids]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": end, "weight_versions": spans}
    return json.dumps({"choices": [choice]}).encode()


def test_the_last_piece_tells_which_weights_sampled_what() -> None:
    answer = Answer([9], array("d", [-1.0]), [(1, 1)])
    reader = VllmReader(answer, "http://s", 1)
    assert reader.add(piece([3, 4])) is None
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    assert reader.add(piece([5], spans, "stop")) is PieceEnd.STOP
    reader.give_up(2)
    assert (answer.ids, answer.versions) == ([9, 3, 4, 5], [(1, 1), (1, 1), (2, 2)])


@pytest.mark.parametrize("sure", [1, 2, 3])
def test_tokens_of_untold_weights_are_given_up(sure: int) -> None:
    answer = Answer([9], array("d", [-1.0]), [(0, 1)])
    reader = VllmReader(answer, "http://s", 1)
    reader.add(piece([3, 4]))
    reader.give_up(sure)
    assert (answer.ids, list(answer.logprobs)) == ([9, 3, 4][:sure], [-1.0, -0.5, -0.5][:sure])
    assert answer.versions == [(0, 1), *([(1, sure - 1)] if sure > 1 else [])]


@pytest.mark.parametrize("value", [-9999.0, -9999.5])
def test_a_clamped_logprob_is_a_missing_one(value: float) -> None:
    answer = Answer()
    given = json.loads(piece([3]))
    given["choices"][0]["logprobs"]["content"][0]["logprob"] = value
    with pytest.raises(EngineError, match=r"id 3 came without a log-prob: -9999(.5)? is what vLLM says for none"):
        VllmReader(answer, "http://s", 1).add(json.dumps(given).encode())
    assert answer.ids == []


def test_log_probs_are_read_to_the_last_digit() -> None:
    chance = random.Random(0)
    values = [-chance.expovariate(0.5) for _ in range(500)] + [-5e-324, -9998.999999999998, 0.0, -0.0, -1]
    given = json.loads(piece(list(range(len(values)))))
    for entry, value in zip(given["choices"][0]["logprobs"]["content"], values, strict=True):
        entry |= {"logprob": value, "rank": 1, "top_logprobs": [{"token_id": 7, "logprob": -9.0, "rank": 1}]}
    answer = Answer()
    VllmReader(answer, "u", 0).add(json.dumps(given).encode())
    assert answer.logprobs.tolist() == values
    assert answer.ids == list(range(len(values)))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"token_id": 4, "logprob": -1.0}, r"id 3 came with the log-prob \{'token_id': 4"),
        ({"token_id": 3, "logprob": float("nan")}, r"id 3 came with the log-prob \{'token_id': 3, 'logprob': nan"),
        ({"token_id": 3, "logprob": None}, "id 3 came with the log-prob"),
        ({"token_id": 3, "logprob": "-1.0"}, "id 3 came with the log-prob"),
        ({"token_id": 3}, "id 3 came with the log-prob"),
        (None, "id 3 came with the log-prob None"),
    ],
)
def test_what_is_no_log_prob_of_an_id_is_malformed(entry: Any, said: str) -> None:
    given = json.loads(piece([2, 3]))
    given["choices"][0]["logprobs"]["content"][1] = entry
    answer = Answer()
    reader = VllmReader(answer, "http://s", 1)
    with pytest.raises(EngineError, match=f"the answer is malformed: {said}"):
        reader.add(json.dumps(given).encode())
    assert answer.ids == []


def test_an_adapter_keeps_its_version() -> None:
    answer = Answer()
    reader = VllmReader(answer, "http://s", 4, fixed=True)
    reader.add(piece([3, 4], [{"version": "0", "start": 0, "end": 2}], "length"))
    assert answer.versions == [(4, 2)]


def test_the_body_of_a_request() -> None:
    wanted = Wanted([1, 2], Sampling(9, 0.7, stop_ids=(2,), seed=5), 7, "r", "step-1")
    body = request_body(wanted, Features(seeds=True))
    assert body == {
        "token_ids": [1, 2], "stream": True, "request_id": "r", "model": "step-1",
        "sampling_params": {
            "max_tokens": 7, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "stop_token_ids": [2], "ignore_eos": True,
            "detokenize": False, "logprobs": 0, "stream_interval": INTERVAL, "seed": 5,
        },
    }  # fmt: skip


def plan(**changes: Any) -> VllmPlan:
    given = {
        "command": ("python", "-m", "x", "serve"), "model_path": "some/name", "dtype": "bfloat16", "flags": {},
        "max_batch": 4, "token_bytes": 1, "context": 64, "cpu": False,
    }  # fmt: skip
    return VllmPlan(**{**given, **changes})


def test_how_a_server_is_launched() -> None:
    words = plan(flags={"max_num_seqs": 99, "enable-sleep-mode": False}).arguments(31000, 0)
    assert words[:5] == ["python", "-m", "x", "serve", "some/name"]
    assert words[words.index("--max-num-seqs") + 1] == "99"
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--enable-scale-out" in words
    assert "--enable-sleep-mode" not in words
    assert "--weight-transfer-config" not in words
    nccl = plan(weights="from_distributed").arguments(1, 0)
    assert nccl[nccl.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    fed = plan(fed=True, listen="10.0.0.7")
    words = fed.arguments(1, 0)
    assert words[words.index("--weight-transfer-config") + 1] == '{"backend": "ipc"}'
    assert fed.environment(0)["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert '{"backend": "nccl"}' in plan(listen="10.0.0.7").arguments(1, 0)
    for other in (plan(fed=True, weights="from_disk"), plan(fed=True, cpu=True), plan(cpu=True, listen="10.0.0.7")):
        assert "--weight-transfer-config" not in other.arguments(1, 0)
        assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in other.environment(0)
    alone = plan(cpu=True)
    words = alone.arguments(1, 0)
    assert words[words.index("--worker-extension-cls") + 1] == "agentrl_worker.Reload"
    assert (Path(alone.environment(0)["PYTHONPATH"].split(":")[0]) / "agentrl_worker.py").exists()
    assert "--worker-extension-cls" not in plan(cpu=True, command=("docker", "run", "image")).arguments(1, 0)
    adapted = plan(adapter=AdapterNeeds(12, frozenset(["q_proj"]))).arguments(1, 0)
    assert adapted[adapted.index("--max-lora-rank") + 1] == "16"  # vLLM takes some ranks only


def test_an_adapter_is_merged_for_a_server_that_does_not_see_its_file() -> None:
    room = AdapterRoom(enabled=True, rank=16, files=False)
    reason = why_merged(AdapterNeeds(8, frozenset(["q_proj"])), [("http://far", room)])
    assert reason == "http://far reads adapters from files, and does not see this machine's"


def test_servers_of_one_machine_take_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = plan(flags={"tensor_parallel_size": 2})
    assert two.environment(1)["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert two.environment(1)["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert two.environment(0)["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert replace(two, devices=((2, 3),)).environment(0)["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert VllmEngine.launched({"servers": 2, "flags": {"tp": 2}}) == Launched(servers=2, ranks=2, share=0.92)


def test_a_server_on_a_network_asks_for_the_key_on_every_path() -> None:
    guarded = plan(key="k", listen="10.0.0.7")
    words = guarded.arguments(1, 0)
    assert words[words.index("--middleware") + 1] == "agentrl_guard.RequireKey"
    found = guarded.environment(0)
    assert found[GUARDED_BY] == "k"
    assert (Path(found["PYTHONPATH"].split(":")[0]) / "agentrl_guard.py").exists()
    with pytest.raises(UserError, match="in a container that listens on a network"):
        plan(key="k", command=("docker", "run", "image")).environment(0)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/collective_rpc", [], 401),
        ("/collective_rpc", [(b"authorization", b"Bearer other")], 401),
        ("/collective_rpc", [(b"authorization", b"Bearer k")], 200),
        ("/health", [], 200),
    ],
)
async def test_the_guard(monkeypatch: pytest.MonkeyPatch, path: str, headers: Any, status: int) -> None:
    monkeypatch.setenv(GUARDED_BY, "k")
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    await RequireKey(app)({"type": "http", "path": path, "headers": headers}, None, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == status


async def test_the_calls_of_the_transfer_engines(parts: Any) -> None:
    """Their order and their fields; that the bytes arrive: tests/weights/test_vllm_transfer.py."""
    import aiohttp

    async with VllmStandIn(*parts) as server, aiohttp.ClientSession() as session:
        remote = VllmServer(server.url, session)
        layout = [("a", torch.bfloat16, (2, 3))]
        await remote.pause(PauseMode.ABORT)
        await remote.join_nccl(bytes(128), 1, 3)
        await remote.begin()
        await remote.load_broadcast(layout, "g", flush=True)
        await remote.end()
        await remote.leave_group("g")
        await remote.open_packed()
        handles = [(0, 1, 2, 3, 4, 5, gpu, b"handle") for gpu in ("GPU-1", "GPU-2")]
        await remote.load_packed(layout, handles, flush=False)
    names = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    paths, bodies = zip(*server.posted, strict=True)
    assert paths == (
        "/pause?mode=abort", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
        "/reset_prefix_cache?reset_running_requests=true", "/finish_weight_update", "/shutdown_weight_transfer_engine",
        "/init_weight_transfer_engine", "/update_weights",
    )  # fmt: skip
    info = bodies[1]["init_info"]
    assert (info["rank_offset"], info["world_size"]) == (1, 3)
    assert bodies[3] == {"update_info": names}
    assert {k: v for k, v in bodies[8]["update_info"].items() if k != "ipc_handles_pickled"} == {
        **names, "tensor_sizes": [12],
    }  # fmt: skip
