"""begin: a run config -> an opened run at iteration 0: version 0 of every model group, the first champion, `before`."""

from __future__ import annotations

from typing import Any

from pipelines.promote import champion_version, crown, register
from pipelines.run import Run
from pipelines.sampling import Progress
from pipelines.warmstart import StepProgress, warmstart
from stores.types import ModelVersionRef


def make_version_zero(run: Run, *, progress: StepProgress | None = None) -> dict[str, Any]:
    """Warm start, or adoption of the models the config names; done once."""
    return run.journal.once(run.key(0, "warmstart"), lambda lease: warmstart(run, progress=progress))


def measure_team(
    run: Run, models: dict[str, ModelVersionRef], *, iteration: int, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Accuracy on the test tasks, once per iteration asked for; None where the config has no test tasks."""
    from pipelines.evaluate import measure

    if run.config.tasks.test is None:
        return None
    return run.journal.once(
        run.key(iteration, "measure"), lambda lease: measure(run, models, iteration=iteration, progress=progress)
    )


def register_first_team(run: Run) -> int:
    """Version 0 of every model group is the first team and, until something beats it, the champion."""
    found = champion_version(run)
    if found is not None:
        return found

    def work(lease: Any) -> dict[str, Any]:
        models = run.trained(0)
        version = register(run, models, iteration=0, report={}, verdict=None)
        crown(run, models, version)
        return {"verdict": "promote", "condition": "the first team", "team_version": version}

    return int(run.journal.once(run.key(0, "promote"), work)["team_version"])
