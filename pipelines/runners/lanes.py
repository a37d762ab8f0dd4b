"""lanes: with `loop.max_lag`, unfinished iterations -> all their stages: those of the engines in this thread, score and train in another.

    engines    collect 1  collect 2 | sync 1  evaluate 1  promote 1  collect 3 | sync 2 ...      table.engine_order
    trainers              score 1  train 1 |  score 2  train 2                 |  score 3 ...    one after another

Each lane waits for what it reads of the other's by the journal, so that a run which was stopped walks the same way again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from pipelines.run.run import Run
from pipelines.run.watchdog import interrupt_thread
from pipelines.stages.steps import DoStep, complete, wait_for_end
from pipelines.stages.table import Step, engine_order
from stores.journal.stage_results import Decided, Scored, Trained

POLL_S = 0.1
TRAINERS = (Scored.STAGE, Trained.STAGE)


def walk(run: Run, todo: Sequence[int], do: DoStep, *, promoted: Callable[[int], None]) -> None:
    """Does every stage of the iterations `todo`, and calls `promoted` with each iteration that is through.

    What fails in one lane is raised once the stage of the other has ended; Ctrl-C ends both.
    """
    with _TrainerLane(run, todo, do) as trainers:
        for step in engine_order(run.config.iterations, run.config.loop.max_lag):
            if step.iteration in todo:
                trainers.raise_failure()
                complete(run, step, do, waits=trainers.will_do, poll_s=POLL_S)
                if step.stage == Decided.STAGE:
                    promoted(step.iteration)


class _Over(Exception):
    """The other lane has ended before its end."""


class _TrainerLane:
    """Scores and trains in a thread of its own, one iteration after another."""

    def __init__(self, run: Run, todo: Sequence[int], do: DoStep) -> None:
        self._run = Run(run.config)  # a credit rule is a user's code, which evaluate uses at the same time
        self._todo, self._do = todo, do
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainers")
        self._work = self._pool.submit(self._walk)

    def __enter__(self) -> _TrainerLane:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over = kind is not None
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._interrupt()
        wait_for_end(self._pool, [self._work], interrupt=self._interrupt)

    def will_do(self, step: Step) -> bool:
        """Whether a step is done here; raises what failed here."""
        self.raise_failure()
        return step.stage in TRAINERS

    def raise_failure(self) -> None:
        """Raises what failed in this lane."""
        if self._work.done():
            self._work.result()

    def _walk(self) -> None:
        for iteration in self._todo:
            for stage in TRAINERS:
                complete(self._run, Step(iteration, stage), self._interruptibly, waits=self._waits, poll_s=POLL_S)

    def _waits(self, step: Step) -> bool:
        if self._is_over:
            raise _Over
        return step.stage not in TRAINERS

    def _interruptibly(self, run: Run, step: Step) -> None:
        self._thread = threading.current_thread()
        try:
            self._do(run, step)
        finally:  # while it waits, it ends by itself
            self._thread = None

    def _interrupt(self) -> None:
        self._is_over = True
        if self._thread is not None:
            interrupt_thread(self._thread, KeyboardInterrupt)
