"""The environment `search_qa`: its questions and splits, its grades, its rows, a gold and a wrong agent, its recipe."""

import json
from pathlib import Path
from random import Random

import pytest
from agentrl_envs.search_qa import generated
from agentrl_envs.search_qa.demonstrations import STYLES
from agentrl_envs.search_qa.environment import SYSTEM_PROMPT, SearchQa, exact_match, f1, normalized, read_answer
from agentrl_envs.search_qa.world import world
from fakes import call, make_driver
from paths import RECIPES
from train_help import metrics

from agentrl import Recipe, Session
from agentrl.errors import UserError


@pytest.fixture(scope="module")
def env() -> SearchQa:
    return SearchQa(format=True)


def test_what_is_held_out_is_never_trained_on(env):
    asked = {split: [generated.question_of(t) for t in env.tasks(split)] for split in ("train", *env.splits)}
    sizes = {split: len(questions) for split, questions in asked.items()}
    assert sizes == {"train": 2605, "test": 429, "two_hop": 240, "validation": 126}
    texts = [q.text for questions in asked.values() for q in questions]
    assert len(set(texts)) == len(texts)
    assert not {q.subject for q in asked["test"] + asked["validation"]} & {q.subject for q in asked["train"]}
    assert not {q.path for q in asked["two_hop"]} & {q.path for q in asked["train"] + asked["test"]}
    assert {len(q.path) for q in asked["test"]} == {len(q.path) for q in asked["train"]} == {1, 2}


@pytest.mark.slow
def test_the_order_is_the_seeds_and_the_questions_are_nobodys(env):
    train = env.tasks("train")
    assert [t.id for t in train] == [t.id for t in SearchQa().tasks("train")]
    other = SearchQa(seed=1)
    assert [t.id for t in train] != [t.id for t in other.tasks("train")]
    assert {t.id: t.data for t in train} == {t.id: t.data for t in other.tasks("train")}
    assert env.tasks("test") == other.tasks("test")
    assert train[0].id == "train-1963", "the generator changed: runs no longer compare"
    assert train[0].data["question"] == "In which year did The Green Boat of Trorkinzford come out?"


def test_every_answer_stands_in_the_articles_that_a_search_finds(env):
    (search,) = env.tools()
    articles = dict(world().documents)
    for split in ("train", *env.splits):
        for question in generated.questions(split)[::10]:
            assert question.answer in articles[question.titles[-1]]
            for title in question.titles:
                assert f"Doc 1(Title: {title})" in search.look_up(title), title
            assert question.answer not in question.text


@pytest.mark.parametrize(
    ("said", "golden", "em", "f"),
    [
        ("Paris", ["Paris"], 1, 1),
        (" the  PARIS. ", ["Paris"], 1, 1),
        ("Paris, France", ["Paris"], 0, 2 / 3),
        ("Rome", ["Paris", "Rome"], 1, 1),
        ("Rome", ["Paris"], 0, 0),
        ("the", ["a"], 1, 1),
        ("the", ["Paris"], 0, 0),
        ("a b b", ["b b c"], 0, 0.8),
        ("U.S.A.", ["USA"], 1, 1),
    ],
)
def test_grades(said, golden, em, f):
    assert (exact_match(said, golden), f1(said, golden)) == (em, pytest.approx(f))


def test_reading_an_answer():
    assert read_answer("<answer>a</answer> no, <answer>\n b </answer>") == "b"
    assert read_answer("<answer>a") is read_answer("a</answer>") is read_answer("") is None
    assert normalized("  An  apple's THE end! ") == "apples end"


def _session(task, *said):
    return Session("s", task, Random(0), 1e9, [{"role": "user", "content": "?"}, *said])


