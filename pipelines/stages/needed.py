"""needed: with `loop.max_lag`, a stage that is done by itself -> the stages of earlier iterations that it reads are done first.

    somebody is at that iteration ──> wait for the stage
    nobody is any more            ──> do it here, and first what it needs itself

Airflow has up to 1 + max_lag DAG runs at a time. One that waits for another holds no lease and no engines; what a DAG run
leaves undone is done by the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pipelines.run.iteration import NotDone
from pipelines.run.iterations import QUIET_S, is_under_way, next_iteration, say_at_work
from pipelines.run.order import Step, needs
from pipelines.run.run import Run
from pipelines.stages.running import run_stage
from pipelines.stages.table import STAGES

logger = logging.getLogger(__name__)

POLL_S = 1.0
SAY_EVERY_S = 10.0


class Needed:
    """What the stages of an iteration need of earlier ones."""

    def __init__(self, run: Run, iteration: int, *, connect: Callable[[], None]) -> None:
        """Args: connect: joins the cluster, or has joined it; called before a stage is done here."""
        self._run, self._iteration, self._connect = run, iteration, connect
        self._left: set[int] = set()
        """Iterations at which nobody was any more: this process does what they lack."""

    def settle(self, stage: str) -> None:
        """Returns once everything that a stage needs of earlier iterations is done; without `loop.max_lag` at once.

        What the stage needs of its own iteration is for whoever asks: it says so itself. Raises NotDone for an iteration that may not begin
        yet, and what a stage raises that is done here.
        """
        run, max_lag = self._run, self._run.config.loop.max_lag
        if not max_lag:
            return
        last = (next_iteration(run) or run.config.iterations) + max_lag
        if self._iteration > last:
            raise NotDone(
                f"iteration {self._iteration} of run {run.run_id!r} may not begin yet: iteration {last - max_lag} is not done, and "
                f"loop.max_lag = {max_lag} lets no later one than {last} begin"
            )
        for need in self._needs(Step(self._iteration, stage)):
            if need.iteration < self._iteration:
                self._finish(need, needed_by=f"{stage} of iteration {self._iteration}")

    def _finish(self, step: Step, *, needed_by: str) -> None:
        """Waits for a step, or does it."""
        run, what = self._run, f"{step.stage} of iteration {step.iteration}"
        logged_at = said_at = float("-inf")
        while not self._is_done(step):
            now = time.monotonic()
            if step.iteration not in self._left and is_under_way(run, step.iteration):
                if now - said_at > SAY_EVERY_S:
                    said_at = now
                    say_at_work(run, self._iteration)
                if now - logged_at > run.config.watchdog.log_interval_s:
                    logged_at = now
                    text = "%s waits for %s; it is done here once nobody has been at that iteration for %g s"
                    logger.warning(text, needed_by, what, QUIET_S)
                time.sleep(POLL_S)
                continue
            self._left.add(step.iteration)
            logger.warning("%s needs %s, at which nobody is: it is done here", needed_by, what)
            for need in self._needs(step):
                self._finish(need, needed_by=what)
            self._connect()
            for group in self._groups(step):
                run_stage(run, step.stage, step.iteration, model_group=group)

    def _needs(self, step: Step) -> list[Step]:
        config = self._run.config
        return needs(step, max_lag=config.loop.max_lag, returns_to_champion=config.promote.on_reject == "champion")

    def _is_done(self, step: Step) -> bool:
        run = self._run
        keys = (run.key(step.iteration, step.stage, group) for group in self._groups(step))
        return all(run.journal.ref(key) is not None for key in keys)

    def _groups(self, step: Step) -> tuple[str, ...]:
        """The model groups that have a stage of their own; one empty name where it is done for all at once."""
        return tuple(self._run.config.train_tasks) if STAGES[step.stage].is_per_model_group else ("",)
