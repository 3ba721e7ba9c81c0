"""Placeholders of images: as many as the processor of transformers writes, wherever a picture stands."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
from chat_help import CALCULATOR, call, make_tokenizer, trl_templates
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from vision_help import picture, seeing_chat, seeing_model, template

from agentrl.chat.base import Measuring, Seeing
from agentrl.errors import UserError
from agentrl.images import STORE, hashes, stored

TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"properties": {}}}}
SIZES = [(32, 32), (48, 16), (16, 64)]


TEMPLATES = {
    "tiny": template(),
    "qwen2_5_vl": (ROOT / "recipes" / "qwen2_5_vl_template.jinja").read_text(encoding="utf-8"),
    "qwen3_vl": trl_templates()["qwen3_vl"],
    "gemma4": trl_templates()["gemma4_v5"],
}
GEMMAS_TOKENS = ("<|image>", "<|image|>", "<image|>", "<|audio|>", "<|video|>")
TOKENS = ("<|im_end|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def made_tokenizer(template, *more):
    """A tokenizer of this template, with the image processor of the small model of its type."""
    gemma = "<|image|>" in template
    tokenizer = make_tokenizer(template, [*TOKENS, *GEMMAS_TOKENS, *more], bos="<bos>" if gemma else "<s>")
    id_of = tokenizer.convert_tokens_to_ids
    image_input = seeing_model("gemma4" if gemma else "qwen3_vl")[0].image_input
    if gemma:
        tokenizer.image_input = replace(
            image_input, placeholder=id_of("<|image|>"), ends=([id_of("<|image>")], [id_of("<image|>")])
        )
    else:
        tokenizer.image_input = replace(image_input, placeholder=id_of("<|image_pad|>"))
    return tokenizer


@pytest.fixture(scope="module", params=TEMPLATES)
def parts(request):
    tokenizer = made_tokenizer(TEMPLATES[request.param])
    return tokenizer.image_input, tokenizer, seeing_chat(tokenizer, [TOOL])


def message(role, contents):
    made = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": picture(one, *SIZES[one])}
        for one in contents
    ]
    extra = {"name": "look", "tool_call_id": "call_0_0"} if role == "tool" else {}
    return stored({"role": role, "content": made, **extra})


def by_the_processor(image_input, tokenizer, messages):
    """What transformers makes of messages: the template's text, one placeholder an image, expanded by its grid."""
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    placeholder = tokenizer.convert_ids_to_tokens(image_input.placeholder)
    first, *others = text.split(placeholder)
    for piece, key in zip(others, hashes(messages), strict=True):
        made = image_input.processor(images=[STORE.load(key)], return_tensors="np")
        if "num_soft_tokens_per_image" in made:
            written = "<|image>" + placeholder * int(made["num_soft_tokens_per_image"][0]) + "<image|>"
        else:
            written = placeholder * int(made["image_grid_thw"][0].prod() // 4)
        first += written + piece
    return tokenizer.encode(first, add_special_tokens=False)


CALLS = {
    3: '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
    1: "<|tool_call>call:look{}<tool_call|><|tool_response>",
}
"""By the axes of positions: what Qwen writes, and Gemma."""
CONTENTS = st.lists(st.one_of(st.sampled_from(["a b", "\n", "ü<|x|>"]), st.integers(0, 2)), min_size=1, max_size=5)


@pytest.mark.quick_cases(1)
@settings(max_examples=40, deadline=None)
@given(CONTENTS, CONTENTS)
def test_ids_are_those_of_the_models_own_processor(parts, first, second):
    image_input, tokenizer, chat = parts
    assert isinstance(chat, Seeing)
    opening = [message("user", first)]
    ids = chat.render(opening, [TOOL])
    assert ids == by_the_processor(image_input, tokenizer, opening)
    assert isinstance(chat, Measuring)
    assert chat.lengths([(opening, [TOOL])]) == [len(ids)]
    turn = chat.whole_ids(CALLS[image_input.family.axes])
    turn += [] if turn[-1] in chat.stop_ids else chat.stop_ids[:1]
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = [message("tool", second)]
    added = chat.bridge(turn, result)
    assert [*ids, *turn, *added] == by_the_processor(image_input, tokenizer, [*opening, said, *result])
    for some, messages in ((ids, opening), (added, result)):
        spans = chat.images_in(some, messages)
        assert [span.hash for span in spans] == hashes(messages)
        pads = [i for i, token in enumerate(some) if token == image_input.placeholder]
        assert pads == [i for span in spans for i in range(span.start, span.start + span.tokens)]


def test_no_text_can_write_a_placeholder(parts):
    image_input, _, chat = parts
    pad = chat.decode([image_input.placeholder])
    spelled = [stored({"role": "user", "content": f"{pad}\ufdd2"}), message("user", [f"{pad}\ufdd2", 1])]
    ids = chat.render(spelled, [TOOL])
    (span,) = chat.images_in(ids, spelled)
    assert ids.count(image_input.placeholder) == span.tokens
    with pytest.raises(UserError, match="system prompt may spell"):
        chat.render([{"role": "system", "content": pad}, message("user", [1])], [TOOL])


def test_a_prompt_as_it_stands_holds_no_image(parts):
    chat = parts[2]
    ids = chat.render([message("user", ["see", 1])], [TOOL])
    for prompt in (ids, chat.decode(ids)):
        with pytest.raises(UserError, match="prompt: it holds a placeholder of an image"):
            chat.encode_prompt(prompt)


def test_a_template_without_images_serves_text_and_says_so():
    _, tokenizer = seeing_model()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|image_pad|>", "(picture)")
    chat = seeing_chat(tokenizer)
    assert not chat.images
    assert "no images" in chat.description
    with pytest.raises(UserError, match="takes text only"):
        chat.render([message("user", [1])], [])


@pytest.mark.parametrize(
    ("kind", "name"), [("qwen3_vl", "qwen3_vl.Qwen3VLRenderer"), ("gemma4", "gemma4.Gemma4Renderer")]
)
def test_a_renderers_family_writes_the_same_ids(kind, name):
    tokenizer = made_tokenizer(TEMPLATES[kind], "</think>", "<eos>")
    chat = seeing_chat(tokenizer, [CALCULATOR])
    module, _, renderer = name.partition(".")
    witness = getattr(import_module(f"renderers.{module}"), renderer)(
        tokenizer, processor=SimpleNamespace(image_processor=tokenizer.image_input.processor)
    )
    talk = [
        message("user", ["a", 0, "b", 1]),
        {"role": "assistant", "content": "Look.", "tool_calls": [call(0, expression="1")]},
        {**message("tool", ["c", 2, 0]), "name": "calculator", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "So."},
        message("user", [1]),
    ]
    for messages in (talk[:1], talk[:3], talk):
        given = [{**one, "content": _loaded(one["content"])} for one in messages]
        wanted = witness.render_ids(given, tools=[CALCULATOR], add_generation_prompt=True)
        assert chat.render(messages, [CALCULATOR]) == wanted


def _loaded(content):
    if isinstance(content, str):
        return content
    return [{**part, "image": STORE.load(part["image"])} if part["type"] == "image" else part for part in content]


def test_the_template_for_qwen2_5_vl_writes_what_its_own_writes_where_there_are_no_tools():
    ours, own = made_tokenizer(TEMPLATES["qwen2_5_vl"]), made_tokenizer(trl_templates()["qwen2_5_vl"])
    said = {"role": "assistant", "content": "So."}
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        talk = [*system, message("user", ["a", 0, "b", 1]), said, message("user", [2]), said]
        for n in range(len(system) + 1, len(talk) + 1):
            for generate in (False, True):
                asked = {"tokenize": False, "add_generation_prompt": generate}
                assert ours.apply_chat_template(talk[:n], **asked) == own.apply_chat_template(talk[:n], **asked)
    assert seeing_chat(own).images
    with pytest.raises(UserError, match=r"does not show the model the tools look.*chat_template"):
        seeing_chat(own, [TOOL])
