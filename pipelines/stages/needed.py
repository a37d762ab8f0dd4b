"""needed: with `loop.max_lag`, a stage that is done by itself -> the stages of earlier iterations that it reads are done first.

    somebody is at that iteration ──> wait for the stage
    nobody is any more            ──> do it here, and first what it needs itself

Airflow has up to 1 + max_lag DAG runs at a time. One that waits for another holds no lease and no engines; what a DAG run
leaves undone is done by the next one.
"""

from __future__ import annotations

import logging
import time

from pipelines.run.iterations import QUIET_S, is_under_way
from pipelines.run.order import Step, needs
from pipelines.run.run import Run
from pipelines.stages.running import run_stage
from pipelines.stages.table import STAGES

logger = logging.getLogger(__name__)

POLL_S = 1.0


def settle(run: Run, stage: str, iteration: int) -> None:
    """Returns once everything that a stage needs of earlier iterations is done; without `loop.max_lag` at once.

    What the stage needs of its own iteration is for whoever asks: it says so itself. Raises what a stage raises that is done here.
    """
    if run.config.loop.max_lag:
        for need in _needs(run, Step(iteration, stage)):
            if need.iteration < iteration:
                _finish(run, need, needed_by=f"{stage} of iteration {iteration}")


def _finish(run: Run, step: Step, *, needed_by: str) -> None:
    """Waits for a step, or does it."""
    what, logged_at = f"{step.stage} of iteration {step.iteration}", time.monotonic()
    while not _is_done(run, step):
        if is_under_way(run, step.iteration):
            if time.monotonic() - logged_at > run.config.watchdog.log_interval_s:
                logged_at = time.monotonic()
                logger.warning(
                    "%s waits for %s; it is done here once nobody has been at that iteration for %g s",
                    needed_by,
                    what,
                    QUIET_S,
                )
            time.sleep(POLL_S)
            continue
        logger.warning("%s needs %s, at which nobody is: it is done here", needed_by, what)
        for need in _needs(run, step):
            _finish(run, need, needed_by=what)
        for group in _groups(run, step):
            run_stage(run, step.stage, step.iteration, model_group=group)


def _needs(run: Run, step: Step) -> list[Step]:
    returns_to_champion = run.config.promote.on_reject == "champion"
    return needs(step, max_lag=run.config.loop.max_lag, returns_to_champion=returns_to_champion)


def _is_done(run: Run, step: Step) -> bool:
    return all(run.journal.ref(run.key(step.iteration, step.stage, group)) is not None for group in _groups(run, step))


def _groups(run: Run, step: Step) -> tuple[str, ...]:
    """The model groups that have a stage of their own; one empty name where it is done for all at once."""
    return tuple(run.config.train_tasks) if STAGES[step.stage].is_per_model_group else ("",)
