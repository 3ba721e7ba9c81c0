"""`terminal` in real workspaces: what a shell remembers, when a command is done, and what may go wrong with it."""

import asyncio
import re
import shutil
from contextlib import asynccontextmanager

import pytest
from agentrl_tools import screen, shell
from agentrl_tools.screen import KEPT, PIECE, TAIL, Output, clean_text
from agentrl_tools.terminal import Terminal
from workspaces import opened, session_in, used

from agentrl import ArgumentError, UserError
from agentrl.testing.hooks import require_hooks, require_schema
from agentrl.workspace.workspace import MIB

pytestmark = pytest.mark.usefixtures("bubblewrap")

SHELLS = [["bash"], ["dash"], ["busybox", "ash"]]
WAITS = "[still running, waiting for input: answer by `input`, or end it with the input C-c]"
ENDED = "[the shell ended: the next command runs in a new one, without its variables, in /home/user]"


@asynccontextmanager
async def terminal(shell=("bash",), disk=256 * MIB, **args):
    """A function from a command (or other arguments) to what the model reads."""
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    tool = Terminal(**args)
    async with opened(disk=disk) as [workspace]:
        if shell[0] != "bash":
            first = workspace.terminal

            async def another(**kwargs):
                made = await first(**kwargs)
                await made.send(f"exec {' '.join(shell)}\n".encode())
                await asyncio.sleep(0.3)
                return made

            workspace.terminal = another
        async with used(tool, workspace) as session:

            async def say(command=None, **others):
                arguments = others if command is None else {**others, "command": command}
                return (await tool.execute(session, **tool.check(arguments))).text

            say.session, say.tool, say.workspace = session, tool, workspace
            yield say


@pytest.mark.parametrize("shell", SHELLS, ids=lambda words: words[0])
async def test_what_a_shell_remembers_and_how_its_commands_end(shell):
    async with terminal(shell) as say:
        assert await say("echo one; echo two") == "one\ntwo"
        assert await say("true") == "[no output]"
        assert await say("printf partial; false") == "partial\n[exit code 1]"
        assert await say("echo $?") == "1"
        assert await say("x='a  b'; cd /usr; f() { echo f; }") == "[no output]"
        assert await say('f; echo "$x" $PWD') == "f\na  b /usr"
        assert await say("cat <<END\n  it's $((1 + 1)) \\\\ é\nEND\necho after") == "  it's 2 \\ é\nafter"
        assert (await say("no-such-program")).endswith("not found\n[exit code 127]")
        assert await say("(exit 7)") == "[exit code 7]"
        assert await say("sh -c 'kill -9 $$'") in ("Killed\n[exit code 137]", "[exit code 137]")


@pytest.mark.parametrize(
    "shell", [*SHELLS[:2], pytest.param(SHELLS[2], marks=pytest.mark.long)], ids=lambda words: words[0]
)
@pytest.mark.parametrize(
    "harm",
    [
        "PS1='$ '; PROMPT_COMMAND='echo x'; PS2=y", "echo 'unclosed", "if true; then", "cat <<END\nnever ended",
        "stty raw", "stty echo", "set -v", "alias echo=ls; unalias echo", "return 3", "exec 2>/dev/null", "IFS=/",
        "trap 'echo bye' EXIT", "printf '\\033]0;title\\007'", "umask 777; umask 022", "cd /; cd - >/dev/null", ")",
        "export PATH=/nowhere; PATH=/usr/bin:/bin", "set -u", "exec >/tmp/log; exec >/dev/tty",
        "unset HOME PATH; PATH=/bin", "&&",
    ],
)  # fmt: skip
async def test_what_a_command_leaves_behind_does_not_reach_the_next_ones(shell, harm):
    async with terminal(shell) as say:
        await say(harm)
        for word in ("hello", "again"):
            lines = (await say(f"echo {word}")).split("\n")
            assert lines[-1].removeprefix("$ ").removesuffix(" ") == word, lines


