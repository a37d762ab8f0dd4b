"""openenv: a world of an OpenEnv server, spoken to over its `/ws`: a connection is a world.

    {"type": "reset", "data": {"seed": 3}}          ->  {"type": ..., "data": {"observation": {...}, "reward": 0.0, "done": false}}
    {"type": "step", "data": {"text": "look"}}      ->  the same, or {"type": "error", "data": {"code", "message"}}

Its HTTP `/reset` and `/step` begin another world with each request, so they are of no use here. A server that is full says so, and is
asked again, as is one that takes no connection because it is being started again. Proxies, redirects and statuses: see `http/peer.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from serve_apps.authoring.agent import AuthorError, ToolFault, ToolRaised
from serve_apps.authoring.environment import Environment
from serve_apps.http.peer import MAX_ANSWER_BYTES, fault_of, pause_s, read_json
from stores.types import Cause
from stores.urls import is_loopback

FULL = "CAPACITY_REACHED"
PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
"""Between two questions to a server that begins no world now, at first and at most."""
MAX_ANSWER = 2 * MAX_ANSWER_BYTES
"""Bytes of one answer, unpacked: an observation may hold a picture."""
REACH_TIMEOUT_S = 10.0
"""How long `reach` waits for a connection."""


class Busy(Exception):
    """Raised where a server begins no world now, because it has as many as it can or takes no connection."""


class OpenEnvSession:
    """One world of a server. It has no connection before `reset`."""

    def __init__(self, environment: Environment, stack: AsyncExitStack) -> None:
        self._environment, self._stack = environment, stack
        self._socket: ClientConnection | None = None

    async def reset(self, settings: Mapping[str, Any]) -> Any:
        """Begins the world, and waits while the server is full or takes no connection.

        Raises ToolFault where that stays so, and AuthorError where it refuses the settings.
        """
        number, why = 0, ""
        try:
            async with asyncio.timeout(self._environment.reset_timeout_s):
                while True:
                    try:
                        return await self._begin(dict(settings))
                    except Busy as busy:
                        why = str(busy)
                        await asyncio.sleep(pause_s(number, first_s=PAUSE_S, longest_s=MAX_PAUSE_S))
                        number += 1
        except TimeoutError:
            limit = f"reset_timeout_s = {self._environment.reset_timeout_s:g}"
            why = why or ("did not answer reset" if self._socket else "did not take the connection")
            raise ToolFault(f"the server {self._environment.url} {why}: no world within {limit}") from None

    async def step(self, action: str) -> Any:
        """Returns what the world shows after an action.

        Raises ToolRaised for an error that the server answers with, ToolFault where it does not answer, or ToolRaised where the
        environment says that this is its policy's fault.
        """
        try:
            async with asyncio.timeout(self._environment.step_timeout_s):
                return await self._ask("step", {self._environment.action_field: action})
        except TimeoutError:
            limit = f"step_timeout_s = {self._environment.step_timeout_s:g}"
            late = f"the server {self._environment.url} gave no answer to step within {limit}"
            is_policys = self._environment.timeout_cause == Cause.POLICY
            raise (ToolRaised(late) if is_policys else ToolFault(late)) from None

    async def _begin(self, settings: dict[str, Any]) -> Any:
        connection = _connection(self._environment, timeout_s=self._environment.reset_timeout_s)
        self._socket = await self._stack.enter_async_context(connection)
        return await self._ask("reset", settings)

    async def _ask(self, verb: str, data: Mapping[str, Any]) -> Any:
        assert self._socket is not None, "a world begins with `reset`"
        try:
            with suppress(ConnectionClosed):  # a full server says so and closes, without reading
                await self._socket.send(json.dumps({"type": verb, "data": data}))
            answer = read_json(await self._socket.recv())
        except WebSocketException as error:
            if verb == "reset":
                raise Busy(f"went away in reset: {error}") from None
            raise ToolFault(f"the server {self._environment.url} went away in {verb}: {error}") from None
        except ValueError as error:
            raise self._no_answer(verb, str(error)) from None
        content = answer.get("data", {}) if isinstance(answer, dict) else None
        if not isinstance(content, dict) or not isinstance(content.get("observation", {}), dict):
            raise self._no_answer(verb, f"{str(answer)[:200]!r}")
        if answer.get("type") == "error":
            fault = content
            if fault.get("code") == FULL:
                raise Busy("is full")
            message = f"{fault.get('code')}: {fault.get('message')}"
            if verb == "reset":  # whatever a model wrote, a world begins with its settings
                raise AuthorError(f"the server {self._environment.url} begins no world with {dict(data)}: {message}")
            raise ToolRaised(message)
        return self._seen(content)

    def _no_answer(self, verb: str, said: str) -> AuthorError:
        return AuthorError(
            f"the server {self._environment.url} answered {verb} with what is no answer of a world: {said}"
        )

    def _seen(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an answer in the form of a world's."""
        observation = dict(data.get("observation", {}))
        text = observation.pop(self._environment.text_field, None)
        observation.pop("metadata", None)
        reward, is_done = data.get("reward"), data.get("done")
        return {
            "text": text,
            "reward": 0.0 if reward is None else reward,  # a step that pays nothing
            "is_done": False if is_done is None else is_done,
            "info": observation,
        }


async def reach(environment: Environment) -> None:
    """Raises ToolFault at once where a server takes no connection."""
    try:
        async with _connection(environment, timeout_s=REACH_TIMEOUT_S):
            pass
    except Busy as busy:
        raise ToolFault(f"the server {environment.url} {busy}") from None


class _Connecting(connect):
    """A connection that follows no redirect."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


@asynccontextmanager
async def _connection(environment: Environment, *, timeout_s: float) -> AsyncIterator[ClientConnection]:
    """Raises Busy where the server takes none within `timeout_s`.

    No pings: a server whose world computes answers none, and how long it may compute is what the environment's timeouts say.
    """
    address = environment.url.replace("http", "ws", 1).rstrip("/") + "/ws"
    async with AsyncExitStack() as stack:
        try:
            connection = await stack.enter_async_context(
                _Connecting(
                    address,
                    max_size=MAX_ANSWER,
                    open_timeout=timeout_s,
                    ping_interval=None,
                    proxy=None if is_loopback(environment.url) else True,
                )
            )
        except (OSError, WebSocketException) as error:
            has_hung_up = isinstance(error, OSError) or isinstance(error.__cause__, EOFError)
            if has_hung_up or (isinstance(error, InvalidStatus) and fault_of(error.response.status_code) == "peer"):
                raise Busy(f"cannot be reached: {error}") from None
            raise ToolFault(
                f"the server {environment.url} cannot be reached: {error}: is it an OpenEnv server?"
            ) from None
        yield connection


@asynccontextmanager
async def openenv_session(environment: Environment) -> AsyncIterator[OpenEnvSession]:
    """Gives a world of a server, whose connections end with the block."""
    async with AsyncExitStack() as stack:
        yield OpenEnvSession(environment, stack)
