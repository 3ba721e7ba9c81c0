"""`TitanWorker`: one rank, whose policy is torchtitan's model.

The parameters of torchtitan's model stand in the modules of transformers' Qwen3 too, which give them the names that
checkpoints and servers know them by. Which is which is told by torchtitan's own state-dict adapter.
"""

import importlib.util
import re
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from agentrl.algo.loss import entropy
from agentrl.compute.batch import Batch
from agentrl.compute.kernels import Further
from agentrl.compute.packing import Packed, indices
from agentrl.distributed.fsdp.build import Sharded, open_causal
from agentrl.distributed.fsdp.mesh import ParallelContext
from agentrl.distributed.fsdp.role import match_types, read_source
from agentrl.distributed.fsdp.scatter import fill
from agentrl.distributed.worker import Floats, TrainWorker
from agentrl.errors import UserError
from agentrl.learner.metrics import MicroBatchMetrics
from agentrl.models.load import load_skeleton
from agentrl.recipe.schema import Recipe
from agentrl_torchtitan import TitanArgs

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
"""The one module that torchtitan's Qwen3 needs triton for: it sends tokens to experts, of which a dense model has
none."""
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
"""What compilation and checkpointing add to the names of parameters."""
BLOCK = 128
"""Tokens that the rows of packed sequences are a multiple of: those of a block of flex attention's mask."""


class TitanWorker(TrainWorker):
    """A rank of the trainer."""

    args: ClassVar[TitanArgs]

    def policy(self, context: ParallelContext) -> Sharded:
        """Build torchtitan's model over the ranks. Raises UserError: `model.path` is not a dense Qwen3."""
        return build(self.recipe, context, self.args)

    def logprobs(self, batch: Batch) -> Floats:
        """The actor's log-probs of the rank's part of a batch."""
        found: Floats = super().logprobs(ungrouped(batch))
        return found

    def entropies(self, batch: Batch) -> Floats:
        """The entropies of the rank's part of a batch."""
        found: Floats = super().entropies(ungrouped(batch))
        return found

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make an update of the actor with the rank's part of a batch."""
        found: MicroBatchMetrics = super().update(ungrouped(batch), rate)
        return found


def ungrouped(batch: Batch) -> Batch:
    """Give each sample a group of its own: so a micro-batch counts what samples share for each, as it is computed."""
    return batch.with_samples(group=np.arange(len(batch)))


