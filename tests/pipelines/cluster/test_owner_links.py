"""Links from the environment and the journal to Airflow and Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.cluster.owner_links import as_markdown, owner_links, stage_owner, submission_id
from stores.journal.journal import Journal, StageKey

pytestmark = pytest.mark.fast


def test_a_submitted_job_owns_its_stages_by_its_submission_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert submission_id() == "" and ":" in stage_owner()
    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    journal.once(StageKey("r", 3, "score"), lambda lease: {}, owner=stage_owner())

    config = {"runtime_env": {}, "metadata": {"job_submission_id": "r-3-train-a-1"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(config))
    journal.once(StageKey("r", 3, "train", "a"), lambda lease: {}, owner=stage_owner())
    journal.once(StageKey("r", 4, "collect"), lambda lease: {}, owner=stage_owner())

    monkeypatch.delenv("TROUPE_DAG_RUN_URL", raising=False)
    monkeypatch.delenv("TROUPE_RAY_DASHBOARD_URL", raising=False)
    assert owner_links(journal.stages("r", 3)) == {"ray_job/train/a": "r-3-train-a-1"}

    monkeypatch.setenv("TROUPE_DAG_RUN_URL", "http://airflow/dags/t/runs/7")
    monkeypatch.setenv("TROUPE_RAY_DASHBOARD_URL", "http://ray:8265/")
    found = owner_links(journal.stages("r", 3))
    assert found == {
        "dag_run": "http://airflow/dags/t/runs/7",
        "ray_job/train/a": "http://ray:8265/#/jobs/r-3-train-a-1",
    }
    assert as_markdown(found | {"other": "id-1"}).splitlines() == [
        "- [dag_run](http://airflow/dags/t/runs/7)",
        "- [ray_job/train/a](http://ray:8265/#/jobs/r-3-train-a-1)",
        "- other: `id-1`",
    ]
