"""`check_trainer`: what the controller relies on in a trainer of another make (`cluster.trainer`), tried with a small
model against our own roles."""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError, call_plugin
from agentrl.testing.hooks import require

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.compute.batch import Batch
    from agentrl.learner.metrics import MicroBatchMetrics
    from agentrl.learner.roles import LocalRoles, RoleHost
    from agentrl.recipe.schema import Recipe

T = TypeVar("T")
Floats = npt.NDArray[np.float32]
RATE = 1e-3
LENGTHS = (11, 7, 16)
"""Tokens of the samples: no two alike, so that an order shows."""
DRIFT = 0.05
"""By how much of their way weights may end elsewhere than ours after updates: Adam enlarges what rounding leaves."""


def check_trainer(
    trainer: str,
    *,
    model: str = "tiny",
    cluster: Mapping[str, Any] | None = None,
    updates: int = 3,
    tolerance: float = 1e-3,
) -> None:
    """Raise AssertionError, one line, for the first promise that a trainer does not keep.

    trainer: as `cluster.trainer` names it, an entry point of `agentrl.trainers` or module:attribute. model: the path
    of a small model, loaded in float32. cluster: other keys of `cluster`, such as `workers` or
    `trainer.args.tensor_parallel`. updates: how many are compared with ours. tolerance: in nats, between its log-probs
    and ours.

    Checked: every member of `RoleHost` is there; log-probs are float32 [T], 0 where nothing was sampled, those of the
    model and in the order of the batch; the weights it gives out are whole, by the names of the Hugging Face model, and
    its own, before and after an update; an update counts, moves the weights as ours does, and takes nothing from tokens
    whose mask is 0; what it saves is a Hugging Face model, and gives the same log-probs and the same next update; a
    folder without a checkpoint is refused as a UserError of one line; `close` can be called twice. A publisher, where
    `weights()` has one, sends those weights through files to a stand-in for an SGLang server, which is paused meanwhile
    and told the step; a server that fails is in the result, and takes the next update; it sleeps and wakes, or the
    publisher says why not. Other transports and real servers are not tried.
    """
    __tracebackhide__ = True
    folder = Path(tempfile.mkdtemp(prefix="agentrl-check-"))
    try:
        _check(trainer, model, cluster or {}, updates, tolerance, folder)
    except UserError as error:
        raise AssertionError(str(error).replace("\n", " ")) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(name: str, path: str, cluster: Mapping[str, Any], updates: int, tolerance: float, folder: Path) -> None:
    from agentrl.learner.roles import LocalRoles, make_trainer
    from agentrl.models.load import load_model
    from agentrl.recipe.load import load_recipe

    keys = {f"cluster.{key}": value for key, value in cluster.items()} | {"cluster.trainer.name": name}
    keys |= {"model.path": path, "model.device": "cpu", "model.dtype": "float32"}
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    ours_recipe = recipe.model_copy(update={"cluster": type(recipe.cluster)()})
    logs = folder / "logs"
    logs.mkdir()
    host = make_trainer(recipe, recipe, logs, lambda line: None, lambda line: None)
    contract = _Contract(f"trainer {name!r}", host, LocalRoles(ours_recipe, load_model(ours_recipe.model)[0]), recipe)
    try:
        contract.computes(tolerance)
        contract.publishes("before an update", tolerance)
        contract.moves(tolerance)
        contract.resumes(folder, tolerance)
        contract.learns(updates, tolerance)
        contract.sends()
        contract.refuses(folder)
    finally:
        contract.call("close", host.close)
    contract.call("close, called again,", host.close)


