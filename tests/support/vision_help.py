"""A small model that sees, random but the same every time, its chat, pictures, and an engine that plays a script."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from paths import ROOT
from PIL import Image

from agentrl.chat.load import load_chat
from agentrl.engine.base import Engine, Generation, GenerationFinish, Sampling
from agentrl.images import STORE, ImageSpan, keyed
from agentrl.plugins.types import Task
from agentrl.recipe.schema import NewModel
from agentrl.sft.new_model import bare_tokenizer, new_model
from agentrl.trajectory import FinishReason, Trajectory, Turn, check_invariants

TEMPLATE = ROOT / "recipes" / "tiny_vision_template.jinja"
SHAPE = {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 24}
TOWER = {"hidden_size": 32, "intermediate_size": 48}


@cache
def template() -> str:
    return TEMPLATE.read_text(encoding="utf-8").strip()


def seeing_model() -> tuple[Any, Any]:
    """A model whose weights are large enough that every picture, place and position changes its log-probs."""
    tokenizer = bare_tokenizer(template())
    section = NewModel(config=SHAPE, vision=TOWER, vocabulary=512, chat_template=str(TEMPLATE))
    model = new_model(section, tokenizer, seed=0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    return model, tokenizer


def seeing_chat(tokenizer: Any, tools: Sequence[dict[str, Any]] = ()) -> Any:
    return load_chat(tokenizer, model_path="", tools=tools)


def picture(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def sequence(model: Any, *parts: "Image.Image | Sequence[int]") -> tuple[list[int], list[ImageSpan]]:
    """Ids, and the pictures among them, as placeholders between two other tokens."""
    ids: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, Image.Image):
            key = STORE.put(part)
            grid = model.image_input.grid(key)
            tokens = model.image_input.tokens(grid)
            spans.append(ImageSpan(len(ids) + 1, tokens, grid, key))
            ids += [7, *[model.image_input.placeholder] * tokens, 8]
        else:
            ids += part
    return ids, spans


def prompt(model: Any, *parts: Any) -> "np.ndarray":
    return keyed(*sequence(model, *parts))


def trajectory(model: Any, *parts: Any, answer: Sequence[int]) -> Trajectory:
    """One turn after a prompt of ids and pictures."""
    opening, spans = sequence(model, *parts)
    ids = np.array([*opening, *answer], np.int32)
    mask = (np.arange(len(ids)) >= len(opening)).astype(np.uint8)
    t = Trajectory(
        "t", Task("t", {}), 0, ids, mask, -mask.astype(np.float32), mask.astype(np.int32) - 1, len(opening),
        (Turn(len(opening), len(ids)),), (), {}, FinishReason.STOP, images=tuple(spans),
    )  # fmt: skip
    check_invariants(t)
    return t


class Actor(Engine):
    """Says `turns`, one after the other, and keeps the prompts."""

    images = True

    def __init__(self, chat: Any, turns: Sequence[str], context: int = 4096) -> None:
        self._chat, self._turns, self._context = chat, turns, context
        self.prompts: list[list[int]] = []

    @property
    def max_context(self) -> int:
        return self._context

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: Any = None
    ) -> Generation:
        text = self._turns[len(self.prompts)]
        self.prompts.append(list(ids))
        said = [*self._chat.whole_ids(text), self._chat.stop_ids[0]]
        finish = GenerationFinish.STOP if len(said) <= sampling.max_tokens else GenerationFinish.LENGTH
        said = said[: sampling.max_tokens]
        return Generation(said, [-1.0] * len(said), finish)
