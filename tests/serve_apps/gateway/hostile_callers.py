"""hostile_callers: callers that behave badly over time -> the statuses that they got. They read slowly, leave, flood, or say nonsense."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx

from tests.serve_apps.gateway.hostile_bodies import AGENT, BODIES, CHAT
from tests.serve_apps.gateway.hostile_connections import REQUESTS, chunked, post

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
QUIET_S = 0.3
"""Seconds without a byte after which a connection has said what it will."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A gateway and what its callers have."""

    port: int
    key: str
    """Of the attacker; scopes call and feedback."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **settings: float) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=settings.get("timeout", 120.0)
        )


Attack = Callable[[Target], Awaitable[list[int]]]


async def ask(target: Target, name: str) -> list[int]:
    """Sends one of `BODIES`."""
    path, body = BODIES[name]()
    async with target.http() as client:
        answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
    return [answer.status_code]


async def write(target: Target, data: bytes, *, quiet_s: float = QUIET_S, read_s: float = 8.0) -> list[int]:
    """Writes bytes to a connection; returns the statuses of what comes back until it closes or is quiet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    got = b""
    with suppress(ConnectionError, TimeoutError):
        writer.write(data.replace(b"KEY", target.key.encode()))
        async with asyncio.timeout(read_s):
            await writer.drain()
            while block := await asyncio.wait_for(reader.read(1 << 20), quiet_s if got else read_s):
                got += block
    writer.transport.abort()
    return [int(status) for status in STATUS.findall(got)]


async def connect(target: Target, name: str) -> list[int]:
    """Sends one of `REQUESTS`."""
    return await write(target, REQUESTS[name]())


async def drip(target: Target) -> list[int]:
    """A body that comes byte by byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    whole = post().replace(b"KEY", target.key.encode())
    head, _, body = whole.partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    answer = asyncio.ensure_future(reader.read(1 << 16))
    for i in range(len(body)):
        if answer.done():
            break
        writer.write(body[i : i + 1])
        await asyncio.sleep(0.1)
    got = await answer
    writer.transport.abort()
    return [int(status) for status in STATUS.findall(got)]


async def endless_chunks(target: Target) -> list[int]:
    """A body that never ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(chunked(body=b"").replace(b"KEY", target.key.encode()))
    with suppress(ConnectionError):
        for _ in range(400):
            writer.write(b"4000\r\n" + b"[" * 0x4000 + b"\r\n")
            await writer.drain()
    got = b""
    with suppress(ConnectionError, TimeoutError):
        got = await asyncio.wait_for(reader.read(1 << 16), 5)
    writer.transport.abort()
    return [int(status) for status in STATUS.findall(got)]


