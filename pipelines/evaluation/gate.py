"""gate: evidence about a candidate -> promote, reject or inconclusive, and the condition that decided.

floor or guard broken, a source lost -------> reject (a floor before the last look: certainly broken)
no champion --------------------------------> promote (the first team)
certainly gains more than min_gain ---------> promote   \\ inconclusive where a floor,
certainly not worse than non_inferiority ---> promote   / guard or source is unclear
certainly neither --------------------------> reject
else ---------------------------------------> inconclusive

What is certain for a promotion holds whatever the missing episodes would have been (`worst_case`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipelines.config.sections import PromoteConfig
from pipelines.evaluation.guards import Guarded
from pipelines.evaluation.statistics import Interval, Outcomes, exact_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The results of an evaluation on which the gate decides."""

    gain: Interval | None
    """Paired difference candidate - champion over the tasks that both have an outcome for; None where there is no champion
    yet."""
    ok_share: float
    """Share of the candidate's episodes with status ok."""
    format_shares: Mapping[str, float]
    """Share of well-formed turns per agent that made a turn."""
    guards: Sequence[Guarded] = ()
    sources: Mapping[str, Interval] = field(default_factory=dict)
    """The gain on the tasks of each source, missing episodes against the candidate, where there are several; their intervals hold
    together."""
    small_sources: Collection[str] = ()
    """Sources of which too few tasks were played: not even a team that is equal on each of them would be sure to lose no more than
    `max_source_loss`."""
    margin_spent: float = 0.0
    """How much of the margin of `non_inferiority` the champion took on its way from the best team before it: see `margin_after`."""
    bound: Interval | None = None
    """The gain over all tasks, each missing episode lost by the candidate or won by the champion; None where none is missing."""
    num_missing: tuple[int, int] = (0, 0)
    """Episodes without an outcome, of the candidate and of the champion."""
    looks_to_come: LooksToCome | None = None
    """None at the last look, where floors are judged by the shares as they are."""
    not_ok: str = ""
    """How the candidate's episodes ended that are not ok, and what would change that, in words."""

    @property
    def deciding_gain(self) -> Interval | None:
        """Returns the gain whose lower bound must clear."""
        return self.gain if self.bound is None else self.bound

    def at_most(self, share: float, agent: str | None = None) -> float:
        """Returns the upper bound of a share, of `agent` or of all, of which more is to be seen; the share itself at the last look.

        Problems are the units, each with its own share of sound episodes or turns: no wider spread than that of 0s and 1s. The interval of
        so many as `num_alike` counts is that of Korn and Graubard (1998).
        """
        if self.looks_to_come is None:
            return share
        to_come = self.looks_to_come
        num = to_come.num_problems if agent is None else to_come.num_by_agent[agent]
        return exact_share(math.ceil(share * num), num, confidence=to_come.confidence)[1]


class LooksToCome(NamedTuple):
    """What bounds the shares of a look after which others may come."""

    num_problems: int
    """Families of tasks that were played: so many of one size as say as much, see `num_alike`."""
    num_by_agent: Mapping[str, int]
    """Those in which an agent made a turn that counts, by its turns."""
    confidence: float
    """Of each look, so that all of them together err as often as `evaluate.confidence` allows."""


def num_alike(sizes: Collection[int]) -> int:
    """Returns how many problems of one size say as much as those of these sizes, rounded down: (sum n)^2 / sum n^2 (Kish 1965).

    One problem of fifty tasks beside ten of one task each may fail as a whole: the share of sound episodes then says hardly more than
    one problem does.

    Args: sizes: of each problem, its tasks or turns, at least 1; 0 of none.
    """
    return sum(sizes) ** 2 // sum(size**2 for size in sizes) if sizes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision of the gate."""

    verdict: Literal["promote", "reject", "inconclusive"]
    condition: str
    """Which condition decided, in words, with the numbers."""


def decide_promotion(promote: PromoteConfig, evidence: Evidence) -> Verdict:
    """Decides by the conditions of the gate. "Certainly" means by a bound of the two-sided interval of the paired gain: of the
    worst case for a promotion, of the outcomes that there are for a rejection. The loss on one source is that of the worst
    case, though it rejects: a candidate may not hide it behind missing episodes.
    """
    broken = _broken_floor(promote, evidence, is_certain=True) or _broken_guard(promote, evidence)
    if broken:
        return Verdict(verdict="reject", condition=broken)
    if evidence.gain is None:
        return Verdict(verdict="promote", condition="no champion yet: the first team whose floors hold is promoted")
    gain, bound = evidence.gain, evidence.deciding_gain
    assert bound is not None, "there is a gain"
    numbers = _in_words(evidence, gain)
    margin = None if promote.non_inferiority is None else promote.non_inferiority - evidence.margin_spent
    enough = f"lower bound above min_gain {promote.min_gain:+.3f}" if bound.low > promote.min_gain else ""
    if not enough and margin is not None and bound.low > -margin:
        spent = f", as {evidence.margin_spent:.3f} of non_inferiority is spent" if evidence.margin_spent else ""
        enough = f"certainly not worse than by {margin:.3f}{spent}"
    if enough:
        unclear = (
            _broken_floor(promote, evidence, is_certain=False)
            or next((str(g) for g in evidence.guards if g.state == "unclear"), "")
            or _unclear_source(promote, evidence)
        )
        if unclear:
            return Verdict(verdict="inconclusive", condition=f"{numbers}: {enough}, but not sure of {unclear}")
        return Verdict(verdict="promote", condition=f"{numbers}: {enough}")
    needed = promote.min_gain if margin is None else min(promote.min_gain, -margin)
    name = "min_gain" if needed == promote.min_gain else "-non_inferiority"
    if gain.high <= needed:
        return Verdict(verdict="reject", condition=f"{numbers}: upper bound not above {name} {needed:+.3f}")
    return Verdict(verdict="inconclusive", condition=f"{numbers}: {name} {needed:+.3f} lies inside the interval")


