"""A small world of one task: records of made-up things, and the tools that read and change them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from agentrl.plugins.tool import Tool
from agentrl.plugins.types import ArgumentError, Json, Session
from agentrl_envs.random_tools import words as w
from agentrl_envs.random_tools.words import Words


@dataclass(slots=True)
class State:
    """What one rollout did in its world."""

    changes: list[list[Json]] = field(default_factory=list)
    """Name and arguments of each call that changed something."""
    answers: list[str] = field(default_factory=list)
    """What was said to each request in the end."""
    calls: dict[str, int] = field(default_factory=dict)
    """Calls of each tool that is busy at first."""


Work = Callable[[State, Mapping[str, Json]], str]


class RandomTool(Tool):
    """A tool of a world. work: what a call does to the state, and says."""

    def __init__(self, name: str, description: str, properties: Mapping[str, Json], required: Sequence[str],
                 work: Work, busy: int = 0) -> None:  # fmt: skip
        """Build a tool. busy: first calls of a rollout that only say that it is."""
        self.name, self.description, self._work, self._busy = name, description, work, busy
        self.parameters = {"type": "object", "properties": dict(properties), "required": list(required)}

    async def execute(self, session: Session, **arguments: Json) -> str:
        assert session.environment is not None
        return self.run(session.environment.state, arguments)

    def run(self, state: State, arguments: Mapping[str, Json]) -> str:
        """The result of a call. Raises ArgumentError."""
        if self._busy:
            state.calls[self.name] = state.calls.get(self.name, 0) + 1
            if state.calls[self.name] <= self._busy:
                raise ArgumentError("busy, try again")
        return self._work(state, arguments)


NUMERIC = ("integer", "number")
"""Kinds of arguments that are numbers."""


@dataclass(slots=True)
class Argument:
    """An argument of a tool that changes things, and the value that a request gives to it."""

    name: str
    """Its name in the schema."""
    kind: str
    """A JSON type, `enum` or `pair` (the second of two texts, from one and to another)."""
    value: Json
    """What the request gives; None: nothing."""
    required: bool = True
    """Whether a call must have it."""
    choices: tuple[str, ...] = ()
    """The values that an `enum` may have."""
    default: Json = None
    """The value that a call without it has; None: there is none."""
    description: str = ""
    """What the schema says of it; empty: nothing."""

    def schema(self) -> dict[str, Json]:
        """Its part of the tool's schema."""
        kind = {"enum": "string", "pair": "string"}.get(self.kind, self.kind)
        made: dict[str, Json] = {"type": kind}
        if self.choices:
            made["enum"] = list(self.choices)
        if self.default is not None:
            made["default"] = self.default
        if self.description:
            made["description"] = self.description
        return made


@dataclass(slots=True)
class Topic:
    """A kind of things: what they are called, what is known of each."""

    noun: str
    """What one of them is called."""
    key: str
    """Name of the argument that says which of them."""
    id_name: str
    """Name of their identifiers, in results and arguments."""
    attributes: tuple[str, ...]
    """Names of what is known of each."""
    records: dict[str, dict[str, Json]]
    """By key, the attributes of each."""
    ids: dict[str, str]
    """By key, the identifier of each."""

    def known(self, attribute: str | None, key: str) -> Mapping[str, Json]:
        """One attribute of a thing, or all of them."""
        return self.records[key] if attribute is None else {attribute: self.records[key][attribute]}

    def entry(self, key: str) -> Mapping[str, Json]:
        """Identifier and attributes of a thing."""
        return {self.id_name: self.ids[key], **self.records[key]}


