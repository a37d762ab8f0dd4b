"""served_windows: what the champion answered since it was last watched -> windows of it: captured episodes, and the gateway's figures.

    stores/served.py ── of this team version, begun since ──> `service`    gateway's sums ── less those of last time ──> `gateway`

Captured episodes show what was said, the gateway's sums every answer. Fewer than `watch.min_episodes` wait for the next time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipelines.run import Run
from pipelines.traffic import gateway_figures
from pipelines.vitals import Vital, Window, window_of
from serve_apps.service.figures import Sums, difference
from stores.files import is_uri, local_path
from stores.served import ServedStore
from stores.types import SERVED

FIGURES = {
    "completion_tokens": "completion_tokens",
    "seconds": "seconds",
    "cut_share": "cut_turns",
    "empty_share": "refusals",
    "failure_share": "failures",
}
"""What the gateway calls a figure and what it is called here; `format_share` is the share without a fault."""


def served_windows(run: Run, version: int, *, key: str, at: float) -> tuple[dict[str, Window], dict[str, str]]:
    """Windows by source, and the sources that have too few answers with what they have."""
    windows: dict[str, Window] = {}
    waiting: dict[str, str] = {}
    of_both = {
        "service": _captured(run, version, key=key, at=at),
        "gateway": _of_gateway(run, version, key=key, at=at),
    }
    for source, (num, window) in of_both.items():
        if window is not None:
            windows[source] = window
        elif num:
            waiting[source] = f"{num} of watch.min_episodes = {run.config.watch.min_episodes} answers"
    return windows, waiting


def seen_until(run: Run, version: int, windows: Mapping[str, Window], *, at: float) -> None:
    """Keeps where the next windows of this team version begin; called once these were judged."""
    before = run.journal.value(run.run_id, "watch/until") or {}
    if before.get("team_version") != version:
        before = {}
    now: dict[str, Any] = {**before, "team_version": version}
    if "service" in windows:
        now["service"] = at
    if "gateway" in windows:
        now["sums"] = gateway_figures(run).get(version, {})
    run.journal.put_value(run.run_id, "watch/until", now)


def _captured(run: Run, version: int, *, key: str, at: float) -> tuple[int, Window | None]:
    """How many there are, and their window where they are enough."""
    if not is_uri(run.served_uri) and not local_path(run.served_uri).exists():
        return 0, None
    store = ServedStore(run.served_uri)
    found = store.served_since(_until(run, version).get("service", 0.0), limit=run.config.watch.max_episodes)
    traces = [
        trace
        for trace in found
        if (about := trace.outcome_metadata.get(SERVED, {})).get("team") == run.team_name
        and about.get("team_version") == version
    ]
    if len(traces) < run.config.watch.min_episodes:
        return len(traces), None
    said = store.feedback_on([trace.episode_id for trace in traces])
    scores = {feedback.trace_id: feedback.score for feedback in said if feedback.score is not None}
    return len(traces), window_of(traces, key=key, at=at, feedback=scores, team_version=version)


def _of_gateway(run: Run, version: int, *, key: str, at: float) -> tuple[int, Window | None]:
    now = gateway_figures(run).get(version)
    if now is None:
        return 0, None
    new = difference(now, _until(run, version).get("sums", {}))
    num = int(new["failure_share"][0])
    if num < run.config.watch.min_episodes:
        return num, None
    return num, Window(key=key, at=at, figures=vitals_of_sums(new), team_version=version)


def vitals_of_sums(sums: Sums) -> dict[str, Vital]:
    """The gateway's figures of at least two answers as vitals."""
    found = {
        FIGURES[name]: _vital(of, is_share=name.endswith("_share")) for name, of in sums.items() if name in FIGURES
    }
    num, total, squares = sums["format_share"]
    faults = [num, num - total, num - 2 * total + squares]
    found["format_faults"] = _vital(faults, is_share=True)
    return {name: vital for name, vital in found.items() if vital is not None}


def _vital(of: list[float], *, is_share: bool) -> Vital | None:
    """As `vitals.vital_of`, from number, sum and sum of squares."""
    num, total, squares = of
    if num < 2:
        return None
    mean = total / num
    if is_share:
        num, total, squares = num + 2, total + 1, squares + 1
    variance = max(0.0, squares - total**2 / num) / (num - 1)
    return Vital(num=int(of[0]), mean=mean, error=math.sqrt(variance / num))


def _until(run: Run, version: int) -> dict[str, Any]:
    kept = run.journal.value(run.run_id, "watch/until") or {}
    return kept if kept.get("team_version") == version else {}
