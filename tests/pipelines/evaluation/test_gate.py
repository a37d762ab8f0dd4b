"""The gate: one row per way to decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipelines.config.sections import PromoteConfig
from pipelines.evaluation.gate import Evidence, LooksToCome, Verdict, decide_promotion, margin_after
from pipelines.evaluation.guards import Guarded
from pipelines.evaluation.statistics import Interval
from pipelines.figures.registry import FIGURES

pytestmark = pytest.mark.fast


def evidence(low: float, high: float, *, ok: float = 1.0, formats: float = 1.0) -> Evidence:
    gain = Interval(mean=(low + high) / 2, low=low, high=high, num_tasks=256)
    return Evidence(gain=gain, ok_share=ok, format_shares={"solver": 1.0, "verifier": formats})


@pytest.mark.parametrize(
    ("settings", "found", "verdict", "condition"),
    [
        ({}, evidence(0.02, 0.10), "promote", "gain +0.060 [+0.020, +0.100] on 256 tasks: lower bound above min_gain"),
        ({}, evidence(0.00, 0.10), "inconclusive", "min_gain +0.000 lies inside"),
        ({}, evidence(-0.10, -0.02), "reject", "upper bound not above min_gain +0.000"),
        ({"min_gain": 0.05}, evidence(0.02, 0.10), "inconclusive", "min_gain +0.050 lies inside"),
        ({"min_gain": 0.05}, evidence(0.02, 0.04), "reject", "upper bound not above min_gain +0.050"),
        ({"non_inferiority": 0.02}, evidence(-0.01, 0.05), "promote", "certainly not worse than by 0.020"),
        ({"non_inferiority": 0.02}, evidence(-0.03, 0.05), "inconclusive", "-non_inferiority -0.020 lies inside"),
        ({"non_inferiority": 0.02}, evidence(-0.09, -0.03), "reject", "upper bound not above -non_inferiority"),
        ({}, evidence(0.5, 0.9, ok=0.85), "reject", "ok episodes 0.850 is below min_ok_share 0.900"),
        ({"min_format_share": 0.8}, evidence(0.5, 0.9, formats=0.7), "reject", "turns of verifier 0.700 is below 0.8"),
    ],
)
def test_the_verdict_names_the_condition_that_decided(
    settings: dict[str, float], found: Evidence, verdict: str, condition: str
) -> None:
    decision = decide_promotion(PromoteConfig(**settings), found)
    assert decision.verdict == verdict
    assert condition in decision.condition


def test_the_worst_case_decides_a_promotion_and_what_there_is_a_rejection() -> None:
    def found(low: float, high: float) -> Evidence:
        bound = Interval(mean=(low + high) / 2, low=low, high=high, num_tasks=300)
        return replace(evidence(0.02, 0.10), bound=bound, num_missing=(40, 4))

    said = "with the missing episodes against the candidate (40 of its own lost, 4 of the champion's won)"
    for bound, verdict in ((found(0.01, 0.05), "promote"), (found(-0.01, 0.05), "inconclusive")):
        decision = decide_promotion(PromoteConfig(), bound)
        assert decision.verdict == verdict and said in decision.condition
        assert "gain +0.060 [+0.020, +0.100] on 256 tasks; +0.0" in decision.condition
    assert decide_promotion(PromoteConfig(), found(-0.3, -0.1)).verdict == "inconclusive", "it may only be unlucky"


@pytest.mark.parametrize(("settings", "share"), [({}, "ok"), ({"min_format_share": 0.9}, "formats")])
def test_before_the_last_look_a_floor_rejects_only_where_it_is_certainly_broken(
    settings: dict[str, float], share: str
) -> None:
    def decide(found: float, low: float, *, is_last: bool = False) -> Verdict:
        to_come = None if is_last else LooksToCome(51, {"solver": 51, "verifier": 51}, 0.995)
        return decide_promotion(
            PromoteConfig(**settings), replace(evidence(low, 0.5, **{share: found}), looks_to_come=to_come)
        )

    assert decide(0.88, -0.1).verdict == "inconclusive"
    unclear = decide(0.88, 0.1)
    assert unclear.verdict == "inconclusive" and "but not sure of share of" in unclear.condition
    assert decide(0.6, 0.1).verdict == "reject"
    rare = LooksToCome(51, {"solver": 51, "verifier": 5}, 0.995)
    spoke_rarely = replace(evidence(-0.1, 0.5, formats=0.6), looks_to_come=rare)
    assert decide_promotion(PromoteConfig(min_format_share=0.9), spoke_rarely).verdict == "inconclusive"
    assert decide(0.88, 0.1, is_last=True).verdict == "reject" and decide(0.9, 0.1).verdict == "promote"


def test_a_sound_candidate_is_hardly_rejected_by_a_floor_however_often_it_is_looked_at() -> None:
    """A true share of 0.93 over a floor of 0.9: rejected in 22% of runs where each look judged the share as it was."""
    rng, num, runs = np.random.default_rng(0), 512, 400
    sizes = [*range(51, num, 51), num]

    def is_rejected(is_ok: np.ndarray, size: int) -> bool:
        to_come = (
            LooksToCome(size, dict.fromkeys(("solver", "verifier"), size), 1 - 0.05 / len(sizes))
            if size < num
            else None
        )
        found = replace(evidence(-0.1, 0.1, ok=float(is_ok[:size].mean())), looks_to_come=to_come)
        return decide_promotion(PromoteConfig(), found).verdict == "reject"

    played = [rng.random(num) < 0.93 for _ in range(runs)]
    assert sum(any(is_rejected(is_ok, size) for size in sizes) for is_ok in played) / runs <= 0.02


def test_the_first_team_is_promoted_if_the_floors_hold() -> None:
    assert decide_promotion(PromoteConfig(), Evidence(gain=None, ok_share=0.95, format_shares={})).verdict == "promote"
    assert decide_promotion(PromoteConfig(), Evidence(gain=None, ok_share=0.5, format_shares={})).verdict == "reject"


def test_a_broken_floor_says_how_the_episodes_ended_and_what_to_raise() -> None:
    found = replace(evidence(0.5, 0.9, ok=0.1), not_ok="9 of 10 are truncated (raise agents.solver.max_tokens)")
    assert decide_promotion(PromoteConfig(), found).condition == (
        "share of ok episodes 0.100 is below min_ok_share 0.900: 9 of 10 are truncated (raise agents.solver.max_tokens); "
        "or lower promote.min_ok_share, which lets such episodes be as they are"
    )


def guarded(low: float, high: float, state: str) -> Guarded:
    found = Interval(mean=(low + high) / 2, low=low, high=high, num_tasks=256)
    return Guarded(figure=FIGURES["completion_tokens"], found=found, limit=1.5, state=state)  # type: ignore[arg-type]


def test_a_broken_guard_rejects_whatever_is_gained_and_an_unclear_one_asks_for_more() -> None:
    gains = evidence(0.1, 0.3)
    broken = decide_promotion(PromoteConfig(), replace(gains, guards=[guarded(1.9, 2.1, "broken")]))
    assert (broken.verdict, broken.condition) == (
        "reject",
        "guard completion_tokens x2.00 [1.90, 2.10], at most x1.50",
    )
    unclear = decide_promotion(PromoteConfig(), replace(gains, guards=[guarded(1.2, 1.6, "unclear")]))
    assert unclear.verdict == "inconclusive" and "but not sure of completion_tokens x1.40" in unclear.condition
    assert decide_promotion(PromoteConfig(), replace(gains, guards=[guarded(0.9, 1.1, "holds")])).verdict == "promote"
    loses = evidence(-0.3, -0.1)
    assert decide_promotion(PromoteConfig(), replace(loses, guards=[guarded(1.2, 1.6, "unclear")])).verdict == "reject"


def test_a_source_that_certainly_loses_rejects_where_a_limit_is_set() -> None:
    split = {
        "algebra": Interval(mean=0.3, low=0.2, high=0.4, num_tasks=99),
        "words": Interval(mean=-0.2, low=-0.3, high=-0.1, num_tasks=50),
    }
    found = replace(evidence(0.1, 0.3), sources=split)
    assert decide_promotion(PromoteConfig(), found).verdict == "promote"
    assert decide_promotion(PromoteConfig(max_source_loss=0.1), found).verdict == "inconclusive", (
        "it may be just so much"
    )
    verdict = decide_promotion(PromoteConfig(max_source_loss=0.05), found)
    assert verdict.verdict == "reject" and "source 'words' loses: -0.200 [-0.300, -0.100] on 50" in verdict.condition


def test_a_source_that_may_lose_too_much_is_not_sure_and_too_few_tasks_are_said_to_be() -> None:
    split = {"algebra": Interval(mean=0.0, low=-0.35, high=0.35, num_tasks=10)}
    found = replace(evidence(0.1, 0.3), sources=split)
    assert decide_promotion(PromoteConfig(), found).verdict == "promote"
    verdict = decide_promotion(PromoteConfig(max_source_loss=0.1), found)
    assert verdict.verdict == "inconclusive" and "but not sure of source 'algebra': +0.000 [-0.350" in verdict.condition
    assert "so few tasks" not in verdict.condition
    verdict = decide_promotion(PromoteConfig(max_source_loss=0.1), replace(found, small_sources=["algebra"]))
    assert "max_source_loss 0.100; so few tasks cannot show less" in verdict.condition
    sure = {"algebra": Interval(mean=0.0, low=-0.09, high=0.09, num_tasks=200)}
    assert decide_promotion(PromoteConfig(max_source_loss=0.1), replace(found, sources=sure)).verdict == "promote"


def test_the_margin_is_spent_once() -> None:
    found = evidence(-0.015, 0.05)
    promote = PromoteConfig(non_inferiority=0.03)
    assert decide_promotion(promote, replace(found, margin_spent=0.01)).verdict == "promote"
    verdict = decide_promotion(promote, replace(found, margin_spent=0.02))
    assert verdict.verdict == "inconclusive" and "-non_inferiority -0.010 lies inside" in verdict.condition
    assert decide_promotion(promote, replace(evidence(0.01, 0.05), margin_spent=0.03)).verdict == "promote", "a gain"
    assert [margin_after(0.01, low) for low in (-0.015, 0.004, 0.2)] == pytest.approx([0.025, 0.006, 0.0])
