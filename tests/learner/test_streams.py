"""Token streams: what a token's weights say is learned from it, alone and together, however the batch is split."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_help import REWARDS, make_groups, make_model, make_recipe, save_tokenizer, weights
from pydantic import ValidationError

from agentrl.algo.loss import bucketed_reverse_kl, sampled_reverse_kl
from agentrl.compute import kernels
from agentrl.compute.batch import Batch
from agentrl.errors import UserError
from agentrl.learner.actor import Actor
from agentrl.learner.columns import good, weighted, with_streams
from agentrl.learner.history import STEPS, History
from agentrl.learner.learner import Learner
from agentrl.learner.metrics import MicroBatchMetrics, policy_metrics
from agentrl.learner.monitors import no_contrast
from agentrl.learner.roles import LocalRoles
from agentrl.learner.teacher import Guide, check_teachers, filled, opening_of
from agentrl.models.memory import plan_memory
from agentrl.plugins.types import Message, Task
from agentrl.recipe.schema import Recipe
from agentrl.trajectory import Group, Trajectory, check_invariants

GROUPS = make_groups(REWARDS)


def batch_of(*streams: str) -> Batch:
    """All tokens of GROUPS with a random weight, which is 0 for every third, for each of the streams."""
    batch, rng = Batch.from_groups(GROUPS), np.random.default_rng(5)
    mask = batch.tokens["loss_mask"]
    drawn = {name: rng.random(len(mask)) * (rng.integers(0, 3, len(mask)) > 0) for name in ("imitate", "distill")}
    columns = {name: (drawn[name] * mask / drawn[name].sum()).astype(np.float32) for name in streams}
    teacher = -rng.random(len(mask)).astype(np.float32) * 4 * mask
    return batch.with_tokens(**columns, **({"teacher_logprobs": teacher} if "distill" in streams else {}))


def plain(batch: Batch, model: Any) -> torch.Tensor:
    """The gradient of the streams, a sequence at a time, by the formula."""
    total = torch.zeros(())
    for index in range(len(batch)):
        span = batch.span(index)
        ids = torch.from_numpy(batch.tokens["ids"][span].astype(np.int64))
        log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        column = {name: torch.from_numpy(c[span][1:]) for name, c in batch.tokens.items() if c.dtype == np.float32}
        if "imitate" in column:
            total = total - (column["imitate"] * log_p).sum()
        if "distill" in column:
            reward = column["teacher_logprobs"] - log_p.detach()
            total = total - (column["distill"] * reward * log_p).sum()
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def gradient(batch: Batch, **train: Any) -> tuple[torch.Tensor, MicroBatchMetrics]:
    actor = Actor(make_model(), make_recipe(**train))
    found: list[torch.Tensor] = []

    def step(rate: float) -> float:
        found.append(torch.cat([p.grad.flatten() for p in actor.model.parameters()]))
        return 1.0

    actor.optimizer.step = step  # type: ignore[method-assign]
    return (metrics := actor.update(batch, 1e-3), found[0])[1], metrics


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("streams", [("imitate",), ("distill",), ("imitate", "distill")], ids="+".join)
@pytest.mark.parametrize("tokens", [16384, 60])
def test_the_gradient_of_a_stream_is_that_of_its_formula(streams: tuple[str, ...], tokens: int) -> None:
    batch = batch_of(*streams)
    found, metrics = gradient(batch, micro_batch_tokens=tokens)
    torch.testing.assert_close(found, plain(batch, make_model().eval()), atol=1e-5, rtol=1e-4)
    named = policy_metrics(metrics)
    for stream in streams:
        assert named[f"{stream}/tokens"] == np.count_nonzero(batch.tokens[stream])


def test_imitation_needs_neither_advantages_nor_an_engine() -> None:
    batch = batch_of("imitate")
    del batch.tokens["logprobs"]  # type: ignore[attr-defined]
    found, metrics = gradient(batch)
    assert found.norm() > 0
    named = policy_metrics(metrics)
    assert not any(name.startswith("mismatch/") for name in named)
    mean = -metrics.columns["logprobs"][batch.tokens["imitate"] != 0].mean()
    assert named["imitate/loss"] == pytest.approx(mean, rel=1e-4)
    assert weights(make_model()).shape == found.shape


def test_the_sampled_form_has_the_gradient_of_the_reverse_kl_on_average() -> None:
    """By enumeration; the log-ratio itself has none."""
    torch.manual_seed(0)
    logits = torch.randn(3, 7, dtype=torch.double, requires_grad=True)
    teacher = torch.randn(3, 7, dtype=torch.double).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    p = log_p.detach().exp()
    exact = torch.autograd.grad((log_p.exp() * (log_p - teacher)).sum(), logits, retain_graph=True)[0]
    each = sampled_reverse_kl(log_p, log_p.detach(), teacher)
    sampled = torch.autograd.grad((p * each).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(sampled, exact, atol=1e-12, rtol=0)
    naive = torch.autograd.grad((p * (log_p - teacher)).sum(), logits, retain_graph=True)[0]
    assert float(naive.abs().max()) < 1e-12 < 1e-3 < float(exact.abs().max())
    old = torch.randn(3, 7, dtype=torch.double).log_softmax(-1)  # the weights moved since the tokens were sampled
    moved = torch.autograd.grad((old.exp() * sampled_reverse_kl(log_p, old, teacher)).sum(), logits)[0]
    torch.testing.assert_close(moved, exact, atol=1e-12, rtol=0)


def reverse(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (ours.log_softmax(-1).exp() * (ours.log_softmax(-1) - theirs.log_softmax(-1))).sum(-1)


@pytest.mark.parametrize("heads", ["both", "none"])
def test_the_divergence_of_whole_vocabularies_is_exact(heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of two rows, at temperatures, with a teacher of another width whose vocabulary is padded further."""
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 2)
    monkeypatch.setattr(kernels, "CHUNK", 2)
    torch.manual_seed(1)
    if heads == "both":
        ours = [torch.randn(5, 6), torch.randn(9, 6), torch.randn(9)]
        theirs = [torch.randn(5, 4), torch.randn(11, 4), torch.randn(11)]
    else:
        ours, theirs = [torch.randn(5, 9)], [torch.randn(5, 9)]
    for each in ours:
        each.requires_grad_()
    weight = torch.rand(5)
    given: list[Any] = [(*output, None, None)[:3] for output in (ours, theirs)]

    def logits(output: list[torch.Tensor]) -> torch.Tensor:
        return output[0] if len(output) == 1 else output[0] @ output[1].T + output[2]

    wanted = reverse(logits(ours) / 0.7, logits(theirs)[:, :9] / 1.3)
    found = kernels.reverse_kl(given[0], 0.7, given[1], 1.3)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad((weight * each).sum(), ours) for each in (found, wanted)]
    torch.testing.assert_close(*gradients)
    states, head, bias = given[0]
    ids = torch.stack([torch.randperm(9)[:4] for _ in range(5)])
    chosen = kernels.chosen_logprobs(states, head, bias, ids, 0.7)
    plain_chosen = (logits(ours) / 0.7).log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(chosen, plain_chosen)
    slope = torch.rand(5, 4)
    torch.testing.assert_close(*(torch.autograd.grad((slope * each).sum(), ours) for each in (chosen, plain_chosen)))
    best, top = kernels.top_logprobs(states, head, bias, 3, 0.7)
    torch.testing.assert_close((best, top), tuple((logits(ours) / 0.7).log_softmax(-1).topk(3))[::-1])