def build(recipe: Recipe, context: ParallelContext, args: TitanArgs) -> Sharded:
    """Build the policy over the ranks, and read its weights; every rank calls this. Raises UserError."""
    import_titan(context.device)
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.qwen3 import parallelize_qwen3

    section, size = recipe.model, context.size
    source, manifest = read_source(lambda: open_causal(section, recipe.train.seed), context)
    model: Any = load_skeleton(section)[0]
    match_types(model, manifest, context)
    attention = args.attention if args.attention != "auto" else "flex" if context.device.type == "cuda" else "sdpa"
    config = titan_config(model.config, attention)
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=args.replicate,
        data_parallel_shard_degree=size // (args.replicate * args.tensor_parallel),
        tensor_parallel_degree=args.tensor_parallel,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, size)
    set_spmd_backend(parallelism.spmd_backend)
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        titan = config.build().to(getattr(torch, section.dtype))
    dims.build_mesh()
    kind = "bfloat16" if section.compute == "bfloat16" else "float32"
    parallelize_qwen3(
        titan,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=kind, mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=section.compile),
        ac_config=FullAC.Config() if section.checkpointing else None,
        dump_folder="",
    )
    titan.to_empty(device=context.device)
    titan.init_states()
    for module in titan.modules():
        if isinstance(module, FSDPModule):  # torchtitan adds gradients up over ranks, agentrl wants their mean
            module.set_gradient_divide_factor(float(size // args.tensor_parallel))
    adopt(model, titan, parameter_names(config))
    fill(model, source, context)
    model.generation_config = manifest.known
    spread = f"matrices divided by {args.tensor_parallel}, " if args.tensor_parallel > 1 else ""
    spread += f"in {args.replicate} copies, " if args.replicate > 1 else ""
    forward = TitanForward(titan.eval(), attention, args.tensor_parallel)
    return Sharded(model.eval(), forward, f"torchtitan's model, {attention} attention, {spread}over {size} workers")


def titan_config(config: Any, attention: str) -> Any:
    """Make torchtitan's configuration of the model that transformers' describes. Raises UserError: it has none."""
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.qwen3 import Qwen3Model
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock

    if config.model_type != "qwen3":  # others lack some of what is read below
        raise UserError(
            f"model.path: the trainer torchtitan makes dense Qwen3 models, and it is a {config.model_type!r}"
        )
    rope = config.rope_parameters or {}
    odd = {
        "its attention has biases": config.attention_bias,
        "some of its layers see a window": set(config.layer_types or ()) - {"full_attention"},
        f"its positions are scaled ({rope.get('rope_type')})": rope.get("rope_type", "default") != "default",
    }
    if why := [reason for reason, found in odd.items() if found]:
        raise UserError(f"model.path: the trainer torchtitan makes dense Qwen3 models, and {why[0]}")
    dim, head = config.hidden_size, config.head_dim
    leave = {"weight": skip_param_init}  # every value is read from the model's files

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps, param_init=leave)

    def layer() -> Any:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=config.num_attention_heads,
                n_kv_heads=config.num_key_value_heads,
                head_dim=head,
                wqkv_param_init=leave,
                wo_param_init=leave,
                inner_attention=ScaledDotProductAttention.Config()
                if attention == "sdpa"
                else get_attention_config(attention),
                fuse_qkv=False,  # as transformers has them
                rope=CosSinRoPE.Config(
                    dim=head, max_seq_len=config.max_position_embeddings, theta=float(rope["rope_theta"])
                ),
                qk_norm=norm(head),
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=config.intermediate_size, w1_param_init=leave, w2w3_param_init=leave
            ),
        )

    return Qwen3Model.Config(
        vocab_size=config.vocab_size,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=dim, param_init=leave),
        lm_head=Linear.Config(in_features=dim, out_features=config.vocab_size, param_init=leave),
        layers=[layer() for _ in range(config.num_hidden_layers)],
    )


def parameter_names(config: Any) -> dict[str, str]:
    """Map the names of transformers' parameters to torchtitan's, by torchtitan's state-dict adapter."""
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    patterns = {theirs: ours for theirs, ours in Qwen3StateDictAdapter(config, None).from_hf_map.items() if ours}
    layers = range(len(config.layers))
    return {
        theirs.format(layer): ours.format(layer)
        for theirs, ours in patterns.items()
        if theirs.count("{}") < 2  # those with two are of experts
        for layer in (layers if "{}" in theirs else [0])
    }


def adopt(model: nn.Module, titan: nn.Module, named: dict[str, str]) -> None:
    """Put the parameters of torchtitan's model in the place of those of transformers' modules. Raises RuntimeError:
    the two do not have the same parameters, of the same shapes."""
    theirs = {WRAPPERS.sub("", name): p for name, p in titan.named_parameters(remove_duplicate=False)}
    taken = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        found = theirs.get(named.get(name, ""))
        if found is None or found.shape != parameter.shape:
            shape = None if found is None else tuple(found.shape)
            raise RuntimeError(f"torchtitan's model has {shape} for {name}, which is {tuple(parameter.shape)}")
        taken.add(named[name])
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, found)
    if more := sorted(theirs.keys() - taken):
        raise RuntimeError(f"torchtitan's model has {more[0]}, and {len(more) - 1} more, which transformers' lacks")


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch as torchtitan's model takes it."""

    ids: Tensor
    """int64 [B, L]: token ids; what fills a row up is 0."""
    positions: Tensor
    """int64 [B, L]: from 0 in each sequence, and in what fills a row up: so the model tells them apart."""
    index: Tensor
    """int64 [N]: the place in [B * L] of the token whose hidden state makes each prediction."""


