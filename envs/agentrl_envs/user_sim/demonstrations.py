"""How a customer is served, as chat messages: carefully, or the way a careless assistant does it.

They are played against the customer of `dialogue.py`, so every reply in them is one that he gives.
"""

from collections.abc import Callable
from random import Random

from agentrl.plugins.types import Message
from agentrl_envs.conversation import Styles, assistant, draw_way, tool_turn
from agentrl_envs.user_sim.dialogue import Dialogue, record
from agentrl_envs.user_sim.facts import FACTS, Fact
from agentrl_envs.user_sim.generate import Scenario


def demonstrate(scenario: Scenario, patience: int, rng: Random, style: str) -> list[Message]:
    """The messages after the opening; the last is the assistant's. Raises KeyError for a style not in
    `STYLES`."""
    return draw_way(STYLES[style], rng)(_Service(scenario, patience, rng))


class _Service:
    """Writes both sides of a conversation down. `guessed` stand in for facts that were never asked for."""

    def __init__(self, scenario: Scenario, patience: int, rng: Random) -> None:
        self.scenario, self.rng = scenario, rng
        self.dialogue = Dialogue(scenario, patience)
        self.messages: list[Message] = []
        self.guessed = {f.name: f.value(rng, held_out=False) for f in scenario.kind.facts}

    def ask(self, fact: Fact) -> None:
        question = self.rng.choice(fact.questions)
        self.messages.append(assistant(question))
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
        return [*self.messages, assistant(mark + self.scenario.kind.form.format(**facts, found=found))]

    def _look_up(self, number: str) -> str | None:
        text = record(self.scenario, number)
        self.messages += tool_turn("lookup", {"number": number}, text or f"error: no record of {number}")
        return text.rpartition(" ")[2] if text else None


def _good(service: _Service) -> list[Message]:
    service.ask_all()
    return service.answer()


def _guess(service: _Service) -> list[Message]:
    return service.answer()


def _one_question(service: _Service) -> list[Message]:
    """Ask for one thing and guess the others; where one thing is missing, that is all there is to ask."""
    missing = [f for f in service.scenario.kind.facts if f.name not in service.dialogue.known]
    service.ask(service.rng.choice(missing))
    return service.answer()


def _idle_question(service: _Service) -> list[Message]:
    """Ask for something that does not matter, then gives up half of the time."""
    needed = {f.name for f in service.scenario.kind.facts}
    service.ask(service.rng.choice([f for f in FACTS if f.name not in needed]))
    if service.dialogue.over:
        return service.messages[:-1]
    return _good(service) if service.rng.random() < 0.5 else service.answer()


def _wrong_copy(service: _Service) -> list[Message]:
    service.ask_all()
    wrong = service.rng.choice(list(service.scenario.facts))
    return service.finish({**service.scenario.facts, wrong: service.guessed[wrong]})


def _no_mark(service: _Service) -> list[Message]:
    service.ask_all()
    return service.answer(mark="Done: ")


STYLES: Styles[Callable[[_Service], list[Message]]] = {
    "clean": {_good: 1.0},
    "careless": {
        _good: 0.3, _guess: 0.3, _one_question: 0.15, _idle_question: 0.1, _wrong_copy: 0.1, _no_mark: 0.05,
    },
}  # fmt: skip
