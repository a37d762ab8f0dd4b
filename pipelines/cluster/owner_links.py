"""owner_links: the environment of this process -> who works here, and the pages that show it: Airflow's DAG run, Ray's jobs.

TROUPE_DAG_RUN_URL         page of the DAG run that does this iteration (set by whoever submits the job)
TROUPE_RAY_DASHBOARD_URL   Ray's dashboard as a browser reaches it (same)
RAY_JOB_CONFIG_JSON_ENV_VAR   set by Ray: says which submitted job this process is
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping

from stores.journal.journal import StageRow

JOB_OWNER = "Ray job "


def stage_owner() -> str:
    """Names who does a stage, as the journal shows it: the submitted Ray job, or host and pid."""
    job = submission_id()
    return f"{JOB_OWNER}{job}" if job else f"{socket.gethostname()}:{os.getpid()}"


def submission_id() -> str:
    """Id under which this process was submitted to Ray as a job; empty where it was not."""
    text = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
    metadata = (json.loads(text).get("metadata") or {}) if text else {}
    return str(metadata.get("job_submission_id", ""))


def owner_links(rows: Iterable[StageRow]) -> dict[str, str]:
    """Name -> URL (or id, where no dashboard is known) of the DAG run and of the job that did each stage of `rows`."""
    links = {"dag_run": os.environ.get("TROUPE_DAG_RUN_URL", "")}
    for row in rows:
        if row.owner.startswith(JOB_OWNER):
            stage = f"{row.stage}/{row.model_group}" if row.model_group else row.stage
            links[f"ray_job/{stage}"] = _job_url(row.owner.removeprefix(JOB_OWNER))
    return {name: link for name, link in links.items() if link}


def as_markdown(links: Mapping[str, str]) -> str:
    """A list of links for people; a bare id stays text."""
    return "\n".join(
        f"- [{name}]({link})" if link.startswith(("http://", "https://")) else f"- {name}: `{link}`"
        for name, link in links.items()
    )


def _job_url(job: str) -> str:
    dashboard = os.environ.get("TROUPE_RAY_DASHBOARD_URL", "").rstrip("/")
    return f"{dashboard}/#/jobs/{job}" if dashboard else job
