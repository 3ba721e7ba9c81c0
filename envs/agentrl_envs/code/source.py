"""The sources of tasks: the generator, or rows of files, the hub or a function.

Rows have the shape of MBPP (`text` or `prompt`, `test_list`) or HumanEval (`prompt`, `test`, `entry_point`). They are
checked: a row that cannot be tested raises an error that names it, and is never skipped.
"""

import ast
import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.data.rows import Rows
from agentrl.errors import UserError
from agentrl.plugins.types import Json, Task
from agentrl_envs.code import generate
from agentrl_envs.conversation import text_field


@dataclass(frozen=True, slots=True)
class Row:
    """question: for the model. setup: Python before the tests and the solution. tests: Python texts, one each."""

    question: str
    entry_point: str
    """Name of the function that is asked for."""
    setup: str
    tests: tuple[str, ...]


def read_row(fields: Mapping[str, Json], where: str) -> Row:
    """Check a row. Raises UserError with `where` and the field."""
    if "test_list" in fields:
        return _mbpp(fields, where)
    if "test" in fields:
        return _human_eval(fields, where)
    raise UserError(f"{where}: has neither 'test_list' nor 'test'; it has {', '.join(map(repr, fields)) or 'no field'}")


def _mbpp(fields: Mapping[str, Json], where: str) -> Row:
    text = text_field(fields, "text" if "text" in fields else "prompt", where)
    tests = _texts(fields, "test_list", where)
    if not tests:
        raise UserError(f"{where}, field 'test_list': contains no test")
    setup = "\n".join([*_texts(fields, "test_imports", where), str(fields.get("test_setup_code") or "")]).strip()
    name = fields.get("entry_point") or _called(tests, setup, where)
    _parsed(setup, where, "test_setup_code")
    return Row(f"{text.strip()}\nIt must pass, among others:\n{tests[0]}", name, setup, tuple(tests))


def _human_eval(fields: Mapping[str, Json], where: str) -> Row:
    prompt, test, name = (text_field(fields, key, where) for key in ("prompt", "test", "entry_point"))
    _parsed(test, where, "test")
    stub = _stub(prompt)
    question = f"Complete this function:\n```python\n{prompt.strip()}\n```" if stub else prompt.strip()
    return Row(question, name, stub, (f"{test}\ncheck({name})",))


def _stub(prompt: str) -> str:
    """The prompt, where it is Python: its imports and helpers belong to the solution and to the tests."""
    for text in (prompt, prompt.rstrip() + "\n    pass\n"):
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        return text
    return ""


def _called(tests: Sequence[str], setup: str, where: str) -> str:
    """The one function that every test calls and nobody defines."""
    known = set(dir(builtins)) | _defined(_parsed(setup, where, "test_setup_code"))
    common: set[str] | None = None
    for test in tests:
        tree = _parsed(test, where, "test_list")
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        calls -= known | _defined(tree)
        common = calls if common is None else common & calls
    if not common or len(common) > 1:
        found = ", ".join(sorted(common or ())) or "none"
        raise UserError(f"{where}: its tests do not call one function ({found}); give its name as 'entry_point'")
    return common.pop()


def _defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _parsed(text: str, where: str, name: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{where}, field {name!r}: is no Python: {error.msg} in {text[:60]!r}") from error


def _texts(fields: Mapping[str, Json], name: str, where: str) -> list[str]:
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
        raise UserError(f"{where}, field {name!r}: expected a list of texts, got {value!r:.60}")
    return list(value)


TRAIN_SIZE = 50_000


def generated(split: str, index: int, seed: int) -> Task:
    """The task of a generated problem."""
    made = generate.problem(split, index, seed)
    data = {
        "split": split, "index": index, "seed": seed, "kind": made.kind, "question": made.text,
        "entry_point": made.entry_point, "tests": made.tests,
    }  # fmt: skip
    return Task(id=f"{split}-{index}", data=data)


def read_tasks(rows: Rows, split: str) -> list[Task]:
    """A task for each row. Raises UserError for a row that cannot be tested."""
    return [_task(rows.row(i), rows.where(i), f"{split}-{i}") for i in range(len(rows))]


def _task(fields: Mapping[str, Json], where: str, name: str) -> Task:
    row = read_row(fields, where)
    data = {
        "question": row.question, "entry_point": row.entry_point, "setup": row.setup, "script": row.tests, "row": where,
    }  # fmt: skip
    return Task(id=name, data=data)