def test_a_bucket_holds_whatever_the_teacher_does_not_name() -> None:
    """Exact on K + 1 outcomes, in double; -inf is no token; and at most the divergence of the whole vocabulary."""
    torch.manual_seed(2)
    ours = torch.randn(4, 9, dtype=torch.double, requires_grad=True)
    theirs = torch.randn(4, 9, dtype=torch.double).log_softmax(-1)
    top = theirs.topk(3)
    given = top.values.clone()
    given[0, 2] = -torch.inf
    found = bucketed_reverse_kl(ours.log_softmax(-1).gather(1, top.indices), given)
    p, q = ours.log_softmax(-1).exp(), theirs.exp()
    wanted = []
    for row in range(4):
        kept = top.indices[row, : 2 if row == 0 else 3]
        mine, others = torch.cat([p[row, kept], 1 - p[row, kept].sum()[None]]), q[row, kept]
        others = torch.cat([others, 1 - others.sum()[None]])
        wanted.append((mine * (mine / others).log()).sum())
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-10, rtol=1e-10)
    gradients = [torch.autograd.grad(each.sum(), ours, retain_graph=True)[0] for each in (found, torch.stack(wanted))]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-10)
    assert bool((found <= reverse(ours, theirs) + 1e-12).all())


def teacher_of(folder: Path) -> Any:
    """Another model of the same shape, saved with a tokenizer."""
    model = make_model()
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model.eval()


def taught(folder: Path, teacher: dict[str, Any]) -> Recipe:
    plain_recipe = make_recipe(path=str(folder)).model_dump()
    return Recipe.model_validate({**plain_recipe, "algorithm": "opd", "teacher": {"path": str(folder), **teacher}})


