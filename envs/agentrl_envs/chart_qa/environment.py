"""The environment `chart_qa`: a question about a drawn chart, with a tool that enlarges a part of it."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from agentrl_tools.calculator import evaluate, written
from agentrl_tools.rewards.grade import read_answer

from agentrl.errors import UserError
from agentrl.plugins.environment import Environment, LazyTasks
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Session, Task, ToolResponse, answer_of
from agentrl_envs.chart_qa.chart import HEIGHT, WIDTH, Box, Chart
from agentrl_envs.chart_qa.questions import Question, ask
from agentrl_envs.conversation import Styles, assistant, check_generated, check_split, check_style, draw_way, tool_turn

if TYPE_CHECKING:
    from PIL.Image import Image

STYLES: Styles[bool] = {"clean": {True: 1.0}, "careless": {True: 0.6, False: 0.4}}
"""Relative frequencies of a closer look at each number, and of a guess."""
HOW = "End with the answer, a number or a name alone, on a line of its own: #### answer"
SIDES = ("left", "top", "right", "bottom")
LEAST = 5
"""Percent of the picture that a crop takes at least, in each direction."""
TRAIN_SIZE, HELD_OUT_SIZE = 100_000, 1_000


class Crop(Tool):
    """A part of the chart, enlarged.

    width: pixels of the picture that the model is shown.
    """

    name = "crop"
    description = (
        "Shows a part of the chart, enlarged. Its sides are whole percent of the picture, counted from the left and "
        "from the top."
    )
    parameters: Mapping[str, Json] = {
        "type": "object",
        "properties": {side: {"type": "integer"} for side in SIDES},
        "required": list(SIDES),
    }

    def __init__(self, width: int) -> None:
        self._width = width

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        assert session.environment is not None
        left, top, right, bottom = box = tuple(int(arguments[side]) for side in SIDES)
        if min(box) < 0 or max(box) > 100:
            wrong = next(side for side, at in zip(SIDES, box, strict=True) if not 0 <= at <= 100)
            return _refused(f"{wrong} is {arguments[wrong]}: it must be 0 to 100, percent of the picture")
        if right - left < LEAST or bottom - top < LEAST:
            return _refused(f"right must be at least {LEAST} more than left, and bottom {LEAST} more than top")
        chart: Chart = session.environment.state
        return ToolResponse(images=(cropped(chart, (left, top, right, bottom), self._width),))


def _refused(why: str) -> ToolResponse:
    return ToolResponse(f"error: {why}", error=True)


@lru_cache(64)  # the samples of a task look at the same picture first
def cropped(chart: Chart, box: Box, width: int) -> "Image":
    """A part of a chart as a picture that is no larger than one of the whole chart."""
    from PIL.Image import Resampling

    left, top, right, bottom = box
    part = chart.picture().crop(
        (WIDTH * left // 100, HEIGHT * top // 100, WIDTH * right // 100, HEIGHT * bottom // 100)
    )
    scale = min(width / part.width, width * HEIGHT / WIDTH / part.height)
    size = max(1, round(part.width * scale)), max(1, round(part.height * scale))
    return part.resize(size, Resampling.LANCZOS, reducing_gap=2.0)


class ChartQa(Environment):
    """Questions about bars, lines and pies, whose numbers are printed too small for the first picture: `crop` enlarges
    a part of it, and the tool `calculator`, which a recipe adds, works the numbers out.

    source: `generated`, which is all there is. width: pixels of a picture; it is three quarters as high. seed: of the
    training charts.

    Reward: `answer`, 1 for the right number or name behind `####`. A percentage may be half a point off.
    """

    name = "chart_qa"
    reward_parts = ("answer",)
    splits = ("test", "validation")

    def __init__(self, source: str = "generated", width: int = 448, seed: int = 0) -> None:
        check_generated(self, source)
        if not 64 <= width <= WIDTH:
            raise UserError(f"env.args.width is {width}: it must be 64 to {WIDTH}")
        self._width, self._seed = width, seed
        self._tools = (Crop(width),)

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        return LazyTasks(TRAIN_SIZE if split == "train" else HELD_OUT_SIZE, lambda index: self._task(split, index))

    def _task(self, split: str, index: int) -> Task:
        chart, question = self._drafted(split, index)
        data = {"split": split, "index": index, "chart": chart.kind, "question": question.text}
        return Task(f"{split}-{index}", {**data, "answer": question.answer})

    def _drafted(self, split: str, index: int) -> tuple[Chart, Question]:
        """A chart of a split and the question about it. Train depends on the seed, the others never do."""
        rng = Random(f"chart_qa/{self._seed if split == 'train' else 0}/{split}/{index}")
        chart = Chart.draft(rng)
        return chart, ask(chart, rng)

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        chart, question = self._drafted(session.task.data["split"], session.task.data["index"])
        session.state = chart
        content: list[dict[str, Json]] = [
            {"type": "image", "image": cropped(chart, (0, 0, 100, 100), self._width)},
            {"type": "text", "text": f"{question.text} {HOW}"},
        ]
        return [{"role": "user", "content": content}]

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        _, question = self._drafted(session.task.data["split"], session.task.data["index"])
        return {"answer": float(is_right(answer_of(session.messages), question))}

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        """A worked question in a style of STYLES; its calls are of `crop` and `calculator`."""
        check_style(self, style, STYLES)
        chart, question = self._drafted(task.data["split"], task.data["index"])
        if not draw_way(STYLES[style], rng):
            return [assistant(f"#### {_guess(chart, question, rng)}")]
        said: list[Message] = []
        for mark in question.marks:
            box = chart.box(mark)
            turn, result = tool_turn("crop", dict(zip(SIDES, box, strict=True)), "")
            said += [turn, {**result, "content": [{"type": "image", "image": cropped(chart, box, self._width)}]}]
        for step in question.steps:
            said += tool_turn("calculator", {"expression": step}, written(evaluate(step)[0]))
        return [*said, assistant(f"#### {question.answer}")]


def is_right(text: str, question: Question) -> bool:
    """Whether a text marks the answer to a question."""
    if question.answer[-1].isdigit():
        found = read_answer(text)
        return found is not None and abs(found - Fraction(question.answer)) <= question.tolerance
    _, mark, said = text.rpartition("####")
    return bool(mark) and said.strip().strip(".").casefold() == question.answer.casefold()


def _guess(chart: Chart, question: Question, rng: Random) -> str:
    """What one says who takes no closer look."""
    if not question.answer[-1].isdigit():
        return rng.choice(chart.labels)
    return written(max(Fraction(0), Fraction(question.answer) + rng.choice((-10, -5, -2, -1, 0, 1, 2, 5, 10))))
