"""How a customer is served, as chat messages: carefully, or the way a careless assistant does it.

They are played against the customer of `dialogue.py`, so every reply in them is one that he gives.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random

from agentrl.plugins.types import FunctionCall, Message
from agentrl_envs.user_sim.dialogue import Dialogue
from agentrl_envs.user_sim.facts import FACTS, Fact
from agentrl_envs.user_sim.generate import Scenario
from agentrl_envs.user_sim.lookup import record


@dataclass(frozen=True)
class Style:
    """Relative frequencies of the ways to serve a customer."""

    good: float = 1.0
    guess: float = 0.0
    one_question: float = 0.0
    idle_question: float = 0.0
    wrong_copy: float = 0.0
    no_mark: float = 0.0


STYLES = {
    "clean": Style(),
    "careless": Style(good=0.3, guess=0.3, one_question=0.15, idle_question=0.1, wrong_copy=0.1, no_mark=0.05),
}


def demonstrate(scenario: Scenario, patience: int, rng: Random, style: str) -> list[Message]:
    """The messages after the opening; the last is the assistant's. Raises KeyError for a style not in `STYLES`."""
    mix = STYLES[style]
    ways = [f.name for f in fields(mix)]
    way = rng.choices(ways, [getattr(mix, w) for w in ways])[0]
    return _WAYS[way](_Desk(scenario, patience, rng))


class _Desk:
    """Writes both sides of a conversation down. `guessed` stand in for facts that were never asked for."""

    def __init__(self, scenario: Scenario, patience: int, rng: Random) -> None:
        self.scenario, self.rng = scenario, rng
        self.dialogue = Dialogue(scenario, patience)
        self.messages: list[Message] = []
        self.guessed = {f.name: f.value(rng, held_out=False) for f in scenario.kind.facts}

    def ask(self, fact: Fact) -> None:
        question = self.rng.choice(fact.questions)
        self.messages.append(_say(question))
        self.messages.append({"role": "user", "content": self.dialogue.hear(question, self.rng)[1]})

    def ask_all(self) -> None:
        for fact in self.scenario.kind.facts:
            if fact.name not in self.dialogue.known:
                self.ask(fact)

    def answer(self, mark: str = "#### ") -> list[Message]:
        """The final line from what is known, and guesses for the rest."""
        facts = {n: v if n in self.dialogue.known else self.guessed[n] for n, v in self.scenario.facts.items()}
        return self.finish(facts, mark)

    def finish(self, facts: dict[str, str], mark: str = "#### ") -> list[Message]:
        found = None
        if self.scenario.kind.looks_up:
            number = next(iter(facts.values()))
            found = self._look_up(number) or str(self.rng.randint(11, 999))
        return [*self.messages, _say(mark + self.scenario.kind.form.format(**facts, found=found))]

    def _look_up(self, number: str) -> str | None:
        text = record(self.scenario, number)
        function: FunctionCall = {"name": "lookup", "arguments": {"number": number}}
        call: Message = {
            "role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]
        }  # fmt: skip
        self.messages += [call, {"role": "tool", "content": text or f"error: no record of {number}"}]
        return text.rpartition(" ")[2] if text else None


def _good(desk: _Desk) -> list[Message]:
    desk.ask_all()
    return desk.answer()


def _guess(desk: _Desk) -> list[Message]:
    return desk.answer()


def _one_question(desk: _Desk) -> list[Message]:
    """Asks for one thing and guesses the others; where one thing is missing, that is all there is to ask."""
    missing = [f for f in desk.scenario.kind.facts if f.name not in desk.dialogue.known]
    desk.ask(desk.rng.choice(missing))
    return desk.answer()


def _idle_question(desk: _Desk) -> list[Message]:
    """Asks for something that does not matter, then gives up half of the time."""
    needed = {f.name for f in desk.scenario.kind.facts}
    desk.ask(desk.rng.choice([f for f in FACTS if f.name not in needed]))
    if desk.dialogue.over:
        return desk.messages[:-1]
    return _good(desk) if desk.rng.random() < 0.5 else desk.answer()


def _wrong_copy(desk: _Desk) -> list[Message]:
    desk.ask_all()
    wrong = desk.rng.choice(list(desk.scenario.facts))
    return desk.finish({**desk.scenario.facts, wrong: desk.guessed[wrong]})


def _no_mark(desk: _Desk) -> list[Message]:
    desk.ask_all()
    return desk.answer(mark="Done: ")


_WAYS: dict[str, Callable[[_Desk], list[Message]]] = {
    "good": _good,
    "guess": _guess,
    "one_question": _one_question,
    "idle_question": _idle_question,
    "wrong_copy": _wrong_copy,
    "no_mark": _no_mark,
}


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}
