"""The environment `harbor`: task folders of Harbor, graded by their tests in a workspace of the grader's own."""

import hashlib
import io
import logging
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from agentrl.errors import PathError, UserError, WorkspaceError
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Json, Message, Reply, Session, Task
from agentrl.workspace.capture import Protection
from agentrl.workspace.grading import Grade, Grading, grade
from agentrl.workspace.provider import Network, WorkspaceSpec
from agentrl.workspace.workspace import MIB, ExecResult, Workspace
from agentrl_envs.conversation import check_split, opening
from agentrl_envs.harbor.folder import HarborTask, Step, check_links, folders, read_folder

_PROTECTED = ("/tests", "/solution", "/logs/verifier")
_ARTIFACTS = "/logs/artifacts"
_SHARES = 1 << 32
_log = logging.getLogger("agentrl.envs.harbor")


@dataclass(slots=True)
class _Progress:
    """Of one rollout: the steps that were graded."""

    rewards: list[dict[str, float]] = field(default_factory=list)
    stopped: bool = False
    """A step's reward was too low for the next one."""


class Harbor(Environment):
    """source: a task folder, or a folder with task folders at any depth (a dataset, a clone, Harbor's own cache).

    held_out: share of the tasks that are the split `test`, by their names. variables: what `${NAME}` in `task.toml`
    stands for; the environment of this machine is not read. own_image: False takes the recipe's `workspace.image` for
    all tasks, whatever their Dockerfiles say. allowed: patterns of paths that an agent may write although they would
    steer a grader (see docs/internals/grading.md). capture_mb: what of an agent's files reaches the grader at most.
    system_prompt: "" for none.
    """

    name = "harbor"
    uses_workspace = True
    example = MappingProxyType({"source": str(Path(__file__).parent / "example"), "held_out": 0.0, "own_image": False})

    def __init__(
        self,
        source: str,
        held_out: float = 0.2,
        variables: dict[str, str] | None = None,
        own_image: bool = True,
        allowed: Sequence[str] = (),
        capture_mb: int = 256,
        system_prompt: str = "",
    ) -> None:
        if not 0.0 <= held_out <= 1.0 or capture_mb <= 0:
            raise ValueError("held_out must be between 0 and 1, capture_mb above 0")
        top = Path(source).expanduser()
        self._own_image, self._system_prompt = own_image, system_prompt
        self._protection = Protection(_PROTECTED, tuple(allowed), files=100_000, size=capture_mb * MIB)
        self._tasks = {_name(folder, top): read_folder(folder, variables or {}) for folder in folders(top)}
        if not self._tasks:
            raise UserError(f"env.source: {top} has no task: no task.toml lies in it or below it")
        self._held_out = {name for name in self._tasks if _share(name) < held_out}
        self._warned: set[str] = set()
        notes = {note for task in self._tasks.values() for note in task.not_carried}
        if notes:
            _log.warning("harbor: fields of task.toml without effect here: %s", "; ".join(sorted(notes)))

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        names = [name for name in self._tasks if (name in self._held_out) == (split != "train")]
        return [
            Task(id=name, data={"folder": str(found.folder)}, seconds=found.seconds)
            for name, found in ((name, self._tasks[name]) for name in names)
        ]

    def workspace_spec(self, task: Task, spec: WorkspaceSpec) -> WorkspaceSpec:
        found = self._tasks[task.id]
        limits = replace(
            spec.limits, memory=found.memory or spec.limits.memory, disk=found.disk or spec.limits.disk
        )  # fmt: skip
        users = tuple(dict.fromkeys(step.verifier.user for step in found.steps if step.verifier.user))
        env, network = {**spec.env, **found.env}, _network(found, spec.network)
        user, folder = found.user or spec.user, found.workdir or spec.folder
        spec = replace(spec, limits=limits, network=network, env=env, users=users, user=user, folder=folder)
        return replace(spec, image=found.image, build=found.build) if self._own_image else spec

    async def prepare(self, task: Task, workspace: Workspace) -> None:
        await _begin(self._tasks[task.id].steps[0], workspace, self._root(task))

    def _root(self, task: Task) -> str | None:
        """Who makes the folders of Harbor where the agent is a user of the image; None: whoever the agent is."""
        return "root" if self._tasks[task.id].user else None

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        session.state = _Progress()
        return opening(self._tasks[session.task.id].steps[0].instruction, self._system_prompt)

    async def execute(self, session: Session, message: Message) -> Reply:
        messages = await self.next_step(session)
        return Reply(messages=messages, done=not messages)

    async def next_step(self, session: Session) -> tuple[Message, ...]:
        """Grade a step that others follow, and say the next instruction; nothing where there is none."""
        found, progress = self._tasks[session.task.id], session.state
        step, following = found.steps[len(progress.rewards) :][:1], found.steps[len(progress.rewards) + 1 :]
        if not following:
            return ()
        await _workspace(session).end_processes()
        progress.rewards.append(await self._graded(session, step[0]))
        least = step[0].least.items()
        progress.stopped = any(progress.rewards[-1].get(name, float("-inf")) < bound for name, bound in least)
        if progress.stopped or not (await _begin(following[0], _workspace(session), self._root(session.task))).ok:
            progress.stopped = True
            return ()
        return ({"role": "user", "content": following[0].instruction},)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        """`reward`, or the numbers of `reward.json` where none of them is called so. Of several steps their mean, or
        the last. A step for which turns or time were not enough counts 0; those after a reward below `min_reward` do
        not count."""
        found, progress = self._tasks[session.task.id], session.state
        if not progress.stopped:
            progress.rewards.append(await self._graded(session, found.steps[len(progress.rewards)]))
        rewards = progress.rewards
        missing = 0 if progress.stopped else len(found.steps) - len(rewards)
        if found.final:
            return _main({} if missing else rewards[-1])
        names = {name for numbers in rewards for name in numbers}
        count = len(rewards) + missing
        return _main({name: sum(numbers.get(name, 0.0) for numbers in rewards) / count for name in names})

    async def solve(self, task: Task, workspace: Workspace, step: int = 0) -> ExecResult:
        """Run the solution that comes with a step, as an agent that knows it would. Raises UserError: there is none."""
        found = self._tasks[task.id]
        places = [found.steps[step].folder / "solution", found.folder / "solution"]
        folder = next((place for place in places if (place / "solve.sh").is_file()), None)
        if folder is None:
            raise UserError(f"{places[0] / 'solve.sh'}: is missing")
        check_links(folder, found.folder)
        await workspace.unpack(_tar([folder], "/solution"))
        script = "chmod +x /solution/solve.sh && exec /solution/solve.sh"
        return await workspace.exec(script, cwd=found.workdir, env=found.solution_env, seconds=600.0)

    async def _graded(self, session: Session, step: Step) -> dict[str, float]:
        """The rewards of a step; none where its tests gave none, which is the agent's fault and counts 0. Harbor leaves
        such a step out of the mean, by which who breaks the tests of one that he failed would earn more."""
        found, verifier = self._tasks[session.task.id], step.verifier
        artifacts = tuple(_workspace(session).absolute(path) for path in (_ARTIFACTS, *step.artifacts))
        grading = Grading(
            "chmod +x /tests/test.sh 2> /dev/null; exec /tests/test.sh 2>&1",
            tests=_tar(verifier.tests, "/tests") if verifier.tests else b"",
            captured=artifacts if verifier.separate else None,
            image=verifier.image,
            build=verifier.build,
            protection=self._protection,
            cwd=verifier.workdir,
            env=verifier.env,
            user=verifier.user,
            seconds=verifier.seconds,
        )
        try:
            made = await grade(_workspace(session), grading)
        except PathError as error:
            raise UserError(f"{found.folder / 'task.toml'}: its tests cannot be run: {error}") from None
        self._note(session, made)
        return dict(made.rewards)

    def _note(self, session: Session, made: Grade) -> None:
        session.tampering = (*session.tampering, *made.tampering)
        if made.fault and session.task.id not in self._warned:
            self._warned.add(session.task.id)
            _log.warning("%s: no reward, counted as 0: %s; %s", session.task.id, made.fault, made.output[-300:])


