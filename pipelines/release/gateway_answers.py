"""gateway_answers: the gateway's counts of answers and their figures, per team version."""

from __future__ import annotations

from pipelines.run.run import Run
from serve_apps.gateway.routes import gateway_statuses
from serve_apps.gateway.traffic.peer_replicas import Status


def gateway_answers(run: Run) -> list[Status]:
    """Returns the statuses of all gateway replicas with the figures of their answers.

    The list is empty where a replica is too busy to answer: one check is missed, which does not end the watch.
    """
    try:
        return gateway_statuses(run.config.gateway)
    except TimeoutError:
        return []
