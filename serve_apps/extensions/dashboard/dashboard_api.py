"""dashboard_api: the page at `/`, and what it asks for: status and figures, stored traces, one task under several teams. It only reads."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response

from serve_apps.extensions.dashboard.trace_reader import (
    MAX_ROWS,
    TraceReader,
    as_json,
    compare_task,
    list_traces,
    read_trace,
)
from serve_apps.gateway.http.answering import ServiceDependency
from serve_apps.gateway.traffic.figures import Sums, by_version, total
from serve_apps.gateway.traffic.peer_replicas import Status
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import DeployedTeam, Production
from serve_apps.openai_api.protocol import ApiError
from stores.types import EpisodeStatus, Purpose

ALIASES = ("champion", "candidate", "previous")
"""In the order in which the status lists them."""

StoreQuery = Annotated[
    Literal["run", "served"], Query(description="`run`: episodes that the run sampled; `served`: captured answers")
]
IterationQuery = Annotated[int | None, Query(ge=0, lt=2**31)]
TextQuery = Annotated[str, Query(max_length=500)]


async def _of_admin(team: str, request: Request, service: ServiceDependency) -> Production:
    production, _ = service.authorize(request, "admin", team=team)
    return production


TeamOfAdmin = Annotated[Production, Depends(_of_admin)]
"""The team in the path, for callers whose key has the scope `admin` there."""


async def _trace_reader(request: Request) -> TraceReader:
    reader: TraceReader = request.app.state.trace_reader
    return reader


TraceReaderDependency = Annotated[TraceReader, Depends(_trace_reader)]

router, pages = APIRouter(prefix="/v1/admin"), APIRouter(include_in_schema=False)


def add_to(api: FastAPI, service: Service) -> None:
    """Adds the page, its files, which are read now, and what it asks for to an application."""
    api.state.trace_reader, api.state.dashboard_files = TraceReader(), read_files()
    api.include_router(router)
    api.include_router(pages)


@router.get("/status")
async def get_status(request: Request, service: ServiceDependency) -> Response:
    """Returns the key's teams, their deployed versions with figures, and the requests in flight, of all replicas that answer."""
    teams = [service.teams[name] for name in sorted(service.keys_of(request, "admin"))]
    peers = [] if service.peers is None else await service.peers.statuses()
    others = [status for status in peers if status["replica"] != service.replica]
    return _json_response(as_json(status_of(service, [service.status(), *others], teams)))


@router.get("/teams/{team}/traces")
async def list_stored_traces(
    production: TeamOfAdmin,
    reader: TraceReaderDependency,
    store: StoreQuery = "run",
    purpose: Purpose | None = None,
    iteration: IterationQuery = None,
    status: EpisodeStatus | None = None,
    task: TextQuery = "",
    before: TextQuery = "",
    limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 50,
) -> Response:
    """Lists stored episodes without their turns, newest first; `before` is the last episode of the page before."""
    filters: dict[str, Any] = {"purpose": purpose, "iteration": iteration, "status": status, "task_id": task or None}
    return _json_response(
        await reader.read(lambda: list_traces(production, store=store, limit=limit, before=before, **filters))
    )


@router.get("/teams/{team}/traces/{trace_id}")
async def get_trace(
    production: TeamOfAdmin, trace_id: str, reader: TraceReaderDependency, store: StoreQuery = "run"
) -> Response:
    """Returns a whole trace by its id or a unique prefix of it: turns, tool calls, tokens with logprobs, rewards."""
    return _json_response(await reader.read(lambda: read_trace(production, trace_id, store=store)))


@router.get("/teams/{team}/tasks/{task_id:path}")
async def compare_teams_on_task(
    production: TeamOfAdmin,
    task_id: str,
    reader: TraceReaderDependency,
    store: StoreQuery = "run",
    purpose: Purpose | None = None,
) -> Response:
    """Returns the episodes of one task, grouped by the team that played them."""
    return _json_response(await reader.read(lambda: compare_task(production, task_id, store=store, purpose=purpose)))


