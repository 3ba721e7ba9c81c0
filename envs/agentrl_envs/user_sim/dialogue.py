"""The customer: answers what is asked by rule, and loses patience with what is idle or was said already.

An assistant's message is read for the words that ask for a fact. No fact is given away unasked.
"""

import re
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Session, ToolResponse
from agentrl_envs.user_sim.facts import FACTS, Fact
from agentrl_envs.user_sim.generate import Scenario

MARK = "####"
MOST_ASKED = 3  # facts that one message may ask for


class Heard(Enum):
    """What the customer made of a message."""

    ANSWER = "answer"
    """It holds the final line."""
    NEEDED = "needed"
    """It asks for something needed that was not said yet."""
    REPEATED = "repeated"
    """It asks for what was said already."""
    IDLE = "idle"
    """It asks for nothing that matters, or for too much at once."""


_UNKNOWN = ("I don't know.", "No idea.", "What has that to do with it?")
_UNCLEAR = ("What do you need to know?", "Pardon?", "Hello? Please ask me what you need.")
_AGAIN = ("As I said: {}.", "I told you already: {}.")
_TOO_MUCH = "One thing at a time, please."
_GIVEN_UP = "Never mind, I will go elsewhere."


@dataclass
class Dialogue:
    """A conversation so far. patience: idle or repeated questions that are still borne. asked: questions in all."""

    scenario: Scenario
    """Who the customer is, and what he wants."""
    patience: int
    known: set[str] = field(default_factory=set)
    """Names of the facts that were said."""
    asked: int = 0
    final: str | None = None
    """The final line; None before it is given."""
    gone: bool = False
    """True where the customer left."""

    def __post_init__(self) -> None:
        self.known |= set(self.scenario.told)

    @property
    def over(self) -> bool:
        """True where the customer left, or the final line was given."""
        return self.gone or self.final is not None

    @property
    def right(self) -> bool:
        """True where the final line is the right one."""
        return self.final is not None and plain(self.final) == plain(self.scenario.answer)

    def hear(self, text: str, rng: Random) -> tuple[Heard, str, int]:
        """What the message was, what the customer says to it (nothing to an answer), and how many facts were
        new."""
        if MARK in text:
            self.final = text.rpartition(MARK)[2].strip().partition("\n")[0]
            return Heard.ANSWER, "", 0
        self.asked += 1
        heard, said, new = self._reply(text, rng)
        if heard is not Heard.NEEDED:
            self.patience -= 1
            if self.patience < 0:
                self.gone = True
                return heard, _GIVEN_UP, new
        return heard, said, new

    def _reply(self, text: str, rng: Random) -> tuple[Heard, str, int]:
        mentioned = {fact.name: at for fact in FACTS if (at := fact.mention(text)) is not None}
        if len(mentioned) > MOST_ASKED:
            return Heard.IDLE, _TOO_MUCH, 0
        facts = [f for f in self.scenario.kind.facts if f.name in mentioned]
        facts.sort(key=lambda f: mentioned[f.name])
        if new := [f for f in facts if f.name not in self.known]:
            self.known |= {f.name for f in new}
            return Heard.NEEDED, " ".join(self._say(f, rng) for f in new), len(new)
        if facts:
            value = self.scenario.facts[facts[0].name]
            return Heard.REPEATED, rng.choice(_AGAIN).format(value), 0
        return Heard.IDLE, rng.choice(_UNKNOWN if mentioned or "?" in text else _UNCLEAR), 0

    def _say(self, fact: Fact, rng: Random) -> str:
        ways = fact.other_answers if self.scenario.other_words else fact.answers
        said = rng.choice(ways).format(self.scenario.facts[fact.name])
        return said[0].upper() + said[1:]


def plain(line: str) -> list[str]:
    """A final line as words, without case and punctuation, for comparison."""
    return re.sub(r"[^\w:]+", " ", line.casefold()).split()


class Lookup(Tool):
    """Finds the record of a number that the customer gave."""

    name = "lookup"
    description = "Looks an order or card number up in the shop's book."

    def __init__(self) -> None:
        number = {"type": "string", "description": "such as 1234"}
        self.parameters = {"type": "object", "properties": {"number": number}, "required": ["number"]}

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        assert session.environment is not None, "the tool belongs to the environment user_sim"
        dialogue: Dialogue = session.environment.state
        text = record(dialogue.scenario, arguments["number"])
        return ToolResponse(text or f"error: no record of {arguments['number'][:20]}", error=text is None)


def record(scenario: Scenario, number: str) -> str | None:
    """What is found; None for any number but the customer's."""
    if scenario.found is None or number.strip(" #") not in scenario.facts.values():
        return None
    return f"{scenario.kind.name} {scenario.found}"
