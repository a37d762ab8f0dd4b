"""mcp_session: a session with an MCP server, and its connections: it begins with the first call, and survives a server that went away.

call ──> connected? ──no──> a task starts the server, asks for its tools, and owns the connection until it ends
            └─yes──> arguments, checked by the tool's schema ──> server ──> text
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from serve_apps.authoring.agent import ToolError, ToolFault, note_version
from serve_apps.episode.episode_resources import of_episode
from serve_apps.extensions.mcp_tools.mcp_server import (
    McpServer,
    check_arguments,
    note_schema,
    schema_hash,
    validator_of,
)
from serve_apps.extensions.mcp_tools.mcp_text import text_of
from serve_apps.process_log import ProcessLog

if TYPE_CHECKING:
    import mcp
    import mcp_types

logger = logging.getLogger(__name__)

CONNECT_S, READ_S = 30.0, 300.0
"""For a connection, and between two parts of an answer: MCP's own. What a call may take is said with the tool."""
CHECK_S = 5.0
"""How long a server may take to show that it is not stuck in a call that was given up."""


@dataclass(eq=False, kw_only=True)
class _Connection:
    """A connection to one process of a server, or to its address, and the tools that it named."""

    client: mcp.Client
    errors: ProcessLog
    """What the server writes to standard error."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where it shall end."""
    tools: dict[str, mcp_types.Tool] = field(default_factory=dict)
    has_new_tools: bool = False
    """Whether the server said that its tools have changed."""
    is_doubtful: bool = False
    """Whether a call was given up: the server may be stuck in it."""


