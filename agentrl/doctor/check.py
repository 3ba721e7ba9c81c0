"""`Check` and `Finding`: what is tried on a machine, and what came of it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from agentrl.errors import PlainError, describe
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from agentrl.doctor.subject import Subject


class Status(StrEnum):
    """What came of a check."""

    OK = "ok"
    FAILED = "failed"
    ABSENT = "not here"
    """What the check needs is not on this machine, or the recipe does without; no failure."""


class NotHereError(PlainError):
    """What the check needs is not here: the line says what."""


class CheckError(PlainError):
    """The check failed: the line says how. remedy: replaces that of the check."""

    def __init__(self, line: str, remedy: str | None = None) -> None:
        super().__init__(line)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to try."""

    name: str
    """Name of the check, unique."""
    tries: str
    """What is tried, in a few words."""
    run: "Callable[[Subject], str]"
    """What was measured, in a line. Raises NotHereError, CheckError, or whatever the part under test raises."""
    remedy: str
    """Which key or package to change where it fails."""
    seconds: float = 120.0
    """Time limit; a check that takes longer is ended, and has failed."""
    needs: tuple[str, ...] = ()
    """Checks without which this one says nothing: where one of them failed it is left out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one check."""

    name: str
    """Name of the check."""
    tries: str
    """What was tried, in a few words."""
    status: Status
    """How the check ended."""
    figure: str
    """What was measured; where the check failed, how; where it was left out, why."""
    remedy: str = ""
    """What to do; empty unless it failed."""
    seconds: float = 0.0
    """Time that it took."""
    log: str = ""
    """Last lines that its process wrote; empty unless it failed."""

    def written(self) -> dict[str, Json]:
        """It as JSON values."""
        return asdict(self)

    @classmethod
    def read(cls, values: Mapping[str, Json]) -> "Finding":
        """The inverse of `written`."""
        return cls(**{**values, "status": Status(values["status"])})


def perform(check: Check, subject: "Subject") -> Finding:
    """Run a check. The boundary of all that it may raise, `SystemExit` included; Ctrl-C goes through."""
    try:
        return Finding(check.name, check.tries, Status.OK, check.run(subject))
    except NotHereError as error:
        return Finding(check.name, check.tries, Status.ABSENT, str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a part under test raises is what the check has found
        remedy = getattr(error, "remedy", None) or check.remedy
        return Finding(check.name, check.tries, Status.FAILED, describe(error), remedy)
