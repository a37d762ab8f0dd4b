"""iterations: which iteration of a run is next."""

from __future__ import annotations

from pipelines.run.run import Run
from stores.stage_results import Decided


def next_iteration(run: Run) -> int | None:
    """The first iteration whose promote is not done; None after the last."""
    return next(iter(unfinished_iterations(run)), None)


def unfinished_iterations(run: Run) -> list[int]:
    """The iterations whose promote is not done, in order."""
    numbers = range(1, run.config.iterations + 1)
    return [number for number in numbers if run.iteration(number).find(Decided) is None]
