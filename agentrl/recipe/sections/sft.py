"""`sft` and `reward_model`: what is learned from conversations that exist."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from agentrl.errors import nearest
from agentrl.recipe.sections.section import Above0, AtLeast0, Fraction, Positive, Section, Tokens, Unit, Warmup, listed


class SftStage(Section):
    """One stage of supervised training."""

    style: str = "clean"
    """Style of demonstrations, as the environment's `demonstrate` knows it; without effect beside sft.source."""
    steps: Positive | None = None
    """Training steps of the stage. null: as many as `epochs` takes; of demonstrations, which have no end, 1000."""
    epochs: Above0 = 1.0
    """Passes over the conversations of sft.source, where steps is null."""
    lr: Above0 | None = None
    """Peak learning rate. null: 1e-3 for a new model and for one of less than 100 M parameters, 1e-4 for an adapter,
    else 1e-5."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Course of the learning rate after the warm-up."""
    min_lr_ratio: Fraction = 0.03
    """The learning rate falls to this share of its peak, and no lower."""
    batch: Annotated[Positive, Unit("conversations per step")] = 32
    """Conversations of each step."""
    muon_lr: Above0 | None = None
    """Train the matrices of the blocks by Muon, at this peak learning rate (0.02 is usual), which follows the same
    schedule as lr. It wants one process. null: by AdamW, as the rest."""
    warmup: Warmup | None = None
    """Where the learning rate rises from 0 to its peak: a number of steps, or, below 1, a share of the stage. null: 60;
    beside sft.source a tenth of the stage."""
    weight_decay: AtLeast0 = 0.05
    """Weight decay of the optimizer."""


QWEN3 = {
    "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024, "rope_theta": 10_000,
}  # fmt: skip
"""Shape of a new model, by the names of Hugging Face's Qwen3Config, with the defaults."""


def _qwen3(config: dict[str, int]) -> dict[str, int]:
    for name in config:
        if name not in QWEN3:
            raise ValueError(f"{name!r} is not part of the model's shape{nearest(name, QWEN3)}")
    return QWEN3 | config


QWEN3_VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2,
    "num_position_embeddings": 256,
}  # fmt: skip
"""Shape of a new model's vision tower, by the names of Qwen3VLVisionConfig, with the defaults."""


def _qwen3_vision(config: dict[str, int] | None) -> dict[str, int] | None:
    for name in config or ():
        if name not in QWEN3_VISION:
            raise ValueError(f"{name!r} is not part of the vision tower's shape{nearest(name, QWEN3_VISION)}")
    return None if config is None else QWEN3_VISION | config


class NewModel(Section):
    """A model (Qwen3 architecture, Qwen3-VL with `vision`) and tokenizer made from nothing, instead of starting from
    `model.path`."""

    config: Annotated[dict[str, Positive], AfterValidator(_qwen3)] = Field(QWEN3, validate_default=True)
    """Shape of the model, by the names of Hugging Face's Qwen3Config."""
    vision: Annotated[dict[str, Positive] | None, AfterValidator(_qwen3_vision)] = None
    """Shape of a tower that turns images into features, by the names of Qwen3VLVisionConfig; `{}` takes the defaults.
    null: none."""
    init: Literal["random", "induction"] = "random"
    """Weights before the first step. induction: with heads that go on as an earlier place of the context went on, so
    that a model begins by copying; it has as many key-value heads as heads, and a hidden_size of three times head_dim
    or more. random: without."""
    vocabulary: Tokens = 832
    """Size of the tokenizer's vocabulary."""
    pre_tokenizer: Literal["qwen", "words"] = "qwen"
    """What merges do not cross. qwen: words with the space before them, as in Qwen's tokenizer; words: spaces are
    tokens of their own, so that a word has the same tokens wherever it stands, which small models copy sooner."""
    texts: Annotated[Positive, Unit("demonstrations")] = 16_000
    """Demonstrations, over all splits, that the tokenizer learns from."""
    splits: tuple[str, ...] | None = None
    """Splits whose demonstrations the tokenizer learns from. null: train and the held-out ones that are reported. Of
    [train], words that are held out have the tokens that any unknown word has."""
    chat_template: str
    """A jinja file, relative to the recipe."""
    tokens: tuple[str, ...] = ()
    """Texts that become one token each, such as the frame of a call's JSON."""

    @model_validator(mode="after")
    def _has_room(self) -> "NewModel":
        """Induction heads need two layers with two heads of their own keys, and room beside what a token is."""
        heads, shape = self.config["num_attention_heads"], self.config
        fits = shape["num_hidden_layers"] > 1 and shape["num_key_value_heads"] == heads > 1
        if self.init == "induction" and (not fits or shape["hidden_size"] < 3 * shape["head_dim"] or self.vision):
            raise ValueError(
                "init: induction wants two layers or more, as many key-value heads as heads, two or more, a "
                "hidden_size of three times head_dim or more, and no vision"
            )
        return self


