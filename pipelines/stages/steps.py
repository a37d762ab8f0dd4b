"""steps: a step of a run -> it is done, and before it what is undone below it, each stage at most once by the journal.

    one process          it does every step
    `loop.max_lag`       two threads do some steps each, and wait for those of the other (runners/local_runner.py)
    Airflow, one stage   steps of earlier iterations: somebody is at one ──> wait for it; nobody is any more ──> do it here

Airflow has up to 1 + max_lag DAG runs at a time. One that waits for another holds no lease and no engines; what a DAG run
leaves undone is done by the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.cluster.observe import Observer, tell
from pipelines.run.champions import champion_version
from pipelines.run.iteration import Iteration, NotDone
from pipelines.run.iterations import QUIET_S, is_under_way, next_iteration, say_at_work
from pipelines.run.run import Run
from pipelines.run.watchdog import LOG_INTERVAL_S, Watchdog, interrupt_thread
from pipelines.stages.table import STAGES, Stage, StageCall, Step, needs, stage_named
from stores.journal.journal import Lease
from stores.journal.stage_results import StageResult

if TYPE_CHECKING:
    from pipelines.episodes.sampling import Progress

logger = logging.getLogger(__name__)

POLL_S = 1.0
SAY_EVERY_S = 10.0
INTERRUPTIBLE_S = 0.5
"""A thread that waits without a timeout cannot be interrupted."""
DoStep = Callable[[Run, Step], Any]
"""Does a step whose needs are done."""


def complete(
    run: Run, step: Step, do: DoStep, *, waits: Callable[[Step], bool] = lambda step: False, poll_s: float = POLL_S
) -> None:
    """Does what is undone below a step, and then the step.

    Args: waits: says of an undone step whether somebody else does it, so that it is waited for; asked again every `poll_s`.
    """
    while not is_done(run, step):
        if waits(step):
            time.sleep(poll_s)
            continue
        for need in needs(run.config, step):
            complete(run, need, do, waits=waits, poll_s=poll_s)
        do(run, step)
        return


def is_done(run: Run, step: Step) -> bool:
    """Whether a step is done for all its model groups."""
    keys = (run.key(step.iteration, step.stage, group) for group in STAGES[step.stage].groups(run.config))
    return all(run.journal.ref(key) is not None for key in keys)


def settle(run: Run, step: Step, do: DoStep) -> None:
    """Returns once everything that a step reads of earlier iterations is done; without `loop.max_lag` at once.

    What it reads of its own iteration is for whoever asks: the stage says so itself. Raises NotDone for an iteration that may not
    begin yet, and what a stage raises that is done here.
    """
    max_lag = run.config.loop.max_lag
    if not max_lag:
        return
    last = (next_iteration(run) or run.config.iterations) + max_lag
    if step.iteration > last:
        raise NotDone(
            f"iteration {step.iteration} of run {run.run_id!r} may not begin yet: iteration {last - max_lag} is not done, and "
            f"loop.max_lag = {max_lag} lets no later one than {last} begin"
        )
    others = _Others(run, step)
    for need in needs(run.config, step):
        if need.iteration < step.iteration:
            complete(run, need, do, waits=others.are_at, poll_s=POLL_S)


class _Others:
    """Who is at the iterations before a step."""

    def __init__(self, run: Run, step: Step) -> None:
        self._run, self._step = run, step
        self._left: set[int] = set()
        """Iterations at which nobody was any more: this process does what they lack."""
        self._logged_at = self._said_at = float("-inf")

    def are_at(self, step: Step) -> bool:
        """Whether somebody is at the iteration of a step; says meanwhile that somebody waits here."""
        now = time.monotonic()
        if step.iteration not in self._left and is_under_way(self._run, step.iteration):
            if now - self._said_at > SAY_EVERY_S:
                self._said_at = now
                say_at_work(self._run, self._step.iteration)
            if now - self._logged_at > LOG_INTERVAL_S:
                self._logged_at = now
                text = "%s waits for %s; it is done here once nobody has been at that iteration for %g s"
                logger.warning(text, self._step, step, QUIET_S)
            return True
        self._left.add(step.iteration)
        logger.warning("%s needs %s, at which nobody is: it is done here", self._step, step)
        return False


def do_step(
    run: Run,
    step: Step,
    *,
    progress: Progress | None = None,
    turn: Callable[[str], AbstractContextManager[bool]] = lambda group: nullcontext(True),
) -> None:
    """Does a step here. Model groups are trained in a thread each; Ctrl-C reaches the main thread only, so it is passed on to them.

    Args: turn: entered around the work of each model group (or "", of a stage without); where it says False, that is left out.
    """
    groups = STAGES[step.stage].groups(run.config)
    if groups == ("",):
        with turn("") as is_wanted:
            if is_wanted:
                run_stage(run, step.stage, step.iteration, progress=progress)
        return
    at_work: set[threading.Thread] = set()

    def work(group: str) -> None:
        at_work.add(threading.current_thread())
        try:
            with turn(group) as is_wanted:
                if is_wanted:
                    run_stage(run, step.stage, step.iteration, model_group=group)
        finally:
            at_work.remove(threading.current_thread())

    def interrupt() -> None:
        for thread in list(at_work):
            interrupt_thread(thread, KeyboardInterrupt)

    pool = ThreadPoolExecutor(max_workers=len(groups))
    jobs = [pool.submit(work, group) for group in groups]
    wait_for_end(pool, jobs, interrupt=interrupt)
    for job in jobs:
        job.result()


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
        began = time.monotonic()
        logger.info("begins, attempt %d", lease.token)
        try:
            as_begun = begin(run, stage, iteration)
            reporting = watchdog.reporting(progress)
            call = StageCall(run=run, iteration=as_begun, model_group=model_group, lease=lease, progress=reporting)
            ref = stage.work(call).to_json()
        except BaseException as error:  # its message may quote a prompt; it is in the journal
            level = logging.INFO if isinstance(error, KeyboardInterrupt) else logging.ERROR
            logger.log(level, "failed after %.1f s: %s", time.monotonic() - began, type(error).__name__)
            raise
        logger.info("done in %.1f s", time.monotonic() - began)
        return ref

    try:
        return stage.parse(watchdog.once(work, alone=_alone(run, stage)))
    finally:
        _send_points(run, iteration)


def begin(run: Run, stage: Stage, number: int) -> Iteration:
    """Reads once what a stage is given of its iteration and of those before.

    Raises NotDone where a stage of its iteration is not done that it reads, or a version not trained that it starts from; with
    `loop.max_lag` also where it reads a stage of the iteration before that is not done.
    """
    iteration = run.iteration(number, needed_by=stage.name)
    for name in stage.reads:
        iteration.require(name)
    before: list[Iteration] = []
    for earlier in range(number - 1, 0, -1) if stage.reads_before else ():
        before.append(run.iteration(earlier, needed_by=stage.name))
        if run.config.loop.max_lag and len(before) == 1:
            for name in stage.reads_before:
                before[0].require(name)
        if len(before) >= stage.num_before(run) and all(map(before[-1].has, stage.reads_before)):
            break
    versions = {"samplers": run.samplers, "parents": run.parents, "trained": run.trained}.get(stage.versions)
    models = {} if versions is None else versions(number)
    return replace(iteration, before=before, models=models, source=run.source(number))


def _send_points(run: Run, iteration: int) -> None:
    """Tells observers of the run; where a stage never connects to Ray (score, promote), what they send waits for the next one."""
    last = iteration + run.config.loop.max_lag  # so far iterations may overlap
    rows = [row for k in range(iteration - 1, last + 1) for row in run.journal.stages(run.run_id, k)]
    champion = champion_version(run)
    # A stage of an earlier iteration that somebody does again does not turn the run back.
    tell(Observer.stages, rows, has_latest=not run.journal.stages(run.run_id, last + 1))
    if champion is not None:
        tell(Observer.champion, run.run_id, champion)


def _alone(run: Run, stage: Stage) -> AbstractContextManager[Lease] | None:
    """Returns what keeps others off the engines during a stage; None for a stage that leaves them alone."""
    if stage.changes_engines:
        return run.hold_engines()
    if stage.name == "train" and run.config.pool == "shared":
        # Engines sleep meanwhile, and model groups train one after another: the last one waits for all the others.
        return run.hold_engines(wait_s=sum(stage.timeout_s(run.config, group) for group in run.config.train_tasks))
    return None


def wait_for_end(pool: ThreadPoolExecutor, futures: Sequence[Future[Any]], *, interrupt: Callable[[], None]) -> None:
    """Waits until all that a pool does has ended; Ctrl-C meanwhile is passed on by `interrupt`, and raised at the end.

    A pool's own `shutdown` takes a thread for ended once Ctrl-C has interrupted the wait for it.
    """

    def until_done() -> None:
        while left := [future for future in futures if not future.done()]:
            wait(left, timeout=INTERRUPTIBLE_S)

    try:
        until_done()
    except KeyboardInterrupt:
        interrupt()
        until_done()
        raise
    finally:
        pool.shutdown(wait=all(future.done() for future in futures))
