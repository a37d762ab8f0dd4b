"""mcp_tools: a tool of an MCP server -> a Troupe tool (https://modelcontextprotocol.io).

    mcp_tool("read_file", {command: [...]})  ──> Tool ──arguments, checked by the server's schema──> session ──> server

A session belongs to the process, or to one episode (`session: episode`). It begins with the first call; after a connection that broke the
next call makes another. What a tool answers, an error too, is the policy's: it chose the arguments. A server that does not start, does
not answer, or goes away is a fault of the infrastructure: the episode is played again. Where a model's text can bring it down, say
`timeout_cause: policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from serve_apps.authoring.agent import Tool, ToolError, ToolFault
from serve_apps.extensions.mcp_tools.mcp_server import McpServer
from serve_apps.extensions.mcp_tools.mcp_session import Session, session_of
from stores.types import Cause


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
            session.close()

    return Tool(
        call, timeout_s=timeout_s, fail_open=fail_open, fallback=fallback, timeout_cause=timeout_cause, probe=probe
    )


def declared_tool(name: str, settings: Mapping[str, Any]) -> Tool:
    """Returns the tool of an entry of a declared workflow: `{mcp: {command: [...]}, tool: ..., timeout_s: ...}`.

    Without `tool` the entry's name is the tool's. Raises TypeError for settings that make none.
    """
    more = {key: value for key, value in settings.items() if key not in ("mcp", "tool")}
    if not isinstance(settings["mcp"], Mapping):
        raise TypeError("mcp: give `command` or `url`")
    return mcp_tool(str(settings.get("tool", name)), settings["mcp"], **more)
