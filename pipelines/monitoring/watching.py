"""watching: windows of one moment + the history in the journal -> a look: what alarms, what is sound, what is still learned.

    window per source ── judge, by that source's history ──> look ──> journal (history, latest looks, latest hundred events)
                                                                 └──> a warning in the log, points for Prometheus

A window that raised an alarm is no part of what is usual, so that an alarm lasts as long as its cause; a person accepts it
(`accept`), or the gate does by promoting a team after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipelines.cluster.observe import look_points
from pipelines.monitoring.alarms import Judged, judge, num_figures
from pipelines.monitoring.episode_metrics import Window, window_of
from pipelines.run.champions import champion_version, history
from pipelines.run.run import Run
from stores.metrics import send
from stores.run_values import RunValue
from stores.types import SERVED

logger = logging.getLogger(__name__)

ITERATION, CHAMPION = "iteration", "champion"
"""Kinds of looks."""
NUM_EVENTS = 100


def look_at_iteration(run: Run, iteration: int, *, at: float) -> dict[str, Any]:
    """The iteration's training episodes, judged by those of earlier iterations; see `look`.

    The team changes with every iteration. A trend widens its own limits: what lies on a line is 1.7 standard deviations from
    the mean of what came before, never more. What the gate compares is not judged again here.
    """
    done = run.iteration(iteration)
    paid = {r.episode_id: r for r in run.traces.read_rewards(done.scored.rewards)}
    traces = (
        trace
        for trace in run.traces.read_traces(done.collected.traces)
        if not trace.variant and SERVED not in trace.outcome_metadata
    )
    window = window_of(traces, key=f"{ITERATION}/{iteration}", at=at, rewards=paid)
    return look(run, {ITERATION: window}, kind=ITERATION, key=window.key)


def look(
    run: Run, windows: Mapping[str, Window], *, kind: str, key: str, waiting: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Judges windows by source, each by its own history, and keeps them and what was found.

    Returns {"state": "sound" | "alarm" | "learning", "reason", "alarms": [{"source", "figure", "what", "try"}], "judged",
    "learning": names of figures, "waiting", "sources": {source: {figure: `Judged`}}}. `sound` says that every figure that was
    seen was judged; while one is still being learned, and none alarms, the state is `learning`.

    Args:
        kind: ITERATION or CHAMPION: whose latest look it is.
        key: names the look; the same one again replaces itself, and is judged by what was before it only.
        waiting: sources that have too few episodes to be judged now, and how many they have.
    """
    with run.journal.hold(run.run_id, "watch"):
        found = {source: _judged(run, source, window, windows) for source, window in windows.items()}
        for source, window in windows.items():
            out = tuple(j.figure for j in found[source] if j.state == "alarm")
            _keep(run, source, replace(window, alarms=out))
        told = _told(found, waiting or {}, key=key, at=max((w.at for w in windows.values()), default=time.time()))
        latest = run.journal.value(run.run_id, RunValue.WATCH_LATEST.of(kind))
        if latest is None or latest["at"] <= told["at"]:
            run.journal.put_value(run.run_id, RunValue.WATCH_LATEST.of(kind), told)
        for alarm in told["alarms"]:
            logger.warning("alarm: %s, %s: %s; try: %s", alarm["source"], alarm["figure"], alarm["what"], alarm["try"])
        _note(run, key, told["alarms"])
    return told


def judged_only(run: Run, windows: Mapping[str, Window]) -> dict[str, Any]:
    """`look` at a team that is not the champion, by the champion's history; nothing is kept."""
    found = {source: _judged(run, source, window, windows) for source, window in windows.items()}
    return _told(found, {}, key="", at=time.time())


def accept(run: Run, reason: str) -> dict[str, Any]:
    """What was seen until now is usual from now on; returns {"accepted_at", "reason"}."""
    kept = {"accepted_at": time.time(), "reason": reason}
    run.journal.put_value(run.run_id, RunValue.WATCH_ACCEPTED, kept)
    return kept


def kept_windows(run: Run, source: str) -> list[Window]:
    """The history of a source, oldest first, as it counts now: what was accepted, or promoted after, has no alarms."""
    accepted_at = max(
        [float((run.journal.value(run.run_id, RunValue.WATCH_ACCEPTED) or {}).get("accepted_at", 0.0))]
        + [float(entry["at"]) for entry in history(run)]
    )
    kept = (run.journal.value(run.run_id, RunValue.WATCH.of(source)) or {}).get("windows", [])
    windows = [Window.from_json(data) for data in kept]
    return [replace(w, alarms=()) if w.at <= accepted_at else w for w in windows]


