"""A tokenizer.json with its special tokens and chat template, without `transformers` and torch."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import UserError
from agentrl.jsonable import loads
from agentrl.plugins.types import Json, Message
from agentrl.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from jinja2 import Template

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that templates may name, in the order of transformers."""
_FOREIGN = {"auto_map", "extra_special_tokens", "added_tokens_decoder", "chat_template"}
"""Settings of a tokenizer that change how transformers reads it."""
_MARKED = re.compile(r"{%-?\s*generation\b")
"""What transformers alone understands in a template."""


def reads(folder: str, section: ModelSection) -> bool:
    """Whether `FastTokenizer` reads the tokenizer in `folder`, with the template of `section`, as transformers would.

    It does where transformers itself wrote it, from a tokenizer without code of its own.
    """
    place = Path(folder)
    try:
        config = read_json(place / CONFIG)
        templates = [Path(section.chat_template)] if section.chat_template else []
        sources = [path.read_text(encoding="utf-8") for path in (place / TEMPLATE, *templates)]
        return (
            not section.trust_remote_code
            and (place / TOKENIZER).is_file()
            and not any(place.glob("*processor_config.json"))
            and not any(map(_MARKED.search, sources))
            and config.get("tokenizer_class") == "TokenizersBackend"
            and not config.keys() & _FOREIGN
            and all(isinstance(config[name], str) for name in _TOKENS if config.get(name) is not None)
        )
    except (OSError, ValueError, TypeError):  # which transformers then explains, or can read
        return False


class FastTokenizer:
    """Reads a tokenizer as transformers does, and has of its interface what this package and `renderers` use.

    name_or_path: the folder that it was read from. Raises OSError or ValueError: a file cannot be read.
    """

    def __init__(self, folder: str) -> None:
        from tokenizers import Tokenizer

        place = Path(folder)
        self.name_or_path, self.image_input = folder, None
        self.backend_tokenizer: Tokenizer = Tokenizer.from_file(str(place / TOKENIZER))
        self.chat_template = (place / TEMPLATE).read_text(encoding="utf-8")
        self._config = read_json(place / CONFIG)
        self.special_tokens_map = {name: self._config[name] for name in _TOKENS if self._config.get(name) is not None}
        self.bos_token_id, self.eos_token_id, self.unk_token_id, _, self.pad_token_id, *_ = (
            self.backend_tokenizer.token_to_id(self.special_tokens_map.get(name, "")) for name in _TOKENS
        )

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens, by their text."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        several = [ids] if isinstance(ids, int) else list(ids)
        return self.backend_tokenizer.decode(several, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or those of several; of one that does not exist, that of the unknown token, or None."""
        if isinstance(tokens, str):
            found = self.backend_tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The token of an id, or those of several; None for an id that does not exist."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(i) for i in ids]

    def get_chat_template(self, chat_template: str | None = None, tools: object = None) -> str:
        """The template that is given, or its own."""
        return self.chat_template if chat_template is None else chat_template

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[dict[str, Json]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
    ) -> str:
        """The conversation as text. Raises jinja2.TemplateError, or what else a template raises."""
        if tokenize:
            raise UserError("apply_chat_template: this tokenizer renders text only: give tokenize=False")
        if not conversation:
            raise ValueError("an empty conversation")
        return _compiled(self.get_chat_template(chat_template)).render(
            messages=[_shown(message) for message in conversation],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens_map,
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files that it was read from. Raises OSError."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(place / TOKENIZER))
        (place / CONFIG).write_text(written(self._config), encoding="utf-8")
        (place / TEMPLATE).write_text(self.chat_template, encoding="utf-8")


def read_json(path: Path) -> dict[str, Json]:
    """A mapping of a model's folder. Raises OSError, ValueError or TypeError."""
    return dict(loads(path.read_text(encoding="utf-8")))


def written(config: dict[str, Json]) -> str:
    """A mapping as transformers writes it."""
    return json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _shown(message: Message) -> dict[str, Json]:
    """A message as templates expect it: without keys that say None, the reasoning under either of its names."""
    shown = {key: value for key, value in message.items() if value is not None}
    reasoning = next((shown[k] for k in ("reasoning_content", "thinking", "reasoning") if k in shown), None)
    return shown if reasoning is None else {"thinking": reasoning, **shown, "reasoning_content": reasoning}


@cache
def _compiled(source: str) -> "Template":
    """The template with what transformers adds to jinja's language, in jinja's sandbox: a model's folder may come from
    anybody."""
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class PublicNamespace(Namespace):
        """A namespace of jinja without attributes that Python itself reads."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja's: `self` may be an attribute
            for name in (given := dict(*args[1:], **kwargs)):
                _check(name)
            Namespace.__init__(args[0], given)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

    def _check(name: object) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a chat template may not set {name} of a namespace")

    def refuse(line: str) -> None:
        raise TemplateError(line)

    def tojson(
        value: Json, ensure_ascii: bool = False, indent: int | None = None,
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    env.globals |= {
        "raise_exception": refuse,
        "namespace": PublicNamespace,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # not the class, whose attributes lead further
    }
    return env.from_string(source)
