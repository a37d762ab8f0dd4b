"""invalid_runs: no DAG; the import error that names file, key and fix of every run config that is none.

A file of its own: an import error marks every DAG of its file stale, and one bad config must not hide the others.
Airflow reads it as a DAG file.
"""

from __future__ import annotations

from dags.run_configs import find_runs

if _errors := find_runs()[1]:
    raise ValueError("\n".join(_errors))
