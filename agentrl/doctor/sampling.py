"""Checks of the engine: it starts, samples what the trainer computes, takes weights, and gives memory back."""

import asyncio
import copy
import gc
import inspect
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import Parameter

from agentrl.chat.base import Seeing
from agentrl.doctor.check import CheckError, NotHereError
from agentrl.doctor.computing import EXACT, free_memory, gap
from agentrl.doctor.subject import Subject
from agentrl.doctor.trainer import HereTrainer, Trainer
from agentrl.engine.base import Engine, Generation, GenerationFinish, Sampling, engine_class
from agentrl.engine.local.engine import LocalEngine
from agentrl.errors import describe
from agentrl.images import keyed, stored
from agentrl.models.load import embeddings
from agentrl.models.lora import adapter_parameters
from agentrl.plugins.types import Message
from agentrl.weights.channel import TRANSPORTS

if TYPE_CHECKING:
    pass

TEXT = "A shop sells 7 pens for 3 coins each. How much do they cost together?"
REQUESTS, TOKENS = 8, 32
SIDE = 96
"""Pixels of the side of the picture that models that see are shown."""
LOCAL = "local"
GIVEN_BACK = 1 << 16
"""Bytes that an engine on a CPU frees at least as it goes to sleep; on a GPU, a thousand times as much."""


def engine(subject: Subject) -> str:
    """The engine starts, and several requests sample at once."""
    section = subject.recipe.engine
    if missing := engine_class(section.name).missing(subject.recipe):
        raise NotHereError(missing[0])
    began = perf_counter()
    player = subject.player
    started, began = perf_counter() - began, perf_counter()
    turns = subject.wait(lambda: _sample(player.engine, prompt_of(subject)))
    seconds = perf_counter() - began
    vocabulary = embeddings(player.model).shape[0]
    for turn in turns:
        _check_turn(turn, vocabulary)
    tokens = sum(len(turn.ids) for turn in turns)
    return f"started in {started:.1f} s; {tokens / seconds:,.0f} tokens/s in {REQUESTS} requests"


async def _sample(engine: Engine, prompt: list[int]) -> list[Generation]:
    asked = [(f"doctor/{i}", Sampling(TOKENS, seed=i)) for i in range(REQUESTS)]
    turns = await asyncio.gather(*(engine.generate(prompt, sampling, name) for name, sampling in asked))
    for name, _ in asked:
        engine.finish(name)
    return list(turns)


def _check_turn(turn: Generation, vocabulary: int) -> None:
    if not turn.ids or len(turn.ids) != len(turn.logprobs):
        raise CheckError(f"the engine returned {len(turn.ids)} tokens with {len(turn.logprobs)} log-probs")
    if not all(0 <= i < vocabulary for i in turn.ids):
        raise CheckError(f"the engine returned ids outside the vocabulary of {vocabulary}")
    if not all(-1e4 < p <= 1e-5 for p in turn.logprobs):
        raise CheckError("the engine returned log-probs that are not finite, or above 0")
    if turn.finish is GenerationFinish.ABORT:
        raise CheckError("the engine aborted a request that nobody aborted")


def prompt_of(subject: Subject, turned: bool = False) -> list[int]:
    """The ids of a short conversation, as the recipe's chat renders it: about a picture where the model sees,
    which may be turned upside down."""
    chat = subject.player.chat
    if subject.apart or not (isinstance(chat, Seeing) and subject.player.engine.images):
        return list(chat.render([{"role": "user", "content": TEXT}], []))
    image = {"type": "image", "image": _picture(turned)}
    messages: list[Message] = [stored({"role": "user", "content": [image, {"type": "text", "text": TEXT}]})]
    ids = chat.render(messages, [])
    return list(map(int, keyed(ids, chat.images_in(ids, messages))))


