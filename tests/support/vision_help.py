"""A small model that sees, random but the same every time, its chat, pictures, and an engine that plays a script."""

import io
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from paths import ROOT
from PIL import Image

from agentrl.chat.load import load_chat
from agentrl.engine.base import Engine, Generation, GenerationFinish, Sampling
from agentrl.fine_tuning.new_model import bare_tokenizer, new_model
from agentrl.images import STORE, ImageSpan, keyed
from agentrl.models.image_families import FAMILIES
from agentrl.models.image_input import ImageInput
from agentrl.plugins.types import Task
from agentrl.recipe.sections.sft import NewModel
from agentrl.trajectory import FinishReason, Group, Trajectory, Turn, check_invariants

TEMPLATE = ROOT / "recipes" / "tiny_vision_template.jinja"
SHAPE = {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 24}
TOWER = {"hidden_size": 32, "intermediate_size": 48}


@cache
def template() -> str:
    return TEMPLATE.read_text(encoding="utf-8").strip()


ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 4, 4]}
PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (ROPE, {**PATCHES, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 48}),
    "qwen2_5_vl": (
        ROPE,
        {**PATCHES, **TOWER, "out_hidden_size": 48, "window_size": 32, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl_moe": (
        ROPE,
        {**PATCHES, **TOWER, "out_hidden_size": 48, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": (ROPE, {**PATCHES, **TOWER, "out_hidden_size": 48, "num_position_embeddings": 64}),
    "qwen3_5_moe": (ROPE, {**PATCHES, **TOWER, "out_hidden_size": 48, "num_position_embeddings": 64}),
}
"""Of other model types: positions of the text model, and the tower."""
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
"""Of those of Qwen3.5: layers without keys and values, whose state runs along a sequence."""
GEMMAS: dict[str, dict[str, Any]] = {
    "gemma4": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "gemma4_both_ways": {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
}
"""Gemma 4: small, with embeddings for each layer and shared keys; large, with images seen in both directions."""
RECURRENT = ("qwen3_5", "qwen3_5_moe")
KINDS = ("qwen3_vl", *OTHERS, *GEMMAS)


def seeing_model(kind: str = "qwen3_vl", **changed: Any) -> tuple[Any, Any]:
    """A model whose weights are large enough that every picture, place and position changes its log-probs. changed: of
    its text part's configuration."""
    tokenizer = bare_tokenizer(template())
    section = NewModel(config=SHAPE, vision=TOWER, vocabulary=512, chat_template=str(TEMPLATE))
    model = new_model(section, tokenizer, seed=0)
    if kind in GEMMAS:
        model = _gemma(model, tokenizer, GEMMAS[kind] | changed)
    elif kind != "qwen3_vl":
        model = _other(kind, model, tokenizer, changed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "linear_attn" not in name:  # whose states would magnify rounding
            parameter.data *= 4
    return model, tokenizer


def _other(kind: str, model: Any, tokenizer: Any, changed: dict[str, Any]) -> Any:
    """A model of another type, with the image processor of `model`."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    rope, vision = OTHERS[kind]
    old = model.config
    text = {**old.text_config.to_dict(), "rope_parameters": rope, **(EXPERTS if "moe" in kind else {})}
    del text["model_type"]
    text |= LINEAR if kind in RECURRENT else {}
    text |= changed
    ids = {
        name: getattr(old, name)
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    }
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    torch.manual_seed(0)
    made = AutoModelForImageTextToText.from_config(config).eval()
    made.image_input = tokenizer.image_input = replace(model.image_input, family=FAMILIES[kind])
    return made


def _gemma(model: Any, tokenizer: Any, changed: dict[str, Any]) -> Any:
    import torch
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    text = {
        **{name: SHAPE[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
        "vocab_size": model.config.text_config.vocab_size,
        "vocab_size_per_layer_input": model.config.text_config.vocab_size,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "final_logit_softcapping": 30.0,
        "pad_token_id": tokenizer.pad_token_id,
        **changed,
    }
    vision = {
        **TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "patch_size": 4, "position_embedding_size": 700,
    }  # fmt: skip
    placeholder = model.image_input.placeholder
    config = Gemma4Config(
        text_config=text, vision_config=vision, image_token_id=placeholder, boi_token_id=5, eoi_token_id=6,
        video_token_id=509, audio_token_id=510,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Gemma4ForConditionalGeneration(config).eval()
    processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    made.image_input = tokenizer.image_input = ImageInput(processor, placeholder, FAMILIES["gemma4"], ([5], [6]))
    return made


def seeing_chat(tokenizer: Any, tools: Sequence[dict[str, Any]] = ()) -> Any:
    return load_chat(tokenizer, model_path="", tools=tools)


def save_seeing(folder: Path) -> Path:
    """The folder of that model."""
    model, tokenizer = seeing_model()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.image_input.processor.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def bomb(side: int) -> bytes:
    """A small file that claims to have `side` x `side` pixels."""
    data = bytearray(file_of(Image.new("RGB", (1, 1))))
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


BROKEN: dict[str, Any] = {
    "nothing": b"",
    "text": b"no image at all",
    "cut off": file_of(picture(3))[:200],
    "cut off JPEG": file_of(picture(3, 200, 200), "JPEG")[:2000],
    "bomb": bomb(60_000),
    "large": bomb(8_000),
    "huge file": b"\0" * 20_000_001,
    "no file": "/no/such/file.png",
    "no base64": "data:image/png;base64,??",
    "line": Image.new("RGB", (1, 1000)),
    "nothing at all": None,
}
"""Images of which none can be shown, by what is wrong with them."""


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


def groups(model: Any, seed: int = 0) -> list[Group]:
    """Of a step: pictures of several sizes that samples share or have alone, and samples without any."""
    rng = np.random.default_rng(seed)

    def text(n: int) -> list[int]:
        found: list[int] = rng.integers(20, 250, n).tolist()
        return found

    def answered(reward: float, *parts: Any) -> Trajectory:
        t = trajectory(model, *parts, answer=text(int(rng.integers(3, 9))))
        return replace(t, rewards={"answer": reward})

    square, wide, tall = picture(seed), picture(seed + 1, 48, 16), picture(seed + 2, 16, 64)
    pre, later = text(9), text(5)
    rows = [
        [answered(1.0, pre, square, later), answered(0.0, pre, square, later, wide, text(3), square, text(2))],
        [answered(0.0, later, tall, pre), answered(1.0, later, tall, pre), answered(0.5, later, picture(7), pre)],
        [answered(1.0, text(20)), answered(0.0, text(30)), answered(0.0, text(25)), answered(1.0, text(4))],
    ]
    return [Group(Task("t", {}), tuple(samples)) for samples in rows]


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
