"""Conversations that one brings: how rows are laid out, what is learned of them, and what is refused."""

import base64
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from chat_help import CALCULATOR, make_tokenizer, trl_templates
from cli_help import quiet, refused
from cluster_train_help import on_cluster, save_tiny, two_workers
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_help import make_groups
from paths import ROOT
from PIL import Image
from pyarrow import parquet
from train_help import write_lines
from vision_help import file_of, picture, seeing_model

from agentrl.chat.base import Chat
from agentrl.chat.encode import Encoder
from agentrl.chat.load import load_chat
from agentrl.chat.template import Template
from agentrl.data.rows import Listed
from agentrl.errors import UserError
from agentrl.eval.held_out import HeldOut
from agentrl.fine_tuning.conversations import Layout, Refusal, read_row
from agentrl.fine_tuning.lessons import Lessons, _selected, open_rows, read_rows, read_stored
from agentrl.fine_tuning.new_model import bare_tokenizer
from agentrl.fine_tuning.run import SftResult, resume_sft, sft
from agentrl.fine_tuning.trainer import Course, SftLearner, learning_recipe
from agentrl.fine_tuning.writer import Writer
from agentrl.learner.roles import LocalRoles
from agentrl.models.load import load_model, load_tokenizer
from agentrl.plugins.registry import make_environment
from agentrl.plugins.types import Message
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.sft import SftSection, SftSelect
from agentrl.rollout.stored import read_samples
from agentrl.trajectory import Group, Trajectory, check_invariants

