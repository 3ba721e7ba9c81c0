"""`ConversationTree`: the model's calls of one rollout while it grows, as a tree of what was said.

A call finds its place by its messages: the longest beginning of them that ends with an answer that was sampled here is
its parent, so what was sampled stays as it was sampled, thinking included, even where the agent leaves it out of its
history. What follows is added by the bridge of the chat. A history that was truly changed begins a new branch.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from agentrl.chat.base import Chat, Completing, images_in
from agentrl.chat.image_chat import moved
from agentrl.engine.base import Generation
from agentrl.engine.stops import UNFINISHED
from agentrl.errors import UserError
from agentrl.gateway.call import Call
from agentrl.images import ImageSpan
from agentrl.plugins.types import Json, Message
from agentrl.trajectory import Segment, Turn

Key = bytes
Train = Literal["all", "tools"]
"""See `agent.train`."""
_RELATIVES = 64
_LEAST = 64  # characters that a message costs besides its own
_HEAD = 32  # tokens by which most paths are told from a prompt that does not begin with them


@dataclass(slots=True, eq=False)
class Branch:
    """A growing path of tokens, which the engine knows by one name."""

    name: str
    """Unique within a run."""
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    """All tokens from the root on."""
    images: list[ImageSpan] = field(default_factory=list)
    """Where images stand in `ids`."""

    def add(self, given: "Given") -> None:
        """Append tokens that were not sampled now."""
        self.images += moved(given.images, len(self.ids))
        self.ids.fromlist(given.ids)


@dataclass(slots=True, eq=False)
class Given:
    """Tokens that follow a path and are not sampled now."""

    ids: list[int] = field(default_factory=list)
    """The tokens."""
    images: list[ImageSpan] = field(default_factory=list)
    """Where images stand in `ids`."""

    def add(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> None:
        """Append tokens. images: where they stand in `ids`."""
        self.images += moved(images, len(self.ids))
        self.ids += ids


@dataclass(slots=True, eq=False)
class Node:
    """One call of the model: the tokens that it adds to its parent's path, and what was sampled after them."""

    index: int
    """In the order in which the calls began."""
    parent: "Node | None"
    """The call whose answer it goes on from; None: a conversation begins."""
    branch: Branch
    """Where its tokens stand."""
    given: Given
    """Tokens between the parent's end and the first sampled one."""
    call: Call
    """What the agent sent."""
    keys: list[Key]
    """Of the conversation before each message of the call, and of all of it."""
    end: int = 0
    """Tokens of the path, sampled ones included, once it is answered."""
    generation: Generation | None = None
    """What was sampled; None while the call runs, or where it failed."""
    answer: Message | None = None
    """The sampled message."""
    reward: float = 0.0
    """Step rewards of its tool calls."""
    cut: bool = False
    """Whether the engine sampled further than the tokens that are kept."""
    train: bool | None = None
    """Whether the agent wants it trained; None: as the recipe says."""
    role: str = ""
    """The seat that it was called for; empty: the rollout's own."""
    sent: int = 1
    """How often the agent sent the call."""
    losses: int = 0
    """To how many of them nobody was there any more to receive the answer."""
    continued: bool = False
    """Whether a later call goes on from it, or repeats its answer."""

    @property
    def received(self) -> bool:
        """Whether somebody received the answer: a later call that goes on from it shows that, too."""
        return self.losses < self.sent or self.continued

    @property
    def ids(self) -> list[int]:
        """The sampled tokens."""
        return self.generation.ids if self.generation is not None else []

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages of the call and its answer."""
        return (*self.call.messages, self.answer) if self.answer is not None else self.call.messages

    @property
    def added(self) -> tuple[Message, ...]:
        """The messages of `conversation` that follow those of the parent."""
        return self.conversation[len(self.parent.conversation) if self.parent is not None else 0 :]


@dataclass(slots=True)
class Counts:
    """What a rollout's calls were, for the metrics `gateway/...`."""

    calls: int = 0
    """Calls that were sampled."""
    forks: int = 0
    """Calls that began a branch, beyond the first of the rollout."""
    retries: int = 0
    """Calls that an SDK sent again, which got the answer of the first."""
    auxiliary: int = 0
    """Answers that are not trained."""
    unreceived: int = 0
    """Those of them that nobody received."""
    unproven: int = 0
    """Those that were constrained by ids that the engine does not tell."""
    ignored: int = 0
    """Fields of calls that were ignored."""
    dropped_thinking: int = 0
    """Calls that go on from thinking which the chat template would leave out by then."""