async def test_a_program_that_asks_says_what_and_is_answered():
    async with terminal() as say:
        assert await say("read -p 'Your name? ' name; echo \"<$name>\"") == f"Your name? \n{WAITS}"
        with pytest.raises(ArgumentError, match="a program is still running"):
            await say("echo")
        assert await say(input="Ann") == "Ann\n<Ann>" or await say("echo") == "[no output]"
        assert await say("cat") == WAITS
        assert await say(input="x\n") == f"x\n{WAITS}"
        assert await say(input="C-d") == "[no output]"
        with pytest.raises(ArgumentError, match="nothing is running"):
            await say(input="y")
        asked = await say("python3 -q")
        assert asked == f">>> \n{WAITS}"
        assert await say(input="6 * 7") == f"42\n>>> \n{WAITS}"
        assert await say(input="exit(3)") == "[exit code 3]"
        assert await say("cat") == WAITS
        assert (await say(input="C-c")).endswith("[exit code 130]")
        assert await say("echo on") == "on"


async def test_a_command_that_takes_too_long_ends_and_the_shell_does_not():
    async with terminal(seconds=1) as say:
        await say("x=3")
        for command in ("sleep 60", "while :; do :; done", "sh -c \"trap '' INT TERM; while :; do :; done\""):
            text = await say(f"echo begun; {command}")
            assert text.startswith("begun\n"), text
            assert text.endswith("[it ran for more than 1 seconds and was ended]")
            assert await say("echo $x") == "3"
        lost = await say("trap '' INT; while :; do :; done")
        assert lost.startswith("[the shell did not answer any more and was ended")
        assert await say("echo $x.") == "."


async def test_background_jobs_live_on_and_are_heard():
    async with terminal() as say:
        assert "begun" in await say("(sleep 0.5; echo finished >done; echo heard) & echo begun")
        await asyncio.sleep(1)
        assert "heard" in await say("cat done")
        assert "finished" in await say("cat done")


async def test_a_shell_that_ends_is_followed_by_another():
    async with terminal() as say:
        await say("x=3; cd /usr; echo kept >/home/user/file")
        for ends in ("exit 4", "exec true", "kill -9 $$", "set -e; false"):
            assert (await say(ends)).endswith(ENDED)
            assert await say("echo $x $PWD; cat file") == "/home/user\nkept"
        await say("y=4; sleep 60 &")
        assert await say(restart=True) == "[the shell was started anew]"
        assert await say("echo .$y; pgrep -x sleep") == ".\n[exit code 1]"


async def test_long_output_is_cut_in_the_middle_and_a_file_has_the_rest():
    async with terminal(output=400) as say:
        text = await say("seq 1 5000")
        assert text.startswith("1\n2\n3\n")
        assert text.endswith("\n4999\n5000")
        assert len(text) < 600
        path = re.search(r"characters are left out; all of it is in (\S+) \.\.\.\]", text)[1]
        assert await say(f"wc -l <{path}") == "5000"
        assert await say(f"sed -n 2500p {path}") == "2500"
    async with terminal(output=400, seconds=3) as say:
        await say("mkdir /tmp/output-1.txt")
        assert "characters are left out ...]" in await say("seq 1 5000")


async def test_the_file_of_megabytes_of_output_has_every_line_or_says_what_it_has_not(monkeypatch):
    many = "seq 1 1000000"
    async with terminal(seconds=100, output=400) as say:
        text = await say(many)
        assert text.endswith("\n999999\n1000000")
        shown = text[: text.index("\n[")] + text[text.index("]\n") + 1 :]
        left = 6_888_896 - len(shown) - 1  # and the ends of the first part and of the last line
        assert f"[... {left} characters are left out; all of it is in /tmp/output-1.txt ...]" in text
        assert await say(f"{many} | cmp - /tmp/output-1.txt") == "[no output]"
        monkeypatch.setattr(screen, "KEPT", 2 * PIECE)
        text = await say(many)
        missing = int(re.search(r"left out; all but (\d+) bytes of it are in /tmp/output-2\.txt \.\.\.\]", text)[1])
        assert 0 <= missing - (7_888_896 - 2 * PIECE - TAIL) < 64  # ends of lines are two characters, and a prompt
        assert f"\n[{missing} bytes are not kept]\n" in await say("grep -C1 kept /tmp/output-2.txt")
        assert await say("(head -n1; tail -n1) </tmp/output-2.txt") == "1\n1000000"
    async with terminal(seconds=100, output=400, disk=2 * PIECE) as say:
        assert "characters are left out ...]" in await say(many)
        assert await say("ls /tmp") == "[no output]"


