"""`HarborTask`: a task folder as Harbor 0.24 reads it (`task.toml` of schema 1.x), checked. What is wrong is one line
with file and field; what has no place here is refused, or named in `not_carried`."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import UserError
from agentrl.jsonable import Json
from agentrl.workspace.workspace import MIB

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_MACHINE = {
    "gpus": "GPUs", "tpu": "TPUs", "mcp_servers": "servers of MCP (see the tool `mcp`)",
    "healthcheck": "services that run before the agent does", "gpu_types": "GPUs",
}  # fmt: skip
_REFUSED = {
    "environment": _MACHINE, "verifier": {"collect": "commands between the agent and the tests"},
    "verifier.environment": _MACHINE,
}  # fmt: skip
"""By section: fields without which a task is another one, and what they are."""
_LEFT = {
    "build_timeout_sec": "the provider has a limit of its own", "cpus": "no provider bounds processors",
    "skills_dir": "for Harbor's own agents",
}  # fmt: skip
_NOT_CARRIED = {
    "environment": _LEFT,
    "verifier.environment": _LEFT | dict.fromkeys(
        ("memory_mb", "memory", "storage_mb", "storage"), "tests may use what the agent may"
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verifier:
    """How a step is graded."""

    tests: tuple[Path, ...]
    """Folders that become /tests, the later over the earlier; none where `image` or `build` bring them."""
    seconds: float
    """Time of the tests."""
    env: dict[str, str]
    """Environment variables."""
    user: str | None
    """Who runs the tests."""
    separate: bool
    """Where only artifacts are seen."""
    image: str = ""
    """A separate verifier's own image."""
    build: str = ""
    """A folder with its Dockerfile."""
    workdir: str | None = None
    """Where the tests run; None: where the image begins."""


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction and what grades it; a task without steps is one."""

    name: str
    """Its folder in `steps/`; empty for the only one."""
    instruction: str
    """What the agent is told."""
    verifier: Verifier
    """What grades it."""
    artifacts: tuple[str, ...]
    """Paths that a separate verifier sees."""
    folder: Path
    """Where its `workdir/` and `solution/` are."""
    least: dict[str, float] = field(default_factory=dict)
    """Rewards by name below which no further step is played."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task folder."""

    folder: Path
    """Where `task.toml` lies."""
    steps: tuple[Step, ...]
    """At least one."""
    image: str
    """A prebuilt image; empty: `build`."""
    build: str
    """A folder with a Dockerfile."""
    env: dict[str, str]
    """Environment variables of the workspace."""
    memory: int | None
    """Bytes."""
    disk: int | None
    """Bytes."""
    network: str | None
    """`no-network`, `public` or `allowlist`, where the task says it."""
    hosts: tuple[str, ...]
    """Those of an allowlist."""
    workdir: str | None
    """Where the agent, the solution and the tests of a shared verifier begin; None: where the image does."""
    user: str | None
    """Who the agent is; None: the user of the image."""
    seconds: float | None
    """Time of the agent, of all steps together; None: as the recipe says."""
    solution_env: dict[str, str]
    """Environment variables of the solution."""
    final: bool
    """Whether the last step's reward is the task's, rather than the mean of all."""
    not_carried: tuple[str, ...]
    """Fields that it sets and that have no effect here, with the reason."""


