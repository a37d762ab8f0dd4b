"""The gate: one row per way to decide."""

from __future__ import annotations

import pytest

from pipelines.gate import Evidence, decide
from pipelines.sections import PromoteConfig
from pipelines.statistics import Interval


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
        ({}, evidence(0.5, 0.9, ok=float("nan")), "reject", "below min_ok_share"),
        ({"min_format_share": 0.8}, evidence(0.5, 0.9, formats=0.7), "reject", "turns of verifier 0.700 is below 0.8"),
        ({"min_format_share": 0.8}, evidence(0.5, 0.9, formats=float("nan")), "promote", "lower bound above"),
    ],
)
def test_the_verdict_names_the_condition_that_decided(
    settings: dict[str, float], found: Evidence, verdict: str, condition: str
) -> None:
    decision = decide(PromoteConfig(**settings), found)
    assert decision.verdict == verdict
    assert condition in decision.condition


def test_the_first_team_is_promoted_if_the_floors_hold() -> None:
    assert decide(PromoteConfig(), Evidence(gain=None, ok_share=0.95, format_shares={})).verdict == "promote"
    assert decide(PromoteConfig(), Evidence(gain=None, ok_share=0.5, format_shares={})).verdict == "reject"