class Session:
    """A session with one server, in one event loop. It outlives its connections: after one that broke, the next call makes another."""

    def __init__(self, server: McpServer) -> None:
        """Starts nothing yet: the first call does."""
        self._server = server
        self._connecting: asyncio.Task[_Connection] | None = None
        self._is_over = False

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool and returns its answer as text.

        Raises ToolError where the arguments do not fit the tool's schema or the tool answers with an error, and ToolFault where
        the server has no such tool, does not start, does not answer, or goes away.
        """
        connection = await self._connected()
        tool = self._tool(connection, name)
        note_version(self._version(connection, tool))
        check_arguments(arguments, tool)
        try:
            result = await connection.client.call_tool(name, dict(arguments))
        except asyncio.CancelledError:
            connection.is_doubtful = True
            raise
        except Exception as error:  # noqa: BLE001 - whatever a transport raises means that there is no answer
            if _is_about_arguments(error):
                raise ToolError(f"{name}: {error}") from None
            raise self._lost(connection, f"{name} has no answer: {_first(error)}") from None
        text = text_of(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed and did not say why")
        return text

    async def version_of(self, name: str) -> str:
        """Returns the server's name and version and the hash of the tool's schema; ToolFault as `call`."""
        connection = await self._connected()
        return self._version(connection, self._tool(connection, name))

    def close(self) -> None:
        """Ends the session and, with it, the server's process, without waiting. Later calls are refused."""
        self._is_over = True
        if (connection := self._made()) is not None:
            connection.closed.set()
        elif self._connecting is not None:
            self._connecting.cancel()

    async def _connected(self) -> _Connection:
        """Returns a connection that works, as far as is known; ToolFault where there is none.

        The server starts in a task of its own: a caller that gives up does not stop it, and others wait for the same.
        """
        if self._is_over:
            raise ToolFault(f"the session with {self._server.name} is over: its episode has ended")
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        connecting = self._connecting
        try:
            connection = await asyncio.shield(connecting)
        except ToolFault:
            if self._connecting is connecting:
                self._connecting = None
            raise
        if connection.closed.is_set():
            self._forget(connection)
            return await self._connected()
        try:
            if connection.is_doubtful or connection.has_new_tools:
                limit_s = CHECK_S if connection.is_doubtful else self._server.start_timeout_s
                connection.has_new_tools = False
                async with asyncio.timeout(limit_s):
                    connection.tools = await self._listed(connection.client)
                connection.is_doubtful = False
        except ToolFault:
            self._forget(connection)
            raise
        except Exception as error:  # noqa: BLE001 - as in `call`
            logger.warning(
                "the MCP server %s does not answer (%s): it is started again", self._server.name, _first(error)
            )
            self._forget(connection)
            return await self._connected()
        return connection

    async def _connect(self) -> _Connection:
        """Starts the server and asks for its tools; ToolFault where that fails."""
        await asyncio.to_thread(_import_client)
        errors = ProcessLog()
        opened: asyncio.Future[_Connection] = asyncio.get_running_loop().create_future()
        # A task of its own enters and leaves the connection, as the library demands.
        owner = asyncio.create_task(self._own(opened, errors))
        _owners.add(owner)
        owner.add_done_callback(_owners.discard)
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                connection = await asyncio.shield(opened)
                connection.tools = await self._listed(connection.client)
                owner.add_done_callback(lambda _: errors.close())
                return connection
        except (Exception, asyncio.CancelledError) as error:
            output = errors.tail()
            errors.close()
            owner.cancel()
            if isinstance(error, (asyncio.CancelledError, ToolFault)):
                raise
            limit = f"no answer within {self._server.start_timeout_s:g} s"
            why = limit if isinstance(error, TimeoutError) else _first(error)
            raise ToolFault(f"the MCP server {self._server.name} did not start: {why}{output}") from None

    async def _own(self, opened: asyncio.Future[_Connection], errors: ProcessLog) -> None:
        from mcp import Client

        connection: _Connection | None = None

        async def heard(message: Any) -> None:
            if connection is not None and type(message).__name__ == "ToolListChangedNotification":
                connection.has_new_tools = True

        try:
            async with AsyncExitStack() as stack:
                transport = await self._transport(stack, errors)
                client = await stack.enter_async_context(Client(transport, message_handler=heard, cache=None))
                # Otherwise an answer of another form than the tool says would be no answer, and its server would be started again.
                client.session.validate_tool_result = _taken_as_it_is  # type: ignore[method-assign]
                connection = _Connection(client=client, errors=errors)
                opened.set_result(connection)
                while not connection.closed.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(connection.closed.wait(), CHECK_S)
                    errors.shorten()
        except Exception as error:  # noqa: BLE001 - whatever a transport raises is why there is no connection
            if not opened.done():
                opened.set_exception(error)
                opened.exception()  # whoever waited may have given up
            else:
                logger.debug("the connection with %s ended with %s", self._server.name, _first(error))
        finally:
            if connection is not None:
                connection.closed.set()

    async def _transport(self, stack: AsyncExitStack, errors: ProcessLog) -> Any:
        from httpx2 import Timeout
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        from serve_apps.http.peer import async_client

        server = self._server
        if server.url:
            headers = (
                {"Authorization": f"Bearer {os.environ[server.token_variable]}"} if server.token_variable else None
            )
            timeout = Timeout(CONNECT_S, read=READ_S)
            http = await stack.enter_async_context(async_client([server.url], timeout=timeout, headers=headers))
            return streamable_http_client(server.url, http_client=http)
        command, *arguments = server.command
        taken = {name: os.environ[name] for name in server.inherit if name in os.environ}
        parameters = StdioServerParameters(
            command=command, args=arguments, env=taken | dict(server.environment), cwd=server.folder
        )
        return stdio_client(parameters, errlog=errors.file)  # type: ignore[arg-type]

    async def _listed(self, client: mcp.Client) -> dict[str, mcp_types.Tool]:
        """Returns the server's tools; ToolFault where the schema of one is none."""
        import jsonschema

        tools: dict[str, mcp_types.Tool] = {}
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if not cursor:
                break
        for tool in tools.values():
            try:
                validator_of(tool).check_schema(tool.input_schema)
            except jsonschema.exceptions.SchemaError as error:
                raise ToolFault(
                    f"the MCP server {self._server.name} gives tool {tool.name} a schema that is not valid: {error.message}"
                ) from None
            note_schema(self._server, tool)
        return tools

    def _tool(self, connection: _Connection, name: str) -> mcp_types.Tool:
        if name not in connection.tools:
            known = ", ".join(sorted(connection.tools)) or "none"
            raise ToolFault(f"{self._server.name} has no tool {name!r}; its tools are {known}")
        return connection.tools[name]

    def _version(self, connection: _Connection, tool: mcp_types.Tool) -> str:
        info = connection.client.server_info
        server = f"{info.name} {info.version}" if info is not None else self._server.name
        return f"{server}, schema {schema_hash(tool)}"

    def _lost(self, connection: _Connection, why: str) -> ToolFault:
        """Gives a connection up, so that the next call makes another, and returns the fault."""
        output = connection.errors.tail()
        self._forget(connection)
        return ToolFault(f"the MCP server {self._server.name} went away: {why}{output}")

    def _forget(self, connection: _Connection) -> None:
        connection.closed.set()
        if self._made() is connection:  # a later one may have been made
            self._connecting = None

    def _made(self) -> _Connection | None:
        """Returns the connection; None where it is not made yet, or could not be."""
        task = self._connecting
        is_made = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task.result() if is_made and task is not None else None


_owners: set[asyncio.Task[None]] = set()
_shared: WeakKeyDictionary[Any, dict[McpServer, Session]] = WeakKeyDictionary()


def session_of(server: McpServer) -> Session:
    """Returns the session of this event loop, or of the episode under way in this task."""
    if server.session == "episode":
        return of_episode(server, lambda: Session(server))
    of_loop = _shared.setdefault(asyncio.get_running_loop(), {})
    if server not in of_loop:
        of_loop[server] = Session(server)
    return of_loop[server]


def _is_about_arguments(error: Exception) -> bool:
    """Whether a server says that it was called wrongly. Its transports say everything else in the same class of error."""
    from mcp import MCPError
    from mcp_types import INVALID_PARAMS

    return isinstance(error, MCPError) and error.code == INVALID_PARAMS


async def _taken_as_it_is(name: str, result: Any) -> None:
    """Takes the place of the library's comparison of an answer with the tool's output schema: its text is what counts."""


def _import_client() -> None:
    """Imports what a connection needs; the first time takes a second or more."""
    for name in ("jsonschema", "mcp", "mcp.client.streamable_http"):
        import_module(name)


def _first(error: BaseException) -> str:
    """Returns the first error of a group, as a text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
