"""Images by the hash of their pixels: taken in once, kept as PNG files, named in messages and tokens by reference.

A token of an image is a placeholder, and so equal to those of any other image. Where sequences are compared (prefix
trees, the cache of an engine) a placeholder is therefore replaced by an id of its own, which says the image and the
place in it: see `keyed`.
"""

import base64
import binascii
import hashlib
import io
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError

FOLDER = "images"
"""Of a run folder: its images, `<hash>.png`."""
MAX_PIXELS = 16_777_216
"""Pixels of an image; what claims more is not decoded."""
MAX_BYTES = 20_000_000
"""Bytes of an image's file."""

_HASH_DIGITS, _PLACE_BITS = 12, 14
MAX_TOKENS = 1 << _PLACE_BITS
"""Tokens of an image."""
_KEPT = 256  # decoded images in memory
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_SHOWN = 200_000  # bytes of a file that is put into a page


class ImageError(UserError):
    """What was given is no image that can be taken; the message says why."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The placeholders of an image: ids[start : start + tokens]."""

    start: int
    """Index of the first placeholder."""
    tokens: int
    """Number of placeholders, which is that of the image's features."""
    grid: tuple[int, int, int]
    """Patches of the image in time, height and width."""
    hash: str
    """Its sha256, 64 hexadecimal digits; see `ImageStore`."""