def status_of(service: Service, statuses: Sequence[Status], teams: Sequence[Production]) -> dict[str, Any]:
    """Returns the content of the overview: teams of this replica with the figures of all replicas.

    It holds no prompt, no answer and no user.

    Args: statuses: `Service.status` of every replica that answers, this one first.
    """
    config = service.config
    faults = [s["keys_faults"].get(team.name, "") for s in statuses for team in teams]
    return {
        "gateway": service.name,
        "num_replicas": config.num_replicas,
        "replicas": [{name: s[name] for name in ("replica", "pid", "started_at")} for s in statuses],
        "now": time.time(),
        "started_at": min(s["started_at"] for s in statuses),
        "in_flight": sum(s["num_in_flight"] for s in statuses),
        "waiting": sum(s["num_waiting"] for s in statuses),
        "episodes": sum(s["num_episodes"] for s in statuses),
        "max_in_flight": config.max_in_flight * len(statuses),
        "max_queued": config.max_queued * len(statuses),
        "has_keys": service.callers.has_keys,
        "keys_fault": next(filter(None, faults), ""),
        "teams": [_team_status(team, statuses) for team in teams],
    }


def _team_status(production: Production, statuses: Sequence[Status]) -> dict[str, Any]:
    config = production.config
    answers, copies = (by_version(production.name, statuses, of=of) for of in ("sums", "copies"))
    figures = {version: total([sums, copies[version]]) for version, sums in answers.items()}
    by_alias = ((alias, getattr(config, alias)) for alias in ALIASES)
    deployed = [
        _deployed_status(production.name, alias, team, figures, statuses)
        for alias, team in by_alias
        if team is not None
    ]
    deployed_versions = {row["team_version"] for row in deployed}
    return {
        "name": production.name,
        "share": config.share if config.candidate else 0.0,
        "shadow": config.shadow if config.candidate else 0.0,
        "run_id": config.stores.run_id if config.stores else None,
        "models": sorted(production.champion.models),
        "deployed": deployed,
        "gone": [
            {"team_version": version, "figures": summary(sums)}
            for version, sums in sorted(figures.items())
            if version not in deployed_versions
        ],
    }


def _deployed_status(
    team: str, alias: str, deployed: DeployedTeam, figures: Mapping[int, Sums], statuses: Sequence[Status]
) -> dict[str, Any]:
    num_in_flight = sum(
        row["num"]
        for status in statuses
        for row in status["in_flight"]
        if (row["team"], row["team_version"], row["set_name"]) == (team, deployed.team_version, deployed.set_name)
    )
    return {
        "alias": alias,
        "team_version": deployed.team_version,
        "set_name": deployed.set_name,
        "workflow": deployed.team_spec["workflow"],
        "team_key": deployed.team_spec["team_key"],
        "policy_versions": deployed.team_spec["policy_versions"],
        "group_of": deployed.team_spec["group_of"],
        "in_flight": num_in_flight,
        "figures": summary(figures.get(deployed.team_version, {})),
    }


def summary(sums: Sums) -> dict[str, dict[str, float]]:
    """Returns {"num", "mean", "standard_error"} of each figure that has values; the error needs two of them.

    The error is sqrt(s^2 / n), with the sample variance s^2 = (sum of squares - sum^2 / n) / (n - 1).
    """
    summaries: dict[str, dict[str, float]] = {}
    for name, (num, added, squares) in sums.items():
        if num:
            summaries[name] = {"num": num, "mean": added / num}
        if num > 1:
            variance = max(0.0, squares - added * added / num) / (num - 1)
            summaries[name]["standard_error"] = math.sqrt(variance / num)
    return summaries


def _json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def read_files() -> dict[str, bytes]:
    """Reads the page and its files, by file name."""
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}


@pages.get("/")
async def get_page(request: Request) -> Response:
    """Returns the page; it needs no API key."""
    return _file_response(request, "index.html")


@pages.get("/assets/{name}")
async def get_asset(name: str, request: Request) -> Response:
    """Returns one of the page's files; it needs no API key."""
    return _file_response(request, name)


def _file_response(request: Request, name: str) -> Response:
    content = request.app.state.dashboard_files.get(name)
    if content is None:
        raise ApiError(404, f"the dashboard has no file {name!r}", code="not_found")
    headers = HEADERS | {"ETag": f'"{sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)
