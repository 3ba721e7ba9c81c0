"""`judge` against a real OpenAI-compatible server on loopback, which is also slow, busy, broken or talks nonsense."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from agentrl_tools.rewards.judge import DEFAULT_PATTERN, Judge, ScoreReader, fill, read_template
from aiohttp import web
from serving import serving
from vision_help import picture

from agentrl import InfrastructureError, Sample, Task, UserError
from agentrl.images import STORE

Script = Callable[[int, dict[str, Any]], Any]


class Server:
    """Says what `script(number of the request, its body)` returns: a text, a status, or a response."""

    def __init__(self) -> None:
        self.script: Script = lambda number, body: "Score: 10"
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.at_once = self.most_at_once = 0
        self.seconds = 0.0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            body = await request.json()
            self.bodies.append(body)
            self.keys.append(request.headers.get("Authorization", ""))
            said = self.script(len(self.bodies), body)
            await asyncio.sleep(self.seconds)
        finally:
            self.at_once -= 1
        if isinstance(said, int):
            return web.json_response({"error": {"message": "not now"}}, status=said, headers={"Retry-After": "0"})
        if not isinstance(said, str):
            return said
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        )


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    async with serving({"POST /v1/chat/completions": made.answer}) as url:
        made.url = f"{url}/v1"
        yield made


def sample(said: str = "It is Paris", **data: Any) -> Sample:
    messages = ({"role": "user", "content": "Capital?"}, {"role": "assistant", "content": said})
    return Sample(Task("t-1", {"ground_truth": "Paris", **data}), messages)


def judge(server: Server, **args: Any) -> Judge:
    return Judge(**{"model": "grader", "base_url": server.url, "cache": False, **args})


async def test_what_is_asked_and_how_it_is_scored(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server.script = lambda number, body: "It says what is right.\n**Score:** 7/10"
    made = judge(server, api_key_env="MY_KEY", system="Be strict.", extra={"top_k": 5}, max_tokens=99)
    assert await made.score(sample()) == pytest.approx(0.7)
    await made.close()
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_k"]) == ("grader", 99, 0.0, 5)
    assert server.keys == ["Bearer secret"]
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Be strict."}
    assert all(part in user["content"] for part in ("Capital?", "It is Paris", "Paris\n"))


async def test_a_judge_that_sees_is_shown_the_pictures_of_the_conversation(server: Server) -> None:
    seen = {"role": "user", "content": [{"type": "text", "text": "Which? "}, {"type": "image", "image": picture(1)}]}
    asked = sample()
    asked = Sample(asked.task, (seen, *asked.messages[1:]))
    for images in (False, True):
        made = judge(server, images=images)
        assert await made.score(asked) == 1.0
        await made.close()
    told, (text, shown) = (body["messages"][0]["content"] for body in server.bodies)
    assert text == {"type": "text", "text": told}
    assert "Which? <image>" in told
    assert STORE.put(shown["image_url"]["url"]) == STORE.put(picture(1))


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_server_that_is_busy_is_asked_again(server: Server, status: int) -> None:
    server.script = lambda number, body: status if number < 3 else "Score: 10"
    made = judge(server, retries=2)
    assert await made.score(sample()) == 1.0
    assert len(server.bodies) == 3
    await made.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("status", [429, 500, 401, 400])
async def test_a_server_that_stays_broken_raises(server: Server, status: int) -> None:
    server.script = lambda number, body: status
    made = judge(server, retries=1)
    with pytest.raises(InfrastructureError, match=f"judge grader at http://127.0.0.1.*{status}"):
        await made.score(sample())
    assert len(server.bodies) == (2 if status in (429, 500) else 1)
    await made.close()


@pytest.mark.slow
async def test_a_server_that_hangs_or_is_not_there_raises(server: Server) -> None:
    server.seconds = 5.0
    hung = judge(server, timeout=0.1, retries=1)
    with pytest.raises(InfrastructureError, match="Timeout"):
        await hung.score(sample())
    late = judge(server, deadline=0.2)
    with pytest.raises(InfrastructureError, match=r"no score within 0\.2 s"):
        await late.score(sample())
    gone = Judge(model="grader", base_url="http://127.0.0.1:1/v1", cache=False, retries=0)
    with pytest.raises(InfrastructureError, match="Connection"):
        await gone.score(sample())
    for made in (hung, late, gone):
        await made.close()


@pytest.mark.parametrize("body", ["<html>", "[]", "null", '{"choices": []}', '{"choices": null}', '"text"'])
async def test_a_reply_that_is_no_completion_raises(server: Server, body: str) -> None:
    server.script = lambda number, asked: web.Response(text=body, content_type="application/json")
    made = judge(server, retries=0)
    with pytest.raises(InfrastructureError, match="judge grader"):
        await made.score(sample())
    await made.close()


async def test_a_reply_without_a_score_is_asked_again_and_told(server: Server) -> None:
    server.script = lambda number, body: ["Well.", "Score: 99", "Score: 5"][number - 1]
    made = judge(server, asks=3)
    assert await made.score(sample()) == 0.5
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 3]
    assert server.bodies[2]["messages"][1] == {"role": "assistant", "content": "Score: 99"}
    server.script = lambda number, body: "Never."
    with pytest.raises(InfrastructureError, match=r"no score in 3 replies, the last being 'Never\."):
        await made.score(sample())
    assert len(server.bodies) == 6
    await made.close()


async def test_so_many_at_once_and_no_more(server: Server) -> None:
    server.seconds = 0.02
    made = judge(server, concurrency=3)
    scores = await asyncio.gather(*(made.score(sample(f"answer {n}")) for n in range(12)))
    assert scores == [1.0] * 12
    assert server.most_at_once == 3
    await made.close()


async def test_it_serves_one_event_loop_after_another(server: Server) -> None:
    made = judge(server)
    assert await made.score(sample()) == 1.0
    assert await asyncio.to_thread(lambda: asyncio.run(_score_and_close(made))) == 1.0
    assert await made.score(sample()) == 1.0
    await made.close()


async def _score_and_close(made: Judge) -> float:
    score = await made.score(sample())
    await made.close()
    return score


async def test_replies_are_kept_by_all_that_was_asked(server: Server, tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "cache.sqlite")
    first = judge(server, cache=path)
    assert await first.score(sample()) == 1.0
    assert await first.score(sample()) == 1.0
    assert len(server.bodies) == 1
    await first.close()
    again = judge(server, cache=path, scale=(0, 20))
    assert await again.score(sample()) == 0.5
    assert len(server.bodies) == 1
    for other in ({"model": "another"}, {"temperature": 1.0}, {"max_tokens": 5}, {"extra": {"a": 1}}, {"system": "x"}):
        assert await judge(server, cache=path, **other).score(sample()) == 1.0
    assert await again.score(sample("It is Rome")) == 0.5
    assert len(server.bodies) == 7
    server.script = lambda number, body: "no score"
    with pytest.raises(InfrastructureError):
        await again.score(sample("It is Oslo"))
    server.script = lambda number, body: "Score: 20"
    assert await again.score(sample("It is Oslo")) == 1.0


@pytest.mark.slow
async def test_two_processes_share_a_cache(server: Server, tmp_path: Path) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from agentrl_tools.rewards.judge import ReplyCache

async def main():
    cache = ReplyCache(Path(sys.argv[1]))
    for i in range(150):
        await cache.put(f"{sys.argv[2]}-{i}", "Score: 1")
        await cache.put(f"both-{i}", "Score: 2")
    assert all([await cache.get(f"both-{i}") == "Score: 2" for i in range(150)])

asyncio.run(main())
"""
    path = str(tmp_path / "cache.sqlite")
    both = [subprocess.Popen([sys.executable, "-c", program, path, name]) for name in ("a", "b")]
    assert [process.wait(60) for process in both] == [0, 0]
    from agentrl_tools.rewards.judge import ReplyCache

    cache = ReplyCache(Path(path))
    kept = [await cache.get(f"{name}-{i}") for name in ("a", "b") for i in range(150)]
    assert kept == ["Score: 1"] * 300


