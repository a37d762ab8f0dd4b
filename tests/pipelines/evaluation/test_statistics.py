"""Intervals that cover what they claim, and figures checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipelines.evaluation.statistics import (
    Resampling,
    exact_interval,
    mean_interval,
    paired_bootstrap,
    paired_interval,
    paired_ratio,
    pass_at_k,
)
from tests.algorithms.over_seeds import interval_over_seeds

pytestmark = pytest.mark.fast


def named(values: np.ndarray) -> dict[str, list[float]]:
    return {f"t{i}": list(np.atleast_1d(row)) for i, row in enumerate(values)}


def test_avg_and_pass_at_k_by_hand() -> None:
    outcomes = {"a": [1, 0, 0, 0], "b": [1, 1, 1, 1], "c": [0, 0, 0, 0]}
    assert mean_interval(outcomes).mean == pytest.approx((0.25 + 1 + 0) / 3)
    assert pass_at_k(outcomes, 1) == pytest.approx((0.25 + 1 + 0) / 3)
    assert pass_at_k(outcomes, 2) == pytest.approx((0.5 + 1 + 0) / 3)
    with pytest.raises(ValueError, match=r"pass@5 needs 5 episodes"):
        pass_at_k(outcomes, 5)


@pytest.mark.parametrize("draw", ["binary", "continuous"])
def test_the_interval_covers_the_truth_as_often_as_it_says(draw: str) -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        values = rng.binomial(1, 0.3, size=120) if draw == "binary" else rng.beta(3, 7, size=120)
        interval = mean_interval(named(values.astype(float)), Resampling(seed=seed, num_samples=2000))
        covered += interval.low <= 0.3 <= interval.high
    assert 0.90 <= covered / 200 <= 0.99


def test_pairing_removes_what_tasks_have_in_common() -> None:
    rng = np.random.default_rng(1)
    difficulty = rng.uniform(size=(300, 1))
    champion, candidate = named((rng.uniform(size=(300, 4)) < difficulty) * 0.8), {}
    for task_id, outcomes in champion.items():
        candidate[task_id] = [x + 0.05 for x in outcomes]
    gain = paired_interval(candidate, champion)
    assert gain.mean == pytest.approx(0.05)
    assert gain.low > 0
    assert mean_interval(candidate).low < mean_interval(champion).high


def test_episodes_of_a_task_are_clustered_not_counted_as_independent() -> None:
    values = np.random.default_rng(2).binomial(1, 0.5, size=100).astype(float)
    once = mean_interval(named(values))
    eight_times = mean_interval({t: v * 8 for t, v in named(values).items()})
    assert eight_times == once


def test_without_spread_the_interval_still_has_width() -> None:
    none_solved = mean_interval(named(np.zeros(10)))
    assert (none_solved.mean, none_solved.low) == (0, 0)
    assert none_solved.high == pytest.approx(1 - 0.025**0.1)
    same = paired_interval(named(np.ones(4)), named(np.ones(4)))
    assert same.low == -same.high < 0


def test_few_tasks_that_differ_decide_nothing() -> None:
    """Three wins and no loss have an exact p of 0.25, and four one of 0.125."""
    for num in (3, 4):
        few = paired_interval(*wins_and_losses(num, 0, 128 - num))
        assert few.mean == num / 128 and few.low <= 0
    many = paired_interval(*wins_and_losses(10, 0, 118))
    assert many.low > 0
    equal = paired_interval(*wins_and_losses(0, 0, 128))
    assert equal.low == -equal.high < 0


def test_a_team_that_is_worse_by_the_margin_is_rarely_promoted_where_few_tasks_differ() -> None:
    """The true gain is -0.02. With one task won and one lost in addition, as for matched pairs, 4.2% were certain of more."""
    num, win, lose, chance = 60, 0.025, 0.045, 0.0
    for won in range(16):
        for lost in range(16 - won):
            if paired_interval(*wins_and_losses(won, lost, num - won - lost)).low > -0.02:
                ways = math.comb(num, won) * math.comb(num - won, lost)
                chance += ways * win**won * lose**lost * (1 - win - lose) ** (num - won - lost)
    assert 0 < chance <= 0.025


def test_the_exact_interval_does_not_take_the_share_of_differing_tasks_as_known() -> None:
    lost = exact_interval(*wins_and_losses(0, 4, 124))
    assert lost.low < -2 * 4 / 128, "of 128 tasks 4 were lost by chance, where 8 might have been"


def test_a_bound_far_out_is_not_the_outermost_of_a_few_samples() -> None:
    won = wins_and_losses(40, 20, 90)
    few, many = (paired_interval(*won, Resampling(confidence=0.999, num_samples=num)) for num in (100, 100_000))
    assert (few.low, few.high) == pytest.approx((many.low, many.high), abs=0.015)


@pytest.mark.parametrize("num", [12, 40])
def test_thirds_have_the_interval_of_whole_numbers(num: int) -> None:
    rng, none = np.random.default_rng(4), named(np.zeros(num))
    for _ in range(20):
        values = rng.integers(0, 4, size=num).astype(float)
        whole, thirds = (paired_bootstrap(named(x), none, Resampling(num_samples=1000)) for x in (values, values / 3))
        assert (3 * thirds.low, 3 * thirds.high) == pytest.approx((whole.low, whole.high), abs=1e-9)


def test_the_same_seed_gives_the_same_interval() -> None:
    outcomes = named(np.random.default_rng(3).uniform(size=50))
    assert mean_interval(outcomes, Resampling(seed=5)) == mean_interval(outcomes, Resampling(seed=5))
    assert mean_interval(outcomes, Resampling(seed=5)) != mean_interval(outcomes, Resampling(seed=6))


def test_the_same_outcomes_in_another_order_give_the_same_interval() -> None:
    outcomes = np.random.default_rng(3).uniform(size=20)
    assert mean_interval(named(outcomes)) == mean_interval(named(outcomes[::-1]))


@pytest.mark.timeout(60)  # a loop over samples in Python would take minutes
def test_ten_thousand_samples_of_512_tasks_are_drawn_at_once() -> None:
    outcomes = named(np.random.default_rng(4).uniform(size=512))
    interval = mean_interval(outcomes, Resampling(num_samples=10_000))
    assert interval.ci95[0] < interval.mean < interval.ci95[1]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="same tasks on both sides; 2 differ"):
        paired_interval({"a": [1]}, {"b": [1]})
    with pytest.raises(ValueError, match="no outcomes"):
        mean_interval({})
    with pytest.raises(ValueError, match="'b' has an outcome that is not a finite number"):
        mean_interval({"a": [1.0], "b": [float("nan")]})


def test_an_interval_crossed_over_seeds_and_tasks_knows_that_both_vary() -> None:
    equal_seeds = [{"a": 0.0, "b": 1.0, "c": 1.0, "d": 0.0}] * 3
    found = interval_over_seeds(equal_seeds, Resampling(num_samples=4000))
    assert (found.mean, found.num_tasks) == (0.5, 4)
    assert (found.low, found.high) == (0.0, 1.0)
    one_seed_failed = [{f"t{i}": value for i in range(100)} for value in (0.6, 0.6, 0.0)]
    found = interval_over_seeds(one_seed_failed, Resampling(num_samples=4000))
    assert found.mean == pytest.approx(0.4)
    assert (found.low, found.high) == (pytest.approx(0.0), pytest.approx(0.6)), "a hundred tasks are no hundred seeds"


def test_tasks_that_each_seed_has_of_its_own_are_resampled_within_the_seed() -> None:
    values = mirrored(400)
    own = [{f"{seed}-{n}": 0.5 + value for n, value in enumerate(values.tolist())} for seed in range(3)]
    found = interval_over_seeds(own)
    width = (
        1.96 * values.std() / np.sqrt(3 * 400) * np.sqrt(5 / 3)
    )  # a seed that is drawn twice counts twice: E sum w^2 = 5/9
    assert (found.mean, found.num_tasks) == (pytest.approx(0.5), 1200)
    assert (0.5 - found.low, found.high - 0.5) == (pytest.approx(width, rel=0.05),) * 2
    one_seed_failed = [{f"{seed}-{n}": value for n in range(100)} for seed, value in enumerate((0.6, 0.6, 0.0))]
    found = interval_over_seeds(one_seed_failed)
    assert (found.low, found.mean, found.high) == (pytest.approx(0.0), pytest.approx(0.4), pytest.approx(0.6))


def test_no_seeds_and_no_tasks_have_no_interval() -> None:
    for nothing in ([], [{}], [{"a": 1.0}, {}]):
        with pytest.raises(ValueError, match="at least one seed, and one task of each"):
            interval_over_seeds(nothing)


def wins_and_losses(won: int, lost: int, same: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    differences = np.array([1.0] * won + [-1.0] * lost + [0.0] * same)
    return named((differences > 0).astype(float)), named((differences < 0).astype(float))


@pytest.mark.parametrize(("won", "lost"), [(9, 1), (8, 1), (8, 2), (1, 9), (5, 5), (6, 0), (5, 0)])
def test_the_exact_interval_excludes_0_just_where_mcnemars_exact_test_does(won: int, lost: int) -> None:
    p_value = min(1.0, 2 * sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1)) / 2 ** (won + lost))
    found = exact_interval(*wins_and_losses(won, lost, 30))
    assert found.mean == pytest.approx((won - lost) / (won + lost + 30))
    assert (not found.low <= 0 <= found.high) == (p_value <= 0.05)


def test_the_exact_test_of_teams_that_never_differ_proves_little_when_tasks_are_few() -> None:
    found = exact_interval(*wins_and_losses(0, 0, 10))
    assert found.mean == 0 and found.high == -found.low == pytest.approx(1 - 0.025**0.1)


def test_the_exact_test_refuses_what_is_not_one_outcome_of_0_or_1() -> None:
    with pytest.raises(ValueError, match=r"task 't0' has the outcomes \[0\.5\].*use evaluate\.test: auto"):
        exact_interval(named(np.array([0.5])), named(np.array([1.0])))
    with pytest.raises(ValueError, match=r"outcomes \[1\.0, 0\.0\]"):
        exact_interval({"t0": [1.0, 0.0]}, {"t0": [1.0]})


def test_a_ratio_is_of_means_over_tasks_and_covers_the_truth() -> None:
    rng, covered = np.random.default_rng(0), 0
    for seed in range(200):
        old = rng.gamma(4, 10, size=80)
        new = old * 1.2 * rng.lognormal(-0.02, 0.2, size=80)
        found = paired_ratio(named(new), named(old), Resampling(seed=seed, num_samples=1000))
        assert found is not None and found.mean == pytest.approx(new.mean() / old.mean())
        covered += found.low <= 1.2 <= found.high
    assert 0.88 <= covered / 200 <= 0.99
    assert paired_ratio(named(np.ones(3)), named(np.zeros(3))) is None


def mirrored(num: int) -> np.ndarray:
    """[num] values around 0 of which each has its opposite."""
    half = np.random.default_rng(7).normal(size=num // 2)
    return np.concatenate([half, -half])


def test_both_ends_of_a_percentile_interval_leave_out_the_same_share() -> None:
    values = 0.1 * mirrored(400)
    width = 1.96 * values.std() / np.sqrt(400)
    ratio = paired_ratio(named(1 + values), named(np.ones(400)))
    crossed = interval_over_seeds([dict(zip(named(values), values.tolist(), strict=True))])
    assert ratio is not None and ratio.num_tasks == crossed.num_tasks == 400
    for found, middle in ((ratio, 1.0), (crossed, 0.0), (paired_bootstrap(named(values), named(np.zeros(400))), 0.0)):
        assert (middle - found.low, found.high - middle) == (pytest.approx(width, rel=0.05),) * 2
        assert found.num_tasks == 400


@pytest.mark.parametrize(("won", "lost"), [(0, 6), (6, 0), (3, 5), (1, 0), (0, 1)])
def test_the_exact_interval_is_that_of_clopper_and_pearson(won: int, lost: int) -> None:
    from scipy.stats import binomtest

    known = binomtest(won, won + lost).proportion_ci(confidence_level=0.95, method="exact")
    found = exact_interval(*wins_and_losses(won, lost, 14 - won - lost))
    share = binomtest(won + lost, 14).proportion_ci(confidence_level=0.95, method="exact")
    below, above = 2 * known.low - 1, 2 * known.high - 1
    assert found.low == pytest.approx(min(below * share.low, below * share.high), abs=1e-9)
    assert found.high == pytest.approx(max(above * share.low, above * share.high), abs=1e-9)