class Section:
    """A table of `task.toml`, whose fields are read with their type. Raises UserError with file and field."""

    def __init__(self, data: object, where: str, variables: Mapping[str, str]) -> None:
        if not isinstance(data, dict):
            raise UserError(f"{where}: expected a table, got {data!r:.60}")
        self.data, self.where, self._variables = data, where, variables

    def error(self, name: str, text: str) -> UserError:
        """An error that names the field."""
        return UserError(f"{self.where}{name}: {text}")

    def get(self, name: str, *kinds: type) -> Json:
        """A field; None where it is not set."""
        value = self.data.get(name)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise self.error(name, f"expected {' or '.join(kind.__name__ for kind in kinds)}, got {value!r:.60}")
        return value

    def table(self, name: str) -> "Section":
        """A table within; an empty one where it is not set."""
        return Section(self.data.get(name, {}), f"{self.where}{name}.", self._variables)

    def tables(self, name: str) -> "list[Section]":
        """A list of tables."""
        rows = self.get(name, list) or []
        return [Section(row, f"{self.where}{name}[{i}].", self._variables) for i, row in enumerate(rows)]

    def seconds(self, name: str, default: float) -> float:
        """Seconds above 0."""
        value = self.get(name, int, float)
        if value is not None and value <= 0:
            raise self.error(name, f"expected seconds above 0, got {value}")
        return default if value is None else float(value)

    def texts(self, name: str) -> dict[str, str]:
        """A table of texts, in which `${NAME}` and `${NAME:-DEFAULT}` are filled in."""
        return {key: self._filled(f"{name}.{key}", value) for key, value in (self.get(name, dict) or {}).items()}

    def _filled(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(name, f"expected text, got {value!r:.60}")
        match = _VARIABLE.fullmatch(value)
        if match is None:
            return value
        filled = self._variables.get(match[1], match[2])
        if filled is None:
            raise self.error(name, f"{value} is not known: give it as env.args.variables.{match[1]} (this machine's "
                                   "environment is not read)")  # fmt: skip
        return filled

    def size(self, name: str, old: str) -> int | None:
        """Bytes of a field in MB, or of an older one such as `2G`."""
        value, text = self.get(name, int), self.get(old, str)
        if value is None and text:
            number, unit = text.strip()[:-1], text.strip()[-1:].upper()
            if unit not in _SIZES or not re.fullmatch(r"\d+(\.\d+)?", number):
                raise self.error(old, f"expected a size such as '2G', got {text!r}")
            value = int(float(number) * _SIZES[unit])
        if value is not None and value <= 0:
            raise self.error(name, f"expected a size above 0, got {value}")
        return None if value is None else value * MIB


def folders(source: Path) -> Iterator[Path]:
    """The task folders at or below a folder, sorted. Raises UserError where it is none."""
    if not source.is_dir():
        raise UserError(f"env.source: {source} is no folder; give a Harbor task, or a folder of them")
    if (source / "task.toml").is_file():
        yield source
        return
    for child in sorted(source.iterdir()):
        if child.is_dir() and not child.is_symlink() and child.name != ".git":
            yield from folders(child)


def read_folder(folder: Path, variables: Mapping[str, str]) -> HarborTask:
    """Read a task. variables: what `${NAME}` stands for. Raises UserError."""
    path = folder / "task.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    top = Section(data, f"{path}, ", variables)
    version = str(top.get("schema_version", str) or top.get("version", str) or "1.4")
    if not re.fullmatch(r"1(\.\d+)*", version):
        raise top.error("schema_version", f"{version} is not known; 1.x is")
    environment, notes = top.table("environment"), _not_carried(top)
    image, build = _origin(folder, environment)
    network, hosts = _network_of_agent(top)
    user, seconds = _user_of_agent(top), _seconds_of_agent(top)
    return HarborTask(
        folder, _steps(folder, top), image, build, environment.texts("env"), environment.size("memory_mb", "memory"),
        environment.size("storage_mb", "storage"), network, hosts, environment.get("workdir", str), user, seconds,
        top.table("solution").texts("env"), top.get("multi_step_reward_strategy", str) == "final", notes,
    )  # fmt: skip


def _not_carried(top: Section) -> tuple[str, ...]:
    """Fields that have no effect here, each with why. Raises UserError for one without which the task is another."""
    notes = []
    for owner in (top, *top.tables("steps")):
        tables = {name: owner.table(name) for name in ("agent", "environment", "verifier")}
        tables["verifier.environment"] = tables["verifier"].table("environment")
        for name, table in tables.items():
            for key, what in _REFUSED.get(name, {}).items():
                if table.data.get(key):
                    raise table.error(key, f"{what} are not provided here")
            if str(table.data.get("os") or "linux").lower() != "linux":
                raise table.error("os", "only linux is provided here")
            place = name if owner is top else f"steps.{name}"
            notes += [f"{place}.{k} ({why})" for k, why in _NOT_CARRIED.get(name, {}).items() if k in table.data]
    return tuple(dict.fromkeys(notes))


def _origin(folder: Path, environment: Section) -> tuple[str, str]:
    """A prebuilt image, or the folder of a Dockerfile."""
    for name in ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml"):
        if (folder / "environment" / name).exists():
            raise UserError(f"{folder / 'environment' / name}: several containers are not provided here")
    image = environment.get("docker_image", str) or ""
    if image:
        return image, ""
    if not (folder / "environment" / "Dockerfile").is_file():
        raise UserError(
            f"{folder / 'environment'}: there is no Dockerfile, and task.toml names no environment.docker_image"
        )
    return "", str(folder / "environment")


def _network_of_agent(top: Section) -> tuple[str | None, tuple[str, ...]]:
    """What the agent of every step may reach: what its `agent` says, else the task's, else the environment."""
    owners = _owners(top)
    found = [next((n for n in map(_network, (own, task, top.table("environment"))) if n[0]), (None, ()))
             for own, task in owners]  # fmt: skip
    for (own, _), other in zip(owners, found, strict=True):
        if other != found[0]:
            raise own.error("network_mode", "the steps of a task have one network here")
    return found[0]


def _owners(top: Section) -> list[tuple[Section, Section]]:
    """The `agent` of each step, or of the task without steps, and the one of the task, which it stands over."""
    task, rows = top.table("agent"), top.tables("steps")
    return [(row.table("agent"), task) for row in rows] or [(task, task)]


def _user_of_agent(top: Section) -> str | None:
    users = []
    for own, task in _owners(top):
        user = own.get("user", str, int)
        users.append(task.get("user", str, int) if user is None else user)
        if users[-1] != users[0]:
            raise own.error("user", "the steps of a task have one user here")
    return None if users[0] is None else str(users[0])


def _seconds_of_agent(top: Section) -> float | None:
    """The time of all steps together, where each has one."""
    total = sum(own.seconds("timeout_sec", task.seconds("timeout_sec", math.inf)) for own, task in _owners(top))
    return total if math.isfinite(total) else None


def _network(section: Section) -> tuple[str | None, tuple[str, ...]]:
    mode, legacy = section.get("network_mode", str), section.get("allow_internet", bool)
    hosts = section.get("allowed_hosts", list)
    if mode is None and legacy is not None:
        mode = "public" if legacy else "no-network"
    if mode not in (None, "no-network", "public", "allowlist"):
        raise section.error("network_mode", f"expected no-network, public or allowlist, got {mode!r}")
    if hosts and mode != "allowlist":
        raise section.error("allowed_hosts", "is only valid beside network_mode = 'allowlist'")
    return mode, tuple(map(str, hosts or ()))


def _steps(folder: Path, top: Section) -> tuple[Step, ...]:
    artifacts = _artifacts(top)
    rows = top.tables("steps")
    if not rows:
        return (Step("", _instruction(folder), _verifier(folder, folder, top, None), artifacts, folder),)
    steps = []
    for row in rows:
        name = row.get("name", str) or ""
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise row.error("name", f"expected the name of a folder in steps/, got {name!r}")
        if row.data.get("healthcheck"):
            raise row.error("healthcheck", "services that run before the agent does are not provided here")
        least = row.get("min_reward", int, float, dict)
        bounds = least if isinstance(least, dict) else {} if least is None else {"reward": least}
        place = folder / "steps" / name
        verifier = _verifier(folder, place, top, row)
        steps.append(Step(name, _instruction(place), verifier, artifacts + _artifacts(row), place, bounds))
    return tuple(steps)


def _instruction(folder: Path) -> str:
    path = folder / "instruction.md"
    if (folder / "trajectory.json").exists():
        raise UserError(f"{folder / 'trajectory.json'}: a conversation that is gone on with is not provided here")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    while lines and (_CANARY.match(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)
    if not lines:
        raise UserError(f"{path}: is empty")
    return "\n".join(lines)


def _verifier(folder: Path, place: Path, top: Section, step: Section | None) -> Verifier:
    """The verifier of a step: its own fields over those of the task."""
    task = top.table("verifier")
    own = task if step is None else step.table("verifier")
    user = own.get("user", str, int)
    user = task.get("user", str, int) if user is None else user
    mode = _mode(own) or _mode(task) or "shared"
    apart = [t.table("environment") for t in (own, task) if mode == "separate" and "environment" in t.data][:1]
    for table in (own, task, *apart):
        if reached := _network(table)[0]:
            if reached != "no-network":
                raise table.error("network_mode", "tests have no network here; put what they need into the image")
            break
    tests = tuple(dict.fromkeys(path for path in (folder / "tests", place / "tests") if path.is_dir()))
    image = build = ""
    for table, path in ((own, place / "tests"), (task, folder / "tests")) if mode == "separate" else ():
        image = table.table("environment").get("docker_image", str) or ""
        build = str(path) if not image and (path / "Dockerfile").is_file() else ""
        if image or build:
            break
    if not image and not build and not any((path / "test.sh").is_file() for path in tests):
        raise UserError(f"{place / 'tests' / 'test.sh'}: is missing")
    for path in tests:
        check_links(path, folder)
    seconds = own.seconds("timeout_sec", task.seconds("timeout_sec", 600.0))
    env = {name: text for table in (*apart, task, own) for name, text in table.texts("env").items()}
    workdir = (*apart, top.table("environment"))[0].get("workdir", str)
    return Verifier(
        () if image or build else tests, seconds, env, None if user is None else str(user), mode == "separate", image,
        build, workdir,
    )  # fmt: skip


def _mode(section: Section) -> str:
    mode = section.get("environment_mode", str)
    if mode not in (None, "shared", "separate"):
        raise section.error("environment_mode", f"expected shared or separate, got {mode!r}")
    if mode == "shared" and "environment" in section.data:
        raise section.error("environment_mode", "'shared' has no environment of its own")
    return mode or ("separate" if "environment" in section.data else "")


def _artifacts(section: Section) -> tuple[str, ...]:
    paths = []
    for row in section.get("artifacts", list) or []:
        source = row.get("source") if isinstance(row, dict) else row
        if not isinstance(source, str) or ".." in source.split("/"):
            raise section.error("artifacts", f"expected paths without '..', got {row!r:.60}")
        if isinstance(row, dict) and (row.get("service") or "main") != "main":
            raise section.error("artifacts", f"service {row['service']!r}: several containers are not provided here")
        paths.append(source)
    return tuple(paths)


def check_links(path: Path, folder: Path) -> None:
    """Raise UserError for a link that leads out of the task."""
    for one in path.rglob("*"):
        if one.is_symlink() and not one.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{one}: a link that leads out of the task")
