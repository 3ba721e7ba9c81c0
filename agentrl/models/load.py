"""Load the module and the tokenizer that a recipe's `model` section names. Errors are one line each."""

import json
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from agentrl.errors import UserError, nearest
from agentrl.models import EMBEDDED, embedded_path, fast_tokenizer
from agentrl.models.image_families import FAMILIES, family_of
from agentrl.models.image_input import ImageInput, check_alike, image_input
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import ModelSection
from agentrl.remote import fetched, is_remote

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    from agentrl.models.qwen3 import Config

T = TypeVar("T")
ADAPTER_CONFIG = "adapter_config.json"  # peft's


def load_model(
    section: ModelSection, seed: int = 0, *, headless: bool = False, light: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a causal language model onto `model.device`, in `model.dtype` and evaluation mode (no dropout), and its
    tokenizer.

    seed: of a new adapter; nothing else is random. headless: the output layer is not used, and may be absent from the
    files. light: our own forward and engine alone will compute with the model, so that it may be a `models.qwen3.Qwen3`
    with a `FastTokenizer`, which need no transformers, where they read its files.

    Raises UserError: no such device or folder, no causal language model in it, absent weights, or a hub that does not
    answer.
    """
    path = resolve(section.path)
    if light and (found_light := _load_light(path, section)) is not None:
        return found_light
    import torch
    from transformers.utils import logging as progress

    progress.disable_progress_bar()
    device = find_device(section.device)
    config = _load(section.path, "its configuration", lambda: _causal_config(path, section))
    dtype = getattr(torch, section.dtype)
    options = {"config": config, "dtype": dtype, "trust_remote_code": section.trust_remote_code}
    model, found = _load(
        section.path,
        "its weights",
        lambda: class_for(config).from_pretrained(path, output_loading_info=True, **options),
    )
    _check_whole(section.path, model, found["missing_keys"], headless)
    tokenizer = load_tokenizer(section)
    model = model.to(device).eval()
    _give_sight(section, model, tokenizer)
    if section.lora is not None:
        from agentrl.models.lora import add_adapter

        add_adapter(model, section.lora, path, seed)
    return model, tokenizer


def _load_light(path: str, section: ModelSection) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase] | None":
    """The model and the tokenizer by `models.qwen3`; None: it does not read them."""
    from agentrl.models.qwen3 import Qwen3, reads

    if not reads(path, section):
        return None
    model, missing = _load(section.path, "its weights", lambda: Qwen3.from_pretrained(path))
    _check_whole(section.path, cast("PreTrainedModel", model), missing, headless=False)
    return cast("PreTrainedModel", model), _light_tokenizer(path, section)


def _light_tokenizer(path: str, section: ModelSection) -> "PreTrainedTokenizerBase":
    tokenizer = _load(section.path, "its tokenizer", lambda: fast_tokenizer.FastTokenizer(path))
    if section.chat_template is not None:
        tokenizer.chat_template = _read(section.chat_template)
    return cast("PreTrainedTokenizerBase", tokenizer)


def load_scorer(section: ModelSection, seed: int = 0) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load `model.path` as a sequence classifier with one label, to be trained, and its tokenizer.

    A causal language model gets a new head in place of its output layer, normal with a variance of 1 / (width + 1)
    (arXiv:2009.01325, appendix B); seed: of the head. Raises UserError as `load_model` does, and for a classifier with
    more labels.
    """
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    path, device = resolve(section.path), find_device(section.device)
    tokenizer = load_tokenizer(section)
    config = _load(section.path, "its configuration", lambda: _scorer_config(path, section, tokenizer))
    options = {"config": config, "dtype": getattr(torch, section.dtype), "trust_remote_code": section.trust_remote_code}
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of a new head
    try:
        model, found = _load(
            section.path,
            "its weights",
            lambda: AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True, **options),
        )
    finally:
        logging.set_verbosity(before)
    absent = sorted(found["missing_keys"])
    if body := [name for name in absent if name.startswith(f"{model.base_model_prefix}.")]:
        raise UserError(f"model.path: {section.path} is no whole model: it has no weights for {body[0]}")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in absent:
            head = model.get_parameter(name)
            drawn = torch.randn(head.shape, generator=generator) / (head.shape[-1] + 1) ** 0.5
            head.copy_(drawn if head.dim() > 1 else torch.zeros_like(head))
    model.config.architectures = [type(model).__name__]
    _give_sight(section, model, tokenizer)
    return model.to(device).eval(), tokenizer


