"""The server of the page: who may read what, and the command that starts it."""

import asyncio
import csv
import io
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest
from aiohttp.test_utils import TestClient, TestServer
from view_help import HOSTILE, run_folder
from yarl import URL

from agentrl.cli.main import run
from agentrl.eval.notes import Change, write_change
from agentrl.view.assets import MODULES
from agentrl.view.catalog import Catalog
from agentrl.view.server import _ANSWERS, HEADER, POLICY, Shown, make_app, serve

TOKEN = "the-token"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("view") / "run")


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[TestClient]:
    ranges = {"train/entropy": (0.1, None)}
    shown = Shown(Catalog([folder]), ranges=lambda: ranges, why=lambda path, first, piece: {}, token=TOKEN)
    async with TestClient(TestServer(make_app(shown)), headers={HEADER: TOKEN}) as opened:
        yield opened


async def test_what_is_stored_is_told_to_those_alone_who_have_the_token(client: TestClient) -> None:
    assert (await client.get("/", headers={HEADER: ""})).status == 200  # the page without anything in it
    for given in ("", "another", "the-token2", "\u00e9", "\udcff"):
        answer = await client.get("/api/state", headers={HEADER: given})
        assert answer.status == 403
        assert "printed" in (await answer.json())["error"]
    assert (await client.get(f"/api/state?token={TOKEN}", headers={HEADER: ""})).status == 403
    assert [run["name"] for run in await (await client.get("/api/state?runs=run")).json()] == ["run"]
    for host in ("attacker.example", "127.0.0.1.attacker.example:80", "attacker.example:80"):
        for path in ("/", "/api/state"):
            assert (await client.get(path, headers={"Host": host})).status == 403
    assert (await client.get("/api/state", headers={"Host": "localhost:9000"})).status == 200  # through a tunnel


async def test_every_answer_forbids_what_the_page_does_not_need(client: TestClient) -> None:
    for path in ("/", "/api/state", "/style.css", "/nothing"):
        headers = (await client.get(path)).headers
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


async def test_only_the_files_of_the_page_are_served(client: TestClient) -> None:
    for name in (*MODULES, "style.css"):
        assert (await client.get(f"/{name}")).status == 200
    for path in ("/index.html", "/../server.py", "/%2e%2e/server.py", "/recipe.yaml", "/page/app.js", "/api/nothing"):
        assert (await client.get(path)).status == 404
    for query in (
        "sample?file=../recipe.yaml", "sample?file=/etc/passwd", "previews?file=..%2Frecipe.yaml",
        "why?file=..%2Frecipe.yaml", "why?file=/etc/passwd",
    ):  # fmt: skip
        answer = await client.get(f"/api/{query}&run=run")
        assert answer.status == 422
        assert "not stored there" in (await answer.json())["error"]


@pytest.mark.slow
async def test_whatever_is_asked_is_answered_or_refused(client: TestClient) -> None:
    wrong = (
        "",
        "-1",
        "1e9",
        "9" * 30,
        "\u0663",
        "\ud800",
        "\x00",
        "../..",
        "a" * 300,
        "\n\n",
        "step_1.parquet",
        "%",
        "NaN",
        "{}",
    )
    for name in _ANSWERS:
        for key in ("run", "runs", "start", "files", "file", "row", "text"):
            for value in wrong:
                query = {"run": "run", "file": "step_1.parquet", "files": "step_1.parquet", key: value}
                encoded = urlencode(query, errors="surrogatepass")
                answer = await client.get(URL(f"/api/{name}?{encoded}", encoded=True))
                assert answer.status in (200, 422), (name, query, await answer.text())
                await answer.json()


async def test_the_page_is_told_what_it_asks(client: TestClient) -> None:
    async def ask(query: str) -> object:
        return await (await client.get(f"/api/{query}")).json()

    about = await ask("about")
    assert about == {
        "runs": ["run"], "follow": False, "frozen": False, "note": "",
    }  # fmt: skip
    assert (await ask("meanings"))["ranges"] == {"train/entropy": [0.1, None]}
    assert len((await ask("metrics?run=run"))["rows"]) == 3
    assert (await ask("index?run=run&files=step_1.parquet"))["step_1.parquet"]["rows"] == 8
    assert (await ask("sample?run=run&file=step_1.parquet&row=1"))["sample"] == 1
    assert (await ask("previews?run=run&file=step_1.parquet"))["train-10"] == "What is train-10?"
    assert (await ask("search?run=run&text=train-10&files=step_1.parquet"))["step_1.parquet"] == [0, 1, 2, 3]
    assert len(await ask("evaluations?run=run")) == 4
    for query, said in (
        ("metrics?run=7", "no such run"),
        ("metrics", ": no such run"),
        ("state?runs=" + "%0A".join(["a"] * 65), "more than 64 runs"),
        ("sample?run=run&file=step_1.parquet&row=1e3", "row: not a number"),
        ("index?run=run&files=" + "%0A".join(["a"] * 65), "more than 64 files"),
    ):
        assert said in (await ask(query))["error"]


