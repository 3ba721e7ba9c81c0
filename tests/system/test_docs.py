"""Hold the documentation to the code: tutorials run, links and names exist, every metric is documented."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from paths import ROOT
from train_help import metrics, small
from warm import Python

import agentrl
from agentrl.gateway.fields import ANTHROPIC_MESSAGES, CHAT_COMPLETIONS, COMPLETIONS, RESPONSES
from agentrl.learner.monitors import CONDITIONS
from agentrl.models.memory import plan_memory
from agentrl.recipe.schema import Recipe

DOCS = ROOT / "docs"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    *(f"docs/{path.relative_to(DOCS)}" for path in sorted(DOCS.rglob("*.md"))),
)
INSIDE = tuple(page for page in PAGES if page == "docs/architecture.md" or page.startswith("docs/internals/"))
REFERENCE = "docs/reference/recipe.md"
ELSEWHERE = ("recipes/exchange_rate.yaml", "recipes/shop.yaml")  # of packages that `agentrl new` writes
NOT_RUN = ("gpu", "hub_model")  # what they need a GPU or the hub for; their recipes are read all the same
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.M | re.S)
COMMAND = re.compile(r"^ *(?:\$ )?(agentrl (?:train|sft|check|eval) recipes/.+)$", re.M)
PATH = re.compile(r"`((?:agentrl|tools|envs|tests|recipes|benchmarks|examples|scripts)/[\w./]*|(?:\w+/)+\w+\.py)`")
PLACES = (ROOT, ROOT / "agentrl", ROOT / "tools" / "agentrl_tools", ROOT / "envs" / "agentrl_envs")
PROGRAMS = {
    "agentrl": ("-m", "agentrl.cli.main"),
    "mkdocs": ("-m", "mkdocs"),
    "pytest": ("-m", "pytest", "-q", "-p", "no:cacheprovider"),
    "python": (),
}


class Block(NamedTuple):
    """A fenced block: a file to write where it has a title, else something to run."""

    language: str
    title: str
    text: str


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(read(page))]


def joined(text: str) -> str:
    """Shell text with its continued lines put together and without comments."""
    return re.sub(r"\s+# .*$", "", text.replace("\\\n", " "), flags=re.M)


def run(arguments: list[str], folder: Path) -> None:
    """One command in `folder`, by this Python; what it imports may lie there."""
    words = [*PROGRAMS[arguments[0]], *arguments[1:]]
    process = Python(words, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)})
    said, _ = process.communicate()
    assert process.returncode == 0, f"{shlex.join(arguments)}\n{said}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(p.stem for p in (DOCS / "tutorials").glob("*.md") if p.stem not in NOT_RUN))
def test_a_tutorial_runs_as_it_is_written(name: str, tmp_path: Path) -> None:
    steps = blocks(f"docs/tutorials/{name}.md")
    assert steps
    for block in steps:
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            run(["python", "-c", block.text], tmp_path)
        elif block.language == "sh":
            for line in joined(block.text).splitlines():
                run(shlex.split(line), tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str) -> None:
    text = read(page)
    for link in re.findall(r"\]\((?!https?:)([\w./-]+)", text):
        assert (ROOT / Path(page).parent / link).exists(), link
    for script in re.findall(r"^\| `(\w+\.py)` \|", text, re.M):
        assert (ROOT / "benchmarks" / script).is_file(), script
    for path in set(PATH.findall(text)):
        if path not in ELSEWHERE:
            assert any((place / path).exists() for place in PLACES), path


@pytest.mark.slow
@pytest.mark.parametrize("page", INSIDE)
def test_every_name_that_a_page_about_the_inside_gives_is_in_the_source(page: str) -> None:
    sources = {path: path.read_text(encoding="utf-8") for place in PLACES[1:] for path in place.rglob("*.py")}
    words = set(re.findall(r"\w+", " ".join(sources.values())))
    keys = set(re.findall(r"^\| `([\w.]+)` \|", read(REFERENCE), re.M))
    unknown = []
    for name in set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)(?:\([^`]*\))?`", read(page))):
        first, _, second = name.partition(".")
        owners = [text for path, text in sources.items() if path.stem == first]
        if second == "py":
            known = bool(owners)
        elif second and owners and not is_key(name, keys) and first.capitalize() not in words:
            known = any(re.search(rf"\b{second}\b", text) for text in owners)
        else:
            known = is_key(name, keys) or {first, second or first} <= words
        if not known and not (ROOT / name).exists():
            unknown.append(name)
    assert unknown == []


@pytest.mark.parametrize("page", PAGES)
def test_a_recipe_takes_the_keys_that_a_page_gives_it(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in COMMAND.findall(joined(read(page))):
        recipe, *others = shlex.split(command)[2:]
        if recipe not in ELSEWHERE:
            Recipe.load(recipe, [key for key in others if re.match(r"[a-z_]+(\.\w+)*=", key)])


def test_every_recipe_key_that_a_page_names_is_in_the_reference() -> None:
    keys = set(re.findall(r"^\| `([\w.]+)` \|", read(REFERENCE), re.M))
    sections = "|".join(sorted({key.partition(".")[0] for key in keys if "." in key}))
    named = re.compile(rf"`((?:{sections})\.(?!jsonl|py|sbatch|yaml)[a-z_]+(?:\.[a-z_]+)*)(?=[`=:\[])")
    theirs = re.compile(r"^\| [^|]* \|", re.M)  # the first column of a translation
    unknown = {
        (page, key)
        for page in PAGES
        for key in named.findall(theirs.sub("", read(page)) if page == "docs/coming_from.md" else read(page))
        if page != REFERENCE and not is_key(key, keys)
    }
    assert unknown == set()


def test_tests_that_a_page_names_are_there() -> None:
    named = {found for page in PAGES for found in re.findall(r"((?:\w+/)*test_\w+\.py)::(test_\w+)", read(page))}
    assert len(named) > 30
    assert not {
        (file, test) for file, test in named if f"def {test}(" not in read(f"tests/{file.removeprefix('tests/')}")
    }


def is_key(name: str, keys: set[str]) -> bool:
    """Whether `name` is a key, a section, or lies within a plugin's `args`."""
    return name in keys or any(
        key.startswith(f"{name}.") or (key.endswith(".args") and name.startswith(f"{key}.")) for key in keys
    )


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    run(["mkdocs", "build", "-q", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)], ROOT)
    assert (tmp_path / "reference" / "metrics" / "index.html").is_file()


