"""`RewardModel`: the tensor work of a sequence classifier that scores finished trajectories, in one process or as one
rank of several.

A score is what the model itself says of the one sequence: packed rows, and prompts that the samples of a group share,
change it by rounding only.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.forward import TOLERANCE, hidden_states
from agentrl.compute.micro_batches import SINGLE_PROCESS, ProcessGroup, token_column
from agentrl.compute.packing import Packed, indices, pack
from agentrl.errors import UserError
from agentrl.models.load import find_device
from agentrl.models.prove import disproof
from agentrl.recipe.schema import ModelSection, Recipe

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class ScoreForward(Protocol):
    """Scores the sequences of a packed row, each of which predicts one token: the one its score is read at."""

    model: Any

    def __call__(self, packed: Packed) -> Tensor:
        """float32 [N], one for each prediction."""
        ...


class RewardModel:
    """Scores by the recipe's `rewards.model`. `description` says in a line how.

    forward: how scores are computed (None: the model is loaded here, whole).
    """

    def __init__(
        self,
        recipe: Recipe,
        forward: ScoreForward | None = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
        description: str = "",
    ) -> None:
        if forward is None:
            model = load_classifier(recipe, find_device(recipe.model.device))
            way, description = choose(model)
            forward = WAYS[way](model)
        self.forward, self.ranks, self.description, self.model = forward, ranks, description, forward.model
        self._pad = padding_of(forward.model.config)
        self._tokens = recipe.train.micro_batch_tokens

    def scores(self, batch: Batch) -> Floats:
        """Of every sample, float32 [S]; batch: as `to_score` makes it. Ids are of the classifier's own vocabulary."""
        placed = _placed(batch, self._pad)
        scores: Floats = token_column(placed, self._tokens, self.ranks, self.forward)
        scores = scores[placed.tokens["loss_mask"].astype(bool)]
        return scores


