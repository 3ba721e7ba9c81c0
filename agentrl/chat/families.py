"""The families of the `renderers` package: one serves only when it is proven to write what the template writes.

It bridges between turns and reads calls. The opening is always the template's own rendering.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from agentrl.chat.base import Opening, ParsedCall, ParsedTurn, PartialTurn
from agentrl.chat.bridge import BridgeChat
from agentrl.chat.calls import CallError, RepeatedKeyError, read_json
from agentrl.chat.encode import sound
from agentrl.chat.frame import content_text
from agentrl.chat.template import Template, TemplateRefusalError
from agentrl.constraint import Constraint
from agentrl.errors import UserError
from agentrl.plugins.types import Json, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BY_MODEL_TYPE = {
    "qwen3": ("qwen3", "prime-qwen3"), "qwen3_moe": ("qwen3",), "qwen3_vl": ("qwen3-vl",),
    "qwen3_vl_moe": ("qwen3-vl",), "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"), "llama": ("llama-3", "deepseek-r1"), "gpt_oss": ("gpt-oss",),
    "glm4_moe": ("glm-4.5", "glm-5"), "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), "gemma4": ("gemma4",),
    "minimax_m2": ("minimax-m2",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """A proven family. bare_tools: it takes functions without their `{"type": "function"}`. lead: a prompt of its own.

    after_stop, after_cut: whether its bridge agrees with our frames on probe turns that stopped, and on those that were
    cut off, so that the faster frames serve.
    """

    name: str
    """The family's name in the package `renderers`."""
    renderer: Any
    """Its renderer, an object of `renderers`."""
    bare_tools: bool
    lead: tuple[int, ...] = ()
    after_stop: bool = False
    after_cut: bool = False

    def tools(self, tools: Sequence[dict[str, Json]]) -> list[dict[str, Json]] | None:
        """The schemas in the form that the renderer takes; None where there are none."""
        return [tool.get("function", tool) if self.bare_tools else tool for tool in tools] or None


def known_families() -> list[str]:
    """The names of all families that `renderers` knows, sorted."""
    return sorted(set(_renderers_module("base").MODEL_RENDERER_MAP.values()))


def _renderers_module(name: str) -> Any:
    """Import a module of `renderers`, without its HTTP client: that imports `openai`, which takes most of a second, and
    nothing here uses it. Who imports the client later gets the real one."""
    client = "renderers.client"
    if "renderers" not in sys.modules:
        sys.modules[client] = _NoClient(client)
    try:
        return import_module(f"renderers.{name}")
    finally:
        if isinstance(sys.modules.get(client), _NoClient):
            del sys.modules[client]


class _NoClient(ModuleType):
    """Gives a class for whatever is imported from it: the package exports the client's exceptions."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


def find_family(
    tokenizer: "PreTrainedTokenizerBase",
    template: Template,
    bridge: BridgeChat,
    *,
    kind: str,
    model_path: str,
    config: dict[str, Json],
) -> tuple[Family | None, str]:
    """The first candidate that is proven, or None, and why."""
    if template.parts:
        return None, "the template takes lists of parts"
    tried: list[str] = []
    unfit: list[str] = []
    for name in _candidates(kind, model_path, tokenizer, config):
        renderers = list(_renderers(name, tokenizer))
        for renderer in renderers:
            for bare in (True, False):
                family = Family(name, renderer, bare)
                if _proven(family, template, bridge):
                    return _with_bridges(family, template, bridge), "proven"
        (tried if renderers else unfit).append(name)
    if unfit and not tried:
        return None, f"the tokenizer lacks tokens that {' or '.join(unfit[:4])} of `renderers` need"
    if not tried:
        return None, "no `renderers` family is known for this model"
    return None, f"{', '.join(tried[:4])}{', ...' if tried[4:] else ''} of `renderers` would write other ids"


def _candidates(kind: str, model_path: str, tokenizer: "PreTrainedTokenizerBase", config: dict[str, Json]) -> list[str]:
    if kind != "auto":
        return [kind]
    known = _renderers_module("base").MODEL_RENDERER_MAP
    named = [known.get(name) for name in (model_path, getattr(tokenizer, "name_or_path", ""))]
    by_type = _BY_MODEL_TYPE.get(str(config.get("model_type")), ())
    rest = (
        by_type if config else [name for name in known_families() if name != "gpt-oss"]
    )  # it would fetch a vocabulary
    return list(dict.fromkeys([*[name for name in named if name], *rest]))


def _renderers(name: str, tokenizer: "PreTrainedTokenizerBase") -> Iterator[object]:
    """The family's renderers: with its defaults, and with thinking switched off or on."""
    create_renderer = _renderers_module("base").create_renderer
    config_class: Any = type(_renderers_module("configs").config_from_name(name))
    variants: list[dict[str, Json]] = [{}]
    if "enable_thinking" in config_class.model_fields:
        variants += [{"enable_thinking": True}, {"enable_thinking": False}]
    for variant in variants:
        for retention in ({"thinking_retention": "all"}, {}):
            try:
                yield create_renderer(tokenizer, config_class(**variant, **retention))
            except Exception:  # noqa: BLE001 - foreign constructors assert on any tokenizer that is not theirs
                continue


