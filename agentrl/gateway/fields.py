"""Which fields of a request are served, by dialect: an allowlist, so that none changes an answer in silence.

A field of an object, such as `text.verbosity`, has a name of its own, and so has one of all tools (`tools[].strict`).
The table in docs/tutorials/agent.md says the same, and is held to it by a test.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agentrl.gateway.call import GatewayError
from agentrl.plugins.types import Json

IGNORED_PREFIXES = ("x_", "x-")
"""What unknown fields may begin with that their sender does not rely on."""
_FALSE, _TRUE = (False,), (True,)
_NONE: tuple[Json, ...] = ([], {}, "")
_FORM = "ask for a form by response_format"
_TEMPLATE = "the prompt is written by the run's chat template"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one dialect."""

    served: frozenset[str]
    """Do what they say."""
    asked: frozenset[str]
    """Recorded: the recipe decides, or the chat template; `agentrl serve` samples by those that it knows."""
    ignored: frozenset[str]
    """Change nothing of the answer; they are counted."""
    refused: Mapping[str, tuple[tuple[Json, ...], str]] = field(default_factory=dict)
    """Refused but for these values, which ask for what is done anyway; and what to do."""
    objects: frozenset[str] = field(init=False)
    """Fields that are objects, whose own fields have names here."""

    def __post_init__(self) -> None:
        names = (*self.served, *self.asked, *self.ignored, *self.refused)
        inside = (name.partition(".")[0] for name in names if "." in name and "[" not in name)
        object.__setattr__(self, "objects", frozenset(inside))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IN_PROMPTS = frozenset(("type", "function", "name", "description", "parameters", "input_schema"))
_STREAM = frozenset(("stream_options.include_obfuscation",))
_STREAM_REFUSED: dict[str, tuple[tuple[Json, ...], str]] = {
    "stream_options.continuous_usage_stats": (_FALSE, "a stream ends with the token counts"),
}
_SAMPLING = _names("temperature top_p top_k seed min_p presence_penalty frequency_penalty repetition_penalty")
_OPENAI = _names(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "verbosity client_metadata"
)

_TOOLS = _names("tools[].strict tools[].cache_control tools[].eager_input_streaming")
_TOOLS_REFUSED: dict[str, tuple[tuple[Json, ...], str]] = {
    "tools[].defer_loading": (_FALSE, "all tools that are offered stand in the prompt"),
    "tools[].input_examples": (_NONE, "write them into the description"),
    "tools[].allowed_callers": ((["direct"],), "the model alone calls tools"),
}

