"""traces: some episodes of an iteration -> MLflow's trace view, each a trace with its turns, tool calls, times and credit.

They are shown under an MLflow run. Nothing is read back: the trace store is the record.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from stores.registry.experiment import connect, open_experiment
from stores.registry.tracking import RunTracker
from stores.types import SOUND, EpisodeRewards, Trace, Turn

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span, TraceInfo

MAX_PREVIEW_LENGTH = 1000


def show(
    tracker: RunTracker, mlflow_run: str, episodes: Iterable[tuple[Trace, EpisodeRewards | None]], *, limit: int = 20
) -> int:
    """Shows at most `limit` episodes in MLflow's trace view, under an MLflow run; returns how many were new.

    Up to half of them are episodes that failed. They are chosen by id, so that a repeated call chooses the same, and an
    episode is shown once.
    """
    from mlflow.tracing.client import TracingClient

    chosen = _choose(episodes, limit)
    experiment = open_experiment(connect(tracker.tracking_uri), tracker.artifact_root)
    client = TracingClient(tracker.tracking_uri)  # the public function for this hides errors and needs a global URI
    known = {info.trace_id for info in client.store.batch_get_trace_infos([_trace_id(t) for t, _ in chosen])}
    new = [(trace, rewards) for trace, rewards in chosen if _trace_id(trace) not in known]
    spans = [span for trace, rewards in new for span in _spans(trace, rewards)]
    if spans:
        client.log_spans(experiment, spans)
    for trace, rewards in new:
        client.start_trace(_trace_info(trace, rewards, experiment, mlflow_run))
    return len(new)


def _choose(
    episodes: Iterable[tuple[Trace, EpisodeRewards | None]], limit: int
) -> list[tuple[Trace, EpisodeRewards | None]]:
    ordered = sorted(episodes, key=lambda e: e[0].episode_id)
    failed = [e for e in ordered if e[0].status not in SOUND]
    others = [e for e in ordered if e[0].status in SOUND]
    num_failed = min(len(failed), max(limit // 2, limit - len(others)))
    return failed[:num_failed] + others[: limit - num_failed]


def _trace_info(trace: Trace, rewards: EpisodeRewards | None, experiment: str, mlflow_run: str) -> TraceInfo:
    from mlflow.entities import Feedback, TraceInfo, TraceLocation, TraceState
    from mlflow.entities.assessment_source import AssessmentSource

    tags = {
        "mlflow.traceName": trace.workflow,
        "episode_id": trace.episode_id,
        "run": trace.run_id,
        "iteration": str(trace.iteration),
        "purpose": trace.purpose.value,
        "task_id": trace.task.task_id,
        "status": trace.status.value,
        "stop_reason": trace.stop_reason,
        "cause": trace.cause.value,
    }
    assessments: list[Assessment] = []
    if rewards is not None:
        source = AssessmentSource(source_type="CODE", source_id=rewards.credit_version)
        credit = {"outcome": rewards.outcome, "reward": sum(r.reward for r in rewards.rewards)}
        assessments = [Feedback(name=name, value=value, source=source) for name, value in credit.items()]
    return TraceInfo(
        trace_id=_trace_id(trace),
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=int(trace.started_at * 1000),
        execution_duration=int(trace.duration_s * 1000),
        state=TraceState.OK if trace.status in SOUND else TraceState.ERROR,
        request_preview=trace.task.prompt[:MAX_PREVIEW_LENGTH],
        response_preview=(trace.answer or trace.error)[:MAX_PREVIEW_LENGTH],
        trace_metadata={
            "mlflow.trace_schema.version": "3",
            "mlflow.sourceRun": mlflow_run,
            "mlflow.trace.session": trace.group_id,
            "mlflow.trace.tokenUsage": json.dumps(_usage(trace.turns)),
        },
        tags={name: value for name, value in tags.items() if value},
        assessments=assessments,
    )


def _spans(trace: Trace, rewards: EpisodeRewards | None) -> list[Span]:
    """Returns the episode as a span of type AGENT, its turns as LLM and its tool calls as TOOL, at their real times."""
    credit = {r.turn_index: r.reward for r in rewards.rewards} if rewards is not None else {}
    root = _span(
        trace,
        -1,
        trace.workflow,
        "AGENT",
        0.0,
        trace.duration_s,
        inputs={"prompt": trace.task.prompt, "reference": list(trace.task.answers)},
        outputs={"answer": trace.answer},
        error="" if trace.status in SOUND else f"{trace.status}: {trace.error or trace.stop_reason}",
        policy_versions=dict(trace.policy_versions),
        status=trace.status.value,
    )
    events = {t.turn_index: _turn_span(trace, t, credit.get(t.turn_index)) for t in trace.turns}
    for call in trace.tool_calls:
        events[call.call_index] = _span(
            trace,
            call.call_index,
            call.tool,
            "TOOL",
            call.start_s,
            call.duration_s,
            inputs=dict(call.request),
            outputs=call.response,
            error=call.error,
            caller=call.caller,
            parents=list(call.parents),
        )
    return [root, *(events[index] for index in sorted(events))]


def _turn_span(trace: Trace, turn: Turn, credit: float | None) -> Span:
    attributes: dict[str, Any] = {"mlflow.chat.tokenUsage": _usage([turn])}
    attributes |= {"format_fault": turn.format_fault} if turn.format_fault else {}
    return _span(
        trace,
        turn.turn_index,
        turn.agent,
        "LLM",
        turn.start_s,
        turn.duration_s,
        inputs=turn.prompt_text,
        outputs=turn.completion_text,
        agent=turn.agent,
        model_group=turn.model_group,
        policy_version=turn.policy_version,
        round=turn.round_index,
        parents=list(turn.parents),
        finish_reason=turn.finish_reason.value,
        fields=dict(turn.fields),
        credit=credit,
        **attributes,
    )


def _span(
    trace: Trace,
    index: int,
    name: str,
    kind: str,
    start_s: float,
    duration_s: float,
    *,
    inputs: Any,
    outputs: Any,
    error: str = "",
    **attributes: Any,
) -> Span:
    """Builds a finished span; `index` -1 is the root, the parent of all others."""
    from mlflow.entities import Span

    start_ns = int((trace.started_at + start_s) * 1e9)
    attributes = {
        "mlflow.traceRequestId": _trace_id(trace),
        "mlflow.spanType": kind,
        "mlflow.spanInputs": inputs,
        "mlflow.spanOutputs": outputs,
        **attributes,
    }
    ids = {"trace_id": _trace_bytes(trace), "span_id": _span_bytes(trace, index)}
    return Span.from_dict(
        {
            **{name: base64.b64encode(data).decode() for name, data in ids.items()},
            "parent_span_id": "" if index == -1 else base64.b64encode(_span_bytes(trace, -1)).decode(),
            "name": name,
            "start_time_unix_nano": start_ns,
            "end_time_unix_nano": start_ns + int(duration_s * 1e9),
            "status": {"code": "STATUS_CODE_ERROR" if error else "STATUS_CODE_OK", "message": error},
            "attributes": {key: json.dumps(value, default=repr) for key, value in attributes.items()},
            "events": [],
        }
    )


def _trace_id(trace: Trace) -> str:
    """Returns MLflow's id of an episode; it is always the same, so that no episode is shown twice."""
    return f"tr-{_trace_bytes(trace).hex()}"


def _trace_bytes(trace: Trace) -> bytes:
    """Returns 16 bytes, as OpenTelemetry needs them: the episode id, if it is hexadecimal, or else its hash."""
    if re.fullmatch("[0-9a-f]{32}", trace.episode_id):
        return bytes.fromhex(trace.episode_id)
    return sha256(trace.episode_id.encode()).digest()[:16]


def _span_bytes(trace: Trace, index: int) -> bytes:
    return sha256(f"{trace.episode_id}/{index}".encode()).digest()[:8]


def _usage(turns: Sequence[Turn]) -> dict[str, int]:
    num_input = sum(len(t.prompt_token_ids) for t in turns)
    num_output = sum(len(t.completion_token_ids) for t in turns)
    return {"input_tokens": num_input, "output_tokens": num_output, "total_tokens": num_input + num_output}
