"""team_dag: a run config and the kind of a DAG -> its frame, the same for every kind: name, times, retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from inspect import cleandoc
from typing import Any
from zoneinfo import ZoneInfo

from airflow.sdk import DAG, Asset, AssetAll, AssetOrTimeSchedule, CronTriggerTimetable, Param

from dags.ray_job import RayJobOperator
from dags.run_configs import ScheduledRun
from pipelines.stages.table import STAGES
from stores.journal.stage_results import Collected, Evaluated, Synced, Trained

NO_TIMES = dict.fromkeys(("@once", "@continuous"), date(2026, 1, 1))
"""Presets without times, and the date with which they begin."""
LATE = timedelta(minutes=5)
"""How long ago the time may be at which a DAG still runs that Airflow sees for the first time."""
POOL_WEIGHTS = {Evaluated.STAGE: 3, Collected.STAGE: 2, Synced.STAGE: 1, Trained.STAGE: 1}
"""Stages that use engines or trainers; the highest weight goes first."""


def team_dag(
    run: ScheduledRun,
    kind: str,
    *,
    what: str,
    doc: str,
    params: Mapping[str, Param],
    cron: str = "",
    on_assets: Sequence[str] = (),
    max_active_runs: int = 1,
) -> DAG:
    """An empty DAG `<kind>__<run>`; a DAG run that is one too many waits for those before.

    Args:
        what: its description in one line; doc: the full description, Markdown; a docstring as it is.
        cron: its times, as in the `schedule` section; empty: it runs by hand only.
        on_assets: it also runs whenever all of these were updated.
        max_active_runs: how many of its DAG runs are under way at a time.
    """
    settings, name = run.settings, run.config.run
    return DAG(
        dag_id=f"{kind}__{name}",
        description=what,
        doc_md=f"Run config: `{run.path}`.\n\n{cleandoc(doc)}",
        schedule=_timetable(cron, settings.timezone, on_assets),
        start_date=_start(run, cron),
        catchup=False,
        max_active_runs=max_active_runs,
        tags=["troupe", name],
        params=dict(params),
        default_args={"retries": settings.retries, "retry_delay": timedelta(seconds=settings.retry_delay_s)},
    )


def team_job(run: ScheduledRun, task_id: str, command: str = "", **kwargs: Any) -> RayJobOperator:
    """A task that runs `troupe <command>`, by default the one that is called as the task."""
    return RayJobOperator(task_id=task_id, command=command or task_id, run_config=run.json, folder=run.folder, **kwargs)


def stage_job(run: ScheduledRun, task_id: str, *, stage: str = "", **kwargs: Any) -> RayJobOperator:
    """A task that runs one stage, by default the one that is called as the task; KeyError for an unknown one."""
    name = STAGES[stage or task_id].name
    return team_job(run, task_id, f"stage {name}", **stage_pool(run, name), **kwargs)


def stage_pool(run: ScheduledRun, stage: str) -> dict[str, Any]:
    """Airflow's pool of a stage and its weight there: an iteration that is further goes first."""
    pool = run.settings.trainer_pool if stage == Trained.STAGE else run.settings.engine_pool
    if not pool or stage not in POOL_WEIGHTS:
        return {}
    return {"pool": pool, "priority_weight": POOL_WEIGHTS[stage], "weight_rule": "absolute"}


def team_asset(run: ScheduledRun) -> Asset:
    """The asset `troupe://team/<run>`, which is updated whenever the champion changes; other DAGs are scheduled on it."""
    return Asset(name=f"team/{run.config.run}", uri=f"troupe://team/{run.config.run}")


def _start(run: ScheduledRun, cron: str) -> datetime | None:
    """When its times begin; None: when Airflow first sees it. After a date that is over, Airflow makes up for the latest time at once."""
    day = run.settings.start or NO_TIMES.get(cron)
    return datetime.combine(day, datetime.min.time(), ZoneInfo(run.settings.timezone)) if day else None


def _timetable(cron: str, timezone: str, on_assets: Sequence[str]) -> Any:
    """What a DAG takes as `schedule`: a time, a preset, assets, either of them, or None (only by hand)."""
    is_timed = cron and cron not in NO_TIMES
    timed = CronTriggerTimetable(cron, timezone=timezone, run_immediately=LATE) if is_timed else None
    # By URI: Airflow takes assets of one URI and two names for two, and others name theirs as they like.
    assets = AssetAll(*(Asset.ref(uri=uri) for uri in on_assets)) if on_assets else None
    if timed and assets:
        return AssetOrTimeSchedule(timetable=timed, assets=assets)
    return timed or assets or cron or None
