"""timing: the `schedule` section of a run config -> when Airflow starts a DAG, and how it repeats its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from airflow.sdk import Asset, AssetAll, AssetOrTimeSchedule, CronTriggerTimetable

from pipelines.schedule import ScheduleConfig


def timetable(cron: str, settings: ScheduleConfig, on_assets: Sequence[str] = ()) -> Any:
    """What a DAG takes as `schedule`: a time, a preset, assets, either of them, or None (only by hand)."""
    timed = CronTriggerTimetable(cron, timezone=settings.timezone) if cron and not cron.startswith("@") else None
    assets = AssetAll(*(Asset(uri) for uri in on_assets)) if on_assets else None
    if timed and assets:
        return AssetOrTimeSchedule(timetable=timed, assets=assets)
    return timed or assets or cron or None


def start_of(settings: ScheduleConfig) -> datetime:
    """The beginning of the first day."""
    return datetime.combine(settings.start, datetime.min.time(), ZoneInfo(settings.timezone))


def default_args(settings: ScheduleConfig) -> dict[str, Any]:
    """How often and when a task is repeated that failed for a reason that may pass."""
    return {"retries": settings.retries, "retry_delay": timedelta(seconds=settings.retry_delay_s)}
