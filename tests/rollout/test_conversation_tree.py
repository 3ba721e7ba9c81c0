"""Over every chat template with tools that `trl` carries: what was sampled stays as it was, whatever an agent sends."""

import json
import random
import re
import warnings
from typing import Any

import pytest
from chat_help import CALCULATOR, make_tokenizer, trl_templates

from agentrl.chat.base import Chat
from agentrl.chat.load import load_chat
from agentrl.engine.base import Generation, GenerationFinish
from agentrl.errors import UserError
from agentrl.gateway.call import Call
from agentrl.gateway.chat_completions import message_of, written
from agentrl.rollout.calls import assistant_message, bounded
from agentrl.rollout.conversation_tree import ConversationTree, Node

warnings.filterwarnings("ignore")
WITH_TOOLS = sorted(name for name, text in trl_templates().items() if re.search(r"\btools\b", text))
"""Templates that write the schemas of tools."""
TEXTS = [
    "It is 6.",
    "Let me see: 2*3",
    "Überlegung 漢字",
    " ",
    '{"name": "calculator"}',
    "<think>no</think>yes",
    "a\n\nb",
]


def sent(message: Any, rng: random.Random) -> Any:
    """An answer as an agent may send it back: through JSON, keys in another order, thinking left out."""
    given = json.loads(json.dumps(written(message)))
    if rng.random() < 0.5:
        given.pop("reasoning_content", None)
    for call in given.get("tool_calls", ()):
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=rng.choice([None, 2]))
    return message_of(dict(reversed(given.items())), 0)


def following(node: Node) -> list[Any]:
    """What comes after an answer: results of its calls, or the user's next words."""
    calls = node.answer.get("tool_calls", [])
    results = [
        {"role": "tool", "content": f"{i}.0", "tool_call_id": call.get("id", ""), "name": call["function"]["name"]}
        for i, call in enumerate(calls)
    ]
    return results or [{"role": "user", "content": "And then?"}]


def answered(tree: ConversationTree, chat: Chat, call: Call, text: str) -> Node:
    """Sample `text` for a call."""
    node = tree.add(call)
    ids = [*chat.encode_text(text), chat.stop_ids[0]]
    generation = Generation(ids, [-0.5] * len(ids), GenerationFinish.STOP)
    tree.answer(node, generation, assistant_message(bounded(chat.parse(ids)), node.index))
    return node


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_an_agent_that_sends_its_history_back_goes_on_from_what_was_sampled(name: str) -> None:
    chat = load_chat(make_tokenizer(trl_templates()[name]), model_path="nowhere", kind="bridge", tools=[CALCULATOR])
    rng, tree = random.Random(name), ConversationTree("r", chat)
    first = Call(({"role": "user", "content": "What is 2*3?"},), (CALCULATOR,))
    nodes = [answered(tree, chat, first, rng.choice(TEXTS))]
    for step in range(12):
        before = rng.choice(nodes)
        history = [*(sent(m, rng) if m["role"] == "assistant" else m for m in before.conversation), *following(before)]
        edited = rng.random() < 0.25
        if edited:
            history[0] = {"role": "user", "content": f"What is {step + 3}*3?"}
        try:
            node = answered(tree, chat, Call(tuple(history), (CALCULATOR,)), rng.choice(TEXTS))
        except UserError:  # a template that cannot write such an answer from nothing
            assert edited
            continue
        assert node.parent is None if edited else node.parent in alike(tree, before)
        nodes.append(node)
    for node in tree.answered:
        path = node.branch.ids[: node.end].tolist()
        start = node.parent.branch.ids[: node.parent.end].tolist() if node.parent is not None else []
        assert path == [*start, *node.given.ids, *node.ids]


def alike(tree: ConversationTree, node: Node) -> list[Node]:
    """The nodes that nothing in what is sent tells from this one: equal conversations, thinking and ids left out."""

    def key(one: Node) -> Any:
        calls = [c["function"] for c in (one.answer or {}).get("tool_calls", [])]
        return one.keys[-1], (one.answer or {}).get("content"), json.dumps(calls, sort_keys=True)

    return [other for other in tree.answered if key(other) == key(node)]


@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize(("name", "drops"), [("qwen3", True), ("qwen3_training", False), ("qwen2_5", False)])
def test_thinking_that_the_template_drops_stays_or_goes(name: str, drops: bool, history: Any) -> None:
    chat = load_chat(make_tokenizer(trl_templates()[name]), model_path="nowhere", kind="bridge", tools=[CALCULATOR])
    tree = ConversationTree("r", chat, history)
    talk: list[Any] = [{"role": "user", "content": "What is 2*3?"}]
    said = '<think>\nTwice three.\n</think>\n\n<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
    nodes = [answered(tree, chat, Call(tuple(talk), (CALCULATOR,)), said)]
    for text in ("<think>\nSo six.\n</think>\n\nIt is 6.", "Yes.", "Yes."):
        answer = {key: value for key, value in nodes[-1].answer.items() if key != "reasoning_content"}  # type: ignore[union-attr]
        talk += [answer, *following(nodes[-1])]
        nodes.append(answered(tree, chat, Call(tuple(talk), (CALCULATOR,)), text))
    result, again, last = nodes[1:]
    assert result.parent is nodes[0]  # the same turn of the user's: its thinking stays in any case
    assert last.parent is again
    texts = [chat.decode(node.branch.ids[: node.end].tolist()) for node in (again, last)]
    if drops and history == "template":
        assert again.parent is None
        assert again.given.ids == chat.render(talk[:-2], [CALCULATOR])
        assert all("Twice three" not in text for text in texts)
        assert tree.counts.dropped_thinking == 1
        assert result.continued
    else:
        assert again.parent is result
        assert all(text.count("Twice three") == 1 for text in texts)
        assert tree.counts.dropped_thinking == (2 if drops else 0)
