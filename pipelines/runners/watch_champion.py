"""watch_champion: the champion on fixed tasks, and what it answered since the last time -> alarms, kept and shown."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from pipelines.episodes.collector import end_collectors
from pipelines.evaluation.played import play
from pipelines.monitoring.episode_metrics import Window, window_of
from pipelines.monitoring.served_windows import seen, served_windows
from pipelines.monitoring.watching import CHAMPION as LOOK
from pipelines.monitoring.watching import handed_on, judged_only, look, look_metrics, look_tags, tell_cluster
from pipelines.release.by_hand import check_groups
from pipelines.run.champions import champion_version
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.tasks.sources import digest
from stores.registry import CHAMPION
from stores.team import Team
from stores.types import Purpose

RESUMED_S = 86_400
"""A watching that was interrupted is gone on with if it began so recently; an older one is begun anew."""


def watch(run: Run, alias: str, sections: Sequence[str]) -> dict[str, Any]:
    """A registered team on the run's own sets of tasks, e.g. test and sentinel, and what the champion answered since the last
    watching, all judged by the champion's own history; the champion's result is kept and shown.

    Each watching plays every task; one that was interrupted keeps its episodes when it is repeated.

    Returns {"team_version", "accuracy", "sections", "state", "reason", "alarms", "judged", "learning", "waiting"}; `accuracy` is
    that on the test tasks, the rest is told at `watching.look`.
    """
    version, team = run.registry.load(run.team_name, int(alias) if alias.isdigit() else alias)
    check_groups(run, team, version)
    given = [section for section in sections if getattr(run.config.tasks, section, None) is not None]
    if not given:
        raise ValueError(f"none of tasks.{', tasks.'.join(sections)} is in the run config: give a set of tasks to play")
    found: dict[str, Any] = {}
    windows: dict[str, Window] = {}
    is_champion = alias == CHAMPION
    judged_as = version if is_champion else champion_version(run) or version
    watching, at = _watching(run, version), time.time()
    for section in given:
        found[section], windows[section] = _play_section(run, team, section, watching, at=at, judged_as=judged_as)
    if is_champion:
        served = served_windows(run, version, key=watching, at=at)
        windows |= served.windows
        told = look(run, windows, kind=LOOK, key=watching, waiting=served.waiting)
        seen(run, served)
        _show(run, version, told)
    else:
        told = judged_only(run, windows)
    run.journal.put_value(run.run_id, "watching", {"team_version": None})
    ref = {"team_version": version, "accuracy": found.get("test", {}).get("accuracy"), "sections": found}
    if is_champion:
        run.journal.put_value(run.run_id, "watched", ref)
    return ref | handed_on(told)


def _play_section(
    run: Run, team: Team, section: str, watching: str, *, at: float, judged_as: int
) -> tuple[dict[str, Any], Window]:
    """What is reported of a set of tasks, and its vitals."""
    watchdog = Watchdog(
        run,
        run.key(0, f"watch-{section}"),
        timeout_s=run.config.evaluate.stage_timeout_s,
        recover=end_collectors,
    )
    tasks = run.tasks(section)
    work = partial(play, run, dict(team.models), tasks, iteration=0, purpose=Purpose.AD_HOC)
    on_occasion = partial(work, occasion=f"watch/{watching}/{section}/{digest(tasks)}")
    played = watchdog.watch(on_occasion, alone=run.hold_engines())
    report = played.report(run)
    window = window_of(
        [*played.traces, *played.failed],
        key=watching,
        at=at,
        rewards={credit.episode_id: credit for credit in played.rewards},
        team_version=judged_as,
        fixed_tasks=digest(tasks),
    )
    return {key: report[key] for key in ("accuracy", "ci95", "num_tasks", "ok_share")}, window


def _show(run: Run, version: int, told: dict[str, Any]) -> None:
    """Where people look: the version's tags, curves and `watch.json` of the run in MLflow, Prometheus, the report."""
    from pipelines.report.record import write_reports

    tell_cluster(run, told)
    run.registry.show_watch(run.team_name, version, look_tags(told))
    run.tracker.log_metrics(look_metrics(told, prefix="watch/"), int(told["at"]), at=told["at"])
    run.tracker.log_json("watch.json", told)
    write_reports(run)


def _watching(run: Run, version: int) -> str:
    """Key of this watching: that of the team's last one where it was interrupted, else a new one."""
    last = run.journal.value(run.run_id, "watching")
    if last and last["team_version"] == version and last["began_at"] > time.time() - RESUMED_S:
        return str(last["key"])
    key = uuid.uuid4().hex[:12]
    run.journal.put_value(run.run_id, "watching", {"team_version": version, "key": key, "began_at": time.time()})
    return key