METRIC = re.compile(r"^\| `([\w/<>]+)` \|", re.M)
MIXED = {"mix": [{"name": "train_plugins:Noisy"}]}
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {
        "train__mini_batches": 2,
        "eval__samples": 2,
        "algorithm__leave_out": "length",
        "algorithm__off_policy_mask": 0.1,
    },
    "critic": {
        "algorithm__advantage": "gae",
        "critic__lr": 1e-4,
        "algorithm__streams": {"imitate": 1, "distill": 1},
        "algorithm__imitate_from": 0.0,
        "teacher": {"path": "policy", "hint": "It is {answer}."},
    },
    "kl": {
        "algorithm__kl_coef": 0.01,
        "algorithm__kl_in": "reward",
        "algorithm__kl_target": 0.1,
        "algorithm__reject": [{"level": "token", "low": 1e-4}],
        "model__lora": {"rank": 2},
        "env": MIXED,
        "eval__splits": [],
    },
    "overlap": {"rollout__overlap": "async", "rollout__compact": {}, "env__name": "train_plugins:Lonely"},
    "agent": {"agent__name": "chat_completions", "agent__processes": 1, "algorithm": "dapo"},
}
OWN = ("tool/<name>/<key>", "train/<metric>", "metric/<name>")  # of somebody's tool, loss or environment
UNSEEN = {
    "health", "memory/<phase>_<role>_gb", "time/reward_model_s", "reward_model/tflops", "reward_model/mfu", "eval/loss",
    "train/epoch", "mismatch/experts", "train/accuracy", "eval/accuracy", "seat/<seat>/reward_mean",
    "workspace/tampering/<kind>", "time/sample_workspace_s",
    "start/<split>/accuracy", "start/<split>/reward", "start/steps", "start/loss_first", "start/loss_last",
}  # fmt: skip
"""Documented keys that only workers, a reward model, its training, a mixture of experts, a run that is not well,
supervised runs, an environment that rewards seats, workspaces and agents that tamper there, and runs with a `start`
(tests/fine_tuning/test_start.py) write."""


