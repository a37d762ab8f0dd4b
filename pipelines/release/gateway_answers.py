"""gateway_answers: the gateway's counts of answers and their figures, per team version."""

from __future__ import annotations

from pipelines.run.run import Run
from serve_apps.gateway.peer_replicas import Status
from serve_apps.gateway.routes import gateway_statuses


def gateway_answers(run: Run) -> list[Status]:
    """Statuses of all gateway replicas, which say what answers were like; none where one is too busy to answer: a look that is missed, not the end of the watch."""
    try:
        return gateway_statuses(run.config.gateway)
    except TimeoutError:
        return []
