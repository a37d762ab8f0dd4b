"""claim: a claim (of a DAG run) + the journal -> the iteration that it does, or the reason why it does none.

Reads: the journal; the train task file; the trace store. Writes: the pinned iteration, so that a claim that is made
again, by a retry or a second scheduler, gets the same one for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from pipelines.cluster.owner_links import stage_owner
from pipelines.monitoring.watching import unaccepted_alarm
from pipelines.run.champions import champion_version
from pipelines.run.iteration import Iteration
from pipelines.run.iterations import QUIET_S, free_iteration, next_iteration, say_at_work
from pipelines.run.run import Run
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Decided, Evaluated, Measured


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
    pinned = int(run.journal.pin_value(run.run_id, _name(claim), {"claim": claim, "iteration": iteration})["iteration"])
    seen = {
        "iteration": pinned,
        "tasks_sha256": _tasks_sha256(run),
        "num_others": run.traces.count_others(run.run_id) if _counts_others(run) else None,
    }
    run.journal.put_value(run.run_id, RunValue.SEEN, seen)
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
    if held := unaccepted_alarm(run):
        return (
            f"the last iteration raised an alarm (watch.on_alarm: fail): {held}. Look at the report, then accept it (troupe "
            "watch --accept REASON) or trigger the DAG with `force`"
        )
    return _nothing_new(run, free)


def champion_accuracy(run: Run) -> float | None:
    """The champion's accuracy on held-out tasks, from its latest evaluation; None if there was none."""
    champion = champion_version(run)
    watched = run.journal.value(run.run_id, RunValue.WATCHED)
    if watched is not None and watched["team_version"] == champion and watched.get("accuracy") is not None:
        return float(watched["accuracy"])
    for number, decided in _newest_decisions(run):
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
        reasons.append(f"{run.config.tasks.train.path} has not changed")
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
    path = run.config.tasks.train.path
    return sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _name(claim: str) -> str:
    return RunValue.CLAIM.of(sha256(claim.encode()).hexdigest()[:32])
