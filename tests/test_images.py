"""Images of the store: one hash a picture, limits, damage, and ids that say which image and place they are."""

import asyncio
import base64
import copy
import io
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vision_help import BROKEN, file_of, picture

from agentrl import images
from agentrl.errors import UserError
from agentrl.images import (
    STORE,
    ImageError,
    ImageLimits,
    ImageSpan,
    ImageStore,
    Recent,
    hashes,
    keyed,
    runs,
    shown,
    size_of,
    stored,
    without_last_image,
)


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


def test_limits_are_those_that_the_run_sets(tmp_path):
    store, small = ImageStore(ImageLimits(pixels=200, bytes=10_000)), picture(1, 20, 10)
    store.keep_in(tmp_path)
    key = store.put(small)
    with pytest.raises(ImageError, match=r"21 x 10 pixels; at most 200 .*rollout\.max_image_pixels"):
        store.put(picture(1, 21, 10))
    with pytest.raises(ImageError, match=r"larger than 10,000 bytes \(rollout\.max_image_bytes"):
        store.put(b"\0" * 10_001)
    later = ImageStore(ImageLimits(pixels=1, bytes=1))
    later.look_in(tmp_path)
    assert later.load(key).size == (20, 10), "what was taken in is read"


def turned(image, seconds):
    exif = image.getexif()
    exif[0x0112] = seconds
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "made",
    [
        picture(1, 20, 10), png(picture(1, 20, 10)), png(picture(1, 20, 10), "JPEG"), png(picture(1, 20, 10), "WEBP"),
        png(picture(1, 20, 10), "GIF"), turned(picture(1, 10, 20), 6), turned(picture(1, 20, 10), 3),
        {"bytes": png(picture(1, 20, 10)), "path": None},
    ],
)  # fmt: skip
def test_the_size_of_an_image_is_known_without_decoding_it(made):
    store = ImageStore()
    assert size_of(made) == store.load(store.put(made)).size == (20, 10)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_files_that_are_cut_off_are_found_without_decoding_them(form, tmp_path):
    data = png(picture(1, 200, 100), form)
    for part in (0.02, 0.3, 0.9, 0.99):
        (tmp_path / "a").write_bytes(data[: int(len(data) * part)])
        for one in (data[: int(len(data) * part)], tmp_path / "a"):
            with pytest.raises(ImageError, match=r"damaged|no image"):
                size_of(one)
    (tmp_path / "a").write_bytes(data)
    assert size_of(tmp_path / "a") == (200, 100)


def test_one_bit_of_a_png_is_enough():
    data = bytearray(png(picture(1, 200, 100)))
    data[len(data) // 2] ^= 1
    with pytest.raises(ImageError, match="damaged"):
        size_of(bytes(data))


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_shown_is_known_before_it_is_decoded(kind):
    if kind == "line":
        assert size_of(BROKEN[kind]) == (1, 1000), "it is the model that does not take it"
        return
    with pytest.raises(ImageError) as first:
        size_of(BROKEN[kind])
    with pytest.raises(ImageError) as second:
        ImageStore().put(BROKEN[kind])
    assert "damaged" in str(first.value) or str(first.value) == str(second.value)


def test_decoded_images_are_bounded_by_their_bytes(monkeypatch):
    monkeypatch.setattr("agentrl.images._KEPT", 3 * 20 * 10 * 3)
    store = ImageStore()
    keys = [store.put(picture(seed, 20, 10)) for seed in range(6)]
    assert list(store._decoded) == keys[-3:]
    assert np.array_equal(np.array(store.load(keys[0])), np.array(picture(0, 20, 10)))
    assert len(store._decoded) == 3
    large = store.put(picture(9, 100, 100))
    assert list(store._decoded) == [large]


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
    large = stored({"role": "user", "content": [{"type": "image", "image": picture(3, 900, 300)}]})
    STORE.copy(hashes([large]), tmp_path)
    url = shown(large, tmp_path)["content"][0]["image_url"]["url"]
    assert Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,")))).size == (640, 213)
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


async def test_images_are_decoded_beside_the_event_loop_a_few_at_once_and_each_file_once(monkeypatch):
    files = [file_of(picture(seed, 30, 20)) for seed in range(100, 105)]
    store, right = ImageStore(), images._decoded
    wanted = [ImageStore().put(file) for file in files]
    running, most, decoded, threads = 0, 0, [], set()
    lock = threading.Lock()

    def watched(given, limits):
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
            decoded.append(given)
            threads.add(threading.current_thread())
        try:
            return right(given, limits)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(images, "_decoded", watched)
    found = await asyncio.gather(*(images.in_image_thread(store.put, files[i % 5]) for i in range(200)))
    assert found == [wanted[i % 5] for i in range(200)]
    assert sorted(decoded) == sorted(files)
    assert 1 <= most <= images.AT_ONCE
    assert threading.main_thread() not in threads
    assert all(store.load(key).size == (30, 20) for key in wanted)


def test_values_that_were_used_last_are_kept_up_to_their_bytes():
    kept = Recent(10)
    for key in "abc":
        kept.put(key, key.upper(), 4)
    assert list(kept) == ["b", "c"]
    assert (kept.get("b"), kept.get("a")) == ("B", None)
    kept.put("d", "D", 3)
    assert list(kept) == ["b", "d"]
    kept.put("e", "E", 99)
    assert list(kept) == ["e"], "one at least"
    kept.put("e", "other", 1)
    kept.put("f", "F", 9)
    assert [kept.get(key) for key in kept] == ["other", "F"]
    assert list(copy.deepcopy(kept)) == []
    kept.clear()
    kept.put("g", "G", 10)
    assert list(kept) == ["g"]
