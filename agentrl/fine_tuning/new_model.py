"""A model and a tokenizer from nothing: Qwen3 architecture, byte-level BPE, the chat template's tokens."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import UserError
from agentrl.models.image_families import FAMILIES
from agentrl.models.image_input import ImageInput
from agentrl.recipe.sections.sft import NewModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
    from transformers.image_processing_utils import BaseImageProcessor

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
SPECIAL = re.compile(r"<\|\w+\|>")  # in the template: control tokens
TAGS = re.compile(r"</?\w+>")  # in the template: added tokens that people may read, such as <tool_call>
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenization: words with their leading space, every digit alone."""
SPLIT_WORDS = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+ ?|\s"
"""Words, digits and spaces alone: a word has the same tokens wherever it stands, which a small model copies sooner."""
INIT = 0.04  # for widths of a hundred


def read_template(section: NewModel) -> str:
    """The chat template's text. Raises UserError where there is none, or where it is not ChatML."""
    try:
        text = Path(section.chat_template).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"sft.new_model.chat_template: {section.chat_template}: {error.strerror}") from error
    if END_OF_TURN not in text:
        raise UserError(f"sft.new_model.chat_template: {section.chat_template} ends no turn with {END_OF_TURN}")
    return text


def bare_tokenizer(template: str) -> "PreTrainedTokenizerFast":
    """A tokenizer of bytes and of the template's tokens: it renders, and can already be loaded as a chat."""
    return train_tokenizer([], 0, template, 1 << 30)


def byte_level_bpe(split: str = SPLIT) -> "Tokenizer":
    """A tokenizer of bytes, without merges and added tokens, that splits texts as the pattern `split` says."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, template: str, context: int, tokens: Sequence[str] = (), split: str = SPLIT
) -> "PreTrainedTokenizerFast":
    """Train byte-level BPE (Sennrich et al., arXiv:1508.07909) on rendered conversations, `vocabulary` tokens in all.

    split: pattern of what no merge crosses. tokens: further texts that are one token each; like the template's tags
    they are read as plain text."""
    from tokenizers import AddedToken, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys([END_OF_TEXT, *SPECIAL.findall(template)]))
    tags = list(dict.fromkeys([*TAGS.findall(template), *tokens]))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = byte_level_bpe(split)
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocabulary - len(tags), len(special) + len(alphabet)), special_tokens=special,
        initial_alphabet=alphabet, min_frequency=2, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_between([*special, *tags], texts), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=END_OF_TEXT, model_max_length=context,
        clean_up_tokenization_spaces=False, chat_template=template,
    )  # fmt: skip


def _between(tokens: Iterable[str], texts: Iterable[str]) -> Iterator[str]:
    """What lies between the tokens: merges must not cross or learn them."""
    cut = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    for text in texts:
        yield from (piece for piece in cut.split(text) if piece)


IMAGE_PAD, IMAGE_ENDS = "<|image_pad|>", ("<|vision_start|>", "<|vision_end|>")
LEAST_SIDE, LARGEST_SIDE = 2, 64
"""Patches of a small and of a large image's side, beyond which it is resized."""


def new_model(section: NewModel, tokenizer: "PreTrainedTokenizerBase", seed: int) -> "PreTrainedModel":
    """A Qwen3 or Qwen3-VL causal LM with random float32 weights, its embeddings tied. Raises UserError: the chat
    template writes no images."""
    return _reading(section, tokenizer, seed) if section.vision is None else _seeing(section, tokenizer, seed)


