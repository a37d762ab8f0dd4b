"""api_state: the objects of one gateway replica that its HTTP handlers work with, as FastAPI dependencies.

`build_api` puts one `ApiState` into the application's state; a handler asks for what it needs by the type of a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI, Request

from serve_apps.gateway.calls.episodes import GatewayEpisodes
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.trace_reader import TraceReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiState:
    """What one application has in its state."""

    service: Service
    episodes: GatewayEpisodes
    trace_reader: TraceReader
    dashboard_files: Mapping[str, bytes]
    """By file name."""


def set_state(api: FastAPI, state: ApiState) -> None:
    """Puts the state where the dependencies find it."""
    api.state.gateway = state


def state_of(request: Request) -> ApiState:
    """Returns the state of the application that got this request."""
    state: ApiState = request.app.state.gateway
    return state


# The dependencies are `async`, since FastAPI runs others in threads, and a service lives in one event loop.


async def _service(request: Request) -> Service:
    return state_of(request).service


async def _episodes(request: Request) -> GatewayEpisodes:
    return state_of(request).episodes


async def _trace_reader(request: Request) -> TraceReader:
    return state_of(request).trace_reader


async def _dashboard_files(request: Request) -> Mapping[str, bytes]:
    return state_of(request).dashboard_files


ServiceDependency = Annotated[Service, Depends(_service)]
EpisodesDependency = Annotated[GatewayEpisodes, Depends(_episodes)]
TraceReaderDependency = Annotated[TraceReader, Depends(_trace_reader)]
DashboardFiles = Annotated[Mapping[str, bytes], Depends(_dashboard_files)]
