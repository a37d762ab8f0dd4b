"""gate: how often it promotes a team that is no better, and how often one that is, when it looks again and again.

Two teams play the same tasks, one episode each, up to 512 or 2,048 of them in ten looks, after each of which it decides. Both
solve a task with a chance of the task's own; the better one with 3 or 6 points more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipelines.config.sections import PromoteConfig
from pipelines.evaluation.confidence_sequence import paired_sequence
from pipelines.evaluation.gate import Evidence, decide_promotion
from pipelines.evaluation.statistics import Interval, Outcomes, paired_interval
from tests.bench.figures import Figure

NUM_PAIRS, NUM_LOOKS = 1000, 10


def measure(folder: Path) -> list[Figure]:
    """Shares of pairs that are promoted."""
    figures = []
    for num_tasks in (512, 2048):
        per_look = -(-num_tasks // NUM_LOOKS)
        for points in (0, 3, 6):
            promoted = share_promoted(points / 100, num_tasks=num_tasks, per_look=per_look, num_pairs=NUM_PAIRS)
            at_once = share_promoted(points / 100, num_tasks=num_tasks, per_look=num_tasks, num_pairs=NUM_PAIRS // 5)
            figures.append(
                Figure(
                    name=f"promoted at {points:+d} points, {num_tasks} tasks in {NUM_LOOKS} looks",
                    value=promoted,
                    limit=None if points else 0.05,
                    is_upper=True,
                    note=f"{NUM_PAIRS} pairs; all tasks at once, by the bootstrap: {at_once:.3f}",
                )
            )
    return figures


def share_promoted(gain: float, *, num_tasks: int, per_look: int, num_pairs: int, seed: int = 0) -> float:
    """Share of pairs of teams that the gate promotes with its defaults."""
    rng = np.random.default_rng(seed)
    num_promoted = 0
    for _ in range(num_pairs):
        chance = rng.beta(2, 1.3, size=num_tasks)
        old = (rng.random(num_tasks) < chance).astype(float)
        new = (rng.random(num_tasks) < np.minimum(chance + gain, 1)).astype(float)
        for n in [*range(per_look, num_tasks, per_look), num_tasks]:
            found = _interval(_named(new[:n]), _named(old[:n]), planned=num_tasks, is_sequential=per_look < num_tasks)
            verdict = decide_promotion(PromoteConfig(), Evidence(gain=found, ok_share=1.0, format_shares={})).verdict
            if verdict != "inconclusive":
                num_promoted += verdict == "promote"
                break
    return num_promoted / num_pairs


def _interval(new: Outcomes, old: Outcomes, *, planned: int, is_sequential: bool) -> Interval:
    return paired_sequence(new, old, planned=planned) if is_sequential else paired_interval(new, old, num_samples=2000)


def _named(values: np.ndarray) -> dict[str, list[float]]:
    return {str(i): [value] for i, value in enumerate(values.tolist())}
