"""mcp_api: `/mcp`: the workflow of each team as a tool of an MCP server, for agents that know the Model Context Protocol.

    tools/list                                 one tool per team, by the team's name
    tools/call TEAM {"prompt": "..."}          the same as `POST /v1/workflows/TEAM/runs`

The server keeps no sessions, so that any replica can answer any request. Keys, limits and figures are those of the other routes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from typing import Any

import mcp_types as types
from fastapi import FastAPI, Request
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_apps.gateway.calls.workflow_runs import WorkflowRun, episode_spec, run_workflow
from serve_apps.gateway.http.workflow_api import run_ended
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import Production
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.protocol import ApiError, RunRequest, invalid_body_error
from stores.types import SOUND, EpisodeStatus

PATH = "/mcp"
INPUT = {
    "type": "object",
    "properties": {"prompt": {"type": "string", "minLength": 1, "description": "The task, as the team reads it."}},
    "required": ["prompt"],
    "additionalProperties": False,
}
OUTPUT = {
    "type": "object",
    "properties": {
        "answer": {"type": "string"},
        "status": {"type": "string", "description": "`ok`, or `truncated` where a limit cut the run short."},
        "id": {"type": "string", "description": "The id of the run, which feedback names."},
        "team_version": {"type": "integer"},
    },
    "required": ["answer", "status", "id", "team_version"],
}

Context = ServerRequestContext[Any, Request]


def add_to(api: FastAPI, service: Service) -> AbstractAsyncContextManager[None]:
    """Adds the endpoint to a gateway; the server runs within what is returned."""
    endpoint = McpEndpoint(service)
    api.router.routes.append(endpoint.route)
    return endpoint.running()


class McpEndpoint:
    """The ASGI endpoint of the MCP server of one gateway replica."""

    def __init__(self, service: Service) -> None:
        self._service = service
        server = Server[Any](
            "troupe", version=version("troupe-rl"), on_list_tools=self._list_tools, on_call_tool=self._call_tool
        )
        self._manager = StreamableHTTPSessionManager(
            server, json_response=True, stateless=True, max_request_body_size=service.config.max_body_bytes
        )
        self.route = Route(PATH, endpoint=self, methods=["POST"])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the server as long as the application."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request with a key of scope `call`; ApiError for others."""
        scope["route"] = self.route
        self._service.keys_of(Request(scope), "call")
        await self._manager.handle_request(scope, receive, send)

    async def _list_tools(self, context: Context, _: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_tool(self._service.teams[name]) for name in self._reached(context)])

    async def _call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        reached = self._reached(context)
        assert context.request is not None, "requests come over HTTP"
        if params.name not in reached:
            known = ", ".join(sorted(reached))
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}; tools are {known}")
        try:
            run = await self._run(context.request, params.name, params.arguments or {})
        except ApiError as error:
            return types.CallToolResult(content=[types.TextContent(type="text", text=str(error))], is_error=True)
        return _result(run)

    def _reached(self, context: Context) -> Collection[str]:
        """Returns the names of the teams that the caller may call."""
        assert context.request is not None, "requests come over HTTP"
        return self._service.keys_of(context.request, "call")

    async def _run(self, request: Request, team: str, arguments: dict[str, Any]) -> WorkflowRun:
        """Runs a team's workflow; ApiError as the route of workflow runs raises it."""
        service = self._service
        _, key = service.authorize(request, "call", team=team, counts=True)
        try:
            body = RunRequest.model_validate(arguments)
        except ValidationError as error:
            raise invalid_body_error(list(error.errors())) from None
        slot = await unless_gone(request, service.take_slot(team, body.user, key))
        with slot, service.counting_failures(slot.team):
            spec = episode_spec(slot.team, body)
            try:
                played = run_workflow(service, slot.team, spec, store=body.store)
                run = await unless_gone(request, service.within_timeout(played))
            except ApiError as error:
                if error.status == 499:
                    service.count_left(slot)
                raise
        run_ended(service, slot, key, body, run)
        return run


def _tool(production: Production) -> types.Tool:
    agents = ", ".join(sorted(production.champion.acting.group_of))
    return types.Tool(
        name=production.name,
        description=f"Has the team {production.name!r} work on a task and returns its answer. Its agents: {agents}.",
        input_schema=INPUT,
        output_schema=OUTPUT,
    )


def _result(run: WorkflowRun) -> types.CallToolResult:
    reply = run.reply
    is_error = EpisodeStatus(reply["status"]) not in SOUND
    data = {"answer": reply["answer"], "status": reply["status"], "id": reply["id"], "team_version": run.team.version}
    text = reply["error"] if is_error else reply["answer"]
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)], structured_content=data, is_error=is_error
    )
