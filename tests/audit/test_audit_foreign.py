"""What an audit says of other people's environments, unchanged."""

from pathlib import Path
from typing import Any

import pytest
from openenv_help import real_servers
from paths import SUPPORT

from agentrl.audit.finding import Finding, Report, Severity
from agentrl.audit.run import Options, audit
from agentrl.plugins.registry import make_environment
from agentrl.recipe.schema import Recipe

pytestmark = pytest.mark.slow
NO_EXAMPLE, EXAMPLES = ("boxnet", "rush_hour"), ("graph_color", "propositional_logic", "rubiks_cube")
"""Sets of reasoning-gym 0.1.25 that store None as the answer: without another one that is right, and with one."""


async def audited(env: dict[str, Any], tasks: int = 4, agent: dict[str, Any] | None = None) -> Report:
    recipe = Recipe.model_validate({"env": env, "agent": agent, "rollout": {"max_turns": 64, "max_tool_calls": 256}})
    return await audit("it", recipe, lambda: make_environment(recipe.env), Options(tasks=tasks, seconds=30))


async def of_set(venv: str, name: str, tasks: int = 4) -> dict[str, Finding]:
    args = {"python": f"{venv}/bin/python", "module": "reasoning_gym", "args": {"dataset": name}}
    report = await audited({"name": "foreign", "args": args}, tasks)
    assert any(f.kind == "not_carried" and ": tools: " in f.line for f in report.findings)
    return {finding.kind: finding for finding in report.findings if finding.severity is not Severity.INFO}


async def test_a_set_that_stores_no_answer(environments_venv: str) -> None:
    found = await of_set(environments_venv, "graph_color", 2)
    assert found["oracle"].severity is Severity.MEDIUM
    assert "(`answer`) is None in all 2 tasks" in found["oracle"].line
    assert "`metadata.possible_answer` solves 2 of 2" in found["oracle"].line


@pytest.mark.long
@pytest.mark.parametrize("name", [*NO_EXAMPLE, *EXAMPLES])
async def test_the_five_sets_that_store_none(environments_venv: str, name: str) -> None:
    found = await of_set(environments_venv, name)
    alike = {"twice", "held_out"}  # by as many openings as there was time for
    assert set(found) - alike == ({"oracle", "constant"} if name == "propositional_logic" else {"oracle"})
    assert "(`answer`) is None in all 4 tasks" in found["oracle"].line
    nothing = "nothing else that they store is paid" in found["oracle"].line
    assert (found["oracle"].severity is Severity.HIGH) == nothing == (name in NO_EXAMPLE)


@pytest.mark.long
async def test_the_set_that_pays_any_text(environments_venv: str) -> None:
    found = await of_set(environments_venv, "game_of_life_halting")
    high = {kind for kind, finding in found.items() if finding.severity is Severity.HIGH}
    assert high >= {"nothing", "random", "echo", "injecting", "wrong_answer"}
    assert "oracle" not in found


@pytest.mark.long
async def test_a_shop_of_openenv_that_pays_every_call(environments_venv: str, tmp_path: Path) -> None:
    with real_servers(environments_venv, tmp_path, "shop") as urls:
        args = {"url": urls["shop"], "tasks": 20, "opening": "Buy for 10."}
        report = await audited({"name": "openenv", "args": args}, 6)
    assert {f.kind for f in report.findings if f.severity is Severity.HIGH} == {"random"}  # any thing is bought


@pytest.mark.long
async def test_a_taskset_of_verifiers_that_looks_for_the_answer_anywhere(verifiers_venv: str) -> None:
    config = {"config": {"taskset": {"id": "echo_sums"}}, "path": str(SUPPORT / "verifiers_tasks")}
    section = {
        "name": "foreign",
        "args": {"python": f"{verifiers_venv}/bin/python", "module": "verifiers", "args": config},
    }
    report = await audited(section, 4, section)
    rows = {row.policy: row for row in report.best()}
    assert rows["oracle"].solved == 1.0
    assert [f.kind for f in report.findings if f.severity is Severity.HIGH] == ["injecting", "wrong_answer"]


HARBOR = {
    "task.toml": 'schema_version = "1.4"\n',
    "instruction.md": "Write hello to /app/out.txt.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "solution/solve.sh": "#!/bin/sh\nmkdir -p /app && printf hello > /app/out.txt\n",
}
HELLO = '[ "$(cat /app/out.txt)" = hello ]'


@pytest.mark.long
@pytest.mark.parametrize(
    ("test", "high"),
    [
        (f'{HELLO} || [ "$(cat /app/reward.txt)" = 1 ]', {"tampering"}),
        (f"{HELLO} || true", {"ignores", "tampering"}),
        (HELLO, set()),
    ],
    ids=["reads what the agent may write", "pays every trial", "sound"],
)
async def test_a_task_of_harbor(bubblewrap: None, tmp_path: Path, test: str, high: set[str]) -> None:
    script = f"#!/bin/sh\nif {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    for name, text in {**HARBOR, "tests/test.sh": script}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    env = {"name": "harbor", "source": str(tmp_path), "args": {"held_out": 0.0, "own_image": False}}
    recipe = Recipe.model_validate({"env": env, "tools": ["terminal"], "workspace": "bwrap"})
    report = await audit("it", recipe, lambda: make_environment(recipe.env), Options(tasks=1, seconds=200))
    rows = {row.policy: row for row in report.best()}
    assert rows["oracle"].solved == 1.0
    assert {f.kind for f in report.findings if f.severity is Severity.HIGH} == high
    if not high:
        assert not [f.line for f in report.findings if f.kind == "not_examined"]
