"""openenv_server: a server that speaks OpenEnv's `/ws`, over worlds of a Python class, with as few worlds at a time as a test likes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from websockets.asyncio.server import ServerConnection, serve


class Server:
    """Counts what it is asked."""

    def __init__(self, make: Callable[..., Any], capacity: int = 8, *, falls_silent: bool = False) -> None:
        """Args: falls_silent: it answers no step."""
        self.make, self.capacity, self.falls_silent = make, capacity, falls_silent
        self.num_open = self.num_refused = self.most_open = 0
        self.port = 0

    async def answer(self, socket: ServerConnection) -> None:
        """One connection, which is one world."""
        if self.num_open >= self.capacity:
            self.num_refused += 1
            await socket.send(_error("CAPACITY_REACHED", f"{self.capacity} sessions are open"))
            return
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        world: Any = None
        try:
            async for line in socket:
                asked = json.loads(line)
                try:
                    if asked["type"] == "reset":
                        world = self.make(**asked["data"])
                        seen = world.reset()
                    elif self.falls_silent:
                        continue
                    else:
                        seen = world.step(asked["data"]["text"])
                except Exception as error:  # noqa: BLE001 - the server answers with whatever a world raises
                    await socket.send(_error("EXECUTION_ERROR", f"{type(error).__name__}: {error}"))
                    continue
                observation = {"text": seen["text"], "metadata": {}, **seen.get("info", {})}
                data = {"observation": observation, "reward": seen.get("reward"), "done": seen.get("is_done", False)}
                await socket.send(json.dumps({"type": "observation", "data": data}))
        finally:
            self.num_open -= 1


def _error(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message}})


@asynccontextmanager
async def serving(make: Callable[..., Any], *, port: int = 0, **settings: Any) -> AsyncIterator[Server]:
    """A server on a port, 0: one of its own."""
    server = Server(make, **settings)
    async with serve(server.answer, "127.0.0.1", port) as listening:
        server.port = next(iter(listening.sockets)).getsockname()[1]
        yield server


@contextmanager
def serving_in_a_thread(make: Callable[..., Any]) -> Iterator[Server]:
    """A server with an event loop of its own, in which a world that computes lets nothing else happen."""
    servers: list[Server] = []
    has_begun, is_over = threading.Event(), threading.Event()

    async def main() -> None:
        async with serving(make) as server:
            servers.append(server)
            has_begun.set()
            await asyncio.to_thread(is_over.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    has_begun.wait()
    try:
        yield servers[0]
    finally:
        is_over.set()
        thread.join()
