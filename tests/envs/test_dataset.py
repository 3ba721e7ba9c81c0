"""The environment `dataset`: people's rows become tasks, a matching answer is paid, and a bad row is named."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
from agentrl_envs.dataset.environment import Dataset
from datasets import Dataset as Hub
from datasets import Features, Image, List, Value
from fakes import CharChat, ScriptedEngine, call
from vision_help import picture

from agentrl import Message, Session, Task, ToolKwargs, UserError
from agentrl.data.files import write_parquet
from agentrl.images import STORE, ImageError
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import roll_out


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "6 times 12?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {
        "split": "train",
        "index": 3,
        "need_tools_kwargs": True,
        "tools_kwargs": {
            "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}, "release_kwargs": {"hard": True}}
        },
    },
}


def file(folder: Path, rows: Sequence[dict[str, Any]], name: str = "train.jsonl") -> str:
    path = folder / name
    if path.suffix == ".parquet":
        write_parquet(path, rows, lambda count: None)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def one(folder: Path, row: dict[str, Any], name: str = "train.jsonl", **args: Any) -> tuple[Dataset, Task]:
    env = Dataset(splits={"train": file(folder, [row], name)}, **args)
    return env, env.tasks("train")[0]


async def opening(env: Dataset, task: Task) -> Sequence[Message]:
    return await env.create(Session("s", task, Random(0), 1e9))


async def paid(env: Dataset, task: Task, said: str) -> dict[str, float]:
    messages: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    return await env.calc_reward(Session("s", task, Random(0), 1e9, messages))


async def test_a_prompt_that_is_text(tmp_path: Path) -> None:
    row = {"question": "6 times 12?", "answer": "6*12=72 #### 72", "level": 4}
    env, task = one(tmp_path, row, prompt="question", system="Be brief.")
    assert await opening(env, task) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "6 times 12?"},
    ]
    assert task.id == "train-0"
    assert task.tools is None
    assert task.data["question"] == "6 times 12?"
    assert task.data["level"] == 4
    assert await paid(env, task, "It is #### 72") == {"answer": 1.0}
    assert await paid(env, task, "It is #### 7") == {"answer": 0.0}
    assert env.solved({"answer": 1.0, "tool": -3.0}, task)
    assert not env.solved({"answer": 0.0, "tool": 3.0}, task)


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
async def test_the_form_of_verl_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    env, task = one(tmp_path, VERL, name, system="not taken: the prompt has one")
    assert await opening(env, task) == VERL["prompt"]
    assert task.data["ground_truth"] == "72"
    assert task.data["question"] == "6 times 12?"
    assert task.data["data_source"] == "openai/gsm8k"
    assert task.data["extra_info"]["index"] == 3
    kwargs = ToolKwargs(create_kwargs={"ground_truth": "72"}, release_kwargs={"hard": True})
    assert task.tools_kwargs == {"calc_gsm8k_reward": kwargs}
    assert await paid(env, task, "#### 72") == {"answer": 1.0}


def test_what_a_table_fills_with_nulls_counts_as_absent(tmp_path: Path) -> None:
    other = {**VERL, "extra_info": {**VERL["extra_info"], "tools_kwargs": {"search": {"create_kwargs": {"k": 3}}}}}
    rows = [VERL, other, {**VERL, "extra_info": {"index": 1, "need_tools_kwargs": False, "tools_kwargs": {}}}]
    tasks = Dataset(splits={"train": file(tmp_path, rows, "train.parquet")}).tasks("train")
    assert set(tasks[0].tools_kwargs) == {"calc_gsm8k_reward"}
    assert tasks[1].tools_kwargs == {"search": ToolKwargs(create_kwargs={"k": 3})}
    assert tasks[2].tools_kwargs == {}


def test_a_task_may_offer_what_its_row_names(tmp_path: Path) -> None:
    assert one(tmp_path, VERL, tools="row")[1].tools == ("calc_gsm8k_reward",)
    assert one(tmp_path, {**VERL, "tools": ["a", "b"]}, tools="row")[1].tools == ("a", "b")
    assert one(tmp_path, {**VERL, "tools": ["a", "b"]})[1].tools is None


async def test_kwargs_reach_the_hooks_of_the_tool(tmp_path: Path) -> None:
    from agentrl_tools.calc_gsm8k_reward import CalcGsm8kReward

    env, task = one(tmp_path, VERL)
    engine = ScriptedEngine([call("calc_gsm8k_reward", answer="72"), "#### 72"])
    limits = RolloutSection(max_turn_tokens=1000, max_tokens=10_000)
    driver = Driver(engine=engine, chat=CharChat(), environment=env, tools=[CalcGsm8kReward()], limits=limits)
    groups = await roll_out(driver, [task], 1, seed=0)
    assert groups[0].trajectories[0].rewards == {"answer": 1.0, "calc_gsm8k_reward": 1.0}


def png(seed: int = 1, size: int = 32) -> bytes:
    buffer = io.BytesIO()
    picture(seed, size, size).save(buffer, format="PNG")
    return buffer.getvalue()


def test_a_tag_without_a_column_of_images_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "What is this?"}, *({"prompt": f"<image>{i}?", "image": "a.png"} for i in range(2))]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    env = Dataset(splits={"train": str(tmp_path / "train.jsonl")}, reward="none")
    assert len(env.tasks("train")) == 3
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "its prompt says <image>, and the row has no field 'images': no image is shown (env.args.images names the "
        "column)"
    ]
    assert "train.jsonl, line 2: " in caplog.text


async def test_images_stand_where_the_prompt_says(tmp_path: Path) -> None:
    row = {"prompt": "<image>Which of <image> and this? <video>", "images": ["a.png", {"bytes": None, "path": "b.png"}]}
    env, task = one(tmp_path, row, reward="none")
    assert (await opening(env, task))[0]["content"] == [
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "text", "text": "Which of "},
        {"type": "image", "image": str(tmp_path / "b.png")},
        {"type": "text", "text": " and this? <video>"},
    ]
    assert task.data["question"] == "Which of  and this? <video>"
    env, task = one(tmp_path, {"prompt": "write an <image> tag"}, reward="none")
    assert (await opening(env, task))[0]["content"] == "write an <image> tag"
    with pytest.raises(UserError, match="line 1: has 2 images in field 'images', and its messages have 1 <image> tag "):
        one(tmp_path, {**row, "prompt": "one <image>"}, reward="none")
    with pytest.raises(UserError, match="has 2 images in field 'images', and its messages have 3 <image> tags"):
        one(tmp_path, {**row, "prompt": "<image><image><image>"}, reward="none")
    with pytest.raises(UserError, match=r"line 1: its prompt says <image>, and there is no field 'picture' \(env.args"):
        one(tmp_path, row, reward="none", images="picture")
    assert one(tmp_path, {"prompt": "no tag"}, reward="none", images="picture")[1].data["messages"]
    with pytest.raises(UserError, match="line 1: its prompt shows a video"):
        one(tmp_path, {**row, "videos": ["a.mp4"]}, reward="none")


def held(value: Any, **part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", **part}, {"type": "text", "text": value}]}]


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
@pytest.mark.parametrize(
    ("row", "args", "source"),
    [
        ({"prompt": "<image>?", "images": ["in/a.png"]}, {}, "in/a.png"),
        ({"prompt": "<image>?", "picture": "a.png"}, {"images": "picture", "image_folder": "in"}, "in/a.png"),
        ({"prompt": "<image>?", "images": {"bytes": None, "path": "file://a.png"}}, {}, "a.png"),
        ({"prompt": [{"role": "user", "content": "<image>?"}], "images": [{"path": "in/a.png"}]}, {}, "in/a.png"),
        ({"prompt": held("?"), "images": ["in/a.png"]}, {}, "in/a.png"),
        ({"prompt": held("?", path="in/a.png")}, {}, "in/a.png"),
        ({"prompt": held("?", image_url={"url": "data:image/png;base64,AA"})}, {}, "data:image/png;base64,AA"),
        ({"prompt": held("<image>", image="in/a.png")}, {}, "in/a.png"),
    ],
)
async def test_images_come_in_the_forms_that_people_have(
    tmp_path: Path, name: str, row: dict[str, Any], args: dict[str, Any], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    env, task = one(tmp_path, row, name, reward="none", **args)
    first, second = (await opening(env, task))[0]["content"]
    folder = Path(args["image_folder"]).parent if args else tmp_path
    assert first == {"type": "image", "image": source if source.startswith("data:") else str(folder / source)}
    assert second["type"] == "text"


async def test_the_form_of_geometry3k(tmp_path: Path) -> None:
    """As the hub has it, a column of the type Image, and as verl's script makes it; a broken one is not decoded."""
    columns = {"problem": ["<image>Find x.", "<image>Find y."], "answer": ["3", "4"]}
    given = [[{"bytes": png(), "path": None}], [{"bytes": b"broken", "path": None}]]
    kinds = Features({"images": List(Image()), "problem": Value("string"), "answer": Value("string")})
    Hub.from_dict({"images": given, **columns}, features=kinds).to_parquet(tmp_path / "train.parquet")
    env = Dataset(splits={"train": str(tmp_path / "train.parquet")}, prompt="problem")
    tasks = env.tasks("train")
    assert [task.data["ground_truth"] for task in tasks] == ["3", "4"]
    (message,) = await opening(env, tasks[0])
    assert message["content"] == [{"type": "image", "image": png()}, {"type": "text", "text": "Find x."}]
    assert (await opening(env, tasks[1]))[0]["content"][0] == {"type": "image", "image": b"broken"}
    verl = {**VERL, "prompt": [{"role": "user", "content": "<image>Find x."}], "images": [{"bytes": png()}]}
    env, task = one(tmp_path, verl, "verl.parquet")
    assert (await opening(env, task))[0]["content"][0] == {"type": "image", "image": png()}


