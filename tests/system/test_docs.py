"""The examples of the documentation are code that runs, and that keeps the contract they speak of."""

import re
from pathlib import Path

import pytest
from paths import ROOT

from agentrl.plugins.reward import Sample
from agentrl.plugins.types import Task

RECIPE = re.compile(r"agentrl (?:train|sft|check|eval) (recipes/[\w.]+)")
PAGES = ("plugins", "architecture", "cluster", "plan_70b")


def test_the_plugins_of_the_guide_keep_their_contract() -> None:
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    space: dict[str, object] = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, "docs/plugins.md", "exec"), space)
    tests = [name for name in space if name.startswith("test_")]
    assert tests == ["test_notebook", "test_guess"]
    for name in tests:
        space[name]()  # type: ignore[operator]
    samples = [Sample(Task("t", {}), (), {"found": r}, tokens=100) for r in (1.0, 0.0, 1.0)]
    assert space["brevity"](samples[0]) == pytest.approx(-0.1)  # type: ignore[operator]
    assert space["best_of_group"](samples) == [1.0, 0.0, 1.0]  # type: ignore[operator]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in PAGES)])
def test_what_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for recipe in set(RECIPE.findall(text)) - {"recipes/exchange_rate.yaml"}:  # of the scaffold's own package
        assert (ROOT / recipe).is_file(), recipe
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (ROOT / Path(page).parent / link).exists(), link
    for script in re.findall(r"^\| `(\w+\.py)` \|", text, re.M):
        assert (ROOT / "benchmarks" / script).is_file(), script
