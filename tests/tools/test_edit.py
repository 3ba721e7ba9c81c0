"""`edit` and `files` in a real workspace: what they show, what they change, and errors that a model can act on."""

from contextlib import asynccontextmanager

import pytest
from agentrl_tools.edit import MAX_FILE, Edit
from agentrl_tools.files import Files
from workspaces import opened, session_in, used

from agentrl import ArgumentError, UserError
from agentrl.testing.hooks import require_hooks, require_schema

pytestmark = pytest.mark.usefixtures("bubblewrap")
POEM = b"one\n  two\nthree\n  two\nfive\n"


@asynccontextmanager
async def calling(tool):
    async with opened() as [workspace], used(tool, workspace) as session:

        async def say(command, **arguments):
            return (await tool.execute(session, **tool.check({"command": command, **arguments}))).text

        say.workspace = workspace
        yield say


async def test_a_view_numbers_lines_and_takes_a_range():
    async with calling(Edit(output=200)) as say:
        await say.workspace.write("poem", POEM)
        assert (
            await say("view", path="poem") == "     1\tone\n     2\t  two\n     3\tthree\n     4\t  two\n     5\tfive"
        )
        assert await say("view", path="/home/user/poem", view_range=[4, -1]) == "     4\t  two\n     5\tfive"
        assert await say("view", path="poem", view_range=[2, 2]) == "     2\t  two"
        await say.workspace.write("long", b"".join(b"%d\n" % i for i in range(500)))
        text = await say("view", path="long")
        left = 500 - sum("\t" in line for line in text.split("\n"))
        assert f"[... {left} lines are left out: view them by `view_range` ...]" in text
        assert text.endswith("   500\t499")
        for wrong in ([0, 2], [3, 2], [6, 9]):
            with pytest.raises(ArgumentError, match="view_range"):
                await say("view", path="poem", view_range=wrong)


async def test_a_view_of_a_folder_lists_two_levels_without_what_is_hidden():
    async with calling(Edit()) as say:
        for path in ("a/b/c/d", "a/e", ".git/config", "f"):
            await say.workspace.write(path, b"")
        assert await say("view", path=".") == "a/\na/b/\na/e\nf"
        with pytest.raises(ArgumentError, match="nowhere"):
            await say("view", path="nowhere")


async def test_a_replacement_shows_the_lines_around_it():
    async with calling(Edit()) as say:
        await say.workspace.write("poem", POEM)
        text = await say("str_replace", path="poem", old_str="three\n", new_str="3\n3\n")
        assert text == "poem is changed. It now reads:\n" + "\n".join(
            f"{i:6}\t{line}" for i, line in enumerate(["one", "  two", "3", "3", "  two", "five"], 1)
        )
        assert await say.workspace.read("poem") == POEM.replace(b"three\n", b"3\n3\n")
        await say("str_replace", path="poem", old_str="3\n3\n")
        assert await say.workspace.read("poem") == POEM.replace(b"three\n", b"")


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ("two", r"more than once, at lines 2, 4: add lines around it"),
        ("thrree\n", r"is not in poem; the nearest lines are\n     3\tthree"),
        ("\ttwo\nthree", r"the nearest lines are\n     2\t  two\n     3\tthree"),
        ("quite another thing", "nothing in it is like that"),
        ("", "is empty"),
    ],
)
async def test_a_text_that_is_not_there_once_is_answered_by_what_to_do(old, message):
    async with calling(Edit()) as say:
        await say.workspace.write("poem", POEM)
        with pytest.raises(ArgumentError, match=message):
            await say("str_replace", path="poem", old_str=old, new_str="x")
        assert await say.workspace.read("poem") == POEM


