"""Lessons: a world, a request in words, the calls that it takes, and the answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from agentrl.plugins.types import ArgumentError, Json, Message
from agentrl_envs.conversation import assistant, tool_turn
from agentrl_envs.random_tools import words as w
from agentrl_envs.random_tools.world import NUMERIC, Argument, RandomTool, State, Topic, World, json_text, near

MOST_TOOLS = 6
DRILLS = 0.3
"""Share of lessons with many short requests to the same tools: from them it learns which tool is meant."""
PLAIN = 0.15
"""Share of lessons with one tool, one call and nothing else: from them a model learns soonest that it has to copy."""
ERRANDS = 12
"""Commands of a lesson of errands."""
NOT_FOUND = (
    "there is no {noun} {key}", "{noun} {key} not found", "unknown {noun}: {key}", "no such {noun}", "not found",
    "{key} is not known",
)  # fmt: skip
"""What tools say of a thing that they do not know, where a lesson is of doubts."""
SCATTERED = 0.5
"""Share of requests whose parts stand between any common words."""
Call = tuple[RandomTool, dict[str, Json]]


@dataclass(slots=True)
class Request:
    """One thing that the user asks for, and how it is done."""

    text: str
    """What the user says."""
    calls: list[Call]
    """The calls that it takes, in their order, those that fail at first included."""
    answer: str
    """What is said in the end."""
    expected: list[str]
    """Texts that the answer must contain."""
    changes: list[list[Json]]
    """What the calls are to change."""

    def message(self) -> Message:
        """What the user says, as a message."""
        return {"role": "user", "content": self.text}


@dataclass(slots=True)
class Lesson:
    """One task: what is offered, and what is asked for, one thing after the other."""

    tools: list[RandomTool]
    """Those that the task offers."""
    requests: list[Request]
    """In their order; the next follows the answer to the one before."""
    system: str = ""
    """The system prompt; empty: none."""

    def opening(self) -> list[Message]:
        """The first messages."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, self.requests[0].message()]

    def play(self) -> tuple[list[Message], State]:
        """The messages after the opening, with the tools' own results, and the state that they leave."""
        state, said = State(), list[Message]()
        for request in self.requests:
            said += [request.message()] if said else []
            for tool, arguments in request.calls:
                try:
                    result = tool.run(state, tool.check(arguments))
                except ArgumentError as error:
                    result = f"Error: {error}"
                said += tool_turn(tool.name, dict(arguments), result)
            said.append(assistant(request.answer))
            state.answers.append(request.answer)
        return said, state

    def solved(self, state: State) -> bool:
        """Whether a rollout gave every answer, after exactly the changes that were asked for."""
        changes = [change for request in self.requests for change in request.changes]
        answers = zip(self.requests, state.answers, strict=False)
        return (
            state.changes == changes
            and len(state.answers) == len(self.requests)
            and all(text in answer for request, answer in answers for text in request.expected)
        )


QUESTIONS = (
    "What is the {attribute} of {thing}?", "Tell me the {attribute} of {thing}.", "I need the {attribute} of {thing}.",
    "Which {attribute} has {thing}?", "{attribute} of {thing}?", "Can you tell me {thing}'s {attribute}?",
    "Look at {thing}. What {attribute} does it have?", "For {thing}, say the {attribute}.",
    "Do you know the {attribute} of {thing}?", "How about the {attribute} of {thing}?", "Give me {thing}: {attribute}.",
    "What {attribute} does {thing} have?", "Say which {attribute} {thing} has.",
)  # fmt: skip
PARAPHRASES = {
    "weight": "How heavy is {thing}?", "height": "How tall is {thing}?", "width": "How wide is {thing}?",
    "depth": "How deep is {thing}?", "length": "How long is {thing}?", "age": "How old is {thing}?",
    "owner": "Who owns {thing}?", "speed": "How fast is {thing}?", "driver": "Who drives {thing}?",
    "temperature": "How hot is {thing}?", "distance": "How far is it to {thing}?",
    "color": "What does {thing} look like?",
    "population": "How many people live in {thing}?", "manager": "Who runs {thing}?", "city": "Where is {thing}?",
    "doctor": "Who treats {thing}?", "volume": "How loud is {thing}?", "salary": "What does {thing} earn?",
}  # fmt: skip
"""Questions for an attribute without its name."""
ORDERS = (
    "{verb} {thing}{rest}.", "Please {verb} {thing}{rest}.", "Can you {verb} {thing}{rest}?",
    "I want to {verb} {thing}{rest}.",
    "{verb} the following: {thing}{rest}.", "It is about {thing}. Please {verb} it{rest}.",
    "Go and {verb} {thing}{rest}.",
    "Could somebody {verb} {thing}{rest}?", "We have to {verb} {thing}{rest}.", "Time to {verb} {thing}{rest}, please.",
)  # fmt: skip
COMMANDS = ("{verb} the {noun}.", "{verb} {noun}", "Please {verb} the {noun}.", "Can you {verb} the {noun}?")
NAMED = (
    "with {name} {value}", "{name} {value}", "the {name} is {value}", "{name}: {value}", "set {name} to {value}",
    "{value} as {name}", "with a {name} of {value}", "using {value} for the {name}", "and {name} should be {value}",
)  # fmt: skip
UNNAMED: Mapping[str, Sequence[str]] = {
    "string": ("for {value}", "to {value}", "as {value}", "with {value}", "by {value}"),
    "integer": ("{value} times", "by {value}", "with {value}", "for {value}", "to {value}"),
    "number": ("by {value}", "to {value}", "at {value}", "with {value}"),
    "enum": ("in {value}", "{value}", "make it {value}", "choose {value}", "as {value}"),
}
ANSWERS = ("Answer:", "####", "Result:", "=>", "Final answer:", "It is", "Solution:", "->", "Reply:", "=")
GREETINGS = ("Hello.", "Hi,", "Good morning.", "Excuse me.", "I am {person}.", "This is {person} from {place}.",
             "We met in {place}.", "I am in a hurry.", "A question about {word}:", "My {word} is {word}.")  # fmt: skip
