"""schedule: what a schedule calls: begin an iteration, do all of it in one process, record it.

    begin     a claim (of a DAG run) + the journal -> the iteration that it does, or the reason why it does none
    iterate   the stages one after another, each when it is asked for; a schedule asks the one job that does them, stage by stage, and
              where that has ended, each stage that is left has a job of its own
    record    figures and reports; after the last iteration the test tasks

A claim's iteration is pinned, so that a claim that is made again, by a retry or a second scheduler, gets the same one for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from pipelines.cluster.connect import connect
from pipelines.cluster.owner_links import stage_owner
from pipelines.report.progress import Screen
from pipelines.report.record import finish_parent, record
from pipelines.run.champions import champion_version
from pipelines.run.iteration import Iteration
from pipelines.run.iterations import QUIET_S, free_iteration, next_iteration, say_at_work
from pipelines.run.run import Run
from pipelines.runners.begin import is_measured, make_version_zero, measure_last, measure_team, register_first_team
from pipelines.runners.validate import check_tasks
from pipelines.stages.steps import do_step, is_done, settle
from pipelines.stages.table import STAGES, Step
from stores.extensions import ask
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Decided, Evaluated, Measured, WarmStarted

POLL_S = 0.25
"""How often the job of an iteration looks for what it is asked to do."""
IDLE_S = 120.0
"""It ends where it is asked for nothing for so long: the schedule was paused, waits for a slot or has given the iteration up."""


def begin_iteration(run: Run, claim: str, *, is_forced: bool, address: str, screen: Screen) -> dict[str, Any]:
    """Begins the run unless it has begun, and gives a claim its iteration.

    Returns {"iteration", "model_groups", "since"} (when the run was begun, unix seconds), or {"skip": reason} where nothing
    is to be trained now.
    """
    run.open()
    iteration = claimed(run, claim)
    if iteration is None:
        following = free_iteration(run)
        reason = reason_to_skip(run) if following is None or not is_forced else ""
        if following is None or reason:
            return {"skip": reason}
        check_tasks(run.config)  # task files may have changed since the iteration before
    if _needs_cluster(run):
        with screen.stage("connect"):
            connect(address)
        with screen.stage("warm start") as progress:
            make_version_zero(run, progress=progress)
        register_first_team(run)
        with screen.stage("before: test tasks") as progress:
            before = measure_team(run, run.trained(0), iteration=0, progress=progress)
        screen.measured("before", before)
    if iteration is None:
        assert following is not None, "skipped above"
        for line in ask("begins", run):
            screen.say(line)
        iteration = take(run, claim, otherwise=following)
    since = next(row.created_at for row in run.journal.runs() if row.run_id == run.run_id)
    return {"iteration": iteration, "model_groups": list(run.config.model_groups), "since": since}


def _needs_cluster(run: Run) -> bool:
    """True until version 0, the first champion and `before` are there."""
    begun = run.iteration(0)
    return any(begun.find(kind) is None for kind in (WarmStarted, Decided)) or not is_measured(run, 0)


class Asks:
    """What a schedule has asked the job of an iteration to do; the job ends where it is asked for nothing."""

    def __init__(self, is_asked: Callable[[str], bool] = lambda part: True, *, idle_s: float = IDLE_S) -> None:
        """Args: is_asked: whether a part (`collect`, `train/solver`, `record`) is wanted by now; looked at every `POLL_S`."""
        self._is_asked, self._idle_s = is_asked, idle_s
        self._lock = threading.Lock()
        self._num_at_work, self._idle_since = 0, time.monotonic()

    def wait(self, parts: Sequence[str]) -> bool:
        """Waits until one of the parts is asked for; False where nothing was for `idle_s` while nothing was done."""
        while not any(map(self._is_asked, parts)):
            with self._lock:
                if not self._num_at_work and time.monotonic() > self._idle_since + self._idle_s:
                    return False
            time.sleep(POLL_S)
        return True

    @contextmanager
    def turn(self, part: str) -> Iterator[bool]:
        """Entered around the work of a part: waits for its turn, and says whether it came."""
        is_asked = self.wait([part])
        with self._lock:
            self._num_at_work += is_asked
        try:
            yield is_asked
        finally:
            with self._lock:
                self._num_at_work -= is_asked
                self._idle_since = time.monotonic()


def iterate(
    run: Run, iteration: int, *, address: str, screen: Screen, asks: Asks | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each stage (`train/solver` where it is done per model group) and of `record` with what it hands on.

    Stages that are done already are not done again. It ends where a stage is not asked for. Raises what a stage raises.
    """
    asks = asks or Asks()
    for name, stage in STAGES.items():
        step = Step(iteration, name)
        parts = {group: f"{name}/{group}" if group else name for group in stage.groups(run.config)}
        try:
            if not is_done(run, step) and asks.wait(list(parts.values())):
                print(f"{step} of run {run.run_id}", flush=True)
                settle(run, step, do_step)
                do_step(run, step, turn=lambda group, parts=parts: asks.turn(parts[group]))  # type: ignore[misc]
        finally:  # where training of a group failed, those that are done have their results all the same
            for group, part in parts.items():
                if (ref := run.journal.ref(run.key(iteration, name, group))) is not None:
                    yield part, stage.hand_on(ref)
        if not is_done(run, step):
            print(f"nobody asked for {step} within {IDLE_S:g} s: whoever does is given a job of its own", flush=True)
            return
    with asks.turn("record") as is_asked:
        if is_asked:
            yield "record", record_iteration(run, iteration, address=address, screen=screen)


