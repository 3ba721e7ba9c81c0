"""Images by the hash of their pixels: taken in once, kept as PNG files, named in messages and tokens by reference.

A token of an image is a placeholder, and so equal to those of any other image. Where sequences are compared (prefix
trees, the cache of an engine) a placeholder is therefore replaced by an id of its own, which says the image and the
place in it: see `keyed`.
"""

import base64
import binascii
import hashlib
import io
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.containment.threads import DaemonThreads
from agentrl.errors import UserError
from agentrl.jsonable import Json

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
V = TypeVar("V")

FOLDER = "images"
"""Of a run folder: its images, `<hash>.png`."""
_HASH_DIGITS, _PLACE_BITS = 12, 14
MAX_TOKENS = 1 << _PLACE_BITS
"""Tokens of an image."""
_KEPT = 256 << 20  # bytes of decoded images in memory
_KEPT_FILES = 4096  # files whose image is known by their bytes
_FIELDS = "bytes", "image", "path", "url"  # of mappings that hold an image
_ORIENTATION = 0x0112  # of Exif; from 5 on width and height are exchanged
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_SHOWN = 50_000  # bytes of a file that is put into a page as it is
_SIDE = 640  # pixels of one that is made smaller
AT_ONCE = min(8, os.cpu_count() or 1)
"""Images that are decoded at once for code of an event loop."""
_threads = DaemonThreads("agentrl-images", AT_ONCE)


async def in_image_thread(function: Callable[..., T], /, *args: object) -> T:
    """Call what decodes, resizes or hashes images in a thread, of which there are few, so that the event loop goes on
    meanwhile."""
    return await _threads.call(function, *args)


class Recent(Generic[V]):
    """Values by key: those used last, as many as take `most` bytes together, and one at least. Threads may share it; a
    copy begins empty."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.most,)

    def __iter__(self) -> Iterator[Hashable]:
        """The keys, the one that was used last at the end."""
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> V | None:
        """A value that is still there, or None."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: V, size: int) -> None:
        """Keep a value of `size` bytes, and let others go that find no room."""
        with self._lock:
            previous = self._values.pop(key, None)
            self._bytes += size - (previous[1] if previous is not None else 0)
            self._values[key] = value, size
            while self._bytes > self.most and len(self._values) > 1:
                self._bytes -= self._values.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Let all of them go."""
        with self._lock:
            self._values.clear()
            self._bytes = 0


class ImageLimits(NamedTuple):
    """What is taken in."""

    pixels: int = 16_777_216
    """The most pixels of an image; what claims more is not decoded."""
    bytes: int = 20_000_000
    """The most bytes of an image's file."""

    def check(self, width: int, height: int) -> None:
        """Raise ImageError for an image of this size."""
        if width < 1 or height < 1:
            raise ImageError(f"it has {width} x {height} pixels")
        if width * height > self.pixels:
            raise ImageError(f"it has {width} x {height} pixels; {self.most}")

    @property
    def most(self) -> str:
        """The bound of pixels in words."""
        return f"at most {self.pixels:,} are allowed (rollout.max_image_pixels)"