async def test_rewards(env):
    task = env.tasks("test")[0]
    right = {"role": "assistant", "content": f"<answer>{task.data['answers'][0]}</answer>"}
    found = {"role": "tool", "content": "Doc 1: x"}
    assert await env.calc_reward(_session(task, found, right)) == {"em": 1.0, "f1": 1.0, "format": 1.0}
    assert await env.calc_reward(_session(task, right)) == {"em": 1.0, "f1": 1.0, "format": 0.0}
    assert await env.calc_reward(_session(task, right, {"role": "assistant", "content": "hm"})) == {
        "em": 0.0, "f1": 0.0, "format": 0.0,
    }  # fmt: skip
    assert await env.calc_reward(_session(task)) == {"em": 0.0, "f1": 0.0, "format": 0.0}
    assert set(await SearchQa().calc_reward(_session(task))) == {"em", "f1"}
    assert env.solved({"em": 1.0, "f1": 1.0, "format": 0.0}, task)
    assert not env.solved({"em": 0.0, "f1": 0.9, "format": 1.0}, task)


def _gold(task):
    question = generated.question_of(task)
    return [*(call("search", query=title) for title in question.titles), f"<answer>{question.answer}</answer>"]


@pytest.mark.parametrize("split", ["train", "test", "two_hop"])
async def test_a_gold_and_a_wrong_agent(env, split):
    """Played by the real driver: who looks it up earns it all, who guesses earns nothing."""
    for task in env.tasks(split)[:6]:
        driver = make_driver(_gold(task), env)
        gold = await driver.drive(driver.request(task, 0))
        assert (gold.valid, gold.rewards) == (True, {"em": 1.0, "f1": 1.0, "format": 1.0})
        assert task.data["answers"][0] in gold.messages[-2]["content"]
        assert env.solved(gold.rewards, task)
        driver = make_driver(["<answer>Nobody</answer>"], env)
        wrong = await driver.drive(driver.request(task, 0))
        assert (wrong.valid, wrong.rewards) == (True, {"em": 0.0, "f1": 0.0, "format": 0.0})
        assert not env.solved(wrong.rewards, task)


async def test_a_query_that_is_refused_goes_back_to_the_model(env):
    task = env.tasks("train")[0]
    driver = make_driver([call("search", query=" "), call("search"), "<answer>x</answer>"], env)
    t = await driver.drive(driver.request(task, 0))
    texts = [m["content"] for m in t.messages if m["role"] == "tool"]
    assert t.valid
    assert "empty" in texts[0]
    assert "missing" in texts[1]


async def test_demonstrations(env):
    """A clean one is what the driver would have played, word for word, and earns it all."""
    for task in env.tasks("train")[:40]:
        shown = env.demonstrate(task, Random(0), "clean")
        script = [
            call("search", **m["tool_calls"][0]["function"]["arguments"]) if m.get("tool_calls") else m["content"]
            for m in shown
            if m["role"] == "assistant"
        ]
        driver = make_driver(script, env)
        played = await driver.drive(driver.request(task, 0))
        assert [m["content"] for m in played.messages if m["role"] == "tool"] == [
            m["content"] for m in shown if m["role"] == "tool"
        ]
        assert played.rewards["em"] == 1.0


async def test_careless_demonstrations_are_sometimes_right(env):
    rng = Random(0)
    grades = []
    for task in env.tasks("train")[:300]:
        shown = env.demonstrate(task, rng, "careless")
        grades.append((await env.calc_reward(_session(task, *shown)))["em"])
    assert 0.3 < sum(grades) / len(grades) < 0.7
    with pytest.raises(UserError, match="no demonstrations of style 'tidy'"):
        env.demonstrate(env.tasks("train")[0], rng, "tidy")
    assert set(STYLES) == {"clean", "careless"}


ROWS = [
    {"id": "a", "question": "who wrote it", "golden_answers": ["Ann", "Ann Lee"], "data_source": "nq"},
    {"question": "when", "data_source": "hotpotqa", "reward_model": {"ground_truth": {"target": ["1999"]}}},
    {"extra_info": {"question": "where"}, "golden_answers": "Rome"},
    {"prompt": [{"role": "user", "content": "Do it so. Question: what\n"}], "golden_answers": ["tea"]},
]


