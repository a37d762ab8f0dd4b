"""decisive_turns: how often `troupe why` names the turn at fault, beside a bisection with as many replays for its search.

An episode of some turns failed, and turns are right with a chance when they are sampled anew. Either only those at fault may be wrong, or all of
them are sampled anew from the replayed turn on and each may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pipelines.extensions.why.decisive_turn import find_decisive_turn, num_to_search
from tests.bench.figures import Figure

NUM_EPISODES = 400
Wanted = Sequence[tuple[int, int]]


def figures() -> Iterator[Figure]:
    """Yields the shares of episodes whose fault is named; where there are two faults, the first one is what replays can mend."""
    for num_turns, num_faults, right, budget, least in (
        (12, 1, 0.3, 200, 0.77),
        (40, 2, 0.6, 400, 0.92),
        (8, 0, 0.7, 256, 0.94),
    ):
        rng = np.random.default_rng([num_turns, 6])
        named, by_bisection, covered, num_certain = 0, 0, 0, 0
        for _ in range(NUM_EPISODES):
            faults = np.sort(rng.choice(num_turns, max(1, num_faults), replace=False))
            chances = _chances(num_turns, faults, right, are_all_unsure=not num_faults)
            found = find_decisive_turn(range(num_turns), 0.0, _replays(chances, rng), budget=budget)
            named += found.turn_index == faults[0]
            by_bisection += _bisected(chances, rng, num_to_search(budget)) == faults[0]
            cost = chances[found.turn_index] - np.append(chances, 0.0)[found.turn_index + 1]
            covered += found.ci95[0] <= cost <= found.ci95[1]
            num_certain += found.is_certain
        whose = f"{num_faults} at fault" if num_faults else "each unsure"
        name = f"{num_turns} turns, {whose}, right in {right:.0%}, {budget} replays"
        shares = np.array([named, by_bisection, covered, num_certain]) / NUM_EPISODES
        note = f"of {NUM_EPISODES}; {shares[1]:.3f} by bisection; interval covers the cost in {shares[2]:.3f}, certain {shares[3]:.3f}"
        yield Figure(f"why, the turn at fault, {name}", float(shares[0]), least=least, note=note)


def _chances(num_turns: int, faults: np.ndarray, right: float, *, are_all_unsure: bool) -> np.ndarray:
    """Returns [turns]: the chance that a replay from a turn on succeeds."""
    places = np.arange(num_turns)
    num_sampled = num_turns - places if are_all_unsure else np.full(num_turns, len(faults))
    return np.where(places <= faults[0], right**num_sampled, 0.0)


def _replays(chances: np.ndarray, rng: np.random.Generator) -> Callable[[Wanted], Mapping[tuple[int, int], float]]:
    return lambda wanted: {key: float(rng.random() < chances[key[0]]) for key in wanted}


def _bisected(chances: np.ndarray, rng: np.random.Generator, budget: int) -> int:
    """Returns the turn that is left when the half over which the value falls more is halved again and again."""
    low, high = 0, len(chances)
    number = budget // (int(np.ceil(np.log2(high))) + 1)
    values = {0: rng.binomial(number, chances[0]) / number, high: 0.0}
    while high - low > 1:
        middle = (low + high) // 2
        values[middle] = rng.binomial(number, chances[middle]) / number
        if values[low] - values[middle] > values[middle] - values[high]:
            high = middle
        else:
            low = middle
    return low
