"""The interval that may be looked at: bounds on literal numbers, its promise under looking, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.evaluation.confidence_sequence import paired_sequence
from pipelines.evaluation.statistics import paired_interval

pytestmark = pytest.mark.fast


def sides(differences: np.ndarray) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Outcomes of 0 and 1 that differ so."""
    new = {str(i): [float(d > 0)] for i, d in enumerate(differences)}
    return new, {str(i): [float(d < 0)] for i, d in enumerate(differences)}


def drawn(rng: np.random.Generator, num: int, *, won: float, lost: float) -> np.ndarray:
    return rng.choice([1.0, -1.0, 0.0], size=num, p=[won, lost, 1 - won - lost])


@pytest.mark.nightly
def test_with_looks_after_every_few_tasks_it_misses_the_mean_as_rarely_as_it_says() -> None:
    rng, missed, missed_by_fixed = np.random.default_rng(0), 0, 0
    for _ in range(200):
        differences = drawn(rng, 320, won=0.2, lost=0.2)
        looks = [sides(differences[:n]) for n in range(32, 321, 32)]
        found = [paired_sequence(*look, planned=320, confidence=0.8) for look in looks]
        missed += any(not i.low <= 0 <= i.high for i in found)
        fixed = [paired_interval(*look, num_samples=200, confidence=0.8) for look in looks]
        missed_by_fixed += any(not i.low <= 0 <= i.high for i in fixed)
    assert missed <= 0.2 * 200
    assert missed_by_fixed > 0.35 * 200, "that is what it is for"


def test_it_narrows_around_the_mean_and_finds_what_is_there() -> None:
    rng = np.random.default_rng(1)
    differences = drawn(rng, 4000, won=0.3, lost=0.2)
    few, many = (paired_sequence(*sides(differences[:n]), planned=4000) for n in (200, 4000))
    assert few.low < 0.1 < few.high and many.low < 0.1 < many.high
    assert many.high - many.low < (few.high - few.low) / 3
    assert few.low < 0 < many.low, "400 more wins than losses are no chance"


def test_sides_exchanged_is_the_mirror_image_and_order_means_nothing() -> None:
    new, old = sides(drawn(np.random.default_rng(2), 100, won=0.3, lost=0.1))
    found, mirrored = paired_sequence(new, old, planned=200), paired_sequence(old, new, planned=200)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))
    backwards = dict(reversed(new.items()))
    assert paired_sequence(backwards, old, planned=200) == found


def test_one_task_proves_nothing_and_the_bounds_stay_where_a_difference_can_be() -> None:
    one = paired_sequence({"t": [1.0]}, {"t": [0.0]}, planned=1)
    assert -1 <= one.low < 0 < one.mean == 1.0 <= one.high + 1e-3


def test_wealth_by_hand() -> None:
    """One stake of s on n wins refutes means below m where (1 + s (1 - m))^n reaches 2 / alpha."""
    found = paired_sequence(*sides(np.ones(50)), planned=10**9, confidence=0.95)
    stakes = np.sqrt(2 * np.log(40) / (1e9 * 0.3)) * np.geomspace(0.6, 1.7, 7)
    wealth = np.mean((1 + stakes * (1 - found.low)) ** 50)
    assert wealth < 40 and found.low == pytest.approx(-1, abs=1e-3), "stakes for a billion tasks say nothing after 50"
    soon = paired_sequence(*sides(np.ones(50)), planned=50, confidence=0.95)
    stakes = np.minimum(np.sqrt(2 * np.log(40) / (50 * 0.3)) * np.geomspace(0.6, 1.7, 7), 0.98 / (1 + soon.low))
    assert np.mean((1 + stakes * (1 - soon.low)) ** 50) == pytest.approx(40, rel=0.02)


def test_outcomes_beyond_0_and_1_are_refused() -> None:
    with pytest.raises(ValueError, match=r"task 'b': outcomes differ by 3; evaluate\.tasks_per_look needs outcomes"):
        paired_sequence({"a": [0.0], "b": [3.0]}, {"a": [0.0], "b": [0.0]}, planned=2)