def _conversations() -> list[list[Message]]:
    """Conversations as far as a job writes them: user, tool call, result, answer, user; with thoughts, two
    calls, and arguments of every type."""

    def call(i: int, **more: object) -> Any:
        function = {"name": "calculator", "arguments": {"expression": f"{i} * 3", **more}}
        return {"type": "function", "id": f"call{i:05d}", "function": function}

    def result(i: int) -> Message:
        return {"role": "tool", "content": f"{3 * i}", "tool_call_id": f"call{i:05d}", "name": "calculator"}

    user: Message = {"role": "user", "content": "What is 2 * 3?"}
    again: Message = {"role": "user", "content": "And 3 * 3?"}
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call(2)]}
    two: Message = {"role": "assistant", "content": "", "tool_calls": [call(2, n=2, exact=True, of=[1, "b"]), call(3)]}
    thought: Message = {**turn, "reasoning_content": "Twice three."}
    conversation: list[Message] = [user, turn, result(2), {"role": "assistant", "content": "It is 6."}, again]
    system: Message = {"role": "system", "content": "Be brief."}
    return [
        [user],
        conversation[:3],
        conversation,
        [system, user],
        [user, two, result(2), result(3)],
        [user, thought, result(2)],
    ]


def _ids(family: Family, template: Template, messages: Sequence[Message]) -> list[int] | None:
    shaped = [{**message} for message in messages]
    try:
        found = family.renderer.render_ids(shaped, tools=family.tools(template.tools), add_generation_prompt=True)
    except Exception:  # noqa: BLE001 - a foreign renderer on a probe that it may not know
        return None
    return list(found)


def _proven(family: Family, template: Template, bridge: BridgeChat) -> bool:
    """Whether it renders every probe conversation as the template does (those that the template refuses set
    aside)."""
    compared = 0
    for conversation in _conversations():
        try:
            expected = bridge.whole_ids(template.text(conversation, template.tools, generate=True))
        except TemplateRefusalError:
            continue
        if _ids(family, template, conversation) != expected:
            return False
        compared += 1
    return compared >= 3


def _with_bridges(family: Family, template: Template, bridge: BridgeChat) -> Family:
    family = replace(family, lead=tuple(_ids(family, template, [{"role": "user", "content": "Hello."}]) or ()))
    bridge.stop_at(family.renderer.get_stop_token_ids())
    body = bridge.encode_text("It is 6.")
    after_stop = all(_agrees(family, template, bridge, [*body, stop]) for stop in bridge.stop_ids)
    return replace(family, after_stop=after_stop, after_cut=_agrees(family, template, bridge, body))


def _agrees(family: Family, template: Template, bridge: BridgeChat, turn: Sequence[int]) -> bool:
    """Whether, where its bridge adds anything after such a turn, our frames add the same."""
    conversation = _conversations()[2]
    for messages in ([conversation[2]], [conversation[2], conversation[2]], [conversation[4]]):
        theirs = _their_bridge(family, template, turn, messages)
        try:
            ours = bridge.bridge(turn, messages)
        except UserError:
            return theirs is None
        if theirs is not None and theirs != ours:
            return False
    return True


