"""Recipes: files, extends, overrides, interpolation, and mistakes that are told in one line."""

import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import RECIPES, ROOT

from agentrl import Recipe, UserError, __version__
from agentrl.recipe import reader
from agentrl.recipe.document import dump, read_document
from agentrl.recipe.load import dump_recipe, load_recipe, recipe_name, show_recipe
from agentrl.recipe.mistakes import known_fields
from agentrl.recipe.presets import PRESETS
from agentrl.recipe.reference import reference
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.secrets import masked_text

SHIPPED = RECIPES


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "r.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def test_defaults_fill_what_is_not_said_and_a_file_that_says_nothing_is_refused(write):
    assert load_recipe(None) == load_recipe(write("# none yet"), ["train.seed=0"]) == Recipe()
    for text in ("", "{}", "# none yet", "null"):
        with pytest.raises(UserError, match=r"r.yaml: is empty; a recipe has at least one key, such as `extends: gsm"):
            load_recipe(write(text))


def test_values_of_a_file(write):
    recipe = Recipe.load(
        write("rollout: {n: 4, temperature: 0.7}\ntools: [calculator, {name: search, args: {k: 3}}]\n")
    )
    assert (recipe.rollout.n, recipe.rollout.temperature) == (4, 0.7)
    assert [(t.name, t.args) for t in recipe.tools] == [("calculator", {}), ("search", {"k": 3})]


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".0001"])
def test_a_number_in_scientific_notation_is_a_number(write, number):
    assert load_recipe(write(f"train: {{lr: {number}}}")).train.lr == 1e-4
    assert load_recipe(write(""), [f"train.lr={number}"]).train.lr == 1e-4


def test_text_stays_text(write):
    args = load_recipe(
        write("env: {args: {a: off, b: 1:30, c: 2026-01-01, d: '1e-4', e: no, 1: x, f: 1_000}}")
    ).env.args
    assert args == {"a": "off", "b": "1:30", "c": "2026-01-01", "d": "1e-4", "e": "no", "1": "x", "f": 1000}


def test_a_whole_number_does_for_a_real_one(write):
    assert load_recipe(write("train: {lr: 1}")).train.lr == 1.0


def test_extends_merges_mappings_and_replaces_lists(write):
    write("rollout: {n: 4, tasks: 2}\ntools: [a, b]\nenv: {args: {x: 1, y: 2}}\n", "base.yaml")
    write("extends: base.yaml\nrollout: {n: 5}\nenv: {args: {y: 3}}\n", "middle.yaml")
    recipe = load_recipe(write("extends: middle.yaml\ntools: [c]\n"))
    assert (recipe.rollout.n, recipe.rollout.tasks) == (5, 2)
    assert [t.name for t in recipe.tools] == ["c"]
    assert recipe.env.args == {"x": 1, "y": 3}


def test_an_empty_mapping_empties_what_it_extends(write):
    write("env: {args: {x: 1}}\nengine: {args: {flags: {a: 1}}}", "base.yaml")
    recipe = load_recipe(write("extends: base.yaml\nenv: {mix: [{name: a}, {name: b}], args: {}}\n"))
    assert recipe.env.args == {}
    assert recipe.engine.args == {"flags": {"a": 1}}
    with pytest.raises(UserError, match=r"env: args has no effect beside mix: .* leave it at \{\}"):
        load_recipe(write("extends: base.yaml\nenv: {mix: [{name: a}, {name: b}]}\n"))


