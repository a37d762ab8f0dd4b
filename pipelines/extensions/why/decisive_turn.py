"""decisive_turn: an episode, and a way to play it again from any of its turns -> the turn that decided its outcome.

    value before a turn    mean outcome of replays in which it and everything after it are sampled anew, all before it replayed
    value after the turn   the value before the next one; after the last turn, the outcome itself
    what it cost           value before - value after: how much more the team would have earned with another turn there

Where the fault lies is not known, so it is searched by halving: a round plays from the middle of the turns over which the value falls most, among all
places that were played so far, so that a later round may mend what an earlier one mistook. Each place keeps its replays. The interval comes from
replays that are used for nothing else, because the largest of several estimates is too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

SHARE_TO_MEASURE = 0.2
"""Of the replays, for what the turn cost; the others find it."""
ENOUGH_TO_MEASURE = 32
"""Replays, or half of the budget where that is less."""
LEAST = 2
"""Replays from a place that the search plays."""
LEAST_LAST = 8
"""Replays that measure."""
DOUBT = 0.5
"""The confidence of the intervals by whose lower ends falls are compared, so that a few replays do not pass for a fall."""
Replays = Callable[[Sequence[tuple[int, int]]], Mapping[tuple[int, int], float]]
"""Plays the episode again, once for each (index of the turn that is sampled anew, number of the replay), and returns their outcomes,
0 to 1; those that failed for reasons outside of the team are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnValue:
    """What replays say of one turn."""

    turn_index: int
    before: float | None
    """Mean outcome where it is sampled anew; None where no replay came to an end."""
    num_replays: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisiveTurn:
    """The turn that cost most, and the values of all turns."""

    turn_index: int
    before: float
    after: float
    cost: float
    """`before - after`, from the replays of the last round alone."""
    ci95: tuple[float, float]
    """Of `cost`, by Newcombe's score method, which for outcomes between 0 and 1 is too wide rather than too narrow."""
    values: tuple[TurnValue, ...]
    num_replays: int
    best: tuple[int, int] | None
    """The replay of this turn with the best outcome, if one is better than the episode."""

    @property
    def is_certain(self) -> bool:
        """Whether the turn certainly cost something."""
        return self.ci95[0] > 0


