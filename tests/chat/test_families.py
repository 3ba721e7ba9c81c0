"""The families of `renderers`: chosen by proof, and their bridges and ours agree id for id."""

import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import renderers
from chat_help import CALCULATOR, NAMED, call, make_tokenizer, result, trl_templates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from renderers.base import create_renderer
from renderers.configs import config_from_name

from agentrl.chat.bridge import BridgeChat
from agentrl.chat.families import FamilyChat, known_families
from agentrl.chat.load import load_chat
from agentrl.errors import UserError

pytestmark = pytest.mark.slow

fast = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))

SERVED = [
    ("gemma4_v3", "gemma4"), ("glm4moe", "glm-4.5"), ("llama3_1", "llama-3"), ("nemotron_3_nano", "nemotron-3"),
    ("nemotron_3_super", "nemotron-3"), ("nemotron_3_ultra", "nemotron-3-ultra"),
    ("nemotron_3_5_lightning", "nemotron-3.5"), ("qwen3", "qwen3"), ("qwen3_vl", "qwen3-vl"),
    ("qwen3_5_think", "qwen3.5"), ("qwen3_6", "qwen3.6"), ("qwen3_8", "qwen3.8"),
]  # fmt: skip
BEGIN = {"gemma4_v3": "<bos>", "llama3_1": "<|begin_of_text|>"}


@functools.cache
def all_tokens() -> tuple[str, ...]:
    """The tokens that the package's own source names."""
    folder = Path(inspect.getfile(renderers)).parent
    return tuple(sorted({token for path in folder.glob("*.py") for token in NAMED.findall(path.read_text("utf-8"))}))


@functools.cache
def tokenizer_of(template: str) -> Any:
    return make_tokenizer(trl_templates()[template], all_tokens(), bos=BEGIN.get(template, "<s>"))


def load(tokenizer: Any, kind: str = "auto", model_path: str = "nowhere") -> Any:
    return load_chat(tokenizer, model_path=model_path, kind=kind, tools=[CALCULATOR])


@functools.cache
def served(template: str, family: str) -> FamilyChat:
    chat = load(tokenizer_of(template), family)
    assert isinstance(chat, FamilyChat)
    return chat


@functools.cache
def auto(template: str) -> Any:
    return load(tokenizer_of(template))


@pytest.mark.parametrize(("template", "family"), SERVED)
def test_a_family_serves_a_template_that_it_writes(template: str, family: str) -> None:
    chat = served(template, family)
    assert f"family {family} of `renderers`, proven" in chat.description
    user: Any = {"role": "user", "content": "What is 2*3?"}
    text = tokenizer_of(template).apply_chat_template(
        [user], tools=[CALCULATOR], tokenize=False, add_generation_prompt=True
    )
    assert chat.render([user], [CALCULATOR]) == tokenizer_of(template).encode(text, add_special_tokens=False)
    assert load(tokenizer_of(template)).description.startswith("family ")


HISTORIES = sorted({*dict(SERVED), "qwen3_5_nothink", "qwen3_5_nothink_training", "gemma4_v4", "glm4moe_training"})
EDGES = st.sampled_from(
    ["It is 6.", ".\n\n", "\n\nSo", "  x ", "a\n", "", "漢.", "\U0010fffd", "\U00100000\U000f0000 \ue000"]
)


@st.composite
def histories(draw: st.DrawFn) -> list[Any]:
    """Openings that hold assistant turns: plain, with a thought, with calls and their results."""
    talk: list[Any] = [{"role": "system", "content": draw(EDGES)}] if draw(st.booleans()) else []
    talk.append({"role": "user", "content": draw(EDGES) or "x"})
    for _ in range(draw(st.integers(1, 3))):
        turn: dict[str, Any] = {"role": "assistant", "content": draw(EDGES)}
        if draw(st.booleans()):
            turn["reasoning_content"] = draw(EDGES)
        count = draw(st.integers(0, 2))
        if count:
            turn["tool_calls"] = [call(i, expression=draw(EDGES)) for i in range(count)]
        results = [result(draw(EDGES), i) for i in range(count)]
        talk += [turn, *(results or [{"role": "user", "content": draw(EDGES) or "x"}])]
    return talk


@pytest.mark.parametrize("template", HISTORIES)
@given(talk=histories())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_an_opening_with_assistant_turns_is_what_the_template_writes(template: str, talk: list[Any]) -> None:
    tokenizer, chat = tokenizer_of(template), auto(template)
    try:
        text = tokenizer.apply_chat_template(talk, tools=[CALCULATOR], tokenize=False, add_generation_prompt=True)
    except TemplateError:  # of llama's: two calls in a turn
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert chat.render(talk, [CALCULATOR]) == ids
    assert chat.lengths([(talk, [CALCULATOR])]) == [len(ids)]


def test_what_writes_the_opening_is_said() -> None:
    assert "; openings as the template writes them; " in auto("qwen3").description


