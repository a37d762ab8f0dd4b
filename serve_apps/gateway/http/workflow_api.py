"""workflow_api: `POST /v1/workflows/{team}/runs`: a task for the whole team, answered at once or as a stream of turns."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serve_apps.gateway.calls.workflow_runs import WorkflowRun, episode_spec, run_workflow, stream_workflow
from serve_apps.gateway.http.answering import Events, LongBodyRoute, ServiceDependency, Work, answered, data_events
from serve_apps.gateway.traffic.admission import Slot
from serve_apps.gateway.traffic.callers import ApiKey
from serve_apps.gateway.traffic.figures import run_figures
from serve_apps.gateway.traffic.service import Service
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.protocol import RunRequest

router = APIRouter(route_class=LongBodyRoute)


@router.post("/v1/workflows/{team}/runs")
async def create_workflow_run(team: str, body: RunRequest, request: Request, service: ServiceDependency) -> Response:
    """Runs the whole workflow of a team on one task; returns its answer, or server-sent events with one per turn."""
    _, key = service.authorize(request, "call", team=team, counts=True)
    slot = await unless_gone(request, service.take_slot(team, body.user, key))
    runs: list[WorkflowRun] = []

    async def prepare() -> Work:
        spec = episode_spec(slot.team, body)

        async def reply() -> dict[str, Any]:
            runs.append(await run_workflow(service, slot.team, spec, store=body.store))
            return runs[0].reply

        def events() -> Events:  # each run is counted before its caller has the result: feedback may follow at once
            ended = partial(run_ended, service, slot, key, body)
            turns = stream_workflow(service, slot.team, spec, store=body.store, on_end=ended)
            return data_events(service, slot, turns)

        def on_end() -> None:
            for run in runs:
                run_ended(service, slot, key, body, run)

        return Work(headers=slot.team.headers(spec.episode_id), reply=reply, events=events, on_end=on_end)

    return await answered(service, request, slot, prepare, is_streamed=body.stream)


def run_ended(service: Service, slot: Slot, key: ApiKey, body: RunRequest, run: WorkflowRun) -> None:
    """Counts a run that has ended; it may be captured and copied to the candidate."""
    figures = run_figures(run.reply)
    service.count_answer(slot, key, run.reply["usage"]["completion_tokens"], figures)
    is_kept = service.capture.should_keep(run.team, body.store)
    if is_kept:
        service.capture.keep_trace(run.trace, team=run.team, key=key, is_trainable=True)
    service.send_shadow(slot, body, key=key, figures=figures, task_id=run.trace.task.task_id, is_kept=is_kept)