def _in_words(evidence: Evidence, gain: Interval) -> str:
    """Returns the gain and, where episodes are missing, the worst case that the decision rests on."""
    plain = f"gain {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}] on {gain.num_tasks} tasks"
    if evidence.bound is None:
        return plain
    worst, (new, old) = evidence.bound, evidence.num_missing
    return (
        f"{plain}; {worst.mean:+.3f} [{worst.low:+.3f}, {worst.high:+.3f}] on {worst.num_tasks} with the missing episodes "
        f"against the candidate ({new} of its own lost, {old} of the champion's won)"
    )


def _broken_floor(promote: PromoteConfig, evidence: Evidence, *, is_certain: bool) -> str:
    """Returns the first floor that does not hold, in words; empty where all hold. Args: is_certain: whatever the looks to come show."""
    ok_share = evidence.at_most(evidence.ok_share) if is_certain else evidence.ok_share
    if ok_share < promote.min_ok_share:
        broken = f"share of ok episodes {evidence.ok_share:.3f} is below min_ok_share {promote.min_ok_share:.3f}"
        if not evidence.not_ok:
            return broken
        return f"{broken}: {evidence.not_ok}; or lower promote.min_ok_share, which lets such episodes be as they are"
    for agent, share in evidence.format_shares.items():
        if (evidence.at_most(share, agent) if is_certain else share) < promote.min_format_share:
            return f"share of well-formed turns of {agent} {share:.3f} is below {promote.min_format_share:.3f}"
    return ""


def _broken_guard(promote: PromoteConfig, evidence: Evidence) -> str:
    """Returns the first guard that certainly does not hold, or source that loses with missing episodes against the
    candidate, in words."""
    for guarded in evidence.guards:
        if guarded.state == "broken":
            return f"guard {guarded}"
    limit = promote.max_source_loss
    for source, gain in evidence.sources.items():
        if limit is not None and gain.high < -limit:
            return f"source {source!r} loses: {_of_source(gain, limit)}"
    return ""


def _unclear_source(promote: PromoteConfig, evidence: Evidence) -> str:
    """Returns the first source that may lose too much, in words; empty where none does."""
    limit = promote.max_source_loss
    for source, gain in evidence.sources.items():
        if limit is not None and gain.low < -limit:
            small = (
                "; so few tasks cannot show less: play more of them, or raise it"
                if source in evidence.small_sources
                else ""
            )
            return f"source {source!r}: {_of_source(gain, limit)}{small}"
    return ""


def _of_source(gain: Interval, limit: float) -> str:
    bounds = f"[{gain.low:+.3f}, {gain.high:+.3f}]"
    return f"{gain.mean:+.3f} {bounds} on {gain.num_tasks} tasks, max_source_loss {limit:.3f}"


def margin_after(before: float, low: float) -> float:
    """Returns how much of the margin is spent by a promotion whose gain is certainly at least `low`, after one that left `before`.

    Candidates that are each a little worse than the one before would go down without end. What is certain of each step adds up to what is
    certain of all of them: no team is worse by more than the margin than the best one before it. A certain gain gives back what it gains.
    """
    return max(0.0, before - low)


def worst_case(
    candidate: Outcomes,
    champion: Outcomes,
    *,
    tasks: Iterable[str],
    episodes_per_task: int,
    lost: float = 0.0,
    won: float = 1.0,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns the outcomes of both teams on all `tasks`, in their order, with `episodes_per_task` of each: for the bound that decides.

    An episode that the infrastructure or the workflow's author caused to fail has no outcome. Leaving it out would let a team win
    by losing fewer episodes than it does: 5% of equal candidates' losses left out promotes 18% of them at 512 tasks. So each missing
    episode of the candidate counts as lost and each of the champion as won, the worst case for the candidate (Manski, "Partial
    Identification of Probability Distributions", 2003): the true gain is not below the gain so found, whatever is missing.

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
