"""Measuring of openings: exact, many at once, and past environments that fail."""

import asyncio
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import pytest
import torch
from chat_help import CALCULATOR, DIFFICULT, HERMES, SENTENCES, make_tokenizer, trl_templates
from fakes import TASK, CharChat, Echo

from agentrl import Environment, Message, Session, Task, UserError
from agentrl.chat.base import Measuring, Seeing
from agentrl.chat.load import load_chat
from agentrl.data import prompts
from agentrl.data.prompts import AT_ONCE, PromptLengths, drawn, fits, measure_prompts, unseen
from agentrl.data.sampler import Curriculum, CurriculumArgs, TaskSampler


class Plain(Environment):
    name = "plain"

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.released = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK]

    async def create(self, session: Session, **create_kwargs: Any) -> Sequence[Message]:
        if self.failing == "create":
            raise RuntimeError("no room")
        if self.failing == "settings":
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
        return [{"role": "user", "content": "How many?"}]

    async def calc_reward(self, session: Session, **kwargs: Any) -> float:
        return 0.0

    async def release(self, session: Session, **kwargs: Any) -> None:
        self.released += 1
        if self.failing == "release":
            raise RuntimeError("stuck")


@pytest.mark.parametrize("failing", ["", "create", "settings", "release"])
async def test_every_opening_is_released_and_no_hook_ends_the_run(failing: str) -> None:
    env, chat = Plain(failing), CharChat()
    found = await measure_prompts(env, [], chat, [TASK, TASK], limit=100)
    whole = len(chat.render([{"role": "user", "content": "How many?"}], []))
    assert found.lengths == ((0, 0) if failing == "create" else (whole, whole))
    assert env.released == 2
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)


async def test_prompts_of_an_order_are_measured_as_they_are_drawn(caplog: pytest.LogCaptureFixture) -> None:
    """Which ones it draws depends on results: all were, at every start."""
    tasks, asked = [Task(f"t{i}", {}) for i in range(4)], []
    found = TaskSampler(4, 0, order=Curriculum(CurriculumArgs()))
    found.order.begin(tasks, 0)  # type: ignore[union-attr]

    async def measure(some: Sequence[Task]) -> PromptLengths:
        asked.extend(task.id for task in some)
        return PromptLengths(tuple(int(task.id[1:]) % 2 * 10 for task in some), 5)

    indices = await drawn(found, 6, lambda index: fits(found, tasks, index, measure))
    assert set(indices) == {0, 2}
    assert set(asked) == {"t0", "t1", "t2", "t3"}
    asked.clear()
    assert set(await drawn(found, 4, lambda index: fits(found, tasks, index, measure))) == {0, 2}
    assert asked == []  # they are measured once
    assert found.excluded == {1, 3}
    assert caplog.text.count("task t1 is left out: its prompt has 10 tokens, and 5 fit (rollout.max_tokens)") == 1
    alone = TaskSampler(1, 0, order=Curriculum(CurriculumArgs()))
    alone.order.begin(tasks[1:2], 0)  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"no task is left that can be played \(the last: t1: its prompt has 10 tokens"):
        await drawn(alone, 1, lambda index: fits(alone, tasks[1:2], index, measure))


def _talks() -> list[list[Message]]:
    said = [
        *SENTENCES,
        "",
        " x ",
        "\n",
        "half \ud800 a pair",
        "<|im_end|>",
        "</think> <tool_call>",
        "/no_think",
        "漢字 " * 50,
    ]
    talks: list[list[Message]] = [[{"role": "user", "content": text}] for text in said]
    talks += [[{"role": "system", "content": "Be brief."}, *talk] for talk in talks[:3]]
    talks.append([{"role": "user", "content": [{"type": "text", "text": "parts"}]}])
    return talks


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_2", "gemma4", "gptoss", "llama3_1", "glm4moe"])
def test_lengths_are_those_of_rendering(name: str) -> None:
    template = trl_templates()[name]
    chat = load_chat(make_tokenizer(template), model_path="", tools=[CALCULATOR])
    assert isinstance(chat, Measuring)
    openings = []
    for talk in _talks():
        try:
            chat.render(talk, [CALCULATOR])
        except UserError:
            continue
        openings.append((talk, [CALCULATOR]))
    assert len(openings) > 10
    assert chat.lengths(openings) == [len(chat.render(*opening)) for opening in openings]
    assert chat.lengths([]) == []


