"""tracking: shows params, metrics, files and some traces of a run in MLflow.

There is one MLflow run per Troupe run, with the curves over its iterations, and nested under it one per iteration. Both are
found by their tags after a restart. Nothing is read back: the journal and the trace store are the record.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from stores.files import read_file
from stores.registry.experiment import (
    ITERATION_TAG,
    PARENT_TAG,
    absolute,
    connect,
    find_child,
    open_experiment,
    open_run,
    run_url,
)
from stores.types import SOUND, EpisodeRewards, Trace, Turn

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Assessment, Metric, Span, TraceInfo

MAX_PARAM_LENGTH = 6000
MAX_PREVIEW_LENGTH = 1000
BATCH = {"metrics": 1000, "params": 100, "tags": 100}
"""MLflow accepts so many entries in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowRef:
    """A pointer to an MLflow run, for other systems."""

    mlflow_run_id: str
    mlflow_url: str
    """Empty where there is neither a server nor TROUPE_MLFLOW_URL."""


class RunTracker:
    """Shows one run in MLflow. It is cheap to create and to pickle: MLflow is imported and called when first needed."""

    def __init__(self, tracking_uri: str, artifact_root: str, run_id: str) -> None:
        """Args: tracking_uri: `sqlite:///PATH` or a server; artifact_root: folder or URI; run_id: Troupe's run."""
        self.tracking_uri, self.artifact_root = absolute(tracking_uri), absolute(artifact_root)
        self.run_id = run_id
        self._ids: tuple[str, str] | None = None

    @property
    def mlflow_run_id(self) -> str:
        """Returns the id of the MLflow run, created if there is none."""
        return self._open()[1]

    def start(self, params: Mapping[str, Any] | None = None, tags: Mapping[str, str] | None = None) -> str:
        """Creates or reopens the MLflow run and returns its id.

        MLflow's params cannot change: those of the first start stay, and new ones are added.
        """
        run = self._client.get_run(self.mlflow_run_id)
        if run.info.status != "RUNNING":
            self._client.update_run(self.mlflow_run_id, status="RUNNING")
        old = run.data.params
        new = {name: str(value)[:MAX_PARAM_LENGTH] for name, value in (params or {}).items() if name not in old}
        from mlflow.entities import Param, RunTag

        self._log(
            self.mlflow_run_id,
            params=[Param(n, v) for n, v in new.items()],
            tags=[RunTag(n, v) for n, v in (tags or {}).items()],
        )
        return self.mlflow_run_id

    def log_metrics(self, values: Mapping[str, float], iteration: int, *, at: float | None = None) -> None:
        """Logs metrics named `stage/name` with the iteration as their step; the same `at` (Unix seconds) counts once."""
        self._log(self.mlflow_run_id, metrics=_metrics(values, iteration, time.time() if at is None else at))

    def log_iteration(
        self,
        iteration: int,
        *,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        episodes: Iterable[tuple[Trace, EpisodeRewards | None]],
        started_at: float,
        ended_at: float,
    ) -> MlflowRef:
        """Shows one iteration: an MLflow run nested under this one, and a point on each curve of this one.

        A repeated call finds that run and adds nothing twice: MLflow keeps one of two metrics with the same name, step,
        value and time, and their time is `ended_at`.

        Args:
            tags: versions, links; `mlflow.note.content` is the description at the top of the page (Markdown).
            episodes: some are shown as traces of the iteration's run, see `log_traces`.
            started_at, ended_at: Unix seconds of the iteration.
        """
        from mlflow.entities import RunTag

        experiment, parent = self._open()
        child = find_child(self._client, experiment, parent, iteration)
        if child is None:
            child_tags = {PARENT_TAG: parent, ITERATION_TAG: str(iteration), "troupe.run": self.run_id}
            created = self._client.create_run(
                experiment, int(started_at * 1000), tags=child_tags, run_name=f"{self.run_id} iteration {iteration}"
            )
            child = created.info.run_id
        known = self._client.get_run(child).data.metrics
        points = _metrics({n: v for n, v in metrics.items() if known.get(n) != v}, iteration, ended_at)
        self._log(parent, metrics=points)
        self._log(child, metrics=points, tags=[RunTag(n, v) for n, v in tags.items()])
        self.log_traces(episodes, mlflow_run=child)
        self._client.set_terminated(child, "FINISHED", int(ended_at * 1000))
        return MlflowRef(mlflow_run_id=child, mlflow_url=run_url(self.tracking_uri, experiment, child))

    def log_file(self, location: str) -> None:
        """Logs a text file, given as a path or URI; ValueError if it does not exist."""
        data = read_file(location)
        if data is None:
            raise ValueError(f"{location} does not exist: write it before it is shown")
        self._client.log_text(self.mlflow_run_id, data.decode(), location.rpartition("/")[2])

    def log_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Logs a small JSON file, which replaces the one of this name."""
        self._client.log_text(self.mlflow_run_id, json.dumps(content, indent=2), name)

    def log_traces(
        self, episodes: Iterable[tuple[Trace, EpisodeRewards | None]], *, limit: int = 20, mlflow_run: str = ""
    ) -> int:
        """Shows at most `limit` episodes in MLflow's trace view, under this run or `mlflow_run`; returns how many were new.

        Up to half of them are episodes that failed. They are chosen by id, so that a repeated call chooses the same, and an
        episode is shown once.
        """
        from mlflow.tracing.client import TracingClient

        chosen = _choose(episodes, limit)
        experiment, whole = self._open()
        client = TracingClient(self.tracking_uri)  # the public function for this hides errors and needs a global URI
        known = {info.trace_id for info in client.store.batch_get_trace_infos([_trace_id(t) for t, _ in chosen])}
        new = [(trace, rewards) for trace, rewards in chosen if _trace_id(trace) not in known]
        spans = [span for trace, rewards in new for span in _spans(trace, rewards)]
        if spans:
            client.log_spans(experiment, spans)
        for trace, rewards in new:
            client.start_trace(_trace_info(trace, rewards, experiment, mlflow_run or whole))
        return len(new)

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> None:
        """Ends the MLflow run; `start` opens it again."""
        self._client.set_terminated(self.mlflow_run_id, status)

    @property
    def _client(self) -> MlflowClient:
        return connect(self.tracking_uri)

    def _open(self) -> tuple[str, str]:
        """Returns the ids of experiment and MLflow run; they are looked up once."""
        if self._ids is None:
            experiment = open_experiment(self._client, self.artifact_root)
            self._ids = experiment, open_run(self._client, experiment, self.run_id)
        return self._ids

    def _log(self, mlflow_run: str, **entries: list[Any]) -> None:
        """Logs entries in as few calls as MLflow's limits allow."""
        rest = {kind: iter(values) for kind, values in entries.items()}
        while True:
            batch: dict[str, Any] = {kind: list(islice(values, BATCH[kind])) for kind, values in rest.items()}
            if not any(batch.values()):
                return
            self._client.log_batch(mlflow_run, **batch)


def _metrics(values: Mapping[str, float], iteration: int, at: float) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(name, float(value), int(at * 1000), iteration) for name, value in values.items()]


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