def _picture(turned: bool) -> Any:
    """A picture whose every part is told from every other by its color."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] * (255 / SIDE)
    pixels = np.stack([x, y, 255 - y], -1).astype(np.uint8)
    return Image.fromarray(pixels[::-1].copy() if turned else pixels)


def parity(subject: Subject) -> str:
    """Greedy sampling: the engine takes the tokens that the trainer finds likeliest, with its log-probs. Of a model
    that sees the prompt shows a picture, and the trainer must find the turn less fitting after another one."""
    player, trainer = subject.player, subject.trainer
    prompt = prompt_of(subject)
    turn, second = (subject.wait(lambda: greedy(player.engine, prompt)) for _ in range(2))
    subject.rest(player.engine)
    if (wrong := compare(turn, trainer, prompt, subject.half)) is not None:
        raise CheckError(wrong)
    same = "the same tokens twice" if second.ids == turn.ids else "other tokens the second time (rounding)"
    wanted = trainer.logprobs(prompt, turn.ids)
    off = (torch.tensor(turn.logprobs) - wanted).abs()
    seen = ""
    if min(prompt) < 0:
        other = (torch.tensor(turn.logprobs) - trainer.logprobs(prompt_of(subject, True), turn.ids)).abs()
        if float(other.mean()) <= max(2 * float(off.mean()), EXACT):
            raise CheckError("engine and trainer do not see the picture: upside down it changes no log-prob")
        seen = f" about a picture, which upside down would change them by {float(other.mean()):.2g}"
    subject.publish(player.engine, trainer)
    return f"{len(turn.ids)} tokens{seen}, log-probs differ by {float(off.mean()):.2g} nats in the mean; {same}"


async def greedy(engine: Engine, prompt: list[int]) -> Generation:
    """A turn of the likeliest tokens."""
    try:
        return await engine.generate(prompt, Sampling(TOKENS, temperature=0), "doctor/greedy")
    finally:
        engine.finish("doctor/greedy")


def compare(turn: Generation, trainer: Trainer, prompt: list[int], half: bool) -> str | None:
    """Why a greedy turn is not the trainer's, or None. half: either computes in half precision."""
    wanted = trainer.logprobs(prompt, turn.ids)
    found = torch.tensor(turn.logprobs)
    wrong = gap(found, wanted, half) or _unlikely(turn, trainer, prompt, wanted, half)
    return wrong and f"engine and trainer differ: {wrong}"


def _unlikely(turn: Generation, trainer: Trainer, prompt: list[int], wanted: Tensor, half: bool) -> str | None:
    """Which token is not the likeliest, by more than log-probs may differ."""
    best = trainer.likeliest(prompt, turn.ids)
    if best is None or gap(best, wanted, half) is None:
        return None
    place = int((best - wanted).argmax())
    return f"token {place} of a greedy turn is {float((best - wanted)[place]):.2g} nats less likely than the likeliest"


def weights(subject: Subject) -> str:
    """New weights reach the engine as the recipe says, and are noticed where they are others than the trainer's."""
    return updated(subject, subject.player.engine, subject.trainer)


def updated(subject: Subject, engine: Engine, trainer: Trainer) -> str:
    """Change the trainer's weights, give them to the engine, compare; and once more with those from before, where the
    trainer has kept them. Returns how long an update took."""
    prompt = prompt_of(subject)

    def differ(turn: Generation) -> str | None:
        subject.rest(engine)
        return compare(turn, trainer, prompt, subject.half)

    first = subject.wait(lambda: greedy(engine, prompt))
    if (wrong := differ(first)) is not None:
        raise CheckError(f"before an update {wrong}")  # and it keeps what it has computed with these weights
    with trainer.changed(prompt, first.ids):
        if differ(first) is None:
            raise CheckError("wrong weights were not noticed: changing them did not change the log-probs")
        seconds = subject.publish(engine, trainer)
        if (wrong := differ(subject.wait(lambda: greedy(engine, prompt)))) is not None:
            raise CheckError(f"after an update {wrong}")
    subject.publish(engine, trainer)
    if (wrong := differ(subject.wait(lambda: greedy(engine, prompt)))) is not None:
        raise CheckError(f"after a second update {wrong}")
    subject.publish(engine, trainer)
    size = sum(p.nbytes for p in subject.player.model.parameters()) / 1e9
    return f"{seconds:.2f} s for {size:.3g} GB; wrong weights were noticed"