class SftSelect(Section):
    """Which stored rollouts `sft.source` takes, where it is the folder of a run or of an evaluation."""

    split: str | None = None
    """Split of their tasks. null: train, or every split that is stored where it is not."""
    reward: float | None = None
    """Least reward. null: any."""
    turns: Annotated[Positive, Unit("turns")] | None = None
    """Most assistant turns. null: any."""
    solved: bool = False
    """Only those that the recipe's environment calls solved."""
    best: bool = False
    """Only those whose reward is the highest of their task."""
    distinct: bool = False
    """Of rollouts of a task with the same tokens only one."""
    per_task: Annotated[Positive, Unit("rollouts")] | None = None
    """At most so many of a task: the highest rewards first, then those that were sampled first. null: all."""


class SftSection(Section):
    """Supervised fine-tuning on conversations, or on an environment's demonstrations (`agentrl sft`)."""

    source: str | None = None
    """Conversations: a .jsonl or .parquet file, a folder of them, a hub name, module:function, or the folder of a run
    or evaluation, whose rollouts are taken with their token ids. null: the environment's demonstrations."""
    format: Literal["openai", "sharegpt"] = "openai"
    """Form of a row: openai (`messages`, and `tools` where there are any) or sharegpt (`conversations`, `system`,
    `tools`)."""
    images: str = "images"
    """Column with a row's image, or a list of them: paths, `{bytes, path}`, data: URLs. They stand where the messages
    say `<image>`, or hold a part of type image without one."""
    image_folder: str | None = None
    """Folder against which paths of images stand. null: the folder of the row's file."""
    image_urls: Literal["refuse", "public", "any"] = "refuse"
    """What is done about images that are http addresses: refuse them, fetch them from public machines, or from any,
    those of one's own network included."""
    learn: Literal["all", "last", "flagged"] = "all"
    """Which assistant turns are learned: all but those whose message says `weight: 0` or `train: false`; the last; or
    only those whose message says `weight: 1` or `train: true`."""
    history: Literal["sampled", "template"] = "sampled"
    """Earlier turns of a row: `sampled` keeps them as they were said, as rollouts do; `template` lays out a path for
    each learned turn, with what is before it as the chat template writes it by then."""
    select: SftSelect = SftSelect()
    retokenize: bool = False
    """Lay out stored rollouts anew by their messages, for a model with another tokenizer than the one they are of."""
    max_tokens: Tokens | None = None
    """Longest conversation; longer ones are refused. null: the model's context."""
    held_out: float | str = 0.0
    """Conversations that are not learned, and whose loss is measured every eval.every steps: a share of the source, a
    file, or another split of the hub's."""
    accuracy: bool | None = None
    """Measure held-out accuracy on the recipe's environment, as `eval` says. null: if the recipe has a source and names
    an environment."""
    new_model: NewModel | None = None
    """Make a model from nothing. null: start from `model.path`."""
    stages: Annotated[tuple[SftStage, ...], Field(min_length=1)] = (SftStage(),)
    """Stages of training, one after the other."""

    @model_validator(mode="after")
    def _sources(self) -> "SftSection":
        if self.source is not None and self.new_model is not None:
            raise ValueError("sft.new_model learns its tokenizer from demonstrations: leave out sft.source")
        if isinstance(self.held_out, float) and not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out:g}, and a share lies between 0 and 1")
        if self.source is None and self.held_out:
            raise ValueError("sft.held_out is a part of sft.source: demonstrations are made anew for each step")
        return self


class RewardModelSection(Section):
    """Training of a reward model on pairs of conversations (`agentrl reward-model`)."""

    source: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(listed)]
    """Files of pairs (.jsonl, .json, .parquet), run folders whose rollouts are compared, or both."""
    pairs_per_group: Annotated[Positive, Unit("pairs")] = 4
    """Most pairs that are drawn from the rollouts of one group of a run folder."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the pairs that is held out, by whole prompts, and evaluated every eval.every steps; 0: none."""
    epochs: Annotated[Positive, Unit("epochs")] = 1
    """Passes over the pairs."""
    batch: Annotated[Positive, Unit("pairs per step")] = 64
    """Pairs of each step."""
    lr: Above0 = 1e-5
    """Peak learning rate, after the warm-up of `train`; it falls to 0 by a cosine."""
