"""What environments share that make their own tasks: lazy splits, seeds, and words for a name that is none."""

from random import Random

import pytest

from agentrl.errors import UserError
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_environment
from agentrl.recipe.sections.env import EnvSection

MADE = {
    "gsm8k": (50_000, ("test", "phrasing", "large", "validation")),
    "code": (50_000, ("test", "kinds", "validation")),
    "user_sim": (100_000, ("test", "wording", "validation")),
    "text_game": (1_000_000, ("test", "large", "validation")),
    "vision_game": (1_000_000, ("test", "validation")),
    "chart_qa": (100_000, ("test", "validation")),
}
"""Tasks to train on, and held-out splits."""


@pytest.mark.parametrize("name", MADE)
def test_tasks_are_lazy_stable_and_seeded(name: str, request: pytest.FixtureRequest) -> None:
    if name == "code":
        request.getfixturevalue("bubblewrap")

    def made(source: str = "generated", **args: int) -> Environment:
        return make_environment(EnvSection(name=name, source=source, args=args))

    size, splits = MADE[name]
    env, other = made(), made(seed=1)
    train = env.tasks("train")
    assert (len(train), env.splits) == (size, splits)
    assert train[7] == made().tasks("train")[7] != other.tasks("train")[7]
    assert [t.id for t in (*train[3:5], train[-1])] == ["train-3", "train-4", f"train-{size - 1}"]
    assert env.tasks("test")[3] == other.tasks("test")[3]
    with pytest.raises(IndexError, match=f"{size} tasks"):
        train[size]
    for wrong, said in (
        (lambda: env.tasks("tset"), "no split 'tset'.*test"),
        (lambda: env.demonstrate(train[0], Random(0), "claen"), "no demonstrations of style 'claen'.*clean"),
        (lambda: made("nowhere.jsonl"), "env.source: .* makes its own tasks|there is no file nowhere.jsonl"),
    ):
        with pytest.raises(UserError, match=said):
            wrong()
