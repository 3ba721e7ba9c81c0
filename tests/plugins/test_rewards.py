"""Names in `rewards.weights` are checked before anything is sampled, as far as the plugins say what they give."""

from typing import Any

import pytest
from agentrl_envs.code.environment import Code
from agentrl_envs.gsm8k.environment import Gsm8k
from agentrl_envs.search_qa.environment import SearchQa
from agentrl_tools.calculator import Calculator

from agentrl.errors import UserError
from agentrl.plugins.environment import declared_parts
from agentrl.plugins.mixture import Mixture
from agentrl.plugins.rewards import check_weights, known_parts
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Session
from agentrl.recipe.sections.env import EnvPart


class Own(Gsm8k):
    async def calc_reward(self, session: Session, **kwargs: Any) -> dict[str, float]:
        return {"mine": 1.0}


class Said(Own):
    reward_parts = ("mine",)


class Paying(Calculator):
    async def calc_reward(self, session: Session, **kwargs: Any) -> float:
        return 1.0


def mixture(*envs: Any) -> Mixture:
    return Mixture([(EnvPart(name=env.name), env) for env in envs])


def test_what_a_class_says_holds_for_its_own_hook_alone() -> None:
    assert declared_parts(Gsm8k()) == ("answer",)
    assert declared_parts(SearchQa()) == ("em", "f1")
    assert declared_parts(SearchQa(format=True)) == ("em", "f1", "format")
    assert declared_parts(Own()) is None
    assert declared_parts(Said()) == ("mine",)
    assert declared_parts(Calculator()) == ()
    assert declared_parts(Paying()) is None
    assert declared_parts(mixture(Gsm8k(), Code())) == ("answer", "passed", "fraction", "format")
    assert declared_parts(mixture(Gsm8k(), Own())) is None


def test_parts_that_are_one_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were four parts of a letter each."""
    monkeypatch.setattr(Said, "reward_parts", "mine")
    with pytest.raises(UserError, match=r"^Said: `reward_parts` is 'mine'; expected a tuple of texts$"):
        declared_parts(Said())


@pytest.mark.parametrize(
    ("plugins", "named"), [((Gsm8k(), Calculator()), "answer"), ((Gsm8k(),), "size"), ((Own(),), "whatever"),
                           ((Gsm8k(), Paying()), "calculator")],
)  # fmt: skip
def test_what_may_be_given_is_let_pass(plugins: tuple[Gsm8k | Tool, ...], named: str) -> None:
    check_weights({named: 0.5}, known_parts(plugins, ("size",)))


def test_what_nobody_gives_is_refused_with_what_there_is() -> None:
    with pytest.raises(UserError) as refused:
        check_weights({"answer": 1.0, "sise": 2.0}, known_parts((Gsm8k(), Calculator()), ("size",)))
    said = "rewards.weights: no environment, tool or function here gives the part 'sise'; did you mean 'size'?"
    assert str(refused.value) == said
