"""watching: windows of one moment + the history in the journal -> a check: which figures alarm, are sound or have too little history.

    window per source ── check_window, by that source's history ──> check ──> journal (history, latest checks, events)
                                                                 └──> a warning in the log, points for Prometheus

A window that raised an alarm is no part of what is usual, so that an alarm lasts as long as its cause; a person accepts it
(`accept`), or a promotion after it does. A rollback, or a team that is sent back, accepts nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipelines.cluster.observe import Observer, tell
from pipelines.extensions.watch.alarms import CheckedFigure, check_window, num_figures
from pipelines.extensions.watch.config import watch_config
from pipelines.extensions.watch.episode_metrics import Window, window_of
from pipelines.run.champions import champion_version, history
from pipelines.run.run import Run
from stores.journal.run_values import RunValue
from stores.types import SERVED

logger = logging.getLogger(__name__)

ITERATION, CHAMPION = "iteration", "champion"
"""Kinds of checks."""
NUM_EVENTS = 100


def check_iteration(run: Run, iteration: int, *, at: float) -> dict[str, Any]:
    """Checks the iteration's training episodes against those of earlier iterations; see `check_windows`.

    The team changes with every iteration. A trend widens its own limits: what lies on a line is 1.7 standard deviations from
    the mean of what came before, never more. What the gate compares is not checked again here. An iteration on the traces of
    another run has no figures: another team played them.
    """
    done = run.iteration(iteration)
    paid = {r.episode_id: r for r in run.traces.read_rewards(done.scored.rewards)}
    traces = (
        trace
        for trace in run.traces.read_traces(done.collected.traces)
        if not trace.variant and SERVED not in trace.outcome_metadata
    )
    own = traces if done.collected.source is None else ()
    window = window_of(own, key=f"{ITERATION}/{iteration}", at=at, rewards=paid, figures=run.figures)
    return check_windows(run, {ITERATION: window}, kind=ITERATION, key=window.key)


def check_windows(
    run: Run, windows: Mapping[str, Window], *, kind: str, key: str, waiting: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Checks windows by source, each by its own history, and keeps them and the result.

    Returns {"state": "sound" | "alarm" | "learning", "reason", "alarms": [{"source", "figure", "what", "try"}], "judged",
    "learning": names of figures, "waiting", "sources": {source: {figure: `CheckedFigure`}}}. `sound` says that every figure
    was checked; while one is still being learned, and none alarms, the state is `learning`.

    Args:
        kind: ITERATION or CHAMPION: whose latest check it is.
        key: names the check; the same one again replaces itself, and is compared with what was before it only.
        waiting: sources that have too few episodes to be checked now, and how many they have.
    """
    with run.journal.hold(run.run_id, "watch"):
        since = _accepted_at(run)
        results = {source: _checked(run, source, window, windows, since=since) for source, window in windows.items()}
        for source, window in windows.items():
            alarmed = tuple(j.figure for j in results[source] if j.state == "alarm")
            _keep(run, source, replace(window, alarms=alarmed))
        check = _check_of(
            results, waiting or {}, key=key, at=max((w.at for w in windows.values()), default=time.time())
        )
        latest = run.journal.value(run.run_id, RunValue.WATCH_LATEST.of(kind))
        if latest is None or latest["at"] <= check["at"]:
            run.journal.put_value(run.run_id, RunValue.WATCH_LATEST.of(kind), check)
        for alarm in check["alarms"]:
            logger.warning("alarm: %s, %s: %s; try: %s", alarm["source"], alarm["figure"], alarm["what"], alarm["try"])
        _note(run, key, check["alarms"])
    return check


def check_other_team(run: Run, windows: Mapping[str, Window]) -> dict[str, Any]:
    """Checks a team that is not the champion by the champion's history; nothing is kept."""
    results = {source: _checked(run, source, window, windows) for source, window in windows.items()}
    return _check_of(results, {}, key="", at=time.time())


def accept(run: Run, reason: str) -> dict[str, Any]:
    """Accepts what was seen until now as usual from now on; returns {"accepted_at", "reason"}."""
    acceptance = {"accepted_at": time.time(), "reason": reason}
    run.journal.put_value(run.run_id, RunValue.WATCH_ACCEPTED, acceptance)
    return acceptance


def kept_windows(run: Run, source: str) -> list[Window]:
    """Returns the history of a source, oldest first, as it counts now: what was accepted, or followed by a promotion, has no alarms."""
    accepted_at = _accepted_at(run)
    stored = (run.journal.value(run.run_id, RunValue.WATCH.of(source)) or {}).get("windows", [])
    windows = [Window.from_json(data) for data in stored]
    windows = [replace(w, alarms=()) if w.at <= accepted_at else w for w in windows]
    usual = _first_and_latest([w for w in windows if not w.alarms], watch_config(run.config).history, since=accepted_at)
    return [w for w in windows if w.alarms or w.key in usual]


def _accepted_at(run: Run) -> float:
    """Returns when what was seen was last accepted as usual, by a person or by a promotion. A rollback is no promotion: it answers an alarm,
    and says nothing about what is usual."""
    by_hand = float((run.journal.value(run.run_id, RunValue.WATCH_ACCEPTED) or {}).get("accepted_at", 0.0))
    return max([by_hand, *(float(entry["at"]) for entry in history(run) if not entry.get("is_rollback"))])


