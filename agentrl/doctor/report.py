"""The file to attach to a report of a fault: what came of each check, and where; without secrets and home folders."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from agentrl import __version__
from agentrl.checkpoint.disk import write_whole
from agentrl.doctor.check import Finding
from agentrl.errors import UserError
from agentrl.plugins.types import Json
from agentrl.recipe.schema import Recipe
from agentrl.secrets import masked_text

NAME = "agentrl-doctor.json"


def write_report(path: Path, recipe: Recipe, findings: Sequence[Finding]) -> None:
    """Write what was found as JSON. Raises UserError where it cannot be written."""
    content = {
        "agentrl": __version__,
        "environment": environment(),
        "recipe": recipe.shown(),
        "findings": [finding.written() for finding in findings],
    }
    try:
        write_whole(path, json.dumps(cleaned(content), indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--output: cannot write {path}: {error.strerror}") from error


def environment() -> dict[str, Json]:
    """What the findings depend on: Python, system, and the versions of what agentrl needs."""
    names = {Requirement(text).name for text in metadata.requires("agentrl") or ()}
    versions = {d.name: d.version for d in metadata.distributions() if d.name in names or d.name.startswith("nvidia")}
    return {
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": dict(sorted(versions.items())),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("CUDA", "NCCL", "OMP", "PYTORCH"))},
    }


def cleaned(value: object) -> Any:
    """A JSON value without secrets, the home folder and the name of whoever has it."""
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(item) for item in value]
    if not isinstance(value, str):
        return value
    for folder, short in ((Path.cwd(), "."), (Path.home(), "~")):
        if folder != Path(folder.anchor):
            value = value.replace(str(folder), short)
    return masked_text(value)