class World:
    """Makes topics and tools of one world; the words of tools and arguments are used once."""

    def __init__(self, rng: Random, held_out: bool) -> None:
        self.rng = rng
        self.words = Words(rng, held_out)
        self.used: set[str] = set()
        self.described = rng.random() < 0.5
        """Whether arguments have descriptions."""
        self.style = rng.choices(("json", "lines", "text"), (6, 2, 2))[0]
        """How results are written; `bare`: a single value alone."""
        self.unknown = "there is no {noun} {key}"
        """What its tools say of a thing that they do not know."""
        self.case = rng.choices(("snake", "camel", "kebab"), (8, 1, 1))[0]

    def topic(self, size: int) -> Topic:
        """A topic with `size` records."""
        rng, words = self.rng, self.words
        noun = words.of(w.NOUNS, self.used)
        known: set[str] = set()
        attributes = tuple(words.of(w.ATTRIBUTES, known) for _ in range(rng.randint(1, 4)))
        makers = {name: rng.choice(w.RESULTS) for name in attributes}
        make = rng.choice(w.KEYS)
        records: dict[str, dict[str, Json]] = {}
        while len(records) < size:
            records[str(make(rng))] = {name: makers[name](rng) for name in attributes}
        key = rng.choice((noun, noun, f"{noun}_name", "name", "key", "which", words.of(w.NOUNS)))
        suffix = rng.choice(("_id", "_code", "_number", "_ref"))
        ids = {key: w.code(rng) for key in records}
        return Topic(noun, key, noun + suffix, attributes, records, ids)

    def name(self, *parts: str) -> str:
        """The name of a tool, unused so far."""
        pieces = [piece for part in parts for piece in part.replace("-", "_").split("_") if piece]
        name = "_".join(pieces)
        if self.case == "camel":
            name = pieces[0] + "".join(piece.title() for piece in pieces[1:])
        elif self.case == "kebab":
            name = "-".join(pieces)
        while name in self.used:
            name += str(self.rng.randint(2, 9))
        self.used.add(name)
        return name

    def said(self, values: Mapping[str, Json], subject: str = "") -> str:
        """A result, in the style of this world."""
        if self.style == "bare" and len(values) == 1:
            return json_text(next(iter(values.values())))
        if self.style == "json":
            return json.dumps(dict(values))
        if self.style == "lines":
            return "\n".join(f"{name}: {json_text(value)}" for name, value in values.items())
        about = f" of {subject}" if subject else ""
        return " ".join(f"The {name.replace('_', ' ')}{about} is {json_text(value)}." for name, value in values.items())

    def about(self, name: str) -> str:
        """The description of an argument; empty where those of this world have none."""
        words = name.replace("_", " ")
        return (
            self.rng.choice(
                (words, f"the {words}", f"{words} to use", f"its {words}", f"{self.words.of(w.ADJECTIVES)} {words}")
            )
            if self.described
            else ""
        )

    def _key(self, name: str, noun: str, what: str) -> dict[str, Json]:
        made: dict[str, Json] = {"type": "string"}
        if self.described:
            made["description"] = f"{what} of the {noun}"
        return {name: made}

    def getter(self, topic: Topic, attribute: str | None, by_id: bool) -> RandomTool:
        """A tool that tells one attribute, or all of them, of a thing by its key or identifier."""
        rng, verb = self.rng, self.words.of(w.GETTERS)
        argument = topic.id_name if by_id else topic.key
        parts = (verb, topic.noun) if attribute is None else rng.choice(
            ((verb, attribute), (topic.noun, attribute), (verb, topic.noun, attribute), (attribute,))
        )  # fmt: skip
        what = f"the {attribute} of a {topic.noun}" if attribute else f"a {topic.noun}: {', '.join(topic.attributes)}"
        verb = verb.replace("_", " ").capitalize()
        description = rng.choice((f"{verb} {what}.", f"{what[0].upper()}{what[1:]}.", f"{verb} {what}"))
        keys = {topic.ids[key]: key for key in topic.records} if by_id else {key: key for key in topic.records}

        def work(state: State, arguments: Mapping[str, Json]) -> str:
            key = self.known(keys, topic.noun, arguments[argument])
            return self.said(topic.known(attribute, key), key)

        return RandomTool(self.name(*parts), description, self._key(argument, topic.noun, "Which"), [argument], work)

    def finder(self, topic: Topic, full: bool) -> RandomTool:
        """A tool that tells the identifier of a thing, and its attributes if `full`."""
        verb = self.words.of(w.FINDERS)
        text = verb.replace("_", " ").capitalize()
        id_words = topic.id_name.replace("_", " ")
        description = self.rng.choice(
            (f"{text} a {topic.noun}: its {id_words}.", f"{text} the {id_words} of a {topic.noun} by its name.",
             f"{text} a {topic.noun} by name, gives {id_words}")
        )  # fmt: skip
        if full:
            listed = ", ".join((id_words, *topic.attributes))
            description = self.rng.choice(
                (
                    f"{text} a {topic.noun}: {listed}.",
                    f"{text} a {topic.noun} by its name: {listed}.",
                    f"{text} {listed}",
                )
            )
        keys = {key: key for key in topic.records}

        def work(state: State, arguments: Mapping[str, Json]) -> str:
            key = self.known(keys, topic.noun, arguments[topic.key])
            return self.said(topic.entry(key) if full else {topic.id_name: topic.ids[key]}, key)

        return RandomTool(
            self.name(verb, topic.noun), description, self._key(topic.key, topic.noun, "Name"), [topic.key], work
        )

    def known(self, keys: Mapping[str, str], noun: str, given: Json) -> str:
        """The key of a thing. Raises ArgumentError, with another one that is like it."""
        if str(given) in keys:
            return keys[str(given)]
        said, meant = self.unknown.format(noun=noun, key=given), near(keys, str(given))
        raise ArgumentError(said + (f", did you mean {meant}?" if meant else ""))

    def actor(
        self, topic: Topic, by_id: bool, arguments: Sequence[Argument], verb: str, gives: Mapping[str, Json]
    ) -> RandomTool:
        """A tool that does something to a thing. gives: what a call says in the end."""
        which = topic.id_name if by_id else topic.key
        properties = self._key(which, topic.noun, "Which")
        properties |= {argument.name: argument.schema() for argument in arguments}
        if self.rng.random() < 0.3:
            properties = dict(self.rng.sample(list(properties.items()), len(properties)))
        required = [
            name for name in properties if name == which or any(a.name == name and a.required for a in arguments)
        ]
        keys = {topic.ids[key]: key for key in topic.records} if by_id else {key: key for key in topic.records}
        text = verb.replace("_", " ").capitalize()
        description = self.rng.choice(
            (f"{text} a {topic.noun}.", f"{text} the {topic.noun}", f"{text} one {topic.noun}.")
        )
        name = self.name(verb, topic.noun) if self.rng.random() < 0.85 else self.name(topic.noun, verb)

        def work(state: State, given: Mapping[str, Json]) -> str:
            self.known(keys, topic.noun, given[which])
            state.changes.append([name, dict(given)])
            return self.said(gives)

        return RandomTool(name, description, properties, required, work)

    def switch(self, noun: str, verb: str, gives: Mapping[str, Json]) -> RandomTool:
        """A tool without arguments. gives: what a call says in the end."""
        text = verb.replace("_", " ").capitalize()
        name = self.name(verb, noun)

        def work(state: State, given: Mapping[str, Json]) -> str:
            state.changes.append([name, {}])
            return self.said(gives)

        return RandomTool(name, self.rng.choice((f"{text} the {noun}.", f"{text} {noun}")), {}, [], work)

    def calculator(self, verb: str, noun: str, arguments: Sequence[Argument], result: str) -> RandomTool:
        """A tool that works out a number from its numbers, nobody knows how."""
        rng = self.rng
        factors = {a.name: rng.choice((0.5, 1, 2, 3, 1.5, 10, -1)) for a in arguments if a.kind in NUMERIC}
        shift = rng.randint(0, 20)
        properties = {}
        for argument in arguments:
            argument.description = self.about(argument.name)
            properties[argument.name] = argument.schema()
        text = verb.replace("_", " ").capitalize()

        def work(state: State, given: Mapping[str, Json]) -> str:
            value = sum(factor * float(given[name]) for name, factor in factors.items()) + shift
            return self.said({result: int(value) if value == int(value) else round(value, 2)})

        description = rng.choice((f"{text} the {noun}.", f"{text} a {noun}: its {result}.", f"{text} {noun}"))
        return RandomTool(self.name(verb, noun), description, properties, [a.name for a in arguments], work)


def near(keys: Iterable[str], given: str) -> str | None:
    """Find the key that begins like the one that was given."""
    return next((key for key in keys if key[:2].lower() == given[:2].lower()), None)


def json_text(value: Json) -> str:
    """A value as results and answers say it."""
    return value if isinstance(value, str) else json.dumps(value)
