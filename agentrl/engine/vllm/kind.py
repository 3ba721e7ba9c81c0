"""`VllmKind`: the API of vLLM 0.32, as far as it is not about weights."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from agentrl.addresses import same_host
from agentrl.cluster.placement import Launched
from agentrl.containment.threads import in_thread
from agentrl.engine.base import Sampling
from agentrl.engine.servers.adapters import AdapterRoom
from agentrl.engine.servers.answer import Features, Wanted
from agentrl.engine.servers.client import Client, RefusedError, ServerError
from agentrl.engine.servers.engine import ServerEngine
from agentrl.engine.servers.identity import (
    PROBE_TEXT,
    ServerFacts,
    check_architecture,
    check_sizes,
    check_vocabulary,
    config_at,
    other_tokenizer,
)
from agentrl.engine.servers.kind import ServerKind
from agentrl.engine.servers.launch import Flag
from agentrl.engine.servers.pictures import Pictures
from agentrl.engine.servers.settings import Settings
from agentrl.engine.vllm.command import VllmPlan, gpus_of
from agentrl.engine.vllm.wire import PATH, PREFIX, VllmReader, pictured, request_body
from agentrl.errors import UserError
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

LOGPROBS = "processed_logprobs"
"""The server's --logprobs-mode: those of the distribution that is sampled from."""
SHARE = 0.92
"""Of a GPU's memory: what a server takes that is not told otherwise."""
_OUTSIDE = re.compile(r"vocab", re.I)


