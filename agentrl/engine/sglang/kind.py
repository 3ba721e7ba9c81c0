"""`SglangKind`: SGLang's API."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from agentrl.cluster.placement import Launched
from agentrl.engine.servers.answer import Features, Wanted
from agentrl.engine.servers.client import Client, ServerError
from agentrl.engine.servers.compilers import compilers_missing, cuda_built_for, remedy_for
from agentrl.engine.servers.engine import ServerEngine
from agentrl.engine.servers.identity import ServerFacts
from agentrl.engine.servers.kind import ServerKind
from agentrl.engine.servers.launch import Flag, plain_flags, venv_of
from agentrl.engine.servers.pictures import Pictures
from agentrl.engine.servers.settings import Settings
from agentrl.engine.sglang.command import SglangPlan, memory_saver_fault, ranks_of, stages_of, tensors_of
from agentrl.engine.sglang.identity import check_model, check_tokenizer, facts_of
from agentrl.engine.sglang.wire import Reader, pictured, request_body
from agentrl.errors import UserError
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class SglangKind(ServerKind):
    """SGLang 0.5."""

    plan, reader = SglangPlan, Reader
    alive, generate = "/model_info", "/generate"
    experts_body: ClassVar[Mapping[str, Json]] = {"return_routed_experts": True}
    keeps_features = True
    requantized = ("fp8",)

    def launched(self, servers: int, flags: Mapping[str, Flag]) -> Launched:
        first, share = flags.get("base-gpu-id"), flags.get("mem-fraction-static")
        return Launched(
            servers=servers,
            ranks=ranks_of(flags),
            first=None if first is None else int(first),
            share=None if share is None else float(share),
        )

    def refused(self, settings: Settings, *, sleep: bool, lora: bool, gpus: bool, workers: int = 1) -> list[str]:
        flags, found = plain_flags(settings.flags), []
        replicas = flags.get("dp-size") or flags.get("dp") or flags.get("data-parallel-size") or 1
        if str(replicas) != "1":
            found.append(
                "engine.args.flags.dp-size: SGLang takes no new weights with replicas behind one address; set "
                f"engine.args.servers={settings.servers * int(replicas)} instead"
            )
        if (stages := stages_of(flags)) > 1:
            found.append(
                "engine.args.flags.pp-size: SGLang answers before all stages of a pipeline have loaded weights; set "
                f"engine.args.flags.tp-size={stages * tensors_of(flags)} instead"
            )
        if flags.get("quantization") == "fp8" and not lora and flags.get("load-format") != "flash_rl":
            found.append(
                "engine.args.flags.quantization: SGLang quantizes the trainer's weights as they come only where it was "
                "started for that: set engine.args.flags.load-format=flash_rl (Qwen2 and Qwen3, without experts)"
            )
        if gpus and sleep and not flags.get("enable-memory-saver"):
            found.append("engine.sleep releases nothing of a server without engine.args.flags.enable-memory-saver=true")
        return found + super().refused(settings, sleep=sleep, lora=lora, gpus=gpus, workers=workers)

    def faults(self, settings: Settings, command: Sequence[str]) -> list[str]:
        venv, found = venv_of(command), []
        if venv is None:
            return super().faults(settings, command)
        plan = SglangPlan(tuple(command), "", "", settings.flags, 1, 1, 1, cpu=False, env=settings.env)
        environment, cuda = plan.environment(), cuda_built_for(venv)
        if absent := compilers_missing(venv, environment, cuda):
            found.append(
                "engine sglang: a server compiles kernels as it starts, without which it ends, and finds no "
                f"{' and no '.join(absent.values())}: {remedy_for(absent, venv, cuda)}"
            )
        saver = plain_flags(settings.flags).get("enable-memory-saver")
        if saver and (why := memory_saver_fault(venv, environment)) is not None:
            found.append(f"engine.args.flags.enable-memory-saver: servers of {venv} would not start: {why}")
        return found + super().faults(settings, command)

    async def facts(self, client: Client) -> ServerFacts:
        return await facts_of(client)

    async def check_model(self, client: Client, config: "PretrainedConfig", vocabulary: int, timeout: float) -> None:
        await check_model(client, config, vocabulary, timeout)

    async def check_tokenizer(self, client: Client, tokenizer: "PreTrainedTokenizerBase") -> None:
        await check_tokenizer(client, tokenizer)

    async def prompt_logprobs(
        self, client: Client, ids: Sequence[int], adapter: str | None, timeout: float
    ) -> list[float]:
        body = _one_token(ids, adapter) | {"return_logprob": True, "logprob_start_len": 0}
        answer = await client.post("/generate", body, timeout=timeout)
        try:
            return [float(pair[0]) for pair in answer["meta_info"]["input_token_logprobs"][1:]]
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise UserError(f"engine: {client.url} returns no log-probs of a prompt: {answer!r:.200}") from error

    async def sample_one(self, client: Client, adapter: str | None, timeout: float) -> None:
        answer = await client.post("/generate", _one_token([0], adapter), timeout=timeout)
        if not isinstance(answer, dict) or not answer.get("output_ids"):
            raise ServerError(f"{client.url}: it returned no token when asked for one")

    def body(self, wanted: Wanted, features: Features) -> dict[str, Json]:
        return request_body(wanted, features)

    def pictured(self, keyed: Sequence[int], pictures: Pictures, features: Features) -> dict[str, Json]:
        """See `ServerKind.pictured`. An id of the placeholder that the model sampled cannot be told from an image."""
        return pictured(keyed, pictures)

    def abort(self, rid: str) -> tuple[str, dict[str, Json]]:
        return "/abort_request", {"rid": rid}


def _one_token(ids: Sequence[int], adapter: str | None) -> dict[str, Json]:
    body: dict[str, Json] = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    return body if adapter is None else {**body, "lora_path": adapter}


class SglangEngine(ServerEngine):
    """The engine over SGLang servers; see `ServerEngine`."""

    kind = SglangKind()
