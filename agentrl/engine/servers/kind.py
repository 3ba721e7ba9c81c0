"""`ServerKind`: what one kind of server speaks. All else about servers is the same code for every kind."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from agentrl.cluster.placement import Launched
from agentrl.engine.base import Sampling
from agentrl.engine.servers.answer import Answer, Features, PieceEnd, Wanted, parsed
from agentrl.engine.servers.client import Client, RefusedError, ServerError
from agentrl.engine.servers.identity import ServerFacts
from agentrl.engine.servers.launch import Flag, LaunchPlan, nccl_version, plain_flags, venv_of
from agentrl.engine.servers.pictures import Pictures
from agentrl.engine.servers.settings import Settings
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class AnswerReader(ABC):
    """Reads one server's pieces of an answer into `answer`, each checked whole before it is added. url: names the
    server in errors. version: of the weights when the request starts. fixed: it is that of an adapter, which stays to
    the end, whatever version the server reports."""

    path: ClassVar[str]
    """Of the call that samples, for errors."""

    def __init__(self, answer: Answer, url: str, version: int, fixed: bool = False) -> None:
        self._answer, self._url, self._version, self._fixed = answer, url, version, fixed
        self._start, self._runs = len(answer.ids), len(answer.versions)

    @abstractmethod
    def add(self, payload: bytes) -> PieceEnd | None:
        """Add what is new in a piece, and return why the server is done, or None. Raises ServerError where the piece is
        malformed or holds an error; then nothing of it was added."""

    @abstractmethod
    def give_up(self, sure: int) -> None:
        """Drop the tokens of which nobody knows the weights: these changed meanwhile, and the answer ended early. sure:
        how many ids of the answer came before they changed."""

    def _parsed(self, payload: bytes) -> dict[str, Json]:
        """What a piece says. Raises ServerError: it is malformed, or an error."""
        try:
            piece = parsed(payload)
        except ValueError as error:
            raise self._malformed("not JSON") from error
        if not isinstance(piece, dict):
            raise self._malformed("not a JSON object")
        if "error" in piece:
            raise self._error(piece["error"])
        return piece

    def _for_each(self, ids: Sequence[int], given: Json) -> list[Json]:
        """What was given with the ids, as long as it is a list of as many."""
        if not isinstance(given, list) or len(given) != len(ids):
            count = len(given) if isinstance(given, list) else "no"
            raise self._malformed(f"{len(ids)} ids came with {count} log-probs")
        return given

    def _told_runs(self, spans: Json, total: int) -> list[tuple[int, int]]:
        """The versions of this server's `total` ids, as its spans say (`end` and `version` of each)."""
        covered, runs = 0, []
        for span in spans:
            if not isinstance(span, dict) or type(span.get("end")) is not int:
                raise self._malformed(f"its weight versions are {spans!r:.100}")
            if (end := min(span["end"], total)) > covered:
                name = span.get("version")
                if not str(name).isdecimal():
                    raise ServerError(
                        f"{self._url}: it samples from weights {name!r}, which are of no step of this run"
                    )
                runs.append((int(str(name)), end - covered))
                covered = end
        if covered != total:
            raise self._malformed(f"its weight versions cover {covered} of {total} ids")
        return runs

    def _known_end(self, kind: Json, reason: object) -> PieceEnd:
        """The end of this name, which stands in `reason`."""
        if kind not in list(PieceEnd):
            raise self._malformed(f"finish_reason {reason!r} is unknown")
        return PieceEnd(kind)

    def _error(self, error: Json) -> ServerError:
        code, text = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        refused = isinstance(code, int) and 400 <= code < 500 and code not in (408, 429)
        return (RefusedError if refused else ServerError)(f"{self._url}{self.path}: {' '.join(str(text).split())}")

    def _malformed(self, what: str) -> ServerError:
        return ServerError(f"{self._url}{self.path}: the answer is malformed: {what}")


