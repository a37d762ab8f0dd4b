"""claim: a claim (a DAG run) + what the run has done -> the iteration it does, or the reason why it does none.

Reads: the journal; the train task file; the trace store. Writes: the pinned iteration, so that a claim that is made
again, by a retry or a second scheduler, gets the same one for ever.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from pipelines.monitoring.watching import alarm_to_hold
from pipelines.run.champions import champion_version
from pipelines.run.iterations import next_iteration
from pipelines.run.run import Run


def claimed(run: Run, claim: str) -> int | None:
    """The iteration that a claim was given; None if it was given none yet."""
    kept = run.journal.value(run.run_id, _name(claim))
    return None if kept is None else int(kept["iteration"])


def pin(run: Run, claim: str, iteration: int) -> int:
    """Gives a claim its iteration, unless it has one; returns the one it has."""
    seen = {
        "iteration": iteration,
        "tasks_sha256": _tasks_sha256(run),
        "num_others": run.traces.count_others(run.run_id),
    }
    kept = run.journal.pin_value(run.run_id, _name(claim), {"claim": claim, "iteration": iteration})
    run.journal.put_value(run.run_id, "seen", seen)
    return int(kept["iteration"])


def reason_to_skip(run: Run) -> str:
    """Why the schedule trains no further iteration now, in words with the numbers; empty where it does."""
    settings = run.config.schedule
    if next_iteration(run) is None:
        return f"iteration {run.config.iterations} of {run.config.iterations} is done: raise `iterations` to train on"
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
    if held := alarm_to_hold(run):
        return (
            f"the last iteration raised an alarm (watch.on_alarm: hold): {held}. Look at the report, then accept it (troupe "
            "watch --accept REASON) or trigger the DAG with `force`"
        )
    return _nothing_new(run)


def champion_accuracy(run: Run) -> float | None:
    """The champion's accuracy on held-out tasks, from its latest evaluation; None if there was none."""
    champion = champion_version(run)
    watched = run.journal.value(run.run_id, "watched")
    if watched is not None and watched["team_version"] == champion and watched.get("accuracy") is not None:
        return float(watched["accuracy"])
    for row in reversed(run.journal.stages(run.run_id)):
        if row.stage == "promote" and row.ref and row.ref.get("team_version") == champion:
            report = run.journal.ref(run.key(row.iteration, "evaluate" if row.iteration else "measure"))
            return None if report is None or "accuracy" not in report else float(report["accuracy"])
    return None


def _last_rejections(run: Run) -> list[str]:
    """Conditions of the rejections since the last other decision, oldest first; skipped evaluations do not count."""
    found: list[str] = []
    for row in run.journal.stages(run.run_id):
        if row.stage != "promote" or row.ref is None or row.ref["verdict"] == "skipped":
            continue
        found = [*found, row.ref["condition"]] if row.ref["verdict"] == "reject" else []
    return found


def _nothing_new(run: Run) -> str:
    settings = run.config.schedule
    seen = run.journal.value(run.run_id, "seen")
    if settings is None or seen is None or not (settings.on_new_tasks or settings.min_fresh_traces):
        return ""
    if seen["iteration"] == next_iteration(run):  # begun for what was new then, and not finished
        return ""
    reasons = []
    if settings.on_new_tasks:
        if seen["tasks_sha256"] != _tasks_sha256(run):
            return ""
        reasons.append(f"{run.config.tasks.train.path} has not changed")
    if settings.min_fresh_traces is not None:
        fresh = run.traces.count_others(run.run_id) - seen["num_others"]
        if fresh >= settings.min_fresh_traces:
            return ""
        reasons.append(f"{fresh} fresh episodes, schedule.min_fresh_traces = {settings.min_fresh_traces}")
    return f"nothing new since the last scheduled iteration: {' and '.join(reasons)}"


def _tasks_sha256(run: Run) -> str:
    path = run.config.tasks.train.path
    return sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _name(claim: str) -> str:
    return f"claim/{sha256(claim.encode()).hexdigest()[:32]}"


def handed_on(stage: str, ref: dict[str, Any]) -> dict[str, Any]:
    """What of a stage's ref goes to whoever follows its job; the journal keeps all of it."""
    kept = {
        "collect": ("traces", "num_tokens"),
        "score": ("rewards", "outcome"),
        "train": ("model", "reason"),
        "sync": ("policy_versions", "seconds"),
        "evaluate": ("verdict", "condition", "accuracy", "num_tasks"),
        "promote": ("verdict", "condition", "team_version"),
    }[stage]
    return {key: ref[key] for key in kept if key in ref}
