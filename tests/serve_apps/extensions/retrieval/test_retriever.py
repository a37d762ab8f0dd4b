"""The retriever against every shape of the field's servers, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from servers import free_port

from serve_apps.authoring.agent import ToolError, ToolFault, noted_version
from serve_apps.extensions.retrieval.retriever import EmbeddedRetriever, HttpRetriever, as_information, read_rows
from serve_apps.extensions.retrieval.retriever_app import build_retriever
from stores.traces.corpus import Corpus, Document, build_corpus

pytestmark = pytest.mark.test

Answer = Callable[[Any], tuple[int, bytes]]
ROOT = Path(__file__).parents[4]


class Server:
    """An HTTP server that answers as it is told, and counts."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                status, content = answer(body)
                self.send_response(status)
                self.send_header("Content-Length", str(abs(status) and len(content) + (100 if status == 299 else 0)))
                self.end_headers()
                self.wfile.write(content)
                if status == 299:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/retrieve"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


def of(query: str) -> str:
    return f'"{query}"\nabout {query}'


def search_r1(body: Any) -> tuple[int, bytes]:
    rows = [[{"document": {"id": q, "contents": of(q)}, "score": 1.5}][: body["topk"]] for q in body["queries"]]
    return 200, json.dumps({"result": rows}).encode()


def ask(retriever: HttpRetriever, queries: list[str], top_k: int = 3) -> list[list[Document]]:
    async def run() -> list[list[Document]]:
        try:
            return await retriever.search(queries, top_k)
        finally:
            await retriever.close()

    return asyncio.run(run())


def found(rows: list[list[Document]]) -> list[list[str]]:
    return [[document.contents for document in row] for row in rows]


@pytest.mark.parametrize(
    ("answer", "rows"),
    [
        ({"result": [[{"document": {"id": "1", "contents": "a"}, "score": 2.0}], []]}, [["a"], []]),
        ({"result": [[{"id": "1", "contents": "a"}], [{"id": "2", "contents": "b"}]]}, [["a"], ["b"]]),
        ({"result": [[{"text": "a"}, {"document": "b"}], [{"content": "c"}, "d"]]}, [["a", "b"], ["c", "d"]]),
        ([{"top_k_docs": ["a"]}, {"top_k_docs": [{"contents": "b"}]}], [["a"], ["b"]]),
        ([["a"], ["b"]], [["a"], ["b"]]),
        ([[{"title": "A", "text": "a"}], [{"document": {"title": "B", "contents": "b"}}]], [['"A"\na'], ['"B"\nb']]),
        ([[{"title": "A", "contents": '"A"\na'}], [{"title": "", "text": "b"}]], [['"A"\na'], ["b"]]),
    ],
)
def test_every_shape_of_an_answer_is_read(answer: Any, rows: list[list[str]]) -> None:
    assert found(read_rows(answer, 2)) == rows


@pytest.mark.parametrize("answer", [{"top_k_docs": ["a", "b"]}, {"result": ["a", "b"]}, [{"top_k_docs": ["a", "b"]}]])
def test_a_single_querys_documents_may_come_without_a_row(answer: Any) -> None:
    assert found(read_rows(answer, 1)) == [["a", "b"]]


@pytest.mark.parametrize(
    "answer",
    [
        {"result": [["a"]]},
        {"result": "a"},
        {"detail": "no"},
        7,
        None,
        {"result": [[{"id": "1"}], []]},
        [["a"], [7]],
        {"result": [{"contents": "a"}, {"contents": "b"}]},
    ],
)
def test_an_answer_that_does_not_match_the_queries_is_none(answer: Any) -> None:
    with pytest.raises(ValueError):
        read_rows(answer, 2)


def test_order_is_kept_blank_queries_are_not_sent_and_known_ones_not_again() -> None:
    with Server(search_r1) as server:
        retriever = HttpRetriever([server.url])
        rows = ask(retriever, ["b", "", "a", "b"])
        assert found(rows) == [[of("b")], [], [of("a")], [of("b")]]
        assert rows[0][0] == Document(document_id="b", contents=of("b"), score=1.5)
        assert found(ask(retriever, ["a", "c"])) == [[of("a")], [of("c")]]
        assert [r["queries"] for r in server.requests] == [["b", "a"], ["c"]]
        assert server.requests[0] == {"queries": ["b", "a"], "topk": 3, "return_scores": True}


def test_documents_of_a_server_that_has_others_by_now_are_forgotten_and_calls_say_which() -> None:
    version = 1

    def answer(body: Any) -> tuple[int, bytes]:
        return 200, json.dumps({"result": [[f"{q} {version}"] for q in body["queries"]], "version": version}).encode()

    with Server(answer) as server:
        retriever = HttpRetriever([server.url])
        with noted_version() as noted:
            seen = [found(ask(retriever, [q])) for q in ("a", "a")]
            assert noted == [f"version 1 of {server.url}"]
            version = 2
            seen += [found(ask(retriever, [q])) for q in ("a", "b", "a")]
    assert [row[0][0] for row in seen] == ["a 1", "a 1", "a 1", "b 2", "a 2"]
    assert noted == [f"version 2 of {server.url}"]


