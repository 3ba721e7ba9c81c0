"""Constrained turns: what the grammar allows is sampled, and the trainer computes the log-probs of those draws."""

import asyncio
import functools
import json
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.forward import BlockForward, ModuleForward, SequenceForward
from agentrl.compute.kernels import with_entropies
from agentrl.compute.packing import pack
from agentrl.constraint import Constraint, Shape, allows, packed, unpacked
from agentrl.engine.base import ConstraintError, Generation, GenerationFinish, Sampling
from agentrl.engine.grammar import Grammars
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.transformers import TransformersEngine
from agentrl.models.load import load_model
from agentrl.plugins.types import Task
from agentrl.recipe.sections.model import ModelSection
from agentrl.trajectory import FinishReason, InvariantError, Trajectory, Turn, check_invariants

SHORT = {"type": "string", "maxLength": 9}
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["big", "small"]},
        "why": {"type": "string", "maxLength": 9},
    },
    "required": ["n", "kind", "why"],
    "additionalProperties": False,
}
JSON = Constraint((Shape("", json.dumps(SCHEMA), ""),))
CALL = Constraint(
    tuple(Shape(f'<tool_call>\n{{"name": "{n}", "arguments": ', json.dumps(SCHEMA), "}\n</tool_call>") for n in "ab")
)
THINKS = replace(JSON, thought=("<think>", "</think>"))
CONSTRAINTS = [JSON, CALL, THINKS, replace(THINKS, begun=True), None]
STOP = 2


@functools.cache
def tiny() -> Any:
    """The embedded model, and its tokenizer."""
    return load_model(ModelSection(path="tiny"))