async def test_notes_are_written_by_the_page_alone_and_told_to_all(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    label = {"run": "run", "kind": "label", "request": "train-10#1", "file": "step_1.parquet", "value": "good"}
    shown = Shown(Catalog([folder]), token=TOKEN)
    async with TestClient(TestServer(make_app(shown)), headers={HEADER: TOKEN}) as client:
        own = str(client.make_url("/"))[:-1]
        for headers, status in (
            ({HEADER: "another"}, 403),
            ({"Origin": "http://attacker.example"}, 403),
            ({"Origin": own.replace("127.0.0.1", "localhost")}, 403),
            ({"Content-Type": "text/plain"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": own}, 200),
            ({}, 200),
        ):
            assert (await client.post("/api/note", json=label, headers=headers)).status == status
        said = await (
            await client.post("/api/note", json={**label, "kind": "note", "value": HOSTILE, "turn": 1})
        ).json()
        (note,) = said["step_1.parquet"]["1"]["notes"]
        assert (note["text"], note["turn"]) == (HOSTILE, 1)
        assert said["step_1.parquet"]["1"]["labels"] == [["good", None]]
        assert await (await client.get("/api/notes?run=run")).json() == said
        assert (await (await client.get("/api/state?runs=run")).json())[0]["notes"]
        for wrong, status in (
            (b"{", 422), (b"[1]", 422), (b"[" * 100_000, 422), (b'{"run": 7}', 422), (b'{"run": [0]}', 422),
            (json.dumps({**label, "file": "../recipe.yaml"}).encode(), 422), (b" " * (17 << 20), 413),
        ):  # fmt: skip
            sent = await client.post("/api/note", data=wrong, headers={"Content-Type": "application/json"})
            assert sent.status == status, wrong[:80]
        assert len((folder / "notes.jsonl").read_text().splitlines()) == 3


async def test_a_selection_is_given_as_a_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "=run")
    for kind, value, turn in (("label", "odd", None), ("note", "seen,\nby us", None), ("note", "again", 0)):
        write_change(folder, Change(kind, "test-tree#0", value, turn, "eval_test_2.parquet"))
    shown = Shown(Catalog([folder]), token=TOKEN)
    samples = [
        {"run": "=run", "file": "eval_test_2.parquet", "rows": [10, 11]},
        {"run": "=run", "file": "step_1.parquet", "rows": [1]},
    ]
    names = ["task", "reward", "part.answer", "kind", "label", "note", "notes", "data.question", "nothing"]

    async with TestClient(TestServer(make_app(shown)), headers={HEADER: TOKEN}) as client:

        async def ask(**body: object) -> tuple[int, bytes]:
            answer = await client.post("/api/selection", json={"samples": samples, "columns": names, **body})
            return answer.status, await answer.read()

        _, data = await ask(**{"as": "parquet"})
        rows = pq.read_table(io.BytesIO(data)).to_pylist()
        assert rows[1] == {
            "run": "=run", "file": "eval_test_2.parquet", "row": 11, "split": "test", "step": 2, "task": "test-tree",
            "reward": 1.0, "part.answer": 1.0, "kind": "even", "label": "odd", "note": "seen,\nby us\nagain",
            "notes": 2, "data.question": "What is test-tree?", "nothing": None,
        }  # fmt: skip
        assert (rows[0]["note"], rows[0]["notes"]) == (None, 0)
        _, data = await ask(**{"as": "csv"})
        told = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
        assert [(r["task"], r["note"]) for r in told] == [(r["task"], r["note"] or "") for r in rows]
        _, data = await ask(**{"as": "jsonl"})
        spoken = [json.loads(line)["messages"] for line in data.splitlines()]
        assert [one[-1]["content"] for one in spoken] == [HOSTILE, "left", "right", "#### 1"]
        for wrong in (
            {"as": "exe"}, {"as": ["csv"]}, {"as": "csv", "samples": 3}, {"as": "csv", "samples": [3]},
            {"as": "csv", "columns": [3]}, {"as": "csv", "samples": [{**samples[0], "file": "../recipe.yaml"}]},
            {"as": "csv", "samples": [{**samples[0], "rows": [99]}]},
            {"as": "jsonl", "samples": [{**samples[0], "rows": [-1]}]},
            {"as": "csv", "samples": [{**samples[0], "rows": [True]}]},
        ):  # fmt: skip
            assert (await ask(**wrong))[0] == 422, wrong


def test_a_port_that_is_taken_and_a_folder_that_holds_no_run_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["view", str(folder), "--port", str(port)]) == 2
        assert run(["view", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"error: --port {port}: taken; name another, or leave it out for any free one",
        f"error: {tmp_path}: neither a run folder (metrics.jsonl, trajectories/ and recipe.yaml are missing) "
        "nor a folder of runs",
    ]


BROKEN = [
    b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nNo Header\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\nzz\r\n",
]  # fmt: skip


async def test_what_is_no_http_prints_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(Shown(Catalog([folder]), token=TOKEN), 0, opened.set_result))
    port = URL(await opened).port
    for data in BROKEN:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        async with asyncio.timeout(60):
            assert b" 40" in await reader.read(12)
        writer.close()
    task.cancel()
    await asyncio.wait([task])
    assert not caplog.records


async def test_it_listens_on_this_machine_alone(folder: Path) -> None:
    opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(Shown(Catalog([folder]), token=TOKEN), 0, opened.set_result))
    address = await opened
    assert address.startswith("http://127.0.0.1:")
    assert address.endswith(f"/#token={TOKEN}")
    task.cancel()
    await asyncio.wait([task])


def test_it_starts_without_torch() -> None:
    import ast

    import agentrl.view as package

    for name in ("store.py", "catalog.py", "server.py", "assets.py", "pieces.py"):
        source = (Path(package.__file__).parent / name).read_text(encoding="utf-8")
        top = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
        named = {getattr(node, "module", None) or node.names[0].name for node in top}
        assert not {name.split(".")[0] for name in named} & {"torch", "transformers", "pyarrow", "numpy", "tokenizers"}
