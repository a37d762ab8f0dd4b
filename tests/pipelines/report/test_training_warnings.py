"""Warnings in words: each warning on literal histories, and none on a run that learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pipelines.figures.checks import deviation
from pipelines.report.training_warnings import latest_warnings

pytestmark = pytest.mark.fast

STILL = [0.4] * 8
RISING = [0.30, 0.35, 0.41, 0.46, 0.50, 0.55, 0.60, 0.64]


def history(
    *,
    outcome: Sequence[float] = STILL,
    reward: Sequence[float] | None = None,
    group: Mapping[str, Sequence[float]] | None = None,
    agent: Mapping[str, Sequence[float]] | None = None,
) -> list[dict[str, Any]]:
    """Iterations of one group and one agent."""
    return [
        {
            "iteration": k + 1,
            "metrics": {"outcome": outcome[k], "reward": (reward or outcome)[k]},
            "groups": {"g": {f"train/{name}": values[k] for name, values in (group or {}).items()}},
            "agents": {"a": {name: values[k] for name, values in (agent or {}).items()}},
        }
        for k in range(len(outcome))
    ]


def kinds(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    return [(s.kind, s.where, s.figure) for s in latest_warnings(rows)]


def test_a_value_is_as_far_as_its_distance_in_deviations() -> None:
    # median 2, median absolute deviation 1: (10 - 2) / 1.4826
    assert deviation(10.0, [1.0, 2.0, 3.0, 4.0, 1.0]) == pytest.approx(5.3959, abs=1e-4)
    assert deviation(3.0, [2.0, 2.0, 2.0]) == pytest.approx(5.0), "values that never varied: a tenth of the median"


def test_entropy_that_is_gone_is_a_collapse_where_nothing_is_learnt() -> None:
    gone = [0.8, 0.8, 0.6, 0.4, 0.2, 0.1, 0.03, 0.01]
    assert kinds(history(agent={"entropy": gone})) == [("collapse", "agent a", "entropy")]
    assert "entropy is 0.01 nats, it began at 0.8" in str(latest_warnings(history(agent={"entropy": gone}))[0])
    assert kinds(history(outcome=RISING, agent={"entropy": gone})) == [], "a policy that learns becomes sure"
    assert kinds(history(outcome=[0.95] * 8, agent={"entropy": gone})) == [], "nor is a solved task a collapse"


def test_an_outcome_that_comes_back_a_little_after_a_fall_does_not_rise() -> None:
    entropy = [1.0] * 6 + [0.5] * 3 + [0.001] * 3
    fallen = [0.8] * 6 + [0.1] * 3 + [0.2] * 3
    assert kinds(history(outcome=fallen, agent={"entropy": entropy})) == [("collapse", "agent a", "entropy")]
    assert kinds(history(outcome=[0.1] * 6 + [0.15] * 3 + [0.2] * 3, agent={"entropy": entropy})) == []


def synced(*told_apart: bool, trained: float = 32.0) -> list[dict[str, Any]]:
    rows = history(outcome=STILL[: len(told_apart)], group={"trained_rows": [trained] * len(told_apart)})
    proof = {"difference_new": 0.04, "difference_old": 0.05, "noise": 0.2}
    proofs = [{"g": {**proof, "is_indistinguishable": float(not told)}} for told in told_apart]
    return [row | {"proofs": proof} for row, proof in zip(rows, proofs, strict=True)]


def test_steps_below_what_the_engine_rounds_are_told_once_they_last() -> None:
    assert kinds(synced(True, False, False, False)) == [("no signal", "group g", "is_indistinguishable")]
    warning = str(latest_warnings(synced(True, False, False, False))[0])
    assert "differ by 0.05 nats where the engine rounds by 0.2" in warning and "optimizer.lr" in warning
    assert kinds(synced(False, False)) == [], "two may be chance"
    assert kinds(synced(False, False, True)) == kinds(synced(False, True, False)) == []
    assert kinds(synced(False, False, False, trained=0.0)) == [], "a critic's warm-up keeps the policy on purpose"
    failed = synced(False, False, False)
    failed = [row | {"groups": {"g": {"train/is_failed": 1.0}}} for row in failed]
    assert ("no signal", "group g", "is_indistinguishable") not in kinds(failed), "a failed group keeps its version"
    assert kinds(history(outcome=STILL)) == [], "an iteration of an earlier version has no proofs"


def test_gigpo_without_anchors_is_told() -> None:
    assert kinds(history(group={"anchor_share": [0.3, 0.1, 0.04, 0.0, 0.01]}, outcome=STILL[:5])) == [
        ("collapse", "group g", "anchor_share")
    ]
    assert kinds(history(group={"anchor_share": [0.0, 0.0, 0.0, 0.0, 0.3]}, outcome=STILL[:5])) == []


def test_groups_without_signal_are_a_collapse_unless_the_tasks_are_solved() -> None:
    silent = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.96, 0.97]
    assert kinds(history(group={"groups_without_signal": silent})) == [("collapse", "group g", "groups_without_signal")]
    assert kinds(history(outcome=[0.97] * 8, group={"groups_without_signal": silent})) == []


@pytest.mark.parametrize(
    ("figure", "usual", "jump"), [("kl_k3", 0.01, 0.4), ("grad_norm", 0.9, 12.0), ("clip_share", 0.05, 0.6)]
)
def test_a_jump_far_above_the_own_history_is_a_divergence(figure: str, usual: float, jump: float) -> None:
    noisy = [usual * f for f in (1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.1)]
    assert kinds(history(group={figure: [*noisy, jump]})) == [("divergence", "group g", figure)]
    assert kinds(history(group={figure: [*noisy, 2.5 * usual]})) == [], "twice is usual"
    assert kinds(history(group={figure: [jump] * 8})) == [], "a run that was always so"


def test_a_jump_below_the_absolute_bound_is_none() -> None:
    assert kinds(history(group={"kl_k3": [0.0001] * 7 + [0.01]})) == []


def test_a_critic_that_explains_less_than_nothing_for_long_is_a_divergence() -> None:
    bad = [-0.5, -0.4, -0.6, -0.5, -0.3, -0.4, -0.5, -0.4]
    assert kinds(history(group={"explained_variance": bad})) == [("divergence", "group g", "explained_variance")]
    assert kinds(history(group={"explained_variance": [*bad[:-1], 0.1]})) == []


def test_a_reward_that_rises_while_the_outcome_falls_is_hacking() -> None:
    falling = [0.5, 0.5, 0.5, 0.45, 0.4, 0.3, 0.25, 0.2]
    rows = history(outcome=falling, reward=[0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert kinds(rows) == [("hacking", "team", "outcome")]
    assert kinds(history(outcome=STILL, reward=RISING)) == [], "an outcome that stays is not yet one that falls"


def test_completions_that_grow_for_nothing_and_credit_against_the_outcome_are_hacking() -> None:
    grown = [10.0, 11, 10, 12, 15, 20, 24, 30]
    assert kinds(history(agent={"completion_tokens": grown})) == [("hacking", "agent a", "completion_tokens")]
    assert kinds(history(outcome=RISING, agent={"completion_tokens": grown})) == []
    against = [0.2, 0.1, 0.0, -0.1, -0.2, -0.3, -0.3, -0.4]
    assert kinds(history(agent={"credit_correlation": against})) == [("hacking", "agent a", "credit_correlation")]
    assert kinds(history(agent={"credit_correlation": [*against[:-1], 0.0]})) == []


def test_a_young_run_has_no_warnings() -> None:
    wild = {"kl_k3": [0.1, 9.0], "grad_norm": [1.0, 99.0], "explained_variance": [-3.0, -3.0], "entropy": [0.5, 0.0]}
    assert latest_warnings(history(outcome=[0.1, 0.0], group=wild, agent=wild)) == []
    assert latest_warnings([]) == []


def one(
    agents: Mapping[str, Mapping[str, float]],
    funnel: Mapping[str, Mapping[str, int]] | None = None,
    outcome: float = 0.1,
) -> list[dict[str, Any]]:
    """The first iteration of a run."""
    return [
        {
            "iteration": 1,
            "metrics": {"outcome": outcome, "reward": outcome},
            "agents": agents,
            "groups": {},
            "funnel": funnel or {},
        }
    ]


@pytest.mark.parametrize(
    ("agents", "funnel", "warned"),
    [
        ({"a": {"format": 0.0}, "b": {"format": 0.4}}, {}, [("no signal", "agent a", "format_share")]),
        ({"a": {"format": 0.3, "cut_share": 1.0}}, {}, [("no signal", "agent a", "cut_share")]),
        (
            {"a": {"format": 0.0, "cut_share": 1.0}},
            {"a": {"calls": 8, "trained": 0, "non_zero_advantage": 0}},
            [
                ("no signal", "agent a", "format_share"),
                ("no signal", "agent a", "cut_share"),
                ("no signal", "team", "non_zero_advantage"),
            ],
        ),
        ({"a": {"format": 0.02, "cut_share": 0.98}}, {"a": {"calls": 8, "non_zero_advantage": 1}}, []),
        (
            {"a": {}, "b": {}},
            {"a": {"calls": 4, "non_zero_advantage": 0}, "b": {"calls": 4, "non_zero_advantage": 2}},
            [],
        ),
        ({"a": {"format": 1.0, "cut_share": 0.0}}, {}, []),
    ],
)
def test_levels_that_no_run_learns_from_are_warned_of_at_once(
    agents: Mapping[str, Mapping[str, float]],
    funnel: Mapping[str, Mapping[str, int]],
    warned: list[tuple[str, str, str]],
) -> None:
    rows = one(agents, funnel)
    assert kinds(rows) == warned
    assert all(warning.iteration == 1 and warning.try_ for warning in latest_warnings(rows))


def test_a_solved_task_needs_no_advantage() -> None:
    assert kinds(one({"a": {"format": 1.0}}, {"a": {"calls": 8, "non_zero_advantage": 0}}, outcome=1.0)) == []


def test_a_hopeless_level_is_in_the_table_of_warnings_under_one_key() -> None:
    (warning,) = latest_warnings(one({"a": {"format": 0.0}}))
    assert warning.key == "no_signal/agent/a/format_share"
    assert str(warning).startswith("no signal, agent a, iteration 1: no turn is well-formed; try: ")