def _first_and_latest(usual: Sequence[Window], history: int, *, since: float) -> set[str]:
    """Returns the keys of the windows that are kept: the latest, and the present team's first, by which a lasting change is found."""
    version = usual[-1].team_version if usual else None
    first = [w.key for w in usual if w.at > since and version is not None and w.team_version == version]
    return {*first[:history], *(w.key for w in usual[-history:])}


def held(run: Run) -> list[str]:
    """Returns why the schedule must wait, if it must: an alarm of the latest iteration that nobody has accepted, where `watch.on_alarm` is fail."""
    latest = run.journal.value(run.run_id, RunValue.WATCH_LATEST.of(ITERATION))
    if watch_config(run.config).on_alarm == "warn" or latest is None or latest["state"] != "alarm":
        return []
    if not any(w.key == latest["key"] and w.alarms for w in kept_windows(run, ITERATION)):
        return []
    return [
        f"the last iteration raised an alarm (watch.on_alarm: fail): {latest['reason']}. Look at the report, then accept it (troupe "
        "watch --accept REASON) or trigger the DAG with `force`"
    ]


def check_metrics(check: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Returns the metrics for MLflow: `episode_metrics/<figure>`, and `alarm/<figure>` 1 where it alarms and 0 where it
    is sound; `alarm/count`."""
    metrics = {"alarm/count": float(len(check["alarms"]))}
    for source, figures in check["sources"].items():
        name = f"{source}/" if len(check["sources"]) > 1 or source != ITERATION else ""
        for figure, result in figures.items():
            if result["now"] is not None:
                metrics[f"episode_metrics/{name}{figure}"] = result["now"]
            if result["state"] != "learning":
                metrics[f"alarm/{name}{figure}"] = float(result["state"] == "alarm")
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def check_tags(check: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tags for MLflow: `troupe.watch`, the state, and `troupe.alarm.<source>.<figure>` in words."""
    words = {f"troupe.alarm.{a['source']}.{a['figure']}": f"{a['what']}; try: {a['try']}" for a in check["alarms"]}
    return {"troupe.watch": f"{check['state']}: {check['reason']}", **words}


def send_check(run: Run, check: Mapping[str, Any]) -> None:
    """Tells observers of a check."""
    tell(Observer.check, run.run_id, check)


def check_summary(check: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a check that goes to whoever follows its job; the journal keeps all of it."""
    return {name: check[name] for name in ("state", "reason", "alarms", "judged", "learning", "waiting")}


def _checked(
    run: Run, source: str, window: Window, windows: Mapping[str, Window], *, since: float = math.inf
) -> list[CheckedFigure]:
    config = watch_config(run.config)
    alpha = (1 - config.confidence) / max(1, sum(num_figures(w) for w in windows.values()))
    earlier = [w for w in kept_windows(run, source) if w.key != window.key and w.at <= window.at]
    return check_window(window, earlier, alpha=alpha, config=config, figures=run.figures, since=since)


def _keep(run: Run, source: str, window: Window) -> None:
    """Keeps the latest windows by their time, with their alarms, accepted or not, and the first ones of the present team.

    Those with alarms are counted apart: otherwise an alarm that lasts would push what was usual out, and become the norm.
    """
    name = RunValue.WATCH.of(source)
    stored = (run.journal.value(run.run_id, name) or {}).get("windows", [])
    others = [kept for data in stored if (kept := Window.from_json(data)).key != window.key]
    windows = sorted([*others, window], key=lambda w: w.at)
    history = watch_config(run.config).history
    usual, alarming = ([w for w in windows if bool(w.alarms) == alarms] for alarms in (False, True))
    keys = _first_and_latest(usual, history, since=_accepted_at(run)) | {w.key for w in alarming[-history:]}
    run.journal.put_value(run.run_id, name, {"windows": [w.to_json() for w in windows if w.key in keys]})


def _check_of(
    results: Mapping[str, list[CheckedFigure]], waiting: Mapping[str, str], *, key: str, at: float
) -> dict[str, Any]:
    each = [(source, judged) for source, figures in results.items() for judged in figures]
    alarms = [
        {"source": source, "figure": j.figure, "what": j.what, "try": j.of.try_}
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
        "sources": {source: {j.figure: _plain(j) for j in figures} for source, figures in results.items()},
    }


def _plain(figure: CheckedFigure) -> dict[str, Any]:
    names = ("state", "now", "usual", "low", "high", "num_windows", "num_now")
    return {name: getattr(figure, name) for name in names}


def _note(run: Run, key: str, alarms: list[dict[str, str]]) -> None:
    """Keeps alarms as events in the journal, the latest hundred; those of a repeated check once."""
    past = (run.journal.value(run.run_id, RunValue.WATCH_EVENTS) or {}).get("events", [])
    others = [event for event in past if event["key"] != key]
    team = champion_version(run)
    new = [{"key": key, "at": time.time(), "team_version": team, **alarm} for alarm in alarms]
    if new or len(others) < len(past):
        run.journal.put_value(run.run_id, RunValue.WATCH_EVENTS, {"events": [*others, *new][-NUM_EVENTS:]})