CHAT_COMPLETIONS = Fields(
    served=_names(
        "messages model stream stream_options.include_usage max_tokens max_completion_tokens tools tool_choice "
        "response_format stop logprobs parallel_tool_calls"
    ),
    asked=_SAMPLING | _names("reasoning_effort reasoning thinking enable_thinking"),
    ignored=_OPENAI
    | _TOOLS
    | _names("prediction priority request_id include_reasoning separate_reasoning usage cache_control messages[].name")
    | _STREAM,
    refused={
        **_TOOLS_REFUSED,
        **_STREAM_REFUSED,
        "n": ((1,), "send a request for each answer"),
        "best_of": ((1,), "send a request for each answer"),
        "use_beam_search": (_FALSE, "answers are sampled"),
        "length_penalty": ((1, 1.0), "answers are sampled"),
        "top_logprobs": ((0,), "logprobs gives those of the sampled tokens"),
        "logit_bias": (_NONE, "the distribution is the model's own"),
        "bad_words": (_NONE, "the distribution is the model's own"),
        "audio": (_NONE, "the model writes text"),
        "modalities": ((["text"],), "the model writes text"),
        "functions": (_NONE, "use tools"),
        "function_call": (("none", "auto"), "use tools and tool_choice"),
        "web_search_options": ((), "offer a tool"),
        "chat_template_kwargs": (_NONE, _TEMPLATE),
        "chat_template": (_NONE, _TEMPLATE),
        "documents": (_NONE, _TEMPLATE),
        "add_generation_prompt": (_TRUE, _TEMPLATE),
        "continue_final_message": (_FALSE, _TEMPLATE),
        "echo": (_FALSE, "the answer is what the model says"),
        "min_tokens": ((0,), "the model decides when it ends"),
        "ignore_eos": (_FALSE, "the model decides when it ends"),
        "stop_token_ids": (_NONE, "use stop"),
        "include_stop_str_in_output": (_FALSE, "the text before a stop string is shown"),
        "skip_special_tokens": (_TRUE, "content is text"),
        "guided_json": ((), _FORM),
        "guided_regex": ((), _FORM),
        "guided_choice": ((), _FORM),
        "guided_grammar": ((), _FORM),
        "structured_outputs": (_NONE, _FORM),
        "regex": ((), _FORM),
        "ebnf": ((), _FORM),
        "json_schema": ((), _FORM),
    },
)
COMPLETIONS = Fields(
    served=_names("prompt model stream stream_options.include_usage max_tokens stop return_token_ids"),
    asked=_SAMPLING,
    ignored=_OPENAI | _names("priority request_id") | _STREAM,
    refused={
        **_STREAM_REFUSED,
        "n": ((1,), "send a request for each answer"),
        "best_of": ((1,), "send a request for each answer"),
        "use_beam_search": (_FALSE, "answers are sampled"),
        "length_penalty": ((1, 1.0), "answers are sampled"),
        "logprobs": ((0,), "logprobs: 0 gives those of the sampled tokens"),
        "prompt_logprobs": ((), "only what is sampled has log-probs"),
        "echo": (_FALSE, "the answer is what the model says"),
        "suffix": (_NONE, "the model writes what follows"),
        "logit_bias": (_NONE, "the distribution is the model's own"),
        "min_tokens": ((0,), "the model decides when it ends"),
        "ignore_eos": (_FALSE, "the model decides when it ends"),
        "stop_token_ids": (_NONE, "use stop"),
        "add_special_tokens": (_FALSE, "nothing is added to a prompt"),
        "response_format": (({"type": "text"},), "use Chat Completions"),
        "structured_outputs": (_NONE, "use Chat Completions"),
    },
)
RESPONSES = Fields(
    served=_names(
        "input instructions model stream max_output_tokens tools tool_choice text.format previous_response_id "
        "parallel_tool_calls"
    ),
    asked=_SAMPLING | _names("reasoning reasoning_effort"),
    ignored=_OPENAI | _TOOLS | _names("max_tool_calls truncation stream_options text.verbosity"),
    refused={
        **_TOOLS_REFUSED,
        "include": (([], ["reasoning.encrypted_content"]), "there are no log-probs and no tools of the server"),
        "background": (_FALSE, "wait for the answer"),
        "conversation": (_NONE, "use previous_response_id, or send the conversation"),
        "prompt": ((), "send instructions and input"),
        "top_logprobs": ((0,), "Chat Completions has log-probs"),
        "context_management": (_NONE, "compact the conversation yourself"),
    },
)
ANTHROPIC_MESSAGES = Fields(
    served=_names("messages model max_tokens system stream tools tool_choice stop_sequences output_config.format"),
    asked=_SAMPLING | _names("thinking output_config.effort output_config.task_budget"),
    ignored=_names("metadata service_tier inference_geo cache_control speed messages[].is_error") | _TOOLS,
    refused={
        **_TOOLS_REFUSED,
        "output_format": (_NONE, "use output_config.format"),
        "mcp_servers": (_NONE, "offer their tools as tools"),
        "container": ((), "offer a tool"),
        "context_management": (
            ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
            "compact the conversation yourself",
        ),
    },
)


def check_fields(body: Mapping[str, Json], fields: Fields) -> tuple[str, ...]:
    """The names of the fields that are ignored. Raises GatewayError for one that is not served."""
    ignored = []
    for name, value in _each(body, fields):
        if value is None or name in fields.asked:
            continue
        if name in fields.refused:
            _check_refused(name, value, fields)
        elif name in fields.ignored or name.rpartition(".")[2].startswith(IGNORED_PREFIXES):
            ignored.append(name)
        else:
            raise GatewayError(f"{shown(name)[1:-1]}: this field is unknown here; leave it out, or begin it with x_")
    return tuple(sorted(ignored))


def asked_of(body: Mapping[str, Json], fields: Fields) -> dict[str, Json]:
    """What a call asks for that is recorded."""
    return {name: value for name, value in _each(body, fields) if name in fields.asked and value is not None}


def check_tools(tools: object, fields: Fields) -> tuple[str, ...]:
    """The names of what is ignored in tools, each once: whatever they hold besides what stands in prompts. tools: of
    the body, which has been read. Raises GatewayError for what is not served."""
    ignored = set[str]()
    for tool in tools if isinstance(tools, list) else ():
        for part in (tool, tool.get("function")):
            for key in part.keys() - _IN_PROMPTS if isinstance(part, dict) else ():
                name, value = f"tools[].{key}", part[key]
                if name in fields.refused and value is not None:
                    _check_refused(name, value, fields)
                elif value not in (None, False):
                    ignored.add(name)
    return tuple(sorted(ignored))


def _each(body: Mapping[str, Json], fields: Fields) -> Iterator[tuple[str, Json]]:
    """Yield name and value of what is not served, with the fields of objects in place of these."""
    for name, value in body.items():
        if name in fields.served:
            continue
        if name not in fields.objects:
            yield name, value
        elif isinstance(value, dict):  # else it is refused where it is read
            inside = ((f"{name}.{key}", one) for key, one in value.items())
            yield from ((own, one) for own, one in inside if own not in fields.served)


def _check_refused(name: str, value: Json, fields: Fields) -> None:
    harmless, instead = fields.refused[name]
    if not any(_same(value, one) for one in harmless):
        raise GatewayError(f"{name}: {shown(value)} is not served here; {instead}")


def _same(value: object, other: object) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def shown(value: object) -> str:
    """A value for an error's text, shortened."""
    return repr(value[:80] if isinstance(value, str) else value)[:80]
