"""order: `loop.max_lag` -> which version samples an iteration, and in which order stages use the engines.

    W(k)                        what iteration k leaves; W(0) is version 0
    P(k) = W(k-1)               what it trains from; after a rejection with `on_reject: champion` the champion
    S(k) = P(max(1, k - lag))   what samples it

    lag 0   collect 1 | sync 1, evaluate 1, promote 1 | collect 2 | sync 2, evaluate 2, promote 2 | collect 3 ...
    lag 1   collect 1, collect 2 | sync 1, evaluate 1, promote 1 | collect 3 | sync 2, evaluate 2, promote 2 | collect 4 ...
               train 1 begins ──┘  train 2 begins ────────────────┘

What a run makes follows from S and P alone, which are numbers. The order only spares swaps of weights: between two collects the engines
take the new version and meet the champion, and keep what evaluate leaves, unless a rejection goes back to the champion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stores.journal.stage_results import Collected, Decided, Evaluated, Scored, Synced, Trained


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A stage of an iteration, for all its model groups."""

    iteration: int
    stage: str


def sampler_of(iteration: int, max_lag: int) -> int:
    """Returns the iteration whose parents sample this one."""
    return max(1, iteration - max_lag)


def engine_order(iterations: int, max_lag: int) -> Iterator[Step]:
    """Yields the stages that use the engines, in their order, from the first to the last iteration."""
    for iteration in range(1, min(1 + max_lag, iterations) + 1):
        yield Step(iteration, Collected.STAGE)
    for iteration in range(1, iterations + 1):
        for stage in (Synced.STAGE, Evaluated.STAGE, Decided.STAGE):
            yield Step(iteration, stage)
        if iteration + max_lag + 1 <= iterations:
            yield Step(iteration + max_lag + 1, Collected.STAGE)


def needs(step: Step, *, max_lag: int, returns_to_champion: bool) -> list[Step]:
    """Returns the steps whose results a step reads. They are of earlier iterations, or earlier in its own.

    Args: returns_to_champion: whether `promote.on_reject` is `champion`, so that promote says what is trained from.
    """
    k = step.iteration

    def for_parents(iteration: int) -> list[Step]:
        ends = (Trained.STAGE, Decided.STAGE) if returns_to_champion else (Trained.STAGE,)
        return [Step(iteration - 1, stage) for stage in ends]

    needed = {
        # What was carried over, and which served episodes were taken, is what the collect before says.
        Collected.STAGE: [Step(k - 1, Collected.STAGE), *for_parents(sampler_of(k, max_lag))],
        # The multiplier of `cost` and inferred credit go on from the score before.
        Scored.STAGE: [Step(k, Collected.STAGE), Step(k - 1, Scored.STAGE)],
        Trained.STAGE: [Step(k, Scored.STAGE), *for_parents(k)],
        Synced.STAGE: [Step(k, Trained.STAGE)],
        Evaluated.STAGE: [Step(k, Synced.STAGE), Step(k - 1, Decided.STAGE)],
        Decided.STAGE: [Step(k, Evaluated.STAGE)],
    }[step.stage]
    return [need for need in needed if need.iteration > 0]
