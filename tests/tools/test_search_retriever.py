"""`search` over HTTP: what is asked and shown, and each way in which a real retriever on loopback can fail."""

import asyncio
import email.utils
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
from agentrl_tools.search import Search
from agentrl_tools.search import retriever as retriever_module
from agentrl_tools.search.retriever import Batcher, retry_after
from aiohttp import web
from fakes import Env, Hooks, call, make_driver
from processes import eventually
from search_help import PASSAGE, Server, good, retriever, session

from agentrl import ArgumentError, InfrastructureError, Task
from agentrl.errors import UserError
from agentrl.trajectory import Boundary, FinishReason


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(retriever_module, "_FIRST", 0.01)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with retriever() as made:
        yield made


@pytest.fixture
async def search(server: Server) -> AsyncIterator[Callable[..., Search]]:
    """Makes tools over `server`, which are closed at the end."""
    async with AsyncExitStack() as stack:

        def make(**arguments) -> Search:
            tool = Search(**{"url": server.url, **arguments})
            stack.push_async_callback(tool.close)
            return tool

        yield make


async def ask(tool: Search, query: str = "France", **kwargs) -> str:
    return (await tool.execute(session(**kwargs), query=query)).text


async def test_the_question_and_the_answer_have_the_shape_of_search_r1(server, search):
    tool = search(topk=2, headers={"X-Key": "k"})
    response = await tool.execute(session(), query="  France ")
    assert response.text == "Doc 1(Title: Paris) Paris is in France.\nDoc 2(Title: About France) words on France"
    assert response.metrics == {"found": 2.0}
    assert server.asked == [{"queries": ["France"], "topk": 2, "return_scores": True}]
    assert server.headers[0]["X-Key"] == "k"


async def test_documents_without_scores_and_without_passages(server, search):
    tool = search(max_passage=5)
    server.script = lambda n: {"result": [[PASSAGE, {"title": "", "text": "plain text"}]]}
    assert await ask(tool) == "Doc 1(Title: Paris) Paris ...\nDoc 2: plain ..."
    server.script = lambda n: {"result": [[]]}
    assert await ask(tool) == "nothing found"


@pytest.mark.parametrize(
    "failure",
    [
        lambda: web.Response(status=503),
        lambda: web.Response(status=500),
        lambda: web.Response(status=429),
        lambda: "drop",
    ],
)
async def test_what_may_pass_is_tried_again(server, search, failure):
    tool = search(retries=2)
    server.script = lambda n: failure() if n < 3 else None
    assert "Paris" in await ask(tool)
    assert len(server.asked) == 3
    server.script = lambda n: failure()
    with pytest.raises(InfrastructureError, match=r"attempt 3 of 3"):
        await ask(tool)
    assert len(server.asked) == 6


@pytest.mark.slow
async def test_an_attempt_that_hangs_is_given_up_and_tried_again(server, search):
    tool = search(timeout=0.5, retries=1)
    server.script = lambda n: "hang" if n == 1 else None
    assert "Paris" in await ask(tool)
    server.script = lambda n: "hang"
    with pytest.raises(InfrastructureError, match=r"no answer within 0.5 s \(attempt 2 of 2\)"):
        await ask(tool)


async def test_the_deadline_ends_it_whatever_is_left_to_try(server, search):
    server.script = lambda n: "hang"
    tool = search(timeout=20, deadline=0.2, retries=9)
    with pytest.raises(InfrastructureError, match="no answer"):
        await ask(tool)
    patient = search(timeout=20, deadline=20)
    with pytest.raises(InfrastructureError, match="no answer"):
        await asyncio.wait_for(ask(patient, seconds=0.1), 10)  # the request's own deadline
    assert len(server.asked) == 2


async def test_a_retriever_that_is_not_there():
    async with retriever() as server:
        url = server.url
    tool = Search(url=url, retries=1)
    with pytest.raises(InfrastructureError, match=r"127.0.0.1:\d+/retrieve: ClientConnectorError"):
        await ask(tool)
    await tool.close()


async def test_retry_after_is_honoured(server, search):
    tool = search(retries=1)
    server.script = lambda n: web.Response(status=429, headers={"Retry-After": "0.3"}) if n == 1 else None
    await ask(tool)
    assert server.times[1] - server.times[0] >= 0.3
    server.script = lambda n: web.Response(status=429, headers={"Retry-After": "3600"})
    with pytest.raises(InfrastructureError, match=r"429 Too Many Requests.*no time is left"):
        await ask(tool)


