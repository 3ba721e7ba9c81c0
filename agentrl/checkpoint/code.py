"""What code a run or an evaluation was made with: versions, and the commits of the source trees in use."""

import json
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import agentrl
from agentrl.plugins.types import Json

CODE = "code.jsonl"
"""A line for each start of a run whose code differs from that of the start before."""
PACKAGES = ("torch", "transformers", "ray", "sglang", "vllm")
_PATIENCE = 5.0  # seconds for git
_LONGEST = 1_000_000  # characters of the file that are read


def code_state(here: Path | None = None) -> dict[str, Json]:
    """Versions of Python, agentrl and PACKAGES, and the commit of each source tree: `agentrl_commit` of agentrl where
    it runs from one, `commit` of the one around `here` (default: the working directory). A commit ends with `+` where
    tracked files were changed."""
    found: dict[str, Json] = {"agentrl": agentrl.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError, ValueError):
            found[name] = version(name)
    own = Path(agentrl.__file__).parent.parent
    for key, folder in (("agentrl_commit", own), ("commit", here or Path.cwd())):
        if (commit := _commit(folder)) is not None:
            found[key] = commit
    return found


def _commit(folder: Path) -> str | None:
    """The commit that is checked out around a folder; None: there is none, or git does not say so in time."""
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return None
    told = []
    for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=_PATIENCE, check=True, text=True, errors="replace"
            )
        except (OSError, subprocess.SubprocessError):
            break
        told.append(done.stdout.strip())
    return None if not told else told[0][:12] + ("+" if told[1:] and told[1] else "")


def record_code(folder: Path) -> None:
    """Append the state of the code to a folder's CODE, where it differs from the last one there. Raises OSError."""
    state = code_state()
    if state != read_code(folder):
        with (folder / CODE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(state) + "\n")


def read_code(folder: Path) -> dict[str, str]:
    """The last state of the code that a folder tells of; empty where there is none, or it is damaged."""
    try:
        with (folder / CODE).open(encoding="utf-8", errors="replace") as file:
            last = json.loads(file.read(_LONGEST).strip().rpartition("\n")[2])
        return {str(key): str(value) for key, value in last.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