TINY = load_tokenizer(ModelSection())
CALL = {"type": "function", "id": "c1", "function": {"name": "calculator", "arguments": {"expression": "12*7"}}}
TALK: list[Message] = [
    {"role": "user", "content": "What is 12*7?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},  # type: ignore[list-item]
    {"role": "tool", "content": "84", "tool_call_id": "c1", "name": "calculator"},
    {"role": "assistant", "content": "84"},
    {"role": "user", "content": "And 2 more?"},
    {"role": "assistant", "content": "It is 86."},
]


def layout(tokenizer: Any = TINY, tools: Any = (CALCULATOR,), limit: int = 10_000, **section: Any) -> Layout:
    chat = load_chat(tokenizer, model_path="", kind="bridge", tools=list(tools))
    template = Template(tokenizer, None, list(tools))
    writer = Writer(chat, template, Encoder(tokenizer, template.source))
    return Layout(SftSection(source="x.jsonl", **section), writer, [], limit)


PLAIN = layout()


def laid(row: dict[str, Any], form: str = "openai", by: Layout = PLAIN) -> Trajectory:
    made = by.trajectory(read_row(row, form), "row-1")
    check_invariants(made)
    return made


def said(t: Trajectory, chat: Chat = PLAIN.chat) -> list[str]:
    """The texts that are learned, in order."""
    spans = [t.ids[turn.start : turn.end] for turn in t.turns if turn.trained]
    assert np.array_equal(np.concatenate(spans), t.ids[t.loss_mask == 1])
    return [chat.decode(ids.tolist()) for ids in spans]


ROW = {"messages": TALK, "tools": [CALCULATOR]}
FIRST = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("name", ["glm4moe", "glm4moe_training"])
def test_a_turn_that_ends_with_the_next_roles_token(name: str) -> None:
    """What is learned is the template's own text, and behind the last turn the token with which a user's begins."""
    tokenizer = make_tokenizer(
        trl_templates()[name], ["<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>"]
    )
    by = layout(tokenizer)
    t = laid(ROW, by=by)
    whole = (
        tokenizer.apply_chat_template(TALK, tools=[CALCULATOR], tokenize=False).removesuffix("<|user|>") + "<|user|>"
    )
    assert t.ids.tolist() == tokenizer.encode(whole, add_special_tokens=False)
    call, *answers = said(t, by.chat)
    assert call.endswith("</arg_value>\n</tool_call><|observation|>")
    assert answers == ["\n<think></think>\n84<|user|>", "\n<think></think>\nIt is 86.<|user|>"]
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(Refusal, match="ends an assistant turn with none of the stop ids"):
        laid({"messages": TALK[4:]}, by=layout(tokenizer, tools=()))


def flagged(**flags: dict[int, Any]) -> dict[str, Any]:
    messages = [dict(message) for message in TALK]
    for name, values in flags.items():
        for i, value in values.items():
            messages[i][name] = value
    return {**ROW, "messages": messages}


@pytest.mark.parametrize(
    ("section", "row", "turns"),
    [
        ({}, ROW, [0, 1, 2]),
        ({"learn": "last"}, ROW, [2]),
        ({}, flagged(weight={1: 0, 3: 1}), [1, 2]),
        ({}, flagged(train={5: False}), [0, 1]),
        ({"learn": "flagged"}, flagged(weight={3: 1}), [1]),
        ({"learn": "flagged"}, flagged(train={1: True, 3: False}), [0]),
        ({"history": "template"}, ROW, [0, 1, 2]),
        ({"history": "template", "learn": "last"}, ROW, [2]),
    ],
)
def test_what_is_learned_is_what_the_section_and_the_messages_say(
    section: dict[str, Any], row: dict[str, Any], turns: list[int]
) -> None:
    by = layout(**section)
    t = laid(row, by=by)
    assert said(t) == [[FIRST, "84<|im_end|>", "It is 86.<|im_end|>"][i] for i in turns]
    for path, upto in zip(t.paths(), turns[-1:] if len(t.paths()) == 1 else turns, strict=True):
        messages = TALK[: [2, 4, 6][upto]]
        text = TINY.apply_chat_template(messages, tools=[CALCULATOR], tokenize=False)
        assert np.array_equal(np.append(t.ids[path], TINY.encode("\n")), TINY.encode(text))
    assert t.tools == ("calculator",)


SHARE = {
    "conversations": [
        {"from": "human", "value": "What is 12*7?"},
        {"from": "function_call", "value": '{"name": "calculator", "arguments": {"expression": "12*7"}}'},
        {"from": "observation", "value": "84"},
        {"from": "gpt", "value": "84"},
        {"from": "human", "value": "And 2 more?"},
        {"from": "gpt", "value": "It is 86."},
    ],
    "tools": json.dumps([CALCULATOR["function"]]),
}


def test_sharegpt_and_openai_say_the_same() -> None:
    assert np.array_equal(laid(SHARE, "sharegpt").ids, laid(ROW).ids)
    spoken = read_row({**SHARE, "system": "Be brief."}, "sharegpt")
    assert spoken.messages[0] == {"role": "system", "content": "Be brief."}
    assert len(spoken.flags) == len(spoken.messages) == 7


def test_a_table_without_types_of_its_own_says_the_same(tmp_path: Path) -> None:
    other = [{"role": "user", "content": "Hi", "weight": None}, {"role": "assistant", "content": "Hello", "weight": 1}]
    table = pyarrow.Table.from_pylist([ROW, {"messages": other, "tools": None}])
    parquet.write_table(table, tmp_path / "rows.parquet")
    found = read_rows(open_rows(str(tmp_path / "rows.parquet")), PLAIN, 0, lambda text: None)
    assert np.array_equal(found.taught[0].ids, laid(ROW).ids)
    assert np.array_equal(found.taught[1].ids, laid({"messages": other}).ids)


THINKS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_where_a_template_rewrites_its_history_each_turn_is_a_path() -> None:
    tokenizer = bare_tokenizer(THINKS)
    tokenizer.chat_template = THINKS
    talk: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "so"},
    ]
    apart = layout(tokenizer, (), history="template")
    assert apart.chat.rewrites_history
    t = laid({"messages": talk}, by=apart)
    texts = [tokenizer.decode(t.ids[path]) + "\n" for path in t.paths()]
    assert texts == [tokenizer.apply_chat_template(talk[:n], tokenize=False) for n in (2, 4)]
    assert "hm" not in texts[1]
    assert said(t, apart.chat) == ["<think>hm</think>b<|im_end|>", "<think>so</think>d<|im_end|>"]
    kept = laid({"messages": talk}, by=layout(tokenizer, ()))
    assert "hm" in tokenizer.decode(kept.ids)
    assert len(kept.paths()) == 1


USER, HI = {"role": "user", "content": "a"}, {"role": "assistant", "content": "Hi."}


