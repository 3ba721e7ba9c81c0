"""Servers in containers: what is added to the recipe's `docker run ... IMAGE COMMAND`, and how one is ended.

A container does not end with the client that started it, so each has a name by which it is removed.
"""

import uuid
from collections.abc import Collection, Sequence
from pathlib import Path

from agentrl.errors import UserError

RUNTIMES = ("docker", "podman", "nerdctl")
_RUN = "run"
_OURS = {"--rm": (), "--init": (), "--network": ("--net",)}  # unless the recipe gives it, or what else it is called


def is_container(command: Sequence[str]) -> bool:
    """Whether these words run a container."""
    return Path(command[0]).name in RUNTIMES and _RUN in command[1:]


def check_container(command: Sequence[str]) -> None:
    """Raises UserError for what a server cannot be ended or reached with."""
    given = _given(command)
    if "--name" in given:
        raise UserError("engine.args.command: leave --name out; each server's container is given a name of its own")
    if found := given & {"-d", "--detach"}:
        raise UserError(f"engine.args.command: leave {min(found)} out; a run keeps its servers' output, and ends them")


def contained(command: Sequence[str], variables: Collection[str], model_path: str) -> tuple[list[str], list[str]]:
    """The words that start it, up to the server's flags, and those that remove it.

    It shares the network of its machine, has the `variables` of the client's environment, and sees the model, where
    that is a folder, by the same path.
    """
    at = command.index(_RUN, 1) + 1
    given, name = _given(command), f"agentrl_{uuid.uuid4().hex[:12]}"
    added = ["--name", name]
    for option, others in _OURS.items():
        if not given & {option, *others}:
            added.append("--network=host" if option == "--network" else option)
    for variable in variables:
        added += ["--env", variable]
    if (folder := Path(model_path)).is_dir():
        place = folder.absolute()
        added += ["--volume", f"{place}:{place}:ro"]
    return [*command[:at], *added, *command[at:]], [*command[: at - 1], "rm", "--force", name]


def _given(command: Sequence[str]) -> set[str]:
    """The options of the recipe, by their names."""
    return {word.partition("=")[0] for word in command if word.startswith("-")}
