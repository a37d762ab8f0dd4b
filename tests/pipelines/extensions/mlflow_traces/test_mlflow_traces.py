"""pipelines.extensions.mlflow_traces on a real MLflow in a SQLite file."""

from __future__ import annotations

import pytest
from records import build_rewards, build_trace

from pipelines.extensions.mlflow_traces.traces import show
from stores.registry.tracking import RunTracker
from stores.types import EpisodeStatus

pytestmark = pytest.mark.test


def test_an_episode_shows_its_turns_tools_times_and_credit(mlflow_place: tuple[str, str]) -> None:
    tracker = RunTracker(*mlflow_place, "shown")
    trace = build_trace(0, run_id="shown")
    assert show(tracker, tracker.mlflow_run_id, [(trace, build_rewards(trace, outcome=0.5))]) == 1
    assert show(tracker, tracker.mlflow_run_id, [(trace, build_rewards(trace, outcome=0.5))]) == 0
    (shown,) = tracker._client.search_traces(
        locations=[tracker._open()[0]],
        run_id=tracker.mlflow_run_id,
        filter_string=f"tags.episode_id = '{trace.episode_id}'",
    )
    assert shown.info.trace_metadata["mlflow.sourceRun"] == tracker.mlflow_run_id
    assert (shown.info.tags["run"], shown.info.tags["iteration"], shown.info.tags["status"]) == ("shown", "3", "ok")
    assert {a.name: a.value for a in shown.info.assessments} == {"outcome": 0.5, "reward": pytest.approx(0.8)}
    spans = sorted(shown.data.spans, key=lambda s: (s.parent_id is not None, s.start_time_ns))
    assert [s.span_type for s in spans] == ["AGENT", "LLM", "TOOL", "LLM"]
    by_name = {s.name: s for s in shown.data.spans}
    turn = trace.turns[1]
    span = by_name["verifier"]
    assert (span.inputs, span.outputs) == (turn.prompt_text, turn.completion_text)
    assert (span.attributes["model_group"], span.attributes["policy_version"]) == ("large", 4)
    assert span.attributes["credit"] == pytest.approx(0.4)
    assert span.attributes["mlflow.chat.tokenUsage"]["output_tokens"] == len(turn.completion_token_ids)
    assert (span.end_time_ns - span.start_time_ns) / 1e9 == pytest.approx(turn.duration_s)
    assert span.start_time_ns / 1e9 == pytest.approx(trace.started_at + turn.start_s)
    assert by_name["search"].inputs == {"query": "it's 2 + 3", "top": 3}
    assert by_name["search"].parent_id == by_name[trace.workflow].span_id


def test_failures_come_first_and_fill_at_most_half(mlflow_place: tuple[str, str]) -> None:
    tracker = RunTracker(*mlflow_place, "chosen")
    broken = {"status": EpisodeStatus.AGENT_ERROR, "error": "KeyError: 'x'", "turns": ()}
    failed = [build_trace(i, run_id="chosen", **broken) for i in range(6)]
    sound = [build_trace(i, run_id="chosen") for i in range(6, 16)]
    assert show(tracker, tracker.mlflow_run_id, [(t, None) for t in [*sound, *failed]], limit=8) == 8
    shown = tracker._client.search_traces(locations=[tracker._open()[0]], filter_string="tags.run = 'chosen'")
    statuses = [t.info.tags["status"] for t in shown]
    assert (statuses.count("agent_error"), statuses.count("ok")) == (4, 4)
    root = next(t for t in shown if t.info.tags["status"] == "agent_error").data.spans[0]
    assert root.status.status_code.value == "ERROR" and "KeyError" in root.status.description
