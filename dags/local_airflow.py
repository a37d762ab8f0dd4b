"""local_airflow: settings of `make airflow` that Airflow takes as Python objects only."""

from __future__ import annotations

SQLITE = {"timeout": 60}
"""Seconds that one writer waits for another before its request fails; SQLite's own are 5."""