def _main(numbers: Mapping[str, float]) -> dict[str, float]:
    """What is paid: `reward` where there is one, else all."""
    return {"reward": numbers.get("reward", 0.0)} if "reward" in numbers or not numbers else dict(numbers)


def _network(task: HarborTask, given: Network) -> Network:
    """What a task asks for, within what the recipe allows; the recipe's where it says nothing. Raises UserError."""
    if task.network is None:
        return given
    if task.network == "no-network":
        return Network()
    wanted = Network(everything=task.network == "public", hosts=task.hosts)
    if given.everything or (wanted.hosts and set(wanted.hosts) <= set(given.hosts)):
        return wanted
    raise UserError(
        f"{task.folder / 'task.toml'}, network_mode: it asks for {task.network!r}, which workspace.network "
        "of the recipe does not allow; set it to `all`, or leave the task out"
    )


async def _begin(step: Step, workspace: Workspace, root: str | None) -> ExecResult:
    """Bring what a step begins with into the workspace, and run its `setup.sh`. root: who makes Harbor's folders."""
    await workspace.exec(f"mkdir -p /logs/agent {_ARTIFACTS} && chmod 777 /logs/agent {_ARTIFACTS}", cwd="/", user=root)
    folder = step.folder / "workdir"
    if not folder.is_dir() or not step.name:
        return ExecResult(0)
    check_links(folder, step.folder)
    await workspace.unpack(_tar([folder], workspace.home))
    if not (folder / "setup.sh").is_file():
        return ExecResult(0)
    result = await workspace.exec(f"bash {shlex.quote(workspace.home)}/setup.sh", seconds=600.0)
    if not result.ok:
        _log.warning("%s: setup.sh failed: %s", step.folder, result.text()[-300:])
    return result


def _workspace(session: Session) -> Workspace:
    if session.workspace is None:
        raise WorkspaceError("harbor needs a workspace")
    return session.workspace


def _tar(sources: Sequence[Path], target: str) -> bytes:
    """Folders as one at `target`, the later over the earlier, links followed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as tar:
        for source in sources:
            tar.add(source, arcname=target.lstrip("/"))
    return buffer.getvalue()


def _name(folder: Path, top: Path) -> str:
    return folder.relative_to(top).as_posix() if folder != top else folder.resolve().name


def _share(name: str) -> float:
    """A number between 0 and 1 that a name always has."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / _SHARES
