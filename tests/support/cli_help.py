"""Commands run in this process, and what they print."""

import io
import re

import pytest
from rich.console import Console

from agentrl.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that must be refused."""
    assert main.run(arguments) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", line)
    return line


def quiet() -> Console:
    """A console that nobody sees."""
    return Console(file=io.StringIO(), width=200)