def _seeing(section: NewModel, tokenizer: Any, seed: int) -> "PreTrainedModel":
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = dict(section.vision or {})
    ids = tokenizer.convert_tokens_to_ids([IMAGE_PAD, *IMAGE_ENDS])
    if None in ids or len({*ids, tokenizer.unk_token_id}) < len(ids):
        raise UserError(f"sft.new_model.chat_template: {section.chat_template} writes no {IMAGE_PAD} for images")
    side = section.config["head_dim"] // 2
    text = {
        **{name: value for name, value in section.config.items() if name != "rope_theta"},
        "vocab_size": _vocabulary(section, tokenizer),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(section.config["rope_theta"]),
            "mrope_section": [side - 2 * (side // 3), side // 3, side // 3],
            "mrope_interleaved": True,  # transformers takes it for granted, servers do not
        },
        "initializer_range": INIT,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config={
            **vision,
            "out_hidden_size": section.config["hidden_size"],
            "deepstack_visual_indexes": list(range(min(vision["depth"], section.config["num_hidden_layers"]))),
            "initializer_range": INIT,
        },
        image_token_id=ids[0],
        video_token_id=ids[0],
        vision_start_token_id=ids[1],
        vision_end_token_id=ids[2],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).eval()
    model.image_input = tokenizer.image_input = ImageInput(_processor(vision), ids[0], FAMILIES[config.model_type])
    seeing: PreTrainedModel = model
    return seeing


def _processor(vision: Mapping[str, int]) -> "BaseImageProcessor":
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    patch, merge = vision["patch_size"], vision["spatial_merge_size"]
    size = {"shortest_edge": (LEAST_SIDE * patch) ** 2, "longest_edge": (LARGEST_SIDE * patch) ** 2}
    return Qwen2VLImageProcessorPil(patch_size=patch, temporal_patch_size=2, merge_size=merge, size=size)


def _vocabulary(section: NewModel, tokenizer: "PreTrainedTokenizerBase") -> int:
    return (max(len(tokenizer), section.vocabulary) + 63) // 64 * 64


def _reading(section: NewModel, tokenizer: "PreTrainedTokenizerBase", seed: int) -> "PreTrainedModel":
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = dict(section.config)
    config = Qwen3Config(
        vocab_size=_vocabulary(section, tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": float(shape.pop("rope_theta"))},
        **shape,
        initializer_range=INIT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config).eval()
    if section.init == "induction":
        _write_induction_heads(model)
    return model


NEAR, FAR = 0.15, 0.01
"""Radians a token: frequencies above NEAR tell neighbours apart, those below FAR turn little over a whole lesson."""


def _write_induction_heads(model: Any) -> None:
    """Give a Qwen3 induction heads (Olsson et al., arXiv:2209.11895): where what comes now came before, they go on as
    it went on then. Small models take most of their training to find these by themselves.

    An embedding is written as a constant, what the token is, and two parts that are left almost empty. Heads of the
    first layer look at the constant alone, so that their scores depend on the distance alone, and fill the empty parts
    with the token before and the one before that; another sees the third. Two heads of the second layer compare these
    with the current token, or with it and the one before it, and say the token that stands there. All of it is
    trained like any other weight.
    """
    import torch

    config = model.config
    width, size = config.hidden_size, config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(size // 2) * 2.0 / size)
    near, low = int((frequencies > NEAR).sum()), torch.nonzero(frequencies < FAR).flatten()
    steady = torch.cat([low, low + size // 2])  # what a head compares by content: the two halves of a pair
    own, before, before_that = slice(1, width - 2 * size), slice(width - 2 * size, width - size), slice(-size, None)
    known = width - 2 * size - 1
    square = torch.randn(max(known, size), max(known, size), generator=torch.Generator().manual_seed(1))
    code = torch.linalg.qr(square)[0][:size, :known] * (known / size) ** 0.5  # (head, width of `own`)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 4 * INIT
        embedding[:, width - 2 * size :] *= 0.2
        for layer in model.model.layers:  # else what they add at random is larger than what is written here
            layer.mlp.down_proj.weight *= 0.1
            layer.self_attn.o_proj.weight *= 0.2
        first, second = (layer.self_attn for layer in model.model.layers[:2])
        heads = [slice(i * size, (i + 1) * size) for i in range(config.num_attention_heads)]
        for back, head in enumerate(heads[:3], 1):
            asked, offered = torch.zeros(size), torch.zeros(size)
            asked[:near] = 1
            offered[:near] = torch.cos(frequencies[:near] * back)
            offered[size // 2 : size // 2 + near] = torch.sin(frequencies[:near] * back)
            for weight, value in ((first.q_proj.weight, asked), (first.k_proj.weight, offered)):
                weight[head] *= 0.1
                weight[head, 0] = value
        for head, part in zip(heads, (before, before_that), strict=False):
            first.v_proj.weight[head] *= 0.1
            first.v_proj.weight[head, own] = code
            first.o_proj.weight[:, head] *= 0.1
            first.o_proj.weight[part, head] += 0.06 * torch.eye(size)
        for i, head in enumerate(heads[:2]):
            asked, offered = torch.zeros(size, width), torch.zeros(size, width)
            unit = torch.eye(size)[: len(steady)]
            asked[steady, own], offered[steady, before] = code[: len(steady)], unit
            if i == 1:  # half of it compares the tokens before these
                half = steady[::2]
                asked[half], offered[half] = 0.0, 0.0
                asked[half, before], offered[half, before_that] = unit[::2], unit[::2]
            for weight, value in ((second.q_proj.weight, asked), (second.k_proj.weight, offered)):
                weight[head] *= 0.1
                weight[head] += 0.5 * value
            second.v_proj.weight[head] *= 0.1
            second.v_proj.weight[head, own] += code
            second.o_proj.weight[:, head] *= 0.1
            second.o_proj.weight[own, head] += 0.12 * code.T
        for attention, sharpness in ((first, 1.7), (second, 2.0)):
            attention.q_norm.weight.fill_(sharpness)
            attention.k_norm.weight.fill_(sharpness)