def _their_bridge(
    family: Family, template: Template, turn_ids: Sequence[int], messages: Sequence[Message]
) -> list[int] | None:
    turn = list(turn_ids)
    shaped = [
        {key: sound(value) if isinstance(value, str) else value for key, value in message.items()}
        | {"content": sound(content_text(message.get("content")))}
        for message in messages
    ]
    found = family.renderer.bridge_to_next_turn(list(family.lead), turn, shaped, tools=family.tools(template.tools))
    done = [*family.lead, *turn]
    return list(found.token_ids[len(done) :]) if found is not None and found.token_ids[: len(done)] == done else None


class FamilyChat:
    """A `Chat` (see base) of a family of `renderers`; what its bridge adds comes from our frames where they agree with
    it, calls are read by our parser where it reads this template's calls, and the opening is the template's."""

    images = False

    def __init__(self, bridge: BridgeChat, family: Family) -> None:
        self._bridge, self._family = bridge, family
        self.stop_ids = bridge.stop_ids
        self.rewrites_history = bridge.rewrites_history
        own = [what for what, agrees in (("stopped", family.after_stop), ("cut off", family.after_cut)) if not agrees]
        bridged = (
            f"its own bridge after turns that were {' or '.join(own)}" if own else "frames that agree with its bridge"
        )
        reader = bridge.call_format or "its own parser"
        self.description = (
            f"family {family.name} of `renderers`, proven on probes; openings as the template writes them; {bridged}; "
            f"calls as {reader}"
        )

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[int]:
        """See `Chat.render`. The template's own rendering: a family that agrees on every probe may still cut other
        contents into tokens in another way."""
        return self._bridge.render(messages, tools)

    def lengths(self, openings: Sequence[Opening]) -> list[int]:
        """See `Measuring.lengths`."""
        return self._bridge.lengths(openings)

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """See `Chat.bridge`."""
        stopped = len(turn_ids) > 0 and turn_ids[-1] in self.stop_ids
        agrees = self._family.after_stop if stopped else self._family.after_cut
        if not agrees and not self._bridge.structural_in(messages):
            theirs = _their_bridge(self._family, self._bridge.template, turn_ids, messages)
            if theirs is not None:
                return theirs
        return self._bridge.bridge(turn_ids, messages)

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        """See `Chat.parse`."""
        if self._bridge.call_format is not None:
            return self._bridge.parse(turn_ids)
        family = self._family
        found = family.renderer.parse_response(
            list(turn_ids), tools=family.tools(self._bridge.template.tools), prompt_ids=list(family.lead)
        )
        calls = tuple(_parsed(call) for call in found.tool_calls)
        return ParsedTurn(found.content.strip(), calls, found.reasoning_content or None)

    def stream(self) -> PartialTurn | None:
        """See `Streaming.stream`. The family's own parser reads whole turns only."""
        return self._bridge.stream() if self._bridge.call_format is not None else None

    def constraint(self, schema: str | None, tools: Sequence[dict[str, Json]]) -> Constraint:
        """See `Constraining.constraint`."""
        return self._bridge.constraint(schema, tools)

    def strict(self, tools: Sequence[dict[str, Json]]) -> Constraint:
        """See `StrictlyCalling.strict`."""
        return self._bridge.strict(tools)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Chat.decode`."""
        return self._bridge.decode(ids)

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """See `Completing.encode_prompt`."""
        return self._bridge.encode_prompt(prompt)

    def encode_text(self, text: str) -> list[int]:
        """See `Chat.encode_text`."""
        return self._bridge.encode_text(text)


def _parsed(call: Any) -> ParsedCall:
    arguments, why = call.arguments, "" if str(call.status) == "ok" else str(call.status).replace("_", " ")
    if isinstance(arguments, str) and not why:
        try:
            arguments = read_json(arguments)
        except CallError as error:
            why = str(error)
    why = why or _repeated(call.raw)
    if why or not isinstance(arguments, dict) or not call.name:
        why = why or "it has no name or its arguments are no JSON object"
        return ParsedCall(call.name or "", {}, call.raw, f"this tool call cannot be read: {why}", call.id)
    return ParsedCall(call.name, arguments, call.raw, None, call.id)


def _repeated(raw: str) -> str:
    """Which key stands twice in a call that is written as JSON, of which their parser takes the last."""
    try:
        read_json(raw)
    except RepeatedKeyError as error:
        return str(error)
    except CallError:  # it is written otherwise
        pass
    return ""