class _Contract:
    """A trainer, ours with the same weights, and a batch for both."""

    def __init__(self, what: str, host: "RoleHost", ours: "LocalRoles", recipe: "Recipe") -> None:
        self.what, self.host, self.ours = what, host, ours
        self.batch = _batch(int(ours.model.config.vocab_size), recipe.train.seed)

    def call(self, method: str, function: Callable[..., T], *arguments: object) -> T:
        """What a method of the trainer returns; raises UserError, one line, for whatever it raises."""
        return call_plugin(f"{self.what}: {method}", function, *arguments)

    def logprobs(self, batch: "Batch") -> Floats:
        """The trainer's log-probs, float32 [T], once their form is right."""
        found = self.call("actor.logprobs", self.host.actor.logprobs, batch)
        wanted = (int(batch.offsets[-1]),)
        form = f"{getattr(found, 'dtype', type(found).__name__)} {list(np.shape(found))}"
        require(
            isinstance(found, np.ndarray) and found.dtype == np.float32 and found.shape == wanted,
            f"{self.what}: actor.logprobs gave {form}; expected a numpy array, float32 {list(wanted)}: a value for "
            f"each token of the batch",
        )
        require(np.isfinite(found).all(), f"{self.what}: actor.logprobs gave a value that is not finite")
        off = np.flatnonzero((batch.tokens["loss_mask"] == 0) & (found != 0))
        require(
            not len(off),
            f"{self.what}: actor.logprobs is not 0 at {len(off)} tokens that were not sampled (loss_mask 0)",
        )
        return found

    def computes(self, tolerance: float) -> None:
        """Check log-probs against ours, and their order."""
        found, ours = self.logprobs(self.batch), self.ours.actor.logprobs(self.batch)
        require(
            _apart(found, ours) <= tolerance,
            f"{self.what}: actor.logprobs is {_apart(found, ours):.2g} nats from log softmax(logits / temperature) of "
            f"the sampled ids under the weights it began with; at most {tolerance:g} is allowed",
        )
        order = np.array([2, 0, 1])
        turned = self.logprobs(self.batch.select(order))
        require(
            _apart(turned, found[self.batch.positions(order)]) <= tolerance,
            f"{self.what}: actor.logprobs of the same samples in another order are not the same values in that order",
        )
        self.logprobs(self.batch.select([1]))  # fewer samples than ranks

    def publishes(self, when: str, tolerance: float) -> None:
        """Check that the weights it gives out, put into a Hugging Face model, give its own log-probs."""
        given = self.weights()
        with _loaded(self.ours, given):
            found = self.ours.actor.logprobs(self.batch)
        own = self.logprobs(self.batch)
        require(
            _apart(found, own) <= tolerance,
            f"{self.what}: a model with the tensors of weights() {when} is {_apart(found, own):.2g} nats from its own "
            f"log-probs: they are not its weights, or not in Hugging Face's layout",
        )

    def weights(self) -> "dict[str, Tensor]":
        """The tensors of `weights()`, copied, once names and shapes are right."""
        from agentrl.weights.source import ModelWeights

        source = self.call("weights", self.host.weights)
        require(source is not None, f"{self.what}: weights() is None: no engine could get its weights")
        read = self.call("weights", lambda: [(name, tensor.detach().cpu().clone()) for name, tensor in source or ()])
        given, wanted = dict(read), dict(ModelWeights(self.ours.model))
        require(len(given) == len(read), f"{self.what}: weights() gives a name twice")
        missing, strange = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
        require(not missing, f"{self.what}: weights() lacks {len(missing)} of the model's tensors: {_few(missing)}")
        require(not strange, f"{self.what}: weights() gives names that the model has not: {_few(strange)}")
        for name, tensor in given.items():
            require(
                tensor.shape == wanted[name].shape,
                f"{self.what}: weights() gives {name} as {list(tensor.shape)}; it is {list(wanted[name].shape)}",
            )
        return given

    def update(self, batch: "Batch") -> "MicroBatchMetrics":
        """Let the trainer make one update, and check what it says of it."""
        from agentrl.learner.metrics import MicroBatchMetrics

        actor = self.host.actor
        before = actor.updates
        metrics = self.call("actor.update", actor.update, batch, RATE)
        require(
            isinstance(metrics, MicroBatchMetrics),
            f"{self.what}: actor.update returned {type(metrics).__name__}; expected MicroBatchMetrics",
        )
        require(
            actor.updates == before + 1,
            f"{self.what}: actor.updates went from {before} to {actor.updates} by one update; expected {before + 1}",
        )
        require(
            len(metrics.norms) == 1 and math.isfinite(metrics.norms[0]),
            f"{self.what}: the metrics of one update hold the gradient norms {metrics.norms}; expected one, finite",
        )
        return metrics

    def moves(self, tolerance: float) -> None:
        """Check that an update changes the weights, and those that are given out with them."""
        begun = self.logprobs(self.batch)
        self.update(self.batch)
        self.publishes("after an update", tolerance)
        require(
            _apart(self.logprobs(self.batch), begun) > 0,
            f"{self.what}: actor.logprobs are the same after an update at a rate of {RATE:g}",
        )

    def resumes(self, folder: Path, tolerance: float) -> None:
        """Check that a checkpoint brings back log-probs and the next update, which masked tokens do not change."""
        from transformers import AutoModelForCausalLM

        saved, expected = folder / "saved", self.logprobs(self.batch)
        saved.mkdir()
        self.call("save", lambda: self.host.save(saved).result())
        exported = self.call("save", AutoModelForCausalLM.from_pretrained, str(saved))
        with _loaded(self.ours, dict(exported.named_parameters())):
            found = self.ours.actor.logprobs(self.batch)
        require(
            _apart(found, expected) <= tolerance,
            f"{self.what}: the Hugging Face model that save wrote is {_apart(found, expected):.2g} nats from it",
        )
        norm = self.update(self.batch).norms[0]  # before clipping, which hides a scale
        once = self.weights()
        for batch, line in (
            (self.batch, "load does not bring back all that an update depends on: the same update ends elsewhere"),
            (_spoiled(self.batch), "an update takes something from tokens whose loss_mask is 0"),
        ):
            self.call("load", self.host.load, saved)
            require(
                _apart(self.logprobs(self.batch), expected) <= tolerance / 10,
                f"{self.what}: log-probs after load are {_apart(self.logprobs(self.batch), expected):.2g} nats from "
                f"those at save",
            )
            renorm = self.update(batch).norms[0]
            again = self.weights()
            require(
                math.isclose(norm, renorm, rel_tol=tolerance),
                f"{self.what}: {line} (a gradient norm of {renorm:.6g}, not {norm:.6g})",
            )
            apart = max(float((again[name] - once[name]).abs().max()) for name in once)
            require(apart <= DRIFT * RATE, f"{self.what}: {line} (a weight differs by {apart:.2g})")
        self.ours.actor.update(self.batch, RATE)
        self.ours.actor.update(self.batch, RATE)

    def learns(self, updates: int, tolerance: float) -> None:
        """Check updates against ours: gradient norms, and where the weights end."""
        begun = self.weights()
        for i in range(updates):
            theirs, ours = self.update(self.batch), self.ours.actor.update(self.batch, RATE)
            require(
                math.isclose(theirs.norms[0], ours.norms[0], rel_tol=10 * tolerance),
                f"{self.what}: the gradient norm of update {i + 3} is {theirs.norms[0]:.6g}; ours is "
                f"{ours.norms[0]:.6g}: it is that of the sum over tokens of weight x loss",
            )
            require(
                theirs.predictions == ours.predictions,
                f"{self.what}: the metrics count {theirs.predictions} predictions; {ours.predictions} tokens were "
                f"sampled",
            )
        ended = self.weights()
        named = dict(self.ours.model.named_parameters())
        total = sum(float((ended[name] - begun[name]).norm() ** 2) for name in begun) ** 0.5
        apart = sum(float((ended[name] - named[name].detach()).norm() ** 2) for name in begun) ** 0.5
        require(
            apart <= DRIFT * total,
            f"{self.what}: after {updates + 2} updates the weights are {apart:.2g} from ours, of {total:.2g} that they "
            f"moved in the last {updates}",
        )

    def sends(self) -> None:
        """Check the publisher, where there is one, against a stand-in for a server."""
        from agentrl.weights.request import WeightRequest, WeightResult

        given = self.weights()
        source = self.call("weights", self.host.weights)
        if source is None or (publisher := source.publisher) is None:
            return
        what = f"{self.what}: weights().publisher"

        def publish(version: int) -> dict[str, str]:
            server.tensors.clear()
            found = self.call("weights().publisher.publish", publisher.publish, WeightRequest((server.url,), version))
            require(
                isinstance(found, WeightResult),
                f"{what}.publish returned {type(found).__name__}; expected WeightResult",
            )
            return dict(found.failed)

        def holds(version: int) -> None:
            failed = publish(version)
            require(not failed, f"{what}.publish failed at a server that takes everything: {failed}")
            require(server.version == str(version), f"{what}.publish left the server at version {server.version!r}")
            require(not server.paused, f"{what}.publish did not resume the server (/continue_generation)")
            require(
                server.tensors.keys() == given.keys() and not server.loaded_running,
                f"{what}.publish loaded {len(server.tensors)} of {len(given)} tensors by the names of weights()"
                f"{', while the server was not paused (/pause_generation)' if server.loaded_running else ''}",
            )
            off = [name for name, tensor in given.items() if (server.tensors[name] != tensor).any()]
            require(not off, f"{what}.publish sent other weights than weights() gives: {_few(off)}")

        with _StandIn() as server:
            self.call("weights().publisher.open", publisher.open, None, "from_disk", None, "sglang", None)
            try:
                holds(1)
                server.broken = True
                failed = publish(2)
                require(
                    failed.keys() == {server.url},
                    f"{what}.publish says that {sorted(failed) or 'no server'} failed; {server.url} did",
                )
                server.broken = False
                holds(3)
                if not self.call("weights().publisher.sleep", publisher.sleep, [server.url]):  # else it says why not
                    require(server.sleeps, f"{what}.sleep says that the server sleeps; it was not asked to")
                    failed = self.call("weights().publisher.wake", publisher.wake)
                    require(not failed, f"{what}.wake failed at a server that takes everything: {failed}")
                    require(not server.sleeps, f"{what}.wake did not wake the server")
                    holds(4)
            finally:
                self.call("weights().publisher.close", publisher.close)
            self.call("weights().publisher.close, called again,", publisher.close)

    def refuses(self, folder: Path) -> None:
        """Check that a folder without a checkpoint is a UserError of one line."""
        empty = folder / "empty"
        empty.mkdir()
        try:
            self.host.load(empty)
        except UserError as error:
            require("\n" not in str(error), f"{self.what}: load of a folder without a checkpoint says several lines")
        except Exception as error:
            raise AssertionError(
                f"{self.what}: load of a folder without a checkpoint raised {type(error).__name__}; expected UserError"
            ) from error
        else:
            raise AssertionError(f"{self.what}: load took a folder without a checkpoint")


