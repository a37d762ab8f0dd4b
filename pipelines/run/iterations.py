"""iterations: which iteration of a run is next."""

from __future__ import annotations

from pipelines.run.run import Run
from stores.stage_results import Decided


def next_iteration(run: Run) -> int | None:
    """The first iteration whose promote is not done; None after the last."""
    return next(iter(unfinished_iterations(run)), None)


def unfinished_iterations(run: Run) -> list[int]:
    """The iterations whose promote is not done, in order."""
    done = set(run.journal.finished(run.run_id, Decided.STAGE))
    return [number for number in range(1, run.config.iterations + 1) if number not in done]
