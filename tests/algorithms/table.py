"""table: the results of a comparison -> figures with intervals per row, as Markdown, JSON and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from pipelines.evaluation.statistics import Interval, Resampling, task_means
from tests.algorithms.over_seeds import interval_over_seeds

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Row -> its results, one per seed that is done."""
HEAD = ("algorithm", "seeds", "before", "after", "change, 95% interval", "s per iteration")


def figures(results: Results, *, seed: int = 0, num_samples: int = 10_000) -> dict[str, dict[str, Any]]:
    """Row -> means over its seeds, the paired change with its interval, whether that is away from 0, seconds.

    A row without a finished seed has no entry.
    """
    found = {}
    for row, done in results.items():
        if not done:
            continue
        change = interval_over_seeds(
            [_differences(one) for one in done], Resampling(seed=seed, num_samples=num_samples)
        )
        seconds = [s for one in done for s in one["seconds"]]
        found[row] = {
            "num_seeds": len(done),
            "before": _mean([one["before"] for one in done]),
            "after": _mean([one["after"] for one in done]),
            "change": change.mean,
            "ci95": change.ci95,
            "num_tasks": change.num_tasks,
            "is_improved": change.low > 0,
            "seconds_per_iteration": _mean(seconds),
            "after_by_seed": [one["after"] for one in done],
            "curves": [one["curve"] for one in done],
        }
    return found


def against(results: Results, reference: str, *, seed: int = 0, num_samples: int = 10_000) -> dict[str, Interval]:
    """Row -> what it scores after training more than `reference` on the same tasks, over the seeds that both have."""
    base = results.get(reference, ())
    found = {}
    for row, done in results.items():
        pairs = list(zip(done, base, strict=False))
        if row != reference and pairs:
            differences = [_minus(one["outcomes_after"], other["outcomes_after"]) for one, other in pairs]
            found[row] = interval_over_seeds(differences, Resampling(seed=seed, num_samples=num_samples))
    return found


def markdown(found: Mapping[str, Mapping[str, Any]], gains: Mapping[str, Interval], reference: str) -> str:
    """The table for a README, best first."""
    head = [*HEAD[:-1], f"over {reference}", HEAD[-1]]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_cells(row, found[row], gains.get(row)))} |" for row in _best_first(found)]
    return "\n".join(lines) + "\n"


def rich_table(found: Mapping[str, Mapping[str, Any]], gains: Mapping[str, Interval], reference: str) -> Table:
    """The same for the terminal."""
    table = Table(*HEAD[:-1], f"over {reference}", HEAD[-1])
    for row in _best_first(found):
        table.add_row(*(cell.replace("[", r"\[") for cell in _cells(row, found[row], gains.get(row))))
    return table


def _best_first(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted(found, key=lambda row: -found[row]["change"])


def _cells(row: str, about: Mapping[str, Any], gain: Interval | None) -> list[str]:
    low, high = about["ci95"]
    return [
        f"`{row}`",
        str(about["num_seeds"]),
        f"{about['before']:.3f}",
        f"{about['after']:.3f}",
        f"{about['change']:+.3f} [{low:+.3f}, {high:+.3f}]",
        f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]" if gain else "",
        f"{about['seconds_per_iteration']:.1f}",
    ]


def _differences(result: Mapping[str, Any]) -> dict[str, float]:
    return _minus(result["outcomes_after"], result["outcomes_before"])


def _minus(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Per task; an episode that failed on either side leaves its task out of neither: it is worth 0."""
    tasks = sorted(a.keys() | b.keys())
    means_a, means_b = (dict(zip(side, task_means(side), strict=True)) for side in (a, b))
    return {task: float(means_a.get(task, 0.0) - means_b.get(task, 0.0)) for task in tasks}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