async def test_addresses_are_fetched_where_the_recipe_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "huge").write_bytes(b"\0" * (STORE.limits.bytes + 1))
    asked: list[str] = []

    class Files(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            asked.append(self.path)

    with serving(partial(Files, directory=str(tmp_path))) as address:
        row = {"prompt": "<image>?", "images": [f"{address}/a.png"]}
        with pytest.raises(UserError, match=r"line 1: an image is an address, .*: set image_urls to public"):
            one(tmp_path, row, reward="none")
        env, task = one(tmp_path, row, reward="none", image_urls="any")
        for _ in range(2):
            assert Path((await opening(env, task))[0]["content"][0]["image"]).read_bytes() == png()
        assert asked == ["/a.png"], "it is kept"
        for url, how, why in (
            (f"{address}/b.png", "public", "is not a public address"),
            (f"{address}/none.png", "any", "404"),
            (f"{address}/huge", "any", "more than 20,000,000 bytes"),
        ):
            env, task = one(tmp_path, {"prompt": "<image>?", "images": url}, reward="none", image_urls=how)
            with pytest.raises(ImageError, match=why):
                await opening(env, task)
    assert "/b.png" not in asked


@pytest.mark.parametrize(
    ("row", "args", "message"),
    [
        ({"question": "?"}, {}, "line 1: field 'prompt' (env.args.prompt) is not there; the row has 'question'"),
        ({"prompt": None}, {}, "field 'prompt' (env.args.prompt) is empty"),
        ({"prompt": ""}, {}, "field 'prompt' contains no text"),
        ({"prompt": []}, {}, "contains no text"),
        ({"prompt": 5}, {}, "a message's content is 5"),
        ({"prompt": ["hi"]}, {}, "holds 'hi'; expected text, or a list of messages"),
        ({"prompt": [{"role": "usr", "content": "hi"}]}, {}, "a message of role 'usr'; did you mean 'user'"),
        ({"prompt": [{"role": "user"}]}, {}, "a message's content is None"),
        ({"prompt": [{"role": "assistant", "content": "hi"}]}, {}, "ends with an assistant's turn"),
        ({"prompt": "hi"}, {}, "has no answer in any of reward_model.ground_truth, ground_truth, answer"),
        ({"prompt": "hi", "answer": "x"}, {"answer": "gold"}, "has no answer in field 'gold'"),
        (
            {"prompt": "hi", "answer": "many"},
            {"reward": "numeric"},
            "not a single number (env.args.reward is numeric)",
        ),
        ({"prompt": "hi", "answer": {"a": 1}}, {}, "neither text nor a number"),
        (
            {"prompt": "hi", "answer": "1", "need_tools_kwargs": True},
            {},
            "need_tools_kwargs is true, but there is",
        ),
        ({"prompt": "hi", "answer": "1", "tools_kwargs": [1]}, {}, "expected an object by tool"),
        (
            {"prompt": "hi", "answer": "1", "tools_kwargs": {"t": 1}},
            {},
            "'tools_kwargs.t': expected an object with",
        ),
        (
            {"prompt": "hi", "answer": "1", "tools_kwargs": {"t": {"create": {}}}},
            {},
            "has no hook 'create'; did",
        ),
        (
            {"prompt": "hi", "answer": "1", "tools_kwargs": {"t": {"create_kwargs": 1}}},
            {},
            "expected an object of arguments",
        ),
        ({"prompt": "hi", "answer": "1", "tools": "calc"}, {"tools": "row"}, "expected a list of names of tools"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, row: dict[str, Any], args: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        one(tmp_path, row, **args)
    assert str(caught.value).startswith(f"{tmp_path / 'train.jsonl'}, line 1")
    assert message in str(caught.value)


async def test_no_reward_of_its_own(tmp_path: Path) -> None:
    env, task = one(tmp_path, {"prompt": "Write a poem."}, reward="none")
    assert await paid(env, task, "A poem") == {}
    assert env.solved({"judge": 1.0}, task)
    assert not env.solved({"judge": 0.5}, task)


def test_no_data_is_refused() -> None:
    with pytest.raises(UserError, match=r"env\.source: the environment dataset needs data"):
        Dataset()


def test_splits_map_and_filter_pass_through(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {n}", "answer": str(n)} for n in range(60)]
    path = file(tmp_path, rows, "mine.jsonl")
    env = Dataset(path, map="data_functions:shout", filter="data_functions:even")
    assert env.splits == ("test",)
    train, test = env.tasks("train"), env.tasks("test")
    assert len(train) + len(test) == 30
    assert {t.data["question"] for t in [*train, *test]} == {f"Q {n}" for n in range(0, 60, 2)}
    assert {int(t.id.removeprefix("train-")) for t in train} == {int(t.data["answer"]) for t in train}
    with pytest.raises(UserError, match=r"no split 'tests'; did you mean 'test'"):
        env.tasks("tests")


@pytest.mark.slow
def test_it_imports_nothing_heavy() -> None:
    program = "import sys, agentrl_envs.dataset.environment\nassert not {'numpy', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
