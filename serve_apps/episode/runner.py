"""runner: a workflow, a task, a policy client -> the trace of one episode.

    run_episode ── attempt 1..n ── Recorder ──> workflow.run(task, agents, tools)
                                      │              │ await agents.solver(question=...)
                                      │ <────────────┘
                                      └──> Trace

"A bad episode is data": the one place where whatever a workflow raises becomes a status, and a cause (serve_apps/episode/causes.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serve_apps.authoring.agent import AuthorError, ToolError, ToolFault, ToolRaised
from serve_apps.authoring.workflow import SCORE, Outcome
from serve_apps.config import EpisodeConfig
from serve_apps.episode.causes import CallTimeout, cause_of_delay, cause_of_error, first_error, words_of
from serve_apps.episode.episode_resources import episode_resources
from serve_apps.episode.recorder import Recorder
from serve_apps.episode.team import ActingTeam, Complete
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import ContextExhausted, PolicyCallError, is_cancelled
from serve_apps.spans import Served, process_spans
from stores.types import Cause, EpisodeStatus, FinishReason, Trace

CONTEXT_EXHAUSTED = "context_exhausted"
"""The stop reason of an episode in which a prompt left no room for a completion."""
WORKFLOW_RAISED, TOOL_RAISED = "workflow_raised", "tool_raised"
"""The stop reasons of episodes in which the code of the workflow, or of a tool, raised an error of its own."""


async def run_episode(
    spec: EpisodeSpec, *, team: ActingTeam, complete: Complete, limits: EpisodeConfig, served: Served | None = None
) -> Trace:
    """Runs one episode to its end, whatever happens; only cancellation escapes.

    A failure that the infrastructure caused is an attempt, repeated with the same seed; the last attempt is recorded. A
    turn that was sampled by another version than the team's is such a failure, too.

    Args: served: what its spans say of whom it answers; None: nobody.
    """
    for attempt in range(1, limits.max_attempts + 1):
        recorder = Recorder(spec, team, complete, limits)
        trace = await run_attempt(recorder, attempt, served=served)
        if trace.cause is not Cause.INFRASTRUCTURE:
            break
    return trace


async def run_attempt(recorder: Recorder, attempt: int, *, served: Served | None = None) -> Trace:
    """Runs the recorder's episode once; whatever the workflow raises becomes a status. Only cancellation escapes."""
    about: dict[str, Any] = {"workflow": recorder.team.workflow_path, "attempt": attempt, "served": served}
    with process_spans().episode(recorder.spec, **about) as recorder.spans:
        trace = await _play(recorder, attempt)
        recorder.spans.record(trace)
        return trace


async def _play(recorder: Recorder, attempt: int) -> Trace:
    started_at = time.time()
    status, cause, outcome = EpisodeStatus.OK, Cause.NONE, Outcome(answer="")
    try:
        async with recorder.clock.deadline(recorder.limits.episode_timeout_s):
            with episode_resources():
                returned = await recorder.team.workflow.run(recorder.task, recorder.agents, recorder.tools)
        outcome = _recordable(returned)
        stop_reason, error = outcome.stop_reason, outcome.error
        if outcome.is_truncated or any(t.finish_reason is FinishReason.LENGTH for t in recorder.turns.values()):
            status = EpisodeStatus.TRUNCATED
    except (Exception, SystemExit, BaseExceptionGroup, asyncio.CancelledError) as raised:
        if isinstance(first_error(raised), asyncio.CancelledError) and is_cancelled():
            raise
        status, stop_reason, error = _end(recorder, first_error(raised))
        cause = _cause(recorder, raised)
    finally:
        recorder.events.end()
    return recorder.trace(status, stop_reason, error, outcome, started_at, attempt, cause=cause)


def _end(recorder: Recorder, raised: BaseException) -> tuple[EpisodeStatus, str, str]:
    """Returns the status, the stop reason and the error of an episode whose workflow raised this."""
    message = words_of(raised)
    match raised:
        case ContextExhausted():
            return EpisodeStatus.TRUNCATED, CONTEXT_EXHAUSTED, message
        case TimeoutError():
            late = f"no end after {recorder.clock.seconds:.1f} s, {len(recorder.turns)} turns done"
            return EpisodeStatus.TIMEOUT, "timeout", message or late
        case PolicyCallError():
            return EpisodeStatus.INFRA_ERROR, "policy_call_failed", message
        case ToolError():
            return EpisodeStatus.TOOL_ERROR, _tool_stop(raised), message or type(raised).__name__
        case asyncio.CancelledError():
            message = "the workflow awaited a task that it had cancelled itself"
    return EpisodeStatus.AGENT_ERROR, WORKFLOW_RAISED, f"{type(raised).__name__}: {message}"


def _cause(recorder: Recorder, raised: BaseException) -> Cause:
    num_turns, first = len(recorder.turns), first_error(raised)
    if isinstance(first, ContextExhausted):
        return Cause.NONE
    if isinstance(first, TimeoutError) and not isinstance(first, CallTimeout):
        seconds = recorder.clock.seconds
        return cause_of_delay(seconds=seconds, waited_s=recorder.events.waited_s, num_turns=num_turns)
    return cause_of_error(raised, num_turns=num_turns)


def _tool_stop(failed: ToolError) -> str:
    """Returns the stop reason of a tool's failure: its service failed, its code raised, or it refused its input."""
    if isinstance(failed, ToolFault):
        return "tool_failed"
    return TOOL_RAISED if isinstance(failed, ToolRaised) else "tool_refused"


def _recordable(returned: Any) -> Outcome:
    """Returns the outcome of `run` with plain values, as a trace stores it.

    Raises TypeError where it is none, AuthorError where its score is none: raised when it is paid, it would end the scoring
    of every other episode.
    """
    if not isinstance(returned, Outcome):
        raise TypeError(f"run returned {type(returned).__name__}, not an Outcome")
    if not isinstance(returned.metadata, Mapping):
        raise TypeError(
            f"Outcome.metadata is {type(returned.metadata).__name__}, not a mapping: leave it out or give one"
        )
    metadata = dict(returned.metadata)
    if metadata.get(SCORE) is not None:
        metadata[SCORE] = _checked_score(metadata[SCORE])
    return replace(
        returned,
        answer=str(returned.answer),
        stop_reason=str(returned.stop_reason),
        error=str(returned.error),
        metadata=metadata,
    )


def _checked_score(score: Any) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 <= value <= 1:
        raise AuthorError(f"the episode's score is {str(score)[:80]}: a score is a number of 0 to 1")
    return value
