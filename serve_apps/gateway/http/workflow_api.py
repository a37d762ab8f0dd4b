"""workflow_api: `POST /v1/workflows/{team}/runs`: a task for the whole team, answered at once or as a stream of turns."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serve_apps.gateway.calls.workflow_runs import WorkflowRun, episode_spec, run_workflow, stream_workflow
from serve_apps.gateway.http.api_state import ServiceDependency
from serve_apps.gateway.http.event_stream import data_events, released_unless_streamed
from serve_apps.gateway.http.long_bodies import LongBodyRoute
from serve_apps.gateway.traffic.api_keys import ApiKey
from serve_apps.gateway.traffic.figures import run_figures
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.slots import Slot
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.protocol import RunRequest

router = APIRouter(route_class=LongBodyRoute)


@router.post("/v1/workflows/{team}/runs")
async def create_workflow_run(team: str, body: RunRequest, request: Request, service: ServiceDependency) -> Response:
    """Runs the whole workflow of a team on one task; returns its answer, or server-sent events with one per turn."""
    _, key = service.authorize(request, "call", team=team, counts=True)
    slot = await service.take_slot(team, body.user, key)
    on_end = partial(run_ended, service, slot, key, body)
    with released_unless_streamed(service, slot) as start_stream:
        spec = episode_spec(slot.team, body)
        headers = slot.team.headers(spec.episode_id)
        if body.stream:
            turns = stream_workflow(service, slot.team, spec, store=body.store, on_end=on_end)
            return start_stream(data_events(service, slot, turns), headers, lambda: None)
        work = run_workflow(service, slot.team, spec, store=body.store)
        run = await unless_gone(request, service.within_timeout(work))
    on_end(run)
    return JSONResponse(run.reply, headers=headers)


def run_ended(service: Service, slot: Slot, key: ApiKey, body: RunRequest, run: WorkflowRun) -> None:
    """Counts a run that has ended; it may be captured and copied to the candidate."""
    service.count_answer(slot, key, run.reply["usage"]["completion_tokens"], run_figures(run.reply))
    is_kept = service.capture.should_keep(run.team, body.store)
    if is_kept:
        service.keep_trace(run.trace, team=run.team, key=key, is_trainable=True)
    service.send_shadow(slot, body, key=key, task_id=run.trace.task.task_id, is_kept=is_kept)