class VllmKind(ServerKind):
    """vLLM 0.32, with the routes that VLLM_SERVER_DEV_MODE=1 and --enable-scale-out open."""

    plan, reader = VllmPlan, VllmReader
    breaks = True
    requantized = ("fp8_per_tensor", "fp8_per_block", "fp8_per_channel")
    alive, generate = "/health", PATH
    experts_env: ClassVar[Mapping[str, str]] = {"VLLM_USE_V2_MODEL_RUNNER": "1"}

    def launched(self, servers: int, flags: Mapping[str, Flag]) -> Launched:
        share = float(flags.get("gpu-memory-utilization") or SHARE)
        return Launched(servers=servers, ranks=gpus_of(flags), share=share)

    def refused(self, settings: Settings, *, sleep: bool, lora: bool, gpus: bool, workers: int = 1) -> list[str]:
        found = super().refused(settings, sleep=sleep, lora=lora, gpus=gpus, workers=workers)
        fed = self.fed(settings, sleep=sleep, workers=workers)
        if gpus and settings.weights == "from_tensor" and not lora and not fed:
            found.append(
                "engine.args.weights=from_tensor: vLLM opens memory of its own GPUs alone, so the trainer has to share "
                "each of them (engine.sleep), with a worker on each if there are several (cluster); leave it at auto"
            )
        return found

    async def facts(self, client: Client) -> ServerFacts:
        try:
            version = await client.get("/version")
            info = await client.get("/server_info?config_format=json")
            weights = await client.get("/weight_info")
        except RefusedError as error:
            raise UserError(
                f"engine: {client.url} does not speak vLLM's API for RL: {error}; start it with "
                "VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
            ) from error
        try:
            near = await in_thread(same_host, client.url)
            config, variables = info["vllm_config"], info["vllm_env"]
            model, lora = config["model_config"], config.get("lora_config")
            mode = model["logprobs_mode"]
            facts = ServerFacts(
                version=str(version["version"]),
                features=Features(
                    seeds=bool(variables.get("VLLM_BATCH_INVARIANT")),
                    incremental=True,
                    raw_pixels=bool((model.get("multimodal_config") or {}).get("mm_device_do_normalize")),
                ),
                max_context=int(model["max_model_len"]),
                weight_version=str(weights["weight_version"]),
                has_tokenizer=not model["skip_tokenizer_init"],
                adapters=AdapterRoom(
                    enabled=lora is not None and bool(variables.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")),
                    rank=None if lora is None else int(lora["max_lora_rank"]),
                    targets=frozenset((lora or {}).get("target_modules") or ()),
                    replicas=int(config["parallel_config"].get("data_parallel_size") or 1),
                    files=near and int(config["parallel_config"].get("nnodes") or 1) == 1,
                ),
                dtype=str(model.get("dtype") or "").removeprefix("torch."),
            )
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"engine: {client.url} answers, but not as a vLLM server does ({error!r})") from error
        if mode != LOGPROBS:
            raise UserError(
                f"engine: {client.url} reports {mode}, not the log-probs of what is sampled: start it with "
                f"--logprobs-mode {LOGPROBS}"
            )
        return facts

    async def check_model(self, client: Client, config: "PretrainedConfig", vocabulary: int, timeout: float) -> None:
        """See `ServerKind`. A server tells where it loaded the model from, not its sizes: they are read from that
        folder, where it is on this machine, or from the local copy of a hub's model."""
        path = str((await client.get("/v1/models"))["data"][0]["root"])
        info = {"model_path": path}
        theirs = await in_thread(config_at, path)
        if theirs is not None:
            check_architecture(client, info, getattr(theirs, "architectures", None) or [], config)
        await check_vocabulary(client, info, vocabulary, lambda token: _knows(client, token, timeout))
        if theirs is not None:
            check_sizes(client, info, theirs, config)

    async def check_tokenizer(self, client: Client, tokenizer: "PreTrainedTokenizerBase") -> None:
        found = await client.post("/tokenize", {"prompt": PROBE_TEXT, "add_special_tokens": False})
        other_tokenizer(client, tokenizer, found.get("tokens") if isinstance(found, dict) else None)

    async def prompt_logprobs(
        self, client: Client, ids: Sequence[int], adapter: str | None, timeout: float
    ) -> list[float]:
        answer = await client.post(PATH, _one_token(ids, adapter, prompt_logprobs=0), timeout=timeout)
        try:
            given = answer["prompt_logprobs"][1:]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(given, ids[1:], strict=True)]
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise UserError(f"engine: {client.url} returns no log-probs of a prompt: {answer!r:.200}") from error

    async def sample_one(self, client: Client, adapter: str | None, timeout: float) -> None:
        answer = await client.post(PATH, _one_token([0], adapter), timeout=timeout)
        if not isinstance(answer, dict) or not answer.get("choices") or not answer["choices"][0].get("token_ids"):
            raise ServerError(f"{client.url}: it returned no token when asked for one")

    def refusal(self, sampling: Sampling) -> str | None:
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k):
            return (
                "vLLM reports log-probs after top-p and top-k, which no trainer computes: leave rollout.top_p at 1 and "
                "rollout.top_k at 0, or choose another engine"
            )
        return None

    def body(self, wanted: Wanted, features: Features) -> dict[str, Json]:
        return request_body(wanted, features)

    def pictured(self, keyed: Sequence[int], pictures: Pictures, features: Features) -> dict[str, Json]:
        return pictured(keyed, pictures, features.raw_pixels)

    def abort(self, rid: str) -> tuple[str, dict[str, Json]]:
        return "/abort_requests", {"request_ids": [PREFIX + rid]}


def _one_token(ids: Sequence[int], adapter: str | None = None, **parameters: object) -> dict[str, Json]:
    sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, **parameters}
    body: dict[str, Json] = {"token_ids": list(ids), "sampling_params": sampling}
    return body if adapter is None else {**body, "model": adapter}


async def _knows(client: Client, token: int, timeout: float) -> bool:
    """Whether an id is in its vocabulary: it refuses to be restricted to another."""
    try:
        await client.post(PATH, _one_token([0], allowed_token_ids=[token]), timeout=timeout)
    except RefusedError as error:
        if _OUTSIDE.search(str(error)):
            return False
        raise
    return True


class VllmEngine(ServerEngine):
    """The engine over vLLM servers; see `ServerEngine`. It samples with top-p and top-k only at temperature 0: the
    server's log-probs are those after them."""

    kind = VllmKind()
