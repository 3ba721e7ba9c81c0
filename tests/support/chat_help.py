"""Tokenizers made on the spot, and the chat templates that the `trl` package carries (read as files)."""

import functools
import glob
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl.fine_tuning.new_model import byte_level_bpe

SENTENCES = [
    "What is 2*3? Let me see. The answer is 6.\n\nAnd 3 * 3? It is 9.",
    'Given the following functions, respond in JSON: {"name": "calculator", "arguments": {"expression": "12*7"}}',
    "user\nassistant\nsystem\ntool\n<tools>\n</tools>\nresponse value function parameter expression",
    "# Tools\n\nYou have access to the following functions: string, object, type, properties, required, description",
]
NAMED = re.compile(
    r"<\|[^\s<>{}'\"]{1,40}?\|>|<｜[^\s<>{}]+?｜>|<\|\w+>|<\w+\|>|\[gMASK\]|<sop>|<bos>|<eos>|<s>|</s>"
    r"|</?(?:tool_call|tool_response|think|start_of_turn|end_of_turn|end_of_utterance|arg_key|arg_value)>"
)
PLAIN_ADDED = ("<tool", "</tool", "<think", "</think", "<arg", "</arg")
ENDS = ("<|im_end|>", "<|eot_id|>", "<turn|>", "<|return|>", "<|eot|>", "<end_of_turn>", "<|end|>")

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "What to evaluate."}},
            "required": ["expression"],
        },
    },
}


def call(i: int = 0, name: str = "calculator", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": f"call{i:05d}", "function": {"name": name, "arguments": arguments}}


def result(content: str, i: int = 0, name: str = "calculator") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call{i:05d}", "name": name}


@functools.cache
def _trained() -> str:
    tokenizer = byte_level_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str, more: Iterable[str] = (), bos: str = "<s>", eos: str = "") -> PreTrainedTokenizerFast:
    """Byte-level BPE with an added token for each one that the template names, and those of `more`."""
    tokenizer = Tokenizer.from_str(_trained())
    tokens = sorted({*NAMED.findall(template), '<|"|>', "<s>", "</s>", "<|endoftext|>", bos, *more})
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=not t.startswith(PLAIN_ADDED)) for t in tokens])
    eos = eos or next((end for end in ENDS if end in template), "</s>")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token="<|endoftext|>", model_max_length=10**9
    )
    fast.chat_template = template
    return fast


def trl_templates() -> dict[str, str]:
    spec = importlib.util.find_spec("trl")
    assert spec.submodule_search_locations
    folder = os.path.join(spec.submodule_search_locations[0], "chat_templates")
    return {Path(path).stem: Path(path).read_text("utf-8") for path in sorted(glob.glob(folder + "/*.jinja"))}


HERMES = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}
{{- tool.function.name + '(' + (tool.function.parameters.properties | list | join(', ')) + ')\\n' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""ChatML with Hermes calls: what the embedded model writes."""


def unigram(prepend: str) -> Callable[[], PreTrainedTokenizerFast]:
    """A tokenizer in the manner of sentencepiece, with white space as a mark before each word."""

    def make() -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("\n", "⏎")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
        tokenizer.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme=prepend), decoders.Replace("⏎", "\n")])
        trainer = trainers.UnigramTrainer(
            vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
        tokenizer.train_from_iterator([s.replace("\n", "⏎") for s in SENTENCES * 3], trainer)
        names = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
        tokenizer.add_tokens([AddedToken(n, normalized=False, special=n.startswith("<|")) for n in names])
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
        fast.chat_template = HERMES
        return fast

    return make


def swallowing() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens swallow the white space beside them."""
    tokenizer = make_tokenizer(HERMES)
    backend = tokenizer.backend_tokenizer
    eats = [
        ("<|im_end|>", {"rstrip": True}),
        ("<tool_response>", {"rstrip": True}),
        ("</tool_response>", {"lstrip": True}),
    ]
    spec = json.loads(backend.to_str())
    for token in spec["added_tokens"]:
        token.update(dict(eats).get(token["content"], {}))
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)), eos_token="<|im_end|>")
    fast.chat_template = HERMES
    return fast


def with_white_space_tokens() -> PreTrainedTokenizerFast:
    """Byte-level BPE to which runs of white space and tags of another language were added as ordinary tokens."""
    tokenizer = make_tokenizer(HERMES)
    ordinary = [AddedToken(token, normalized=False, special=False) for token in ("\n\n", "   ", "<table>")]
    tokenizer.backend_tokenizer.add_tokens(ordinary)
    return tokenizer


def by_bytes() -> PreTrainedTokenizerFast:
    """BPE that writes what it does not know byte by byte, in the manner of sentencepiece."""
    letters = sorted({c for s in SENTENCES for c in s.replace(" ", "▁")})
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    fast.chat_template = HERMES
    return fast


DIFFICULT = [unigram("always"), unigram("first"), unigram("never"), swallowing, with_white_space_tokens]
