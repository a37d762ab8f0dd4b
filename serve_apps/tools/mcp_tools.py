"""mcp_tools: a tool of an MCP server -> a Troupe tool (https://modelcontextprotocol.io).

    mcp_tool("read_file", {command: [...]})  ──> Tool ──arguments, checked by the server's schema──> session ──> server

A session belongs to the process, or to one episode (`session: episode`). It begins with the first call; one that broke is begun again by
the next call. What a server answers, an error too, is the policy's: it chose the arguments. A server that does not start, or goes away,
is a fault of the infrastructure: the episode is played again. Where a model's text can bring it down, say `timeout_cause: policy`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import IO, TYPE_CHECKING, Any, Literal, Self
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve_apps.agent import Tool, ToolError, ToolFault, note_version
from serve_apps.episode_resources import of_episode
from stores.types import Cause
from stores.url_secrets import without_secrets

if TYPE_CHECKING:
    import mcp
    import mcp_types

logger = logging.getLogger(__name__)

TAIL = 2000
"""Characters of a server's standard error that an error quotes."""


class McpServer(BaseModel):
    """Says how a server is reached: by a command that speaks MCP on its standard streams, or by a URL (Streamable HTTP)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = ()
    """The command, and its arguments."""
    url: str = ""
    """The address of a running server, in place of a command."""
    token_variable: str = ""
    """The environment variable that holds the token sent to the URL (`Authorization: Bearer ...`)."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables of the command. It gets PATH, HOME, LOGNAME, SHELL, TERM and USER from this process."""
    inherit: tuple[str, ...] = ()
    """Names of variables that the command gets from this process."""
    folder: str | None = None
    """The folder that the command runs in."""
    session: Literal["shared", "episode"] = "shared"
    """Whether all episodes of a process share a session, or each has its own: for servers that remember what was done."""
    start_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """How long the server may take to start and to name its tools."""

    @model_validator(mode="before")
    @classmethod
    def _with_pairs(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("environment"), dict):
            return data | {"environment": tuple(data["environment"].items())}
        return data

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("give `command`, or the `url` of a running server")
        if self.url and without_secrets(self.url) != self.url:
            raise ValueError(
                "the url holds a password: put it into an environment variable, and name that as token_variable"
            )
        return self

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.url or " ".join(self.command)


def mcp_tool(
    tool: str,
    server: McpServer | Mapping[str, Any],
    *,
    timeout_s: float = 30.0,
    fail_open: bool = False,
    fallback: Any = "",
    timeout_cause: Literal[Cause.INFRASTRUCTURE, Cause.POLICY] = Cause.INFRASTRUCTURE,
) -> Tool:
    """Returns a tool that calls `tool` of an MCP server; its response is the text of the answer.

    Args:
        server: how it is reached, or the same as settings.
        timeout_s, fail_open, fallback, timeout_cause: as in `Tool`. `policy` counts a server that goes away as the policy's, too.

    Raises TypeError for settings that name no server.
    """
    try:
        reached = server if isinstance(server, McpServer) else McpServer.model_validate(dict(server))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(("mcp", *map(str, first["loc"])))
        raise TypeError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None

    async def call(**arguments: Any) -> str:
        try:
            return await session_of(reached).call(tool, arguments)
        except ToolFault as fault:
            if timeout_cause == Cause.POLICY:
                raise ToolError(str(fault)) from None
            raise

    async def probe() -> str:
        session = Session(reached)
        try:
            return await session.version_of(tool)
        finally:
            await session.end()

    return Tool(
        call, timeout_s=timeout_s, fail_open=fail_open, fallback=fallback, timeout_cause=timeout_cause, probe=probe
    )


