"""gate: evidence about a candidate -> promote, reject or inconclusive, and the condition that decided.

floors broken ------------------------------> reject
no champion --------------------------------> promote (the first team)
certainly gains more than min_gain ---------> promote
certainly not worse than non_inferiority ---> promote (only if set)
certainly neither --------------------------> reject
else ---------------------------------------> inconclusive
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipelines.sections import PromoteConfig
from pipelines.statistics import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What an evaluation found."""

    gain: Interval | None
    """Paired difference candidate - champion over the gate's tasks; None where there is no champion yet."""
    ok_share: float
    """Share of the candidate's episodes with status ok."""
    format_shares: Mapping[str, float]
    """Share of well-formed turns per agent; NaN where an agent made no turn, which no floor can judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the gate says."""

    verdict: Literal["promote", "reject", "inconclusive"]
    condition: str
    """Which condition decided, in words, with the numbers."""


def decide(promote: PromoteConfig, evidence: Evidence) -> Verdict:
    """The gate. "Certainly" means by the bound of the two-sided interval of the paired gain."""
    broken = _broken_floor(promote, evidence)
    if broken:
        return Verdict(verdict="reject", condition=broken)
    if evidence.gain is None:
        return Verdict(verdict="promote", condition="no champion yet: the first team whose floors hold is promoted")
    gain = evidence.gain
    numbers = f"gain {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}] on {gain.num_tasks} tasks"
    if gain.low > promote.min_gain:
        return Verdict(verdict="promote", condition=f"{numbers}: lower bound above min_gain {promote.min_gain:+.3f}")
    margin = promote.non_inferiority
    if margin is not None and gain.low > -margin:
        return Verdict(verdict="promote", condition=f"{numbers}: certainly not worse than by {margin:.3f}")
    needed = promote.min_gain if margin is None else min(promote.min_gain, -margin)
    name = "min_gain" if needed == promote.min_gain else "-non_inferiority"
    if gain.high <= needed:
        return Verdict(verdict="reject", condition=f"{numbers}: upper bound not above {name} {needed:+.3f}")
    return Verdict(verdict="inconclusive", condition=f"{numbers}: {name} {needed:+.3f} lies inside the interval")


def _broken_floor(promote: PromoteConfig, evidence: Evidence) -> str:
    """The first floor that does not hold, in words; empty where all hold."""
    if not evidence.ok_share >= promote.min_ok_share:
        return f"share of ok episodes {evidence.ok_share:.3f} is below min_ok_share {promote.min_ok_share:.3f}"
    for agent, share in evidence.format_shares.items():
        if not math.isnan(share) and share < promote.min_format_share:
            return f"share of well-formed turns of {agent} {share:.3f} is below {promote.min_format_share:.3f}"
    return ""
