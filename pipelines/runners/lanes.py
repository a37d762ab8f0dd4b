"""lanes: with `loop.max_lag`, unfinished iterations -> all their stages: those of the engines in this thread, score and train in another.

    engines    collect 1  collect 2 | sync 1  evaluate 1  promote 1  collect 3 | sync 2 ...      order.engine_order
    trainers              score 1  train 1 |  score 2  train 2                 |  score 3 ...    one after another

What is done already returns at once, so that a run which was stopped walks the same way again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

from pipelines.run.order import Step, engine_order
from pipelines.run.run import Run
from pipelines.run.watchdog import interrupt_thread
from stores.journal.stage_results import Collected, Decided, Scored, Synced, Trained

POLL_S = 0.5
"""A thread that waits without a timeout cannot be interrupted."""
DoStage = Callable[[Run, str, int], None]
"""Does a stage of an iteration for all model groups: run, name of the stage, iteration."""


def walk(run: Run, todo: Sequence[int], do: DoStage, *, promoted: Callable[[int], None]) -> None:
    """Does every stage of the iterations `todo`, and calls `promoted` with each iteration that is through.

    What fails in one lane is raised once the stage of the other has ended; Ctrl-C ends both.
    """
    with _TrainerLane(run, todo, do) as trainers:
        for step in engine_order(run.config.iterations, run.config.loop.max_lag):
            if step.iteration not in todo:
                continue
            if step.stage == Synced.STAGE:
                trainers.wait_for(step.iteration)
            trainers.raise_failure()
            do(run, step.stage, step.iteration)
            trainers.take(step)
            if step.stage == Decided.STAGE:
                promoted(step.iteration)


class _TrainerLane:
    """Scores and trains in a thread of its own, in the order in which it is told that the engines are done with an iteration."""

    def __init__(self, run: Run, todo: Sequence[int], do: DoStage) -> None:
        self._run = Run(run.config)  # a credit rule is a user's code, which evaluate uses at the same time
        self._todo, self._do = todo, do
        self._waits_for_gate = run.config.promote.on_reject == "champion"
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainers")
        self._thread: threading.Thread | None = None
        self._scoring: dict[int, Future[None]] = {}
        self._training: dict[int, Future[None]] = {}

    def __enter__(self) -> _TrainerLane:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=kind is not None)
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._interrupt()
        wait_for_end(self._pool, [*self._scoring.values(), *self._training.values()], interrupt=self._interrupt)

    def _interrupt(self) -> None:
        if self._thread is not None:
            interrupt_thread(self._thread, KeyboardInterrupt)

    def take(self, step: Step) -> None:
        """Begins what this stage of the engines was awaited for."""
        k = step.iteration
        if step.stage == Collected.STAGE:
            self._scoring[k] = self._submit(Scored.STAGE, k)
            if not self._waits_for_gate or k - 1 not in self._todo:
                self._training[k] = self._submit(Trained.STAGE, k)
        elif step.stage == Decided.STAGE and self._waits_for_gate and k + 1 in self._todo:
            self._training[k + 1] = self._submit(Trained.STAGE, k + 1)

    def wait_for(self, iteration: int) -> None:
        """Waits until an iteration is trained; raises what failed before it."""
        training = self._training[iteration]
        while not training.done():
            self.raise_failure()
            wait([training], timeout=POLL_S)

    def raise_failure(self) -> None:
        """Raises the first failure of the lane."""
        for future in [*self._scoring.values(), *self._training.values()]:
            if future.done():
                future.result()

    def _submit(self, stage: str, iteration: int) -> Future[None]:
        def work() -> None:
            self._thread = threading.current_thread()
            try:
                self._do(self._run, stage, iteration)
            finally:  # an interrupt of the idle thread would be the pool's, which prints it
                self._thread = None

        return self._pool.submit(work)


def wait_for_end(pool: ThreadPoolExecutor, futures: Sequence[Future[Any]], *, interrupt: Callable[[], None]) -> None:
    """Waits until all that a pool does has ended; Ctrl-C meanwhile is passed on by `interrupt`, and raised at the end.

    A pool's own `shutdown` takes a thread for ended once Ctrl-C has interrupted the wait for it.
    """
    try:
        _wait_until_done(futures)
    except KeyboardInterrupt:
        interrupt()
        _wait_until_done(futures)
        raise
    finally:
        pool.shutdown(wait=all(future.done() for future in futures))


def _wait_until_done(futures: Sequence[Future[Any]]) -> None:
    while left := [future for future in futures if not future.done()]:
        wait(left, timeout=POLL_S)


def result_of_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """Returns the results; raises the first failure, and an interrupt of this thread within `POLL_S`."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
    return [future.result() for future in futures]