def load_skeleton(section: ModelSection) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model without weights and adapter, on the meta device, and its tokenizer, for a process that does not
    compute with it. Raises UserError as `load_model` does."""
    import torch

    path = resolve(section.path)
    config = _load(section.path, "its configuration", lambda: _causal_config(path, section))
    with torch.device("meta"):
        model = class_for(config).from_config(
            config, dtype=getattr(torch, section.dtype), trust_remote_code=section.trust_remote_code
        )
    tokenizer = load_tokenizer(section)
    _give_sight(section, model, tokenizer)
    return model.eval(), tokenizer


def load_tokenizer(section: ModelSection, *, light: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer with the recipe's chat template. light: as of `load_model`. Raises UserError as that does."""
    path = resolve(section.path)
    if light and fast_tokenizer.reads(path, section):
        return _light_tokenizer(path, section)
    from transformers import AutoTokenizer

    _load(section.path, "its configuration", lambda: check_family(path, section))
    tokenizer = _load(
        section.path,
        "its tokenizer",
        lambda: AutoTokenizer.from_pretrained(path, trust_remote_code=section.trust_remote_code),
    )
    if section.chat_template is not None:  # on the tokenizer itself, so that checkpoints carry it
        tokenizer.chat_template = _read(section.chat_template)
    tokenizer.image_input = _load(
        section.path, "its image processor", lambda: image_input(path, section.trust_remote_code)
    )
    return tokenizer


def class_for(config: "PretrainedConfig") -> "type[_BaseAutoModelClass]":
    """The class of transformers that makes a model of this configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM


def model_of(config: "PretrainedConfig | Config", trust_remote_code: bool = False) -> Any:
    """A new model of a configuration, for its sizes: where torch.device("meta") is entered, it has no weights."""
    from agentrl.models.qwen3 import Config, Qwen3

    if isinstance(config, Config):
        return Qwen3(config)
    return class_for(config).from_config(config, trust_remote_code=trust_remote_code)


def let_classify(config: "PretrainedConfig") -> bool:
    """Whether transformers can make a sequence classifier of this configuration: of a model that sees, for which
    it has no class, it is given one, as it makes those of other models."""
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    if config.model_type in FAMILIES:
        kind: Any = type(config)
        AutoModelForSequenceClassification.register(kind, _classifier(kind), exist_ok=True)
    return config.model_type in (*KNOWN, *FAMILIES)


@cache
def _classifier(config: Any) -> Any:
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config]
    name = kind.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    return type(name, (GenericForSequenceClassification, kind.__mro__[1]), {"__module__": __name__})


def _give_sight(section: ModelSection, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Let a model that sees know how, and freeze what the recipe says. Raises UserError: there is nothing to freeze."""
    model.image_input = tokenizer.image_input
    if "vision" in section.freeze:
        if model.image_input is None:
            raise UserError(f"model.freeze: {section.path} has no vision tower: leave `vision` out")
        from agentrl.models.vision import towers

        for tower in towers(model):
            tower.requires_grad_(False)


def check_roles(recipe: Recipe, ours: ImageInput) -> None:
    """Raise UserError: the critic or a teacher of a policy that sees does not see as it does."""
    teachers = [("teacher.path", t.path) for t in recipe.part_teachers if t is not None and not t.served]
    critic = recipe.critic.path if recipe.critic is not None else None
    for key, path in [("critic.path", critic), *teachers]:
        if path is not None and path not in ("policy", recipe.model.path):
            check_alike(ours, image_input(resolve(path), recipe.model.trust_remote_code), f"{key}: {path}")