@pytest.mark.slow
def test_every_metric_that_a_run_writes_is_documented(tmp_path: Path) -> None:
    documented = set(METRIC.findall(read("docs/reference/metrics.md")))
    seen = set()
    for name, changes in VARIANTS.items():
        folder = agentrl.train(small(tmp_path / name, **{"train__steps": 2, **changes})).folder
        seen |= {key for row in metrics(folder) for key in row}
    specific = sorted(documented - set(OWN), key=lambda key: key.count("<"))
    matches = {
        key: next((d for d in specific if re.fullmatch(re.sub(r"<\w+>", r"\\w+", d), key)), None) for key in seen
    }
    assert {key for key, name in matches.items() if name is None} == set()
    assert documented - set(OWN) - UNSEEN - set(matches.values()) == set()


def test_the_table_of_fields_is_that_of_the_gateway() -> None:
    dialects = CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, ANTHROPIC_MESSAGES
    for kind in ("served", "asked", "ignored", "refused"):
        cells = [", ".join(f"`{name}`" for name in sorted(getattr(fields, kind))) for fields in dialects]
        row = f"| {'recorded' if kind == 'asked' else kind} | {' | '.join(cells)} |"
        assert row in read("docs/tutorials/agent.md").splitlines(), row
    for fields in dialects:
        names = [*fields.served, *fields.asked, *fields.ignored, *fields.refused]
        assert len(names) == len(set(names))


TROUBLE = "docs/troubleshooting.md"


def test_every_condition_of_health_is_among_the_troubles() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", read(TROUBLE), re.M)
    assert sorted(listed) == sorted({*CONDITIONS, "one_update"})


def test_every_line_among_the_troubles_is_one_that_the_program_says() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "agentrl").rglob("*.py")))
    source = re.sub(r'"\n\s*f?"', "", sources)  # texts that are written in two pieces
    lines = read(TROUBLE).partition("## What a command says")[2]
    said = [
        cell for row in re.findall(r"^\| (`.+?`) \|", lines, re.M) for cell in re.findall(r"`(.+?)`(?: or |$)", row)
    ]
    assert len(said) > 12
    assert [line for line in said if line not in source] == []


QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
"""The shape of Qwen3-0.6B, by its model card and configuration."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ([], r"^\| all weights in bfloat16 .*\| (.*) GB \|$"),
        (["model.lora.rank=16"], r"^\| an adapter .*\| (.*) GB \|$"),
        (["model.checkpointing=false"], r"^\| without `model.checkpointing`, .*\| (.*) GB \|$"),
        (["model.device=cpu", "model.dtype=float32", "train.micro_batch_tokens=4096"], r"4096`: (.*) GB\)"),
    ],
)
def test_the_memory_on_the_page_of_the_hub_model_is_what_is_planned(
    changes: list[str], row: str, tmp_path: Path
) -> None:
    page = "docs/tutorials/hub_model.md"
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (recipe,) = (block for block in blocks(page) if block.title)
    (tmp_path / recipe.title).write_text(recipe.text.replace("Qwen/Qwen3-0.6B", str(tmp_path)))
    plan = plan_memory(Recipe.load(str(tmp_path / recipe.title), ["model.device=cuda", *changes]))
    assert plan is not None
    assert re.findall(row, read(page), re.M) == [f"{plan.device / 1e9:.1f}"]