def find_decisive_turn(turns: Sequence[int], outcome: float, replays: Replays, *, budget: int) -> DecisiveTurn:
    """Finds the turn of an episode that cost most.

    Args:
        turns: indices of its turns, in order.
        outcome: what it earned, 0 to 1.
        budget: replays in all.

    Raises ValueError where there is no turn, the budget is too small, or no replay of the turn in question came to an end.
    """
    if not turns:
        raise ValueError("an episode without turns has none that decided")
    num_rounds = math.ceil(math.log2(len(turns))) + 1 if len(turns) > 1 else 0
    to_search = LEAST * num_rounds
    if budget < (enough := to_search + max(LEAST_LAST, to_search)):  # half of so few is kept to measure
        raise ValueError(f"{budget} replays are too few for an episode of {len(turns)} turns: give {enough} at least")
    search = _Search(list(turns), outcome, replays)
    if num_rounds:
        search.play([0], number := num_to_search(budget) // num_rounds)
    for _ in range(num_rounds - 1):
        first, stop = max(search.parts(), key=search.fall)
        ends = [place for place in (first, stop) if place < len(turns)]
        places = ends if stop - first == 1 else [(first + stop) // 2]
        search.play(places, number // len(places))
    decisive = max(search.parts(), key=lambda part: (part[1] - part[0] == 1, search.fall(part)))[0]
    places = [place for place in (decisive, decisive + 1) if place < len(turns)]
    fresh = _Search(list(turns), outcome, replays, begins=dict(search.begins))
    fresh.play(places, (budget - search.num_replays) // len(places))
    before, after = fresh.value(decisive), fresh.value(decisive + 1)
    if before is None or after is None:
        raise ValueError(
            f"no replay from turn {turns[decisive]} came to an end: the engines or a service behind a tool failed"
        )
    better = [(o, key) for s in (search, fresh) for key, o in s.outcomes(decisive) if o > outcome]
    return DecisiveTurn(
        turn_index=turns[decisive],
        before=before,
        after=after,
        cost=before - after,
        ci95=difference_interval(before, fresh.count(decisive), after, fresh.count(decisive + 1)),
        values=tuple(search.with_more(fresh, place) for place in range(len(turns))),
        num_replays=search.num_replays + fresh.num_replays,
        best=max(better, default=(0.0, None))[1],
    )


def num_to_search(budget: int) -> int:
    """Returns how many replays of a budget find the turn."""
    measured = min(budget // 2, max(ENOUGH_TO_MEASURE, int(budget * SHARE_TO_MEASURE)))
    return budget - max(LEAST_LAST, measured)


@dataclass
class _Search:
    """Replays so far; places are positions in `turns`, and the place after the last one stands for the outcome itself."""

    turns: list[int]
    outcome: float
    replays: Replays
    begins: dict[int, int] = field(default_factory=dict)
    """By place, the number of the next replay."""
    num_replays: int = 0
    _done: dict[int, dict[int, float]] = field(default_factory=dict)
    """By place, outcomes by number of the replay."""

    def play(self, places: Sequence[int], number: int) -> None:
        """Plays so many further replays from each place."""
        wanted = [(place, self.begins.get(place, 0) + i) for place in places for i in range(number)]
        self.begins |= {place: self.begins.get(place, 0) + number for place in places}
        self.num_replays += len(wanted)
        outcomes = self.replays([(self.turns[place], i) for place, i in wanted])
        for place, i in wanted:
            if (self.turns[place], i) in outcomes:
                self._done.setdefault(place, {})[i] = outcomes[self.turns[place], i]

    def outcomes(self, place: int) -> list[tuple[tuple[int, int], float]]:
        """Returns the replays from a place with their outcomes, in order."""
        return [((self.turns[place], i), outcome) for i, outcome in self._done.get(place, {}).items()]

    def count(self, place: int) -> int | None:
        """Returns the number of replays from a place; None where the value is known exactly."""
        return len(self._done.get(place, {})) if place < len(self.turns) else None

    def value(self, place: int) -> float | None:
        """Returns the mean outcome from a place on; None where no replay came to an end."""
        if place == len(self.turns):
            return self.outcome
        values = self._done.get(place, {}).values()
        return sum(values) / len(values) if values else None

    def parts(self) -> list[tuple[int, int]]:
        """Returns the turns from each place that was played up to the next one, or to the end."""
        return list(pairwise([*sorted(self.begins), len(self.turns)])) or [(0, len(self.turns))]

    def fall(self, part: tuple[int, int]) -> float:
        """Returns by how much the value falls over a part, with some doubt; least where it is not known."""
        before, after = map(self.value, part)
        if before is None or after is None:
            return -math.inf
        return difference_interval(before, self.count(part[0]), after, self.count(part[1]), confidence=DOUBT)[0]

    def with_more(self, more: _Search, place: int) -> TurnValue:
        """Returns the value of a place over the replays of both."""
        values = [outcome for search in (self, more) for _, outcome in search.outcomes(place)]
        mean = sum(values) / len(values) if values else None
        return TurnValue(turn_index=self.turns[place], before=mean, num_replays=len(values))


def difference_interval(
    one: float, num_one: int | None, other: float, num_other: int | None, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Returns the interval of a difference of two shares (Newcombe 1998, Statistics in Medicine 17, method 10).

    Args: num_one, num_other: of how many; None: the share is known exactly.
    """
    (low_one, high_one), (low_other, high_other) = (
        _wilson(share, number, confidence) for share, number in ((one, num_one), (other, num_other))
    )
    difference = one - other
    return (
        difference - math.hypot(one - low_one, high_other - other),
        difference + math.hypot(high_one - one, other - low_other),
    )


def _wilson(share: float, number: int | None, confidence: float) -> tuple[float, float]:
    """Returns Wilson's interval of a share of `number`; the share itself where it is exact."""
    if number is None:
        return share, share
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (share + z**2 / (2 * number)) / (1 + z**2 / number)
    half = z / (1 + z**2 / number) * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    return max(0.0, middle - half), min(1.0, middle + half)