def find_device(name: str) -> "torch.device":
    """The torch device that `model.device` names. Raises UserError if it does not exist."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        line = str(error).strip().partition("\n")[0]
        raise UserError(f"model.device: {name} cannot be used here: {line}") from error
    return device


def on_gpu(recipe: Recipe) -> bool:
    """Whether the trainer of `recipe` computes on GPUs, its workers' or this machine's."""
    import torch

    if recipe.cluster.used:
        return recipe.cluster.gpus > 0
    device = recipe.model.device
    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def resolve_types(recipe: Recipe) -> Recipe:
    """The recipe with `model.compute: auto` resolved for the device that it trains on."""
    section = recipe.model
    if section.compute != "auto":
        return recipe
    mixed = on_gpu(recipe) and (section.dtype == "float32" or section.lora is not None)
    chosen = section.model_copy(update={"compute": "bfloat16" if mixed else "same"})
    return recipe.model_copy(update={"model": chosen})


def resolve(path: str) -> str:
    """The argument of `from_pretrained` for `model.path`: an existing folder, a copy of that behind a URL, or a
    hub name. Raises UserError."""
    if path in EMBEDDED:
        return str(embedded_path(path))
    if is_remote(path):
        path = str(fetched(path, "model.path"))
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
            raise UserError(
                f"model.path: {path} is an adapter: name its base model there{_base_of(folder)}, and the adapter in "
                f"model.lora.start={path}"
            )
        if not (folder / "config.json").is_file():
            raise UserError(f"model.path: {path} holds no config.json; give a folder that `save_pretrained` wrote")
        return str(folder)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
    if looks_local or folder.exists():
        raise UserError(
            f"model.path: {path} is no folder; give an existing one, a hub name, or one that ships with agentrl: "
            f"{', '.join(EMBEDDED)}"
        )
    return path


def _base_of(adapter: Path) -> str:
    """Which base an adapter's folder names, as an aside."""
    try:
        base = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return f" ({base})" if base else ""


def _check_whole(path: str, model: "PreTrainedModel", missing: Collection[str], headless: bool) -> None:
    """Raises UserError for weights that `from_pretrained` did not find and drew at random, as it only warns."""
    head = model.get_output_embeddings()
    unread = {name for name, module in model.named_modules() if headless and module is head}
    absent = sorted(name for name in missing if name.rpartition(".")[0] not in unread)
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise UserError(
            f"model.path: {path} is no whole causal language model: it has no weights for {absent[0]}{more}"
        )


def _causal_config(path: str, section: ModelSection) -> "PretrainedConfig":
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    check_family(path, section)
    config = overridden(AutoConfig.from_pretrained(path, trust_remote_code=section.trust_remote_code), section)
    remote = section.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES) and not remote:
        raise UserError(f"model.path: {section.path} is a {config.model_type!r}, which is not a causal language model")
    return config


def check_family(path: str, section: ModelSection, **options: object) -> None:
    """Raise UserError for a model that sees in a way that is not known, before a type that transformers may not know
    either is looked up. path: as `resolve` returns it. options: of `from_pretrained`."""
    from transformers import PretrainedConfig

    family_of(PretrainedConfig.get_config_dict(path, **options)[0], section.path)


def overridden(config: "PretrainedConfig", section: ModelSection) -> "PretrainedConfig":
    """A model's configuration with the settings of `model.config`, in place; what is a mapping is changed key
    by key. Raises UserError: a setting that it does not have."""
    text = config.get_text_config()
    for key, value in section.config.items():
        owner = config if hasattr(config, key) else text
        if not hasattr(owner, key):
            raise UserError(f"model.config: a {config.model_type!r} has no {key!r}{nearest(key, text.to_dict())}")
        old = getattr(owner, key)
        setattr(owner, key, {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value)
    return config


def _scorer_config(path: str, section: ModelSection, tokenizer: "PreTrainedTokenizerBase") -> "PretrainedConfig":
    from transformers import AutoConfig

    check_family(path, section)
    config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=section.trust_remote_code)
    remote = section.trust_remote_code and "AutoModelForSequenceClassification" in (
        getattr(config, "auto_map", None) or {}
    )
    if not let_classify(config) and not remote:
        raise UserError(f"model.path: {section.path} is a {config.model_type!r}, which cannot be a sequence classifier")
    trained = any("SequenceClassification" in name for name in config.architectures or ())
    if trained and config.num_labels != 1:
        raise UserError(f"model.path: {section.path} has {config.num_labels} labels; a reward model has one")
    config.num_labels = 1
    text = config.get_text_config()
    if text.pad_token_id is None:  # transformers scores batches of several with one only
        text.pad_token_id = tokenizer.pad_token_id
    return config


def _read(template: str) -> str:
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"model.chat_template: {template} cannot be read: {error.strerror}") from error


def _load(path: str, what: str, load: Callable[[], T]) -> T:
    """`load()`, its errors as one line: this is the boundary to files and to the hub."""
    try:
        return load()
    except UserError:
        raise
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "" if Path(path).exists() or path in EMBEDDED else " (a hub name needs the network; a folder must exist)"
        raise UserError(f"model.path: {path}: {what} cannot be loaded{hint}: {line}") from error


def embeddings(model: "PreTrainedModel") -> "torch.Tensor":
    """The weights of its input embeddings, [V, D], which transformers types as a tensor or a module."""
    import torch

    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight
