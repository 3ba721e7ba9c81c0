"""`RewardModel`: the tensor work of a sequence classifier that scores trajectories, in one process or as one rank of
several.

Scores equal those of the model on separate sequences up to rounding: packing and shared prompts do not change them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.compute.batch import KEYED, Batch, prefix_trees
from agentrl.compute.forward import TOLERANCE, hidden_states, vision_of
from agentrl.compute.micro_batches import SINGLE_PROCESS, ProcessGroup, token_column
from agentrl.compute.packing import Packed, indices, pack
from agentrl.errors import UserError
from agentrl.models.image_input import image_input
from agentrl.models.load import embeddings, find_device, let_classify
from agentrl.models.prove import disproof
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

T = TypeVar("T")
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class ScoreForward(Protocol):
    """Computes the scores of a packed row, whose only predictions are the tokens at which scores are read."""

    model: Any
    """The classifier."""

    def __call__(self, packed: Packed) -> Tensor:
        """One score for each prediction of the row, float32 [N]."""


class RewardModel:
    """Computes scores by the recipe's `rewards.model`.

    forward: computes the scores of a packed row; None loads the whole model in this process. ranks: the ranks that
    share the model. description: how scores are computed, in one line. Raises as `load_classifier` does.
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
            kind, description = choose(model)
            forward = kind(model)
        self.forward, self.ranks, self.description, self.model = forward, ranks, description, forward.model
        self._pad = padding_of(forward.model.config)
        self._tokens = recipe.train.micro_batch_tokens

    def scores(self, batch: Batch) -> Floats:
        """The score of each sample, float32 [S]. batch: from `scoring_batch`, with ids of the classifier's own
        vocabulary."""
        marked = mark_ends(batch, self._pad)
        scores: Floats = token_column(marked, self._tokens, self.ranks, self.forward)
        scores = scores[marked.tokens["loss_mask"].astype(bool)]
        return scores


class ModuleScores:
    """A `ScoreForward` by a causal model with attention over shared-prefix trees, and its linear layer `score`.
    max_over_ranks: see `Vision`."""

    def __init__(self, model: "PreTrainedModel", max_over_ranks: Callable[[int], int] | None = None) -> None:
        self.model, self.vision = model, vision_of(model, max_over_ranks)

    def __call__(self, packed: Packed) -> Tensor:
        backbone = getattr(self.model, self.model.base_model_prefix)
        device = self.model.get_parameter("score.weight").device
        states = hidden_states(backbone, backbone, packed, device, vision=self.vision)
        read = torch.from_numpy(packed.predicted).to(states.device)
        scores: Tensor = self.model.get_submodule("score")(states.index_select(0, read))
        return scores[:, 0].float()


class SequenceScores:
    """A `ScoreForward` by the unchanged model, one sequence after another: exact for every classifier, and slow.

    max_over_ranks: see `SequenceRunner`.
    """

    def __init__(self, model: "PreTrainedModel", max_over_ranks: Callable[[int], int] | None = None) -> None:
        self.model, self.max_over_ranks = model, max_over_ranks

    def __call__(self, packed: Packed) -> Tensor:
        paths = [packed.ids[indices(path.spans)] for path in packed.paths if path.predictions]
        wanted = self.max_over_ranks(len(paths)) if self.max_over_ranks is not None else len(paths)
        scores = [self._score(path) for path in [*paths, *[packed.ids[:1]] * (wanted - len(paths))]]
        return torch.stack(scores)[: len(paths)] if scores else torch.zeros(0)

    def _score(self, path: Ints) -> Tensor:
        if (vision := vision_of(self.model, self.max_over_ranks)) is not None:
            score_of = self.model.get_submodule("score")
            seen: Tensor = score_of(vision.states(path)[last_real(path, padding_of(self.model.config))])
            return seen[0].float()
        device = next(self.model.parameters()).device
        score: Tensor = self.model(input_ids=torch.from_numpy(path).to(device)[None]).logits[0, 0].float()
        return score


def scoring_batch(rows: Sequence[npt.NDArray[np.generic]], groups: Sequence[int]) -> Batch:
    """A batch of sequences. rows: the ids of each, int32, at least one; int64 where images are among them, keyed
    (`images.keyed`). groups: the group of each; neighbours of one group may share a prefix."""
    lengths = np.array([len(row) for row in rows], np.int64)
    ends = np.cumsum(lengths)
    given = np.concatenate(rows) if len(rows) else np.zeros(0, np.int32)
    ids, shown = np.maximum(given, -1).astype(np.int32), {KEYED: given.astype(np.int64)} if (given < 0).any() else {}
    mask = np.zeros(len(ids), np.uint8)
    mask[ends - 1] = 1
    return Batch(
        np.concatenate([np.zeros(1, np.int64), ends]),
        {"ids": ids, "loss_mask": mask, **shown},
        {"prompt_length": (lengths - 1).astype(np.int32), "group": np.array(groups, np.int64)},
    )


def choose(model: "PreTrainedModel") -> tuple[type[ModuleScores | SequenceScores], str]:
    """The fastest implementation that is exact for `model`, and one line about it."""
    packed, tolerance = probe_of(model), TOLERANCE.get(next(model.parameters()).dtype, 0.25)
    fast, slow = lambda: ModuleScores(model)(packed), lambda: SequenceScores(model)(packed)
    with torch.no_grad():
        why = disproof(fast, slow, tolerance, scaled=True)
    if why is not None:
        return SequenceScores, f"one sequence at a time ({why})"
    return ModuleScores, "packed, prompts shared"


def probe_of(model: "PreTrainedModel") -> Packed:
    """A small packed row on which implementations are compared."""
    rng = np.random.default_rng(0)
    vocabulary = int(embeddings(model).shape[0])
    opening = rng.integers(0, vocabulary, 5)
    rows = [np.concatenate([opening, rng.integers(0, vocabulary, n)]) for n in (3, 6)] + [
        rng.integers(0, vocabulary, 9)
    ]
    probe = mark_ends(scoring_batch(rows, [0, 0, 1]), padding_of(model.config))
    return pack(probe, prefix_trees(probe))


def load_classifier(recipe: Recipe, device: torch.device | str = "cpu") -> "PreTrainedModel":
    """Load the sequence classifier that `rewards.model` names, in the policy's dtype, frozen, onto `device`.

    Raises UserError: no such folder, no classifier in it, more than one label, or a head without weights.
    """
    from transformers import AutoModelForSequenceClassification

    section, path = recipe.model.frozen, str(recipe.rewards.model)
    folder = classifier_folder(path)
    config = classifier_config(path, section)
    model, info = _load_or_explain(
        path,
        "its weights",
        lambda: AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, section.dtype),
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
        ),
    )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:2])
        raise UserError(f"rewards.model: {path} is not a trained classifier: it has no weights for {missing}")
    model.image_input = image_input(folder, section.trust_remote_code)
    frozen: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return frozen


def classifier_skeleton(recipe: Recipe) -> "PreTrainedModel":
    """Build the same module without weights, on torch's default device. Raises UserError as `classifier_config`."""
    from transformers import AutoModelForSequenceClassification

    path, section = str(recipe.rewards.model), recipe.model.frozen
    model = AutoModelForSequenceClassification.from_config(
        classifier_config(path, section),
        dtype=getattr(torch, section.dtype),
        trust_remote_code=section.trust_remote_code,
    ).eval()
    model.image_input = image_input(classifier_folder(path), section.trust_remote_code)
    skeleton: PreTrainedModel = model
    return skeleton


def classifier_config(path: str, section: ModelSection) -> "PretrainedConfig":
    """The transformers configuration of the classifier at `path`.

    Raises UserError: no configuration there, an architecture that cannot classify, or more than one label.
    """
    from transformers import AutoConfig

    folder = classifier_folder(path)
    config: PretrainedConfig = _load_or_explain(
        path,
        "its configuration",
        lambda: AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code),
    )
    remote = "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    if not let_classify(config) and not (remote and section.trust_remote_code):
        raise UserError(f"rewards.model: {path} is a {config.model_type!r}, which cannot be a sequence classifier")
    if config.num_labels != 1:
        raise UserError(
            f"rewards.model: {path} has {config.num_labels} labels; a reward model is a sequence classifier with one"
        )
    return config


def classifier_folder(path: str) -> str:
    """The argument of `from_pretrained` for `path`: an existing folder, or a hub name.

    Raises UserError: `path` is neither, or the folder has no config.json.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"rewards.model: {path} holds no config.json; give a folder that `save_pretrained` wrote")
        return str(folder)
    if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"rewards.model: {path} is not a folder; give an existing one, or a hub name")
    return path


def _load_or_explain(path: str, what: str, load: Callable[[], T]) -> T:
    """`load()`. Raises UserError, one line, for any error of it: this is the boundary to files and to the
    hub."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # its long reports are replaced by one line
    try:
        return load()
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "" if Path(path).expanduser().exists() else " (a hub name needs the network; a folder must exist)"
        raise UserError(f"rewards.model: {path}: {what} cannot be loaded{hint}: {line}") from error
    finally:
        logging.set_verbosity(before)


def padding_of(config: "PretrainedConfig") -> int | None:
    """The padding id, which a classifier skips when it looks for the end of a sequence; None if it has none."""
    pad: int | None = config.get_text_config().pad_token_id
    return pad


def mark_ends(batch: Batch, pad: int | None) -> Batch:
    """Set the loss mask to 1 on the token at which each score is read: the last one that is not padding, as in
    transformers."""
    real = batch.tokens["ids"] != pad if pad is not None else np.ones(int(batch.offsets[-1]), bool)
    steps = np.arange(len(real)) - np.repeat(batch.offsets[:-1], batch.lengths)
    last = np.maximum.reduceat(np.where(real, steps, 0), batch.offsets[:-1]) if len(batch) else np.zeros(0, np.int64)
    mask = np.zeros(len(real), np.uint8)
    mask[batch.offsets[:-1] + last] = 1
    return batch.with_tokens(loss_mask=mask).with_samples(prompt_length=last.astype(np.int32))


def last_real(ids: Ints, pad: int | None) -> int:
    """The index of the last token of one sequence that is not padding, 0 where none is."""
    real = np.flatnonzero(ids != pad) if pad is not None else np.arange(len(ids))
    return int(real[-1]) if len(real) else 0
