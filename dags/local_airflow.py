"""local_airflow: what every process of an Airflow imports when it starts, so that no task has to.

A task's process is a copy of the scheduler's worker (LocalExecutor): what is imported there is not imported again for each task,
which saves 0.3 s twice per deferred task. `make airflow` imports this file in `airflow_local_settings.py`. After an update
of Troupe, restart Airflow.
"""

from __future__ import annotations

import pipelines.cluster.jobs
import pipelines.config.run_config
import pipelines.stages.table  # noqa: F401

SQLITE = {"timeout": 60}
"""Seconds that one writer waits for another before its request fails; SQLite's own are 5."""