class ServerKind(ABC):
    """The calls of one kind of server, and how one is launched. It keeps nothing between calls."""

    plan: ClassVar[type[LaunchPlan]]
    """How one is launched, and what its product is called. Its calls about weights are those of that name in
    `weights.kinds.SERVERS`."""
    experts_body: ClassVar[Mapping[str, Json]] = {}
    """What the body of a request has besides where the choices of routers are wanted."""
    experts_env: ClassVar[Mapping[str, str]] = {}
    """Variables that a server needs for telling them."""
    keeps_features: ClassVar[bool] = False
    """Whether a server may go on with the features that old weights gave an image, unless it is launched otherwise."""
    requantized: ClassVar[tuple[str, ...]] = ()
    """Quantizations that a server applies anew to weights that it is given."""
    breaks: ClassVar[bool] = False
    """Whether a server that failed to take weights has to be started again before it can."""
    reader: ClassVar[type[AnswerReader]]
    """What reads the stream that a body asks for."""
    alive: ClassVar[str]
    """Path that answers 200 at once, as long as the server lives."""
    generate: ClassVar[str]
    """Path that samples."""

    @abstractmethod
    def launched(self, servers: int, flags: Mapping[str, Flag]) -> Launched:
        """What so many servers with these flags (names without dashes in front) take of this machine's GPUs.
        Raises ValueError for a flag that should be a number and is not."""

    def fed(self, settings: Settings, *, sleep: bool, workers: int) -> bool:
        """Whether each rank of the launched servers shares its GPU with one of the trainer's `workers`."""
        return (
            sleep and settings.servers * self.launched(settings.servers, plain_flags(settings.flags)).ranks <= workers
        )

    def refused(self, settings: Settings, *, sleep: bool, lora: bool, gpus: bool, workers: int = 1) -> list[str]:
        """List what of the settings of launched servers starts well and fails later. sleep: servers release their
        memory. lora: an adapter is trained, and sent alone. gpus: servers run on GPUs. sharded: the trainer has a
        process on each GPU that it uses."""
        found, flags = [], plain_flags(settings.flags)
        if (ranks := self.launched(settings.servers, flags).ranks) % settings.parts:
            found.append(
                f"engine.args.flags.nnodes: {settings.parts} machines cannot share the {ranks} GPUs of a server evenly"
            )
        if gpus and sleep and settings.weights == "from_distributed":
            found.append(
                "engine.args.weights=from_distributed: NCCL connects no two processes that share a GPU (engine.sleep); "
                "leave it at auto"
            )
        quantization = flags.get("quantization")
        if quantization and not lora and quantization not in self.requantized:
            found.append(
                f"engine.args.flags.quantization: weights of {quantization} cannot be replaced by the trainer's while "
                f"a server runs; set {' or '.join(self.requantized)}, leave it out, or train an adapter (model.lora)"
            )
        return found

    def faults(self, settings: Settings, command: Sequence[str]) -> list[str]:
        """List what the virtual environment of `command` lacks for servers on GPUs. Runs its Python, for a second."""
        venv = venv_of(command)
        if venv is None or settings.weights != "from_distributed":
            return []
        theirs, ours = nccl_version(venv), torch.cuda.nccl.version()
        if theirs == ours:
            return []
        return [
            f"engine.args.weights=from_distributed: NCCL is {_dotted(theirs)} in {venv} and {_dotted(ours)} here, "
            "which do not connect; leave it at auto, or set from_disk"
        ]

    @abstractmethod
    async def facts(self, client: Client) -> ServerFacts:
        """Ask a server about itself. Raises ServerError where it does not answer, UserError where it is of another
        kind."""

    @abstractmethod
    async def check_model(self, client: Client, config: "PretrainedConfig", vocabulary: int, timeout: float) -> None:
        """Raise UserError where it serves another model than `config`, a transformers configuration, describes, or not
        exactly the ids 0 to `vocabulary` - 1. timeout: seconds for each answer that takes computing."""

    @abstractmethod
    async def check_tokenizer(self, client: Client, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raise UserError where its tokenizer gives other ids for a text than ours."""

    @abstractmethod
    async def prompt_logprobs(
        self, client: Client, ids: Sequence[int], adapter: str | None, timeout: float
    ) -> list[float]:
        """Its natural log-probs of ids[1:], at temperature 1. adapter: name of one that it holds. timeout:
        seconds to answer. Raises UserError where it gives none."""

    @abstractmethod
    async def sample_one(self, client: Client, adapter: str | None, timeout: float) -> None:
        """Raise ServerError unless it samples a token within `timeout` seconds."""

    def refusal(self, sampling: Sampling) -> str | None:
        """Why servers of this kind cannot sample so with the log-probs that `Generation` promises; None: they
        can."""
        return None

    @abstractmethod
    def body(self, wanted: Wanted, features: Features) -> dict[str, Json]:
        """The body that asks for more tokens, as a stream."""

    @abstractmethod
    def pictured(self, keyed: Sequence[int], pictures: Pictures, features: Features) -> dict[str, Json]:
        """What a body has in place of the ids, and besides them, for ids of which some are those of images (see
        `agentrl.images.keyed`). Raises EngineError where servers cannot be given them."""

    def lost_adapter(self, error: ServerError, adapter: str) -> bool:
        """Whether a refusal says that the server does not know `adapter`."""
        return adapter in str(error)

    @abstractmethod
    def abort(self, rid: str) -> tuple[str, dict[str, Json]]:
        """Path and body that end a request: what was sampled of it is still sent."""


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version)) or "not there"
