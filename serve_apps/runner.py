"""runner: a workflow, a task, a policy client -> the trace of one episode.

    run_episode ── attempt 1..n ── Recorder ──> workflow.run(task, agents, tools)
                                      │              │ await agents.solver(question=...)
                                      │ <────────────┘
                                      └──> Trace

"A bad episode is data": the one place where whatever a workflow raises becomes a status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serve_apps.acting_team import ActingTeam, Complete
from serve_apps.agent import ToolError
from serve_apps.config import EpisodeConfig
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import ContextExhausted, PolicyCallError
from serve_apps.recorder import Recorder
from serve_apps.workflow import Outcome
from stores.types import EpisodeStatus, FinishReason, Trace

CONTEXT_EXHAUSTED = "context_exhausted"
"""The stop reason of an episode in which a prompt left no room for a completion."""


async def run_episode(spec: EpisodeSpec, *, team: ActingTeam, complete: Complete, limits: EpisodeConfig) -> Trace:
    """Runs one episode to its end, whatever happens; only cancellation escapes.

    An infrastructure failure is an attempt, repeated with the same seed; the last attempt is recorded. A turn
    that was sampled by another version than the team's is such a failure, too.
    """
    for attempt in range(1, limits.max_attempts + 1):
        recorder = Recorder(spec, team, complete, limits)
        trace = await run_attempt(recorder, attempt)
        if trace.status is not EpisodeStatus.INFRA_ERROR:
            break
    return trace


async def run_attempt(recorder: Recorder, attempt: int) -> Trace:
    """Runs the recorder's episode once; whatever the workflow raises becomes a status. Only cancellation escapes."""
    started_at = time.time()
    status, stop_reason, error, outcome = EpisodeStatus.OK, "", "", Outcome(answer="")
    try:
        async with asyncio.timeout(recorder.limits.episode_timeout_s):
            returned = await recorder.team.workflow.run(recorder.spec.task, recorder.agents, recorder.tools)
        outcome = _recordable(returned)
        stop_reason = outcome.stop_reason
        if outcome.is_truncated or any(t.finish_reason is FinishReason.LENGTH for t in recorder.turns.values()):
            status = EpisodeStatus.TRUNCATED
    except ContextExhausted as exhausted:
        status, stop_reason, error = EpisodeStatus.TRUNCATED, CONTEXT_EXHAUSTED, str(exhausted)
    except TimeoutError as late:
        waited = time.perf_counter() - recorder.began
        status, stop_reason = EpisodeStatus.TIMEOUT, "timeout"
        error = str(late) or f"no end after {waited:.1f} s, {len(recorder.turns)} turns done"
    except PolicyCallError as failed:
        status, stop_reason, error = EpisodeStatus.INFRA_ERROR, "policy_call_failed", str(failed)
    except ToolError as failed:
        status, stop_reason, error = EpisodeStatus.TOOL_ERROR, "tool_failed", str(failed)
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        status, stop_reason = EpisodeStatus.AGENT_ERROR, "workflow_raised"
        error = "CancelledError: the workflow awaited a task that it had cancelled itself"
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - the one place: what a workflow raises is agent_error
        status, stop_reason = EpisodeStatus.AGENT_ERROR, "workflow_raised"
        error = f"{type(raised).__name__}: {raised}"
    return recorder.trace(status, stop_reason, error, outcome, started_at, attempt)


def _recordable(returned: Any) -> Outcome:
    """Returns the outcome of `run` with plain values, as a trace stores it; TypeError where it is none."""
    if not isinstance(returned, Outcome):
        raise TypeError(f"run returned {type(returned).__name__}, not an Outcome")
    if not isinstance(returned.metadata, Mapping):
        raise TypeError(
            f"Outcome.metadata is {type(returned.metadata).__name__}, not a mapping: leave it out or give one"
        )
    answer, stop_reason = str(returned.answer), str(returned.stop_reason)
    return replace(returned, answer=answer, stop_reason=stop_reason, metadata=dict(returned.metadata))


def _is_cancelled() -> bool:
    """Returns whether the task that runs this was cancelled, and not one that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