def test_retry_after_is_a_number_or_a_date():
    assert retry_after("2") == 2.0
    assert retry_after("-1") == 0.0
    assert retry_after(None) is None
    assert retry_after("soon") is None
    assert 8 < retry_after(email.utils.formatdate(time.time() + 10, usegmt=True)) <= 11


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_is_a_mistake_of_the_recipe_and_not_tried_again(server, search, status):
    tool = search(url=server.url.replace("http://", "http://me:secret@"))
    server.script = lambda n: web.Response(status=status)
    with pytest.raises(InfrastructureError, match=f"answers {status} .*check the tool's arguments `url`") as error:
        await ask(tool)
    assert "secret" not in str(error.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ("<html>", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected {'result'"),
        ('{"result": []}', "one list for each of 1 queries"),
        ('{"result": [{}]}', "a list of passages"),
        ('{"result": [[3]]}', "'document'"),
        ('{"result": [[{"document": {"id": 1}, "score": 1}]]}', "no text in 'contents'"),
        ('{"result": [[{"document": {"contents": "x"}, "score": "high"}]]}', "'score': number"),
        ("x" * (33 << 20), "longer than"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_infrastructure(server, search, answer, what):
    tool = search()
    server.script = lambda n: answer
    with pytest.raises(InfrastructureError, match=what) as error:
        await ask(tool)
    assert len(str(error.value)) < 400


async def test_concurrency_and_rate(server, search):
    server.seconds = 0.02
    tool = search(concurrency=3)
    await asyncio.gather(*(ask(tool, f"q{i}") for i in range(20)))
    assert server.most == 3
    assert len(server.asked) == 20
    start = time.monotonic()
    paced = search(rate=50)
    await asyncio.gather(*(ask(paced, f"q{i}") for i in range(5)))
    assert server.times[-1] - start >= 4 / 50


async def test_questions_that_wait_are_asked_together(server, search):
    server.seconds = 0.02
    tool = search(concurrency=1, batch=8)
    texts = await asyncio.gather(*(ask(tool, f"q{i}") for i in range(17)))
    assert [f"About q{i}" in text for i, text in enumerate(texts)] == [True] * 17
    assert [len(body["queries"]) for body in server.asked] in ([1, 8, 8], [8, 8, 1])
    server.script = lambda n: web.Response(status=404)
    outcomes = await asyncio.gather(*(ask(tool, f"q{i}") for i in range(3)), return_exceptions=True)
    assert [type(o) for o in outcomes] == [InfrastructureError] * 3


async def test_a_batcher_has_so_many_workers_and_no_more():
    busy, most = 0, 0

    async def answer(questions):
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.001)
        busy -= 1
        return [2 * q for q in questions]

    batcher = Batcher(answer, 3, 2)
    assert await asyncio.gather(*(batcher.ask(i) for i in range(40))) == [2 * i for i in range(40)]
    assert most == 2


async def test_who_asks_in_the_moment_in_which_the_worker_ends_is_heard():
    async def answer(questions):
        return questions

    batcher = Batcher(answer, 3, 1)

    async def one_by_one():
        return [await batcher.ask(i) for i in range(5)]

    assert await asyncio.wait_for(one_by_one(), 60) == [0, 1, 2, 3, 4]


async def test_a_cancelled_question_takes_nobody_with_it(server, search):
    server.seconds = 0.05
    tool = search(concurrency=1, batch=4)
    tasks = [asyncio.create_task(ask(tool, f"q{i}")) for i in range(6)]
    await eventually(lambda: server.asked)
    tasks[0].cancel()
    tasks[4].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(o, asyncio.CancelledError) for o in outcomes] == [True, False, False, False, True, False]
    assert [body["queries"] for body in server.asked] == [["q0", "q1", "q2", "q3"], ["q5"]]


@pytest.mark.slow
def test_several_event_loops_one_after_another(recwarn):
    """The server lives in a loop of its own thread, as a real one lives elsewhere."""
    import threading

    ready, stop, urls = threading.Event(), threading.Event(), []

    async def serve():
        async with retriever() as server:
            urls.append(server.url)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        tool = Search(url=urls[0])
        assert "Paris" in asyncio.run(ask(tool))
        assert "Paris" in asyncio.run(ask(tool))

        async def last():
            assert "Paris" in await ask(tool)
            await tool.close()
            assert "Paris" in await ask(tool)  # closed is not broken
            await tool.close()

        asyncio.run(last())
    finally:
        stop.set()
        thread.join()
    gc.collect()
    assert not [w for w in recwarn if "Unclosed" in str(w.message)]


async def test_the_model_is_told_what_is_wrong_with_its_query():
    tool = Search(url="http://127.0.0.1:9/retrieve", max_query=10)
    for query, what in (("  ", "empty"), ("x" * 11, "11 characters, at most 10")):
        with pytest.raises(ArgumentError, match=what):
            await ask(tool, query)
    with pytest.raises(ArgumentError, match="missing"):
        tool.check({})


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, "one of the arguments"),
        ({"url": "http://x", "corpus": "y"}, "one of the arguments"),
        ({"url": "localhost:8000"}, "http://"),
    ],
)
def test_arguments_of_the_recipe(arguments, what):
    with pytest.raises(UserError, match=what):
        Search(**arguments)
    with pytest.raises(ValueError, match="topk must be more than 0"):
        Search(url="http://x", topk=0)


async def test_a_retriever_that_dies_in_mid_run_fails_requests_and_the_run_goes_on(server, search):
    """Never a text for the model, never a reward of 0; back again, the next request is served."""
    hooks = Hooks()
    tool = search(retries=2)
    driver = make_driver([call("search", query="France"), "4"], Env(hooks), [tool])
    ok = await driver.drive(driver.request(Task("a", {"question": "?"}), 0))
    assert (ok.valid, ok.messages[2]["content"][:20]) == (True, "Doc 1(Title: Paris) ")
    server.script = lambda n: web.Response(status=503)
    dead = await driver.drive(driver.request(Task("b", {"question": "?"}), 0))
    assert (dead.finish, dead.valid, dead.rewards) == (FinishReason.ERROR, False, {})
    assert dead.failure.boundary in (Boundary.TOOL, Boundary.INFRASTRUCTURE)
    assert "503" in dead.failure.message
    assert not [m for m in dead.messages if m["role"] == "tool"]
    server.script = lambda n: good(["x"])
    again = await driver.drive(driver.request(Task("c", {"question": "?"}), 0))
    assert again.valid
    hooks.check()
