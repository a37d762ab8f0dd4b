"""Bounds by betting: by hand, their promise for any distribution and under looking, and families of tasks as units."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.evaluation.betting import CELL, FIRST_VARIANCE, LARGEST_LOSS, mean_bounds
from pipelines.evaluation.statistics import (
    Resampling,
    exact_interval,
    mean_interval,
    paired_bootstrap,
    paired_interval,
    paired_ratio,
    paired_sequence,
)
from tests.algorithms.over_seeds import interval_over_seeds

pytestmark = pytest.mark.fast

Values = NDArray[np.float64]
Sides = tuple[dict[str, list[float]], dict[str, list[float]]]


def sides(differences: Values, champion: float = 0.6) -> Sides:
    """Graded outcomes that differ so."""
    ids = [f"t{i}" for i in range(len(differences))]
    return {t: [champion + d] for t, d in zip(ids, differences, strict=True)}, {t: [champion] for t in ids}


def log_wealth(values: Values, mean: float, *, planned: int, target: float) -> float:
    """The most that bets against a mean have won, stake by stake: those against the upper end of its cell."""
    end = math.ceil((mean + 1 - CELL / 2) / CELL - 1e-9) * CELL - 1 + CELL / 2
    of_end, most, wealth, squares = 0.0, 0.0, 0.0, FIRST_VARIANCE
    for number, value in enumerate(values):
        missing, to_come = max(target - of_end, 0), max(planned - number, 1)
        stake = min(math.sqrt(2 * missing / (squares / (number + 1) * to_come)), LARGEST_LOSS / (1 + end))
        of_end += math.log1p(stake * (value - end)) if missing else 0
        wealth += math.log1p(stake * (value - mean))
        most, squares = max(most, wealth), squares + (value - end) ** 2
    return most


@pytest.mark.parametrize(("num", "planned"), [(3, 3), (40, 40), (40, 100)])
def test_the_lower_bound_is_the_last_mean_that_the_bets_refute(num: int, planned: int) -> None:
    values = np.random.default_rng(num).uniform(-0.2, 0.6, size=num)
    low, high = mean_bounds(values, planned=planned, confidence=0.95)
    target = math.log(40)
    if num > 3:
        assert log_wealth(values, low, planned=planned, target=target) >= target
        assert log_wealth(-values, -high, planned=planned, target=target) >= target
    assert log_wealth(values, low + 1e-4, planned=planned, target=target) < target
    assert log_wealth(-values, -high + 1e-4, planned=planned, target=target) < target
    assert low <= values.mean() <= high


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60), st.sampled_from([0.8, 0.95, 0.999]))
@example([1.0] * 20 + [-1.0] * 40, 0.8)
def test_the_bounds_are_in_the_range_and_in_order(values: list[float], confidence: float) -> None:
    low, high = mean_bounds(np.array(values), planned=len(values), confidence=confidence)
    assert -1 <= low <= high <= 1


@pytest.mark.parametrize("num", [60, 1000, 2000])
def test_a_gain_of_1_on_every_task_is_as_certain_with_more_of_them(num: int) -> None:
    low, high = mean_bounds(np.ones(num), planned=num, confidence=0.95)
    assert 1 - 10 / num < low < high == 1
    assert mean_bounds(-np.ones(num), planned=num, confidence=0.95) == (-high, -low)


def fails_on(share: float, *, moved: float = 1.0) -> Callable[[np.random.Generator, int], Values]:
    """0 in place of 0.6 on a share of the tasks and a gain on others that makes up for it: a true gain of 0."""

    def draw(rng: np.random.Generator, num: int) -> Values:
        fails, moves = rng.random(num) < share, rng.random(num) < moved
        return np.where(fails, -0.6, np.where(moves, share * 0.6 / ((1 - share) * moved), 0.0))

    return draw


@pytest.mark.parametrize(
    ("draw", "num_tasks", "least_by_bootstrap"),
    [
        (fails_on(0.05), 20, 0.15),
        (fails_on(0.02), 50, 0.15),
        (fails_on(0.01), 100, 0.15),
        (fails_on(0.005, moved=0.3), 100, 0.3),
    ],
)
def test_a_team_that_rarely_fails_and_gains_a_little_elsewhere_is_no_better(
    draw: Callable[[np.random.Generator, int], Values], num_tasks: int, least_by_bootstrap: float
) -> None:
    rng, num_pairs = np.random.default_rng(0), 200
    pairs = [sides(draw(rng, num_tasks)) for _ in range(num_pairs)]
    assert sum(paired_interval(*pair).low > 0 for pair in pairs) <= 0.025 * num_pairs
    by_bootstrap = sum(paired_bootstrap(*pair, Resampling(num_samples=200)).low > 0 for pair in pairs)
    assert by_bootstrap > least_by_bootstrap * num_pairs, "that is what it is for"


def test_a_gain_on_every_task_is_found() -> None:
    rng = np.random.default_rng(1)
    found = [paired_interval(*sides(np.clip(rng.normal(0.1, 0.15, size=100), -0.6, 0.4))).low > 0 for _ in range(40)]
    assert sum(found) >= 38


@pytest.mark.nightly
def test_with_looks_after_every_few_tasks_it_misses_the_mean_as_rarely_as_it_says() -> None:
    rng, missed, missed_by_fixed = np.random.default_rng(0), 0, 0
    for _ in range(200):
        differences = rng.choice([0.4, -0.4, 0.0], size=320, p=[0.2, 0.2, 0.6])
        looks = [sides(differences[:n]) for n in range(32, 321, 32)]
        found = [paired_sequence(*look, Resampling(confidence=0.8), planned=320) for look in looks]
        missed += any(not i.low <= 0 <= i.high for i in found)
        fixed = [paired_bootstrap(*look, Resampling(num_samples=200, confidence=0.8)) for look in looks]
        missed_by_fixed += any(not i.low <= 0 <= i.high for i in fixed)
    assert missed <= 0.285 * 200, "three standard errors above what it says"
    assert missed_by_fixed > 0.35 * 200, "that is what it is for"


def test_it_narrows_around_the_mean_and_finds_what_is_there() -> None:
    differences = np.random.default_rng(1).choice([0.4, -0.4, 0.0], size=2000, p=[0.4, 0.2, 0.4])
    few, many = (paired_sequence(*sides(differences[:n]), planned=2000) for n in (200, 2000))
    assert few.low < 0.08 < few.high and many.low < 0.08 < many.high
    assert few.low < 0 < many.low, "400 more wins than losses are no chance"


def test_a_bound_that_was_reached_at_one_look_stays_at_the_next() -> None:
    differences = np.concatenate([np.full(60, 0.3), np.full(6, -0.3)])
    early, late = (paired_sequence(*sides(differences[:n]), planned=66) for n in (60, 66))
    assert 0 < early.low <= late.low


def test_a_large_family_at_a_later_look_leaves_the_bound_where_it_was() -> None:
    new, old = sides(np.full(80, 0.3))
    families = {f"t{i}": "late" for i in range(60, 80)}
    early, late = (
        paired_sequence(
            *({f"t{i}": side[f"t{i}"] for i in range(n)} for side in (new, old)),
            Resampling(families=families),
            planned=80,
        )
        for n in (60, 80)
    )
    assert -1 < early.low <= late.low


def test_sides_exchanged_is_the_mirror_image_and_the_order_of_the_mapping_means_nothing() -> None:
    new, old = sides(np.random.default_rng(2).uniform(-0.3, 0.4, size=100))
    found, mirrored = paired_interval(new, old), paired_interval(old, new)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))
    backwards = paired_interval(dict(reversed(new.items())), old)
    assert (backwards.low, backwards.high) == (found.low, found.high)


def test_one_task_proves_nothing_and_the_bounds_stay_where_a_difference_can_be() -> None:
    for one in (paired_interval({"t": [0.9]}, {"t": [0.0]}), paired_sequence({"t": [0.9]}, {"t": [0.0]}, planned=1)):
        assert -1 <= one.low < 0 < one.mean == 0.9 <= one.high <= 1


def test_outcomes_beyond_0_and_1_widen_the_range() -> None:
    rng = np.random.default_rng(3)
    new = {f"t{i}": [float(x)] for i, x in enumerate(rng.choice([-1.0, 2.0], size=60))}
    found = paired_interval(new, dict.fromkeys(new, (0.0,)))
    within = paired_interval({t: [v[0] / 2] for t, v in new.items()}, dict.fromkeys(new, (0.0,)))
    assert (found.low, found.high) == pytest.approx((2 * within.low, 2 * within.high))


def test_a_rare_loss_of_2_is_allowed_for_where_an_outcome_of_minus_1_was_seen() -> None:
    rng, promoted = np.random.default_rng(5), 0
    for _ in range(100):
        old = np.where(np.arange(200) % 10, 1.0, -1.0)
        new = np.where((old > 0) & (rng.random(200) < 0.011), -1.0, old + 0.02)
        promoted += paired_interval(*({f"t{i}": [v] for i, v in enumerate(side)} for side in (new, old))).low > 0
    assert promoted <= 3


def test_copies_of_a_task_in_one_family_prove_as_much_as_the_task_alone() -> None:
    rng = np.random.default_rng(4)
    once = sides(rng.uniform(-0.3, 0.4, size=60))
    copied: Sides = ({}, {})
    families: dict[str, str] = {}
    for copy in range(5):
        for side, copies in zip(once, copied, strict=True):
            copies |= {f"{task}-{copy}": outcomes for task, outcomes in side.items()}
        families |= {f"{task}-{copy}": task for task in once[0]}
    for interval in (paired_interval, paired_bootstrap, paired_ratio):
        alone, together = interval(*once), interval(*copied, Resampling(families=families))
        assert alone is not None and together is not None
        assert (together.low, together.high) == pytest.approx((alone.low, alone.high))
        assert together.num_tasks == 300
    assert mean_interval(copied[0], Resampling(families=families)).ci95 == pytest.approx(mean_interval(once[0]).ci95)
    differences = [{t: v[0] for t, v in copied[0].items()}] * 2
    assert interval_over_seeds(differences, Resampling(families=families)).ci95 == pytest.approx(
        interval_over_seeds([{t: v[0] for t, v in once[0].items()}] * 2).ci95
    )


def test_a_mean_stays_one_over_tasks_where_families_differ_in_size() -> None:
    outcomes = {"a1": [1.0], "a2": [1.0], "a3": [1.0], "b": [0.0]}
    families = {"a1": "a", "a2": "a", "a3": "a"}
    assert mean_interval(outcomes, Resampling(families=families)).mean == 0.75
    assert paired_interval(outcomes, dict.fromkeys(outcomes, (0.0,)), Resampling(families=families)).mean == 0.75


def test_accuracies_of_large_and_small_families_have_bounds_in_0_to_1_that_hold() -> None:
    rng, missed = np.random.default_rng(6), 0
    for _ in range(100):
        of_task = np.repeat(np.arange(30), np.minimum(rng.pareto(1, size=30).astype(int) + 1, 30))
        solved = (rng.random(30) < 0.5).astype(float)[of_task]
        found = mean_interval(
            {str(task): [value] for task, value in enumerate(solved)},
            Resampling(
                families={str(task): f"family {number}" for task, number in enumerate(of_task)}, num_samples=1000
            ),
        )
        assert 0 <= found.low <= found.mean <= found.high <= 1
        missed += not found.low <= 0.5 <= found.high
    assert missed <= 10, "about 20 where the sums alone are resampled"


@pytest.mark.parametrize("size", [2, 5])
def test_equal_teams_on_variants_of_problems_are_not_promoted(size: int) -> None:
    rng, num_pairs = np.random.default_rng(size), 100
    promoted, promoted_as_single = 0, 0
    for _ in range(num_pairs):
        shared = np.repeat(rng.choice([-1, 0, 1], size=100 // size, p=[0.3, 0.4, 0.3]), size)
        new = {f"t{i}": [float(d > 0)] for i, d in enumerate(shared)}
        old = {f"t{i}": [float(d < 0)] for i, d in enumerate(shared)}
        families = {f"t{i}": str(i // size) for i in range(len(shared))}
        promoted += paired_interval(new, old, Resampling(families=families)).low > 0
        promoted_as_single += paired_interval(new, old, Resampling(num_samples=200)).low > 0
    assert promoted <= 0.03 * num_pairs < promoted_as_single


def test_the_exact_test_refuses_variants_of_one_problem() -> None:
    new = {"a": [1.0], "b": [1.0], "c": [0.0]}
    with pytest.raises(ValueError, match=r"2 tasks are of the family 'x'.*use evaluate\.test: auto"):
        exact_interval(new, new, Resampling(families={"a": "x", "b": "x"}))
    assert exact_interval(new, new, Resampling(families={"a": "x"})).mean == 0
