"""`Job`: one thing to do with files, how it is done, how it is done badly, and by what it is judged."""

from collections.abc import Mapping
from dataclasses import dataclass, field

NOTHING = "[no output]"
"""What the tool `terminal` tells of a command that prints nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and what the tool `terminal` tells of it."""

    command: str
    """For the shell."""
    told: str = NOTHING
    """Exactly what is printed, without the last end of line."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """A command that the grader runs in a fresh workspace, which has the captured paths."""

    command: str
    """For `sh`, in the home folder."""
    expected: str
    """What it must print, but for spaces at its end."""


@dataclass(frozen=True, slots=True)
class Job:
    """Paths are relative to the home folder."""

    instruction: str
    """What is asked for."""
    files: Mapping[str, str]
    """What is there at the beginning."""
    goal: Mapping[str, tuple[str, ...] | None]
    """What must stand at a path at the end, any of several texts but for spaces at their end; None: nothing."""
    steps: tuple[Step, ...]
    """How it is done."""
    wrong: tuple[Step, ...]
    """Commands that do not do it, each in place of the last step."""
    setup: str = ""
    """A script for `sh` that makes the rest of the state."""
    captured: tuple[str, ...] = ()
    """Paths that a fresh workspace gets for the hidden commands."""
    hidden: tuple[Hidden, ...] = field(default=())
    """What is tried there."""