class Session:
    """A session with one server, in one event loop."""

    def __init__(self, server: McpServer) -> None:
        """Starts nothing yet."""
        self._server = server
        self._opening = asyncio.Lock()
        self._client: mcp.Client | None = None
        self._tools: dict[str, mcp_types.Tool] | None = None
        self._owner: asyncio.Task[None] | None = None
        self._is_closed = asyncio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool and returns its answer as text.

        Raises ToolError where the arguments do not fit the tool's schema or the server answers with an error, and ToolFault where
        the server has no such tool, does not start, or goes away.
        """
        import anyio
        import httpx2
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            tool = await self._tool(name)
            note_version(self._version(tool))
            _check(arguments, tool)
            assert self._client is not None, "`_tool` opens the session"
            result = await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise ToolError(f"{self._server.name}: {error.message}") from None
            raise self._lost(name, error) from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError, httpx2.HTTPError) as error:
            raise self._lost(name, error) from None
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed and did not say why")
        return text

    async def version_of(self, name: str) -> str:
        """Returns the server's name and version and the hash of the tool's schema; ToolFault as `call`."""
        return self._version(await self._tool(name))

    async def end(self) -> None:
        """Ends the session and waits for the server's process to go."""
        self.close()
        if self._owner is not None:
            await asyncio.wait([self._owner])

    def close(self) -> None:
        """Ends the session and, with it, the server's process, without waiting."""
        self._is_closed.set()

    async def _tool(self, name: str) -> mcp_types.Tool:
        async with self._opening:
            if self._client is None:
                await self._open()
            if self._tools is None:
                self._tools = await self._listed()
        if name not in self._tools:
            known = ", ".join(sorted(self._tools)) or "none"
            raise ToolFault(f"{self._server.name} has no tool {name!r}; its tools are {known}")
        return self._tools[name]

    async def _listed(self) -> dict[str, mcp_types.Tool]:
        assert self._client is not None
        tools: dict[str, mcp_types.Tool] = {}
        cursor: str | None = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if not cursor:
                break
        for tool in tools.values():
            _note_schema(self._server, tool)
        return tools

    async def _open(self) -> None:
        """Starts the server; ToolFault where it does not."""
        self._is_closed = asyncio.Event()
        opened: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        with tempfile.TemporaryFile() as errors:
            # A task of its own enters and leaves the session: whoever calls may be cancelled, or end before the session does.
            self._owner = asyncio.create_task(self._own(opened, errors, self._is_closed))
            _owners.add(self._owner)
            self._owner.add_done_callback(_owners.discard)
            try:
                async with asyncio.timeout(self._server.start_timeout_s):
                    self._client = await asyncio.shield(opened)
            except (Exception, asyncio.CancelledError) as error:
                self._owner.cancel()
                if isinstance(error, asyncio.CancelledError):
                    raise
                why = (
                    f"no answer within {self._server.start_timeout_s:g} s"
                    if isinstance(error, TimeoutError)
                    else _first(error)
                )
                errors.seek(0)
                said = errors.read()[-TAIL:].decode(errors="replace").strip()
                raise ToolFault(
                    f"the MCP server {self._server.name} did not start: {why}" + (f"; it said: {said}" if said else "")
                ) from None

    async def _own(self, opened: asyncio.Future[mcp.Client], errors: IO[bytes], closed: asyncio.Event) -> None:
        from mcp import Client

        async def heard(message: Any) -> None:
            if type(message).__name__ == "ToolListChangedNotification":
                self._tools = None

        try:
            async with Client(self._transport(errors), message_handler=heard, cache=None) as client:
                if not opened.done():
                    opened.set_result(client)
                await closed.wait()
        except Exception as error:  # noqa: BLE001 - whatever a transport raises is why the session did not begin
            if not opened.done():
                opened.set_exception(error)
            else:
                logger.debug("the session with %s ended with %s", self._server.name, _first(error))
        finally:
            if self._owner is asyncio.current_task():  # a later session may have begun
                self._client = self._tools = None
            if not opened.done():
                opened.cancel()

    def _transport(self, errors: IO[bytes]) -> AbstractAsyncContextManager[Any]:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        server = self._server
        if server.url:
            headers = (
                {"Authorization": f"Bearer {os.environ[server.token_variable]}"} if server.token_variable else None
            )
            return streamable_http_client(server.url, http_client=create_mcp_http_client(headers=headers))
        command, *arguments = server.command
        taken = {name: os.environ[name] for name in server.inherit if name in os.environ}
        parameters = StdioServerParameters(
            command=command, args=arguments, env=taken | dict(server.environment), cwd=server.folder
        )
        return stdio_client(parameters, errlog=errors)  # type: ignore[arg-type]

    def _version(self, tool: mcp_types.Tool) -> str:
        info = None if self._client is None else self._client.server_info
        server = f"{info.name} {info.version}" if info is not None else self._server.name
        return f"{server}, schema {_hash(tool)}"

    def _lost(self, name: str, error: Exception) -> ToolFault:
        """Forgets the broken session: the next call begins another."""
        self._client = self._tools = None
        self.close()
        return ToolFault(f"the MCP server {self._server.name} went away during {name}: {_first(error)}")


_owners: set[asyncio.Task[None]] = set()
_shared: WeakKeyDictionary[Any, dict[McpServer, Session]] = WeakKeyDictionary()
_schemas: dict[tuple[McpServer, str], str] = {}
"""By tool, the hash of the schema that this process saw last."""


def session_of(server: McpServer) -> Session:
    """Returns the session of this event loop, or of the episode under way in this task."""
    if server.session == "episode":
        return of_episode(server, lambda: Session(server))
    of_loop = _shared.setdefault(asyncio.get_running_loop(), {})
    if server not in of_loop:
        of_loop[server] = Session(server)
    return of_loop[server]


def _note_schema(server: McpServer, tool: mcp_types.Tool) -> None:
    """Warns where a tool takes other arguments than when it was last seen."""
    key, now = (server, tool.name), _hash(tool)
    before = _schemas.get(key)
    _schemas[key] = now
    if before not in (None, now):
        logger.warning(
            "tool %s of the MCP server %s has another schema than before (%s, now %s): episodes before and after are not of one world; "
            "the calls say which",
            tool.name,
            server.name,
            before,
            now,
        )


def _check(arguments: Mapping[str, Any], tool: mcp_types.Tool) -> None:
    """Raises ToolError where arguments do not fit the tool's schema."""
    import jsonschema

    try:
        validator = jsonschema.validators.validator_for(tool.input_schema, jsonschema.Draft202012Validator)
        fault = jsonschema.exceptions.best_match(validator(tool.input_schema).iter_errors(dict(arguments)))
    except jsonschema.exceptions.SchemaError as error:
        raise ToolFault(f"the schema of tool {tool.name} is none: {error.message}") from None
    if fault is not None:
        place = ".".join(map(str, fault.absolute_path)) or "arguments"
        raise ToolError(f"{place}: {fault.message[:300]}")


def _text_of(result: mcp_types.CallToolResult) -> str:
    """Returns the texts of an answer, or else its data as JSON; what is neither is named."""
    parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _hash(tool: mcp_types.Tool) -> str:
    return sha256(json.dumps(tool.input_schema, sort_keys=True).encode()).hexdigest()[:8]


def _first(error: BaseException) -> str:
    """Returns the first error of a group, as a text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
