"""Parts of the providers of workspaces that need none: labels, bounded output, tars of strangers."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator

import pytest
from agentrl_tools.workspaces import inside, owner, tars
from agentrl_tools.workspaces.output import HeadTail

from agentrl.errors import PathError
from agentrl.workspace.archive import packed
from agentrl.workspace.workspace import FileKind


def test_whose_run_is_dead() -> None:
    mine = owner.owner()
    host, boot, namespace, pid, started = mine.split("/")
    assert not owner.is_dead(mine)
    assert owner.is_dead("/".join((host, boot, namespace, pid, f"{started}1")))
    assert owner.is_dead("/".join((host, boot, namespace, "99999999", started)))
    assert owner.is_dead("/".join((host, "another-boot", namespace, pid, started)))
    assert not owner.is_dead("/".join(("another-host", "another-boot", namespace, "99999999", started)))
    assert not owner.is_dead("/".join((host, boot, "another-namespace", "99999999", started)))
    assert not owner.is_dead("somebody's label")


def test_the_beginning_and_the_end_are_kept() -> None:
    kept = HeadTail(10, b"MARK")
    for part in (b"01", b"23456789", b"abcdefghi", b"MA", b"RK"):
        kept.add(part)
    assert kept.ended
    assert kept.data() == b"01234\n... 9 bytes left out ...\nefghi"
    short = HeadTail(10, b"MARK")
    short.add(b"0123MAR")
    assert (short.data(), short.ended, short.cut) == (b"0123MAR", False, False)


async def _pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        await asyncio.sleep(0)
        yield data[start : start + size]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
async def test_the_first_member_of_a_tar(format: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        link = tarfile.TarInfo("l" * 150)
        link.type, link.linkname = tarfile.SYMTYPE, "target/" * 30 + "end"
        tar.addfile(link)
    member = await tars.first_member(tars.Pieces(_pieces(buffer.getvalue(), 100)))
    assert (member.issym(), member.linkname) == (True, "target/" * 30 + "end")
    pieces = tars.Pieces(_pieces(packed({"/a/file": b"0123456789"}), 7))
    assert (await tars.first_member(pieces)).size == 10
    await pieces.skip(3)
    assert await pieces.take(4) == b"3456"
    with pytest.raises(ValueError, match="too early"):
        await pieces.take(1 << 20)
    for wrong in (b"", b"short", b"x" * 512):
        with pytest.raises((ValueError, tarfile.TarError)):
            await tars.first_member(tars.Pieces(_pieces(wrong, 100)))


def test_tars_are_joined_under_their_paths() -> None:
    tar = packed({"folder/one": b"1", "folder/sub/two": b"2"})
    joined = tars.joined({"/home/user/folder": tar, "/etc/file": packed({"file": b"3"}), "/": tar}, {"/x/link": "../y"})
    with tarfile.open(fileobj=io.BytesIO(joined)) as members:
        assert members.getnames() == [
            "x/link", "home/user/folder/one", "home/user/folder/sub/two", "etc/file", "folder/one", "folder/sub/two",
        ]  # fmt: skip
        assert members.getmember("x/link").linkname == "../y"


def test_a_strangers_tar_is_cleaned() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind in {"../../up": tarfile.REGTYPE, "/dev/sda": tarfile.BLKTYPE, "pipe": tarfile.FIFOTYPE}.items():
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
        link = tarfile.TarInfo("hard")
        link.type, link.linkname = tarfile.LNKTYPE, "../../../up"
        tar.addfile(link)
    with tarfile.open(fileobj=io.BytesIO(tars.cleaned(buffer.getvalue(), (7, 8)))) as members:
        assert [(m.name, m.uid, m.gid) for m in members] == [("up", 7, 8), ("hard", 7, 8)]
        assert members.getmember("hard").linkname == "up"
    for wrong in (b"no tar", b"x" * 5000, packed({"/a": bytes(1000)})[:700]):
        with pytest.raises(PathError, match="cannot be read"):
            tars.cleaned(wrong, (0, 0))


def test_a_listing_holds_what_is_an_entry() -> None:
    said = b"noise M81a4 5 ./file\nM41ed 4096 ./sub\nMa1ff 3 ./new\nline\nMzz 1 ./x\nM81a4 x ./y\nM11a4 0 ./fifo\n"
    entries = [(entry.path, entry.kind, entry.size) for entry in inside.parsed_listing(said, "M")]
    assert entries == [
        ("fifo", FileKind.OTHER, 0), ("file", FileKind.FILE, 5), ("new\nline", FileKind.LINK, 0),
        ("sub", FileKind.FOLDER, 0),
    ]  # fmt: skip
