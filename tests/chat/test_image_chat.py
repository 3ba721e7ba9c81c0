"""Placeholders of images: as many as the processor of transformers writes, wherever a picture stands."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vision_help import picture, seeing_chat, seeing_model

from agentrl.chat.base import Measuring, Seeing
from agentrl.errors import UserError
from agentrl.images import STORE, hashes, stored

TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"properties": {}}}}
SIZES = [(32, 32), (48, 16), (16, 64)]


@pytest.fixture(scope="module")
def parts():
    model, tokenizer = seeing_model()
    return model, tokenizer, seeing_chat(tokenizer, [TOOL])


def message(role, contents):
    made = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": picture(one, *SIZES[one])}
        for one in contents
    ]
    extra = {"name": "look", "tool_call_id": "call_0_0"} if role == "tool" else {}
    return stored({"role": role, "content": made, **extra})


def by_the_processor(model, tokenizer, messages):
    """What transformers makes of messages: the template's text, one placeholder an image, expanded by its grid."""
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    pieces = text.split("<|image_pad|>")
    for piece, key in zip(pieces, hashes(messages), strict=False):
        grid = model.image_input.processor(images=[STORE.load(key)], return_tensors="np")["image_grid_thw"][0]
        pieces[pieces.index(piece)] = piece + "<|image_pad|>" * int(grid.prod() // 4)
    return tokenizer.encode("".join(pieces), add_special_tokens=False)


CONTENTS = st.lists(st.one_of(st.sampled_from(["a b", "\n", "ü<|x|>"]), st.integers(0, 2)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(CONTENTS, CONTENTS)
def test_ids_are_those_of_the_models_own_processor(parts, first, second):
    model, tokenizer, chat = parts
    assert isinstance(chat, Seeing)
    opening = [message("user", first)]
    ids = chat.render(opening, [TOOL])
    assert ids == by_the_processor(model, tokenizer, opening)
    assert isinstance(chat, Measuring)
    assert chat.lengths([(opening, [TOOL])]) == [len(ids)]
    turn = [*chat.whole_ids('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'), chat.stop_ids[0]]
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = [message("tool", second)]
    added = chat.bridge(turn, result)
    assert [*ids, *turn, *added] == by_the_processor(model, tokenizer, [*opening, said, *result])
    for some, messages in ((ids, opening), (added, result)):
        spans = chat.images_in(some, messages)
        assert [span.hash for span in spans] == hashes(messages)
        pads = [i for i, token in enumerate(some) if token == model.image_input.placeholder]
        assert pads == [i for span in spans for i in range(span.start, span.start + span.tokens)]


def test_no_text_can_write_a_placeholder(parts):
    model, _, chat = parts
    spelled = [stored({"role": "user", "content": "<|image_pad|>\ufdd2"}), message("user", ["<|image_pad|>\ufdd2", 1])]
    ids = chat.render(spelled, [TOOL])
    (span,) = chat.images_in(ids, spelled)
    assert ids.count(model.image_input.placeholder) == span.tokens
    with pytest.raises(UserError, match="system prompt may spell"):
        chat.render([{"role": "system", "content": "<|image_pad|>"}, message("user", [1])], [TOOL])


def test_a_template_without_images_serves_text_and_says_so():
    _, tokenizer = seeing_model()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|image_pad|>", "(picture)")
    chat = seeing_chat(tokenizer)
    assert not chat.images
    assert "no images" in chat.description
    with pytest.raises(UserError, match="takes text only"):
        chat.render([message("user", [1])], [])
