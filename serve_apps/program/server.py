"""server: calls of programs -> their episodes in this process, by an OpenAI API on a port of its own.

    program ── OPENAI_BASE_URL = http://127.0.0.1:PORT/v1/episodes/EPISODE ──> ProgramEpisode.chat ──> policy app

It runs in the process that plays the episode, a collector or a gateway replica, and in its event loop, so that turns are
recorded where they are sampled. It is started with the first episode and ends with the loop. For programs in containers it
listens on a Unix socket instead: see `serve_apps.program.container`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn
from fastapi import FastAPI, Request

from serve_apps.http.http_connection import HttpConnection
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.http_errors import add_errors
from serve_apps.openai_api.protocol import ApiError
from serve_apps.program.episode import PostedOutcome, ProgramEpisode
from serve_apps.program.routes import episode_routes
from serve_apps.spans import process_spans

START_S = 10.0
KEEPALIVE_S = 3600
"""How long a connection without a request is kept: longer than any client keeps it. A server that closes it sooner meets the next call
of a program with a closed one, where its event loop, or the program, stood still for a while."""
SOCKET = "unix"
"""In place of a host: a Unix socket."""
SOCKET_NAME = "episodes.sock"
FORWARDED_PORT = 8000
"""The port at which a container's program finds the socket."""


class EpisodeServer:
    """Serves the episodes under way in this event loop, by id."""

    def __init__(self, host: str) -> None:
        """Binds a port, or a socket; `start` serves it.

        Args: host: the address that programs reach this machine by; or `SOCKET`.
        """
        self.host = host
        self.episodes: dict[str, ProgramEpisode] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="troupe-episodes-") if host == SOCKET else None
        self._socket = _bound(host) if self.folder is None else _bound_in(self.folder)
        self._address = f"127.0.0.1:{FORWARDED_PORT}"
        if self.folder is None:
            self._address = f"{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            build_api(self.episodes),
            http=HttpConnection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEPALIVE_S,
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._serving: asyncio.Task[None] | None = None
        self._is_starting = asyncio.Lock()
        self._http: Any = None

    @property
    def folder(self) -> Path | None:
        """The folder of the socket; None where a port is served."""
        return None if self._folder is None else Path(self._folder.name)

    async def start(self) -> None:
        """Starts the server and returns when it listens."""
        async with self._is_starting:
            if self._serving is None:
                with process_spans().outside():  # it serves the episodes after this one, too
                    self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
            async with asyncio.timeout(START_S):
                while not self._server.started:
                    if self._serving.done():
                        raise RuntimeError(f"the episodes' server has ended: {self._serving.exception()}")
                    await asyncio.sleep(0.005)

    def async_client(self, base_url: str, key: str) -> Any:
        """Returns an `openai.AsyncOpenAI` for one episode; connections are shared, because a new one takes 40 ms."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        if self._http is None:

            class Shared(DefaultAsyncHttpxClient):
                async def aclose(self) -> None:
                    """Closes nothing: a program that closes its client would close those of the others."""

            self._http = Shared(trust_env=False, timeout=None)  # this server is never behind a proxy
        return AsyncOpenAI(base_url=base_url, api_key=key, http_client=self._http, max_retries=0, timeout=None)

    @contextmanager
    def playing(self, episode: ProgramEpisode) -> Iterator[str]:
        """Yields the base URL at which the episode answers until the block ends."""
        key = episode.id if episode.id not in self.episodes else f"{episode.id}-{secrets.token_hex(4)}"
        self.episodes[key] = episode
        try:
            yield f"http://{self._address}/v1/episodes/{key}"
        finally:
            del self.episodes[key]


def _bound(host: str) -> socket.socket:
    # Of this protocol by name: asyncio turns Nagle off for no other, and every answer would wait 40 ms for an ACK.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind((host, 0))
    return bound


def _bound_in(folder: Path) -> socket.socket:
    """Binds a socket that every user may connect to, as to a port: each episode has a key, and containers have users of their own."""
    folder.chmod(0o711)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(str(folder / SOCKET_NAME))
    (folder / SOCKET_NAME).chmod(0o666)
    return bound


_servers: WeakKeyDictionary[Any, dict[str, EpisodeServer]] = WeakKeyDictionary()


async def episode_server(host: str) -> EpisodeServer:
    """Returns the running server of this event loop on an address, or on a socket for `SOCKET`."""
    of_loop = _servers.setdefault(asyncio.get_running_loop(), {})
    if host not in of_loop:
        of_loop[host] = EpisodeServer(host)
    await of_loop[host].start()
    return of_loop[host]


class OfThisProcess:
    """Implements `Episodes` for programs of this process; each episode has an API key of its own."""

    def __init__(self, episodes: dict[str, ProgramEpisode]) -> None:
        """Keeps `episodes`, by id, which may change between calls."""
        self._episodes = episodes

    def find(self, episode_id: str, request: Request) -> ProgramEpisode:
        """Returns the open episode of that id; raises the 404 of the API for an unknown one."""
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise ApiError(404, f"no episode {episode_id!r} is under way here: it has ended", code="episode_not_found")
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(token.encode(), episode.token.encode()):
            raise ApiError(401, "send the episode's OPENAI_API_KEY as a bearer token", code="invalid_api_key")
        return episode

    async def chat(self, episode: ProgramEpisode, agent: str, body: ChatRequest) -> dict[str, Any]:
        """Answers one chat completion as a turn of the episode."""
        return await episode.chat(agent, body)

    async def outcome(self, episode: ProgramEpisode, posted: PostedOutcome) -> dict[str, Any]:
        """Takes an outcome; until the program ends a later one replaces it."""
        episode.outcome = posted
        return {"status": "noted"}


def build_api(episodes: dict[str, ProgramEpisode]) -> FastAPI:
    """Returns the application over the episodes that `episodes` holds at the time of a call."""
    api = FastAPI(title="Troupe episodes", version="1", docs_url=None, redoc_url=None)
    api.include_router(episode_routes(OfThisProcess(episodes)))
    add_errors(api)
    return api