@pytest.mark.parametrize(
    ("messages", "section", "why"),
    [
        ([USER], {}, "no assistant turn in it is to be learned"),
        ([USER, HI], {"learn": "flagged"}, "no assistant turn"),
        ([HI, USER, HI], {}, "begins with an assistant's message; sft.history=template"),
        ([USER, HI, HI], {}, "two assistant's messages follow each other"),
        ([HI], {"history": "template"}, "begins with an assistant's message that is to be learned"),
        ([USER, {**HI, "content": "x<|im_end|>y"}], {}, "leaves out a part of an assistant's content"),
        ([USER, {**HI, "reasoning_content": "hm"}], {}, "leaves out a part of an assistant's thinking"),
        ([USER, {**HI, "content": [{"type": "image_url"}]}], {}, "has no images in field"),
        ([USER, {**HI, "content": "long " * 50}], {"limit": 40}, r"has \d+ tokens, more than the 40 that fit"),
    ],
)
def test_what_cannot_be_expressed_is_refused(messages: Any, section: dict[str, Any], why: str) -> None:
    with pytest.raises(Refusal, match=why):
        laid({"messages": messages}, by=layout(**section))


@pytest.mark.parametrize(
    ("row", "form", "why"),
    [
        ({"conversations": []}, "openai", "no list `messages`, but `conversations`: set sft.format=sharegpt"),
        ({"messages": []}, "sharegpt", "but `messages`: set sft.format=openai"),
        ({"text": "x"}, "openai", "no list `messages` with a message in it; its fields are text"),
        ({"messages": ["x"]}, "openai", "message 1 is not an object with a `role`"),
        ({"messages": [{"role": "poet"}]}, "openai", "message 1 has the role 'poet'"),
        ({"messages": [{"role": "user", "content": 3}]}, "openai", "neither text nor a list"),
        ({"messages": [{**HI, "tool_calls": [{}]}]}, "openai", "without the `name` of its function"),
        (
            {"messages": [{**HI, "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]},
            "openai",
            "the arguments of f are no JSON object: '{x'",
        ),
        ({"messages": [USER], "tools": [3]}, "openai", "`tools` holds what is no schema"),
        ({"conversations": [{"from": "poet", "value": "x"}]}, "sharegpt", "message 1 is from 'poet'"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "sharegpt", "that is not JSON"),
    ],
)
def test_what_is_no_conversation_is_an_error(row: dict[str, Any], form: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read_row(row, form)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "tool_calls", "function", "name", "arguments", "from", "value", "weight"]
            ),
            inner | st.sampled_from(["user", "assistant", "tool", "human", "gpt"]),
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(messages=JSON, tools=JSON, form=st.sampled_from(["openai", "sharegpt"]))
def test_any_row_is_read_or_told_what_is_wrong(messages: Any, tools: Any, form: str) -> None:
    row = {"messages": messages, "conversations": messages, "tools": tools}
    try:
        talk = read_row(row, form)
    except UserError:
        return
    assert len(talk.messages) == len(talk.flags)


@pytest.fixture(scope="module")
def seeing() -> tuple[Any, Any]:
    return seeing_model()


def shows(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


LLAVA = [
    {"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A cat."},
    {"from": "human", "value": "And <image> this?"}, {"from": "gpt", "value": "A dog."},
]  # fmt: skip


def test_conversations_with_images_say_the_same_in_every_form(seeing: tuple[Any, Any], tmp_path: Path) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.jpg"]
    files[0].write_bytes(file_of(picture(1)))
    files[1].write_bytes(file_of(picture(2, 64, 32), "BMP"))
    url = "data:image/png;base64," + base64.b64encode(files[0].read_bytes()).decode()
    first = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "\nWhat is this?"}]
    second = [{"type": "text", "text": "And "}, {"type": "image"}, {"type": "text", "text": " this?"}]
    rows = [
        ({"conversations": LLAVA, "images": ["a.png", {"path": str(files[1])}]}, "sharegpt"),
        ({"messages": shows(first, "A cat.", second, "A dog."), "images": {"bytes": files[1].read_bytes()}}, "openai"),
    ]
    for history, paths in (("sampled", 1), ("template", 2)):
        by = layout(seeing[1], tools=(), history=history)
        made = [by.trajectory(read_row(row, form, folder=tmp_path), "row-1") for row, form in rows]
        for t in made:
            check_invariants(t)
            assert len(t.paths()) == paths
            assert [span.tokens for span in t.images] == [4, 8] if paths == 1 else [4, 4, 8]
            assert "A dog." in said(t, by.chat)[-1]
            assert t.images == made[0].images
            assert t.ids.tolist() == made[0].ids.tolist()


def test_rows_whose_images_cannot_be_shown_are_refused_and_counted(seeing: tuple[Any, Any], tmp_path: Path) -> None:
    good = {"bytes": file_of(picture(1))}
    rows = [{"messages": shows(f"<image>{i}", "yes"), "images": good} for i in range(20)]
    rows[3]["images"] = {"bytes": b"broken"}
    rows[7]["images"] = [good, good]
    rows[9]["images"] = "http://example.org/a.png"
    rows[11]["images"] = Image.new("RGB", (1, 1000))
    rows[13] = {"messages": shows("<image><image>", "yes"), "images": [good, good]}
    by = layout(seeing[1], tools=())
    by.max_images = 1
    found = read_rows(Listed(rows, "rows"), by, 0, lambda text: None)
    assert (found.read, len(found.taught), [place for place, _ in found.refused]) == (
        20, 15, ["rows, row 3", "rows, row 7", "rows, row 9", "rows, row 11", "rows, row 13"]
    )  # fmt: skip
    assert found.refused[-1][1] == "the messages hold 2 images, of 1 (rollout.max_images)"
    whole = "\n".join(found.told())
    for why in ("it is no image that can be read", "has 2 images", "set image_urls to public", "aspect ratio"):
        assert why in whole
    other = [{**row, "images": {"bytes": file_of(picture(2))}} for row in rows]
    assert (
        found.digest() != read_rows(Listed(other, "rows"), layout(seeing[1], tools=()), 0, lambda text: None).digest()
    )
    with pytest.raises(UserError, match="it shows 1 image, and the model reads text"):
        read_rows(Listed(rows[:3], "rows"), layout(tools=()), 0, lambda text: None)


def test_refused_rows_are_counted_by_reason_and_named(tmp_path: Path) -> None:
    rows = [
        ROW,
        {"messages": [USER]},
        {"messages": [USER, HI]},
        {"messages": [USER, {**HI, "content": "x " * 600}]},
    ] * 2
    path = write_lines(tmp_path / "mine.jsonl", rows)
    found = read_rows(open_rows(str(path)), layout(limit=600), 0, lambda text: None)
    assert (found.read, len(found.taught), len(found.refused)) == (8, 4, 4)
    report = found.report()
    assert report["reasons"] == {
        "no assistant turn in it is to be learned": 2,
        "it has N tokens, more than the N that fit": 2,
    }
    assert report["first_refused"][0]["row"] == f"{path}, line 2"
    assert found.told()[0] == "read 8 conversations: 4 used, 4 refused"
    assert f"(first: {path}, line 2)" in found.told()[1]


def test_a_share_is_held_out_by_the_opening() -> None:
    rows = [{"messages": [{"role": "user", "content": f"q{i % 30}"}, HI]} for i in range(90)]
    found = read_rows(Listed(rows, "rows"), layout(held_out=0.3), 5, lambda text: None)
    openings = [{t.messages[0]["content"] for t in part} for part in (found.taught, found.held_out)]  # type: ignore[str]
    assert not openings[0] & openings[1]
    assert len(found.taught) + len(found.held_out) == 90
    assert 3 <= len(openings[1]) <= 15


LEARN = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]} for i in range(7)
]
QUIET = ["train.threads=1", "eval.every=2", "train.save_every=2", "train.keep=9"]


