"""missing: outcomes of two teams, some episodes of which have none -> outcomes for the bound that the gate decides by.

An episode that the infrastructure or the workflow's author caused to fail has no outcome. Leaving it out would let a team win
by losing fewer episodes than it does: 5% of equal candidates' losses left out promotes 18% of them at 512 tasks. So each missing
episode of the candidate counts as lost and each of the champion as won, the worst case for the candidate (Manski, "Partial
Identification of Probability Distributions", 2003): the true gain is not below the gain so found, whatever is missing.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.evaluation.statistics import Outcomes


def worst_case(
    candidate: Outcomes,
    champion: Outcomes,
    *,
    tasks: Iterable[str],
    episodes_per_task: int,
    lost: float = 0.0,
    won: float = 1.0,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns the outcomes of both teams on all `tasks`, in their order, with `episodes_per_task` of each.

    Args:
        candidate, champion: by task, the outcomes that there are; a task may be missing.
        lost, won: the outcomes of a lost and a won episode. Outcomes beyond them, which a credit rule may give, replace them.
    """
    known = [value for side in (candidate, champion) for values in side.values() for value in values]
    lost, won = min([lost, *known]), max([won, *known])
    ids = list(dict.fromkeys(tasks))
    return (
        {task: _filled(candidate.get(task, ()), lost, episodes_per_task) for task in ids},
        {task: _filled(champion.get(task, ()), won, episodes_per_task) for task in ids},
    )


def _filled(values: Iterable[float], value: float, number: int) -> list[float]:
    there = list(values)
    return [*there, *[value] * (number - len(there))]