class _StandIn:
    """A server on this machine that answers as SGLang does to what is asked about weights, and keeps them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """What was loaded last, by its names."""
        self.version = "default"
        self.paused = self.sleeps = self.loaded_running = False
        self.broken = False
        """Whether it refuses all that is posted."""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                facts = {"device": "stand-in", "dtype": "float32", "tp_size": 1, "version": "check_trainer"}
                self._answer(200, {**facts, "weight_version": stand_in.version})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                if stand_in.broken:
                    self._answer(500, {"error": "broken, to see what becomes of it"})
                else:
                    self._answer(200, stand_in.take(self.path, body))

            def _answer(self, status: int, found: object) -> None:
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *arguments: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked for; return the answer."""
        from safetensors.torch import load_file

        match path:
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/update_weight_version":
                self.version = str(body["new_version"])
            case "/update_weights_from_disk":
                self.loaded_running |= not self.paused
                for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                    self.tensors |= load_file(file)
            case "/release_memory_occupation":
                self.sleeps = True
            case "/resume_memory_occupation":
                self.sleeps = False
            case "/weights_checker":
                return {"success": True, "ranks": [{"checksums": {}}]}
        return {"success": True}

    def __enter__(self) -> "_StandIn":
        Thread(target=self._server.serve_forever, daemon=True, name="agentrl-stand-in").start()
        return self

    def __exit__(self, *about: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _loaded:  # noqa: N801 - used as a function
    """Our model with other weights, for the time of a `with`."""

    def __init__(self, ours: "LocalRoles", weights: "Mapping[str, Tensor]") -> None:
        self._named, self._weights = dict(ours.model.named_parameters()), weights

    def __enter__(self) -> None:
        self._before = {name: tensor.detach().clone() for name, tensor in self._named.items()}
        self._put(self._weights)

    def __exit__(self, *about: object) -> None:
        self._put(self._before)

    def _put(self, weights: "Mapping[str, Tensor]") -> None:
        import torch

        with torch.no_grad():
            for name, tensor in weights.items():
                self._named[name].copy_(tensor)


def _batch(vocabulary: int, seed: int) -> "Batch":
    """Three samples in two turns each, with tokens of a tool between; the last also ends unsampled."""
    from agentrl.compute.batch import Batch

    rng = np.random.default_rng(seed)
    total = sum(LENGTHS)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    mask = np.zeros(total, np.uint8)
    for start, end in pairwise(offsets):
        mask[start + 3 : end] = 1
        mask[start + 5] = 0
    mask[-1] = 0
    sampled = mask.astype(np.float32)
    weight = (0.5 + rng.random(total)).astype(np.float32) * sampled
    return Batch(
        offsets,
        {
            "ids": rng.integers(0, vocabulary, total).astype(np.int32),
            "loss_mask": mask,
            "logprobs": (-rng.random(total) * 3).astype(np.float32) * sampled,
            "advantages": rng.normal(size=total).astype(np.float32) * sampled,
            "weight": weight / weight.sum(),
        },
        {
            "prompt_length": np.full(len(LENGTHS), 3, np.int32),
            "group": np.arange(len(LENGTHS)),
            "reward": np.zeros(len(LENGTHS), np.float32),
        },
    )


def _spoiled(batch: "Batch") -> "Batch":
    """The batch with values where nothing was sampled, which nobody may read."""
    off = batch.tokens["loss_mask"] == 0
    return batch.with_tokens(
        **{name: np.where(off, 7, batch.tokens[name]).astype(np.float32) for name in ("advantages", "weight")}
    )


def _apart(one: Floats, other: Floats) -> float:
    """The largest difference."""
    return float(np.abs(one - other).max())


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
