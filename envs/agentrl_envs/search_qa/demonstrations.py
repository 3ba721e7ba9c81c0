"""How a question is looked up and answered, as chat messages: carefully, or the way somebody careless does it.

Every search result in a demonstration is what the tool answers to that query.
"""

from collections.abc import Callable
from random import Random

from agentrl_tools.search import Search

from agentrl.plugins.types import Message
from agentrl_envs.conversation import Styles, assistant, draw_way, tool_turn
from agentrl_envs.search_qa.world import BY_KIND, Question, world


def demonstrate(question: Question, search: Search, rng: Random, style: str) -> list[Message]:
    """The messages after the question. Raises KeyError for a style that is not in `STYLES`."""
    return draw_way(STYLES[style], rng)(question, search, rng)


def _good(question: Question, search: Search, rng: Random) -> list[Message]:
    return [*_reads(question, search), _answer(question.answer)]


def _guess(question: Question, search: Search, rng: Random) -> list[Message]:
    """Answer without a search: some value that such a question may have."""
    return [_answer(_other(question, rng))]


def _half_way(question: Question, search: Search, rng: Random) -> list[Message]:
    """Read one article where two are needed, and take its fact for the answer."""
    return [*_read(question.titles[0], search), _answer(world().facts[question.subject][question.path[0]])]


def _wrong_copy(question: Question, search: Search, rng: Random) -> list[Message]:
    """Read the right article, and answer with another of its facts."""
    facts = world().facts[question.titles[-1]]
    others = [value for name, value in facts.items() if name != question.path[-1]]
    return [*_reads(question, search), _answer(rng.choice(others))]


def _vague(question: Question, search: Search, rng: Random) -> list[Message]:
    """Search without the name that matters, then a guess."""
    return [*_read(question.path[0], search), _answer(_other(question, rng))]


def _no_tags(question: Question, search: Search, rng: Random) -> list[Message]:
    return [*_reads(question, search), assistant(question.answer)]


STYLES: Styles[Callable[[Question, Search, Random], list[Message]]] = {
    "clean": {_good: 1.0},
    "careless": {_good: 0.42, _guess: 0.22, _half_way: 0.1, _wrong_copy: 0.1, _vague: 0.08, _no_tags: 0.08},
}


def _reads(question: Question, search: Search) -> list[Message]:
    return [message for title in question.titles for message in _read(title, search)]


def _read(query: str, search: Search) -> list[Message]:
    return tool_turn(search.name, {"query": query}, search.look_up(query))


def _other(question: Question, rng: Random) -> str:
    """A value of the same relation, of anybody."""
    entities = world().entities
    kind = next(kind for kind, known in BY_KIND.items() if question.path[-1] in [r.name for r in known])
    return world().facts[rng.choice(entities[kind])][question.path[-1]]


def _answer(text: str) -> Message:
    return assistant(f"<answer>{text}</answer>")
