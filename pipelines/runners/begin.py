"""begin: a run config -> an opened run at iteration 0: version 0 of every model group, the first champion, `before`."""

from __future__ import annotations

from typing import Any

from pipelines.cluster.owner_links import stage_owner
from pipelines.episodes.collector import end_collectors
from pipelines.episodes.sampling import Progress
from pipelines.report.progress import Screen
from pipelines.run.champions import champion_version, set_champion
from pipelines.run.iterations import next_iteration
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.runners.claim import claimed, pin, reason_to_skip
from pipelines.runners.validate import check_tasks
from pipelines.stages.promote import register
from pipelines.stages.warmstart import StepProgress, warmstart
from stores.types import ModelVersionRef


def begin_iteration(run: Run, claim: str, *, is_forced: bool, address: str, screen: Screen) -> dict[str, Any]:
    """What a schedule starts an iteration with: the run at iteration 0 at least, and the iteration of this claim.

    Returns {"iteration", "model_groups", "since"} (when the run was begun, unix seconds), or {"skip": reason} where nothing is to be trained now.
    """
    from pipelines.cluster.connect import connect

    run.open()
    iteration = claimed(run, claim)
    if iteration is None:
        wanted = next_iteration(run)
        reason = reason_to_skip(run) if wanted is None or not is_forced else ""
        if wanted is None or reason:
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
        assert wanted is not None, "skipped above"
        iteration = pin(run, claim, wanted)
    since = next(row.created_at for row in run.journal.runs() if row.run_id == run.run_id)
    return {"iteration": iteration, "model_groups": list(run.config.model_groups), "since": since}


def measure_last(run: Run, *, address: str, screen: Screen) -> None:
    """The champion on the test tasks, after the last iteration."""
    from pipelines.cluster.connect import connect

    if run.journal.ref(run.key(run.config.iterations, "measure")) is None:
        connect(address)
    with screen.stage("after: test tasks") as progress:
        after = measure_team(run, run.champion(), iteration=run.config.iterations, progress=progress)
    screen.measured("after", after)


def _needs_cluster(run: Run) -> bool:
    """True until version 0, the first champion and `before` are there."""
    is_measured = run.config.tasks.test is None or run.journal.ref(run.key(0, "measure")) is not None
    return not is_measured or champion_version(run) is None or run.journal.ref(run.key(0, "warmstart")) is None


def make_version_zero(run: Run, *, progress: StepProgress | None = None) -> dict[str, Any]:
    """Warm start, or adoption of the models the config names; done once."""
    timeout_s = (run.config.warmstart or run.config.train).stage_timeout_s
    watchdog = Watchdog(run, run.key(0, "warmstart"), timeout_s=timeout_s)
    return watchdog.once(lambda lease: warmstart(run, progress=watchdog.reporting(progress)))


def measure_team(
    run: Run, models: dict[str, ModelVersionRef], *, iteration: int, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Accuracy on the test tasks, once per iteration asked for; None where the config has no test tasks."""
    from pipelines.evaluation.played import measure

    if run.config.tasks.test is None:
        return None
    watchdog = Watchdog(
        run,
        run.key(iteration, "measure"),
        timeout_s=run.config.evaluate.stage_timeout_s,
        recover=end_collectors,
    )

    return watchdog.once(
        lambda lease: measure(run, models, iteration=iteration, progress=watchdog.reporting(progress)),
        alone=run.hold_engines(),
    )


def register_first_team(run: Run) -> int:
    """Version 0 of every model group is the first team and, until something beats it, the champion."""
    found = champion_version(run)
    if found is not None:
        return found

    def work(lease: Any) -> dict[str, Any]:
        models = run.trained(0)
        version = register(run, models, iteration=0, report={})
        set_champion(run, models, version, reason="the first team")
        return {"verdict": "promote", "condition": "the first team", "team_version": version}

    return int(run.journal.once(run.key(0, "promote"), work, owner=stage_owner())["team_version"])
