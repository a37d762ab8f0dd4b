"""champion: the champion on fixed tasks, and its answers since the last check -> alarms, kept and shown."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from pipelines.episodes.collector import end_collectors
from pipelines.evaluation.played import play_team
from pipelines.extensions.watch.episode_metrics import Window, window_of
from pipelines.extensions.watch.served_windows import mark_checked, served_windows
from pipelines.extensions.watch.watching import CHAMPION as OF_CHAMPION
from pipelines.extensions.watch.watching import (
    check_metrics,
    check_other_team,
    check_summary,
    check_tags,
    check_windows,
    send_check,
)
from pipelines.release.by_hand import check_groups
from pipelines.report.record import write_reports
from pipelines.run.champions import champion_version
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.tasks.sources import digest
from pipelines.tasks.splits import SECTIONS
from stores.journal.run_values import RunValue
from stores.registry.registry import CHAMPION
from stores.registry.team import Team
from stores.types import Purpose

DEFAULT_SECTIONS = ("test", "sentinel")
RESUMED_S = 86_400
"""A check that was interrupted is continued if it began so recently; an older one is begun anew."""


def watch(run: Run, alias: str, sections: Sequence[str] = ()) -> dict[str, Any]:
    """Checks a registered team on the run's own sets of tasks, and the champion's answers since then.

    Figures are compared with the champion's own history; the champion's result is kept and shown. Each check plays every
    task; one that was interrupted keeps its episodes when it is repeated.

    Returns {"team_version", "accuracy", "sections", "state", "reason", "alarms", "judged", "learning", "waiting"}; `accuracy` is
    that on the test tasks, the rest is described at `watching.check_windows`.

    Raises ValueError for a set of tasks that the run does not have.

    Args: sections: names of sets of tasks; none: test and sentinel, as far as the run has them.
    """
    present = _sets_to_play(run, sections)
    version, team = run.load_team(alias)
    check_groups(run, team, version)
    figures: dict[str, Any] = {}
    windows: dict[str, Window] = {}
    is_champion = alias == CHAMPION
    judged_as = version if is_champion else champion_version(run) or version
    key, at = _key_of_check(run, version), time.time()
    for section in present:
        figures[section], windows[section] = _play_section(run, team, section, key, at=at, judged_as=judged_as)
    if is_champion:
        served = served_windows(run, version, key=key, at=at)
        windows |= served.windows
        result = check_windows(run, windows, kind=OF_CHAMPION, key=key, waiting=served.waiting)
        mark_checked(run, served)
        _show(run, version, result)
    else:
        result = check_other_team(run, windows)
    run.journal.put_value(run.run_id, RunValue.WATCHING, {"team_version": None})
    ref = {"team_version": version, "accuracy": figures.get("test", {}).get("accuracy"), "sections": figures}
    if is_champion:
        run.journal.put_value(run.run_id, RunValue.WATCHED, ref)
    return ref | check_summary(result)


def _sets_to_play(run: Run, named: Sequence[str]) -> list[str]:
    has = [section for section in SECTIONS if getattr(run.config.tasks, section) is not None]
    if unknown := [section for section in named if section not in has]:
        raise ValueError(f"the run config has no tasks.{unknown[0]}; there are tasks.{', tasks.'.join(has)}")
    present = list(named) or [section for section in DEFAULT_SECTIONS if section in has]
    if not present:
        raise ValueError(
            f"none of tasks.{', tasks.'.join(DEFAULT_SECTIONS)} is in the run config: give a set of tasks to play"
        )
    return present


def _play_section(
    run: Run, team: Team, section: str, key: str, *, at: float, judged_as: int
) -> tuple[dict[str, Any], Window]:
    """Plays a set of tasks; returns the figures that are reported of it and its window."""
    watchdog = Watchdog.of_section(run, f"watch-{section}", "evaluate", recover=end_collectors)
    tasks = run.tasks(section)
    work = partial(play_team, run, dict(team.models), tasks, iteration=0, purpose=Purpose.AD_HOC)
    on_occasion = partial(work, occasion=f"watch/{key}/{section}/{digest(tasks)}")
    played = watchdog.watch(on_occasion, alone=run.hold_engines())
    score = played.score(run)
    window = window_of(
        [*played.traces, *played.failed],
        key=key,
        at=at,
        rewards={credit.episode_id: credit for credit in played.rewards},
        team_version=judged_as,
        fixed_tasks=digest(tasks),
        figures=run.figures,
    )
    figures = {
        "accuracy": score.accuracy,
        "ci95": list(score.ci95),
        "num_tasks": score.num_tasks,
        "ok_share": score.ok_share,
    }
    return figures, window


def _show(run: Run, version: int, result: dict[str, Any]) -> None:
    """Shows a check in MLflow (tags of the version, curves and `watch.json` of the run), Prometheus and the report."""
    send_check(run, result)
    run.registry.show_watch(run.team_name, version, check_tags(result))
    run.tracker.log_metrics(check_metrics(result, prefix="watch/"), int(result["at"]), at=result["at"])
    run.tracker.log_dict("watch.json", result)
    write_reports(run)


def _key_of_check(run: Run, version: int) -> str:
    """Key of this check: that of the team's last one if it was interrupted, else a new one."""
    last = run.journal.value(run.run_id, RunValue.WATCHING)
    if last and last["team_version"] == version and last["began_at"] > time.time() - RESUMED_S:
        return str(last["key"])
    key = uuid.uuid4().hex[:12]
    begun = {"team_version": version, "key": key, "began_at": time.time()}
    run.journal.put_value(run.run_id, RunValue.WATCHING, begun)
    return key