def alarm_to_hold(run: Run) -> str:
    """What the latest iteration's look alarms of, where nobody has accepted it and `watch.on_alarm` is hold; else empty."""
    latest = run.journal.value(run.run_id, RunValue.WATCH_LATEST.of(ITERATION))
    if run.config.watch.on_alarm == "tell" or latest is None or latest["state"] != "alarm":
        return ""
    still = any(w.key == latest["key"] and w.alarms for w in kept_windows(run, ITERATION))
    return str(latest["reason"]) if still else ""


def look_metrics(told: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """For MLflow: `vitals/<figure>`, and `alarm/<figure>` 1 where it alarms and 0 where it is sound; `alarm/count`."""
    metrics = {"alarm/count": float(len(told["alarms"]))}
    for source, figures in told["sources"].items():
        name = f"{source}/" if len(told["sources"]) > 1 or source != ITERATION else ""
        for figure, found in figures.items():
            metrics[f"vitals/{name}{figure}"] = found["now"]
            if found["state"] != "learning":
                metrics[f"alarm/{name}{figure}"] = float(found["state"] == "alarm")
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def look_tags(told: Mapping[str, Any]) -> dict[str, str]:
    """For people in MLflow: `troupe.watch`, the state, and `troupe.alarm.<source>.<figure>` in words."""
    words = {f"troupe.alarm.{a['source']}.{a['figure']}": f"{a['what']}; try: {a['try']}" for a in told["alarms"]}
    return {"troupe.watch": f"{told['state']}: {told['reason']}", **words}


def tell_cluster(run: Run, told: Mapping[str, Any]) -> None:
    """Sends a look to Prometheus, once."""
    send(look_points(run.run_id, told), key=f"watch/{run.run_id}/{told['key']}")


def handed_on(told: Mapping[str, Any]) -> dict[str, Any]:
    """What of a look goes to whoever follows its job; the journal keeps all of it."""
    return {name: told[name] for name in ("state", "reason", "alarms", "judged", "learning", "waiting")}


def _judged(run: Run, source: str, window: Window, windows: Mapping[str, Window]) -> list[Judged]:
    config = run.config.watch
    alpha = (1 - config.confidence) / max(1, sum(num_figures(w) for w in windows.values()))
    earlier = [w for w in kept_windows(run, source) if w.key != window.key and w.at <= window.at]
    return judge(window, earlier, alpha=alpha, config=config)


def _keep(run: Run, source: str, window: Window) -> None:
    """The latest windows by their time, as they were found; accepting them is another matter."""
    name = RunValue.WATCH.of(source)
    kept = (run.journal.value(run.run_id, name) or {}).get("windows", [])
    others = [data for data in kept if data["key"] != window.key]
    windows = sorted([*others, window.to_json()], key=lambda data: float(data["at"]))
    run.journal.put_value(run.run_id, name, {"windows": windows[-run.config.watch.history :]})


def _told(found: Mapping[str, list[Judged]], waiting: Mapping[str, str], *, key: str, at: float) -> dict[str, Any]:
    each = [(source, judged) for source, figures in found.items() for judged in figures]
    alarms = [
        {"source": source, "figure": j.figure, "what": j.what, "try": j.try_}
        for source, j in each
        if j.state == "alarm"
    ]
    names = {
        state: [f"{s}/{j.figure}" for s, j in each if j.state == state] for state in ("sound", "alarm", "learning")
    }
    judged = [*names["alarm"], *names["sound"]]
    state = "alarm" if alarms else "learning" if names["learning"] or not each else "sound"
    reason = "; ".join(f"{a['source']}: {a['what']}" for a in alarms)
    return {
        "key": key,
        "at": at,
        "state": state,
        "reason": reason or f"{len(judged)} figures are usual, {len(names['learning'])} are still being learned",
        "alarms": alarms,
        "judged": judged,
        "learning": names["learning"],
        "waiting": dict(waiting),
        "sources": {source: {j.figure: _plain(j) for j in figures} for source, figures in found.items()},
    }


def _plain(judged: Judged) -> dict[str, Any]:
    names = ("state", "now", "usual", "low", "high", "num_windows")
    return {name: getattr(judged, name) for name in names}


def _note(run: Run, key: str, alarms: list[dict[str, str]]) -> None:
    """Events in the journal, the latest hundred; those of a look that is repeated once."""
    past = (run.journal.value(run.run_id, RunValue.WATCH_EVENTS) or {}).get("events", [])
    others = [event for event in past if event["key"] != key]
    team = champion_version(run)
    new = [{"key": key, "at": time.time(), "team_version": team, **alarm} for alarm in alarms]
    if new or len(others) < len(past):
        run.journal.put_value(run.run_id, RunValue.WATCH_EVENTS, {"events": [*others, *new][-NUM_EVENTS:]})