def record_iteration(run: Run, iteration: int, *, address: str, screen: Screen) -> dict[str, Any]:
    """Records a finished iteration; after the last one the champion plays the test tasks, and the MLflow run of the whole run ends.

    Returns what `record` returns.
    """
    ref = record(run, iteration)
    if iteration == run.config.iterations:
        measure_last(run, address=address, screen=screen)
        finish_parent(run)
    return ref


def claimed(run: Run, claim: str) -> int | None:
    """The iteration that a claim was given; None if it was given none yet."""
    pinned = run.journal.value(run.run_id, _name(claim))
    return None if pinned is None else int(pinned["iteration"])


def take(run: Run, claim: str, *, otherwise: int) -> int:
    """Gives a claim the iteration that is free, unless it has one; claims that are made at once get iterations of their own.

    Args: otherwise: the iteration where none is free any more, and without `loop.max_lag`. Returns the one it has.
    """
    with run.journal.hold(run.run_id, "claims", owner=stage_owner()):
        free = free_iteration(run) if run.config.loop.max_lag and claimed(run, claim) is None else None
        return pin(run, claim, free or otherwise)


def pin(run: Run, claim: str, iteration: int) -> int:
    """Gives a claim this iteration, unless it has one; returns the one it has."""
    pinned = claimed(run, claim)
    if pinned is None:
        seen = {
            "iteration": iteration,
            "tasks_sha256": _tasks_sha256(run),
            "num_others": run.traces.count_others(run.run_id) if _counts_others(run) else None,
        }
        # First: killed in between, the iteration is one that was begun for what was new. A claim that has its iteration is not pinned again.
        run.journal.put_value(run.run_id, RunValue.SEEN, seen)
        value = run.journal.pin_value(run.run_id, _name(claim), {"claim": claim, "iteration": iteration})
        pinned = int(value["iteration"])
    say_at_work(run, pinned)
    return pinned


def reason_to_skip(run: Run) -> str:
    """Why the schedule trains no further iteration now, in words with the numbers; empty where it does."""
    settings = run.config.schedule
    following, iterations = next_iteration(run), run.config.iterations
    if following is None:
        return f"iteration {iterations} of {iterations} is done: raise `iterations` to train on"
    free = free_iteration(run)
    if free is None:
        last = min(following + run.config.loop.max_lag, iterations)
        under_way = f"iteration {last} is" if last == following else f"iterations {following} to {last} are"
        return (
            f"{under_way} under way, or {'was' if last == following else 'were'} less than {QUIET_S:g} s ago: loop.max_lag = "
            f"{run.config.loop.max_lag} lets no other begin"
        )
    if settings is None or champion_version(run) is None:
        return ""
    reached = champion_accuracy(run)
    if settings.target_accuracy is not None and reached is not None and reached >= settings.target_accuracy:
        return f"the champion's accuracy on held-out tasks is {reached:.3f}: schedule.target_accuracy = {settings.target_accuracy:g} is reached"
    rejections = _last_rejections(run)
    if len(rejections) >= settings.max_rejections:
        return (
            f"the gate rejected the last {len(rejections)} candidates (schedule.max_rejections = "
            f"{settings.max_rejections}), the last one because: {rejections[-1]}. Look at the report, then trigger "
            "the DAG with `force`"
        )
    return "; ".join(ask("holds", run)) or _nothing_new(run, free)


