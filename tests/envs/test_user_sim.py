"""The environment `user_sim`: what the customer answers, what is held out, and that only asking pays."""

import random
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from agentrl_envs.user_sim.dialogue import Dialogue, Heard, plain
from agentrl_envs.user_sim.environment import UserSim
from agentrl_envs.user_sim.facts import FACTS, is_held_out
from agentrl_envs.user_sim.generate import FEWEST, KINDS, SPLITS, Scenario, scenario
from fakes import ScriptedEngine, call, make_driver

from agentrl.errors import UserError
from agentrl.plugins.registry import make_environment
from agentrl.plugins.types import Message, Task
from agentrl.recipe.sections.env import EnvSection
from agentrl.testing import call as agent_call
from agentrl.testing import check_environment
from agentrl.trajectory import FinishReason, Trajectory

SPLIT_FACTS = {fact.name for fact in FACTS if fact.splits}


def _made(kind: str, told: tuple[str, ...] = (), found: str | None = None, **facts: str) -> Scenario:
    return Scenario(next(k for k in KINDS if k.name == kind), facts, told, found, "Hello.", other_words=False)


def _table(**more: tuple[str, ...]) -> Dialogue:
    return Dialogue(_made("table", day="Friday", time="19:15", people="4", **more), patience=2)


def _hear(dialogue: Dialogue, text: str) -> tuple[Heard, str]:
    heard, said, _ = dialogue.hear(text, Random(0))
    return heard, said


def test_what_is_asked_for_is_given_and_nothing_else() -> None:
    dialogue = _table()
    heard, said = _hear(dialogue, "On which day, please?")
    assert (heard, dialogue.known) == (Heard.NEEDED, {"day"})
    assert "Friday" in said
    assert "19:15" not in said
    assert "4" not in said
    heard, said = _hear(dialogue, "And at what TIME, and how many guests?")
    assert heard is Heard.NEEDED
    assert said.index("19:15") < said.index("4")
    assert (dialogue.asked, dialogue.patience) == (2, 2)


@pytest.mark.parametrize(
    ("question", "heard"),
    [
        ("What is your favourite song?", Heard.IDLE),
        ("What is your card number?", Heard.IDLE),
        ("", Heard.IDLE),
        ("Fine.", Heard.IDLE),
        ("Daytime? Timely? Someday?", Heard.IDLE),
        ("Which day, what time, how many people, what name and which size?", Heard.IDLE),
        ("Which day was it?", Heard.REPEATED),
    ],
)
def test_idle_and_repeated_questions_cost_patience(question: str, heard: Heard) -> None:
    dialogue = _table(told=("day",))
    assert _hear(dialogue, question)[0] is heard
    assert (dialogue.patience, dialogue.known) == (1, {"day"})


def test_who_asks_idly_too_often_is_left() -> None:
    dialogue = _table()
    for left in (1, 0):
        assert _hear(dialogue, "Nice weather?")[0] is Heard.IDLE
        assert (dialogue.patience, dialogue.over) == (left, False)
    assert _hear(dialogue, "Nice weather?") == (Heard.IDLE, "Never mind, I will go elsewhere.")
    assert dialogue.over
    assert not dialogue.right


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("#### table Friday 19:15 4", True),
        ("It is booked.\n#### Table friday, 19:15, 4.\nThank you!", True),
        ("#### table Friday 19:15 5", False),
        ("#### table Friday 19:15", False),
        ("#### table Friday 19:15 4 or 5", False),
        ("#### table Friday 19:15 4\n#### table Friday 19:15 5", False),
        ("#### table Friday 1915 4", False),
        ("####", False),
    ],
)
def test_the_final_line_must_be_right_and_end_the_message(said: str, right: bool) -> None:
    dialogue = _table()
    assert _hear(dialogue, said) == (Heard.ANSWER, "")
    assert (dialogue.over, dialogue.right, dialogue.asked) == (True, right, 0)