def rows_of(packed: Packed, multiple: int, packs: bool) -> Rows:
    """Lay out every path of the micro-batch as a sequence of its own: what several have in common is there for each.
    packs: one behind another in one row; else each in a row. multiple: tokens that the length of rows is a multiple
    of."""
    sequences = [(indices(path.spans), path.predictions) for path in packed.paths if path.predictions]
    lengths = [len(places) for places, _ in sequences] or [1]
    length = -(-(sum(lengths) if packs else max(lengths)) // multiple) * multiple
    ids = np.zeros(length if packs else length * len(lengths), np.int64)
    positions = np.tile(np.arange(length), 1 if packs else len(lengths))
    index = np.zeros(len(packed.predict), np.int64)
    begin = first = 0
    for places, predictions in sequences:
        own = slice(first, first + predictions)
        ids[begin : begin + len(places)] = packed.ids[places]
        positions[begin : begin + len(places)] = np.arange(len(places))
        index[own] = begin + packed.positions[packed.predict[own]]
        first += predictions
        begin += len(places) if packs else length
    if packs:
        positions[begin:] = np.arange(length - begin)
    shape = -1, length
    return Rows(torch.from_numpy(ids).view(shape), torch.from_numpy(positions).view(shape), torch.from_numpy(index))


class TitanForward:
    """A `Forward` of torchtitan's model (see agentrl's `compute.forward`)."""

    def __init__(self, model: Any, attention: str, tensor_parallel: int) -> None:
        self.model, self._packs = model, attention != "sdpa"
        self._multiple = BLOCK if self._packs else tensor_parallel
        self._whole_rows = tensor_parallel > 1
        model._skip_lm_head = not self._whole_rows  # else logits of all tokens stand at once, which TP divides

    def __call__(self, packed: Packed, temperature: float, further: Further | None = None) -> tuple[Any, ...]:
        """Log-probs and entropies (nats) of the predictions, float32 [N] each, and `further`."""
        count = len(packed.predict)
        logits = self._logits(packed).float()
        nothing = 0.0 * logits[count:].sum()  # a rank without predictions has a gradient, too
        logits = logits[:count]
        scaled = logits / temperature
        log_p = (scaled if packed.masks is None else packed.masks.apply(scaled, slice(0, count))).log_softmax(-1)
        target = torch.from_numpy(packed.target).to(log_p.device)
        found = log_p.gather(1, target[:, None])[:, 0] + nothing, entropy(log_p) + nothing
        return found if further is None else (*found, further(logits, None, None))

    def _logits(self, packed: Packed) -> Tensor:
        """The logits of the predictions [N, V]; where there are none, those of any token."""
        device = next(self.model.parameters()).device
        rows = rows_of(packed, self._multiple, self._packs)
        ids, positions, index = (part.to(device) for part in (rows.ids, rows.positions, rows.index))
        index = index if len(index) else index.new_zeros(1)
        out = self.model(ids, positions, self.model.get_attention_masks(positions) if self._packs else None)
        if self._whole_rows:
            logits = out.full_tensor() if isinstance(out, DTensor) else out
            logits = logits.flatten(0, 1)[index]
        else:
            logits = self.model.lm_head(out.flatten(0, 1)[index][None])[0]
        if not torch.is_grad_enabled():
            for module in self.model.modules():
                if isinstance(module, FSDPModule):  # a checkpoint that is loaded next changes the shards
                    module.reshard()
        return logits


def import_titan(device: torch.device) -> None:
    """Import torchtitan where it would look for triton or a GPU, and there is none."""
    if importlib.util.find_spec("triton") is None and KERNELS not in sys.modules:
        absent: Any = ModuleType(KERNELS, "Kernels of triton, which this Python lacks.")
        absent.__getattr__ = lambda name: None
        sys.modules[KERNELS] = absent
    if device.type != "cuda":
        from torchtitan.distributed import parallel_dims

        parallel_dims.device_type = device.type  # it takes a GPU for granted
