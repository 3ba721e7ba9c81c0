"""What is read of a run's folder for its page."""

import json
import os
import socket
from pathlib import Path

import pytest
from view_help import HOSTILE, LENGTH, failed, group, journal, run_folder, trajectory

from agentrl.errors import UserError
from agentrl.models import embedded_path
from agentrl.view.pieces import reader
from agentrl.view.selection import Chosen, as_table
from agentrl.view.store import RunStore, column


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder that no test changes."""
    return run_folder(tmp_path_factory.mktemp("view") / "run")


@pytest.fixture
def store(folder: Path) -> RunStore:
    return RunStore(folder, "run")


def test_the_state_names_files_recipes_and_checkpoints(store: RunStore) -> None:
    state = store.state()
    names = {file["name"]: (file["split"], file["step"], file["evaluation"]) for file in state["files"]}
    assert names["eval_test_0.parquet"] == ("test", 0, True)
    assert names["step_2.parquet"] == ("train", 2, False)
    assert [recipe["name"] for recipe in state["recipes"]] == ["recipe.yaml", "recipe.resumed_1.yaml"]
    assert state["recipes"][1]["tree"]["train"]["steps"] == 4
    assert state["recipes"][1]["comment"] == "of step 2"
    assert not state["training"]


def test_the_index_has_every_short_fact_and_the_data_of_tasks(store: RunStore) -> None:
    index = store.index(["eval_test_2.parquet", "step_1.parquet", "../recipe.yaml", "nothing.parquet"])
    assert index.keys() == {"eval_test_2.parquet", "step_1.parquet"}
    test, step = index["eval_test_2.parquet"], index["step_1.parquet"]
    assert test["rows"] == 14
    assert column(test, "solved")[:3] == [True, False, True]
    assert column(test, "boundary")[-1] == "tool"
    assert column(test, "branches") == [0] * 11 + [3, 0, 0]
    assert test["tasks"]["test-3"] == {"kind": "odd", "question": "What is test-3?"}
    assert step["rows"] == 8
    assert step["finish"] == "stop"  # one value of all samples
    assert column(step, "advantage") == [-0.5, 0.5, -0.5, 0.5] * 2
    assert column(test, "advantage") == [None] * 14
    assert column(step, "calls") == [1] * 8
    assert column(step, "total_s")[:4] == [1, 2, 3, 4]


def test_metrics_go_on_where_they_ended_and_a_line_that_is_not_whole_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    store = RunStore(tmp_path, "run")
    assert store.metrics()["rows"] == []
    path.write_text('{"step": 0}\n{"step": 1, "x": NaN}\n{"st')
    first = store.metrics()
    assert first["rows"] == [{"step": 0}, {"step": 1, "x": None}]
    with path.open("a") as file:
        file.write('ep": 2}\nno row\n[1]\n')
    second = store.metrics(first["next"], first["of"])
    assert (second["start"], second["rows"], second["damaged"]) == (first["next"], [{"step": 2}], 2)
    path.with_suffix(".new").write_text('{"step": 0}\n')
    path.with_suffix(".new").replace(path)  # as a resumed run does
    third = store.metrics(second["next"], second["of"])
    assert (third["start"], third["rows"]) == (0, [{"step": 0}])


def test_a_damaged_file_is_a_line_and_the_others_are_shown(tmp_path: Path) -> None:
    store = RunStore(run_folder(tmp_path / "run"), "run")
    (tmp_path / "run" / "trajectories" / "step_1.parquet").write_bytes(b"PAR1 no more")
    (tmp_path / "run" / "trajectories" / "eval_large_0.jsonl").mkdir()
    (tmp_path / "run" / "recipe.resumed_1.yaml").write_text("a: [")
    names = [file["name"] for file in store.state()["files"]]
    index = store.index(names)
    assert "step_1.parquet: cannot be read" in index["step_1.parquet"]["error"]
    assert index["step_2.parquet"]["rows"] == 8
    assert store.search("what", names)["step_1.parquet"] == []
    assert store.state()["recipes"][1]["error"].startswith("cannot be read: ")
    with pytest.raises(UserError, match=r"step_1\.parquet: cannot be read"):
        store.sample("step_1.parquet", 0)
    with pytest.raises(UserError, match="has no such row"):
        store.sample("step_2.parquet", 8)


def test_a_file_is_read_again_once_it_changes(tmp_path: Path) -> None:
    store = RunStore(run_folder(tmp_path / "run"), "run")
    assert store.index(["step_2.parquet"])["step_2.parquet"]["rows"] == 8
    journal(tmp_path / "run").step(2, [group(trajectory("other"))])
    assert store.index(["step_2.parquet"])["step_2.parquet"]["task"] == "other"


def test_a_sample_has_every_conversation_and_the_text_of_each_token(store: RunStore) -> None:
    sample = store.sample("eval_test_2.parquet", 11)
    assert [told["heading"] for told in sample["told"]] == [
        "conversation 1 of 2",
        "conversation 2 of 2 (sub-agent), which leaves conversation 1 after message 1",
    ]
    assert len(sample["pieces"]) == LENGTH
    assert store.samples("eval_test_2.parquet", [11, 3])[0] == sample
    trained = store.sample("step_1.parquet", 1)
    assert trained["trainer_logprobs"][4:7] == [-0.35, -0.35, -2.25]
    assert trained["advantages"][4] == 0.5
    assert trained["seed"] == "1"


def test_without_a_tokenizer_it_says_why(tmp_path: Path) -> None:
    sample = RunStore(run_folder(tmp_path / "run", recipe=False), "run").sample("step_1.parquet", 0)
    assert sample["pieces"] is None
    assert sample["pieces_missing"].startswith("neither a checkpoint nor the recipe")


def test_the_texts_of_tokens_make_up_the_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = embedded_path() / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    text = "<|im_start|>user\nWhat is 12 + 3, été 你好 😀?<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = reader(path)(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        reader(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("text", "rows"),
    [("WHAT is test-3", [3]), ('{"expression": "3-2"}', []), ("3-2", [*range(11), 13]), ("<!--", [10]), ("left", [11])],
)
def test_a_search_finds_what_was_said(store: RunStore, text: str, rows: list[int]) -> None:
    assert store.search(text, ["eval_test_2.parquet", "gone"]) == {"eval_test_2.parquet": rows}


def test_spans_are_on_the_clock_of_the_file(store: RunStore) -> None:
    told = store.spans("step_1.parquet")
    assert told["zero"] == 1e9
    found = told["rows"]
    assert len(found) == 8
    assert found[0] == [["engine", 0.0, 0.7], ["tools", 0.7, 0.9]]
    assert found[3] == [["engine", 3.0, 3.7], ["tools", 3.7, 3.9]]


def test_evaluations_have_intervals(store: RunStore) -> None:
    found = {(one["split"], one["step"]): one for one in store.evaluations()}
    large = found["large", 2]
    assert (large["tasks"], large["samples"], large["accuracy"]) == (10, 10, 0.5)
    assert large["low"] < 0.5 < large["high"]
    assert found["test", 0]["failed"] == 1


def test_what_older_versions_wrote_is_read(tmp_path: Path) -> None:
    message = {"role": "user", "content": "How many?"}
    record = {"task": "a", "reward": 1.0, "finish": "stop", "messages": [message], "tokens": {"all": 7, "sampled": 3}}
    (tmp_path / "trajectories").mkdir()
    lines = [record | {"solved": True}, record | {"task": "b", "failure": {"boundary": "tool", "message": "m"}}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "trajectories" / "eval_test_0.jsonl").write_text(text)
    store = RunStore(tmp_path, "run")
    index = store.index(["eval_test_0.jsonl"])["eval_test_0.jsonl"]
    assert (index["rows"], index["tokens"], index["boundary"]) == (2, 7, [None, "tool"])
    assert store.sample("eval_test_0.jsonl", 0)["told"][0]["messages"] == [message]
    assert store.previews("eval_test_0.jsonl") == {"a": "How many?", "b": "How many?"}
    assert store.search("how", ["eval_test_0.jsonl"]) == {"eval_test_0.jsonl": [0, 1]}


def test_why_is_asked_with_the_first_evaluation_of_the_split(store: RunStore) -> None:
    asked = []

    def why(path: Path, first: Path | None, piece: object) -> dict[str, object]:
        asked.append((path.name, first and first.name, piece is not None))
        return {"causes": []}

    for name in ("eval_test_2.parquet", "eval_test_0.parquet", "step_1.parquet", "eval_test_2.parquet"):
        assert store.why(name, why) == {"causes": []}
    assert asked == [
        ("eval_test_2.parquet", "eval_test_0.parquet", True),
        ("eval_test_0.parquet", None, True),
        ("step_1.parquet", None, True),
    ]


def test_a_run_trains_while_its_process_lives(tmp_path: Path) -> None:
    store = RunStore(tmp_path, "run")
    lock = tmp_path / ".lock"
    for text, trains in (
        (f"process {os.getpid()} on {socket.gethostname()}", True),
        (f"process 999999999 on {socket.gethostname()}", False),
        ("process 1 on another-machine", True),
        ("", False),
    ):
        lock.write_text(text)
        assert store.state()["training"] == trains


def test_a_run_of_another_machine_trains_while_it_writes(tmp_path: Path) -> None:
    store = RunStore(tmp_path, "run")
    lock, flying = tmp_path / ".lock", tmp_path / "trajectories" / "in_flight.jsonl"
    lock.write_text("process 1 on another-machine")
    assert store.state()["training"]
    os.utime(lock, (0, 0))
    assert not store.state()["training"]
    flying.parent.mkdir()
    flying.touch()
    os.utime(flying.parent, (0, 0))
    assert store.state()["training"]


def test_secrets_of_a_recipe_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("tools: [{name: search, args: {api_key: abcdefghijkl}}]\n")
    assert "abcdefghijkl" not in json.dumps(RunStore(tmp_path, "run").state())


def test_what_is_in_flight_is_shown_too(tmp_path: Path) -> None:
    from agentrl.rollout.trajectory_file import encode_plain, row

    (tmp_path / "trajectories").mkdir()
    lines = [encode_plain(row(t)) for t in (trajectory("a", said=HOSTILE), failed("b"))]
    (tmp_path / "trajectories" / "in_flight.jsonl").write_text("\n".join([*lines, '{"cut']))
    store = RunStore(tmp_path, "run")
    (file,) = store.state()["files"]
    assert (file["name"], file["step"]) == ("in_flight.jsonl", -1)
    assert store.index(["in_flight.jsonl"])["in_flight.jsonl"]["task"] == ["a", "b"]
    (told,) = as_table([Chosen(store, "in_flight.jsonl", [0])], ["task"]).to_pylist()
    assert (told["split"], told["step"], told["task"]) == ("in flight", None, "a")  # as the page says


def test_logs_go_on_where_they_ended_and_are_told_by_name_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (tmp_path / "run.log").write_text("of the sweep")
    (folder / "run.log").write_bytes(b"first\n\xff<b>\n")
    (folder / "logs" / "worker_0.log").touch()
    (folder / "recipe.yaml").touch()
    store = RunStore(folder, "run")
    assert [one["name"] for one in store.logs()] == ["run.log", "logs/worker_0.log", "of the sweep"]
    assert store.log("of the sweep")["text"] == "of the sweep"
    first = store.log("run.log")
    assert (first["text"], first["left_out"]) == ("first\n\ufffd<b>\n", 0)
    with (folder / "run.log").open("a") as file:
        file.write("second\n")
    again = store.log("run.log", first["next"], first["of"])
    assert (again["start"], again["text"]) == (first["next"], "second\n")
    (folder / "run.log").write_text("x" * (1 << 20))
    (folder / "run.log").rename(folder / "old")
    (folder / "run.log").write_text("y" * (1 << 20))
    long = store.log("run.log", again["next"], again["of"])
    assert (long["start"], len(long["text"]), long["left_out"]) == (0, 512 << 10, 512 << 10)
    for name in ("recipe.yaml", "../run/recipe.yaml", "/etc/passwd", "logs", ""):
        with pytest.raises(UserError, match="no such log"):
            store.log(name)
