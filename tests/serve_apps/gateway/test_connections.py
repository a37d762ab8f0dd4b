"""Connections that send half a request, or none, on real sockets: they end, and keep nobody out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from serve_apps.gateway.connections import ConnectionLimits, LimitedConnection

pytestmark = [pytest.mark.test, pytest.mark.anyio]


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[tuple[int, ConnectionLimits]]:
    api = FastAPI()

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