@pytest.mark.parametrize("template", ["qwen2_5", "lfm2_v2", "muse_glimmer", "qwen3_5_nothink", "llama3_2"])
def test_our_bridge_serves_where_no_family_is_proven(template: str) -> None:
    chat = load(tokenizer_of(template))
    assert isinstance(chat, BridgeChat)
    assert "of `renderers` would write other ids" in chat.description


def test_one_word_of_difference_is_enough_for_our_bridge(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    source = trl_templates()["qwen3"]
    fine_tuned = load(make_tokenizer(source, all_tokens()), model_path=str(tmp_path))
    assert "family qwen3 " in fine_tuned.description  # a local folder, known by its type and proven
    other = load(make_tokenizer(source.replace("# Tools", "# My tools"), all_tokens()), model_path=str(tmp_path))
    assert isinstance(other, BridgeChat)
    assert other.description.endswith("qwen3, prime-qwen3 of `renderers` would write other ids")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    unknown = load(make_tokenizer(source, all_tokens()), model_path=str(tmp_path))
    assert unknown.description.endswith("no `renderers` family is known for this model")


def test_a_family_asked_for_that_is_not_proven_is_refused() -> None:
    with pytest.raises(UserError, match="'glm-5' does not write what this model's template writes"):
        load(tokenizer_of("qwen3"), "glm-5")
    with pytest.raises(UserError, match="lacks tokens that qwen3 of `renderers` need"):
        load(make_tokenizer(trl_templates()["llama3_1"]), "qwen3")


def test_generation_config_adds_its_ends(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("gptoss")
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|return|>", "<|endoftext|>", "<|call|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert set(load(tokenizer, "bridge", str(tmp_path)).stop_ids) == set(ends)


class OwnTemplate:
    """A tokenizer whose chat template is the family's own rendering: for families whose templates are not at hand."""

    def __init__(self, tokenizer: Any, renderer: Any) -> None:
        self.tokenizer, self.renderer = tokenizer, renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(*args, **kwargs)

    def get_chat_template(self, *args: Any, **kwargs: Any) -> str:
        return " ".join(self.tokenizer.get_added_vocab())

    def apply_chat_template(self, messages: Any, tools: Any = None, **options: Any) -> str:
        try:
            ids = self.renderer.render_ids(
                messages, tools=tools, add_generation_prompt=options["add_generation_prompt"]
            )
        except (AttributeError, TypeError) as error:
            raise ValueError(str(error)) from error
        text: str = self.tokenizer.decode(ids)
        return text


ENDS = {
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), "<|endoftext|>"),
    "deepseek-r1": "<｜end▁of▁sentence｜>",
    "deepseek-v3": "<｜end▁of▁sentence｜>",
    "deepseek-v4": "<｜end▁of▁sentence｜>",
    "gemma4": "<turn|>",
    "hy3": "<｜hy_eos:opensource｜>",
    "inkling": "<|content_model_end_sampling|>",
    "laguna-s-2.1": "〈|EOS|〉",
    "laguna-xs-2.1": "〈|EOS|〉",
    "llama-3": "<|eot_id|>",
    "minimax-m2": "[e~[",
}
MORE = ["<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "｜DSML｜"]
# gpt-oss fetches its vocabulary; the two lagunas cut their texts where this tokenizer does not
BUILT = [name for name in known_families() if name not in ("gpt-oss", "laguna-m.1", "laguna-xs.2")]


@functools.cache
def own(family: str) -> tuple[Any, FamilyChat]:
    """A tokenizer with all tokens that the family asks for, and its chat."""
    tokens = [*all_tokens(), *MORE]
    for _ in range(40):
        tokenizer = make_tokenizer("", tokens, eos=ENDS.get(family, "<|im_end|>"))
        try:
            renderer = create_renderer(tokenizer, config_from_name(family))
        except AssertionError as error:
            tokens += re.findall(r"token '([^']+)'", str(error))
            continue
        tools = [] if family in ("deepseek-r1", "deepseek-v3") else [CALCULATOR]  # those two show no tools
        chat = load_chat(OwnTemplate(tokenizer, renderer), model_path="nowhere", kind=family, tools=tools)
        assert isinstance(chat, FamilyChat)
        return tokenizer, chat
    raise AssertionError(f"{family} asks for ever more tokens")


contents = st.lists(st.sampled_from(["6", "It is", " 9", "漢", '{"a": 1}', "x = 3"]), min_size=1, max_size=4).map(
    "".join
)
answers = st.one_of(
    st.lists(contents, min_size=1, max_size=2).map(lambda texts: [result(text, i) for i, text in enumerate(texts)]),
    contents.map(lambda text: [{"role": "user", "content": text}]),
)


def check_against_renderers(tokenizer: Any, chat: FamilyChat, data: st.DataObject) -> None:
    """Grow a conversation; wherever their bridge extends the same ids, it must add what ours adds."""
    family = chat._family
    ids = list(family.lead)
    for i in range(data.draw(st.integers(1, 3))):
        words = data.draw(st.sampled_from(["It is 6.", "So 2 * 3", "Völlig klar"]))
        sampled = chat.encode_text(words) + data.draw(st.sampled_from([[], *([stop] for stop in chat.stop_ids)]))
        messages: list[Any] = data.draw(answers)
        added = chat.bridge(sampled, messages)
        theirs = family.renderer.bridge_to_next_turn(ids, sampled, messages, tools=family.tools([CALCULATOR]))
        if i and family.name == "deepseek-r1" and sampled[-1] not in chat.stop_ids:
            theirs = None  # whether a thought is open hangs there on what came before the turn, which ours is not told
        if theirs is not None and theirs.token_ids[: len(ids) + len(sampled)] == ids + sampled:
            assert chat.decode(theirs.token_ids[len(ids) + len(sampled) :]) == chat.decode(added)
            assert theirs.token_ids[len(ids) + len(sampled) :] == added
        ids = [*ids, *sampled, *added]
    assert tokenizer.decode(ids)


@pytest.mark.parametrize("family", BUILT)
@given(data=st.data())
@fast
def test_our_frames_and_their_bridges_agree(family: str, data: st.DataObject) -> None:
    check_against_renderers(*own(family), data)


@pytest.mark.parametrize(("template", "family"), SERVED)
@given(data=st.data())
@fast
def test_bridges_agree_over_real_templates(template: str, family: str, data: st.DataObject) -> None:
    check_against_renderers(tokenizer_of(template), served(template, family), data)


def test_half_a_surrogate_pair_reaches_no_bridge_of_theirs() -> None:
    for name in ("glm-4.5", "qwen3"):
        chat = own(name)[1]
        for turn in (chat.encode_text("It is 6."), [5, chat.stop_ids[0]]):
            for field in ("content", "name"):
                hurt, sound = ([{**result("6"), field: f"a{half}b"}] for half in ("\ud800", "\ufffd"))
                assert chat.bridge(turn, hurt) == chat.bridge(turn, sound)


def test_frames_of_nearly_all_families_agree_so_that_they_are_fast() -> None:
    slow = {name for name in BUILT if not (own(name)[1]._family.after_stop and own(name)[1]._family.after_cut)}
    assert slow == {"glm-4.5", "glm-5", "glm-5.1", "glm-5.3"}
    assert all(own(name)[1]._family.after_stop for name in slow)  # theirs close a cut turn with <|endoftext|>


@pytest.mark.parametrize("family", sorted(set(BUILT) - {"deepseek-r1", "deepseek-v3"}))
def test_calls_are_read(family: str) -> None:
    tokenizer, chat = own(family)
    turn = {"role": "assistant", "content": "", "tool_calls": [call(0, expression="2*3")]}
    turn["tool_calls"][0]["id"] = "functions.calculator:0"
    user: Any = {"role": "user", "content": "What is 2*3?"}
    render = chat._family.renderer.render_ids
    tools = chat._family.tools([CALCULATOR])
    before = render([user], tools=tools, add_generation_prompt=True)
    after = render([user, turn], tools=tools, add_generation_prompt=False)
    start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    stop = next((i for i in range(len(after) - 1, start, -1) if after[i] in chat.stop_ids), len(after) - 1)
    parsed = chat.parse(after[start : stop + 1])
    assert [(one.name, one.arguments, one.error) for one in parsed.calls] == [
        ("calculator", {"expression": "2*3"}, None)
    ]
    assert tokenizer


def test_their_parser_serves_where_ours_does_not_know_the_format() -> None:
    tokenizer, chat = own("hy3")
    assert "its own parser" in chat.description
    turn = {"role": "assistant", "content": "", "tool_calls": [call(0, expression="2*3")]}
    user: Any = {"role": "user", "content": "x"}
    ids = chat._family.renderer.render_ids([user, turn], tools=None, add_generation_prompt=False)
    cut = ids[: ids.index(tokenizer.convert_tokens_to_ids("</tool_call:opensource>"))]
    (one,) = chat.parse(cut[cut.index(tokenizer.convert_tokens_to_ids("<tool_call:opensource>")) :]).calls
    assert one.error == "this tool call cannot be read: unclosed block"
    assert chat.parse([]).calls == ()


def test_a_key_that_stands_twice_is_an_error_for_their_parser_too() -> None:
    tokenizer, chat = own("inkling")
    assert "its own parser" in chat.description
    for more, error in (("n", None), ("a", "this tool call cannot be read: the key 'a' stands twice")):
        text = f'calculator<|content_invoke_tool_json|>{{"name":"calculator","args":{{"a":"2*3","{more}":3}}}}'
        (one,) = chat.parse(tokenizer.encode(f"{text}<|end_message|>", add_special_tokens=False)).calls
        assert (one.name, one.error) == ("calculator", error)


@given(ids=st.lists(st.integers(0, 700), max_size=30))
@fast
def test_their_parser_never_raises_here(ids: list[int]) -> None:
    for family in ("hy3", "inkling", "deepseek-v4"):
        own(family)[1].parse(ids)