def _write(path: Path, rows) -> str:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _simple(start: int, count: int) -> list[dict[str, object]]:
    return [
        {"question": f"q{i}", "golden_answers": [f"a{i}"], "data_source": "nq"} for i in range(start, start + count)
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_rows_in_the_shape_of_search_r1(tmp_path, suffix):
    rows = ROWS if suffix == ".jsonl" else ROWS[:1]
    _write(tmp_path / f"train{suffix}", rows)
    _write(tmp_path / f"test{suffix}", _simple(0, 3))
    env = SearchQa(str(tmp_path / f"train{suffix}"))
    train = env.tasks("train")
    assert [(t.data["question"], t.data["answers"]) for t in train] == [
        ("who wrote it", ("Ann", "Ann Lee")), ("when", ("1999",)), ("where", ("Rome",)), ("what", ("tea",)),
    ][: len(rows)]  # fmt: skip
    assert train[0].data["data_source"] == "nq"
    assert [t.id for t in env.tasks("test")] == ["test-0", "test-1", "test-2"]
    assert env.tools() == ()
    opening = await env.create(_session(train[0]))
    assert opening == [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "who wrote it"}]
    with pytest.raises(UserError, match="generated questions only"):
        env.demonstrate(train[0], Random(0), "clean")


def test_a_file_alone_is_split_by_its_questions(tmp_path):
    rows = [{**row, "id": i} for i, row in enumerate(_simple(0, 100) * 2)]
    env = SearchQa(_write(tmp_path / "all.jsonl", rows))
    train, test = ({t.data["question"] for t in env.tasks(split)} for split in ("train", "test"))
    assert test
    assert not train & test
    assert len(train | test) == 100


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"golden_answers": ["x"]}, "no text in the field 'question'; its fields: 'golden_answers'"),
        ({"question": 5, "golden_answers": ["x"]}, "no text in the field 'question'"),
        ({"question": "q"}, "has neither 'golden_answers' nor"),
        ({"question": "q", "golden_answers": []}, "field 'golden_answers': expected a text or a list of texts, got []"),
        ({"question": "q", "golden_answers": [" "]}, "expected a text or a list"),
        ({"question": "q", "reward_model": {"ground_truth": {"target": 3}}}, "ground_truth.target': expected .* got 3"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, what):
    _write(tmp_path / "test.jsonl", _simple(0, 1))
    env = SearchQa(_write(tmp_path / "train.jsonl", [*_simple(0, 2), row]))
    with pytest.raises(UserError, match=r"train.jsonl, line 3.*" + what.replace("[", r"\[").replace("]", r"\]")):
        env.tasks("train")


def test_what_the_recipe_may_not_say(tmp_path):
    with pytest.raises(UserError, match="no split 'dev'"):
        SearchQa().tasks("dev")
    with pytest.raises(UserError, match=r"env.source is generated"):
        SearchQa(config="x")
    with pytest.raises(UserError, match="there is no file"):
        SearchQa(str(tmp_path / "none.jsonl"))


@pytest.mark.slow
def test_the_recipe_trains_the_model_that_it_makes(tmp_path, monkeypatch):
    from agentrl import train

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    recipe = Recipe.load(
        str(RECIPES / "search_qa.yaml"),
        [
            f"output={tmp_path / 'run'}", "train.steps=2", "train.save_every=0", "train.threads=1", "rollout.tasks=2",
            "rollout.n=4", "rollout.max_turns=3", "rollout.max_turn_tokens=32", "eval.every=0", "eval.tasks=4",
            "sft.new_model.texts=100", "sft.stages=[{style: clean, steps: 10, batch: 4}]",
        ],
    )  # fmt: skip
    train(recipe)
    written = metrics(tmp_path / "run")
    assert [line["step"] for line in written] == [0, 1, 2]
    assert {"eval/test/accuracy", "eval/two_hop/accuracy"} <= set(written[0])
    assert {"reward/em", "reward/f1", "reward/format", "train/loss"} <= set(written[2])
