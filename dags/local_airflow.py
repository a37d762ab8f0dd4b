"""local_airflow: settings of `make airflow` that Airflow takes as Python objects only."""

from __future__ import annotations

SQLITE = {"timeout": 60}
"""Seconds that one writer waits for another. After SQLite's own 5 a request fails with "database is locked", and on two cores
that train, a commit takes longer now and then."""
