"""guards: episodes of candidate and champion on the same tasks -> what must not get worse, whatever the outcome gains.

Each guard is a figure of `pipelines.figures` per episode, averaged per task, and compared on the same tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.config.sections import GuardsConfig
from pipelines.evaluation.statistics import Interval, Resampling, paired_bootstrap, paired_ratio
from pipelines.figures.figure import Figure, State
from pipelines.figures.registry import FIGURES, Figures, number_of
from stores.types import Trace, families


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """The result of one guard."""

    figure: Figure
    found: Interval
    """Candidate minus champion, or candidate over champion."""
    limit: float
    """The limit of the allowed change, in the same unit."""
    state: State

    def __str__(self) -> str:
        """`completion_tokens x1.98 [1.91, 2.05], at most x1.50`."""
        return self.figure.words(self.found.mean, self.found.low, self.found.high, self.limit)


def check_guards(
    candidate: Sequence[Trace],
    champion: Sequence[Trace],
    *,
    config: GuardsConfig,
    figures: Figures = FIGURES,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Guarded]:
    """Checks every guard that is set and of which both sides have a figure, on the tasks that both played.

    Few families break none: at 95% it takes six.
    """
    results = []
    how = Resampling(families=families(trace.task for trace in champion), confidence=confidence, seed=seed)
    for figure in figures.values():
        margin = config.of(figure.name, figure.guard)
        if figure.of_episode is None or margin is None or margin == math.inf:
            continue
        new, old = _by_task(candidate, figure), _by_task(champion, figure)
        both = [task for task in new if task in old]
        if not both:
            continue
        pair = {task: new[task] for task in both}, {task: old[task] for task in both}
        interval = (
            paired_ratio(*pair, how, least=figure.least)
            if figure.compared_by == "ratio"
            else paired_bootstrap(*pair, how)
        )
        if interval is None:  # nothing to divide by: neither team calls a tool
            continue
        limit = figure.limit(margin)
        state = figure.state(interval.low, interval.high, limit)
        num_families = len({how.families.get(task, task) for task in both})
        if state == "broken" and 2.0**-num_families > how.tails[0]:
            state = "unclear"  # not even a sign test of families that are all worse is as sure; one alone has no spread
        results.append(Guarded(figure=figure, found=interval, limit=limit, state=state))
    return results


def _by_task(traces: Sequence[Trace], figure: Figure) -> dict[str, list[float]]:
    assert figure.of_episode is not None, "a guard has one"
    values: dict[str, list[float]] = {}
    for trace in traces:
        of_episode = number_of(figure.name, figure.of_episode(trace))
        if not math.isnan(of_episode):
            values.setdefault(trace.task.task_id, []).append(of_episode)
    return values
