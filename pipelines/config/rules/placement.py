"""placement: rules about when and where the stages of a run run."""

from __future__ import annotations

from pathlib import Path

from pipelines.config.run_sections import RunSections


def new_tasks_can_be_seen(config: RunSections) -> None:
    """What triggers an iteration can be checked: on a schedule, in a file."""
    schedule = config.schedule
    if schedule is None or not (schedule.on_new_tasks or schedule.min_fresh_traces):
        return
    if not (schedule.cron or schedule.on_assets):
        key = "on_new_tasks" if schedule.on_new_tasks else "min_fresh_traces"
        raise ValueError(f"schedule.{key} needs schedule.cron, which says how often to look (or on_assets)")
    if schedule.on_new_tasks and not config.tasks.train.path:
        raise ValueError(
            "schedule.on_new_tasks needs tasks.train.path: what a generator gives never changes; drop it or name a file"
        )


def uploaded_runs_are_stored_elsewhere(config: RunSections) -> None:
    """A run whose working directory is a copy stores its results outside of it."""
    root = config.storage.root
    if config.cluster.working_dir and "://" not in root and not Path(root).is_absolute():
        raise ValueError(
            f"storage.root = {root!r} is relative, and cluster.working_dir is a copy that ends with the job: "
            "give storage.root as an absolute path or URI that every machine of the cluster sees"
        )