async def test_programs_that_never_stop_printing_are_ended(monkeypatch: pytest.MonkeyPatch):
    for module in (screen, shell):  # less, for time
        monkeypatch.setattr(module, "KEPT", 8 * PIECE)
    async with terminal(seconds=100, output=200) as say:
        text = await say("yes")
        assert text.startswith("y\ny\n")
        assert text.endswith("[it printed far too much and was ended]")
        assert re.search(r"left out; all (of it is|but \d+ bytes of it are) in /tmp/output-1\.txt", text)
        ended = r"(\n?\[\d+ bytes are not kept\]\n)?\[it printed far too much and was ended\]"
        assert re.fullmatch(ended, await say("cat /dev/zero"))
        assert await say("echo on") == "on"


async def test_commands_of_any_length_and_bytes():
    async with terminal() as say:
        text = "'\"\\ $x `id` é\t" * 2500
        quoted = text.replace("'", "'\\''")
        assert await say(f"x='{quoted}'; printf %s \"$x\" | wc -c") == str(len(text.encode()))
        with pytest.raises(ArgumentError, match="100000 characters"):
            await say("x" * 100_001)
        with pytest.raises(ArgumentError, match="NUL"):
            await say("echo \0")


@pytest.mark.parametrize("arguments", [{}, {"command": "ls", "input": "x"}, {"restart": False}])
async def test_a_call_says_one_thing(arguments):
    async with terminal() as say:
        with pytest.raises(ArgumentError, match="give one of"):
            await say(**arguments)


async def test_a_call_that_is_cut_off_leaves_the_shell_usable():
    async with terminal() as say:
        await say("x=3")
        call = asyncio.create_task(say("sleep 60"))
        await asyncio.sleep(0.5)
        call.cancel()
        await asyncio.wait({call})
        assert await say("echo $x") == "3"


async def test_calls_at_the_same_time_are_run_one_after_the_other():
    async with terminal() as say:
        said = await asyncio.gather(*(say(f"sleep 0.1; echo {i}") for i in range(4)))
        assert said == ["0", "1", "2", "3"]


async def test_its_only_trace_is_what_the_commands_did():
    async with terminal() as say:
        await say("sleep 61 & sleep 62 &")
        await say("echo x >file")
        await say.workspace.end_processes()
        assert [change.path for change in await say.workspace.diff()] == ["/home/user/file"]


async def test_without_a_workspace_one_line_says_what_to_set():
    with pytest.raises(UserError, match=r"tool 'terminal' works in a workspace.*set workspace\.provider"):
        await Terminal().create(session_in(None))
    with pytest.raises(UserError, match="seconds"):
        Terminal(seconds=0)


def test_its_hooks_and_schema_keep_the_contract():
    require_hooks(Terminal(), "terminal")
    require_schema(Terminal())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x1b[1;31mred\x1b[0m\r\n", "red\n"),
        (b"10%\r20%\r100%\r\nnext", "100%\nnext"),
        (b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1b(B", "ab"),
        (b"ab\x08\x08cd", "cd"),
        (b"a\x00b\x07c\x7fd\xc2\x9be", "abcde"),
        (b"\xff" * 100 + b"x", "\ufffd\ufffd\ufffdx"),
        ("tab\té\u202e".encode(), "tab\té"),
        (b"\x1b]never closed", ""),
    ],
)
def test_what_a_terminal_would_show(data, text):
    assert clean_text(data) == text


def test_an_output_keeps_its_beginning_and_its_end_and_of_others_all():
    lines = b"".join(b"%07d\n" % i for i in range(PIECE // 8))
    with Output() as output:
        output.add(b"x" * 20 + b"\n")
        for _ in range(3):
            output.add(lines)
        pieces = list(output.pieces())
        assert b"".join(pieces) == b"x" * 20 + b"\n" + 3 * lines
        assert all(len(piece) <= PIECE and piece.endswith(b"\n") for piece in pieces)
    with Output() as output:
        output.add(b"first\n")
        for _ in range((KEPT + 3 * TAIL) // PIECE):
            output.add(lines)
        output.add(b"last")
        assert output.last == b"t"
        first, *_, told, last = output.pieces()
        assert first.startswith(b"first\n")
        assert told == b"\n[%d bytes are not kept]\n" % (output.total - KEPT - TAIL)
        assert last.endswith(b"\nlast")
