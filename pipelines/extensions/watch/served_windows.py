"""served_windows: what the champion answered since it was last watched -> windows of it: captured episodes, and the gateway's figures.

    stores/traces/served.py ── of this team version, begun since ──> `service`    gateway's sums ── less those of last time ──> `gateway`

Captured episodes show what was said, the gateway's sums every answer. Fewer than `watch.min_episodes` wait for the next time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.extensions.watch.config import watch_config
from pipelines.extensions.watch.episode_metrics import Estimate, Window, window_of
from pipelines.release.production import gateway_answers
from pipelines.run.run import Run
from serve_apps.gateway.traffic.figures import Sums, added, total
from stores.files import is_uri, local_path
from stores.journal.run_values import RunValue
from stores.traces.served import ServedStore
from stores.types import Trace

LATE_S = 3600.0
"""An episode may end, and be stored, so long after one that began later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a team version answered since it was last watched."""

    windows: Mapping[str, Window]
    """By source."""
    waiting: Mapping[str, str]
    """Sources that have too few answers, and how many."""
    until: Mapping[str, Any]
    """Where the next windows begin."""


def served_windows(run: Run, version: int, *, key: str, at: float) -> Served:
    """Reads both sources. Nothing is kept before `mark_checked` says that the windows were checked."""
    stored = run.journal.value(run.run_id, RunValue.WATCH_UNTIL) or {}
    # Also where the version is another than at the last check: after a rollback, its answers of before were counted.
    until: dict[str, Any] = {**stored, "team_version": version}
    config, waiting = watch_config(run.config), dict[str, str]()
    windows: dict[str, Window] = {}
    counted: dict[str, float] = until.get("counted", {})
    traces = _captured(run, version, since=until.get("service", 0.0) - LATE_S, counted=counted)
    now = [{"replica": s["replica"], "figures": s["figures"]} for s in gateway_answers(run)]
    new = added(run.team_name, now, until.get("gateway", [])).get(version, total([]))
    num = int(new["failure_share"][0])
    if len(traces) >= config.min_episodes:
        windows["service"] = _window_of(run, traces, version, key=key, at=at)
        until["service"] = max(until.get("service", 0.0), *(trace.started_at for trace in traces))
        begun = counted | {trace.episode_id: trace.started_at for trace in traces}
        until["counted"] = {name: at_s for name, at_s in begun.items() if at_s > until["service"] - LATE_S}
    if num >= config.min_episodes:
        windows["gateway"] = Window(key=key, at=at, figures=estimates_of_sums(new), team_version=version)
        until["gateway"] = _latest(until.get("gateway", []), now)
    for source, count in (("service", len(traces)), ("gateway", num)):
        if 0 < count < config.min_episodes:
            waiting[source] = f"{count} of watch.min_episodes = {config.min_episodes} answers"
    return Served(windows=windows, waiting=waiting, until=until)


def mark_checked(run: Run, served: Served) -> None:
    """Notes where the next windows begin: where these end."""
    run.journal.put_value(run.run_id, RunValue.WATCH_UNTIL, served.until)


def _latest(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest status of each replica. One that does not answer now may do so at the next check, and would count from its
    start."""
    return list({status["replica"]: status for status in [*before, *now]}.values())


def _captured(run: Run, version: int, *, since: float, counted: Collection[str]) -> list[Trace]:
    if not is_uri(run.served_uri) and not local_path(run.served_uri).exists():
        return []
    limit = watch_config(run.config).max_episodes
    return ServedStore(run.served_uri).served_since(
        since, team=run.team_name, version=version, limit=limit, but=counted
    )


def _window_of(run: Run, traces: Sequence[Trace], version: int, *, key: str, at: float) -> Window:
    every_feedback = ServedStore(run.served_uri).feedback_on([trace.episode_id for trace in traces])
    scores = {feedback.trace_id: feedback.score for feedback in every_feedback if feedback.score is not None}
    return window_of(traces, key=key, at=at, feedback=scores, team_version=version, figures=run.figures)


def estimates_of_sums(sums: Sums) -> dict[str, Estimate]:
    """Returns the gateway's figures, each of at least two answers."""
    estimates = {name: _estimate(parts, is_share=name.endswith("_share")) for name, parts in sums.items()}
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def _estimate(parts: list[float], *, is_share: bool) -> Estimate | None:
    """Estimates as `episode_metrics.estimate_of` does, from number, sum and sum of squares."""
    num, total, squares = parts
    if num < 2:
        return None
    mean = total / num
    if is_share:
        num, total, squares = num + 2, total + 1, squares + 1
    variance = max(0.0, squares - total**2 / num) / (num - 1)
    return Estimate(num=int(parts[0]), mean=mean, error=math.sqrt(variance / num))
