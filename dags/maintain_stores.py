"""maintain_stores: small files merged, old versions and orphaned weights removed, on a schedule (`schedule.maintain`).

maintain: troupe maintain --run RUN
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

from dags.ray_job import RayJobOperator
from dags.run_configs import ScheduledRun, find_runs
from dags.timing import default_args, start_of, timetable


def maintain_stores(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    settings, name = run.config.schedule, run.config.run
    assert settings is not None, "find_runs gives scheduled runs only"
    with DAG(
        dag_id=f"maintain_stores__{name}",
        description=f"Compaction, retention and orphans of {name}",
        doc_md=f"Run config: `{run.path}`.\n\n{__doc__}",
        schedule=timetable(settings.maintain, settings),
        start_date=start_of(settings),
        catchup=False,
        max_active_runs=1,
        tags=["troupe", name],
        params={
            "dry_run": Param(False, type="boolean", title="Dry run", description="Say what would go, change nothing")
        },
        default_args=default_args(settings),
    ) as dag:
        RayJobOperator(
            task_id="maintain",
            command="maintain",
            run_config=run.json,
            folder=run.folder,
            arguments=["--run", name, "{{ '--dry-run' if params.dry_run else '' }}"],
        )
    return dag


for _run in find_runs()[0]:
    globals()[f"maintain_stores__{_run.config.run}"] = maintain_stores(_run)
