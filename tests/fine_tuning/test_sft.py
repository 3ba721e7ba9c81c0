"""The warm start: demonstrations become trajectories, and a model is made from nothing."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from agentrl_envs.gsm8k.environment import Gsm8k
from cli_help import quiet, refused
from fakes import ScriptedEngine
from paths import RECIPES

from agentrl.chat.encode import Encoder
from agentrl.chat.load import load_chat
from agentrl.chat.template import Template
from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.errors import UserError
from agentrl.fine_tuning.conversations import Layout, read_row
from agentrl.fine_tuning.demonstrations import Demonstrator
from agentrl.fine_tuning.new_model import bare_tokenizer, new_model, train_tokenizer
from agentrl.fine_tuning.run import sft
from agentrl.fine_tuning.trainer import check_lengths
from agentrl.models.load import load_model, resolve, resolve_types
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_environment, make_tool
from agentrl.plugins.types import Message, Task
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import EnvSection, ToolSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.rollout import CompactSection, RolloutSection
from agentrl.recipe.sections.sft import SftSection
from agentrl.rollout.driver import Driver
from agentrl.trajectory import FinishReason, Trajectory, check_invariants

TEMPLATE = (RECIPES / "tiny_template.jinja").read_text()


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let run folders be made in a folder of the test."""
    monkeypatch.chdir(tmp_path)


def make_demonstrator(template: str = TEMPLATE) -> tuple[Demonstrator, Any]:
    tokenizer = train_tokenizer(["Tom has 12 apples and buys 30 more."] * 3, 400, template, 512)
    env, tools = make_environment(EnvSection()), [make_tool(ToolSection(name="calculator"))]
    schemas = [tool.schema for tool in tools]
    chat = load_chat(tokenizer, model_path="", kind="bridge", tools=schemas)
    written = Template(tokenizer, None, schemas)
    return Demonstrator(env, tools, chat, written, Encoder(tokenizer, written.source)), tokenizer


def demonstrated(style: str, count: int = 20) -> list[tuple[Trajectory, list[Message], Any, Demonstrator]]:
    demonstrator, tokenizer = make_demonstrator()
    tasks = demonstrator.env.tasks("train")

    async def run() -> list[Any]:
        found = []
        for i in range(count):
            opening, said = await demonstrator.messages(tasks[i], Random(i), style)
            made = await demonstrator.trajectory(tasks[i], Random(i), style)
            found.append((made, [*opening, *said], tokenizer, demonstrator))
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("style", ["clean", "careless"])
def test_a_demonstration_is_the_rendered_conversation_and_its_mask_the_assistants_words(style: str) -> None:
    for trajectory, messages, tokenizer, demonstrator in demonstrated(style):
        schemas = demonstrator.schemas(trajectory.task)
        text = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False)
        assert tokenizer.decode(trajectory.ids) + "\n" == text
        assert np.array_equal(np.append(trajectory.ids, tokenizer.encode("\n")), tokenizer.encode(text))
        learned = [tokenizer.decode(trajectory.ids[turn.start : turn.end]) for turn in trajectory.turns]
        assert len(learned) == sum(m["role"] == "assistant" for m in messages)
        assert all(text.count("<|im_end|>") == 1 and text.endswith("<|im_end|>") for text in learned)
        assert learned[-1] == f"{messages[-1]['content']}<|im_end|>"
        assert tokenizer.decode(trajectory.ids[trajectory.loss_mask == 1]) == "".join(learned)


def test_a_row_has_the_tokens_of_a_demonstration_that_says_the_same() -> None:
    for style in ("clean", "careless"):
        for wanted, messages, _, demonstrator in demonstrated(style, 8):
            by = Layout(SftSection(source="x"), demonstrator.writer, demonstrator.schemas(wanted.task), 10_000)
            found = by.trajectory(read_row({"messages": messages}, "openai"), "row-1")
            assert np.array_equal(found.ids, wanted.ids)
            assert np.array_equal(found.loss_mask, wanted.loss_mask)
            assert found.turns == wanted.turns