_STORED = ImageLimits(sys.maxsize, sys.maxsize)  # of what was taken in once


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
    Threads may share it.
    """

    def __init__(self, limits: ImageLimits | None = None) -> None:
        self.limits = limits or ImageLimits()
        """Of the images that come from now on."""
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._folder: Path | None = None
        self._others: list[Path] = []
        self._written: set[str] = set()
        self._short: dict[str, str] = {}
        self._decoded: Recent[Image] = Recent(_KEPT)
        self._files: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self._turns = [threading.Lock() for _ in range(64)]  # a file's by its hash: it is decoded once

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

    def put(self, given: object) -> str:
        """The hash of an image: a path, the bytes of a file, a `data:` URL, a PIL image, or a mapping with
        `bytes` or `path`, as data sets hold them. Raises ImageError: it is none, is damaged, or is too large."""
        given = unwrapped(given)
        if not isinstance(given, bytes):
            return self._put(_decoded(given, self.limits))
        digest = hashlib.sha256(given).digest()
        with self._turns[digest[0] % len(self._turns)]:
            key = self._files.get(digest)
            if key is None or key not in self._written:  # each sample of a task brings the same file
                key = self._put(_decoded(given, self.limits))
                with self._lock:
                    self._files[digest] = key
                    while len(self._files) > _KEPT_FILES:
                        self._files.popitem(last=False)
        return key

    def _put(self, image: "Image") -> str:
        key = hashlib.sha256(b"%d %d " % image.size + image.tobytes()).hexdigest()
        if self._short.setdefault(key[:_HASH_DIGITS], key) != key:
            raise ImageError("the first 12 digits of its hash are those of another image")
        self._decoded.put(key, image, _memory(image))
        if key not in self._written:
            self._write(key, image)
        return key

    def again(self, key: str) -> str:
        """The hash of an image that came before, which is now in the folder too."""
        if key not in self._written:
            self._write(key, self.load(key))
        return key

    def holds(self, key: str) -> bool:
        """Whether `key` is the hash of an image that came before, or lies in a folder that is looked in."""
        if self._short.get(key[:_HASH_DIGITS]) != key and _HASH.fullmatch(key) and self._find(key) is not None:
            self._short.setdefault(key[:_HASH_DIGITS], key)
        return self._short.get(key[:_HASH_DIGITS]) == key

    def load(self, key: str) -> "Image":
        """An image, as PIL's, RGB. Raises UserError: it is not stored here."""
        if (image := self._decoded.get(key)) is None:
            image = _decoded(self.path(key), _STORED)
            self._decoded.put(key, image, _memory(image))
        return image

    def copy(self, keys: Iterable[object], folder: Path) -> None:
        """Copy images into `folder`, those that are not there yet; what is no hash of a stored image is left out."""
        for key in keys:
            if not (isinstance(key, str) and _HASH.fullmatch(key)) or (folder / f"{key}.png").exists():
                continue
            if (found := self._find(key)) is not None:
                folder.mkdir(parents=True, exist_ok=True)
                beside = folder / f"{key}.new"
                shutil.copyfile(found, beside)
                replace(beside, folder / f"{key}.png")

    def path(self, key: str) -> Path:
        """The PNG file of an image. Raises UserError: there is none."""
        if (found := self._find(key)) is not None:
            return found
        raise UserError(f"the image {key[:12]} is not stored: its run's folder {FOLDER}/ lacks {key}.png")

    def _find(self, key: str) -> Path | None:
        return next((file for folder in self._folders if (file := folder / f"{key}.png").is_file()), None)

    @property
    def _folders(self) -> tuple[Path, ...]:
        return (*([self._folder] if self._folder is not None else []), *self._others)

    def of_key(self, key: str) -> str:
        """The whole hash of which `key` is the beginning that ids hold, or itself."""
        short = key[:_HASH_DIGITS]
        if short not in self._short:  # one look at a folder finds all that have come since the last
            for folder in self._folders:
                names = (file.stem for file in folder.glob("*.png"))
                self._short |= {name[:_HASH_DIGITS]: name for name in names if _HASH.fullmatch(name)}
        if short not in self._short:
            raise UserError(f"the image {short} is not stored: its run's folder {FOLDER}/ lacks {short}*.png")
        return self._short[short]

    def _write(self, key: str, image: "Image") -> None:
        with self._lock:
            if self._folder is None:
                self._own = tempfile.TemporaryDirectory(prefix="agentrl-images-")
                self._folder = Path(self._own.name)
            folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{key}.png"
        if not path.exists():
            beside = path.with_suffix(f".{threading.get_ident()}.new")
            image.save(beside, format="PNG", compress_level=1)  # 6 takes five times as long for 14 % less
            replace(beside, path)
        self._written.add(key)


STORE = ImageStore()
"""Of this process. An image never changes, so nobody needs another."""


def _memory(image: "Image") -> int:
    return 3 * int(image.width) * int(image.height)


def unwrapped(given: object) -> object:
    """What a mapping with `bytes`, `path` or `url` holds, the first that is there; anything else as it is."""
    if isinstance(given, Mapping) and not given.keys().isdisjoint(_FIELDS):
        return next((given[name] for name in _FIELDS if given.get(name) is not None), None)
    return given


class ImageSize(NamedTuple):
    """Pixels of an image that need not be decoded, upright."""

    width: int
    """Of a row."""
    height: int
    """Rows."""