class ModuleScores:
    """By a causal model with its attention replaced by that over the forest, and its linear layer `score`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, packed: Packed) -> Tensor:
        backbone, score = getattr(self.model, self.model.base_model_prefix), self.model.score
        states = hidden_states(backbone, backbone, packed, score.weight.device)
        read = torch.from_numpy(packed.predicted).to(states.device)
        scores: Tensor = score(states.index_select(0, read))
        return scores[:, 0].float()


class SequenceScores:
    """By the model as it is, one sequence after another: right for every classifier, and slow.

    most: as SequenceForward's.
    """

    def __init__(self, model: Any, most: Callable[[int], int] | None = None) -> None:
        self.model, self.most = model, most

    def __call__(self, packed: Packed) -> Tensor:
        paths = [packed.ids[indices(path.spans)] for path in packed.paths if path.predictions]
        wanted = self.most(len(paths)) if self.most is not None else len(paths)
        scores = [self._score(path) for path in [*paths, *[packed.ids[:1]] * (wanted - len(paths))]]
        return torch.stack(scores)[: len(paths)] if scores else torch.zeros(0)

    def _score(self, path: Ints) -> Tensor:
        device = next(self.model.parameters()).device
        score: Tensor = self.model(input_ids=torch.from_numpy(path).to(device)[None]).logits[0, 0].float()
        return score


WAYS: dict[str, Any] = {way.__name__: way for way in (ModuleScores, SequenceScores)}


def to_score(rows: Sequence[npt.NDArray[np.int32]], groups: Sequence[int]) -> Batch:
    """A batch of sequences of at least one id each; groups: equal for neighbours that may begin alike."""
    lengths = np.array([len(row) for row in rows], np.int64)
    ends = np.cumsum(lengths)
    ids = np.concatenate(rows).astype(np.int32) if len(rows) else np.zeros(0, np.int32)
    mask = np.zeros(len(ids), np.uint8)
    mask[ends - 1] = 1
    return Batch(
        np.concatenate([np.zeros(1, np.int64), ends]),
        {"ids": ids, "loss_mask": mask},
        {"prompt_length": (lengths - 1).astype(np.int32), "group": np.array(groups, np.int64)},
    )


def choose(model: Any) -> tuple[str, str]:
    """Return the name of the fastest implementation that is exact for `model`, and a line about it."""
    packed, tolerance = probe_of(model), TOLERANCE.get(next(model.parameters()).dtype, 0.25)
    with torch.no_grad():
        why = disproof(
            lambda: ModuleScores(model)(packed), lambda: SequenceScores(model)(packed), tolerance, scaled=True
        )
    if why is not None:
        return SequenceScores.__name__, f"one sequence at a time ({why})"
    return ModuleScores.__name__, "packed, prompts shared"


def probe_of(model: Any) -> Packed:
    """Return a small packed row on which implementations are compared."""
    rng = np.random.default_rng(0)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    opening = rng.integers(0, vocabulary, 5)
    rows = [np.concatenate([opening, rng.integers(0, vocabulary, n)]) for n in (3, 6)] + [
        rng.integers(0, vocabulary, 9)
    ]
    probe = _placed(to_score(rows, [0, 0, 1]), padding_of(model.config))
    return pack(probe, prefix_trees(probe))


def load_classifier(recipe: Recipe, device: Any = "cpu") -> Any:
    """The sequence classifier that `rewards.model` names, in the policy's precision, frozen.

    Raises UserError: no such folder, no model or another one in it, more than one label, a head without weights.
    """
    from transformers import AutoModelForSequenceClassification

    section, path = recipe.model.frozen, str(recipe.rewards.model)
    place = classifier_folder(path)
    config = classifier_config(path, section)
    model, info = loaded(
        path,
        "its weights",
        lambda: AutoModelForSequenceClassification.from_pretrained(
            place,
            config=config,
            dtype=getattr(torch, section.dtype),
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
        ),
    )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:2])
        raise UserError(f"rewards.model: {path} is not a trained classifier: it has no weights for {missing}")
    return model.to(device).eval().requires_grad_(False)


def classifier_shape(recipe: Recipe) -> Any:
    """The same module without weights, on the device that torch makes tensors on by default."""
    from transformers import AutoModelForSequenceClassification

    config = classifier_config(str(recipe.rewards.model), recipe.model)
    return AutoModelForSequenceClassification.from_config(
        config, dtype=getattr(torch, recipe.model.frozen.dtype), trust_remote_code=recipe.model.trust_remote_code
    ).eval()


def classifier_config(path: str, section: ModelSection) -> Any:
    """Raises UserError: no configuration there, an architecture that cannot classify, more labels than one."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    place = classifier_folder(path)
    config = loaded(
        path,
        "its configuration",
        lambda: AutoConfig.from_pretrained(place, trust_remote_code=section.trust_remote_code),
    )
    remote = "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in KNOWN and not (remote and section.trust_remote_code):
        raise UserError(f"rewards.model: {path} is a {config.model_type!r}, which cannot be a sequence classifier")
    if config.num_labels != 1:
        raise UserError(
            f"rewards.model: {path} has {config.num_labels} labels; a reward model is a sequence classifier with one"
        )
    return config


def classifier_folder(path: str) -> str:
    """What `from_pretrained` is given: a folder that exists, or a hub name. Raises UserError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"rewards.model: {path} holds no config.json; give a folder that `save_pretrained` wrote")
        return str(folder)
    if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"rewards.model: {path} is not a folder; give an existing one, or a hub name")
    return path


def loaded(path: str, what: str, load: Callable[[], Any]) -> Any:
    """`load()`, its errors as one line. This is the boundary to files and to the hub."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would report at length is said in one line, or is nothing
    try:
        return load()
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "" if Path(path).expanduser().exists() else " (a hub name needs the network; a folder must exist)"
        raise UserError(f"rewards.model: {path}: {what} cannot be loaded{hint}: {line}") from error
    finally:
        logging.set_verbosity(before)


def padding_of(config: Any) -> int | None:
    """Return the id that a classifier skips when it looks for the end of a sequence."""
    pad: int | None = config.get_text_config().pad_token_id
    return pad


def _placed(batch: Batch, pad: int | None) -> Batch:
    """The mask on the token that each score is read at: as transformers has it, the last one that is not padding."""
    real = batch.tokens["ids"] != pad if pad is not None else np.ones(int(batch.offsets[-1]), bool)
    steps = np.arange(len(real)) - np.repeat(batch.offsets[:-1], batch.lengths)
    last = np.maximum.reduceat(np.where(real, steps, 0), batch.offsets[:-1]) if len(batch) else np.zeros(0, np.int64)
    mask = np.zeros(len(real), np.uint8)
    mask[batch.offsets[:-1] + last] = 1
    return batch.with_tokens(loss_mask=mask).with_samples(prompt_length=last.astype(np.int32))