def test_a_template_is_filled_in_one_pass(tmp_path: Path) -> None:
    said = sample("{ground_truth} {question}", question="What?")
    template = 'Q {question} A {answer} T {ground_truth}; reply {"score": 1}'
    assert read_template(template) == template
    assert fill(template, said, None) == 'Q What? A {ground_truth} {question} T Paris; reply {"score": 1}'
    path = tmp_path / "grade.txt"
    path.write_text("Grade: {conversation}")
    assert read_template(str(path)) == "Grade: {conversation}"
    call = {"type": "function", "function": {"name": "search", "arguments": {"q": "x"}}}
    talk = Sample(
        Task("t", {}),
        (
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "See?"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Paris"},
        ),
    )
    text = fill("{conversation}", talk, None)
    assert text.splitlines()[:2] == ["[user]", "<image>See?"]
    assert 'calls {"name": "search", "arguments": {"q": "x"}}' in text
    with pytest.raises(ValueError, match="task t has no ground truth"):
        fill("{ground_truth}", talk, None)


@pytest.mark.parametrize(
    ("reply", "field", "score"),
    [
        ('{"score": 5}', "score", 0.5),
        ('Thus ```json\n{"why": {"score": 1}, "score": "8"}\n```', "score", 0.8),
        ('{"score": 1} no, {"score": 2}', "score", 0.2),
        ('{"score": true}', "score", None),
        ('{"score": NaN}', "score", None),
        ("{" * 2000, "score", None),
        ("score: 3, Score = 4", None, 0.4),
        ("Score: 10.", None, 1.0),
        ("Score: -1", None, None),
        ("ten", None, None),
        ("", None, None),
    ],
)
def test_a_score_is_read(reply: str, field: str | None, score: float | None) -> None:
    found = ScoreReader(DEFAULT_PATTERN, field, (0, 10)).read(reply)
    assert found == (None if score is None else pytest.approx(score))


def test_a_scale_may_run_down() -> None:
    assert ScoreReader(r"(\d)", None, (5, 1)).read("grade 1") == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"template": "{answer} {foo}"}, "nothing fills {foo}"),
        ({"template": "grade it"}, "neither {answer} nor {conversation}"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "x"}, "has no group"),
        ({"scale": (1, 1)}, "its two ends are both 1"),
        ({"asks": 0}, "want 1 or more"),
    ],
)
def test_arguments_that_make_no_sense(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Judge(**{"model": "m", "base_url": "http://x/v1", "cache": False, **args})


def test_a_key_or_a_cache_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="OPENAI_API_KEY is not set"):
        Judge(model="m", cache=False)
    (tmp_path / "full").write_text(json.dumps({"not": "sqlite"}) * 100)
    with pytest.raises(UserError, match="cannot be opened"):
        Judge(model="m", base_url="http://x/v1", cache=str(tmp_path / "full"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Judge(model="m", base_url="http://x/v1")
    assert (tmp_path / "cache" / "agentrl" / "judge.sqlite").exists()