def champion_accuracy(run: Run) -> float | None:
    """The champion's accuracy on held-out tasks, from its latest evaluation; None if there was none."""
    champion = champion_version(run)
    watched = run.journal.value(run.run_id, RunValue.WATCHED)
    if watched is not None and watched["team_version"] == champion and watched.get("accuracy") is not None:
        return float(watched["accuracy"])
    versions = None if champion is None else {group: ref.version for group, ref in run.champion().items()}
    for number, decided in _newest_decisions(run):
        evaluated = run.iteration(number).find(Evaluated)
        if evaluated is not None and evaluated.champion is not None and evaluated.champion.policy_versions == versions:
            return evaluated.champion.accuracy
        if decided.team_version == champion:
            return _accuracy_in(run.iteration(number))
    return None


def _accuracy_in(iteration: Iteration) -> float | None:
    """Accuracy of the team that an iteration registered; of the first team on the test tasks."""
    if iteration.number == 0:
        measured = iteration.find(Measured)
        return None if measured is None else measured.score.accuracy
    evaluated = iteration.find(Evaluated)
    return None if evaluated is None or evaluated.registered is None else evaluated.registered.accuracy


def _last_rejections(run: Run) -> list[str]:
    """Conditions of the rejections since the last other decision, oldest first; skipped evaluations do not count."""
    conditions: list[str] = []
    for _, decided in _newest_decisions(run):
        if decided.verdict == "reject":
            conditions.append(decided.condition)
        elif decided.verdict != "skipped":
            break
    return conditions[::-1]


def _newest_decisions(run: Run) -> Iterator[tuple[int, Decided]]:
    """Yields each decision with the number of its iteration, the newest first; earlier ones are read when asked for."""
    for number in reversed(run.journal.finished(run.run_id, Decided.STAGE)):
        if (decided := run.iteration(number).find(Decided)) is not None:
            yield number, decided


def _nothing_new(run: Run, iteration: int) -> str:
    settings = run.config.schedule
    seen = run.journal.value(run.run_id, RunValue.SEEN)
    if settings is None or seen is None or not (settings.on_new_tasks or settings.min_fresh_traces):
        return ""
    if iteration <= seen["iteration"]:  # begun for what was new then, and not finished
        return ""
    reasons = []
    if settings.on_new_tasks:
        if seen["tasks_sha256"] != _tasks_sha256(run):
            return ""
        reasons.append(f"{', '.join(map(str, run.config.tasks.train.files))}: no change")
    if settings.min_fresh_traces is not None:
        if seen["num_others"] is None:  # the setting is newer than that iteration: nobody knows what was there then
            return ""
        fresh = run.traces.count_others(run.run_id) - seen["num_others"]
        if fresh >= settings.min_fresh_traces:
            return ""
        reasons.append(f"{fresh} fresh episodes, schedule.min_fresh_traces = {settings.min_fresh_traces}")
    return f"nothing new since the last scheduled iteration: {' and '.join(reasons)}"


def _counts_others(run: Run) -> bool:
    """Whether the schedule waits for episodes of other runs: counting them opens every table."""
    return run.config.schedule is not None and run.config.schedule.min_fresh_traces is not None


def _tasks_sha256(run: Run) -> str:
    files = run.config.tasks.train.files
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""


def _name(claim: str) -> str:
    return RunValue.CLAIM.of(sha256(claim.encode()).hexdigest()[:32])
