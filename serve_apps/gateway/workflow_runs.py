"""workflow_runs: a caller's task -> one episode of the whole team, answered at the end or turn by turn."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from serve_apps.gateway.service import Service
from serve_apps.gateway.teams import ServedTeam
from serve_apps.openai_api.protocol import ApiError, EpisodeRequest, RunRequest
from serve_apps.runner import AgentCall, Complete, EpisodeSpec, run_episode, via
from stores.types import Completion, EpisodeStatus, Purpose, Task, Trace

SERVICE_RUN = "service"
"""Run of the episodes that answer people."""


class Run:
    """A whole workflow's run, and what its caller gets of it."""

    def __init__(self, team: ServedTeam, trace: Trace) -> None:
        self.team, self.trace = team, trace
        self.answer = _answer(team, trace)


async def run_workflow(service: Service, team: ServedTeam, spec: EpisodeSpec) -> Run:
    """A task's episode; ApiError 503 where the infrastructure failed."""
    return Run(team, await _play(service, team, spec, via(service.client(team))))


async def stream_workflow(
    service: Service, team: ServedTeam, spec: EpisodeSpec, *, ended: Callable[[Run], None]
) -> AsyncGenerator[dict[str, Any]]:
    """A `turn` event as each agent has spoken, then a `result` event with the answer; `ended` is told of the run."""
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    client = service.client(team)

    async def telling(call: AgentCall) -> Completion:
        completion = await client.generate(call.request)
        text = team.acting.tokenizers[call.request.model_group].decode(completion.token_ids)
        events.put_nowait(
            {
                "event": "turn",
                "agent": call.agent,
                "text": text,
                "policy_version": completion.policy_version,
                "completion_tokens": len(completion.token_ids),
            }
        )
        return completion

    playing = asyncio.ensure_future(_play(service, team, spec, telling))
    try:
        yield {"event": "start", "id": spec.episode_id, "troupe": {**team.about, "arm": team.arm}}
        while not playing.done() or not events.empty():
            telling_next = asyncio.ensure_future(events.get())
            await asyncio.wait({playing, telling_next}, return_when=asyncio.FIRST_COMPLETED)
            if telling_next.done():
                yield telling_next.result()
            telling_next.cancel()
        run = Run(team, playing.result())
        ended(run)
        yield {"event": "result", **run.answer}
    finally:
        playing.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await playing


async def _play(service: Service, team: ServedTeam, spec: EpisodeSpec, complete: Complete) -> Trace:
    trace = await run_episode(spec, team=team.acting, complete=complete, limits=team.team_spec.limits)
    if trace.status in (EpisodeStatus.INFRA_ERROR, EpisodeStatus.TIMEOUT):
        raise ApiError(503, f"the workflow did not end: {trace.error}", code=trace.status.value, retry_after_s=2)
    return trace


def episode_spec(team: ServedTeam, request: RunRequest | EpisodeRequest, *, name: str = "") -> EpisodeSpec:
    """The episode that answers a request; its id is that of the trace. Args: name: of its task; default: a random one."""
    name = name or secrets.token_hex(12)
    task = Task(
        task_id=f"request-{name}", prompt=request.prompt, answers=(), metadata=request.metadata, source=SERVICE_RUN
    )
    return EpisodeSpec(
        run_id=SERVICE_RUN,
        iteration=0,
        purpose=Purpose.AD_HOC,
        team_key=team.acting.team_key,
        task=task,
        episode_index=0,
        run_seed=request.seed if request.seed is not None else secrets.randbits(31),
    )


def _answer(team: ServedTeam, trace: Trace) -> dict[str, Any]:
    """As `POST /v1/workflows/{team}/runs` returns it."""
    prompt = sum(len(turn.prompt_token_ids) for turn in trace.turns)
    completion = sum(len(turn.completion_token_ids) for turn in trace.turns)
    return {
        "id": trace.episode_id,
        "object": "workflow.run",
        "status": trace.status.value,
        "answer": trace.answer,
        "stop_reason": trace.stop_reason,
        "error": trace.error,
        "turns": [
            {
                "agent": turn.agent,
                "text": turn.completion_text,
                "policy_version": turn.policy_version,
                "is_format_ok": turn.is_format_ok,
            }
            for turn in trace.turns
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "troupe": {**team.about, "arm": team.arm},
    }
