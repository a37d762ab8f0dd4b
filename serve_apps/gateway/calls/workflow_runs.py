"""workflow_runs: a caller's task -> one episode of the whole team, with the reply at the end or an event per turn."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, NoReturn

from serve_apps.authoring.agent import AuthorError
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import AgentCall, Complete, via
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import ServedTeam
from serve_apps.openai_api.protocol import MAX_ECHO, ApiError, EpisodeRequest, RunRequest, usage_body
from stores.types import Cause, Completion, EpisodeStatus, Purpose, Task, Trace

SERVICE_RUN = "service"
"""`run_id` of the episodes that answer callers."""
INVALID_TASK = "invalid_task"
"""The error code of a task that the workflow refuses."""


class MissingMetadata(AuthorError, KeyError):
    """Raised where a workflow reads metadata that the caller did not give: no outcome of the team."""

    __str__ = Exception.__str__  # not KeyError's, which quotes


class RequestMetadata(dict[str, Any]):
    """The metadata of a caller's task."""

    def __missing__(self, key: str) -> NoReturn:
        raise MissingMetadata(f"the task's metadata have no {key!r}, which the workflow reads")


class WorkflowRun:
    """One run of a whole workflow: its trace, and the reply that its caller gets."""

    def __init__(self, team: ServedTeam, trace: Trace) -> None:
        self.team, self.trace = team, trace
        self.reply = _reply_of(team, trace)


async def run_workflow(
    service: Service, team: ServedTeam, spec: EpisodeSpec, *, store: bool | None = None
) -> WorkflowRun:
    """Runs the episode of a task; ApiError 503 where the infrastructure failed.

    Args: store: what the caller says of its texts.
    """
    return WorkflowRun(team, await _run_episode(team, spec, via(service.client(team)), store))


async def stream_workflow(
    service: Service,
    team: ServedTeam,
    spec: EpisodeSpec,
    *,
    store: bool | None = None,
    on_end: Callable[[WorkflowRun], None],
) -> AsyncGenerator[dict[str, Any]]:
    """Yields a `start` event, a `turn` event after each model call, and a `result` event with the reply.

    Calls `on_end` with the run before the last event.
    """
    events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    client = service.client(team)

    async def complete_and_report(call: AgentCall) -> Completion:
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

    episode = asyncio.ensure_future(_run_episode(team, spec, complete_and_report, store))
    episode.add_done_callback(lambda _: events.put_nowait(None))
    try:
        yield {"event": "start", "id": spec.episode_id, "troupe": team.reply_fields}
        while (event := await events.get()) is not None:
            yield event
        run = WorkflowRun(team, episode.result())
        on_end(run)
        yield {"event": "result", **run.reply}
    finally:
        # Where the caller has left, the episode ends too; its errors were raised above or concern nobody any more.
        episode.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await episode


async def _run_episode(team: ServedTeam, spec: EpisodeSpec, complete: Complete, store: bool | None) -> Trace:
    served = team.in_spans(hides_texts=store is False)
    trace = await run_episode(spec, team=team.acting, complete=complete, limits=team.team_spec.limits, served=served)
    is_late = trace.status is EpisodeStatus.TIMEOUT and trace.cause is not Cause.AUTHOR
    if trace.cause is Cause.INFRASTRUCTURE or is_late:
        raise ApiError(503, f"the workflow did not end: {trace.error}", code=trace.status.value, retry_after_s=2)
    return trace


def episode_spec(team: ServedTeam, request: RunRequest | EpisodeRequest, *, name: str = "") -> EpisodeSpec:
    """Returns the episode that answers a request; its id is that of the trace.

    Args: name: of its task; default: a random one.

    Raises ApiError 400 for a task that its workflow refuses, and for a run of a workflow that acts in simulated worlds: they are for
    training.
    """
    simulated = [world for world, kind in team.acting.workflow.environments.items() if not kind.url]
    if isinstance(request, RunRequest) and simulated:
        raise ApiError(
            400,
            f"workflow {team.name!r} acts in worlds of {', '.join(simulated)}, which are simulated by workers of the training: give the "
            "Environment a url where it is served, or call the team's agents one by one",
            code="simulated_world",
        )
    name = name or secrets.token_hex(12)
    metadata = RequestMetadata(request.metadata)
    task = Task(task_id=f"request-{name}", prompt=request.prompt, answers=(), metadata=metadata, source=SERVICE_RUN)
    if isinstance(request, RunRequest):
        _check(team, task)
    return EpisodeSpec(
        run_id=SERVICE_RUN,
        iteration=0,
        purpose=Purpose.AD_HOC,
        team_key=team.acting.team_key,
        task=task,
        episode_index=0,
        run_seed=request.seed if request.seed is not None else secrets.randbits(31),
    )


def _check(team: ServedTeam, task: Task) -> None:
    """Raises ApiError 400 for a task that its workflow refuses, or fails to check because it reads values of another form."""
    try:
        team.acting.workflow.check_request(task)
    except (ValueError, AuthorError) as refusal:
        message = str(refusal)
    except Exception as error:  # noqa: BLE001 - a team's own code on a caller's values may raise anything
        message = f"the workflow cannot read this task: {type(error).__name__}: {error}"
    else:
        return
    raise ApiError(400, message[: 5 * MAX_ECHO], code=INVALID_TASK)


def _reply_of(team: ServedTeam, trace: Trace) -> dict[str, Any]:
    """The reply as `POST /v1/workflows/{team}/runs` returns it."""
    return {
        "id": trace.episode_id,
        "object": "workflow.run",
        "status": trace.status.value,
        "answer": trace.answer,
        "stop_reason": trace.stop_reason,
        "error": trace.error,
        "cause": trace.cause.value,
        "turns": [
            {
                "agent": turn.agent,
                "text": turn.completion_text,
                "policy_version": turn.policy_version,
                "is_format_ok": turn.is_format_ok,
            }
            for turn in trace.turns
        ],
        "usage": usage_body(
            sum(len(turn.prompt_token_ids) for turn in trace.turns),
            sum(len(turn.completion_token_ids) for turn in trace.turns),
        ),
        "troupe": team.reply_fields,
    }