async def test_lines_are_inserted_after_a_line():
    async with calling(Edit()) as say:
        await say.workspace.write("poem", b"one\ntwo")
        await say("insert", path="poem", insert_line=0, new_str="zero\n")
        await say("insert", path="poem", insert_line=3, new_str="three")
        assert await say.workspace.read("poem") == b"zero\none\ntwo\nthree"
        with pytest.raises(ArgumentError, match="insert_line is 9, and poem has 4 lines"):
            await say("insert", path="poem", insert_line=9, new_str="x")
        with pytest.raises(ArgumentError, match="`insert` needs `new_str`"):
            await say("insert", path="poem", insert_line=1)


async def test_changes_are_undone_one_by_one_and_a_new_file_is_removed():
    async with calling(Edit()) as say:
        await say("create", path="new/file", file_text="a\n")
        await say("str_replace", path="new/file", old_str="a", new_str="b")
        await say("create", path="/home/user/new/file", file_text="c\n")
        for expected in (b"b\n", b"a\n"):
            await say("undo", path="new/file")
            assert await say.workspace.read("new/file") == expected
        assert await say("undo", path="new/file") == "new/file is removed again"
        assert await say.workspace.listing("new") == []
        with pytest.raises(ArgumentError, match="no change of new/file to undo"):
            await say("undo", path="new/file")


async def test_ends_of_lines_are_kept_and_what_is_no_text_is_refused():
    async with calling(Edit()) as say:
        await say.workspace.write("dos", b"a\r\nb\r\n")
        await say("str_replace", path="dos", old_str="a\nb", new_str="a\nc")
        assert await say.workspace.read("dos") == b"a\r\nc\r\n"
        await say.workspace.write("binary", b"a\xff")
        with pytest.raises(ArgumentError, match="byte 1 is not UTF-8"):
            await say("view", path="binary")
        await say.workspace.write("huge", b"x" * (MAX_FILE + 1))
        for change in (
            {"command": "str_replace", "old_str": "x", "new_str": "y"},
            {"command": "create", "file_text": ""},
        ):
            with pytest.raises(ArgumentError, match="huge has more than 1048576 bytes: too large to edit"):
                await say(path="huge", **change)
        assert len(await say.workspace.read("huge")) == MAX_FILE + 1
        largest = b"x" * MAX_FILE
        await say.workspace.write("large", largest)
        await say("create", path="large", file_text="")
        await say("undo", path="large")
        assert await say.workspace.read("large") == largest
        with pytest.raises(ArgumentError, match="NUL"):
            await say("view", path="a\0")


async def test_files_are_listed_read_written_and_searched():
    async with calling(Files(output=300)) as say:
        for path, text in {"a.txt": "lime\nplum\n", "sub/b.txt": "no\na lime\n", "sub/c.md": "lime"}.items():
            assert await say("write", path=path, text=text) == f"{path} is written"
        assert await say("list") == "a.txt\nsub/"
        assert await say("read", path="sub/b.txt") == "no\na lime\n"
        assert await say("search", glob="*.txt") == "a.txt\nsub/b.txt"
        assert await say("search", text="lime", glob="*.txt") == "a.txt:1: lime\nsub/b.txt:2: a lime"
        assert await say("search", text="lime", glob="sub/*") == "sub/b.txt:2: a lime\nsub/c.md:1: lime"
        assert await say("search", text="lime", path="sub", glob="*.md") == "c.md:1: lime"
        assert await say("search", text="nowhere") == "[nothing]"
        await say("write", path="long", text="line\n" * 500)
        assert "characters are left out ...]" in await say("read", path="long")
        with pytest.raises(ArgumentError, match="`write` needs `text`"):
            await say("write", path="x")
        with pytest.raises(ArgumentError, match="none"):
            await say("read", path="none")


@pytest.mark.parametrize("tool", [Edit(), Files()], ids=lambda tool: tool.name)
async def test_they_keep_the_contract_and_need_a_workspace(tool):
    require_hooks(tool, tool.name)
    require_schema(tool)
    with pytest.raises(UserError, match=r"set workspace\.provider"):
        await tool.create(session_in(None))
