"""admin_api: what the dashboard asks for. Who answers and how it goes; stored traces; one task under two teams. Reads only."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from serve_apps.gateway.figures import Sums, by_version
from serve_apps.gateway.peer_replicas import Status
from serve_apps.gateway.service import Service
from serve_apps.gateway.teams import DeployedTeam, Production
from serve_apps.gateway.trace_reader import MAX_ROWS, TraceReader, as_json, compare_task, list_traces, read_trace
from stores.types import EpisodeStatus, Purpose

STATUS_ORDER = ("champion", "candidate", "previous")

Store = Annotated[
    Literal["run", "served"], Query(description="what the run sampled, or answers to people that were kept")
]
Iteration = Annotated[int | None, Query(ge=0, lt=2**31)]
Text = Annotated[str, Query(max_length=500)]


def admin_routes(service: Service) -> APIRouter:
    """Routes below `/v1/admin`, for keys with the scope `admin`."""

    def admin_only(request: Request) -> None:
        service.caller(request, "admin")

    routes = APIRouter(prefix="/v1/admin", dependencies=[Depends(admin_only)])
    reader = TraceReader()

    @routes.get("/status")
    async def status() -> Response:
        """Teams, arms and their figures, and what is on its way: of all replicas that answer."""
        others = [s for s in await service.siblings.statuses() if s["replica"] != service.replica]
        return _json(as_json(status_of(service, [service.status(), *others])))

    @routes.get("/teams/{team}/traces")
    async def traces(
        team: str,
        store: Store = "run",
        purpose: Purpose | None = None,
        iteration: Iteration = None,
        status: EpisodeStatus | None = None,
        task: Text = "",
        before: Text = "",
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 50,
    ) -> Response:
        """Stored episodes without their turns, newest first; `before`: the last one of the page before."""
        production = service.team(team)
        chosen: dict[str, Any] = {"purpose": purpose, "iteration": iteration, "status": status, "task_id": task or None}
        return _json(
            await reader.read(lambda: list_traces(production, store=store, limit=limit, before=before, **chosen))
        )

    @routes.get("/teams/{team}/traces/{trace_id}")
    async def trace(team: str, trace_id: str, store: Store = "run") -> Response:
        """A whole one, by its id or the only beginning of it: turns, tool calls, tokens with logprobs, rewards."""
        production = service.team(team)
        return _json(await reader.read(lambda: read_trace(production, trace_id, store=store)))

    @routes.get("/teams/{team}/tasks/{task_id:path}")
    async def task(team: str, task_id: str, store: Store = "run", purpose: Purpose | None = None) -> Response:
        """Episodes of one task by the team that played them."""
        production = service.team(team)
        return _json(await reader.read(lambda: compare_task(production, task_id, store=store, purpose=purpose)))

    return routes


def status_of(service: Service, statuses: Sequence[Status]) -> dict[str, Any]:
    """Everything on the overview; no prompt, no answer, no user. Teams are those of this replica, figures those of all.

    Args: statuses: `Service.status` of every replica that answers, this one first.
    """
    config = service.config
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
        "has_keys": bool(config.keys_file),
        "keys_fault": next((s["keys_fault"] for s in statuses if s["keys_fault"]), ""),
        "teams": [_team(production, statuses) for _, production in sorted(service.teams.items())],
    }


def _team(production: Production, statuses: Sequence[Status]) -> dict[str, Any]:
    config = production.config
    figures = by_version(production.name, statuses)
    named = ((name, getattr(config, name)) for name in STATUS_ORDER)
    arms = [_arm(production.name, name, arm, figures, statuses) for name, arm in named if arm is not None]
    in_service = {arm["team_version"] for arm in arms}
    return {
        "name": production.name,
        "share": config.share if config.candidate else 0.0,
        "shadow": config.shadow if config.candidate else 0.0,
        "run_id": config.stores.run_id if config.stores else None,
        "models": sorted(production.champion.models),
        "arms": arms,
        "gone": [
            {"team_version": v, "figures": summary(sums)} for v, sums in sorted(figures.items()) if v not in in_service
        ],
    }


def _arm(
    team: str, name: str, arm: DeployedTeam, figures: Mapping[int, Sums], statuses: Sequence[Status]
) -> dict[str, Any]:
    on_their_way = [
        f["num"]
        for status in statuses
        for f in status["in_flight"]
        if (f["team"], f["team_version"], f["set_name"]) == (team, arm.team_version, arm.set_name)
    ]
    return {
        "arm": name,
        "team_version": arm.team_version,
        "set_name": arm.set_name,
        "workflow": arm.team_spec["workflow"],
        "team_key": arm.team_spec["team_key"],
        "policy_versions": arm.team_spec["policy_versions"],
        "group_of": arm.team_spec["group_of"],
        "in_flight": sum(on_their_way),
        "figures": summary(figures.get(arm.team_version, {})),
    }


def summary(sums: Sums) -> dict[str, dict[str, float]]:
    """{"num", "mean", "standard_error"} of each figure that was ever counted; the error from two values on."""
    found: dict[str, dict[str, float]] = {}
    for name, (num, total, squares) in sums.items():
        if num:
            found[name] = {"num": num, "mean": total / num}
        if num > 1:
            variance = max(0.0, squares - total * total / num) / (num - 1)
            found[name]["standard_error"] = math.sqrt(variance / num)
    return found


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})