class Says(ScriptedEngine):
    """Says the turns of a trajectory, in the order in which they began."""

    def __init__(self, trajectory: Trajectory) -> None:
        super().__init__([])
        self.left = [trajectory.ids[turn.start : turn.end].tolist() for turn in trajectory.turns]

    async def generate(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        turn = self.left.pop(0)
        return Generation(turn, [0.0] * len(turn), GenerationFinish.STOP)


def paths(t: Trajectory) -> list[list[int]]:
    """The paths up to the last word of the model, beginning with a count of what it said there."""
    found = [(t.ids[path], np.flatnonzero(t.loss_mask[path])) for path in t.paths()]
    return sorted([len(said), *ids[: said[-1] + 1].tolist()] for ids, said in found)


COMPACT = {"compact": {"at": 300, "prompt": "Sum up.", "resume": "{summary}"}}


@pytest.mark.parametrize(("limits", "delegate"), [({}, 0), (COMPACT, 0), ({}, 2), (COMPACT, 3)])
def test_a_demonstration_has_the_ids_of_a_rollout_in_which_the_model_says_the_same(
    limits: dict[str, Any], delegate: int
) -> None:
    plain, _ = make_demonstrator()
    env = make_environment(EnvSection(name="text_game", args={"delegate": delegate}))
    tools = [make_tool(ToolSection(name="delegate"))] if delegate else []
    section = RolloutSection(max_turns=99, max_tool_calls=99, max_tokens=4000, **limits)
    made = Demonstrator(env, tools, plain.chat, plain.template, plain.encoder, section)

    async def branches(index: int) -> int:
        task = env.tasks("train")[index]
        wanted = await made.trajectory(task, Random(index), "clean")
        check_invariants(wanted)
        driver = Driver(engine=Says(wanted), chat=plain.chat, environment=env, tools=tools, limits=section)
        found = await driver.drive(driver.request(task, 0))
        assert found.finish is FinishReason.ENV_DONE
        assert found.rewards["goal"] == 1.0
        assert paths(found) == paths(wanted)
        longest = max(map(len, wanted.paths()))
        check_lengths(longest, [wanted])
        with pytest.raises(UserError, match=f"has {longest} tokens, but the model's context only {longest - 1}"):
            check_lengths(longest - 1, [wanted])
        assert [turn.end - turn.start for turn in found.turns] == [turn.end - turn.start for turn in wanted.turns]
        return len(found.paths()) - 1

    made_branches = [asyncio.run(branches(index)) for index in range(4)]
    assert all(made_branches) if limits or delegate else not any(made_branches)


def test_a_summary_that_nobody_demonstrates_is_one_clear_line() -> None:
    demonstrator, _ = make_demonstrator()
    demonstrator.limits = RolloutSection(compact=CompactSection(at=2))
    task = demonstrator.env.tasks("train")[0]
    for said, message in (
        (NotImplementedError("environment 'gsm8k' has no summaries"), "no summaries.*give its class `summarize`"),
        (KeyError("x"), "summarize.*failed: KeyError"),
        ("", "returned no text"),
    ):
        demonstrator.env.summarize = Mock(side_effect=[said])  # type: ignore[method-assign]
        with pytest.raises(UserError, match=message):
            asyncio.run(demonstrator.trajectory(task, Random(0), "clean"))


class Odd:
    """An environment whose demonstrations are wrong in one way."""

    name = "odd"

    def __init__(self, said: list[Message]) -> None:
        self.said = said

    async def create(self, session: Any) -> list[Message]:
        return [{"role": "user", "content": "hello"}]

    async def release(self, session: Any) -> None: ...

    def tools_for(self, task: Task) -> Sequence[Any]:
        return ()

    def demonstrate(self, task: Task, rng: Random, style: str) -> Sequence[Message]:
        return self.said


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([], "contains no assistant turn"),
        ([{"role": "tool", "content": "4"}], "does not alternate"),
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "does not alternate"),
    ],
)
def test_wrong_demonstrations_are_one_clear_line(said: list[Message], message: str) -> None:
    demonstrator, _ = make_demonstrator()
    demonstrator.env = Odd(said)  # type: ignore[assignment]
    with pytest.raises(UserError, match=message):
        asyncio.run(demonstrator.trajectory(Task("t", {}), Random(0), "clean"))