def test_every_question_of_a_demonstration_asks_for_its_fact_alone() -> None:
    for kind in KINDS:
        for fact in kind.facts:
            for question in fact.questions:
                dialogue = Dialogue(_made(kind.name, **{f.name: f.value(Random(1), False) for f in kind.facts}), 0)
                assert _hear(dialogue, question)[0] is Heard.NEEDED
                assert dialogue.known == {fact.name}, question


def test_all_wishes_and_facts_occur_and_leave_enough_open() -> None:
    sizes = {fact.name: fact.size for fact in FACTS}
    seen: Counter[str] = Counter()
    for i in range(600):
        made = scenario("train", i)
        seen[made.kind.name] += 1
        open_values = 1
        for name in made.missing:
            open_values *= sizes[name]
        assert open_values >= FEWEST
        assert all(made.facts[name] in made.opening for name in made.told)
        assert not set(plain(made.opening)) & {w for n in made.missing if sizes[n] > 60 for w in plain(made.facts[n])}
    assert set(seen) == {k.name for k in KINDS}
    assert {f.name for k in KINDS for f in k.facts} == set(sizes)


def test_no_answer_to_an_opening_is_right_often() -> None:
    """Whoever knew the whole generator and asked for nothing would still be wrong."""
    answers: dict[str, Counter[str]] = {}
    for i in range(6000):
        made = scenario("train", i)
        answers.setdefault(made.opening, Counter())[made.answer] += 1
    right = sum(c.most_common(1)[0][1] for c in answers.values() if c.total() >= 30)
    total = sum(c.total() for c in answers.values() if c.total() >= 30)
    assert total > 2000
    assert right / total < 0.06


