"""points: finished stages, stored episodes, checks and champions -> points for Prometheus."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipelines.cluster.observe import Observer
from pipelines.extensions.prometheus.meter import Point, send
from stores.journal.journal import DONE, FAILED, LOCK, StageRow
from stores.journal.stage_results import Evaluated, Synced, Trained, TrainedTeam, result_of
from stores.types import Trace

logger = logging.getLogger(__name__)
_sent: set[str] = set()


class Prometheus(Observer):
    """Sends what it is told to the Meter."""

    def stages(self, rows: Sequence[StageRow], *, has_latest: bool) -> None:
        """Sends each attempt that ended once, whichever process tells of it."""
        send_stage_points(rows)
        if has_latest:
            send_iteration(rows)

    def champion(self, run_id: str, version: int) -> None:
        """Sends the champion; it has moved already, so that no fault of the cluster may fail the move."""
        send_champion(run_id, version)

    def episodes(self, traces: Sequence[Trace], *, num_in_flight: int, collector: str) -> None:
        """Sends the points of a batch of episodes."""
        send(episode_points(traces, num_in_flight=num_in_flight, collector=collector))

    def check(self, run_id: str, check: Mapping[str, Any]) -> None:
        """Sends a check, once."""
        send(check_points(run_id, check), key=f"watch/{run_id}/{check['key']}")


def send_stage_points(rows: Iterable[StageRow]) -> None:
    """Sends the points of every attempt that ended; those sent before, by whatever process, count once."""
    for row in filter(_has_ended, rows):
        key = f"{row.run_id}/{row.iteration}/{row.stage}/{row.model_group}/{row.token}/{row.started_at}"
        if key not in _sent and send(stage_points(row), key=key):
            _sent.add(key)


def send_iteration(rows: Sequence[StageRow]) -> None:
    """Sends the latest iteration with an ended stage. Where iterations overlap, that is not the one whose stage ended last."""
    latest = max(filter(_has_ended, rows), key=lambda row: row.iteration, default=None)
    if latest is not None:
        send([("troupe_iteration", latest.iteration, {"run": latest.run_id})])


def send_champion(run_id: str, version: int) -> None:
    """Sends which team version is the champion."""
    from ray.exceptions import RayError

    try:
        send([("troupe_champion_version", version, {"run": run_id})])
    except (RayError, OSError, RuntimeError, ValueError) as error:  # what Ray raises where a cluster goes away
        logger.warning("the champion's version could not be sent: %s", error)


def stage_points(row: StageRow) -> list[Point]:
    """The points of one stage that ended, with those of its result where it is done."""
    run = {"run": row.run_id}
    stage = {**run, "stage": row.stage, "model_group": row.model_group}
    points: list[Point] = [
        ("troupe_stages", 1, {**stage, "outcome": row.status}),
        *((("troupe_stage_seconds", row.seconds, stage),) if row.seconds is not None else ()),
    ]
    if row.status == DONE and row.ref is not None:
        points += _result_points(row, row.ref, run)
    return points


def episode_points(traces: Sequence[Trace], *, num_in_flight: int, collector: str) -> list[Point]:
    """The points of a batch of stored episodes of one run and purpose."""
    if not traces:
        return []
    run = {"run": traces[0].run_id}
    tags = {**run, "purpose": traces[0].purpose.value}
    statuses = Counter(trace.status.value for trace in traces)
    seconds: dict[str, list[float]] = defaultdict(list)
    tokens = Counter[tuple[str, str]]()
    for turn in (turn for trace in traces for turn in trace.turns):
        seconds[turn.model_group].append(turn.duration_s)
        tokens[turn.model_group, "prompt"] += len(turn.prompt_token_ids)
        tokens[turn.model_group, "completion"] += len(turn.completion_token_ids)
    return [
        ("troupe_episodes_in_flight", num_in_flight, {**run, "collector": collector}),
        *(("troupe_episodes", count, {**tags, "status": status}) for status, count in statuses.items()),
        *(("troupe_turn_seconds", values, {**tags, "model_group": group}) for group, values in seconds.items()),
        *(
            ("troupe_tokens", count, {**tags, "model_group": group, "kind": kind})
            for (group, kind), count in tokens.items()
        ),
    ]


def check_points(run_id: str, check: Mapping[str, Any]) -> list[Point]:
    """The points of a check of figures (extension `watch`): each figure, and whether it raises an alarm."""
    points: list[Point] = []
    for source, figures in check["sources"].items():
        for figure, judged in figures.items():
            tags = {"run": run_id, "source": source, "figure": figure}
            if judged["now"] is not None:
                points.append(("troupe_episode_metrics", judged["now"], tags))
            points.append(("troupe_alarm", float(judged["state"] == "alarm"), tags))
    return points


def _has_ended(row: StageRow) -> bool:
    return row.stage != LOCK and row.status in (DONE, FAILED)


def _result_points(row: StageRow, ref: Mapping[str, Any], run: dict[str, str]) -> list[Point]:
    match result_of(row.stage, ref):
        case Trained() as trained:
            return _trained_points({row.model_group: trained}, run)
        case TrainedTeam(model_groups=trained_groups):
            return _trained_points(trained_groups, run)
        case Synced() as synced:
            return _synced_points(synced, run)
        case Evaluated() as evaluated:
            return _evaluated_points(evaluated, run)
        case None if "sources" in ref.get("watch", ()):  # of `record`, whose own process may know no cluster
            return check_points(row.run_id, ref["watch"])
        case _:
            return []


def _trained_points(trained: Mapping[str, Trained], run: dict[str, str]) -> list[Point]:
    names = ("trained_rows", "logprob_gap_mean", "logprob_gap_max")
    points: list[Point] = []
    for model_group, result in trained.items():
        group, metrics = {**run, "model_group": model_group}, result.metrics
        points.append(("troupe_policy_version", result.model.version, {**group, "of": "trained"}))
        points += [(f"troupe_{name}", metrics[f"train/{name}"], group) for name in names if f"train/{name}" in metrics]
    return points


def _synced_points(synced: Synced, run: dict[str, str]) -> list[Point]:
    versions = synced.policy_versions.items()
    return [
        ("troupe_sync_seconds", synced.seconds, run),
        *(("troupe_policy_version", v, {**run, "model_group": g, "of": "served"}) for g, v in versions),
    ]


def _evaluated_points(evaluated: Evaluated, run: dict[str, str]) -> list[Point]:
    scores = {"candidate": evaluated.candidate, "champion": evaluated.champion}
    return [
        ("troupe_accuracy", score.accuracy, {**run, "team": team})
        for team, score in scores.items()
        if score is not None
    ]
