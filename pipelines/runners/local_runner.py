"""local_runner: a run config -> a trained team, all stages in this process over one Ray cluster.

    begin ──> for each iteration: collect ──> score ──> train (per model group) ──> sync ──> evaluate ──> promote
                     ^                                                                                      │
                     └──────────────────────────────────────────────────────────────────────────────────────┘

With `loop.max_lag` score and train have a lane of their own, see `walk`. Every stage goes through the journal, so the same command
continues where a killed one stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

from pipelines.cluster.connect import connect
from pipelines.config.run_config import RunConfig
from pipelines.report.inspect import root_option, show_command
from pipelines.report.progress import Screen
from pipelines.report.record import Written, finish_parent, open_parent, record
from pipelines.report.summaries import iteration_summary
from pipelines.run.iteration import NotDone
from pipelines.run.iterations import unfinished_iterations
from pipelines.run.run import Run
from pipelines.run.serving import start
from pipelines.run.watchdog import Watchdog, interrupt_thread
from pipelines.runners.begin import is_measured, make_version_zero, measure_last, measure_team, register_first_team
from pipelines.stages.steps import DoStep, complete, do_step, wait_for_end
from pipelines.stages.table import Step, engine_order
from pipelines.stages.train import trainer_of
from stores.extensions import ask
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Collected, Decided, Scored, Trained
from stores.types import ModelVersionRef

LANES_POLL_S = 0.1
TRAINERS = (Scored.STAGE, Trained.STAGE)
START_S = 60.0
"""What a start may take beyond what the config gives the engine or trainer itself."""


def train_team(config: RunConfig, *, address: str = "", screen: Screen) -> dict[str, Any]:
    """Runs every iteration that is not done yet and writes the reports into the run's folder.

    Returns the report. Raises ValueError for a run name that another config holds, before anything starts.
    """
    run = Run(config)
    wall = _Wall(run)
    run.begin()
    with screen.stage("connect"):
        connect(address)
    run.traces.create()
    with screen.stage("warm start") as progress:
        make_version_zero(run, progress=progress)
    todo = unfinished_iterations(run)
    for line in ask("begins", run) if todo else ():
        screen.say(line)
    with _Records(run) as records, wall:
        if todo or not is_measured(run, config.iterations):
            _start_workers(run, todo, screen)
        register_first_team(run)
        with screen.stage("before: test tasks") as progress:
            before = measure_team(run, run.trained(0), iteration=0, progress=progress)
        screen.measured("before", before)
        for iteration in range(1, config.iterations + 1):
            if iteration not in todo:
                records.iteration(iteration)

        def finished(iteration: int) -> None:
            summary = iteration_summary(run, iteration)
            assert summary is not None, f"iteration {iteration} ran through without all its stages"
            screen.iteration(summary)
            records.iteration(iteration)
            wall.add()

        _iterate(run, todo, screen, finished)
        measure_last(run, address=address, screen=screen)
        wall.add()
        written = records.finish()
    screen.result(written, commands=next_commands(run))
    return written.report


def next_commands(run: Run) -> dict[str, str]:
    """Returns commands for a run that has been trained, with what each is for."""
    root = root_option(run)
    return {
        show_command(run): "lists its episodes, and shows the one whose id is given",
        f"troupe report {run.run_id} {root}".strip(): "writes the report again",
        f"troupe serve {run.team_name}@champion {root}".strip(): "answers requests with the team",
    }


def _start_workers(run: Run, todo: list[int], screen: Screen) -> None:
    """Starts the engines, then the trainers one after another: all at once is slower on a small machine."""
    models = _sampling_next(run, todo) if todo else run.trained(run.config.iterations)
    groups = list(run.config.model_groups)
    timeout_s = START_S + max(run.config.serve_config(group).start_timeout_s for group in groups)
    with screen.stage("start engines"):
        watchdog = Watchdog(
            run, run.key(0, "start-engines"), timeout_s=timeout_s, timeout_key=f"{START_S:g} s + serve.start_timeout_s"
        )
        watchdog.watch(lambda: start(run, models))
    if todo:
        with screen.stage("start trainers"):
            for group in groups:
                if (settings := run.config.train_config(group)).keep_warm:
                    trainer = trainer_of(run, group)
                    watchdog = Watchdog(
                        run,
                        run.key(0, "start-trainer", group),
                        timeout_s=START_S + settings.start_timeout_s,
                        timeout_key=f"{START_S:g} s + train.start_timeout_s",
                        recover=trainer.stop,
                    )
                    watchdog.watch(partial(trainer.wait_ready, settings.start_timeout_s))


def _sampling_next(run: Run, todo: Sequence[int]) -> dict[str, ModelVersionRef]:
    """The versions that the next collect samples with; those of the first unfinished iteration where they are not trained yet."""
    following = next((k for k in todo if run.iteration(k).find(Collected) is None), todo[0])
    try:
        return run.samplers(following)
    except NotDone:
        return run.samplers(todo[0])


def _iterate(run: Run, todo: Sequence[int], screen: Screen, finished: Callable[[int], None]) -> None:
    """Does all stages of the iterations `todo`; calls `finished` with each that is through."""
    began, left = time.perf_counter(), list(todo)

    def promoted(iteration: int) -> None:
        nonlocal began
        left.remove(iteration)
        now = time.perf_counter()
        _add_wall(run, RunValue.WALL.of(iteration), now - began)
        finished(iteration)
        began = time.perf_counter()

    def do(own: Run, step: Step) -> None:
        _do_step(own, step, screen)

    try:
        if run.config.loop.max_lag:
            walk(run, todo, do, promoted=promoted)
            return
        for iteration in todo:
            complete(run, Step(iteration, Decided.STAGE), do)
            promoted(iteration)
    finally:
        if left:  # it was interrupted, or failed: the process that goes on with it adds the rest
            _add_wall(run, RunValue.WALL.of(left[0]), time.perf_counter() - began)


def walk(run: Run, todo: Sequence[int], do: DoStep, *, promoted: Callable[[int], None]) -> None:
    """Does every stage of the iterations `todo` with `loop.max_lag`, and calls `promoted` with each iteration that is through.

        engines, this thread    collect 1  collect 2 | sync 1  evaluate 1  promote 1  collect 3 | sync 2 ...      engine_order
        trainers, another one            score 1  train 1 |  score 2  train 2                 |  score 3 ...      one after another

    Each lane waits for what it reads of the other's by the journal, so that a run which was stopped walks the same way again.
    What fails in one lane is raised once the stage of the other has ended; Ctrl-C ends both.
    """
    with _TrainerLane(run, todo, do) as trainers:
        for step in engine_order(run.config.iterations, run.config.loop.max_lag):
            if step.iteration in todo:
                trainers.raise_failure()
                complete(run, step, do, waits=trainers.will_do, poll_s=LANES_POLL_S)
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
                complete(self._run, Step(iteration, stage), self._interruptibly, waits=self._waits, poll_s=LANES_POLL_S)

    def _waits(self, step: Step) -> bool:
        if self._is_over:
            raise _Over
        return step.stage not in TRAINERS

    def _interruptibly(self, run: Run, step: Step) -> None:
        self._thread = threading.current_thread()
        try:
            if self._is_over:  # it ended between the last look at it and now, when there was no thread to interrupt
                raise _Over
            self._do(run, step)
        finally:  # while it waits, it ends by itself
            self._thread = None

    def _interrupt(self) -> None:
        self._is_over = True
        if self._thread is not None:
            interrupt_thread(self._thread, KeyboardInterrupt)


def _do_step(run: Run, step: Step, screen: Screen) -> None:
    with screen.stage(step.stage, step.iteration) as progress:
        do_step(run, step, progress=progress)


def _add_wall(run: Run, name: str, seconds: float) -> None:
    """Adds to a wall time, which is summed over all processes that a run took."""
    before = run.journal.value(run.run_id, name)
    run.journal.put_value(run.run_id, name, {"seconds": seconds + (before["seconds"] if before else 0.0)})


class _Wall:
    """Adds what this process takes to the run's wall time, piece by piece: one that is killed counts up to its last iteration."""

    def __init__(self, run: Run) -> None:
        self._run, self._since = run, time.perf_counter()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self.add()

    def add(self) -> None:
        """Adds the seconds since the last time."""
        now = time.perf_counter()
        _add_wall(self._run, RunValue.WALL, now - self._since)
        self._since = now


class _Records:
    """Records iterations in a thread of its own: importing and migrating MLflow takes seconds that nothing must wait for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="record")
        self._jobs: list[Future[Any]] = []

    def __enter__(self) -> _Records:
        self._submit(lambda: open_parent(self._run))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._submit(lambda: self._run.tracker.finish("FAILED" if kind is not KeyboardInterrupt else "KILLED"))
        self._pool.shutdown(wait=True)

    def iteration(self, iteration: int) -> None:
        """Records an iteration when the thread comes to it."""
        self._submit(lambda: record(self._run, iteration))

    def finish(self) -> Written:
        """Writes the result and the reports, once every iteration is recorded."""
        self._submit(lambda: finish_parent(self._run))
        return [job.result() for job in self._jobs][-1]

    def _submit(self, work: Callable[[], Any]) -> None:
        self._jobs.append(self._pool.submit(work))
