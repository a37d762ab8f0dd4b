"""iterate: an iteration that was begun -> all of its stages, one after another in this process, and its record.

A schedule follows the one job that does it, stage by stage; where the job ends early, each stage that is left has a job of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipelines.monitoring.watching import check_summary
from pipelines.report.progress import Screen
from pipelines.report.record import finish_parent, record
from pipelines.run.run import Run
from pipelines.runners.begin import measure_last
from pipelines.runners.local_runner import train_all
from pipelines.stages.needed import Needed
from pipelines.stages.running import run_stage
from pipelines.stages.table import STAGES


def iterate(run: Run, iteration: int, *, address: str, screen: Screen) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each stage (`train/solver` where it is done per model group) and of `record` with what it hands on.

    Stages that are done already are not done again. Raises what a stage raises.
    """
    needed = Needed(run, iteration, connect=lambda: None)
    for name, stage in STAGES.items():
        print(f"{name} of iteration {iteration} of run {run.run_id}", flush=True)
        needed.settle(name)
        if not stage.is_per_model_group:
            yield name, stage.hand_on(run_stage(run, name, iteration).to_json())
            continue
        try:
            train_all(run, iteration)
        finally:  # where one failed, those that are done have their results all the same
            for group in run.config.train_tasks:
                if (ref := run.journal.ref(run.key(iteration, name, group))) is not None:
                    yield f"{name}/{group}", stage.hand_on(ref)
    yield "record", record_iteration(run, iteration, address=address, screen=screen)


def record_iteration(run: Run, iteration: int, *, address: str, screen: Screen) -> dict[str, Any]:
    """Records a finished iteration; after the last one the champion plays the test tasks, and the MLflow run of the whole run ends.

    Returns what `record` returns, of its check the summary.
    """
    ref = record(run, iteration)
    if iteration == run.config.iterations:
        measure_last(run, address=address, screen=screen)
        finish_parent(run)
    return ref | ({"watch": check_summary(ref["watch"])} if "watch" in ref else {})
