"""iterations: which iteration of a run is next."""

from __future__ import annotations

from pipelines.run.run import Run


def next_iteration(run: Run) -> int | None:
    """The first iteration whose promote is not done; None after the last."""
    for iteration in range(1, run.config.iterations + 1):
        if run.journal.ref(run.key(iteration, "promote")) is None:
            return iteration
    return None
