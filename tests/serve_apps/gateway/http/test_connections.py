"""Connections that send half a request, or none, on real sockets: they end, and keep nobody out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from waits import until

from serve_apps.gateway.http.connections import ConnectionLimits, LimitedConnection

pytestmark = [pytest.mark.test, pytest.mark.anyio]


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * 65_536
        await asyncio.sleep(0)


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[tuple[int, ConnectionLimits]]:
    api = FastAPI()

    @api.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(endless(), media_type="text/plain")

    @api.get("/slow/{seconds}")
    async def slow(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "answered"

    of_server = ConnectionLimits(**({"max_open": 100, "head_timeout_s": 30.0} | limits))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    http: Any = partial(LimitedConnection, limits=of_server)
    server = uvicorn.Server(uvicorn.Config(api, http=http, log_config=None, lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()[1], of_server
    finally:
        server.should_exit = True
        await serving


async def half_open(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a")
    await writer.drain()
    return reader, writer


async def is_closed(reader: asyncio.StreamReader, *, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            return not await reader.read()
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nHost: a"])
async def test_a_head_that_does_not_end_is_given_up(begin: bytes) -> None:
    async with served(head_timeout_s=0.3) as (port, limits):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        assert await is_closed(reader, within_s=2) and not limits.waiting
        writer.close()


async def test_an_answer_takes_its_time_and_an_idle_connection_is_used_again() -> None:
    async with (
        served(head_timeout_s=0.3) as (port, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        assert (await client.get("/slow/0.8")).json() == "answered"
        await asyncio.sleep(0.5)
        answer = await client.get("/slow/0")
        assert answer.json() == "answered"
        used = client._transport._pool.connections  # type: ignore[attr-defined]
        assert len(used) == 1, "the time for a head begins with its first byte"


async def test_half_open_connections_keep_nobody_out_and_no_answer_is_lost() -> None:
    async with (
        served(max_open=50) as (port, limits),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        under_way = asyncio.ensure_future(client.get("/slow/2"))
        await asyncio.sleep(0.2)
        opened = [await half_open(port) for _ in range(300)]
        await asyncio.sleep(0.2)
        assert len(limits.waiting) <= 50
        assert (await client.get("/slow/0")).json() == "answered"
        closed = [await is_closed(reader, within_s=0.05) for reader, _ in opened]
        assert all(closed[:240]) and not all(closed), "the oldest made room"
        assert (await under_way).json() == "answered"
        for _, writer in opened:
            writer.close()


@pytest.mark.parametrize("head", [b"GET /slow/0 HTTP/1.1\r\nX-A: ", b"GET /"])
async def test_a_head_without_end_is_refused_while_it_comes(head: bytes) -> None:
    async with served() as (port, limits):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"a" * 70_000)
        assert (await reader.read(20)).startswith(b"HTTP/1.1 431")
        writer.close()
        await until(lambda: not limits.waiting)


async def test_a_head_that_is_too_long_is_refused_also_where_it_comes_whole() -> None:
    async with served() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow/0 HTTP/1.1\r\nX-A: " + b"a" * 200_000 + b"\r\n\r\n")
        assert (await reader.read(20)).startswith(b"HTTP/1.1 431")
        writer.close()


async def test_more_requests_than_may_wait_on_a_connection_end_it() -> None:
    async with served() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow/0 HTTP/1.1\r\nHost: a\r\n\r\n" * 10)
        got = b""
        while got.count(b"answered") < 10:
            got += await reader.read(4096)
        writer.write(b"GET /slow/0.2 HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)
        assert b"400 Bad Request" in await reader.read(1 << 20)
        writer.close()


async def test_a_caller_who_reads_nothing_of_an_answer_is_left() -> None:
    async with served(stalled_s=0.3) as (port, limits):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.sleep(1)
        with suppress(ConnectionError):
            async with asyncio.timeout(10):
                while await reader.read(1 << 20):
                    pass
        writer.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/slow/0")).json() == "answered" and len(limits.waiting) == 1


async def test_where_all_have_requests_a_further_connection_is_closed() -> None:
    async with (
        served(max_open=2) as (port, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        both = [asyncio.ensure_future(client.get("/slow/1")) for _ in range(2)]
        await asyncio.sleep(0.3)
        reader, writer = await half_open(port)
        assert await is_closed(reader, within_s=1)
        writer.close()
        assert [(await answer).json() for answer in both] == ["answered"] * 2


def test_there_are_fewer_where_the_process_may_open_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (400, 4096))
    assert ConnectionLimits(max_open=2048, head_timeout_s=1).max_open == 272
    assert ConnectionLimits(max_open=100, head_timeout_s=1).max_open == 100