def size_of(given: object) -> ImageSize:
    """The size of an image by its file's head. Raises ImageError: it is none, is too large, or its file is cut
    off or damaged, as far as checksums or its end say so: those of a PNG all, a JPEG may turn out later."""
    given = unwrapped(given)
    opened, stream = _opened(given, STORE.limits)
    if stream is not None:
        with stream:
            _check_whole(opened, stream)
    turned = "exif" in opened.info and opened.getexif().get(_ORIENTATION, 1) >= 5
    return ImageSize(*(reversed(opened.size) if turned else opened.size))


def _check_whole(opened: "Image", stream: BinaryIO) -> None:
    """Raise ImageError for a file that is not whole: by what its form says of that, else by decoding it."""
    if opened.format == "PNG":
        try:
            opened.verify()
        except Exception as error:  # the boundary to files of strangers
            raise _damaged(error) from error
        return
    stream.seek(max(0, stream.seek(0, io.SEEK_END) - 64))
    end = stream.read()
    stream.seek(0)
    if opened.format not in ("JPEG", "MPO") or b"\xff\xd9" not in end:
        _rgb(opened)


def _named(given: object) -> str:
    """The file of an image in brackets, where it is one."""
    known = isinstance(given, str | Path) and not str(given).startswith("data:")
    return f" ({str(given)[:200]})" if known else ""


def _damaged(error: Exception) -> ImageError:
    return ImageError(f"it is damaged: {' '.join(str(error).split())[:100]}")


def _opened(given: object, limits: ImageLimits) -> "tuple[Image, BinaryIO | None]":
    """An image that is not decoded yet, and the stream that it is read from. Raises ImageError."""
    from PIL import Image

    stream = None
    if isinstance(given, Image.Image):
        opened = given
    else:
        stream = _stream(given, limits.bytes)
        try:
            opened = Image.open(stream)
        except Image.DecompressionBombError as error:
            stream.close()
            raise ImageError(f"it has too many pixels; {limits.most}") from error
        except Exception as error:  # the boundary to files of strangers
            stream.close()
            raise ImageError(f"it is no image that can be read{_named(given)}") from error
    try:
        limits.check(*opened.size)
    except ImageError:
        if stream is not None:
            stream.close()
        raise
    return opened, stream


def _decoded(given: object, limits: ImageLimits) -> "Image":
    """An image as RGB, upright, what is transparent on white. Raises ImageError."""
    opened, stream = _opened(given, limits)
    with stream or nullcontext():
        return _rgb(opened)


def _rgb(opened: "Image") -> "Image":
    from PIL import Image, ImageOps

    try:
        upright = ImageOps.exif_transpose(opened)
        if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
            clear = upright.convert("RGBA")
            white = Image.new("RGBA", clear.size, "white")
            return Image.alpha_composite(white, clear).convert("RGB")
        return upright.convert("RGB")
    except Exception as error:  # as above
        raise _damaged(error) from error


def _stream(given: object, most: int) -> BinaryIO:
    """An image's file, to be read. Raises ImageError: it has more bytes than `most`, or there is none."""
    large = f"its file is larger than {most:,} bytes (rollout.max_image_bytes)"
    data = b""
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
            status = Path(given).stat()
            if not str(given):
                raise ImageError("its path is empty")
            if not stat.S_ISREG(status.st_mode):
                raise ImageError(f"{str(given)[:200]} is no file")
            if status.st_size > most:
                raise ImageError(large)
            return Path(given).open("rb")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else "no path"
            raise ImageError(f"its file {str(given)[:200]} cannot be read: {why}") from error
    else:
        raise ImageError(f"it is {type(given).__name__}; expected a path, bytes or a PIL image")
    if len(data) > most:
        raise ImageError(large)
    return io.BytesIO(data)


def data_url(key: str) -> str:
    """A stored image as a `data:` URL. Raises UserError: it is not stored here."""
    return "data:image/png;base64," + base64.b64encode(STORE.path(key).read_bytes()).decode()


def is_image(part: object) -> bool:
    """Whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def is_kept(part: Json) -> bool:
    """Whether a part of a stored content is an image that was kept, by its hash."""
    return is_image(part) and isinstance(part.get("image"), str) and bool(_HASH.fullmatch(part["image"]))


def hashes(messages: Sequence[Mapping[str, Json]]) -> list[Json]:
    """The hashes of the images of stored messages, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part.get("image") for part in parts if is_image(part)]


