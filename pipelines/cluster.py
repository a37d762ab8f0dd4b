"""cluster: the Ray cluster that stages run on: the one named, or a local head for the life of this process."""

from __future__ import annotations

import logging
import os
import time
from typing import Any


def connect(address: str = "") -> None:
    """Connects to `address` (or RAY_ADDRESS); without either, starts a local head. Once connected, does nothing.

    Raises ValueError where the address does not answer.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "worker processes have been started")
    import ray

    if ray.is_initialized():
        return
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    address = address or os.environ.get("RAY_ADDRESS", "")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if not address:
        ray.init(address="local", include_dashboard=True, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster answers at {address!r} ({error}): start one or drop --address") from None


def memory_deaths(within_s: float) -> list[str]:
    """Ray's words on each process that it ended for want of memory in the last `within_s` seconds, latest last."""
    from ray.util.state import list_workers
    from ray.util.state.exception import RayStateApiException

    try:
        rows: list[Any] = list_workers(
            filters=[("exit_type", "=", "NODE_OUT_OF_MEMORY")],
            detail=True,
            limit=1000,
            timeout=5,
            raise_on_missing_output=False,
        )
    except (RayStateApiException, OSError, ValueError):  # no dashboard, or it is down: no answer is no reason to fail
        return []
    since = (time.time() - within_s) * 1000
    recent = sorted((row.end_time_ms, row.exit_detail) for row in rows if row.end_time_ms >= since)
    return [detail for _, detail in recent]


def disconnect() -> None:
    """Leaves the cluster; ends it if `connect` started it."""
    import ray

    ray.shutdown()
