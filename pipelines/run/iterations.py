"""iterations: which iteration of a run is next, and at which somebody is."""

from __future__ import annotations

import time

from pipelines.run.run import Run
from stores.journal.journal import RUNNING
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Decided

QUIET_S = 120.0
"""After so long without a stage that runs, whoever began an iteration is taken to have left it."""


def next_iteration(run: Run) -> int | None:
    """The first iteration whose promote is not done; None after the last."""
    return next(iter(unfinished_iterations(run)), None)


def unfinished_iterations(run: Run) -> list[int]:
    """The iterations whose promote is not done, in order."""
    done = set(run.journal.finished(run.run_id, Decided.STAGE))
    return [number for number in range(1, run.config.iterations + 1) if number not in done]


def free_iteration(run: Run) -> int | None:
    """The iteration that whoever comes now should do: the next one, or with `loop.max_lag` the first of the next ones at which nobody is.

    None after the last, and where somebody is at each that may be begun.
    """
    following, max_lag = next_iteration(run), run.config.loop.max_lag
    if following is None or not max_lag:
        return following
    begun = range(following, min(following + max_lag, run.config.iterations) + 1)
    return next((iteration for iteration in begun if not is_under_way(run, iteration)), None)


def is_under_way(run: Run, iteration: int) -> bool:
    """Whether somebody is at an iteration: one of its stages runs, or ended less than `QUIET_S` ago, or `say_at_work` was called then."""
    rows, now = run.journal.stages(run.run_id, iteration), time.time()
    if any(row.status == RUNNING and not row.is_free for row in rows):
        return True
    sign = run.journal.value(run.run_id, RunValue.AT_WORK.of(iteration))
    # An owner that was killed had its lease until about then.
    times = [row.ended_at or min(row.expires_at, now) for row in rows] + ([] if sign is None else [float(sign["at"])])
    return bool(times) and now - max(times) < QUIET_S


def say_at_work(run: Run, iteration: int) -> None:
    """Lets others know that somebody is at an iteration: it was given one, or waits for another one."""
    run.journal.put_value(run.run_id, RunValue.AT_WORK.of(iteration), {"at": time.time()})