@dataclass(slots=True)
class Sought:
    """A call, and where its history was found."""

    call: Call
    """What the agent sent."""
    keys: list[Key]
    """See `Node.keys`."""
    parent: Node | None
    """The call whose answer it goes on from; None: it goes on from none."""
    length: int
    """Messages up to that answer."""
    chat: Chat
    """Lays it out."""

    @property
    def work(self) -> int:
        """Characters that laying out its prompt goes through, about."""
        if self.parent is None or self.chat.rewrites_history is not None:  # also of a prompt as it stands
            return max(self.call.size, _LEAST * len(self.call.messages))
        return sum(_LEAST + len(message["content"] or "") for message in self.call.messages[self.length :])


class Placed(NamedTuple):
    """Where a call stands in the tree, and its prompt."""

    call: Call
    """As it is kept."""
    parent: Node | None
    """See `Node.parent`."""
    given: Given
    """See `Node.given`."""
    keys: list[Key]
    """See `Node.keys`."""
    dropped: bool
    """Whether the template would have dropped thinking of its history."""


@dataclass(slots=True)
class ConversationTree:
    """The calls of one rollout.

    name: of the rollout, with which the names of its branches begin. chat: turns messages into tokens. history: see
    `agent.history`.
    """

    name: str
    chat: Chat
    history: Literal["sampled", "template"] = "sampled"
    nodes: list[Node] = field(default_factory=list)
    """Every call that began, in that order."""
    branches: list[Branch] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    """For the metrics."""
    tokens: int = 0
    """Tokens of the tree, each counted once."""
    _by_key: dict[Key, list[Node]] = field(default_factory=dict)
    _by_call: dict[int, Node] = field(default_factory=dict)  # by the identity of a call, which its node keeps alive
    _answers: dict[Key, Node] = field(default_factory=dict)  # the latest by its canonical answer

    @property
    def answered(self) -> list[Node]:
        """The calls that have an answer, in the order in which they began."""
        return [node for node in self.nodes if node.generation is not None]

    def add(self, call: Call, placed: "Placed | None" = None) -> Node:
        """A new node for a call, its prompt laid out in `node.branch.ids`. placed: what `place` returned, if it
        was called already. Raises UserError: the chat template cannot express the messages."""
        call, parent, given, keys, dropped = placed or self.place(self.seek(call))
        self.counts.dropped_thinking += dropped
        node = Node(len(self.nodes), parent, self._branch(parent, given), given, call, keys)
        forked = parent is None or (node.branch is not parent.branch and len(parent.branch.ids) != parent.end)
        self.counts.calls += 1
        self.counts.ignored += len(call.ignored)
        self.counts.forks += forked and bool(self.nodes)
        if parent is not None:
            parent.continued = True
        self.nodes.append(node)
        self.tokens += len(given.ids)
        self._by_call[id(call)] = node
        return node

    def relatives(self, node: Node) -> list[str]:
        """Names of branches that may begin like that of `node`: its parent's, and the latest others."""
        names = [branch.name for branch in self.branches[-_RELATIVES:]]
        parent = [node.parent.branch.name] if node.parent is not None else []
        return [name for name in dict.fromkeys([*parent, *names]) if name != node.branch.name]

    def measure(self, call: Call) -> int:
        """The tokens that the prompt of a call would have, without adding it."""
        _, parent, given, _, _ = self.place(self.seek(call))
        return (parent.end if parent is not None else 0) + len(given.ids)

    def answer(self, node: Node, generation: Generation, message: Message, repeated: Sequence[Message] = ()) -> None:
        """Write down what was sampled for a node. repeated: other forms in which an agent may repeat `message`."""
        node.branch.ids.fromlist(generation.ids)
        self.tokens += len(generation.ids)
        node.end, node.generation, node.answer = len(node.branch.ids), generation, message
        self.counts.unproven += not generation.trainable
        if node.call.prompt is not None:  # no message goes on from it
            return
        for canonical in dict.fromkeys(map(_canonical, (message, *repeated))):
            self._by_key.setdefault(_digest(node.keys[-1], canonical), []).append(node)
            self._answers[canonical] = node

    def give_up(self, node: Node) -> None:
        """Take back the prompt of a call that came to nothing, so that another can go on from its parent, and keep
        none of it: it may be far longer than any context."""
        start = node.parent.end if node.parent is not None else 0
        branch = node.branch
        if len(branch.ids) == start + len(node.given.ids):
            del branch.ids[start:]
            branch.images = [span for span in branch.images if span.start < start]
        self.tokens -= len(node.given.ids)
        node.given = Given()

    def _branch(self, parent: Node | None, given: Given) -> Branch:
        if parent is not None and len(parent.branch.ids) == parent.end and not parent.cut:
            branch = parent.branch
        else:
            branch = Branch(f"{self.name}/{len(self.branches)}" if self.branches else self.name)
            self.branches.append(branch)
            if parent is not None:
                branch.ids = parent.branch.ids[: parent.end]
                branch.images = [span for span in parent.branch.images if span.start < parent.end]
        branch.add(given)
        return branch

    def seek(self, call: Call) -> "Sought":
        """The call whose answer a call goes on from. Raises UserError: it ends with an assistant's message."""
        if call.prompt is not None:
            return Sought(call, [], None, 0, self.chat)
        messages = call.messages
        if not messages or messages[-1]["role"] == "assistant":
            raise UserError("the last message must be one that the model answers, not an assistant's")
        keys = self._keys(call)
        for length in range(len(messages) - 1, 0, -1):
            if found := self._by_key.get(keys[length]):
                return Sought(call, keys, _told_apart(found, messages[length - 1]), length, self.chat)
        return Sought(call, keys, None, 0, self.chat)

    def place(self, sought: "Sought") -> "Placed":
        """The parent of a call, the tokens that follow it, the keys of the call, and whether the template would
        have dropped thinking of its history. It changes nothing that a call in another thread relies on."""
        call, parent = sought.call, sought.parent
        if call.prompt is not None:
            return self._place_prompt(call, call.prompt)
        if parent is not None and (given := self._following(parent.ids, call.messages[sought.length :])) is not None:
            written = self._without_thinking(parent, given.ids, call)
            if written is None or self.history == "sampled":
                return Placed(call, parent, given, sought.keys, written is not None)
            parent.continued = True
            return Placed(call, None, written, sought.keys, True)
        return Placed(call, None, self._from_nothing(call.messages, call.tools), sought.keys, False)

    def _place_prompt(self, call: Call, prompt: str | tuple[int, ...]) -> "Placed":
        """What `place` does, for a prompt as it stands: it goes on from the longest path that it begins with,
        token by token, or, where it is text, as the path's own texts say it."""
        if not isinstance(self.chat, Completing):
            raise UserError("prompt: this model takes messages, not prompts")
        parent, rest = None, prompt
        for node in sorted(self.answered, key=lambda node: -node.end):  # a prompt mostly goes on from the longest
            if node.call.prompt is not None and (left := self._behind(node, prompt)) is not None:
                parent, rest = node, left
                break
        ids = self.chat.encode_prompt(rest) if rest else []
        if parent is None and not ids:
            raise UserError("prompt: it has no token")
        said = rest if isinstance(rest, str) else self.chat.decode(rest)
        before = parent.conversation if parent is not None else ()
        new: tuple[Message, ...] = ({"role": "user", "content": said},) if said else ()
        return Placed(replace(call, messages=(*before, *new)), parent, Given(ids), [], False)

    def _behind(self, node: Node, prompt: str | tuple[int, ...]) -> str | tuple[int, ...] | None:
        """What a prompt adds to the path of a node; None: it does not begin with that."""
        if not isinstance(prompt, str):
            path = node.branch.ids[: node.end]
            return prompt[node.end :] if len(prompt) >= node.end and array("i", prompt[: node.end]) == path else None
        if isinstance(node.call.prompt, str) and node.answer is not None:  # as it was written
            if not prompt.startswith(node.call.prompt):
                return None
            stop = self.chat.decode(node.ids[-1:]) if node.ids[-1] in self.chat.stop_ids else ""
            whole = f"{node.call.prompt}{node.answer['content']}{stop}"
        else:
            if not prompt.startswith(self.chat.decode(node.branch.ids[:_HEAD].tolist()).rstrip(UNFINISHED)):
                return None  # without reading all of a path for every prompt that begins otherwise
            whole = self.chat.decode(node.branch.ids[: node.end].tolist())
        return prompt[len(whole) :] if prompt.startswith(whole) else None

    def _without_thinking(self, parent: Node, given: Sequence[int], call: Call) -> Given | None:
        """The prompt as the template writes it, where that lacks thinking which stands in the path of `parent`;
        None: it lacks none."""
        messages, thoughts = list(call.messages), list[str]()
        node: Node | None = parent
        while node is not None and self.chat.rewrites_history is not None:
            if node.answer is not None and (thought := node.answer.get("reasoning_content")):
                thoughts.append(thought)
                messages[len(node.call.messages)] = {**messages[len(node.call.messages)], "reasoning_content": thought}
            node = node.parent
        if not thoughts:
            return None
        try:
            written = self._opened(messages, call.tools)
        except UserError:
            return None
        path, text = self.chat.decode([*parent.branch.ids[: parent.end], *given]), self.chat.decode(written.ids)
        return written if any(path.count(one) > text.count(one) for one in thoughts) else None

    def _keys(self, call: Call) -> list[Key]:
        """The key of the conversation before each message, and of all of it."""
        known = self._by_call.get(id(call.earlier)) if call.earlier is not None else None
        keys = [_digest(b"", _written(call.tools))] if known is None else known.keys.copy()
        for message in call.messages[len(keys) - 1 :]:
            keys.append(_after(keys[-1], message))
        return keys

    def _opened(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> Given:
        """Messages as the template writes them."""
        ids = self.chat.render(messages, tools)
        return Given(list(ids), images_in(self.chat, ids, messages))

    def _from_nothing(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> Given:
        """The tokens of a conversation of which nothing was sampled here, or not in this order."""
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        if first and first < len(messages) and (node := self._answers.get(_canonical(messages[first]))):
            rest = self._following(node.ids, messages[first + 1 :])
            if rest is not None:
                node.continued = True
                given = self._opened(messages[:first], tools)
                given.add(node.ids)
                given.add(rest.ids, rest.images)
                return given
        return self._opened(messages, tools)

    def _following(self, turn: Sequence[int], messages: Sequence[Message]) -> Given | None:
        """The tokens of `messages` after the sampled turn `turn`; answers among them that were sampled here keep
        their tokens. None: one of them was not, or the chat cannot go on with such messages."""
        try:
            return self._bridged(turn, messages)
        except UserError:
            return None

    def _bridged(self, turn: Sequence[int], messages: Sequence[Message]) -> Given | None:
        given = Given()
        waiting: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                waiting.append(message)
                continue
            node = self._answers.get(_canonical(message))
            if node is None or not waiting:
                return None
            node.continued = True
            self._say(given, turn, waiting)
            given.add(node.ids)
            turn, waiting = node.ids, []
        if not waiting:
            return None
        self._say(given, turn, waiting)
        return given

    def _say(self, given: Given, turn: Sequence[int], messages: Sequence[Message]) -> None:
        """Append messages that follow the sampled turn `turn`."""
        ids = self.chat.bridge(turn, messages)
        given.add(ids, images_in(self.chat, ids, messages))

    def segments(self, train: Train = "all") -> Iterator[tuple[Node, Segment, Turn]]:
        """Yield each answered call, its segment and its turn, in the order in which the calls began. train: see
        `agent.train`."""
        places: dict[int, int] = {}
        at = 0
        for node in self.answered:
            start = at + len(node.given.ids)
            end = start + len(node.ids)
            parent = places[node.parent.index] if node.parent is not None else -1
            places[node.index] = len(places)
            why = untrained(node, train)
            turn = Turn(start, end, node.reward, not why, role=node.role, asked=node.call.asked, untrained=why)
            yield node, Segment(at, end, parent), turn
            at = end


def untrained(node: Node, train: Train) -> str:
    """Why an answer is not trained, as `Turn.untrained` has it; empty where it is."""
    if not node.received:
        return "unreceived"
    if node.generation is not None and not node.generation.trainable:
        return "unproven"
    if node.train is not None:
        return "" if node.train else "marked"
    return "" if train == "all" or node.call.tools else "without_tools"


def _told_apart(nodes: Sequence[Node], repeated: Message) -> Node:
    """The node whose answer `repeated` repeats: by the ids of its calls where they tell, else the latest."""
    ids = _call_ids(repeated)
    return next((node for node in reversed(nodes) if node.answer and _call_ids(node.answer) == ids), nodes[-1])


def _call_ids(message: Message) -> list[str]:
    return [call.get("id", "") for call in message.get("tool_calls", ())]


def _after(key: Key, message: Message) -> Key:
    return _digest(key, _canonical(message))


def _canonical(message: Message) -> bytes:
    """What a message says, whatever an agent made of its form: ids, thinking and the order of keys left out.
    Images are those of the store, so that one is the same whatever its file was."""
    content = message["content"]
    if isinstance(content, list):
        return _written(f"{message['role']} shows") + _written(content)
    text = f"{message['role']}:{content or ''}".encode("utf-8", "surrogatepass")
    if not message.get("tool_calls"):
        return text
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
    return b"%d:%b%b" % (len(text), text, _written(calls))


_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


def _written(value: Json) -> bytes:
    return _encode(value).encode("utf-8", "surrogatepass")


def _digest(key: Key, text: bytes) -> Key:
    return hashlib.blake2b(text, digest_size=16, key=key).digest()
