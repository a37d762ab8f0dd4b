"""teams: candidate and champion -> the teams that are compared with the champion, and which of them is promoted.

The candidate is one. With cross-play every newly trained model group also plays with the champion's others, and, where there
are three or more, all that help by themselves play together: a group that got worse does not keep the others from being
promoted, nor is it promoted with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.evaluation.gate import Evidence, Verdict
from stores.types import ModelVersionRef

Models = Mapping[str, ModelVersionRef]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A team that is compared with the champion."""

    groups: tuple[str, ...]
    """Model groups that are the candidate's; the others are the champion's."""
    models: Models


def first_contenders(candidate: Models, champion: Models, *, cross_play: bool) -> list[Contender]:
    """The candidate, then with cross-play each of its new model groups by itself; at least one group is new."""
    new = new_groups(candidate, champion)
    whole = Contender(groups=new, models=dict(candidate))
    alone = [_contender((group,), candidate, champion) for group in new] if cross_play and len(new) > 1 else []
    return [whole, *alone]


def helpful_contender(
    evidence: Mapping[tuple[str, ...], Evidence], candidate: Models, champion: Models
) -> Contender | None:
    """All groups that gained by themselves, together; None where no group did, or that team plays already."""
    gains = {groups[0]: found.deciding_gain for groups, found in evidence.items() if len(groups) == 1}
    helping = tuple(group for group, gain in gains.items() if gain is not None and gain.mean > 0)
    return None if not helping or helping in evidence else _contender(helping, candidate, champion)


def num_possible(candidate: Models, champion: Models, *, cross_play: bool) -> int:
    """Teams among which one is chosen: what the gate's chance of an error is divided by."""
    return 2 ** len(new_groups(candidate, champion)) - 1 if cross_play else 1


def choose_contender(
    verdicts: Mapping[tuple[str, ...], Verdict], evidence: Mapping[tuple[str, ...], Evidence]
) -> tuple[tuple[str, ...], Verdict]:
    """The team that the decision is about, by its new groups, and the decision.

    Of those that may be promoted it is the one that gained most. Where none may, it is the candidate, unless another team
    is inconclusive and the candidate is not.
    """
    candidate = next(iter(verdicts))
    promoted = [groups for groups, verdict in verdicts.items() if verdict.verdict == "promote"]
    if promoted:
        best = max(promoted, key=lambda groups: gain.mean if (gain := evidence[groups].deciding_gain) else 0.0)
        return best, _naming_team(best, verdicts)
    inconclusive = [groups for groups, verdict in verdicts.items() if verdict.verdict == "inconclusive"]
    if inconclusive and candidate not in inconclusive:
        return inconclusive[0], _naming_team(inconclusive[0], verdicts)
    return candidate, verdicts[candidate]


def new_groups(candidate: Models, champion: Models) -> tuple[str, ...]:
    """Model groups of another version than the champion's, in order."""
    return tuple(sorted(group for group, ref in candidate.items() if ref.version != champion[group].version))


def _contender(groups: tuple[str, ...], candidate: Models, champion: Models) -> Contender:
    return Contender(groups=groups, models={**champion, **{group: candidate[group] for group in groups}})


def _naming_team(groups: tuple[str, ...], verdicts: Mapping[tuple[str, ...], Verdict]) -> Verdict:
    """The verdict; where several teams play, its condition names the team."""
    verdict = verdicts[groups]
    if len(verdicts) == 1:
        return verdict
    return Verdict(verdict=verdict.verdict, condition=f"new {', '.join(groups)}: {verdict.condition}")