def logits_of(model: Any, batch: Batch) -> torch.Tensor:
    """The logits that predict the sampled tokens, one sequence after another, [N, V]."""
    rows = []
    for index in range(len(batch)):
        ids = torch.from_numpy(batch.tokens["ids"][batch.span(index)].astype(np.int64))
        mask = batch.tokens["loss_mask"][batch.span(index)][1:] > 0
        rows.append(model(input_ids=ids[None]).logits[0, :-1][torch.from_numpy(mask)])
    return torch.cat(rows)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["full", "top_k", "sampled"])
def test_a_local_teacher_says_what_transformers_says(form: str, tmp_path: Path) -> None:
    teacher, batch = teacher_of(tmp_path), Batch.from_groups(GROUPS)
    recipe = taught(tmp_path, {"form": form, "top_k": 5})
    learner = Learner(recipe, LocalRoles(recipe, make_model()))
    batch = learner.guide.taught(with_streams(batch, flat(GROUPS), recipe, 0, lambda task: 0), flat(GROUPS))
    theirs, at = logits_of(teacher, batch).log_softmax(-1), np.flatnonzero(batch.tokens["loss_mask"])
    target = torch.from_numpy(batch.tokens["ids"][at].astype(np.int64))
    of_target = theirs.gather(1, target[:, None])[:, 0].detach()
    if form != "full":
        np.testing.assert_allclose(batch.tokens["teacher_logprobs"][at], of_target, atol=1e-4)
    if form == "top_k":
        np.testing.assert_array_equal(batch.tokens["teacher_ids"][at], theirs.topk(5).indices)
        np.testing.assert_allclose(batch.tokens["teacher_top"][at], theirs.topk(5).values.detach(), atol=1e-4)

    ours = logits_of(plain_model := make_model().eval(), batch)
    log_p = ours.log_softmax(-1)
    kl = {
        "full": reverse(ours, theirs.detach()),
        "top_k": bucketed_reverse_kl(log_p.gather(1, theirs.topk(5).indices), theirs.topk(5).values.detach()),
        "sampled": log_p.gather(1, target[:, None])[:, 0] - of_target,
    }[form]
    loss = kl.mean() if form != "sampled" else (kl.detach() * log_p.gather(1, target[:, None])[:, 0]).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain_model.parameters()]).norm()
    metrics = learner.learn(GROUPS)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert metrics["distill/kl"] == pytest.approx(float(kl.detach().mean()), rel=1e-3)
    assert metrics["distill/teacher_logprob"] == pytest.approx(float(of_target.mean()), rel=1e-3)
    assert metrics["distill/tokens"] == len(at)  # samples without a difference in reward are learned from too


def flat(groups: list[Group]) -> list[Trajectory]:
    return [t for group in groups for t in group.trajectories]


def test_streams_have_weights_by_environment_and_schedule() -> None:
    """Two environments: the first is distilled less and less, the second imitated alone, by the best of its groups."""
    recipe = Recipe.model_validate({
        "env": {"mix": [{"name": "gsm8k"}, {"name": "gsm8k", "streams": {"policy": 0, "imitate": 2, "distill": 0}}]},
        "algorithm": {"streams": {"distill": {0: 1, 4: 0}}}, "teacher": "tiny",
    })  # fmt: skip
    trajectories = flat(GROUPS)
    parts = np.repeat([0, 1], 8)
    tasks = iter(parts.tolist())
    batch = with_streams(Batch.from_groups(GROUPS), trajectories, recipe, 1, lambda task: next(tasks))
    lengths, rewards = batch.sampled, batch.samples["reward"]
    np.testing.assert_array_equal(batch.samples["policy"], 1 - parts)
    np.testing.assert_array_equal(batch.samples["distill"], 0.75 * (1 - parts))
    best = (parts == 1) & (rewards > np.repeat([np.mean(row) for row in REWARDS], 4))
    np.testing.assert_array_equal(batch.samples["imitate"] > 0, best)
    columns = weighted(batch, recipe).tokens
    for column, chosen, weight in [("weight", parts == 0, 1), ("imitate", best, 2), ("distill", parts == 0, 0.75)]:
        expected = batch.spread((weight * chosen / lengths[chosen].sum()).astype(np.float32))
        np.testing.assert_allclose(columns[column], expected, rtol=1e-6)
    allowed = np.full(len(batch.tokens["ids"]), None, object)
    constrained = np.flatnonzero(batch.tokens["loss_mask"])[::3]
    allowed[constrained] = b"some"
    bound = weighted(batch.with_tokens(allowed=allowed), recipe).tokens
    assert not bound["distill"][constrained].any()  # a teacher says how likely a token is among all
    assert bound["distill"].sum() == pytest.approx(columns["distill"].sum())
    np.testing.assert_array_equal(bound["weight"], columns["weight"])
    over = with_streams(Batch.from_groups(GROUPS), trajectories, recipe, 4, lambda task: 0)
    assert "distill" not in over.samples  # at 0 it costs nothing: no teacher is asked
    np.testing.assert_array_equal(good(batch, 0.5), rewards >= 0.5)


