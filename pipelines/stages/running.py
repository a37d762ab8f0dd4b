"""running: a stage of an iteration -> its result, doing the work at most once.

The local runner, `troupe stage`, a Ray job and an Airflow task all come through `run_stage`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.cluster.observe import send_champion, send_iteration, send_stage_points
from pipelines.run.champions import champion_version
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.stages.table import Stage, StageCall, stage_named
from stores.journal.journal import Lease
from stores.journal.stage_results import StageResult

if TYPE_CHECKING:
    from pipelines.episodes.sampling import Progress

logger = logging.getLogger(__name__)


def run_stage(
    run: Run, name: str, iteration: int, *, model_group: str = "", progress: Progress | None = None
) -> StageResult:
    """Does a stage unless it is done, and returns what the journal holds of it.

    Raises ValueError for an unknown stage or model group, or a stage whose predecessors are not done.
    """
    stage = stage_named(name)
    stage.check_model_group(run.config, model_group)
    watchdog = Watchdog(
        run,
        run.key(iteration, name, model_group),
        timeout_s=stage.timeout_s(run.config, model_group),
        recover=partial(stage.recover, run, model_group),
    )

    def work(lease: Lease) -> dict[str, Any]:
        call = StageCall(
            run=run,
            iteration=iteration,
            model_group=model_group,
            lease=lease,
            progress=watchdog.reporting(progress),
        )
        return stage.work(call).to_json()

    try:
        return stage.parse(watchdog.once(_logged(work), alone=_alone(run, stage)))
    finally:
        _send_points(run, iteration)


def _send_points(run: Run, iteration: int) -> None:
    """Sends what Prometheus shows of the run; a stage that never connects to Ray (score, promote) leaves it to the next one."""
    last = iteration + run.config.loop.max_lag  # so far iterations may overlap
    rows = [row for k in range(iteration - 1, last + 1) for row in run.journal.stages(run.run_id, k)]
    send_stage_points(rows)
    send_iteration(rows)
    if (champion := champion_version(run)) is not None:
        send_champion(run.run_id, champion)


def _alone(run: Run, stage: Stage) -> AbstractContextManager[Lease] | None:
    """Returns what keeps others off the engines during a stage; None for a stage that leaves them alone."""
    if stage.changes_engines:
        return run.hold_engines()
    if stage.name == "train" and run.config.pool == "shared":
        # Engines sleep meanwhile, and model groups train one after another: the last one waits for all the others.
        return run.hold_engines(wait_s=sum(stage.timeout_s(run.config, group) for group in run.config.train_tasks))
    return None


def _logged(work: Callable[[Lease], dict[str, Any]]) -> Callable[[Lease], dict[str, Any]]:
    def logged(lease: Lease) -> dict[str, Any]:
        began = time.monotonic()
        logger.info("begins, attempt %d", lease.token)
        try:
            ref = work(lease)
        except BaseException as error:  # its message may quote a prompt; it is in the journal
            level = logging.INFO if isinstance(error, KeyboardInterrupt) else logging.ERROR
            logger.log(level, "failed after %.1f s: %s", time.monotonic() - began, type(error).__name__)
            raise
        logger.info("done in %.1f s", time.monotonic() - began)
        return ref

    return logged