@pytest.mark.parametrize(
    ("request_as", "sent"),
    [
        ("query", [{"query": "a", "topk": 2, "return_scores": True}, {"query": "b", "topk": 2, "return_scores": True}]),
        ("questions", [{"questions": ["a", "b"], "N": 2}]),
    ],
)
def test_other_dialects_are_spoken_where_they_are_asked_for(request_as: Any, sent: list[Any]) -> None:
    def answer(body: Any) -> tuple[int, bytes]:
        asked = body.get("questions") or [body["query"]]
        return 200, json.dumps({"result": [[of(q)] for q in asked]}).encode()

    with Server(answer) as server:
        assert found(ask(HttpRetriever([server.url], request=request_as), ["a", "b"], 2)) == [[of("a")], [of("b")]]
        assert sorted(map(str, server.requests)) == sorted(map(str, sent))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"result": []}', "0 rows for 2 queries"),
        (b'{"result": [[{"contents": "a", "score": [1]}], []]}', "a score that is no number"),
    ],
)
def test_an_answer_that_means_nothing_fails_the_call_with_what_it_said(content: bytes, said: str) -> None:
    with Server(lambda _: (200, content)) as server:
        with pytest.raises(ToolError, match=said):
            ask(HttpRetriever([server.url], max_attempts=3, timeout_s=2), ["a", "b"])
        assert len(server.requests) == 3


def test_nobody_there_and_nobody_answering_end_at_the_deadline() -> None:
    with pytest.raises(ToolFault, match=r"no documents after 2 attempts; last .*ConnectError"):
        ask(HttpRetriever([f"http://127.0.0.1:{free_port()}/retrieve"], max_attempts=2), ["a"])
    stop = threading.Event()

    def silent(_: Any) -> tuple[int, bytes]:
        stop.wait(20)
        return 200, b""

    with Server(silent) as server:
        with pytest.raises(ToolFault, match=r"no documents within 0\.6 s; last .*no whole answer within 0\.2 s"):
            ask(HttpRetriever([server.url], timeout_s=0.2, deadline_s=0.6), ["a"])
        stop.set()


@pytest.mark.nightly
def test_a_server_that_dies_is_left_alone_and_the_others_go_on() -> None:
    with ExitStack() as stack:
        good = stack.enter_context(Server(search_r1))
        bad = stack.enter_context(Server(lambda _: (503, b"overloaded")))
        retriever = HttpRetriever([bad.url, good.url], max_faults=2, rest_s=60)

        async def run() -> list[list[list[Document]]]:
            rows = [await retriever.search([f"q{i}"], 1) for i in range(20)]
            await retriever.close()
            return rows

        rows = asyncio.run(run())
        assert [found(row) for row in rows] == [[[of(f"q{i}")]] for i in range(20)]
        assert len(bad.requests) == 2, "its circuit is open"


def test_a_server_that_refuses_is_passed_over_for_the_next() -> None:
    with Server(search_r1) as good, Server(lambda _: (404, b"Not Found")) as bad:
        retriever = HttpRetriever([bad.url, good.url], max_attempts=1)

        async def run() -> list[list[list[Document]]]:
            rows = [await retriever.search([f"q{i}"], 1) for i in range(20)]
            await retriever.close()
            return rows

        assert [found(row) for row in asyncio.run(run())] == [[[of(f"q{i}")]] for i in range(20)]
        assert len(bad.requests) == retriever.max_faults


def test_the_call_fails_where_every_server_refuses() -> None:
    with Server(lambda _: (404, b"Not Found")) as one, Server(lambda _: (422, b"no")) as other:
        message = r"answered HTTP 4\d\d: .*; http.* answered HTTP 4\d\d: .*; is it the address of the retriever"
        with pytest.raises(ToolFault, match=message):
            ask(HttpRetriever([one.url, other.url, one.url]), ["a"])
        assert (len(one.requests), len(other.requests)) == (1, 1)


def test_a_remembered_query_is_answered_though_it_is_forgotten_meanwhile() -> None:
    with Server(search_r1) as server:
        retriever = HttpRetriever([server.url], cache_size=1)

        async def run() -> list[list[list[Document]]]:
            await retriever.search(["a"], 1)
            rows = await asyncio.gather(*(retriever.search(["a", f"q{i}"], 1) for i in range(8)))
            await retriever.close()
            return rows

        assert [found(row) for row in asyncio.run(run())] == [[[of("a")], [of(f"q{i}")]] for i in range(8)]