def test_held_out_facts_and_wordings_are_never_trained_on() -> None:
    def values(split: str) -> set[tuple[str, str]]:
        return {(n, v) for i in range(1000) for n, v in scenario(split, i).facts.items() if n in SPLIT_FACTS}

    train = values("train")
    for split in SPLITS[1:]:
        assert not train & values(split)
        assert all(is_held_out(n, v) for n, v in values(split))
    for i in range(99):
        assert not scenario("train", i).other_words
        made = scenario("wording", i)
        assert made.other_words
        assert made.opening.startswith(made.kind.other_openings)
    for kind in KINDS:
        assert not set(kind.openings) & set(kind.other_openings)
    for fact in FACTS:
        assert not set(fact.answers) & set(fact.other_answers)
        assert fact.stated[0] != fact.stated[1]
        assert any(f.splits for k in KINDS if fact in k.facts for f in k.facts), "a wish with nothing held out"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"args": {"patience": -1}}, "patience must be 0 or more"),
        ({"args": {"system_prompt": "Serve him."}}, "system_prompt lacks {form}"),
    ],
)
def test_wrong_settings_are_one_clear_line(section: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_environment(EnvSection(name="user_sim", **section))


def _task(env: UserSim, split: str, kind: str, missing: int) -> Task:
    return next(t for t in env.tasks(split) if t.data["kind"] == kind and len(t.data["missing"]) == missing)


async def _play(env: UserSim, task: Task, *turns: str) -> Trajectory:
    driver = make_driver(ScriptedEngine(turns), env, max_turns=8)
    trajectory = await driver.drive(driver.request(task, 0))
    assert trajectory.failure is None
    return trajectory


@pytest.mark.parametrize("split", SPLITS)
async def test_who_asks_gets_the_full_reward_and_who_guesses_less(split: str) -> None:
    env = UserSim()
    task = _task(env, split, "haircut", 3)
    gold = await _play(
        env, task, "What name is it for?", "On what day?", "At what time?", f"#### {task.data['answer']}"
    )
    assert gold.rewards == pytest.approx({"answer": 1.0, "questions": -0.03, "step": 0.2})
    assert [turn.reward for turn in gold.turns] == pytest.approx([0.2 / 3] * 3 + [0])
    assert env.solved(gold.rewards, task)
    said = " ".join(str(m["content"]) for m in gold.messages if m["role"] == "user")
    assert all(fact in said for fact in task.data["answer"].split()[1:])
    guess = await _play(env, task, "#### haircut Smith Monday 10:00")
    assert guess.rewards == {"answer": 0.0, "questions": 0.0}
    assert (guess.finish, env.solved(guess.rewards, task)) == (FinishReason.STOP, False)
    asked = await _play(env, task, "What name is it for?", "#### haircut Smith Monday 10:00")
    assert guess.reward < asked.reward < gold.reward


@pytest.mark.parametrize("split", SPLITS)
async def test_its_own_tool_finds_what_the_customer_cannot_say(split: str) -> None:
    env = UserSim()
    task = _task(env, split, "price", 1)
    asked = await _play(env, task, "Which order is it?", "#### 0")
    number = next(w for m in asked.messages if m["role"] == "user" for w in plain(str(m["content"])) if w.isdigit())
    gold = await _play(env, task, "Which order is it?", call("lookup", number=number), f"#### {task.data['answer']}")
    assert gold.messages[-2]["content"] == f"price {task.data['answer']}"
    assert (gold.rewards["answer"], asked.rewards["answer"]) == (1.0, 0.0)
    wrong = await _play(env, task, call("lookup", number="1"), "#### 0")
    assert wrong.messages[-2]["content"] == "error: no record of 1"
    assert wrong.tool_uses[0].error is not None


def _gold(task: Task, messages: Sequence[Message]) -> str:
    """Asks for what is missing, looks up what has a record, and answers."""
    made = scenario(task.data["split"], task.data["index"], task.data["seed"])
    said = sum(m["role"] == "assistant" for m in messages)
    if said < len(made.missing):
        return next(f.questions[0] for f in FACTS if f.name == made.missing[said])
    if task.data["looks_up"] and said == len(made.missing):
        return agent_call("lookup", number=next(iter(made.facts.values())))
    return f"#### {made.answer}"


def test_it_keeps_what_training_relies_on() -> None:
    """Openings may be alike on both sides: what is held out is what the customer says when he is asked."""
    check_environment(UserSim, _gold, lambda task: ["#### nothing"], disjoint=False)


async def test_the_tool_is_offered_where_it_is_needed_only() -> None:
    env = UserSim()
    assert [t.name for t in env.tools_for(_task(env, "train", "points", 1))] == ["lookup"]
    task = _task(env, "train", "cancel", 1)
    assert env.tools_for(task) == ()
    tried = await _play(env, task, call("lookup", number="1"), f"#### {task.data['answer']}")
    assert "lookup" in str(tried.messages[-2]["content"])
    assert tried.tool_uses[0].error is not None


async def test_the_impatient_customer_ends_it() -> None:
    env = UserSim(patience=1, question_cost=0.1)
    left = await _play(env, _task(env, "train", "cancel", 1), "Hm?", "So?", "#### never said")
    assert left.finish is FinishReason.ENV_DONE
    assert left.rewards == pytest.approx({"answer": 0.0, "questions": -0.2})
    assert left.messages[-1]["content"] == "Never mind, I will go elsewhere."


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("split", SPLITS)
async def test_clean_demonstrations_are_gold_and_careless_ones_often_wrong(split: str) -> None:
    env, solved = UserSim(), Counter()
    for task in env.tasks(split)[:60]:
        for style in ("clean", "careless"):
            messages = env.demonstrate(task, random.Random(task.id), style)
            assert messages[-1]["role"] == "assistant"
            turns = [
                call("lookup", **m["tool_calls"][0]["function"]["arguments"]) if "tool_calls" in m else m["content"]
                for m in messages
                if m["role"] == "assistant"
            ]
            played = await _play(env, task, *turns, "#### nothing")
            assert [m["role"] for m in played.messages[2:]][: len(messages)] == [m["role"] for m in messages]
            solved[style] += env.solved(played.rewards, task)
    assert solved["clean"] == 60
    assert 15 < solved["careless"] < 45
