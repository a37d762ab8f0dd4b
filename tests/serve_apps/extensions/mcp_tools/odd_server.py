"""An MCP server whose answers are not as its tool says, on its standard streams: `python -m tests.serve_apps.extensions.mcp_tools.odd_server`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

SAYS = {"type": "object", "properties": {"degrees": {"type": "number"}}, "required": ["degrees"]}
WEATHER = Tool(name="weather", input_schema={"type": "object"}, output_schema=SAYS)


async def list_tools(_: Any, __: Any) -> ListToolsResult:
    return ListToolsResult(tools=[WEATHER])


async def call_tool(_: Any, __: CallToolRequestParams) -> CallToolResult:
    text = TextContent(text=f"{os.getpid()}: not known")
    return CallToolResult(content=[text], structured_content={"degrees": None})


async def main() -> None:
    server = Server[Any]("odd", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
