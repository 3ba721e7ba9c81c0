"""trainers/torchtitan: torchtitan's Qwen3 as the policy. It is computed on CPUs, which torchtitan is not made for."""

import os
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_help import save_tokenizer
from paths import ROOT
from tiny_models import SIZES, qwen3
from train_help import small
from transformers import GPT2Config, LlamaConfig, Qwen3Config
from warm import Python

from agentrl.algo.loss import entropy
from agentrl.compute.batch import Batch
from agentrl.compute.forward import SequenceForward, probe_of
from agentrl.compute.micro_batches import EMPTY
from agentrl.compute.packing import indices, micro_batches
from agentrl.errors import UserError
from agentrl.learner.roles import make_trainer
from agentrl.training.preflight import lacking

PACKAGE = ROOT / "trainers" / "torchtitan"
NAME = "agentrl_torchtitan:TitanRoles"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),  # torchtitan's imports
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


@pytest.fixture
def packages(torchtitan_venv: str) -> list[str]:
    """Folders of what this Python lacks: torchtitan, and the package."""
    return [str(next(Path(torchtitan_venv).glob("lib/python3*/site-packages"))), str(PACKAGE)]


@pytest.fixture
def titan(packages: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the worker, with torchtitan ready to be imported."""
    for folder in packages:
        monkeypatch.syspath_prepend(folder)
    worker = import_module("agentrl_torchtitan.worker")
    worker.import_titan(torch.device("cpu"))
    return worker


def whole(titan: Any, model: Any, attention: str) -> Any:
    """torchtitan's model with the weights of transformers', in one process."""
    config = titan.titan_config(model.config, attention)
    made = config.build()
    made.init_states()
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    titan.adopt(model, made, titan.parameter_names(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
    return titan.TitanForward(made.eval(), attention, 1)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_its_model_computes_what_transformers_does(titan: Any, attention: str, tied: bool) -> None:
    model = qwen3(tie_word_embeddings=tied, **HEADS)
    packed = probe_of(model)
    with torch.no_grad():
        wanted = SequenceForward(model)(packed, 0.7)
        torch.compiler.set_stance("force_eager")  # flex attention is compiled for a minute else
        try:
            forward = whole(titan, model, attention)
            found, empty = forward(packed, 0.7), forward(EMPTY, 0.7)
        finally:
            torch.compiler.set_stance("default")
    for ours, theirs in zip(wanted, found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=1e-4)
    assert [len(each) for each in empty] == [0, 0]


@pytest.mark.slow
def test_a_pass_without_predictions_has_a_gradient_of_zero(titan: Any) -> None:
    forward = whole(titan, qwen3(**HEADS), "sdpa")
    forward(EMPTY, 1.0)[0].sum().backward()
    gradients = [p.grad for p in forward.model.parameters()]
    assert all(g is not None and not g.any() for g in gradients)


def test_what_compares_distributions_is_given_the_logits_of_the_predictions(titan: Any) -> None:
    model = qwen3(**HEADS)
    packed, forward = probe_of(model), whole(titan, model, "sdpa")
    logprobs, entropies, logits = forward(packed, 0.5, lambda states, head, bias: states)
    log_p = (logits / 0.5).log_softmax(-1)
    torch.testing.assert_close(log_p.gather(1, torch.from_numpy(packed.target)[:, None])[:, 0], logprobs)
    torch.testing.assert_close(entropy(log_p), entropies)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("multiple", [1, 2, 128])
def test_every_path_of_a_micro_batch_is_a_sequence_of_its_own(titan: Any, packs: bool, multiple: int) -> None:
    packed = probe_of(qwen3())
    rows = titan.rows_of(packed, multiple, packs)
    ids, positions, index = rows.ids.flatten().numpy(), rows.positions.flatten().numpy(), rows.index.numpy()
    assert rows.ids.shape == rows.positions.shape
    assert rows.ids.shape[0] == (1 if packs else len(packed.paths))
    assert rows.ids.shape[1] % multiple == 0
    first = 0
    for path in packed.paths:
        places = indices(path.spans)
        for number in range(first, first + path.predictions):
            start = index[number] - positions[index[number]]
            assert (ids[start : start + len(places)] == packed.ids[places]).all()
            assert (positions[start : start + len(places)] == np.arange(len(places))).all()
            assert ids[index[number] + 1] == packed.target[number]  # what it predicts stands behind it
        first += path.predictions
    empty = titan.rows_of(EMPTY, multiple, packs)
    assert tuple(empty.ids.shape) == (1, multiple)
    assert len(empty.index) == 0


def test_a_micro_batch_has_as_many_tokens_as_are_computed(titan: Any) -> None:
    rows = [np.arange(1, 101)] * 4
    batch = Batch(
        np.arange(0, 500, 100),
        {"ids": np.concatenate(rows).astype(np.int32), "loss_mask": np.tile(np.arange(100) >= 90, 4).astype(np.uint8)},
        {"prompt_length": np.full(4, 90, np.int32), "group": np.zeros(4, np.int64)},
    )
    shared, alone = (list(micro_batches(each, 200)) for each in (batch, titan.ungrouped(batch)))
    assert len(shared) == 1
    assert [titan.rows_of(packed, 1, True).ids.numel() for packed in alone] == [200, 200]


def test_the_masks_of_a_packed_row_keep_sequences_apart(titan: Any) -> None:
    """varlen attention, which needs a GPU, is told where sequences begin by the positions alone."""
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    packed = probe_of(qwen3())
    rows = titan.rows_of(packed, 1, True)
    begins = create_varlen_metadata_for_document(rows.positions).cu_seq_q.tolist()
    lengths = [sum(end - start for start, end in path.spans) for path in packed.paths]
    assert begins == np.cumsum([0, *lengths]).tolist()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"attention_bias": True}, "its attention has biases"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "see a window"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "scaled .linear."),
    ],
)
def test_models_that_it_does_not_make_are_refused(titan: Any, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"dense Qwen3 models, and .*{line}"):
        titan.titan_config(Qwen3Config(**SIZES | changes), "sdpa")


@pytest.mark.parametrize("kind", [LlamaConfig, GPT2Config])
def test_models_of_other_kinds_are_refused(titan: Any, kind: Any) -> None:
    with pytest.raises(UserError, match=f"it is a '{kind.model_type}'"):
        titan.titan_config(kind(), "sdpa")


def test_a_model_with_other_parameters_is_not_taken_for_its_own(titan: Any) -> None:
    config = titan.titan_config(qwen3(**HEADS).config, "sdpa")
    for other, line in ((qwen3(**HEADS | {"head_dim": 8}), "which is"), (qwen3(**HEADS, num_hidden_layers=1), "lacks")):
        with pytest.raises(RuntimeError, match=line):
            titan.adopt(other, config.build(), titan.parameter_names(config))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"cluster__trainer__args": {"tensor_parallel": 3}}, "3 times replicate 1 does not divide the 2 workers"),
        ({"cluster__trainer__args": {"replicate": 0}}, "1 or more"),
        ({"cluster__trainer__args": {"attention": "eager"}}, "attention.*'sdpa'"),
        ({"cluster__trainer__args": {"stages": 2}}, "stages: TitanRoles takes no such argument"),
        ({"model__lora": {"rank": 4}}, "does not do model.lora"),
        ({"model__freeze": ["vision"]}, "does not do model.freeze"),
    ],
)
def test_what_it_does_not_do_is_said_before_anything_starts(
    titan: Any, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    recipe = small(**{"cluster__trainer__name": NAME, "cluster__workers": 2, **changes})
    with pytest.raises(UserError, match=line):
        make_trainer(recipe, recipe, tmp_path, print, print)


def test_its_name_leads_to_it(titan: Any) -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["agentrl.trainers"] == {"torchtitan": NAME}
    assert lacking(small(cluster__trainer=NAME, cluster__workers=2)) == []
    pins = (PACKAGE / "constraints.txt").read_text(encoding="utf-8").split()
    assert set(project["dependencies"]) - {"agentrl"} <= set(pins)


CHECK = """
import json, sys
from agentrl.testing import check_trainer
check_trainer({name!r}, model=sys.argv[1], cluster=json.loads(sys.argv[2]))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        '{"workers": 2, "trainer.args.tensor_parallel": 2}',
        '{"workers": 2}',
        pytest.param('{"workers": 2, "trainer.args.replicate": 2}', marks=pytest.mark.long),
    ],
)
def test_it_keeps_the_contract_of_trainers_on_two_ranks(packages: list[str], tmp_path: Path, args: str) -> None:
    model = qwen3(tie_word_embeddings="tensor" not in args, **HEADS)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*packages, os.environ.get("PYTHONPATH", "")])}
    tried = Python(["-c", CHECK.format(name=NAME), str(tmp_path), args], env=env)
    assert tried.wait(400) == 0, tried.said()[-2000:]