async def half_open(target: Target, num: int = 1000) -> list[int]:
    """Connections that send half a head, or half a body, and wait."""
    halves = [b"", b"GET / HTTP/1.1\r\nHost: a", post()[:-20].replace(b"KEY", target.key.encode()), post()[:-20]]
    opened = []
    for i in range(num):
        with suppress(ConnectionError, OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(halves[i % len(halves)])
            opened.append((reader, writer))
    await asyncio.sleep(5)
    statuses = []
    for reader, writer in opened:
        with suppress(ConnectionError, TimeoutError):
            statuses += [int(s) for s in STATUS.findall(await asyncio.wait_for(reader.read(4096), 0.05))]
        writer.transport.abort()
    return statuses


async def never_read(target: Target, num: int = 60) -> list[int]:
    """Streams that nobody reads, by one key."""
    body = {
        "model": AGENT,
        "messages": [{"role": "user", "content": "a"}],
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        "n": 4,
    }
    data = post(body=json.dumps(body).encode()).replace(b"KEY", target.key.encode())
    opened = [await asyncio.open_connection("127.0.0.1", target.port, limit=1) for _ in range(num)]
    for _, writer in opened:
        writer.write(data)
    await asyncio.sleep(6)
    statuses = []
    for reader, writer in opened:
        with suppress(ConnectionError, TimeoutError):
            statuses += [int(s) for s in STATUS.findall(await asyncio.wait_for(reader.read(100), 1))]
        writer.transport.abort()
    return statuses


async def leave(target: Target) -> list[int]:
    """Callers who leave in every phase: within the head, the body, before the first byte of the answer, within a stream."""
    statuses = []
    for stream in (False, True):
        body = json.dumps({"model": AGENT, "messages": [{"role": "user", "content": "a"}], "stream": stream}).encode()
        whole = post(body=body).replace(b"KEY", target.key.encode())
        for cut in (10, 80, len(whole) - 30, len(whole)):
            for wait_s in (0.0, 0.02, 0.1):
                reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
                writer.write(whole[:cut])
                with suppress(ConnectionError, TimeoutError):
                    got = await asyncio.wait_for(reader.read(random.Random(cut).randint(1, 400)), wait_s + 0.001)
                    statuses += [int(s) for s in STATUS.findall(got)]
                writer.transport.abort()
    pipelined = post(body=body) + post()
    statuses += await write(target, pipelined, read_s=0.2)
    return statuses


def flood(path: str, num: int, **body: object) -> Attack:
    """The same request many times at once."""

    async def attack(target: Target) -> list[int]:
        async with target.http() as client:
            answers = await asyncio.gather(*(client.post(path, json=body) for _ in range(num)), return_exceptions=True)
        return [answer.status_code for answer in answers if isinstance(answer, httpx.Response)]

    return attack


def chats(path: str, num: int, content: str) -> Attack:
    return flood(path, num, model=AGENT, messages=[{"role": "user", "content": content}])


async def strangers(target: Target) -> list[int]:
    """The largest bodies, without a key."""
    stranger = Target(port=target.port, key="troupe-guess")
    names = ("600,000 empty objects", "two megabytes of words", "200,000 unknown fields", "floods of calls")
    return [status for name in names * 3 for status in await ask(stranger, name)]


async def noise(target: Target, num: int = 250) -> list[int]:
    """Requests of which bytes were changed, cut out or doubled."""
    dice = random.Random(7)
    whole = post(
        body=json.dumps(
            {"model": AGENT, "messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 4}
        ).encode()
    )
    statuses = []
    for _ in range(num):
        data = bytearray(whole.replace(b"KEY", target.key.encode()))
        for _ in range(dice.randint(1, 6)):
            at = dice.randrange(len(data))
            match dice.randrange(3):
                case 0:
                    data[at] = dice.randrange(256)
                case 1:
                    del data[at : at + dice.randint(1, 40)]
                case _:
                    data[at:at] = data[at : at + dice.randint(1, 40)] * dice.randint(1, 3)
        statuses += await write(target, bytes(data), quiet_s=0.02, read_s=0.3)
    return statuses


CALLERS: dict[str, Attack] = {
    "a body that comes byte by byte": drip,
    "a body that never ends": endless_chunks,
    "a thousand half-open connections": half_open,
    "streams that nobody reads": never_read,
    "callers who leave": leave,
    "a flood of feedback": flood("/v1/traces/chatcmpl-nobody/feedback", 300, score=1, comment="x" * 4000),
    "a flood to the tokenizer": chats("/tokenize", 12, "word " * 380_000),
    "a flood of long chats": chats(CHAT, 12, "w7 " * 600_000),
    "a flood of short chats": chats(CHAT, 300, "a"),
    "all episodes that there may be": flood("/v1/episodes", 100, team="demo", metadata={"a": "x" * 200_000}),
    "a flood of what is stored": flood(
        "/v1/workflows/demo/runs", 60, prompt="1+2", store=True, metadata={"a": "x@y " * 200_000}
    ),
    "strangers with long bodies": strangers,
    "noise": noise,
}
"""Attacks that take time."""
