"""Requests that ask for another protocol, byte by byte on real sockets: HTTP/1.1 answers them, with their body."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse

from serve_apps.gateway.http.connections import ConnectionLimits, LimitedConnection
from serve_apps.http.http_connection import HttpConnection
from serve_apps.program.server import EpisodeServer

pytestmark = [pytest.mark.test, pytest.mark.anyio]

JDK = (
    "POST /echo HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: {size}\r\nHost: localhost\r\n"
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\nUser-Agent: Java-http-client/21.0.2\r\n"
    "Content-Type: application/json\r\n\r\n"
)
"""The head of the first request of `java.net.http.HttpClient`."""
GATEWAYS: Any = partial(LimitedConnection, limits=ConnectionLimits(max_open=100, head_timeout_s=30.0))
OURS = pytest.mark.parametrize("http", [HttpConnection, GATEWAYS], ids=["plain", "of the gateway"])


@asynccontextmanager
async def served(http: Any, *, ws: Any = "none") -> AsyncIterator[int]:
    api = FastAPI()

    @api.post("/echo")
    async def echo(request: Request) -> str:
        return "got " + (await request.body()).decode()

    @api.post("/stream")
    async def stream(request: Request) -> StreamingResponse:
        body = await request.body()
        return StreamingResponse(iter([b"one ", b"two ", body]), media_type="text/plain")

    @api.websocket("/ws")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(api, http=http, ws=ws, log_config=None, lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def told(port: int, *parts: bytes, until: bytes) -> bytes:
    """Sends the parts, each once the one before it has gone, and returns what comes up to `until`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            return await reader.readuntil(until)
    finally:
        writer.close()


def jdk(body: bytes, **changes: str) -> bytes:
    head = JDK.format(size=len(body))
    for old, new in (change.split(" -> ") for change in changes.values()):
        assert old in head
        head = head.replace(old, new)
    return head.encode() + body


@OURS
@pytest.mark.parametrize(
    "change",
    [
        "Upgrade: h2c -> Upgrade: h2c",
        "Upgrade: h2c -> upgrade: H2C",
        "Upgrade: h2c -> Upgrade: websocket",
        "HTTP/1.1\r\nC -> HTTP/1.0\r\nC",
        "HTTP2-Settings\r\nC -> HTTP2-Settings, close\r\nC",
        "Upgrade: h2c -> Upgrade: h2c\r\nUpgrade: TLS/1.3",
    ],
    ids=[
        "as it is",
        "other letters",
        "a websocket, of which there are none",
        "of HTTP/1.0",
        "the last one",
        "of two protocols",
    ],
)
async def test_the_body_of_a_request_that_asks_for_another_protocol_is_read_however_it_is_written(
    http: Any, change: str
) -> None:
    async with served(http) as port:
        assert b"got 6*7" in await told(port, jdk(b"6*7", change=change), until=b'6*7"')


@OURS
async def test_in_whatever_pieces_it_comes(http: Any) -> None:
    async with served(http) as port:
        whole = jdk(b"6*7")
        for piece in (1, 7, len(whole) - 3, len(whole) - 1):
            parts = [whole[i : i + piece] for i in range(0, len(whole), piece)]
            assert b"got 6*7" in await told(port, *parts, until=b'6*7"')


@OURS
async def test_a_body_in_chunks_is_read(http: Any) -> None:
    async with served(http) as port:
        head = jdk(b"", change="Content-Length: 0 -> Transfer-Encoding: chunked")
        assert b"got 6*7" in await told(port, head, b"2\r\n6*\r\n", b"1\r\n7\r\n0\r\n\r\n", until=b'6*7"')


@OURS
async def test_one_that_waits_for_100_continue_gets_it(http: Any) -> None:
    async with served(http) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(jdk(b"", change="Content-Length: 0 -> Expect: 100-continue\r\nContent-Length: 3"))
        async with asyncio.timeout(10):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"6*7")
            assert b"got 6*7" in await reader.readuntil(b'6*7"')
        writer.close()


@OURS
async def test_a_long_body_a_stream_and_the_next_requests_of_the_connection_come_through(http: Any) -> None:
    async with served(http) as port:
        long = b"x" * 300_000
        first = jdk(long, change="POST /echo -> POST /stream")
        answers = await told(port, first + jdk(b"second") + jdk(b"third"), until=b'third"')
        assert b"one " in answers and answers.count(b"x") > 299_000 and b"got second" in answers
        assert answers.count(b"HTTP/1.1 200") == 3


@OURS
async def test_what_stands_in_a_body_is_no_request(http: Any) -> None:
    async with served(http) as port:
        body = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
        answers = await told(port, jdk(body) + jdk(b"end"), until=b'end"')
        assert answers.count(b"HTTP/1.1 200") == 2


@OURS
@pytest.mark.parametrize(
    "sent",
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"],
    ids=["HTTP/2 without asking", "a tunnel"],
)
async def test_what_cannot_be_answered_in_http_1_is_refused_at_once(http: Any, sent: bytes) -> None:
    async with served(http) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_a_server_with_websockets_goes_on_to_upgrade_to_them() -> None:
    from websockets.asyncio.client import connect

    async with (
        served(HttpConnection, ws="websockets-sansio") as port,
        connect(f"ws://127.0.0.1:{port}/ws") as websocket,
    ):
        assert await websocket.recv() == "hello"


async def test_the_episodes_server_of_programs_reads_it_too() -> None:
    server = EpisodeServer("127.0.0.1")
    await server.start()
    _, _, port = server._address.rpartition(":")
    sent = jdk(b"{}", change="POST /echo -> POST /v1/episodes/e1/chat/completions")
    answer = await told(int(port), sent, until=b"}}")
    assert b"model" in answer and b"body: Field required" not in answer, "the body was read, and has no model"
    server._server.should_exit = True
    assert server._serving is not None
    await server._serving