def test_a_template_whose_history_lacks_its_generation_prompt_cannot_be_taught() -> None:
    demonstrator, _ = make_demonstrator(TEMPLATE.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>model\\n' }}"))
    with pytest.raises(UserError, match="after its own generation prompt"):
        asyncio.run(demonstrator.trajectory(demonstrator.env.tasks("train")[0], Random(0), "clean"))


def test_a_new_tokenizer_keeps_digits_and_control_tokens_apart() -> None:
    _, tokenizer = make_demonstrator()
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    assert len(tokenizer.encode("<tool_call></tool_response><|im_end|>")) == 3
    assert tokenizer.decode(tokenizer.encode("<tool_call>"), skip_special_tokens=True) == "<tool_call>"
    odd = "Ünïcödé 漢字 🙂 x=3.14;\n\tfoo  bar"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd


SMALL = [
    "sft.new_model.config={num_hidden_layers: 1, hidden_size: 32, intermediate_size: 64, head_dim: 16}",
    "sft.new_model.vocabulary=320", "sft.new_model.texts=60",
]  # fmt: skip


@pytest.mark.slow
def test_a_model_is_made_from_nothing_and_can_be_taught_further(tmp_path: Path) -> None:
    clean = "{style: clean, steps: 12, batch: 4, lr: 1e-2, warmup: 2}"
    stages = [f"sft.stages=[{clean}, {{style: careless, steps: 2, batch: 3}}]"]
    recipe = load_recipe(RECIPES / "tiny_warmstart.yaml", [*SMALL, *stages])
    first = sft(recipe, str(tmp_path / "one"), console=quiet())
    assert first.steps == 14
    model, tokenizer = load_model(ModelSection(path=str(first.folder)))
    assert (model.config.model_type, model.config.vocab_size % 64, len(tokenizer)) == ("qwen3", 0, 320)
    assert (first.folder / "chat_template.jinja").read_text() == TEMPLATE.strip()
    again = load_recipe(RECIPES / "tiny_warmstart.yaml", ["sft.new_model=null", f"model.path={first.folder}", *stages])
    second = sft(again, str(tmp_path / "two"), console=quiet())
    assert second.loss < first.loss < np.log(320)
    with pytest.raises(UserError, match="holds a model already"):
        sft(again, str(tmp_path / "two"), console=quiet())


@pytest.mark.slow
def test_a_tokenizer_learns_from_the_splits_that_are_named(tmp_path: Path) -> None:
    def made(split: str) -> bytes:
        steps = "sft.stages=[{style: clean, steps: 1, batch: 2}]"
        named = [*SMALL, f"sft.new_model.splits=[{split}]", "sft.new_model.vocabulary=600", steps]
        recipe = load_recipe(RECIPES / "tiny_warmstart.yaml", named)
        return (sft(recipe, str(tmp_path / split), console=quiet()).folder / "tokenizer.json").read_bytes()

    assert made("train") != made("test")
    with pytest.raises(UserError, match="no split 'trian'"):
        made("trian")


@pytest.mark.slow
def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    recipe = load_recipe(
        RECIPES / "tiny_warmstart.yaml", [*SMALL, "sft.stages=[{style: clean, steps: 2, batch: 2, lr: 1e-2}]"]
    )
    blobs = []
    for name in ("a", "b"):
        folder = sft(recipe, str(tmp_path / name), console=quiet()).folder
        blobs.append([(folder / file).read_bytes() for file in ("model.safetensors", "tokenizer.json")])
    assert blobs[0] == blobs[1]


def test_texts_can_be_made_one_token_each() -> None:
    glue = ['{"name": "', '", "arguments": {"', '": "', '"}}']
    tokenizer = train_tokenizer(['{"name": "calculator"} cat'] * 3, 400, TEMPLATE, 512, glue)
    ids = tokenizer.encode('{"name": "calculator", "arguments": {"expression": "12*3"}}')
    assert [text for i in ids if (text := tokenizer.decode([i])) in glue] == glue
    assert len(tokenizer) <= 400


@pytest.mark.slow
def test_muon_trains_the_blocks_and_adamw_the_rest(tmp_path: Path) -> None:
    stages = ["sft.stages=[{style: clean, steps: 12, batch: 4, lr: 1e-2, muon_lr: 0.02, warmup: 2}]"]
    result = sft(
        load_recipe(RECIPES / "tiny_warmstart.yaml", [*SMALL, *stages]), str(tmp_path / "model"), console=quiet()
    )
    assert result.loss < 0.8 * np.log(320)


@pytest.mark.slow
def test_without_a_named_folder_a_run_folder_keeps_recipe_and_metrics(
    tmp_path: Path,
) -> None:
    recipe = load_recipe(
        RECIPES / "tiny_warmstart.yaml", [*SMALL, "sft.stages=[{style: clean, steps: 3, batch: 2, lr: 1e-2}]"]
    )
    result = sft(recipe, console=quiet())
    assert result.folder.resolve() == tmp_path / "runs/sft-001/checkpoints/step_3"
    kept = load_recipe(tmp_path / "runs/sft-001/recipe.yaml")
    assert kept.model_copy(update={"sft": recipe.sft}) == resolve_types(recipe)
    lines = [json.loads(line) for line in (tmp_path / "runs/sft-001/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert sum(line["train/tokens"] for line in lines[1:]) == result.tokens


@pytest.mark.slow
def test_a_demonstration_longer_than_the_context_is_said(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / "tiny_warmstart.yaml", [*SMALL, "sft.new_model.config.max_position_embeddings=64"])
    with pytest.raises(UserError, match=r"has \d+ tokens, but the model's context only 64"):
        sft(recipe, str(tmp_path / "model"), console=quiet())


def test_the_recipe_makes_the_configuration_that_the_package_ships() -> None:
    shipped = json.loads((Path(resolve("tiny")) / "config.json").read_text())
    section = load_recipe(RECIPES / "tiny_warmstart.yaml").sft
    assert section is not None
    assert section.new_model is not None
    made = new_model(section.new_model, bare_tokenizer(TEMPLATE), 0).config.to_dict()
    saved = {"architectures", "dtype", "transformers_version"}  # what saving adds
    assert {key: made[key] for key in shipped if key not in saved} == {
        key: value for key, value in shipped.items() if key not in saved
    }


def test_induction_heads_copy_what_came_before_untrained() -> None:
    share = {}
    for init in ("random", "induction"):
        section = load_recipe(RECIPES / "tiny_tools.yaml", [f"sft.new_model.init={init}"]).sft
        assert section is not None
        assert section.new_model is not None
        model = new_model(section.new_model, bare_tokenizer(TEMPLATE), 0)
        once = torch.randint(0, model.config.vocab_size, (4, 150), generator=torch.Generator().manual_seed(0))
        other = torch.randint(0, model.config.vocab_size, (4, 100), generator=torch.Generator().manual_seed(1))
        ids = torch.cat([once, other, once], 1)
        with torch.no_grad():
            said = model(ids).logits[:, 251:-1].argmax(-1)
        share[init] = (said == ids[:, 252:]).float().mean().item()
    assert share["random"] < 0.02
    assert share["induction"] > 0.5


@pytest.mark.parametrize("override", ["num_key_value_heads=2", "num_hidden_layers=1", "hidden_size=128"])
def test_a_shape_without_room_for_induction_heads_is_refused(override: str) -> None:
    with pytest.raises(UserError, match="new_model: init: induction wants two layers or more, as many key-value heads"):
        load_recipe(RECIPES / "tiny_tools.yaml", [f"sft.new_model.config.{override}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hidden=32", "config: 'hidden' is not part of the model's shape; did you mean 'hidden_size'"),
        ("hidden_size=wide", "sft.new_model.config.hidden_size: expected a whole number, got the text 'wide'"),
        ("num_hidden_layers=0", "config.num_hidden_layers: expected more than 0, got 0"),
        ("head_dim=2.5", "config.head_dim: expected a whole number, got the number 2.5"),
    ],
)
def test_what_is_wrong_with_a_shape_is_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(RECIPES / "tiny_warmstart.yaml", [f"sft.new_model.config.{override}"])


@pytest.mark.slow
def test_a_recipe_without_the_section_says_so() -> None:
    with pytest.raises(UserError, match="no `sft` section"):
        sft(load_recipe(RECIPES / "gsm8k_tool.yaml"))


class Undemonstrated(Gsm8k):
    """As an environment whose author wrote no demonstrations."""

    name = "undemonstrated"

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        return list(Environment.demonstrate(self, task, rng, style))


class Clumsy(Gsm8k):
    name = "clumsy"

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        raise KeyError("worked")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Undemonstrated", "environment 'undemonstrated' has no demonstrations, which `agentrl sft` learns from"),
        ("Clumsy", r"environment 'clumsy': demonstrate\('train-0'\) failed: KeyError: 'worked'"),
    ],
)
def test_an_environment_without_demonstrations_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(f"env: {{name: '{__name__}:{name}'}}\nsft: {{stages: [{{style: clean}}]}}\n")
    assert re.search(words, refused(capsys, "sft", str(recipe), "--out", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_lessons_that_did_not_take_are_said() -> None:
    console = quiet()
    with console.capture() as told:
        result = sft(
            Recipe.model_validate(
                {
                    "env": {"name": "search_qa"},
                    "sft": {"stages": [{"steps": 20, "batch": 4, "lr": 1e-12}]},
                    "train": {"threads": 1},
                }
            ),
            console=console,
        )
    assert "the lessons did not take: the loss hardly fell" in told.get()
    row = json.loads((result.run / "metrics.jsonl").read_text().splitlines()[-1])
    assert [one["name"] for one in row["health"]] == ["lessons_not_taken"]