@pytest.mark.nightly
def test_a_server_that_drips_takes_one_attempt_not_the_deadline() -> None:
    stop = threading.Event()
    dripping = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = dripping.accept()
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not stop.wait(0.02):
                connection.sendall(b" ")

    threading.Thread(target=drip, daemon=True).start()
    with dripping, Server(search_r1) as good:
        url = f"http://127.0.0.1:{dripping.getsockname()[1]}/retrieve"
        retriever = HttpRetriever([good.url, url], timeout_s=1.0, deadline_s=600)
        assert found(ask(retriever, ["a"])) == [[of("a")]]
        assert retriever._endpoints[1].num_faults == 1, "it was asked"
        stop.set()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="give whole addresses"):
        HttpRetriever(["host:8000"])
    with pytest.raises(ValueError, match="no address"):
        HttpRetriever([])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    rows = [{"id": str(i), "title": f"Person{i}", "text": f"Person{i} lives in Town{i % 7}."} for i in range(2000)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_corpus(str(folder / "index"), folder / "documents.jsonl")
    return Corpus(str(folder / "index"))


@pytest.fixture(scope="module")
def served(corpus: Corpus) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(build_retriever(corpus), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}/retrieve"
    server.should_exit = True
    thread.join(timeout=10)


def test_the_served_corpus_speaks_every_dialect(served: str, corpus: Corpus) -> None:
    queries = ["Person7", "", "Person8"]
    with noted_version() as noted:
        direct = asyncio.run(EmbeddedRetriever(corpus).search(queries, 1))
    assert noted == [f"version {corpus.version} of {corpus.uri}"]
    assert [[d.document_id for d in row] for row in direct] == [["7"], [], ["8"]]
    for request_as in ("queries", "query", "questions"):
        assert found(ask(HttpRetriever([served], request=request_as), queries, 1)) == found(direct)  # type: ignore[arg-type]


def test_search_r1s_own_request_and_reading_work_on_it(served: str) -> None:
    """As generation.py does it: POST, `["result"]`, first line of contents is the title."""
    import httpx

    answer = httpx.post(served, json={"queries": ["Person5", "Person6"], "topk": 1, "return_scores": True}).json()
    shown = [item["document"]["contents"].split("\n") for row in answer["result"] for item in row]
    assert [lines[0] for lines in shown] == ['"Person5"', '"Person6"']
    plain = httpx.post(served, json={"queries": ["Person5 lives", "Person6 lives"]}).json()["result"]
    assert [len(row) for row in plain] == [3, 3]
    assert set(plain[0][0]) == {"id", "contents"}
    assert httpx.post(served, json={"topk": 1}).status_code == 422


@pytest.mark.nightly
def test_a_thousand_queries_at_once(served: str) -> None:
    retriever = HttpRetriever([served], deadline_s=120, timeout_s=60)

    async def run() -> list[list[list[Document]]]:
        rows = await asyncio.gather(*(retriever.search([f"Person{i}"], 1) for i in range(1000)))
        await retriever.close()
        return rows

    rows = asyncio.run(run())
    assert [row[0][0].document_id for row in rows] == [str(i) for i in range(1000)]


@contextmanager
def own_process(corpus: Corpus) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`troupe retriever` in a process of its own."""
    port = free_port()
    command = ["from pipelines.cli.main import main; main()", "retriever", corpus.uri, "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-c", *command], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < deadline, "troupe retriever does not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/retrieve", process
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
def test_a_server_killed_amid_searches_costs_none_of_them(corpus: Corpus) -> None:
    num_searches, answered = 300, 0
    with own_process(corpus) as (killed_url, killed), own_process(corpus) as (url, _):
        retriever = HttpRetriever([killed_url, url], timeout_s=30, deadline_s=120, max_in_flight=16)

        async def search(i: int) -> list[list[Document]]:
            nonlocal answered
            rows = await retriever.search([f"Person{i}"], 1)
            answered += 1
            if answered == num_searches // 3:
                killed.send_signal(signal.SIGKILL)
            return rows

        async def run() -> list[list[list[Document]]]:
            rows = await asyncio.gather(*map(search, range(num_searches)))
            await retriever.close()
            return rows

        rows = asyncio.run(run())
        assert killed.wait(timeout=10) == -signal.SIGKILL
    assert [row[0][0].document_id for row in rows] == [str(i) for i in range(num_searches)]
    assert retriever._endpoints[0].num_faults > 0, "it was asked after its death"


def test_documents_are_shown_as_search_r1_does() -> None:
    documents = [Document(document_id="1", contents='"A"\ntext of a'), Document(document_id="2", contents="no title")]
    assert as_information(documents) == '<information>Doc 1(Title: "A") text of a\nDoc 2: no title</information>'
    assert as_information([]) == "<information></information>"


def test_the_corpus_is_built_and_served_from_the_shell(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from pipelines.cli.main import app

    (tmp_path / "d.jsonl").write_text('{"id": "1", "contents": "one"}\n')
    made = CliRunner().invoke(app, ["corpus", str(tmp_path / "d.jsonl"), str(tmp_path / "index")])
    assert made.output.startswith("1 documents in"), made.output
    refused = CliRunner().invoke(app, ["retriever", str(tmp_path / "nowhere")])
    assert refused.exit_code == 2