class Renderer:
    """Stands for a chat: a message is its content's letters; a prompt ends with 63."""

    def render(self, messages: Any) -> list[int]:
        return [ord(letter) % 60 for message in messages for letter in message["content"]] + [63]


def test_a_hint_moves_no_sampled_token() -> None:
    """The teacher is given the opening with the hint; its columns lie at the tokens that were sampled."""
    chat, told = Renderer(), list[Batch]()
    asked: list[Message] = [{"role": "user", "content": "sum of 2 and 3"}]
    opening = np.array(chat.render(asked), np.int32)
    samples = []
    for index, t in enumerate(flat(GROUPS)[:3]):
        ids = np.concatenate([opening, t.ids[t.prompt_length :]])
        shift = len(opening) - t.prompt_length
        pad = np.zeros(len(opening))
        samples.append(replace(
            t, ids=ids, prompt_length=len(opening), task=Task(f"t{index}", {"answer": index}),
            loss_mask=np.concatenate([pad, t.loss_mask[t.prompt_length :]]).astype(np.uint8),
            logprobs=np.concatenate([pad, t.logprobs[t.prompt_length :]]).astype(np.float32),
            weight_version=np.concatenate([pad - 1, t.weight_version[t.prompt_length :]]).astype(np.int32),
            turns=tuple(replace(turn, start=turn.start + shift, end=turn.end + shift) for turn in t.turns),
            messages=(*asked, {"role": "assistant", "content": "x"}),
        ))  # fmt: skip
        check_invariants(samples[-1])

    class Reads:
        def columns(self, batch: Batch) -> Batch:
            told.append(batch)
            known = (batch.tokens["ids"] * batch.tokens["loss_mask"]).astype(np.float32)
            return Batch(batch.offsets, {"teacher_logprobs": -known}, {})

    def hinted(t: Trajectory, hint: str) -> tuple[list[int], tuple[()]]:
        found = opening_of(t, chat.render)
        assert found == tuple(asked)
        return chat.render([*found, {"role": "user", "content": filled(hint, t.task)}]), ()

    recipe = Recipe.model_validate(
        {"algorithm": "opd", "teacher": {"path": "policy", "form": "sampled", "hint": "it is {answer} {braces}"}}
    )
    guide = Guide(recipe, {0: Reads()}, hinted=hinted)
    batch = with_streams(Batch.from_trajectories(samples, [0, 0, 0]), samples, recipe, 0, lambda task: 0)
    found = guide.taught(batch, samples).tokens["teacher_logprobs"]
    np.testing.assert_array_equal(found, -(batch.tokens["ids"] * batch.tokens["loss_mask"]).astype(np.float32))
    longer = len(chat.render([{"role": "user", "content": "it is 0 {braces}"}])) - 1
    assert [int(n) for n in told[0].lengths] == [len(t.ids) + longer for t in samples]
    assert opening_of(samples[0], lambda messages: [1]) is None


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"algorithm": "opd"}, "algorithm.streams.distill needs a teacher"),
        ({"teacher": "tiny"}, "a teacher has no effect where algorithm.streams.distill is 0"),
        ({"algorithm": {"streams": {"policy": 0}}}, "all weights are 0, so nothing would be learned"),
        ({"algorithm": "opd", "teacher": {"path": "http://x", "form": "full"}}, "only a model here without a hint"),
        ({"algorithm": "opd", "teacher": "policy"}, "give it a `hint`"),
    ],
)
def test_streams_that_cannot_be_are_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        Recipe.model_validate(keys)


def test_memory_is_planned_for_a_teacher() -> None:
    plan = plan_memory(Recipe.model_validate({"algorithm": "opd", "teacher": "tiny"}))
    assert plan.teachers == plan.weights


def test_equal_rewards_are_no_fault_where_a_teacher_teaches() -> None:
    recipe = Recipe.model_validate({"algorithm": "opd", "teacher": "tiny"})
    for tokens, told in ((0.0, True), (10.0, False)):
        rows = [{"step": step, "groups/varied": 0.0, "distill/tokens": tokens} for step in range(1, STEPS + 1)]
        assert (no_contrast(History(recipe, rows=rows)) is not None) is told


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"algorithm": "opd", "teacher": str(tmp_path)})
    with pytest.raises(UserError, match=r"^teacher\.path: .* holds no config.json"):
        check_teachers(recipe)
    teacher_of(tmp_path)
    with pytest.raises(UserError, match=r"^teacher\.path .*: its tokenizer is not that of tiny \(\d+ tokens differ\)"):
        check_teachers(recipe)
