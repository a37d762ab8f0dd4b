"""maintain_stores: small files merged, old versions and orphaned weights removed, on a schedule (`schedule.maintain`).

maintain: troupe maintain --run RUN
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

from dags.run_configs import ScheduledRun, find_runs
from dags.team_dag import team_dag, team_job


def maintain_stores(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    name = run.config.run
    with team_dag(
        run,
        "maintain_stores",
        what=f"Compaction, retention and orphans of {name}",
        doc=str(__doc__),
        cron=run.settings.maintain,
        params={
            "dry_run": Param(False, type="boolean", title="Dry run", description="Say what would go, change nothing")
        },
    ) as dag:
        team_job(run, "maintain", arguments=["--run", name, "{{ '--dry-run' if params.dry_run else '' }}"])
    return dag


for _run in find_runs()[0]:
    globals()[f"maintain_stores__{_run.config.run}"] = maintain_stores(_run)