SYSTEMS = ("You are a helpful assistant.", "Use the tools.", "You work for {person} in {place}.", "Be short.",
           "You are the {word} of {place}.", "Answer after you have called the tools that you need.")  # fmt: skip


class Teacher:
    """Makes the lessons of one world."""

    def __init__(self, rng: Random, held_out: bool, drills: float, errands: float, vague: float, doubts: float) -> None:
        self.rng, self.world = rng, World(rng, held_out)
        self.drills, self.errands, self.vague, self.doubts = drills, errands, vague, doubts
        self.tools: list[RandomTool] = []
        self.calls: list[Call] = []
        self.changes: list[list[Json]] = []

    def lesson(self) -> Lesson:
        """A lesson of one of the kinds."""
        rng = self.rng
        if self.errands and rng.random() < self.errands:
            return Lesson(self.tools, self._errands())
        if self.doubts and rng.random() < self.doubts:
            requests = self._doubts()
            rng.shuffle(self.tools)
            return Lesson(self.tools, requests)
        form = rng.random()
        if form < (1 - self.drills) * PLAIN:
            return Lesson(self.tools, [self._request(rng.choice((Teacher.ask, Teacher.act, Teacher.work_out)))])
        if form > 1 - self.drills:
            requests = self._drill()
            rng.shuffle(self.tools)
            return Lesson(self.tools, requests)
        requests = []
        for _ in range(rng.choices((1, 2, 3), (3, 3, 4))[0]):
            if len(self.tools) < MOST_TOOLS - 1:
                requests.append(self._request(rng.choices(list(KINDS), list(KINDS.values()))[0]))
        self._distract()
        rng.shuffle(self.tools)
        return self._framed(requests)

    def _errands(self) -> list[Request]:
        """Commands to the same tools, where most results are the next command. A call takes no arguments and no answer,
        so that the choice of a tool is most of what there is to learn."""
        rng, words, world, results = self.rng, self.world.words, self.world, list[str]()
        nouns = [words.short(w.NOUNS) for _ in range(rng.randint(1, 3))]
        tools: list[tuple[RandomTool, list[str]]] = []

        def tool(name: str, description: str) -> RandomTool:
            def work(state: State, given: Mapping[str, Json]) -> str:
                state.changes.append([name, {}])
                return results[min(len(state.changes), len(results)) - 1]

            return self._add(RandomTool(name, description, {}, [], work))

        for _ in range(rng.randint(2, MOST_TOOLS)):
            verb, noun = words.short(w.VERBS, world.used), rng.choice(nouns)
            parts = [verb, noun] + [words.short(w.ADJECTIVES)] * (rng.random() < 0.5)
            parts = [part.replace("_", " ") for part in parts]
            unlike = (words.short(w.FINDERS), words.short(w.ARGUMENTS))
            name = world.name(*rng.choices(((verb, noun), (verb,), unlike), (6, 2, 2))[0])
            if rng.random() < 0.3:
                description = f"{parts[0].capitalize()} the {' '.join(parts[:0:-1])}."
            else:
                description = " ".join(
                    word for part in rng.sample(parts, len(parts)) for word in (*self._common(rng.randint(0, 1)), part)
                )
            tools.append((tool(name, description), parts))
        requests: list[Request] = []
        while (left := ERRANDS - len(results)) > 0:
            chain = rng.choices(tools, k=min(left, rng.randint(2, 8)))
            texts = [
                self._scattered(*self._unless_vague(parts if rng.random() < 0.6 else parts[:2]), most=1)
                for _, parts in chain
            ]
            value = json_text(rng.choice(w.RESULTS)(rng))
            results += [*texts[1:], value]
            calls: list[Call] = [(tool, {}) for tool, _ in chain]
            requests.append(Request(texts[0], calls, value, [value], [[tool.name, {}] for tool, _ in chain]))
        return requests

    def _drill(self) -> list[Request]:
        """Short requests to the same tools, some of which are for the same things: about one for each tool."""
        rng, world, topics, asked = self.rng, self.world, list[Topic](), set[tuple[str, str]]()
        if rng.random() < 0.8:
            world.style = "bare"
        alike = rng.choice((0.0, 0.5))
        alone = 1.0 if self._is_vague() else self.vague / 2
        targets: list[Callable[[], Request]] = []
        for _ in range(rng.choices(range(2, MOST_TOOLS + 1), (2, 3, 3, 2, 1))[0]):
            if alone and rng.random() < alone:
                targets.append(self._values_alone())
                continue
            topic = rng.choice(topics) if topics and rng.random() < alike else world.topic(4)
            topics.append(topic)
            attribute = rng.choice(topic.attributes)
            if rng.random() < 0.4 and (topic.noun, attribute) not in asked:
                asked.add((topic.noun, attribute))
                tool = self._add(world.getter(topic, attribute, False))
                targets.append(partial(self._short_question, topic, attribute, tool))
                continue
            verb, result = world.words.of(w.VERBS, world.used), world.words.of(w.ATTRIBUTES)
            gives: dict[str, Json] = {result: rng.choice(w.RESULTS)(rng)}
            value = json_text(gives[result])
            if rng.random() < 0.4:
                tool = self._add(world.switch(topic.noun, verb, gives))
                targets.append(partial(self._short_command, topic.noun, verb, tool, value))
            else:
                tool = self._add(world.actor(topic, False, (), verb, gives))
                targets.append(partial(self._short_order, topic, verb, tool, value))
        return [target() for target in rng.choices(targets, k=len(targets))]

    def _values_alone(self) -> Callable[[], Request]:
        """Requests to a new tool that give it values, and say of none which argument it is for."""
        rng, words, world = self.rng, self.world.words, self.world
        verb, noun, result = words.of(w.VERBS), words.of(w.NOUNS, world.used), words.of(w.ATTRIBUTES)
        kinds = rng.choices(("string", "number", "integer"), (4, 3, 2), k=rng.choices((1, 2, 3), (2, 3, 3))[0])
        if rng.random() < 0.25:
            kinds = ["number", "string", "string"]
        arguments = [Argument(self._argument_name(), kind, None) for kind in kinds]
        texts = [argument for argument in arguments if argument.kind == "string"]
        if len(texts) == 2 and rng.random() < 0.5:
            word = texts[0].name
            texts[0].name, texts[1].name, texts[1].kind = f"from_{word}", f"to_{word}", "pair"
        make = {argument.name: rng.choice((w.word, w.word, w.phrase, w.phrase, *w.TEXTS)) for argument in arguments}
        tool = self._add(world.calculator(verb, noun, arguments, result))

        def request() -> Request:
            given: dict[str, Json] = {}
            parts = [verb.replace("_", " "), noun][: rng.choice((0, 0, 1, 2))]
            joined = False
            for argument in arguments:
                numeric = argument.kind in NUMERIC
                value: Json = str(make[argument.name](rng))
                if numeric:
                    value = w.whole(rng) if argument.kind == "integer" or rng.random() < 0.7 else w.decimal(rng)
                given[argument.name] = value
                text = f'"{value}"' if self._quoted(value) else json_text(value)
                if joined and not numeric:
                    parts[-1] += rng.choice((f" {text}", f" {text}", f" of the {text}"))  # an amount, and what it is of
                else:
                    parts.append(f"to {text}" if argument.kind == "pair" and rng.random() < 0.5 else text)
                joined = numeric and rng.random() < 0.6
            answer = self._number_in(tool.run(State(), given))
            text = self._scattered(*parts, least=1, shuffled=rng.random() < 0.5)
            return Request(text, [(tool, given)], self._short_answer(answer), [answer], [])

        return request

    def _doubts(self) -> list[Request]:
        """Requests that do not say which tool knows a thing: one after the other is tried, and all it says is told."""
        rng, world, words = self.rng, self.world, self.world.words
        world.unknown = rng.choice(NOT_FOUND)
        found: list[tuple[Topic, RandomTool, Callable[[str], Mapping[str, Json]]]] = []
        for _ in range(rng.choices((2, 3, 4, 5), (2, 3, 3, 1))[0]):
            topic, form = world.topic(rng.randint(1, 2)), rng.random()
            tells: Callable[[str], Mapping[str, Json]]
            if form < 0.3:
                gives = {words.of(w.ATTRIBUTES): rng.choice(w.RESULTS)(rng) for _ in range(rng.randint(1, 3))}
                tool = world.actor(topic, False, (), words.of(w.VERBS, world.used), gives)
                tells = partial(_same, gives)
            elif form < 0.5:
                tool, tells = world.finder(topic, True), topic.entry
            else:
                attribute = rng.choice((None, None, topic.attributes[0]))
                tool, tells = world.getter(topic, attribute, False), partial(topic.known, attribute)
            found.append((topic, self._add(tool), tells))
        requests: list[Request] = []
        for topic, tool, tells in rng.choices(found, k=rng.randint(2, 3)):
            key = self._some_key(topic)
            others = [(which, other) for which, other, _ in found if other is not tool and not near(which.records, key)]
            tried = rng.sample(others, rng.randint(0, len(others)))
            calls: list[Call] = [(other, {which.key: key}) for which, other in tried]
            calls.append((tool, {topic.key: key}))
            text = f'"{key}"' if rng.random() < (0.6 if " " in key else 0.2) else key
            if rng.random() < 0.25:
                text = f"{rng.randint(1, 20)} of the {text}"
            if self._is_vague():
                said = self._fill(rng.choice(QUESTIONS), attribute=words.of(w.ATTRIBUTES), thing=text)
            else:
                said = self._scattered(text, *(words.short(w.NOUNS) for _ in range(rng.choice((0, 0, 1)))), least=1)
            told = {name.replace("_", " "): json_text(value) for name, value in tells(key).items()}
            parts = [f"{'the' if i else 'The'} {name} is {value}" for i, (name, value) in enumerate(told.items())]
            answer = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1]))) + "."
            state = State()
            tool.run(state, {topic.key: key})
            requests.append(Request(said, calls, answer, list(told.values()), state.changes))
        return requests

    def _short_question(self, topic: Topic, attribute: str, tool: RandomTool) -> Request:
        key = self._some_key(topic)
        value = json_text(topic.records[key][attribute])
        text = self._question(topic, attribute, self.rng.choice((key, f"{topic.noun} {key}")))
        return Request(text, [(tool, {topic.key: key})], self._short_answer(value), [value], [])

    def _short_order(self, topic: Topic, verb: str, tool: RandomTool, value: str) -> Request:
        key = self._some_key(topic)
        given: dict[str, Json] = {topic.key: key}
        text = self._order(topic, verb, f"{topic.noun} {key}", ())
        return Request(text, [(tool, given)], self._short_answer(value), [value], [[tool.name, given]])

    def _short_command(self, noun: str, verb: str, tool: RandomTool, value: str) -> Request:
        verb, noun = self._unless_vague((verb, noun))
        if self.rng.random() < SCATTERED:
            text = self._scattered(verb.replace("_", " "), noun)
        else:
            text = self._fill(self.rng.choice(COMMANDS), verb=verb, noun=noun)
        return Request(text, [(tool, {})], self._short_answer(value), [value], [[tool.name, {}]])

    def _short_answer(self, value: str) -> str:
        return value if self.world.style == "bare" else f"It is {value}."

    def _is_vague(self) -> bool:
        return self.vague > 0 and self.rng.random() < self.vague

    def _unless_vague(self, parts: Sequence[str]) -> Sequence[str]:
        """The parts of a request, or as many words that tell nothing: a model learns that it could be any tool."""
        return [self.world.words.short(w.NOUNS) for _ in parts] if self._is_vague() else parts

    def _common(self, count: int) -> list[str]:
        return self.rng.choices(w.COMMON, k=count)

    def _scattered(self, *parts: str, least: int = 0, most: int = 3, shuffled: bool = True) -> str:
        """A request that says all parts between common words: so many before each, but the first may begin it.
        shuffled: in any order."""
        rng, said = self.rng, list[str]()
        for part in rng.sample(parts, len(parts)) if shuffled else parts:
            said += [*self._common(max(least if said else 0, min(most, rng.choice((0, 1, 1, 2, 3))))), part]
        said += self._common(min(most, rng.choice((0, 0, 1, 2))))
        text = " ".join(said) + rng.choice(("?", ".", "!", "", ", please."))
        return text[0].upper() + text[1:] if rng.random() < 0.85 else text

    def _request(self, kind: Callable[["Teacher"], tuple[str, str, list[str]]]) -> Request:
        self.calls, self.changes = [], []
        text, answer, expected = kind(self)
        return Request(text, self.calls, answer, expected, self.changes)

    def ask(self) -> tuple[str, str, list[str]]:
        """Ask for an attribute of a thing, by one call."""
        topic = self.world.topic(self.rng.randint(1, 3))
        attribute, key = self.rng.choice(topic.attributes), self._some_key(topic)
        if self.rng.random() < 0.25:
            tool = self._add(self.world.finder(topic, True))
        else:
            tool = self._add(self.world.getter(topic, attribute if self.rng.random() < 0.5 else None, False))
        self.calls.append((tool, {topic.key: key}))
        value = json_text(topic.records[key][attribute])
        return self._question(topic, attribute, key), f"The {attribute} is {value}.", [value]

    def ask_by_id(self) -> tuple[str, str, list[str]]:
        """Ask for an attribute of a thing whose identifier has to be found first."""
        topic = self.world.topic(self.rng.randint(1, 3))
        attribute, key = self.rng.choice(topic.attributes), self._some_key(topic)
        find = self._add(self.world.finder(topic, False))
        get = self._add(self.world.getter(topic, attribute if self.rng.random() < 0.5 else None, True))
        self.calls += [(find, {topic.key: key}), (get, {topic.id_name: topic.ids[key]})]
        value = json_text(topic.records[key][attribute])
        return self._question(topic, attribute, f"{topic.noun} {key}"), f"The {attribute} is {value}.", [value]

    def ask_two(self) -> tuple[str, str, list[str]]:
        """Ask for the same attribute of two things, one call each."""
        topic = self.world.topic(self.rng.randint(2, 4))
        attribute = self.rng.choice(topic.attributes)
        keys = self.rng.sample(list(topic.records), 2)
        tool = self._add(self.world.getter(topic, attribute if self.rng.random() < 0.5 else None, False))
        self.calls += [(tool, {topic.key: key}) for key in keys]
        one, two = (json_text(topic.records[key][attribute]) for key in keys)
        things = " and ".join(self._thing(topic, key) for key in keys)
        answer = f"The {attribute} of {keys[0]} is {one}, of {keys[1]} {two}."
        return self._fill(self.rng.choice(QUESTIONS), attribute=attribute, thing=things), answer, [one, two]

    def act(self) -> tuple[str, str, list[str]]:
        """Have something done, by one call."""
        return self._act(by_id=False)

    def act_by_id(self) -> tuple[str, str, list[str]]:
        """Have something done to a thing whose identifier has to be found first."""
        return self._act(by_id=True)

    def work_out(self) -> tuple[str, str, list[str]]:
        """Have a number worked out."""
        rng, words, world = self.rng, self.world.words, self.world
        verb, noun = words.of(w.VERBS), words.of(w.NOUNS, world.used)
        names = list(dict.fromkeys(self._argument_name() for _ in range(rng.randint(1, 3))))
        result = words.of(w.ATTRIBUTES)
        tool = self._add(world.calculator(verb, noun, _numbers(names), result))
        values: dict[str, Json] = {name: w.whole(rng) if rng.random() < 0.7 else w.decimal(rng) for name in names}
        self.calls.append((tool, values))
        said = [self._named(name, value) for name, value in values.items()]
        if len(names) == 2 and rng.random() < 0.3:
            first, second = (json_text(value) for value in values.values())
            said = [rng.choice((f"of {first} and {second}", f"{first} and {second}", f"for {first} with {second}"))]
        question = rng.choice(
            ("What is the {noun} {rest}?", "{verb} the {noun}, {rest}.", "I need the {noun} {rest}.", "{verb}: {rest}.",
             "{verb} {rest}.", "Which {noun} comes out {rest}?", "How much {result} is it {rest}?")
        )  # fmt: skip
        request = self._fill(question, noun=noun, verb=verb, rest=" and ".join(said), result=result)
        value = tool.run(State(), values)
        number = self._number_in(value)
        return request, f"The {result} is {number}.", [number]

    def add_two(self) -> tuple[str, str, list[str]]:
        """Have two numbers looked up and put together by another tool."""
        rng, words, world = self.rng, self.world.words, self.world
        topic = world.topic(rng.randint(2, 3))
        attribute = topic.attributes[0]
        for record in topic.records.values():
            record[attribute] = w.whole(rng)
        keys = rng.sample(list(topic.records), 2)
        get = self._add(world.getter(topic, attribute if rng.random() < 0.5 else None, False))
        verb, noun, result = words.of(w.VERBS), words.of(w.NOUNS, world.used), words.of(w.ATTRIBUTES)
        names = [self._argument_name(), self._argument_name()]
        if names[0] == names[1]:
            names = ["a", "b"]
        tool = self._add(world.calculator(verb, noun, _numbers(names), result))
        values: dict[str, Json] = {name: topic.records[key][attribute] for name, key in zip(names, keys, strict=True)}
        self.calls += [(get, {topic.key: keys[0]}), (get, {topic.key: keys[1]}), (tool, values)]
        things = " and ".join(self._thing(topic, key) for key in keys)
        request = self._fill(
            rng.choice(("{verb} the {attribute} of {things}.", "{verb} {noun} for the {attribute} of {things}.",
                        "What is the {noun} of the {attribute} of {things}?", "{things}: {verb} their {attribute}.")),
            verb=verb, noun=noun, attribute=attribute, things=things,
        )  # fmt: skip
        number = self._number_in(tool.run(State(), values))
        return request, f"The {result} is {number}.", [number]

    def retry(self) -> tuple[str, str, list[str]]:
        """Ask for a thing under a name that is slightly wrong, or of a tool that is busy at first."""
        request, answer, expected = self.ask()
        tool, arguments = self.calls[0]
        [(argument, key)] = arguments.items()
        if self.rng.random() < 0.4:
            busy = RandomTool(tool.name, tool.description, tool.parameters["properties"], [argument], tool.run, busy=1)
            self.tools[-1] = busy
            self.calls = [(busy, arguments), (busy, arguments)]
        elif len(str(key)) > 4 and str(key) in request:
            at = self.rng.randrange(3, len(str(key)))
            wrong = str(key)[:at] + self.rng.choice("aeiou3") + str(key)[at + self.rng.randint(0, 1) :]
            try:
                tool.run(State(), {argument: wrong})
            except ArgumentError as error:
                if str(error).endswith(f"did you mean {key}?"):
                    request = request.replace(str(key), wrong)
                    self.calls = [(tool, {argument: wrong}), (tool, arguments)]
        return request, answer, expected

    def missing(self) -> tuple[str, str, list[str]]:
        """Ask for a thing that is not there."""
        topic = self.world.topic(self.rng.randint(1, 2))
        attribute = self.rng.choice(topic.attributes)
        tool = self._add(self.world.getter(topic, attribute if self.rng.random() < 0.5 else None, False))
        key = str(self.rng.choice(w.KEYS)(self.rng))
        if any(known[:2].lower() == key[:2].lower() for known in topic.records):
            return self.ask()
        self.calls.append((tool, {topic.key: key}))
        return self._question(topic, attribute, key), f"There is no {topic.noun} {key}.", ["no "]

    def _act(self, by_id: bool) -> tuple[str, str, list[str]]:
        rng, words, world = self.rng, self.world.words, self.world
        topic, verb = world.topic(rng.randint(1, 3)), words.of(w.VERBS, world.used)
        key = self._some_key(topic)
        arguments = [argument for argument in self._arguments() if argument.name != topic.key]
        result = rng.choice((words.of(w.ATTRIBUTES), words.of(w.NOUNS), "receipt", "ticket", "total", "reference"))
        value = json_text(rng.choice(w.RESULTS)(rng))
        gives: dict[str, Json] = {result: value}
        if rng.random() < 0.5:
            gives = {rng.choice(("state", "ok", topic.noun, "changed")): rng.choice((True, "done", key)), **gives}
        if by_id:
            find = self._add(world.finder(topic, rng.random() < 0.5))
            self.calls.append((find, {topic.key: key}))
        tool = self._add(world.actor(topic, by_id, arguments, verb, gives))
        named: dict[str, Json] = {a.name: a.value for a in arguments if a.value is not None}
        which = topic.id_name if by_id else topic.key
        named[which] = topic.ids[key] if by_id else key
        given = {name: named[name] for name in tool.parameters["properties"] if name in named}
        self.calls.append((tool, given))
        self.changes.append([tool.name, tool.check(given)])  # with defaults, as calls have them
        request = self._order(topic, verb, f"{topic.noun} {key}" if by_id else key, arguments)
        verb_text = verb.replace("_", " ")
        if rng.random() < 0.6:
            request += " " + rng.choice(
                (f"What is the {result}?", f"Give me the {result}.", f"I need the {result}.", f"Which {result} is it?",
                 f"Then tell me the {result}.", f"And the {result}?")
            )  # fmt: skip
            return request, f"The {result} is {value}.", [value]
        return request, rng.choice((f"Done: {verb_text} {key}.", "Done.")), []

    def _arguments(self) -> list[Argument]:
        """Up to three arguments, and which of them the request gives."""
        rng, made = self.rng, list[Argument]()
        for _ in range(rng.choices((0, 1, 2, 3), (3, 4, 2, 1))[0]):
            kind = rng.choices(("string", "integer", "number", "boolean", "enum", "pair"), (5, 4, 1, 1, 2, 1))[0]
            if kind == "pair":
                word, make = self._argument_name(), rng.choice(w.TEXTS)
                for name, kind in ((f"from_{word}", "string"), (f"to_{word}", "pair")):
                    made.append(Argument(name, kind, str(make(rng)), description=self.world.about(name)))
                continue
            if kind == "boolean":
                name = self.world.words.of(w.FLAGS, self.world.used)
                asked = rng.random() < 0.7
                made.append(Argument(name, kind, True if asked else None, False, description=self.world.about(name)))
                continue
            name, choices = self._argument_name(), tuple[str, ...]()
            value: Json
            if kind == "integer":
                value = w.whole(rng)
            elif kind == "number":
                value = w.decimal(rng)
            elif kind == "enum":
                choices = tuple(dict.fromkeys(self.world.words.of(w.CHOICES) for _ in range(rng.randint(2, 4))))
                value = rng.choice(choices)
            else:
                value = str(rng.choice(w.TEXTS)(rng))
            argument = Argument(name, kind, value, choices=choices, description=self.world.about(name))
            if rng.random() < 0.25:
                argument.required = False
                if rng.random() < 0.6:
                    argument.default = value if rng.random() < 0.2 else (choices[0] if choices else value)
                    argument.value = None
            made.append(argument)
        return made

    def _argument_name(self) -> str:
        name = self.world.words.of(w.ARGUMENTS, self.world.used)
        if self.rng.random() < 0.15:
            name = f"{name}_{self.world.words.of(w.ARGUMENTS)}"
        return name

    def _order(self, topic: Topic, verb: str, key: str, arguments: Sequence[Argument]) -> str:
        """A request to do something, with what it takes."""
        rng, said, thing = self.rng, list[str](), self._thing(topic, key)
        if self._is_vague():
            verb, thing = self.world.words.of(w.VERBS, self.world.used), key.removeprefix(f"{topic.noun} ")
        bare = self._is_vague()  # values alone, which their place and type tell apart, if anything does
        given = [argument for argument in arguments if argument.value is not None]
        kinds = [argument.kind for argument in given]
        for i, argument in enumerate(given):
            if argument.kind == "pair":
                said[-1] = f"{'' if bare else 'from '}{json_text(given[i - 1].value)} to {json_text(argument.value)}"
            elif argument.kind == "boolean":
                said.append(rng.choice((argument.name, f"make it {argument.name}", f"with {argument.name}")))
            elif bare:
                said.append(json_text(argument.value))
            elif kinds.count(argument.kind) == 1 and rng.random() < 0.4 and argument.kind != "string":
                if argument.kind == "integer" and rng.random() < 0.4:
                    thing = rng.choice((f"{argument.value} of {thing}", f"{argument.value} {thing}"))
                    said.append("")
                    continue
                said.append(rng.choice(UNNAMED[argument.kind]).format(value=json_text(argument.value)))
            elif kinds == ["string"] and rng.random() < 0.4:
                said.append(rng.choice(UNNAMED["string"]).format(value=json_text(argument.value)))
            else:
                said.append(self._named(argument.name, argument.value))
        said = [text for text in said if text]
        if rng.random() < SCATTERED:
            return self._scattered(verb.replace("_", " "), thing, *said)
        rest = "".join((" " if not i else rng.choice((", ", " and "))) + text for i, text in enumerate(said))
        request = self._fill(rng.choice(ORDERS), verb=verb, thing=thing, rest=rest)
        return request

    def _named(self, name: str, value: Json) -> str:
        text = json_text(value)
        return self.rng.choice(NAMED).format(
            name=name.replace("_", " "), value=f'"{text}"' if self._quoted(value) else text
        )

    def _quoted(self, value: Json) -> bool:
        return isinstance(value, str) and self.rng.random() < 0.2

    def _question(self, topic: Topic, attribute: str, key: str) -> str:
        if self._is_vague():
            attribute, key = self.world.words.of(w.ATTRIBUTES), key.removeprefix(f"{topic.noun} ")
            return self._fill(self.rng.choice(QUESTIONS), attribute=attribute, thing=key)
        if attribute in PARAPHRASES and self.rng.random() < 0.4:
            return self._fill(PARAPHRASES[attribute], thing=self._thing(topic, key))
        if self.rng.random() < SCATTERED:
            return self._scattered(attribute.replace("_", " "), self._thing(topic, key))
        return self._fill(self.rng.choice(QUESTIONS), attribute=attribute, thing=self._thing(topic, key))

    def _thing(self, topic: Topic, key: str) -> str:
        """A thing as people name it."""
        if key.startswith(f"{topic.noun} "):
            return self.rng.choice((key, f"the {key}"))
        text = f'"{key}"' if self.rng.random() < 0.2 else key
        return self.rng.choice((text, text, f"{topic.noun} {text}", f"the {topic.noun} {text}", f"the {text}"))

    def _some_key(self, topic: Topic) -> str:
        return self.rng.choice(list(topic.records))

    def _fill(self, template: str, **values: str) -> str:
        plain = ("verb", "noun", "attribute", "result")
        said = {name: value.replace("_", " ") if name in plain else value for name, value in values.items()}
        text = template.format(**said)
        return text[0].upper() + text[1:] if self.rng.random() < 0.85 else text

    def _number_in(self, result: str) -> str:
        """The number that a result of this world ends with."""
        return result.rstrip(".}").rpartition(" ")[2]

    def _add(self, tool: RandomTool) -> RandomTool:
        self.tools.append(tool)
        return tool

    def _distract(self) -> None:
        """Add tools that nobody needs."""
        rng, world = self.rng, self.world
        wanted = max(len(self.tools), rng.choices(range(1, MOST_TOOLS + 1), (2, 3, 4, 4, 2, 1))[0])
        while len(self.tools) < wanted:
            topic = world.topic(1)
            kind = rng.randrange(4)
            made = (
                world.getter(topic, rng.choice((None, topic.attributes[0])), rng.random() < 0.3) if kind == 0
                else world.finder(topic, rng.random() < 0.3) if kind == 1
                else world.actor(topic, rng.random() < 0.3, self._arguments(), world.words.of(w.VERBS, world.used), {})
            )  # fmt: skip
            self.tools.append(made)

    def _framed(self, requests: list[Request]) -> Lesson:
        """The lesson with what stands around the request: greetings, a system prompt, the form of the answer."""
        rng, system = self.rng, ""

        def filled(text: str) -> str:
            return text.format(person=w.person(rng), place=w.place(rng), word=w.word(rng))

        first, expected = requests[0], requests[0].expected
        if rng.random() < 0.25:
            first.text = f"{filled(rng.choice(GREETINGS))} {first.text}"
        if rng.random() < 0.4:
            system = filled(rng.choice(SYSTEMS))
        if len(requests) == 1 and len(expected) == 1 and expected != ["no "] and rng.random() < 0.25:
            marker = rng.choice(ANSWERS) if rng.random() < 0.7 else f"{w.invented(rng).title()}:"
            first.answer = f"{marker} {expected[0]}"
            form = rng.choice((f'End with "{marker}" and the answer.', f"Answer with {marker} and the answer.",
                               f"Say {marker} before the answer.", f"Write the answer after {marker}"))  # fmt: skip
            if rng.random() < 0.5:
                system = f"{system} {form}".strip()
            else:
                first.text = f"{first.text} {form}"
        return Lesson(self.tools, requests, system)


def _same(gives: Mapping[str, Json], key: str) -> Mapping[str, Json]:
    """What a call says, whatever it is of."""
    return gives


def _numbers(names: Sequence[str]) -> list[Argument]:
    return [Argument(name, "number", None) for name in names]


KINDS: Mapping[Callable[[Teacher], tuple[str, str, list[str]]], float] = {
    Teacher.ask: 22, Teacher.ask_by_id: 14, Teacher.ask_two: 7, Teacher.act: 20, Teacher.act_by_id: 14,
    Teacher.work_out: 10, Teacher.add_two: 5, Teacher.retry: 6, Teacher.missing: 2,
}  # fmt: skip
"""Kinds of lessons, with their relative frequencies."""


def make_lesson(
    seed: str,
    held_out: bool = False,
    drills: float = DRILLS,
    errands: float = 0.0,
    vague: float = 0.0,
    doubts: float = 0.0,
) -> Lesson:
    """The lesson of a seed; with `held_out`, of words that no other lesson has. errands: share of lessons that are;
    doubts: share of the rest, and drills: share of what remains. vague: share of requests that do not say which tool is
    meant, or which argument a value is for."""
    return Teacher(Random(seed), held_out, drills, errands, vague, doubts).lesson()
