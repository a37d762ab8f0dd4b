"""Which teams meet the champion, and which of them the decision is about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.evaluation.gate import Evidence, Verdict
from pipelines.evaluation.statistics import Interval
from pipelines.evaluation.teams import choose_contender, first_contenders, helpful_contender, num_possible
from stores.types import ModelVersionRef

pytestmark = pytest.mark.fast


def models(**versions: int) -> dict[str, ModelVersionRef]:
    return {
        group: ModelVersionRef(
            model_group=group, version=version, uri=f"{group}/{version}", manifest_sha256=str(version)
        )
        for group, version in versions.items()
    }


def gained(mean: float) -> Evidence:
    gain = Interval(mean=mean, low=mean - 0.01, high=mean + 0.01, num_tasks=100)
    return Evidence(gain=gain, ok_share=1.0, format_shares={})


CHAMPION = models(a=1, b=1, c=1)


def versions(arm_models: object) -> dict[str, int]:
    return {group: ref.version for group, ref in dict(arm_models).items()}  # type: ignore[call-overload]


def test_without_cross_play_the_candidate_meets_the_champion_and_nobody_else() -> None:
    (contender,) = first_contenders(models(a=2, b=2, c=1), CHAMPION, cross_play=False)
    assert contender.groups == ("a", "b") and versions(contender.models) == {"a": 2, "b": 2, "c": 1}
    assert num_possible(models(a=2, b=2, c=1), CHAMPION, cross_play=False) == 1


def test_with_cross_play_every_new_group_also_plays_with_the_champions_others() -> None:
    candidate = models(a=2, b=2, c=2)
    contenders = first_contenders(candidate, CHAMPION, cross_play=True)
    assert [contender.groups for contender in contenders] == [("a", "b", "c"), ("a",), ("b",), ("c",)]
    assert versions(contenders[2].models) == {"a": 1, "b": 2, "c": 1}
    assert num_possible(candidate, CHAMPION, cross_play=True) == 7
    two = first_contenders(models(a=2, b=2, c=1), CHAMPION, cross_play=True)
    assert [contender.groups for contender in two] == [("a", "b"), ("a",), ("b",)]
    assert len(first_contenders(models(a=2, b=1, c=1), CHAMPION, cross_play=True)) == 1, (
        "one new group is the candidate"
    )


def test_all_groups_that_helped_by_themselves_play_together_too() -> None:
    candidate = models(a=2, b=2, c=2)
    evidence = {("a", "b", "c"): gained(-0.1), ("a",): gained(0.1), ("b",): gained(-0.3), ("c",): gained(0.1)}
    more = helpful_contender(evidence, candidate, CHAMPION)
    assert more is not None and more.groups == ("a", "c") and versions(more.models) == {"a": 2, "b": 1, "c": 2}
    assert helpful_contender(evidence | {("a", "c"): gained(0.2)}, candidate, CHAMPION) is None, "it plays already"
    assert helpful_contender({("a", "b"): gained(0.2)}, candidate, CHAMPION) is None, "nobody plays alone"
    worst = replace(gained(0.1), bound=gained(-0.1).gain)
    assert helpful_contender(evidence | {("c",): worst}, candidate, CHAMPION) is None, (
        "only a helps whatever is missing"
    )


def test_of_the_teams_that_may_be_promoted_the_one_that_gained_most_is() -> None:
    evidence = {("a", "b"): gained(0.05), ("a",): gained(0.2), ("b",): gained(-0.1)}
    promote, reject = (Verdict(verdict=v, condition="because") for v in ("promote", "reject"))
    unsure = Verdict(verdict="inconclusive", condition="not sure")
    groups, verdict = choose_contender({("a", "b"): promote, ("a",): promote, ("b",): reject}, evidence)
    assert groups == ("a",) and verdict.condition == "new a: because"
    groups, verdict = choose_contender({("a", "b"): reject, ("a",): unsure, ("b",): reject}, evidence)
    assert (groups, verdict.verdict) == (("a",), "inconclusive"), "while one may still win, more tasks are played"
    groups, verdict = choose_contender({("a", "b"): reject, ("a",): reject, ("b",): reject}, evidence)
    assert (groups, verdict.verdict) == (("a", "b"), "reject")
    assert choose_contender({("a", "b"): promote}, evidence)[1].condition == "because"
