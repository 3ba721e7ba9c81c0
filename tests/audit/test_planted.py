"""Each planted defect is found, and its sound twin not accused. `python tests/audit/test_planted.py` prints the table.

The bounds were fixed on those of `planted.py`. Of the 30 of `planted_later.py`, made afterwards, 27 were found at once;
the other three led to a near miss, a comparison without case, and a wider cause. One twin was accused, rightly: its
default `solved` could not be reached. Four more were made of what the audit was known to miss.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "support"))

from planted import PLANTED, Planted
from planted_later import ShowsSolution, TrustsFile, Written

from agentrl import Environment
from agentrl.audit.finding import Report, Severity
from agentrl.audit.run import Options, audit
from agentrl.containment.event_loop import run
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.workspace import WorkspaceSection

LIMITS = {"max_tokens": 1_024, "max_turns": 16, "max_tool_calls": 64, "max_tool_calls_per_turn": 8}
_accused: dict[type[Environment], list[str]] = {}


def audited(env: type[Environment], limits: Mapping[str, Any] | None = None) -> Report:
    """The report of an environment, with few tasks."""
    recipe = Recipe()
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={**LIMITS, **(limits or {})})})
    return run(audit(env.__name__, recipe, env, Options(tasks=4, seconds=60)))


def said(report: Report) -> list[str]:
    """The findings that accuse, in short."""
    return [f"{f.severity} {f.kind}: {f.line}" for f in report.findings if f.severity is not Severity.INFO]


def missed(one: Planted) -> bool:
    kinds = {f.kind for f in audited(one.bad, one.limits).findings if f.severity is not Severity.INFO}
    return not kinds & set(one.kinds)


def accused(twin: type[Environment]) -> list[str]:
    if twin not in _accused:
        _accused[twin] = said(audited(twin))
    return _accused[twin]


_FIRST = {one.good for one in PLANTED if one.missed or not one.later}
TWINS = [
    pytest.param(twin, id=twin.__name__, marks=[pytest.mark.long] * (twin not in _FIRST))
    for twin in sorted({one.good for one in PLANTED}, key=lambda twin: twin.__name__)
]


def test_there_are_enough() -> None:
    assert len(PLANTED) >= 40
    assert sum(one.later for one in PLANTED) * 3 >= len(PLANTED)
    assert len({one.bad for one in PLANTED}) == len({one.name for one in PLANTED}) == len(PLANTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "one", [pytest.param(p, id=p.bad.__name__, marks=[pytest.mark.long] * (p.later > p.missed)) for p in PLANTED]
)
def test_the_defect_is_found(one: Planted) -> None:
    assert not missed(one), said(audited(one.bad, one.limits))


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS)
def test_the_twin_is_not_accused(twin: type[Environment]) -> None:
    assert accused(twin) == []


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    ("env", "kind"),
    [
        pytest.param(TrustsFile, "tampering", id="trusts"),
        pytest.param(ShowsSolution, "exposed", id="shows", marks=pytest.mark.long),
        pytest.param(Written, "", id="sound", marks=pytest.mark.long),
    ],
)
def test_cheats_in_workspaces_are_tried(env: type[Environment], kind: str) -> None:
    recipe = Recipe(workspace=WorkspaceSection())
    report = run(audit(env.__name__, recipe, env, Options(tasks=2, seconds=30)))
    assert {f.kind for f in report.findings if f.severity is Severity.HIGH} == {kind} - {""}, said(report)
    assert next(row for row in report.rows if row.policy == "oracle").solved == 1.0


def main() -> None:
    """Print the table."""
    found = 0
    for one in PLANTED:
        lost, twin = missed(one), accused(one.good)
        found += not lost
        when = "later" if one.later else ""
        print(f"{'MISSED' if lost else 'found':7} {when:6} {one.name:55} {'; '.join(twin) or 'twin: nothing'}")
    print(f"{found} of {len(PLANTED)} found; {sum(map(bool, _accused.values()))} of {len(_accused)} twins accused")


if __name__ == "__main__":
    main()