class ImageStore:
    """The images of a process, each once, in a folder: a temporary one until `keep_in` names a run's.

    The hash is that of the width, the height and the RGB pixels, so that a picture has one hash whatever its file is.
    """

    def __init__(self) -> None:
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._folder: Path | None = None
        self._others: list[Path] = []
        self._written: set[str] = set()
        self._short: dict[str, str] = {}
        self._decoded: OrderedDict[str, Any] = OrderedDict()

    def keep_in(self, folder: Path) -> None:
        """Write the images that come from now on into this folder, which is made with the first."""
        if self._folder is not None:
            self.look_in(self._folder)
        self._folder = folder
        self._written = set()

    def look_in(self, folder: Path) -> None:
        """Find images in this folder too."""
        if folder not in self._others:
            self._others.append(folder)

    def put(self, given: Any) -> str:
        """Return the hash of an image: a path, the bytes of a file, a `data:` URL, or a PIL image. Raises ImageError:
        it is none, is damaged, or is too large."""
        image = _decoded(given)
        key = hashlib.sha256(b"%d %d " % image.size + image.tobytes()).hexdigest()
        if self._short.setdefault(key[:_HASH_DIGITS], key) != key:
            raise ImageError("the first 12 digits of its hash are those of another image")
        self._remember(key, image)
        if key not in self._written:
            self._write(key, image)
        return key

    def holds(self, key: str) -> bool:
        """Return whether `key` is the hash of an image that came before."""
        return self._short.get(key[:_HASH_DIGITS]) == key

    def load(self, key: str) -> Any:
        """Return an image, as PIL's, RGB. Raises UserError: it is not stored here."""
        if key not in self._decoded:
            self._remember(key, _decoded(self.path(key)))
        self._decoded.move_to_end(key)
        return self._decoded[key]

    def copy(self, keys: Iterable[Any], folder: Path) -> None:
        """Copy images into `folder`, those that are not there yet; what is no hash of a stored image is left out."""
        for key in keys:
            if not (isinstance(key, str) and _HASH.fullmatch(key)) or (folder / f"{key}.png").exists():
                continue
            if (found := self._find(key)) is not None:
                folder.mkdir(parents=True, exist_ok=True)
                beside = folder / f"{key}.new"
                shutil.copyfile(found, beside)
                beside.replace(folder / f"{key}.png")

    def path(self, key: str) -> Path:
        """Return the PNG file of an image. Raises UserError: there is none."""
        if (found := self._find(key)) is not None:
            return found
        raise UserError(f"the image {key[:12]} is not stored: its run's folder {FOLDER}/ lacks {key}.png")

    def _find(self, key: str) -> Path | None:
        folders = (*([self._folder] if self._folder is not None else []), *self._others)
        return next((file for folder in folders if (file := folder / f"{key}.png").is_file()), None)

    def of_key(self, key: str) -> str:
        """Return the whole hash of which `key` is the beginning that ids hold."""
        if key not in self._short:
            for folder in (*([self._folder] if self._folder is not None else []), *self._others):
                for file in folder.glob(f"{key}*.png"):
                    self._short[key] = file.stem
        if key not in self._short:
            raise UserError(f"the image {key} is not stored")
        return self._short[key]

    def _remember(self, key: str, image: Any) -> None:
        self._decoded[key] = image
        while len(self._decoded) > _KEPT:
            self._decoded.popitem(last=False)

    def _write(self, key: str, image: Any) -> None:
        if self._folder is None:
            self._own = tempfile.TemporaryDirectory(prefix="agentrl-images-")
            self._folder = Path(self._own.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{key}.png"
        if not path.exists():
            beside = path.with_suffix(".new")
            image.save(beside, format="PNG")
            beside.replace(path)
        self._written.add(key)


STORE = ImageStore()
"""Of this process. An image never changes, so nobody needs another."""


def _decoded(given: Any) -> Any:
    """Return an image as RGB, upright, what is transparent on white. Raises ImageError."""
    from PIL import Image, ImageOps

    opened = given
    if not isinstance(given, Image.Image):
        data = _bytes(given)
        try:
            opened = Image.open(io.BytesIO(data))
        except Exception as error:  # the boundary to files of strangers
            raise ImageError("it is no image that can be read") from error
    width, height = opened.size
    if width * height > MAX_PIXELS:
        raise ImageError(f"it has {width} x {height} pixels; at most {MAX_PIXELS:,} are allowed")
    if width < 1 or height < 1:
        raise ImageError(f"it has {width} x {height} pixels")
    try:
        upright = ImageOps.exif_transpose(opened)
        if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
            clear = upright.convert("RGBA")
            white = Image.new("RGBA", clear.size, "white")
            return Image.alpha_composite(white, clear).convert("RGB")
        return upright.convert("RGB")
    except Exception as error:  # as above
        raise ImageError(f"it is damaged: {' '.join(str(error).split())[:100]}") from error


def _bytes(given: Any) -> bytes:
    """Return the bytes of an image's file. Raises ImageError."""
    if isinstance(given, bytes | bytearray | memoryview):
        data = bytes(given)
    elif isinstance(given, str) and given.startswith("data:"):
        try:
            data = base64.b64decode(given.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ImageError("its data: URL is not base64") from error
    elif isinstance(given, str) and given.startswith(("http://", "https://")):
        raise ImageError("it is an address; give a path, bytes or a PIL image")
    elif isinstance(given, str | Path):
        try:
            if Path(given).stat().st_size > MAX_BYTES:
                raise ImageError(f"its file is larger than {MAX_BYTES:,} bytes")
            data = Path(given).read_bytes()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else "no path"
            raise ImageError(f"its file {str(given)[:200]} cannot be read: {why}") from error
    else:
        raise ImageError(f"it is {type(given).__name__}; expected a path, bytes or a PIL image")
    if len(data) > MAX_BYTES:
        raise ImageError(f"its file is larger than {MAX_BYTES:,} bytes")
    return data


def is_image(part: object) -> bool:
    """Return whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def is_kept(part: Any) -> bool:
    """Return whether a part of a stored content is an image that was kept, by its hash."""
    return is_image(part) and isinstance(part.get("image"), str) and bool(_HASH.fullmatch(part["image"]))


def hashes(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the hashes of the images of stored messages, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part.get("image") for part in parts if is_image(part)]


def without_last_image(messages: Sequence[Any]) -> list[Any] | None:
    """Return messages without their last image, and in words how many a message lost; None: they hold none."""
    for at in range(len(messages) - 1, -1, -1):
        content = messages[at].get("content")
        where = [i for i, part in enumerate(content) if is_image(part)] if isinstance(content, list) else []
        if where:
            before = next((part["left_out"] for part in content if "left_out" in part), 0)
            note = {"type": "text", "text": f"\n[{before + 1} of the images left out: no room]", "left_out": before + 1}
            kept = [part for i, part in enumerate(content) if i != where[-1] and "left_out" not in part]
            return [*messages[:at], {**messages[at], "content": [*kept, note]}, *messages[at + 1 :]]
    return None


def shown(message: Any, folder: Path) -> Any:
    """Return a message for a page, its images as `data:` URLs of files in `folder`; one that is not there, or is large,
    stays a hash."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    return {**message, "content": [_shown(part, folder) if is_image(part) else part for part in content]}


def _shown(part: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    key = part.get("image")
    if not isinstance(key, str) or not _HASH.fullmatch(key):
        return part
    file = folder / f"{key}.png"
    try:
        if file.stat().st_size > _MAX_SHOWN:
            return part
        data = base64.b64encode(file.read_bytes()).decode()
    except OSError:
        return part
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def stored(message: Any) -> Any:
    """Return a message with its images in the store, by hash: `{"type": "image", "image": hash}`. Raises ImageError,
    which names the image by its place."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    parts, number = [], 0
    for part in content:
        if is_image(part):
            number += 1
            given = part.get("image") if part["type"] == "image" else part.get("image_url")
            if isinstance(given, Mapping):
                given = given.get("url")
            try:
                part = {"type": "image", "image": _stored(given)}
            except ImageError as error:
                raise ImageError(f"image {number} of a message of role {message.get('role')!r}: {error}") from error
        parts.append(part)
    return {**message, "content": parts}


def _stored(given: Any) -> str:
    return given if isinstance(given, str) and STORE.holds(given) else STORE.put(given)


Ints = npt.NDArray[np.int64]


def keyed(ids: Any, spans: Sequence[ImageSpan]) -> Ints:
    """Return ids [T] as int64, the placeholders of each image replaced by negative ids that no other image has."""
    found: Ints = np.array(ids, np.int64)
    for span in spans:
        first = int(span.hash[:_HASH_DIGITS], 16) << _PLACE_BITS
        found[span.start : span.start + span.tokens] = -1 - (first + np.arange(span.tokens, dtype=np.int64))
    return found


@dataclass(frozen=True, slots=True)
class KeyedRun:
    """Placeholders of one image that stand in a row in keyed ids."""

    start: int
    """Index of the first."""
    end: int
    """Index after the last."""
    key: str
    """The beginning of the image's hash."""
    first: int
    """Place of the first within the image."""


def runs(ids: Ints) -> list[KeyedRun]:
    """Return the images of keyed ids, each where it stands; the first or last may be cut."""
    where = np.flatnonzero(ids < 0)
    if not len(where):
        return []
    codes = -1 - ids[where]
    images, places = codes >> _PLACE_BITS, codes & (MAX_TOKENS - 1)
    new = np.flatnonzero(
        np.concatenate([[True], (np.diff(where) != 1) | (np.diff(images) != 0) | (np.diff(places) != 1)])
    )
    ends = [*new[1:].tolist(), len(where)]
    return [
        KeyedRun(int(where[a]), int(where[b - 1]) + 1, f"{int(images[a]):0{_HASH_DIGITS}x}", int(places[a]))
        for a, b in zip(new.tolist(), ends, strict=True)
    ]