@functools.cache
def sampled(kind: type = LocalEngine, **how: Any) -> tuple[list[list[int]], list[Generation]]:
    """Turns under each of CONSTRAINTS, at once, after prompts of which some are equal."""
    model, tokenizer = tiny()
    prompts = [tokenizer(text)["input_ids"] for text in ("<|im_start|>user\nTom has 3 apples", "Lily")]
    prompts = [prompts[i % 2] for i in range(2 * len(CONSTRAINTS))]

    async def run() -> list[Generation]:
        engine: Any = kind(model, max_batch=6, max_context=400, tokenizer=tokenizer)
        asked = [Sampling(**{"max_tokens": 60, "stop_ids": (STOP,), **how}, seed=i) for i in range(len(prompts))]
        turns = [
            engine.generate(prompt, replace(one, constraint=CONSTRAINTS[i // 2]), str(i))
            for i, (prompt, one) in enumerate(zip(prompts, asked, strict=True))
        ]
        try:
            return await asyncio.gather(*turns)
        finally:
            await engine.close()

    return prompts, asyncio.run(run())


def text_of(turn: Generation) -> str:
    return str(tiny()[1].decode(turn.ids[:-1] if turn.ids[-1] == STOP else turn.ids))


def trajectory(prompt: list[int], turn: Generation) -> Trajectory:
    total, start = len(prompt) + len(turn.ids), len(prompt)
    mask = (np.arange(total) >= start).astype(np.uint8)
    logprobs = np.concatenate([np.zeros(start), turn.logprobs]).astype(np.float32)
    allowed = None
    if turn.allowed is not None:
        allowed = np.full(total, None, object)
        allowed[start:] = turn.allowed
    return Trajectory(
        "r", Task("t", {}), 0, np.array([*prompt, *turn.ids], np.int32), mask, logprobs,
        np.where(mask, 0, -1).astype(np.int32), start, (Turn(start, total),), (), {}, FinishReason.STOP,
        allowed=allowed,
    )  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_the_trainer_gives_a_masked_token_the_log_prob_that_it_was_drawn_by(how: Any) -> None:
    prompts, turns = sampled(**how)
    trajectories = [trajectory(*pair) for pair in zip(prompts, turns, strict=True)]
    for t in trajectories:
        check_invariants(t)
    batch = Batch.from_trajectories(trajectories, [i % 2 for i in range(len(prompts))])
    batch = batch.select(np.argsort(batch.samples["group"], kind="stable"))
    row = pack(batch, prefix_trees(batch))
    assert len(row.ids) < len(batch.tokens["ids"])  # prompts are shared
    for forward in (BlockForward, ModuleForward, SequenceForward):
        with torch.no_grad(), with_entropies():
            found, entropy = forward(tiny()[0])(row, how.get("temperature") or 1.0)
        np.testing.assert_allclose(found.numpy(), batch.tokens["logprobs"][row.source], rtol=1e-5, atol=1e-5)
        assert torch.isfinite(entropy).all()
        forced = [allowed is not None and unpacked(allowed, 1024).sum() == 1 for allowed in batch.tokens["allowed"]]
        assert entropy[torch.from_numpy(np.array(forced)[row.source])].abs().max() < 1e-6
    plain = pack(replace(batch, tokens={k: v for k, v in batch.tokens.items() if k != "allowed"}), prefix_trees(batch))
    with torch.no_grad():
        assert (BlockForward(tiny()[0])(plain, how.get("temperature") or 1.0)[0] - found).abs().max() > 0.1
    assert plain.masks is None


def test_the_ids_that_were_allowed_are_those_that_the_library_finds_again() -> None:
    _, turns = sampled()
    model, tokenizer = tiny()
    grammars = Grammars(tokenizer, model.get_input_embeddings().weight.shape[0])
    for i, turn in enumerate(turns):
        constraint = CONSTRAINTS[i // 2]
        if constraint is None:
            assert turn.allowed is None
            continue
        assert turn.allowed is not None
        again = grammars.matcher(Sampling(1, stop_ids=(STOP,), constraint=constraint))
        for token, allowed in zip(turn.ids, turn.allowed, strict=True):
            bits = unpacked(allowed, grammars.vocabulary)
            assert bits[token]
            assert packed(again.bits()) == allowed
            again.take(token)
        assert again.allowed == turn.allowed


def test_what_is_sampled_is_what_was_asked_for() -> None:
    _, turns = sampled()
    whole = 0
    for i, turn in enumerate(turns):
        text = text_of(turn)
        if turn.finish is not GenerationFinish.STOP or CONSTRAINTS[i // 2] is None:
            continue
        whole += 1
        if i // 2 == 1:
            assert text.startswith("<tool_call>\n")
            call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert call["name"] in "ab"
            jsonschema.validate(call["arguments"], SCHEMA)
        else:
            jsonschema.validate(json.loads(text.rpartition("</think>")[2]), SCHEMA)
            assert ("</think>" in text) or i // 2 != 3
    assert whole >= 4


@pytest.mark.slow
def test_both_engines_of_this_process_sample_the_same() -> None:
    ours, theirs = (sampled(kind)[1] for kind in (LocalEngine, TransformersEngine))
    assert [turn.ids for turn in ours] == [turn.ids for turn in theirs]
    assert [turn.allowed for turn in ours] == [turn.allowed for turn in theirs]


@pytest.mark.parametrize("schema", [{"not": {}}, {"type": "string", "pattern": "("}, {"$ref": "#/x"}], ids=str)
def test_a_schema_that_cannot_be_kept_to_is_one_line(schema: Any) -> None:
    constraint = Constraint((Shape("", json.dumps(schema), ""),))
    with pytest.raises(ConstraintError) as error:
        Grammars(tiny()[1], 1024).matcher(Sampling(1, stop_ids=(STOP,), constraint=constraint))
    assert "\n" not in str(error.value)


def test_from_a_calls_first_token_to_its_last_it_is_held_to_a_schema_and_else_to_nothing() -> None:
    _, tokenizer = tiny()
    grammars, rng = Grammars(tokenizer, 1024), np.random.default_rng(0)
    sampling = Sampling(1, stop_ids=(STOP,), constraint=replace(CALL, opener="<tool_call>"))
    opener = tokenizer.convert_tokens_to_ids("<tool_call>")
    text = tokenizer("Let me see")["input_ids"]
    matcher = grammars.matcher(sampling)
    taken: list[int] = []

    def take(token: int) -> None:
        taken.append(token)
        matcher.take(token)

    for _ in range(3):
        for token in text:
            assert matcher.bits() is None
            take(token)
        take(opener)
        start = len(taken)
        while (bits := matcher.bits()) is not None:
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            take(int(rng.choice(allowed)))
            behind = grammars.matcher(replace(sampling, said=tuple(taken))).bits()  # as after an abort
            now = matcher.bits()
            assert (behind is None) == (now is None)
            assert behind is None or (behind == now).all()
        written = tokenizer.decode(taken[start:]).removesuffix("\n</tool_call>")
        call = json.loads(written)
        assert call["name"] in "ab"
        jsonschema.validate(call["arguments"], SCHEMA)
        assert all(one is not None for one in matcher.allowed[start:])
        assert matcher.allowed[start - len(text) - 1 : start] == [None] * (len(text) + 1)
    assert matcher.error is None
    assert len(matcher.allowed) == len(taken)


def test_ids_that_are_not_what_was_allowed_are_damage() -> None:
    prompts, turns = sampled()
    t = trajectory(prompts[0], turns[0])
    assert t.allowed is not None
    for wrong in (packed(np.zeros(128, np.uint8)), b"no zlib", 3):
        allowed = t.allowed.copy()
        allowed[t.prompt_length] = wrong
        with pytest.raises(InvariantError):
            check_invariants(replace(t, allowed=allowed))
    with pytest.raises(ValueError, match="another vocabulary"):
        unpacked(t.allowed[-1], 4096)
    assert not allows(packed(np.zeros(8, np.uint8)), 1 << 20)