def test_extends_is_relative_to_the_file(tmp_path, write, monkeypatch):
    (tmp_path / "sub").mkdir()
    write("rollout: {n: 3}", "base.yaml")
    write("extends: ../base.yaml", "sub/r.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("sub/r.yaml").rollout.n == 3


def test_a_models_chat_template_is_looked_for_beside_the_recipe_first(tmp_path, write):
    (tmp_path / "sub").mkdir()
    path = write("model: {chat_template: t.jinja}", "sub/base.yaml")
    assert load_recipe(path).model.chat_template == "t.jinja"
    (tmp_path / "sub" / "t.jinja").write_text("")
    assert load_recipe(path).model.chat_template == str(tmp_path / "sub" / "t.jinja")
    assert load_recipe(path, ["model.chat_template=mine.jinja"]).model.chat_template == "mine.jinja"


def test_the_chat_template_is_relative_to_the_file_that_names_it(tmp_path, write, monkeypatch):
    (tmp_path / "sub").mkdir()
    write("sft: {new_model: {chat_template: t.jinja}}", "sub/base.yaml")
    path = write("extends: sub/base.yaml")
    assert load_recipe(path).sft.new_model.chat_template == str(tmp_path / "sub" / "t.jinja")
    monkeypatch.chdir(tmp_path)
    assert load_recipe(path, ["sft.new_model.chat_template=mine.jinja"]).sft.new_model.chat_template == "mine.jinja"


def test_other_paths_are_left_as_they_are(write):
    assert load_recipe(write("env: {source: ../data/x.jsonl}")).env.source == "../data/x.jsonl"


def test_overrides(write):
    path = write("tools: [calculator, {name: search}]\nenv: {args: {keep: 1}}\n")
    recipe = load_recipe(
        path,
        [
            "rollout.n=16",
            "env.args.foo=[1, 2]",
            "tools.0.args.x=1",
            "tools.search.args.url=http://h/?q=1",
            "tools.2=third",
            "output=",
            "train.betas=[0.8, 0.9]",
        ],
    )
    assert recipe.rollout.n == 16
    assert recipe.env.args == {"keep": 1, "foo": [1, 2]}
    assert [t.name for t in recipe.tools] == ["calculator", "search", "third"]
    assert recipe.tools[0].args == {"x": 1}
    assert recipe.tools[1].args == {"url": "http://h/?q=1"}
    assert recipe.output is None
    assert recipe.train.betas == (0.8, 0.9)


def test_an_override_replaces_the_whole_value(write):
    assert load_recipe(write("env: {args: {x: 1}}"), ["env.args={y: 2}"]).env.args == {"y": 2}


def test_interpolation(write, monkeypatch):
    monkeypatch.setenv("AGENTRL_TEST_N", "12")
    monkeypatch.delenv("AGENTRL_TEST_NO", raising=False)
    text = """
rollout: {tasks: 4}
train:
  steps: ${AGENTRL_TEST_N}
  lr: ${AGENTRL_TEST_NO:-1e-4}
env:
  source: data/${AGENTRL_TEST_N}/${AGENTRL_TEST_NO:-none}.jsonl
  args: {quoted: "${AGENTRL_TEST_N}", plain: "$${AGENTRL_TEST_N}", empty: "${AGENTRL_TEST_NO:-}"}
"""
    recipe = load_recipe(write(text), ["output=runs/${AGENTRL_TEST_N}", "rollout.n=${AGENTRL_TEST_N}"])
    assert (recipe.train.steps, recipe.train.lr, recipe.rollout.n) == (12, 1e-4, 12)
    assert recipe.env.source == "data/12/none.jsonl"
    assert recipe.env.args == {"quoted": "12", "plain": "${AGENTRL_TEST_N}", "empty": ""}
    assert recipe.output == "runs/12"


MISTAKES = {
    "rollout: {m: 3}": r"r.yaml:1: rollout.m: unknown key; known: compact, concurrency, max_",
    "rolout: {n: 3}": r"rolout: unknown key; did you mean 'rollout'\?",
    "agent: {name: a, train_auxiliary: true}": r"r.yaml:1: agent.train_auxiliary: is now `agent.train`: every answer",
    "agent: {name: a, host: 'http://a'}": r"r.yaml:1: agent.host: expected an address such as 0.0.0.0",
    "agent: {name: a, host: 'a:99999'}": r"r.yaml:1: agent.host: expected an address such as 0.0.0.0",
    "agent: {name: a, public_url: 'a:8000'}": r"r.yaml:1: agent.public_url: expected a URL such as http",
    "algorithm: {normalize_std: false}": r"r.yaml:1: algorithm.normalize_std: was removed: for false write",
    "lr: 1": r"lr: unknown key; did you mean 'train.lr' or 'critic.lr'\?",
    "rollout:\n  lr: 1": r"r.yaml:2: rollout.lr: unknown key; did you mean 'train.lr' or 'critic.lr'\?",
    "tools: [{name: a, arg: {}}]": r"tools.0.arg: unknown key; did you mean 'tools.0.args'\?",
    "sft: {stages: [{stile: clean}]}": r"sft.stages.0.stile: unknown key; did you mean 'sft.stages.0.style'",
    "train: {lr: fast}": r"train.lr: expected a number, got the text 'fast'",
    "rollout: {n: '8'}": r"rollout.n: expected a whole number, got the text '8'",
    "rollout: {n: true}": r"rollout.n: expected a whole number, got true",
    "rollout: {n: 1.5}": r"rollout.n: expected a whole number, got the number 1.5",
    "rollout: 8": r"rollout: expected a mapping of keys, got the number 8",
    "rollout:\n": r"rollout: expected a mapping of keys, got nothing",
    "tools: calculator": r"tools: expected a list, got the text 'calculator'",
    "tools: [3]": r"tools.0: expected a mapping of keys, got the number 3",
    "tools: [{args: {}}]": r"tools.0.name: is missing",
    "train: {betas: [0.9]}": r"train.betas.1: is missing",
    "train: {lr: 0}": r"train.lr: expected more than 0, got 0",
    "train: {lr: 1e999}": r"train.lr: expected a number, got the text '1e999'",
    "rollout: {top_p: 2}": r"rollout.top_p: expected at most 1, got 2",
    "train: {schedule: cosin}": r"train.schedule: expected one of .*; did you mean 'cosine'\?",
    "rollout: {n: 1}": r"rollout.n is 1, but grpo",
    "rollout: {n: 1}\nalgorithm: {advantage: rloo}": r"rollout.n is 1, but rloo compares",
    "rollout: {compact: {resume: x}}": r"rollout.compact.resume: {summary} must stand in it",
    "rollout: {compact: {at: 0}}": r"rollout.compact.at: expected more than 0, got 0",
    "agent: a\nrollout: {compact: {}}": r"rollout.compact has no effect beside agent",
    "tools: [a, a]": r"tools: a is listed twice",
    "env: {name: code, mix: [{name: gsm8k}]}": r"env: name has no effect beside mix",
    "env: {args: {size: 1}, mix: [{name: gsm8k}]}": r"env: args has no effect beside mix",
    "- a\n- b": r"r.yaml: expected `key: value` lines at the top, got a list",
    "rollout: {n: 8": r"r.yaml:1: not valid YAML",
    "a: b: c": r"r.yaml:1: not valid YAML",
    "train:\n\tlr: 1": r"r.yaml:2: not valid YAML",
    "rollout: {n: 8}\ntrain: {}\nrollout: {n: 9}": r"r.yaml:3: rollout: given twice in one mapping",
    "env: {args: {a: 1, a: 2}}": r"env.args.a: given twice",
    "env: {source: '${AGENTRL_NOT_SET}'}": r"env.source: the environment variable AGENTRL_NOT_SET is not set",
    "env: {source: !!python/name:os.system x}": r"env.source: tag .* is not supported",
    "env: {args: {a: !!int x}}": r"env.args.a: tag !!int is not supported",
    "x: &a {n: 3}\nrollout: {<<: *a}": r"rollout.<<: merge keys are not supported",
    "env: {args: &a {x: *a}}": r"env.args.x: an alias refers to itself",
    "extends: [a, b]": r"r.yaml:1: extends: expected the path of one recipe, got a list",
    "extends: nothere.yaml": r"r.yaml:1: extends: .*nothere.yaml: no such recipe file",
    "rollout: {m: 3}\ntrain: {lrr: 1, lr: x}": r"\(and 2 more\)",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_file_is_one_line(write, text):
    with pytest.raises(UserError) as error:
        load_recipe(write(text))
    message = str(error.value)
    assert re.search(MISTAKES[text], message)
    assert "\n" not in message
    assert "r.yaml" in message


OVERRIDE_MISTAKES = {
    "foo": r"'foo' is not key=value",
    "=3": r"'=3' is not key=value",
    "rollout..n=3": r"'rollout..n=3' is not key=value",
    "zzz=1": r"zzz: unknown key; known: agent, algorithm, .*train",
    "rollout.samples=1": r"rollout.samples: unknown key",
    "rollout.n=x": r"rollout.n: expected a whole number, got the text 'x'",
    "rollout.n.x=1": r"rollout.n is the number 4, so it has no keys",
    "tools.5.args.x=1": r"tools has 1 entry, and '5' is none of them",
    "tools.calc.args.x=1": r"'calc' is none of them; did you mean 'calculator'\?",
    "env.args.x=[1": r"env.args.x: not valid YAML",
    "env.args.x=${AGENTRL_NOT_SET}": r"env.args.x: the environment variable AGENTRL_NOT_SET is not set",
    "extends=a.yaml": r"extends: unknown key",
}


@pytest.mark.parametrize("override", OVERRIDE_MISTAKES)
def test_a_mistake_in_an_override_is_one_line_that_says_so(write, override):
    path = write("rollout: {n: 4}\ntools: [calculator]")
    with pytest.raises(UserError, match=OVERRIDE_MISTAKES[override]) as error:
        load_recipe(path, [override])
    assert str(error.value).startswith("command line: ")
    assert "\n" not in str(error.value)


def test_a_mistake_names_the_file_that_wrote_it(write):
    write("train:\n  lrr: 1\n", "base.yaml")
    with pytest.raises(UserError, match=r"base.yaml:2: train.lrr: unknown key"):
        load_recipe(write("extends: base.yaml\ntrain: {lr: 1}"))


def test_a_circle_of_files(write):
    write("extends: r.yaml", "b.yaml")
    with pytest.raises(UserError, match=r"files extend each other in a circle: .*r.yaml -> b.yaml -> r.yaml"):
        load_recipe(write("extends: b.yaml"))


def test_a_missing_file_names_the_nearest(write, tmp_path):
    write("", "gsm8k_tool.yaml")
    with pytest.raises(UserError, match=r"no such recipe file; did you mean .*gsm8k_tool.yaml\?"):
        load_recipe(tmp_path / "gsm8k_tol.yaml")
    with pytest.raises(UserError, match=r"is a folder, expected a recipe file; known: .*gsm8k_tool.yaml"):
        load_recipe(tmp_path)


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(UserError, match=r"not a text file in UTF-8"):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.slow
def test_deep_nesting_is_no_crash(write):
    with pytest.raises(UserError, match="nested too deeply"):
        load_recipe(write("x: " + "[" * 5000 + "]" * 5000))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(json_values)
def test_what_is_dumped_is_read_back_equal(value):
    read = read_document(dump({"x": value}), "test").value["x"]
    assert read == value
    assert repr(read) == repr(value)  # 1 stays an int and 1.0 a float


@pytest.mark.parametrize(
    "text", ["1e-4", "${HOME}", "$${HOME}", "$$${X", "yes", "null", "", " a", "a: b", "0x1F", "<<"]
)
def test_awkward_text_is_dumped_and_read_back(text):
    assert read_document(dump({text: text}), "test").value == {text: text}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_recipes_load_and_survive_a_dump(path, tmp_path):
    recipe = load_recipe(path)
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


def test_a_recipe_with_everything_survives_a_dump(write, tmp_path):
    text = "sft: {new_model: {chat_template: t.jinja}, stages: [{style: a}]}\neval: {splits: [x]}\n"
    recipe = load_recipe(write(text + "tools: [{name: a, args: {b: [1e-9, '1']}}]"))
    assert load_recipe(write(dump_recipe(recipe), "dumped.yaml")) == recipe


def test_the_name_of_a_recipe():
    assert recipe_name("recipes/gsm8k_tool.yaml") == "gsm8k_tool"


def test_every_key_is_described_and_there_are_at_most_260():
    """Those that hold a value; a section is where they are found."""
    fields = known_fields(Recipe, lists=True)
    keys = {key: info for key, info in fields.items() if not any(other.startswith(f"{key}.") for other in fields)}
    assert {"train.lr", "sft.new_model.config", "rollout.n", "model.lora.rank", "tools.N.args"} <= keys.keys()
    assert 100 < len(keys) <= 260
    page = reference().splitlines()
    assert {row.split("`")[1] for row in page if row.startswith("| `")} >= keys.keys()
    assert [row for row in page if row.startswith("| `") and row.endswith("|  |")] == []
    assert [page[at] for at, line in enumerate(page[2:], 2) if page[at - 2].startswith("## ") and not line] == []


def test_the_reference_of_the_recipe_is_up_to_date():
    """Write it anew by: python -m agentrl.recipe.reference > docs/reference/recipe.md"""
    page = reference()
    assert page == (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    for row in (
        "| `train.lr` | number > 0 |  | `1e-06` | Peak learning rate of AdamW. |",
        "| `rollout.tool_timeout` | number > 0 | seconds | `30.0` | Time allowed for one tool call. |",
        "| `tools.N.name` | text |  | required | An installed tool",
    ):
        assert row in page


@pytest.fixture
def renamed(monkeypatch):
    monkeypatch.setattr(reader, "RENAMED", {"rollout.samples": "rollout.n", "learning": "train", "seed": "train.seed"})
    reader._say.cache_clear()


def test_a_renamed_key_is_read_by_its_old_name_with_a_line(write, renamed, capsys, monkeypatch):
    monkeypatch.setenv("AGENTRL_TEST_N", "12")
    write("rollout: {samples: 3}\nseed: 5", "base.yaml")
    path = write("extends: base.yaml\nrollout:\n  n: 4\nlearning:\n  steps: ${AGENTRL_TEST_N}\n")
    recipe = load_recipe(path)
    assert (recipe.rollout.n, recipe.train.seed, recipe.train.steps) == (4, 5, 12)
    assert "steps: ${AGENTRL_TEST_N}\n" in dump_recipe(recipe)
    told = capsys.readouterr().err
    assert re.search(r"base.yaml:1: rollout.samples is now called rollout.n; the old name is read until 0.3.0\n", told)
    assert told.count("\n") == 3
    load_recipe(path)
    assert capsys.readouterr().err == ""  # once a process
    assert load_recipe(write(""), ["rollout.samples=6", "learning.lr=1e-4", "seed=2"]).rollout.n == 6
    assert "command line: learning is now called train" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"r.yaml:2: train.lr: expected a number, got the text 'fast'"):
        load_recipe(write("learning:\n  lr: fast"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {samples: 3, n: 4}", r"r.yaml:1: rollout.samples is the old name of rollout.n, which is given too"),
        ("train: 3\nseed: 4", r"r.yaml:2: seed is now train.seed, which cannot stand in the number 3"),
    ],
)
def test_an_old_name_that_cannot_be_moved_is_refused(write, renamed, text, message):
    with pytest.raises(UserError, match=message):
        load_recipe(write(text))


def test_renamed_keys_lead_to_keys_and_end_with_their_version():
    fields = known_fields(Recipe)
    assert all(new in fields and old not in fields for old, new in reader.RENAMED.items())
    assert version(__version__) < version(reader.RENAMED_UNTIL) or not reader.RENAMED


def version(text):
    return [int(part) for part in text.split(".")]


def test_a_recipe_that_ships_is_read_by_its_name(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("gsm8k_tool") == load_recipe(SHIPPED / "gsm8k_tool.yaml")
    assert load_recipe(write("extends: gsm8k_tool\nrollout: {n: 3}")).rollout.n == 3
    with pytest.raises(UserError, match=r"^gsm8k_tol: no such recipe file; did you mean gsm8k_tool"):
        load_recipe("gsm8k_tol")
    with pytest.raises(UserError, match=r"^recipes/gsm8k_tool.yaml: no such .*; did you mean gsm8k_tool"):
        load_recipe("recipes/gsm8k_tool.yaml")
    with pytest.raises(
        UserError, match=r"r.yaml:1: extends: .*gsm8k_tol: no such recipe file; did you mean gsm8k_tool"
    ):
        load_recipe(write("extends: gsm8k_tol"))
    write("rollout: {n: 2}", "gsm8k_tool")  # a path that exists wins
    assert load_recipe("gsm8k_tool").rollout.n == 2
    assert load_recipe(write("extends: gsm8k_tool")).rollout.n == 2


def test_a_dump_does_not_depend_on_the_environment(write, monkeypatch):
    recipe = load_recipe(write("env: {args: {x: '$${PATH}'}}"))
    assert recipe.env.args == {"x": "${PATH}"} != {"x": os.environ["PATH"]}
    assert load_recipe(write(dump_recipe(recipe), "dumped.yaml")) == recipe


MOVING = ("algorithm.kl_coef=0.1", "algorithm.reference.every=2")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.workers=3", "cluster.shard=2"], r"cluster: shard is 2, which does not divide the 3 workers"),
        (["cluster.workers=3", "cluster.sequence_parallel=2"], r"cluster: sequence_parallel is 2, which does not"),
        (
            ["cluster.workers=4", "cluster.shard=2", "cluster.expert_parallel=4"],
            r"shard is 2, no multiple of expert_parallel, 4: a copy has all parts",
        ),
        (["cluster.workers=4", "cluster.expert_parallel=3"], r"cluster: expert_parallel is 3, which does not divide"),
        (["cluster.workers=2", "cluster.tensor_parallel=2", "model.compile=true"], r"model.compile does not go with"),
        (["cluster.nodes=2", "cluster.gpus=8", "cluster.workers=3"], r"nodes x gpus is 16: leave out workers"),
        (["cluster.nodes=2"], r"cluster: nodes is 2, but there are only 1 workers"),
        (["profile.steps=[0]"], r"profile\.steps: there is no step 0; train\.steps is 100"),
        (["train.steps=5", "profile.steps=[5, 6]"], r"profile\.steps: there is no step 6; train\.steps is 5"),
        (["cluster.restarts=1"], r"cluster: restarts is for workers on a cluster"),
        (["cluster.offload=true"], r"cluster: offload: parameters is for workers on a cluster"),
        (["cluster.offload=[activations]"], r"cluster\.offload: activations .* set model\.checkpointing"),
        (["cluster.pools=[{roles: [critic]}]"], r"this recipe has no critic to place there"),
        (
            [*MOVING, "cluster.pools=[{roles: [reference]}]"],
            "a reference that follows .* leave reference out",
        ),
        (
            [*MOVING, "model.lora={rank: 4}"],
            r"algorithm\.reference: with model\.lora the reference is",
        ),
        (["train.warmup=2.5"], "train.warmup: expected a share below 1, or a whole number of steps"),
        (["train.cycles=2"], "cycles has no effect with the schedule constant"),
        (["train.min_lr_ratio=0.1"], "min_lr_ratio has no effect with the schedule constant"),
        (["rollout.oversample=1.5", "rollout.overlap=async"], "rollout: oversample abandons what is slow"),
        (["algorithm.dynamic_sampling.budget=0.5"], "algorithm.dynamic_sampling.budget: "),
        (["algorithm.leave_out=[error]"], "algorithm.leave_out.0: "),
        (
            ["algorithm.reject=[{level: token}]"],
            r"algorithm\.reject\.0: set low, high, or both: without",
        ),
        (
            ["algorithm.reference={ema: 0.9}"],
            r"algorithm: reference moves .* there is none: set kl_coef",
        ),
        (["algorithm.reference={}"], r"algorithm\.reference: set every, ema, or both"),
        (["algorithm.reference.ema=1"], r"algorithm\.reference\.ema: expected less than 1"),
        (
            ["algorithm.kl_target=0.1"],
            "algorithm: kl_target moves kl_coef, which is 0: set kl_coef",
        ),
    ],
)
def test_keys_that_do_not_add_up(overrides, said):
    with pytest.raises(UserError, match=said):
        load_recipe(None, overrides)


def test_the_size_of_a_cluster():
    assert load_recipe(str(SHIPPED / "gsm8k_tool.yaml"), []).cluster.used is False
    found = load_recipe(str(SHIPPED / "gsm8k_tool.yaml"), ["cluster.nodes=2", "cluster.gpus=4"]).cluster
    assert (found.size, found.used) == (8, True)


def test_a_variable_is_written_as_it_stood_and_read_again(write, monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_TEST_N", "12")
    monkeypatch.setenv("AGENTRL_TEST_SECRET", "hunter2")
    (tmp_path / "t.jinja").write_text("")
    write("env: {name: code, args: {url: '${AGENTRL_TEST_SECRET}', more: [1, '${AGENTRL_TEST_SECRET}']}}", "base.yaml")
    text = """
extends: base.yaml
tools: ["${AGENTRL_TEST_SECRET}", {name: mcp, args: {headers: {Authorization: "Bearer ${AGENTRL_TEST_SECRET}"}}}]
sft: {new_model: {chat_template: "${AGENTRL_TEST_T:-t}.jinja"}}
rollout:
  n: ${AGENTRL_TEST_N}
model: {lora: {targets: "${AGENTRL_TEST_T:-q_proj}"}}
env: {source: "$${plain} ${AGENTRL_TEST_N}"}
eval: {splits: null}
"""
    recipe = load_recipe(write(text), ["output=${AGENTRL_TEST_SECRET}", "train.seed=${AGENTRL_TEST_NO:-3}"])
    written = dump_recipe(recipe)
    assert "hunter2" not in written
    for kept in ("${AGENTRL_TEST_SECRET}", "n: ${AGENTRL_TEST_N}\n", "seed: ${AGENTRL_TEST_NO:-3}\n"):
        assert kept in written
    again = load_recipe(write(written, "dumped.yaml"))
    assert again.model_dump() == recipe.model_dump()
    assert dump_recipe(again) == written
    monkeypatch.setenv("AGENTRL_TEST_N", "7")
    assert load_recipe(write(written, "dumped.yaml")).rollout.n == 7
    monkeypatch.delenv("AGENTRL_TEST_SECRET")
    with pytest.raises(
        UserError, match=r"dumped.yaml:\d+: [\w.]+: the environment variable AGENTRL_TEST_SECRET is not"
    ):
        load_recipe(write(written, "dumped.yaml"))


def test_a_value_that_replaces_a_variable_is_written_itself(write, monkeypatch):
    monkeypatch.setenv("AGENTRL_TEST_N", "4")
    write(
        "rollout:\n  n: ${AGENTRL_TEST_N}\n  tasks: ${AGENTRL_TEST_N}\nenv: {args: {x: '${AGENTRL_TEST_N}'}}",
        "base.yaml",
    )
    recipe = load_recipe(write("extends: base.yaml\nrollout: {n: 4}\nenv: {args: {}}\n"), ["rollout.tasks=4"])
    assert "AGENTRL_TEST_N" not in dump_recipe(recipe)
    other = load_recipe(write("rollout:\n  n: ${AGENTRL_TEST_N}\n"))
    other = other.model_copy(update={"rollout": other.rollout.model_copy(update={"n": 9})})
    assert other.written()["rollout"]["n"] == 9


def test_a_mistake_in_a_variable_is_told_without_its_value(write, monkeypatch):
    monkeypatch.setenv("AGENTRL_TEST_SECRET", "hunter2")
    with pytest.raises(
        UserError, match=r"train.lr: expected a number, got what \$\{AGENTRL_TEST_SECRET\} holds"
    ) as caught:
        load_recipe(write("train:\n  lr: ${AGENTRL_TEST_SECRET}\n"))
    assert "hunter2" not in str(caught.value)


SECRETS = """
env:
  name: code
  source: https://someone:hunter2@host/data?x=1&api_key=hunter2
  args: {token: hunter2, prompt: "1 + 1 = 2", max_tokens: 256, nested: [{apiKey: hunter2, pin_password: 123456789}]}
engine: {args: {api_key_env: OPENAI_API_KEY, headers: {X-Anything: hunter2}, secure: true}}
tools:
- {name: mcp, args: {command: npx, args: [server, --token, hunter2, "--secret=hunter2", -v], env: {MODE: hunter2}}}
- name: mcp
  args: {header: "Authorization: Bearer hunter2hunter2hunter2", key: "prefix hunter2 ${AGENTRL_TEST_V:-hunter2}"}
"""


def test_secrets_that_were_written_out_are_not_shown(write):
    recipe = load_recipe(write(SECRETS))
    text = show_recipe(recipe)
    assert "hunter2" not in text
    assert "123456789" not in text
    for told in (
        "https://***@host/data?x=1&api_key=***", "token: '***'", "1 + 1 = 2", "max_tokens: 256", "--secret=***", "- -v",
        "api_key_env: OPENAI_API_KEY", "X-Anything: '***'", "MODE: '***'", "Bearer ***", "key: \"${AGENTRL_TEST_V}\"",
    ):  # fmt: skip
        assert told in text
    assert "hunter2" in dump_recipe(recipe)  # what a resumed run needs
    assert "hunter2" not in repr(recipe.shown())


def test_secrets_of_the_command_line_are_written_as_variables(write, monkeypatch):
    monkeypatch.setenv("AGENTRL_SECRET_API_KEY", "another")  # of somebody else: kept as it is
    given = {
        "env.args.api_key": "sk-hunter2-hunter2", "env.source": "https://me:hunter2@h/data",
        "tools": "[{name: mcp, args: {command: npx, args: [--token, hunter2], pin_password: 123456, log: plain}}]",
    }  # fmt: skip
    recipe = load_recipe(write("env: {args: {token: hunter2}}"), [f"{key}={value}" for key, value in given.items()])
    assert recipe.secrets == ("sk-hunter2-hunter2",)
    text = dump_recipe(recipe)
    assert text.count("hunter2") == 1, "the file's own, which is the user's"
    for told in ('source: "${AGENTRL_SECRET_SOURCE}"', "pin_password: ${AGENTRL_SECRET_PIN_PASSWORD}\n", "log: plain"):
        assert told in text
    assert load_recipe(write(text, "run.yaml")) == recipe
    monkeypatch.delenv("AGENTRL_SECRET_API_KEY_2")
    with pytest.raises(UserError, match=r"api_key: .* AGENTRL_SECRET_API_KEY_2 is not set; its value was given on the"):
        load_recipe(write(text, "run.yaml"))


def test_secrets_in_what_others_say_are_hidden():
    for text in (
        "ServerArgs(api_key='hunter2', x=1)", 'got {"token": "hunter2"}', "GET https://h/x?api_key=hunter2&y=1: 401",
        "postgres://me:hunter2@h/db", "Authorization: Bearer hunter2hunter2hunter2",
    ):  # fmt: skip
        assert "hunter2" not in masked_text(text)
    for text in ("the key is missing", "max_tokens=256 tokens: 3", "tools.0.args.token: should be text, got 3"):
        assert masked_text(text) == text


BOMB = "\n".join(
    [
        "a: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]",
        *(f"b{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 11)),
    ]
)


def test_aliases_that_stand_for_billions_are_refused(write):
    assert load_recipe(write("env: {args: {a: &x [1, 2], b: *x, c: [*x, *x]}}")).env.args["c"] == [[1, 2], [1, 2]]
    with pytest.raises(UserError, match=r"r.yaml:\d+: aliases repeat more than 10,000 values"):
        load_recipe(write(BOMB))


def test_a_number_that_is_too_long_is_told(write):
    with pytest.raises(UserError, match=r"r.yaml:1: train.seed: a number of 5,000 digits is too long"):
        load_recipe(write(f"train: {{seed: {'9' * 5000}}}"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_keys_and_a_recipes_own_come_over_them(name: str) -> None:
    keys = PRESETS[name].keys
    short, other = (
        AlgorithmSection.model_validate(name),
        AlgorithmSection(preset=name, off_policy_cap=3.0, clip_high=0.9),
    )
    for key, value in keys.items():
        found = getattr(short, key)
        assert found == getattr(AlgorithmSection(**{key: value}), key)
        assert key == "clip_high" or getattr(other, key) == found
    assert (other.clip_high, other.off_policy_cap) == (0.9, 3.0)
    assert AlgorithmSection.model_validate(short.model_dump()) == short


def test_presets_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("algorithm: dapo\n")
    assert Recipe.load(path).algorithm.clip_high == 0.28
    assert Recipe.load(path, ["algorithm.preset=gspo"]).algorithm.loss.name == "gspo"
    assert Recipe.load(path, ["algorithm.clip_high=0.4"]).algorithm.clip_high == 0.4
    assert Recipe.load(path, ["algorithm.loss=sapo", "algorithm.loss.args.tau_positive=2"]).algorithm.loss.args == {
        "tau_positive": 2
    }
    with pytest.raises(UserError, match=r"algorithm: no preset 'dpao'; did you mean 'gdpo' or 'dapo'"):
        Recipe.load(None, ["algorithm=dpao"])


def test_rules_of_rejection_are_read_from_a_file_and_written_to_one(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "algorithm:\n  preset: dapo\n  reject:\n    - {level: token, high: 2}\n    - {over: min, low: 1.0e-4}\n"
    )
    found = Recipe.load(path).algorithm
    assert [(rule.level, rule.over, rule.low, rule.high) for rule in found.reject] == [
        ("token", "mean", None, 2.0),
        ("sequence", "min", 1e-4, None),
    ]
    path.write_text(yaml.safe_dump({"algorithm": found.model_dump(mode="json")}))
    assert Recipe.load(path).algorithm == found
