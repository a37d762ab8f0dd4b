"""begin: a run config -> an opened run after iteration 0: version 0 of every model group, the first champion, `before`."""

from __future__ import annotations

from typing import Any

from pipelines.cluster.owner_links import stage_owner
from pipelines.episodes.collector import end_collectors
from pipelines.episodes.sampling import Progress
from pipelines.report.progress import Screen
from pipelines.run.champions import champion_version, set_champion
from pipelines.run.disk import check_disk
from pipelines.run.iterations import free_iteration
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.runners.claim import claimed, reason_to_skip, take
from pipelines.runners.validate import check_tasks
from pipelines.stages.promote import register_team
from pipelines.stages.warmstart import StepProgress, warmstart
from stores.journal.journal import Lease
from stores.journal.stage_results import Decided, Measured, WarmStarted
from stores.types import ModelVersionRef


def begin_iteration(run: Run, claim: str, *, is_forced: bool, address: str, screen: Screen) -> dict[str, Any]:
    """Begins the run unless it has begun, and gives a claim its iteration.

    Returns {"iteration", "model_groups", "since"} (when the run was begun, unix seconds), or {"skip": reason} where nothing
    is to be trained now.
    """
    from pipelines.cluster.connect import connect

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
        for line in check_disk(run):
            screen.say(line)
        iteration = take(run, claim, otherwise=following)
    since = next(row.created_at for row in run.journal.runs() if row.run_id == run.run_id)
    return {"iteration": iteration, "model_groups": list(run.config.model_groups), "since": since}


def measure_last(run: Run, *, address: str, screen: Screen) -> None:
    """Measures the champion on the test tasks, after the last iteration."""
    from pipelines.cluster.connect import connect

    if run.iteration(run.config.iterations).find(Measured) is None:
        connect(address)
    with screen.stage("after: test tasks") as progress:
        after = measure_team(run, run.champion(), iteration=run.config.iterations, progress=progress)
    screen.measured("after", after)


def _needs_cluster(run: Run) -> bool:
    """True until version 0, the first champion and `before` are there."""
    begun = run.iteration(0)
    is_measured = run.config.tasks.test is None or begun.find(Measured) is not None
    return not is_measured or champion_version(run) is None or begun.find(WarmStarted) is None


def make_version_zero(run: Run, *, progress: StepProgress | None = None) -> WarmStarted:
    """Makes version 0 of every model group once: by a warm start, or from the models that the config names."""
    section = WarmStarted.STAGE if run.config.warmstart else "train"
    watchdog = Watchdog(
        run,
        run.key(0, WarmStarted.STAGE),
        timeout_s=(run.config.warmstart or run.config.train).stage_timeout_s,
        timeout_key=f"{section}.stage_timeout_s",
    )
    ref = watchdog.once(lambda lease: warmstart(run, progress=watchdog.reporting(progress)).to_json())
    return WarmStarted.from_json(ref)


def measure_team(
    run: Run, models: dict[str, ModelVersionRef], *, iteration: int, progress: Progress | None = None
) -> Measured | None:
    """Measures a team on the test tasks, once per iteration asked for; None where the config has no test tasks."""
    from pipelines.evaluation.measure import measure_on_test_tasks

    if run.config.tasks.test is None:
        return None
    watchdog = Watchdog(
        run,
        run.key(iteration, Measured.STAGE),
        timeout_s=run.config.evaluate.stage_timeout_s,
        timeout_key="evaluate.stage_timeout_s",
        recover=end_collectors,
    )

    def work(lease: Lease) -> dict[str, Any]:
        reporting = watchdog.reporting(progress)
        return measure_on_test_tasks(run, models, iteration=iteration, progress=reporting).to_json()

    return Measured.from_json(watchdog.once(work, alone=run.hold_engines()))


def register_first_team(run: Run) -> int:
    """Registers version 0 of every model group as the first team and champion; returns the champion's team version."""
    champion = champion_version(run)
    if champion is not None:
        return champion

    def work(lease: Lease) -> dict[str, Any]:
        models = run.trained(0)
        version = register_team(run, models, iteration=0, evaluation={})
        set_champion(run, models, version, reason="the first team")
        return Decided(verdict="promote", condition="the first team", team_version=version).to_json()

    decided = Decided.from_json(run.journal.once(run.key(0, Decided.STAGE), work, owner=stage_owner()))
    assert decided.team_version is not None, "the first team is always registered"
    return decided.team_version
