"""Images of the store: one hash a picture, limits, damage, and ids that say which image and place they are."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vision_help import picture

from agentrl.errors import UserError
from agentrl.images import ImageError, ImageSpan, ImageStore, keyed, runs, shown, stored, without_last_image


def png(image, form="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, format=form)
    return buffer.getvalue()


def test_a_picture_has_one_hash_however_it_comes(tmp_path):
    image, store = picture(1, 20, 10), ImageStore()
    store.keep_in(tmp_path / "images")
    (tmp_path / "a.png").write_bytes(png(image))
    url = "data:image/bmp;base64," + base64.b64encode(png(image, "BMP")).decode()
    keys = {store.put(one) for one in (image, png(image), url, str(tmp_path / "a.png"), image.convert("RGBA"))}
    assert len(keys) == 1
    assert [file.stem for file in (tmp_path / "images").iterdir()] == list(keys)
    later = ImageStore()
    later.look_in(tmp_path / "images")
    (key,) = keys
    assert later.of_key(key[:12]) == key
    assert np.array_equal(np.array(later.load(key)), np.array(image))
    assert store.put(picture(2)) != key


def test_what_is_moved_to_another_run_is_found_again(tmp_path):
    store = ImageStore()
    before = store.put(picture(1))
    store.keep_in(tmp_path / "one")
    store.keep_in(tmp_path / "two")
    assert store.path(before).exists()
    assert store.path(store.put(picture(1))).parent == tmp_path / "two"


def _bomb():
    data = bytearray(png(Image.new("RGB", (1, 1))))
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    return bytes(data)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (b"", "no image"),
        (b"no image at all", "no image"),
        (png(picture(3))[:200], "damaged"),
        (_bomb(), "60000 x 60000 pixels|no image"),
        ("/no/such/file.png", "No such file"),
        ("http://example.org/a.png", "address"),
        ("data:image/png;base64,??", "not base64"),
        ({"a": 1}, "dict"),
        (Image.new("1", (5000, 5000)), "5000 x 5000 pixels"),
        (b"\0" * 20_000_001, "20,000,000 bytes"),
    ],
)
def test_what_is_no_image_is_refused_in_words(given, why):
    with pytest.raises(ImageError, match=why):
        ImageStore().put(given)


def test_an_error_in_a_message_says_which_image():
    parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "a"}, {"type": "image", "image": b"x"}]
    with pytest.raises(ImageError, match="image 2 of a message of role 'user'"):
        stored({"role": "user", "content": parts})


def test_messages_hold_hashes_and_the_page_gets_pictures(tmp_path):
    plain = {"role": "user", "content": "text"}
    assert stored(plain) is plain
    url = "data:image/png;base64," + base64.b64encode(png(picture(1))).decode()
    once = stored({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
    assert stored(once) == once
    assert len(once["content"][0]["image"]) == 64
    assert shown(once, tmp_path) == once, "its file is not there"
    (tmp_path / f"{once['content'][0]['image']}.png").write_bytes(png(picture(1)))
    assert shown(once, tmp_path)["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    evil = {"role": "user", "content": [{"type": "image", "image": "../../etc/passwd"}]}
    assert shown(evil, tmp_path) == evil
    (left,) = without_last_image([once])
    assert "left out" in left["content"][0]["text"]
    assert without_last_image([left]) is None


def test_an_unknown_image_is_one_line():
    with pytest.raises(UserError, match="not stored"):
        ImageStore().path("0" * 64)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 30)), max_size=6))
def test_keyed_ids_say_image_and_place(parts):
    ids, spans = [], []
    for text, image, tokens in parts:
        ids += [5] * text
        spans.append(ImageSpan(len(ids), tokens, (1, 2, 2 * tokens), f"{image:x}" * 64))
        ids += [9] * tokens
    found = keyed(ids, spans)
    assert [(run.start, run.end, run.key, run.first) for run in runs(found)] == [
        (s.start, s.start + s.tokens, s.hash[:12], 0) for s in spans
    ]
    assert (found >= 0).sum() == sum(text for text, _, _ in parts)
    for low in range(0, len(ids), 7):  # a chunk of a prompt cuts images
        for run in runs(found[low : low + 7]):
            span = next(s for s in spans if s.start <= low + run.start < s.start + s.tokens)
            assert run.first == low + run.start - span.start