def job(folder: Path, source: str, *overrides: str) -> Recipe:
    path = folder / "recipe_of_test.yaml"
    path.write_text(
        f"sft: {{source: '{source}', stages: [{{batch: 3, steps: 2, lr: 1e-3}}, {{batch: 2, steps: 3, lr: 1e-4}}]}}\n"
    )
    return Recipe.load(path, [*QUIET, f"output={folder / 'run'}", *overrides])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SftResult:
    """A run of two stages over seven conversations, two more of them held out."""
    folder = tmp_path_factory.mktemp("sft")
    source, held = (
        write_lines(folder / "mine.jsonl", [*LEARN, {"messages": [USER]}]),
        write_lines(folder / "held.jsonl", LEARN[:2]),
    )
    return sft(job(folder, str(source), f"sft.held_out={held}"), str(folder / "model"), console=quiet())


@pytest.mark.slow
def test_a_run_keeps_what_a_run_of_rl_keeps(run: SftResult) -> None:
    rows = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4, 5]
    assert rows[5]["eval/loss"] == run.held_out_loss < rows[0]["eval/loss"]
    assert json.loads((run.run / "conversations.json").read_text())["refused"] == 1
    documented = (ROOT / "docs/reference/metrics.md").read_text()
    assert all(f"`{key}`" in documented for row in rows for key in row if not key.startswith("memory/"))
    stored = read_samples(run.run / "trajectories" / "step_1.parquet")
    assert len(stored) == 3
    assert all(sample.facts["left_out"] is None for sample in stored)
    assert (run.run / "report.html").is_file()
    model, _ = load_model(ModelSection(path=str(run.folder)))
    saved, _ = load_model(ModelSection(path=str(run.run / "checkpoints" / "step_5")))
    assert all(bool((a == b).all()) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    assert not (run.folder / "trainer").exists()


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_learns_what_an_uninterrupted_one_does(run: SftResult, tmp_path: Path, step: int) -> None:
    again = tmp_path / "again"
    shutil.copytree(run.run, again)
    for later in range(step + 1, 6):
        shutil.rmtree(again / "checkpoints" / f"step_{later}", ignore_errors=True)
    result = resume_sft(str(again), console=quiet())
    weights = [folder / "checkpoints" / "step_5" / "model.safetensors" for folder in (run.run, again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert result.held_out_loss == run.held_out_loss
    with pytest.raises(UserError, match="step 5 of 5 is done"):
        resume_sft(str(again), console=quiet())
    with pytest.raises(UserError, match=r"sft\.learn all -> last"):
        resume_sft(str(again), overrides=["sft.learn=last"], console=quiet())


@pytest.mark.slow
def test_a_run_that_was_stopped_in_its_last_evaluation_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, output = HeldOut.sample, tmp_path / "run"
    keys = ["sft.new_model=null", "model.path=tiny_tools", "sft.accuracy=true", "eval.tasks=1", "rollout.max_turns=1"]
    stages = "sft.stages=[{steps: 2, batch: 2, lr: 1e-3}]"
    recipe = load_recipe(ROOT / "recipes/tiny_tools.yaml", [*keys, stages, f"output={output}"])

    async def stopping(self: HeldOut, split: str, *, after: int = 0, **options: Any) -> Any:
        if after == 2 and split == "test":
            os.kill(os.getpid(), signal.SIGINT)
        return await sample(self, split, after=after, **options)

    with monkeypatch.context() as patch:
        patch.setattr(HeldOut, "sample", stopping)
        first = sft(recipe, console=quiet())
    assert (first.interrupted, first.steps, first.after) == (True, 2, {})
    second = resume_sft(str(output), console=quiet())
    assert (second.interrupted, second.steps, list(second.after)) == (False, 2, ["test"])
    with pytest.raises(UserError, match="step 2 of 2 is done"):
        resume_sft(str(output), console=quiet())


def stored(run: SftResult, limit: int = 999, model: str = "tiny", **section: Any) -> Lessons:
    recipe = Recipe.model_validate({"model": {"path": model}, "sft": {"source": str(run.run), **section}})
    assert recipe.sft is not None
    by = Layout(recipe.sft, PLAIN.writer, [], limit)
    return read_stored(recipe, by, len(TINY), lambda text: None, make_environment(recipe.env))


@pytest.mark.slow
def test_rollouts_of_a_run_are_learned_as_they_were_sampled(run: SftResult, tmp_path: Path) -> None:
    found = stored(run)
    files = sorted((run.run / "trajectories").glob("step_*.parquet"))
    wanted = [sample.trajectory for path in files for sample in read_samples(path)]
    assert found.read == len(found.taught) == len(wanted) == 12
    for mine, theirs in zip(found.taught, wanted, strict=True):
        assert np.array_equal(mine.ids, theirs.ids)
        assert np.array_equal(mine.loss_mask, theirs.loss_mask)
    anew = stored(run, retokenize=True)
    assert [t.ids.tolist() for t in anew.taught] == [t.ids.tolist() for t in wanted]
    once = stored(run, select=SftSelect(distinct=True).model_dump())
    assert len(once.taught) == len({t.task.id for t in wanted}) == 7
    assert len(stored(run, select={"per_task": 1, "best": True, "turns": 1}).taught) == 7
    for section, why in (
        ({"select": {"reward": 1}}, r"none of the 12 .* is left to learn from: refused 12: its reward is below"),
        ({"select": {"split": "tset"}}, "sft.select.split tset: nothing of it is stored"),
        ({"learn": "flagged"}, "rollouts have no flags"),
        ({"limit": 3}, "more than the 3 that fit"),
        ({"model": str(save_tiny(tmp_path))}, r"has another; sft\.retokenize=true lays out"),
    ):
        with pytest.raises(UserError, match=why):
            stored(run, **section)


def rewarded(task: str, reward: float, token: int) -> Trajectory:
    made = laid({"messages": [USER, {**HI, "content": "x" * token}]})
    return replace(made, task=replace(made.task, id=task), rewards={"r": reward})


@pytest.mark.parametrize(
    ("select", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"reward": 0.5}, [0, 2, 4]),
        ({"best": True}, [0, 2, 3, 4]),
        ({"best": True, "distinct": True}, [0, 3, 4]),
        ({"per_task": 1}, [0, 4]),
        ({"per_task": 2}, [0, 2, 3, 4]),
    ],
)
def test_the_best_rollouts_of_a_task_are_selected(select: dict[str, Any], kept: list[int]) -> None:
    every = [
        rewarded("a", 1.0, 1), rewarded("a", 0.0, 2), rewarded("a", 1.0, 1), rewarded("b", 0.4, 1),
        rewarded("b", 1.0, 3),
    ]  # fmt: skip
    if "best" in select:
        every[3] = rewarded("c", 0.4, 1)
    refused: list[tuple[str, str]] = []
    found = _selected([(str(i), t) for i, t in enumerate(every)], SftSelect(**select), refused)
    assert [next(i for i, t in enumerate(every) if t is one) for one in found] == kept
    assert sorted(int(place) for place, _ in refused) == [i for i in range(5) if i not in kept]


@pytest.mark.ray
def test_two_workers_learn_what_one_process_learns(ray_address: str, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(save_tiny(tmp_path / "tiny")), "device": "cpu"},
            "cluster": {"workers": 2},
            "train": {"threads": 1, "micro_batch_tokens": 100},
            "sft": {"source": "x", "stages": [{"steps": 2, "lr": 1e-3}, {"steps": 1, "lr": 1e-3, "weight_decay": 0.5}]},
        }
    )
    course = Course.of(recipe, 6)
    changed = learning_recipe(recipe, course, True)
    groups = [
        [Group(g.task, (t,)) for g in make_groups([[1, 0], [0, 1, 1]], seed) for t in g.trajectories]
        for seed in range(3)
    ]
    found = []
    alone = LocalRoles(changed, load_model(recipe.model)[0])
    with two_workers(ray_address, tmp_path) as group, on_cluster(changed, tmp_path, group) as together:
        for host in (alone, together):
            learner = SftLearner(changed, host, course)
            losses = [learner.learn(each)["train/loss"] for each in groups]
            held = learner.loss([t for one in groups[0] for t in one.trajectories])
            found.append([*losses, held])
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0][-1] < found[0][0]


