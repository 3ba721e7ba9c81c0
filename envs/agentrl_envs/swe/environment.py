"""The environment `swe`: a real package with one function broken, in a workspace; hidden calls decide."""

import ast
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from agentrl.errors import UserError, WorkspaceError
from agentrl.jsonable import Json
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Message, Session, Task
from agentrl.workspace.archive import packed
from agentrl.workspace.grading import Grading, restored
from agentrl.workspace.workspace import Workspace
from agentrl_envs.conversation import check_split, opening
from agentrl_envs.swe.mutations import Mutation

WORK = "/home/user/work"
"""Where the package lies."""
REPLAY = ["python3", "-I", "-S", "-c", (Path(__file__).parent / "inside/replay.py").read_text(encoding="utf-8")]
TASKS, SOURCE = "tasks.jsonl", "source.tar"
SECONDS = 20.0
"""Time of the hidden calls of a task together."""
_SHOWN = 300  # characters of a result


class Swe(Environment):
    """source: a folder that `python -m agentrl_envs.swe.make DIR` has filled. A third of the packages is for training;
    the tasks of the others are held out. system_prompt: "" for none."""

    name = "swe"
    reward_parts = ("passed",)
    uses_workspace = True
    example = MappingProxyType({"source": str(Path(__file__).parent / "example")})

    def __init__(self, source: str, system_prompt: str = "") -> None:
        top = Path(source).expanduser()
        files = sorted(top.glob(f"*/{TASKS}"))
        if not files:
            raise UserError(f"env.source: {top} holds no tasks; fill it with `python -m agentrl_envs.swe.make {top}`")
        self._system_prompt = system_prompt
        ranked = sorted(files, key=lambda path: hashlib.sha256(path.parent.name.rpartition("-")[0].encode()).digest())
        train = ranked[: (len(ranked) + 1) // 3]
        self._tasks = {
            "train": [task for path in train for task in _read(path)],
            "test": [task for path in ranked[len(train) :] for task in _read(path)],
        }

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        return self._tasks[split]

    async def prepare(self, task: Task, workspace: Workspace) -> None:
        """Put the package there, broken."""
        await workspace.unpack((Path(task.data["folder"]) / SOURCE).read_bytes())
        path = f"{WORK}/{task.data['file']}"
        sound = (await workspace.read(path)).decode()
        await workspace.write(path, Mutation(**task.data["mutation"]).applied(sound).encode())

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        return opening(question(session.task), self._system_prompt)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        """`passed`: 1.0 where each hidden call gives what it gave before the function was broken. The results are
        compared outside of the workspace, in which nobody knows them."""
        data = session.task.data
        if session.workspace is None:
            raise WorkspaceError("swe needs a workspace")
        job = {"file": "", "text": "", "calls": data["calls"], "seconds": SECONDS}
        asked = json.dumps({"root": WORK, "jobs": [job]}).encode()
        async with restored(session.workspace, Grading("", cwd=WORK), tests=False) as (fresh, taken):
            session.tampering = taken.tampering
            if taken.excess:
                return {"passed": 0.0}
            result = await fresh.exec(REPLAY, cwd="/", stdin=asked, seconds=3 * SECONDS, output=16 << 20)
        try:
            return {"passed": float(json.loads(result.stdout) == data["expected"])}
        except ValueError:
            return {"passed": 0.0}

    async def solve(self, task: Task, workspace: Workspace, step: int = 0) -> None:
        """Repair the function, as an agent that knows how would."""
        path, mutation = f"{WORK}/{task.data['file']}", Mutation(**task.data["mutation"])
        broken = await workspace.read(path)
        end = mutation.start + len(mutation.text.encode())
        await workspace.write(path, broken[: mutation.start] + task.data["sound"].encode() + broken[end:])


def question(task: Task) -> str:
    """What an agent is told."""
    data = task.data
    module, function, positional, named = data["calls"][data["shown"]]
    given = [repr(value) for value in ast.literal_eval(positional)]
    given += [f"{name}={value!r}" for name, value in ast.literal_eval(named).items()]
    return (
        f"The Python package {data['package']} lies in {WORK}. The function `{function}` of the module `{module}` "
        f"({data['file']}) has a mistake: `{function}({', '.join(given)})` {_said(data['broken'])}; it should "
        f"{_said(data['expected'][data['shown']], wanted=True)}. Find the mistake and repair it in place. Other calls "
        "of the function are tested, too."
    )


def _said(result: str, wanted: bool = False) -> str:
    if result == "?":
        return "give something else" if wanted else "gives something else"
    verb, what = ("raise", result[1:]) if result.startswith("!") else ("give", result[:_SHOWN])
    return f"{verb}{'' if wanted else 's'} {what if verb == 'raise' else f'`{what}`'}"


def _read(path: Path) -> list[Task]:
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            tasks.append(Task(id=row["id"], data={**row, "folder": str(path.parent)}))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: is no task ({error}); make the folder anew") from None
    return tasks


def script(name: str) -> bytes:
    """A tar with a program of `inside/`, at /opt/agentrl."""
    path = Path(__file__).parent / "inside" / name
    return packed({f"/opt/agentrl/{name}": path.read_bytes()})
