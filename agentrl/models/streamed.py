"""A model whose weights stay in their files: its modules as transformers loads them, but every parameter a placeholder,
one number repeated over the whole shape, that knows which stored tensor it stands for.

Invariant: for every parameter and buffer `Stored.read` gives the very bits that `from_pretrained` would have put there.
So transformers' own loader does the work (names, types, ties, what is computed anew), with placeholders in place of
tensors. Whatever it does to one but to put it in its place refuses: then the model must be loaded whole.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from agentrl.errors import UserError
from agentrl.models.load import load_skeleton, overridden, resolve
from agentrl.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Read = Callable[[Tensor], Tensor]
"""The value of a parameter or buffer of the streamed model, on the CPU."""


class NotStreamed(Exception):  # noqa: N818 - a reason, not a failure: the model is loaded whole
    """The reason why the files of a model cannot be read one tensor at a time."""


class Stored:
    """The tensors of safetensors files, and the placeholder of each. Reading one maps only that one into memory."""

    def __init__(self, files: Iterable[str]) -> None:
        from safetensors import safe_open

        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file: dict[str, str] = {}
        self._placeholders: dict[
            int, tuple[str, Tensor]
        ] = {}  # by the address of the number; kept, so that it stays its
        for file in sorted(files):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                    self._file[name] = file

    def placeholder(self, name: str, dtype: torch.dtype) -> Tensor:
        """Make the placeholder of the tensor `name`, cast to `dtype`: one number expanded to its shape."""
        made = torch.zeros(1, dtype=dtype)
        self._placeholders[made.untyped_storage().data_ptr()] = (name, made)
        return made.expand(self.shapes[name])

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of the stored tensor of a placeholder; None: `tensor` is no placeholder."""
        return self._placeholders.get(tensor.untyped_storage().data_ptr(), (None,))[0]

    def read(self, tensor: Tensor) -> Tensor:
        """The value of a placeholder, or `tensor` itself if it is none. Raises UserError: the file is
        unreadable."""
        from safetensors import SafetensorError, safe_open

        name = self.name_of(tensor)
        if name is None:
            return tensor.detach()
        try:
            with safe_open(self._file[name], framework="pt") as opened:
                value: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"model.path: {self._file[name]}: {name} cannot be read: {error}") from error
        return value.to(tensor.dtype)


def stream_model(section: ModelSection, seed: int = 0, *, headless: bool = False) -> tuple[Any, Read]:
    """The model of `load_model`, with its adapter, as placeholders, and the function that reads them.

    Raises NotStreamed, and UserError as `load_model` does.
    """
    from agentrl.models.lora import add_adapter

    path, shape = resolve(section.path), load_skeleton(section)[0]
    head = shape.get_output_embeddings()
    unread = [name for name, module in shape.named_modules() if headless and module is head]
    model, read = stream(type(shape), path, section, unread)
    model.image_input = shape.image_input
    if section.lora is not None:
        add_adapter(model, section.lora, path, seed)
    return model, read


def stream(kind: Any, path: str, section: ModelSection, unread: Sequence[str] = ()) -> tuple[Any, Read]:
    """A model of the transformers class `kind` as placeholders, and the function that reads them.

    path: a folder or a hub name. unread: modules that may be absent from the files. The model is in evaluation mode and
    in the dtype of `section`. Raises NotStreamed.
    """
    from transformers import AutoConfig

    refused: list[str] = []
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=section.trust_remote_code)
        if path == resolve(section.path):
            config = overridden(config, section)
        if getattr(config, "quantization_config", None) is not None:
            raise NotStreamed("its weights are quantized")
        stored = Stored(_files(path, config))
        untouched = type("_Untouched", (_Untouched,), {"refused": refused})
        slots = {name: _Slot(stored, name, untouched) for name in stored.shapes}
        with _quiet():
            model, info = kind.from_pretrained(
                None, config=config, state_dict=slots, dtype=getattr(torch, section.dtype), output_loading_info=True
            )
        absent = {name for name in info["missing_keys"] if name.rpartition(".")[0] in unread}
        if lacking := sorted({*map(str, info["missing_keys"]), *map(str, info["mismatched_keys"])} - absent):
            raise NotStreamed(f"the files lack {lacking[0]}")
        _settle(model, stored, absent)
        if model.can_generate():
            model.generation_config = _generation(path)
    except (NotStreamed, UserError):
        raise
    except Exception as error:  # whatever that loader has against placeholders: with tensors it is as ever
        raise NotStreamed(refused[0] if refused else f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return model.eval(), stored.read


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the loader about placeholders that it cannot use: the caller reports them in one line."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


class _Slot:
    """A tensor in a file, as far as transformers' loader looks at one before it is in its place."""

    def __init__(self, stored: Stored, name: str, kind: type[Tensor]) -> None:
        self._stored, self._name, self._kind = stored, name, kind

    def __getitem__(self, index: Any) -> "_Slot":
        if index is not Ellipsis:
            raise NotStreamed(f"{self._name} is taken apart")
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is None:
            raise NotStreamed(f"{self._name} keeps the type of its file")
        return self._stored.placeholder(self._name, dtype).as_subclass(self._kind)


class _Untouched(Tensor):
    """A placeholder while the loader has it: which may be inspected and assigned, no more. refused: what else was
    tried."""

    refused: ClassVar[list[str]]
    ALLOWED = ("__get__", "detach", "requires_grad_", "is_floating_point", "size", "dim", "numel", "__hash__")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func.__name__ not in cls.ALLOWED:
            cls.refused.append(f"transformers makes its weights of those in the files ({func.__name__})")
            raise NotStreamed(cls.refused[-1])
        return super().__torch_function__(func, types, args, kwargs or {})


def _settle(model: nn.Module, stored: Stored, absent: Collection[str]) -> None:
    """Make plain placeholders of those that the loader put in their places. absent: names that are not in the files."""
    plain: dict[int, nn.Parameter] = {}  # those that are tied stay one
    with torch._C.DisableTorchFunctionSubclass():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = plain.setdefault(id(parameter), _plain(parameter))
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.as_subclass(Tensor) if buffer is not None else None
    for name, tensor in model.state_dict(keep_vars=True).items():
        found = stored.name_of(tensor)
        if name not in absent and (found is None or stored.shapes[found] != tuple(tensor.shape)):
            raise NotStreamed(f"{name} is no stored tensor")


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().as_subclass(Tensor), requires_grad=parameter.requires_grad)


def _files(path: str, config: "PretrainedConfig") -> list[str]:
    """The safetensors files that `from_pretrained` would read; those of a hub name are fetched."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    def find(name: str) -> str | None:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False)

    if getattr(config, "transformers_weights", None) is not None:
        raise NotStreamed("its configuration names a file of its own")
    if (whole := find(SAFE_WEIGHTS_NAME)) is not None:
        return [whole]
    if (index := find(SAFE_WEIGHTS_INDEX_NAME)) is None:
        raise NotStreamed("it has no safetensors file")
    with open(index, encoding="utf-8") as opened:
        names = sorted(set(json.load(opened)["weight_map"].values()))
    files = [find(name) for name in names]
    if None in files:
        raise NotStreamed(f"{names[files.index(None)]} is not there")
    return [file for file in files if file is not None]


def _generation(path: str) -> Any:
    """The settings that `from_pretrained` gives a model: those beside it, else what its configuration says."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)