def test_an_update_is_that_of_the_mean_cross_entropy() -> None:
    recipe = Recipe.model_validate({"model": {"device": "cpu"}, "sft": {"source": "x", "stages": [{"steps": 9}]}})
    course = Course.of(recipe, 3)
    changed = learning_recipe(recipe, course, True)
    model, _ = load_model(recipe.model)
    learner = SftLearner(changed, LocalRoles(changed, model), course)
    lessons = [laid(ROW), laid({"messages": [USER, HI]})]
    wanted, count = 0.0, 0
    for t in lessons:
        with torch.no_grad():
            logits = model(torch.from_numpy(t.ids).long()[None]).logits[0].double().log_softmax(-1)
        for i in np.flatnonzero(t.loss_mask):
            wanted, count = wanted - float(logits[i - 1, t.ids[i]]), count + 1
    assert learner.loss(lessons) == pytest.approx(wanted / count, rel=1e-4)
    assert learner.learn([Group(t.task, (t,)) for t in lessons])["train/loss"] == pytest.approx(
        wanted / count, rel=1e-4
    )
    assert len(learner.learned) == 2


def test_muon_goes_on_from_its_saved_state() -> None:
    recipe = Recipe.model_validate({"model": {"device": "cpu"}, "sft": {"source": "x", "stages": [{"muon_lr": 0.02}]}})
    course = Course.of(recipe, 64)
    changed = learning_recipe(recipe, course, True)
    groups = [Group(t.task, (t,)) for t in (laid(ROW), laid({"messages": [USER, HI]}))]
    hosts = [LocalRoles(changed, load_model(recipe.model)[0]) for _ in range(2)]
    first, second = (SftLearner(changed, host, course) for host in hosts)
    first.learn(groups)
    second.begin_stage(0)
    hosts[1].model.load_state_dict(hosts[0].model.state_dict())
    second.steps = first.steps
    saved = {name: tensor.clone() for name, tensor in hosts[0].actor.optimizer.named_state().items()}
    hosts[1].actor.optimizer.load_named_state(saved)
    assert any(name.startswith("momentum.") and bool(tensor.any()) for name, tensor in saved.items())
    assert first.learn(groups)["train/loss"] == second.learn(groups)["train/loss"]
    pairs = zip(hosts[0].model.parameters(), hosts[1].model.parameters(), strict=True)
    assert all(bool((a == b).all()) for a, b in pairs)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("text", "given", "why"),
    [
        (None, [], r"sft.source: there is no file .*mine.jsonl"),
        ('{"text": "a"}\n', [], "mine.jsonl, line 1: has no list `messages`"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', [], "none of the 1 conversations is left to learn from"),
        (json.dumps(ROW), ["sft.max_tokens=9"], "more than the 9 that fit"),
        (json.dumps(ROW), ["sft.held_out=other.jsonl"], "sft.held_out: there is no file other.jsonl"),
        (json.dumps(ROW), ["sft.held_out=5"], "held_out is 5, and a share lies between 0 and 1"),
        (json.dumps(ROW), ["cluster.workers=2", "sft.stages=[{muon_lr: 0.02}]"], "Muon trains in one process"),
        (json.dumps(ROW), ["sft.new_model.chat_template=x.jinja"], "leave out sft.source"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: Any, given: Any, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "mine.jsonl").write_text(text)
    (tmp_path / "r.yaml").write_text("sft: {source: mine.jsonl}\n")
    assert re.search(why, refused(capsys, "sft", "r.yaml", *given))
    assert not any((tmp_path / "runs").glob("*/metrics.jsonl"))


@pytest.mark.parametrize(
    ("stage", "conversations", "steps", "lr", "warmup"),
    [
        ({}, None, 1000, 1e-3, 60),
        ({"batch": 4, "epochs": 1.5}, 10, 4, 1e-3, 0),
        ({"batch": 1, "epochs": 3}, 10, 30, 1e-3, 3),
        ({"steps": 5, "lr": 0.1, "warmup": 2}, 10, 5, 0.1, 2),
    ],
)
def test_what_a_stage_leaves_open_follows_from_the_conversations(
    stage: dict[str, Any], conversations: int | None, steps: int, lr: float, warmup: int
) -> None:
    recipe = Recipe.model_validate({"sft": {"stages": [stage, {"steps": 2}]}})
    course = Course.of(recipe, conversations)
    first = course.stages[0]
    assert (first.steps, first.lr, first.warmup) == (steps, lr, warmup)
    assert course.steps == steps + 2
    assert [course.place(n)[0::2] for n in (0, steps - 1, steps, steps + 1)] == [(0, 0), (0, steps - 1), (1, 0), (1, 1)]