def check_count(messages: Sequence[Mapping[str, Json]], most: int) -> None:
    """Raise ImageError where messages hold more than `most` images."""
    if (count := len(hashes(messages))) > most:
        raise ImageError(f"the messages hold {count} images, of {most} (rollout.max_images)")


def without_last_image(messages: Sequence[Json]) -> list[Json] | None:
    """Messages without their last image, and in words how many a message lost; None: they hold none."""
    for at in range(len(messages) - 1, -1, -1):
        content = messages[at].get("content")
        where = [i for i, part in enumerate(content) if is_image(part)] if isinstance(content, list) else []
        if where:
            before = next((part["left_out"] for part in content if "left_out" in part), 0)
            note = {"type": "text", "text": f"\n[{before + 1} of the images left out: no room]", "left_out": before + 1}
            kept = [part for i, part in enumerate(content) if i != where[-1] and "left_out" not in part]
            return [*messages[:at], {**messages[at], "content": [*kept, note]}, *messages[at + 1 :]]
    return None


def shown(message: Json, folder: Path) -> Json:
    """A message for a page, its images as `data:` URLs of files in `folder`, large ones made smaller; one that
    is not there stays a hash."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    return {**message, "content": [_shown(part, folder) if is_image(part) else part for part in content]}


def _shown(part: Mapping[str, object], folder: Path) -> Mapping[str, Json]:
    key = part.get("image")
    if not isinstance(key, str) or not _HASH.fullmatch(key):
        return part
    file = folder / f"{key}.png"
    try:
        small = file.stat().st_size <= _MAX_SHOWN
        kind, data = ("png", file.read_bytes()) if small else ("jpeg", _smaller(file))
    except OSError:
        return part
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _smaller(file: Path) -> bytes:
    """An image as a JPEG file of at most _SIDE x _SIDE pixels. Raises OSError."""
    image = _decoded(file, _STORED)
    image.thumbnail((_SIDE, _SIDE))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=80)
    return buffer.getvalue()


def stored(message: Json, check: Callable[[str], object] | None = None) -> Json:
    """A message with its images in the store, by hash: `{"type": "image", "image": hash}`. check: raises
    ImageError for a hash that is not to be shown, such as `Seeing.image_tokens`. Raises ImageError, which names the
    image by its place."""

    def kept(given: object) -> str:
        key = _stored(given)
        if check is not None:
            check(key)
        return key

    return _with_images(message, kept)


async def all_stored(messages: Sequence[Json], check: Callable[[str], object] | None = None) -> list[Json]:
    """`stored` of each, whose images are decoded in threads. Raises ImageError."""
    made = (in_image_thread(stored, message, check) if hashes([message]) else None for message in messages)
    return [message if work is None else await work for message, work in zip(messages, made, strict=True)]


def sized(message: object) -> Json:
    """A message with the size of each image in its place; raises ImageError as `size_of`, named by its place.
    Nothing is decoded or kept."""
    return _with_images(message, _size)


def _with_images(message: Json, made: Callable[[object], object]) -> Json:
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    parts, number = [], 0
    for part in content:
        if is_image(part):
            number += 1
            given = part.get("image") if part["type"] == "image" else part.get("image_url")
            try:
                part = {"type": "image", "image": made(unwrapped(given))}
            except ImageError as error:
                raise ImageError(f"image {number} of a message of role {message.get('role')!r}: {error}") from error
        parts.append(part)
    return {**message, "content": parts}


def sent(message: Json) -> Json:
    """A message of the store as a client of the Chat Completions API sends it: its images as `data:` URLs."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    return {**message, "content": [sent_part(part) for part in content]}


def sent_part(part: Json) -> Json:
    """A part of a stored content as the Chat Completions API has it. Raises UserError: its image is not stored
    here."""
    return {"type": "image_url", "image_url": {"url": data_url(part["image"])}} if is_kept(part) else part


def _stored(given: object) -> str:
    return STORE.again(given) if isinstance(given, str) and STORE.holds(given) else STORE.put(given)


def _size(given: object) -> ImageSize:
    if isinstance(given, str) and STORE.holds(given):
        given = STORE.load(given)
    return size_of(given)


Ints = npt.NDArray[np.int64]


def keyed(ids: object, spans: Sequence[ImageSpan]) -> Ints:
    """Ids [T] as int64, the placeholders of each image replaced by negative ids that no other image has."""
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
    """The images of keyed ids, each where it stands; the first or last may be cut."""
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
