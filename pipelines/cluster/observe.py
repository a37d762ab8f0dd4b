"""observe: what stages did and episodes were -> points for Prometheus and lines in the log.

    journal rows of an iteration ──> stage_points      (once per attempt, whoever tells it)
    stored episodes ─────────────> episode_points, log_failed

A stage that never connects to Ray (score, promote) is told by the next one that does: all of them are in the journal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stores.journal import DONE, FAILED, LOCK, StageRow
from stores.logs import Sparingly, bound
from stores.metrics import Point, send
from stores.types import EpisodeStatus, Trace

SOUND = (EpisodeStatus.OK, EpisodeStatus.TRUNCATED)

logger = logging.getLogger(__name__)
_failures = Sparingly(logger)
_told: set[str] = set()


def tell_stages(rows: Iterable[StageRow]) -> None:
    """Sends the points of every attempt that ended; those sent before, by whatever process, count once."""
    for row in rows:
        key = f"{row.run_id}/{row.iteration}/{row.stage}/{row.model_group}/{row.token}/{row.started_at}"
        if row.stage != LOCK and row.status in (DONE, FAILED) and key not in _told:
            send(stage_points(row), key=key)
            _told.add(key)


def stage_points(row: StageRow) -> list[Point]:
    """What the end of one stage shows."""
    run, ref = {"run": row.run_id}, row.ref or {}
    stage = {**run, "stage": row.stage, "model_group": row.model_group}
    points: list[Point] = [
        ("troupe_stages", 1, {**stage, "outcome": row.status}),
        ("troupe_stage_seconds", row.seconds or 0.0, stage),
        ("troupe_iteration", row.iteration, run),
    ]
    if row.status == DONE:
        points += _RESULTS.get(row.stage, lambda row, ref, run: [])(row, ref, run)
    return points


def episode_points(traces: Sequence[Trace], *, num_in_flight: int, collector: str) -> list[Point]:
    """What a batch of stored episodes shows; they are of one run and purpose."""
    if not traces:
        return []
    run = {"run": traces[0].run_id}
    what = {**run, "purpose": traces[0].purpose.value}
    statuses: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    tokens: dict[tuple[str, str], int] = {}
    for trace in traces:
        statuses[trace.status.value] = statuses.get(trace.status.value, 0) + 1
        for turn in trace.turns:
            seconds.setdefault(turn.model_group, []).append(turn.duration_s)
            for kind, ids in (("prompt", turn.prompt_token_ids), ("completion", turn.completion_token_ids)):
                tokens[turn.model_group, kind] = tokens.get((turn.model_group, kind), 0) + len(ids)
    return [
        ("troupe_episodes_in_flight", num_in_flight, {**run, "collector": collector}),
        *(("troupe_episodes", count, {**what, "status": status}) for status, count in statuses.items()),
        *(("troupe_turn_seconds", values, {**what, "model_group": group}) for group, values in seconds.items()),
        *(
            ("troupe_tokens", count, {**what, "model_group": group, "kind": kind})
            for (group, kind), count in tokens.items()
        ),
    ]


def look_points(run_id: str, told: Mapping[str, Any]) -> list[Point]:
    """For Prometheus: every figure of a look, and whether it alarms."""
    points: list[Point] = []
    for source, figures in told["sources"].items():
        for figure, found in figures.items():
            tags = {"run": run_id, "source": source, "figure": figure}
            points.append(("troupe_vitals", found["now"], tags))
            points.append(("troupe_alarm", float(found["state"] == "alarm"), tags))
    return points


def log_failed(traces: Iterable[Trace], *, is_last: bool = True) -> None:
    """A line per episode that failed, as long as they are few; its error is in the trace, it may quote a prompt.

    Args:
        is_last: no others follow in this pass: says how many were left out.
    """
    for trace in traces:
        if trace.status not in SOUND:
            with bound(episode=trace.episode_id):
                _failures.warning(
                    "episode ended as %s (%s), attempt %d", trace.status, trace.stop_reason, trace.attempt
                )
    if is_last:
        _failures.close()


def _trained(row: StageRow, ref: dict[str, Any], run: dict[str, str]) -> list[Point]:
    """Of one model group, or of all that the whole team's task walked through."""
    trained = ref.get("model_groups", {row.model_group: ref})
    names = ("trained_rows", "logprob_gap_mean", "logprob_gap_max")
    points: list[Point] = []
    for model_group, one in trained.items():
        group, metrics = {**run, "model_group": model_group}, one["metrics"]
        points.append(("troupe_policy_version", one["model"]["version"], {**group, "of": "trained"}))
        points += [(f"troupe_{name}", metrics[f"train/{name}"], group) for name in names if f"train/{name}" in metrics]
    return points


def _synced(row: StageRow, ref: dict[str, Any], run: dict[str, str]) -> list[Point]:
    points: list[Point] = [("troupe_sync_seconds", ref["seconds"], run)]
    return points + [
        ("troupe_policy_version", v, {**run, "model_group": g, "of": "served"})
        for g, v in ref["policy_versions"].items()
    ]


def _evaluated(row: StageRow, ref: dict[str, Any], run: dict[str, str]) -> list[Point]:
    found = {"candidate": ref, "champion": ref.get("champion")}
    return [
        ("troupe_accuracy", report["accuracy"], {**run, "team": team})
        for team, report in found.items()
        if report and "accuracy" in report
    ]


def _promoted(row: StageRow, ref: dict[str, Any], run: dict[str, str]) -> list[Point]:
    is_new = ref["verdict"] == "promote"
    return [("troupe_champion_version", ref["team_version"], run)] if is_new else []


def _recorded(row: StageRow, ref: dict[str, Any], run: dict[str, str]) -> list[Point]:
    return look_points(row.run_id, ref["watch"]) if "watch" in ref else []


_RESULTS = {"record": _recorded, "train": _trained, "sync": _synced, "evaluate": _evaluated, "promote": _promoted}