def _switched() -> Any:
    """Its template looks for a word in what is asked."""
    ending = "'<|im_start|>assistant\\n' }}{%- endif %}"
    assert ending in HERMES
    looks = "'<|im_start|>assistant\\n' + ('' if '/no_think' in messages[-1].content else '<think>') }}{%- endif %}"
    return make_tokenizer(HERMES.replace(ending, looks), ["<think>", "</think>"])


@pytest.mark.parametrize("make", [*DIFFICULT, _switched])
def test_lengths_hold_for_difficult_tokenizers(make: Callable[[], Any]) -> None:
    chat = load_chat(make(), model_path="", tools=[CALCULATOR])
    assert isinstance(chat, Measuring)
    said = ["6", "  two  words ", "\n\nx<table>\n\n", "</tool_response><|im_end|> \ufdd0|\ufdd1 ", "x /no_think", "y"]
    openings = [([{"role": "user", "content": text}], [CALCULATOR]) for text in said]
    assert chat.lengths(openings) == [len(chat.render(*opening)) for opening in openings]


class Many(Plain):
    """Each task's own prompt; `create` waits until others were asked too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    async def create(self, session: Session, **create_kwargs: Any) -> Sequence[Message]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        return [{"role": "user", "content": "x" * int(session.task.id)}]


async def test_many_are_opened_at_once_and_kept_in_order() -> None:
    env, tasks = Many(), [Task(str(n), {}) for n in range(2 * AT_ONCE + 5)]
    found = await measure_prompts(env, [Echo()], CharChat(), tasks, limit=10**6)
    assert [b - a for a, b in zip(found.lengths, found.lengths[1:], strict=False)] == [1] * (len(tasks) - 1)
    assert env.released == len(tasks)
    assert env.most == AT_ONCE


async def test_the_chat_is_given_one_schema_a_tool() -> None:
    class Watching(CharChat):
        def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
            seen.append(tools)
            return super().render(messages, tools)

    seen: list[Sequence[dict[str, Any]]] = []
    await measure_prompts(Plain(), [Echo()], Watching(), [TASK] * 3, limit=100)
    assert len({id(tools[0]) for tools in seen}) == 1  # or each opening would be worked out anew


def test_counts_are_said() -> None:
    assert PromptLengths((1, 2), 2).report("training") is None
    line = PromptLengths((1, 5, 9), 4).report("training")
    assert line == "2 of 3 training prompts are longer than the 4 tokens that fit (longest: 9): left out"
    with pytest.raises(UserError, match="none is left"):
        PromptLengths((5, 9), 4).report("training")


class Giving(Environment):
    """Gives the images of a task as `give` does."""

    name = "giving"

    def __init__(self, give: Callable[[], Sequence[Any]]) -> None:
        self.give = give

    async def create(self, session: Session, **_: Any) -> Sequence[Message]:
        return [{"role": "user", "content": "look"}]

    def images(self, task: Task) -> Sequence[Any]:
        return self.give()

    async def calc_reward(self, session: Session, **_: Any) -> float:
        return 0.0

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK]


class Sees(Seeing, CharChat):
    pass


@pytest.mark.parametrize(("raised", "words"), [(ValueError("no file"), "no file"), (SystemExit(7), "SystemExit")])
async def test_images_that_an_environment_cannot_give_are_one_line(raised: BaseException, words: str) -> None:
    def leave() -> Sequence[Any]:
        raise raised

    with pytest.raises(UserError, match=rf"images\('{TASK.id}'\) failed: .*{words}"):
        await unseen(Giving(leave), Sees(), TASK)


async def test_images_that_never_come_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "OPENING_SECONDS", 0.05)
    never = Event()
    with pytest.raises(UserError, match=rf"'giving': images\('{TASK.id}'\) did not return within 0.05 seconds"):
        await unseen(Giving(never.wait), Sees(), TASK)
    never.set()