def transports(subject: Subject) -> str:
    """A weight update by every other way that the engine knows."""
    name = subject.recipe.engine.name
    if name == LOCAL and subject.apart:
        raise NotHereError("the engine `local` takes the weights of workers in one way only")
    if name == LOCAL:
        return _local_ways(subject)
    if "weights" not in inspect.signature(engine_class(name)).parameters:
        raise NotHereError(f"the engine {name} has one way only to take weights")
    found = {way: _by_transport(subject, way) for way in TRANSPORTS if way != "auto"}
    asked = subject.recipe.engine.args.get("weights", "auto")
    if asked != "auto" and found[asked][0] is False:
        raise CheckError(f"{asked}: {found[asked][1]}", "engine.args.weights: auto")
    if not any(works for works, _ in found.values()):
        raise CheckError("; ".join(f"{way}: {line}" for way, (_, line) in found.items()))
    return "; ".join(f"{way}: {line}" for way, (_, line) in found.items())


def _local_ways(subject: Subject) -> str:
    """A copy that follows the trainer's model, and one that is given the weights tensor by tensor."""
    model = subject.player.model
    ways = {"copied": (LocalEngine(model, max_batch=REQUESTS, overlap=True), HereTrainer(model))}
    if not adapter_parameters(model):
        ways["received"] = (LocalEngine(copy.deepcopy(model), max_batch=REQUESTS), HereTrainer(model, received=True))
    lines = []
    for way, (made, trainer) in ways.items():
        lines.append(f"{way} {updated(subject, made, trainer)}")
        subject.wait(made.close)
    return "; ".join(lines)


def _by_transport(subject: Subject, way: str) -> tuple[bool, str]:
    """Start the engine anew with a transport. Returns whether it works, and a line."""
    recipe = subject.recipe
    recipe = recipe.changed(engine={"args": {**recipe.engine.args, "weights": way}})
    try:
        subject.adopt(subject.build(recipe))
        return True, updated(subject, subject.player.engine, subject.trainer)
    except Exception as error:  # noqa: BLE001 - the next transport is tried all the same
        return False, f"cannot be used here: {describe(error)}"
    finally:
        subject.free(workers=False)


def sleep(subject: Subject) -> str:
    """The engine gives memory back while it sleeps, and samples the same once it is awake."""
    recipe = subject.recipe
    if recipe.engine.name != LOCAL and not recipe.engine.sleep:
        raise NotHereError("engine.sleep is off")
    if recipe.engine.name != LOCAL and not torch.cuda.is_available():
        raise NotHereError("a server on a CPU frees nothing")
    player, prompt = subject.player, prompt_of(subject)
    turn = subject.wait(lambda: greedy(player.engine, prompt))
    before = _held(subject)
    subject.wait(player.engine.sleep)
    freed = before - _held(subject)
    subject.publish(player.engine, subject.trainer)
    least = GIVEN_BACK * (1000 if subject.device.type == "cuda" else 1)
    if freed < least:
        raise CheckError(f"the engine gave back {freed / 1e6:.1f} MB as it went to sleep")
    again = subject.wait(lambda: greedy(player.engine, prompt))
    subject.rest(player.engine)
    if (wrong := compare(again, subject.trainer, prompt, subject.half)) is not None:
        raise CheckError(f"once awake {wrong}")
    subject.publish(player.engine, subject.trainer)
    same = "the same tokens" if again.ids == turn.ids else "other tokens (rounding)"
    return f"{freed / 1e6:,.1f} MB given back; {same} once awake"


def _held(subject: Subject) -> float:
    """The bytes that are taken: on a GPU by all processes, on a CPU by the tensors of this one."""
    gc.collect()
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()
        return -free_memory(subject.device)
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}
    return float(sum(storages.values()))
