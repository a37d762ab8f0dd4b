"""The decisive turn: planted faults are found, replays stay in their budget, and the interval covers what the turn cost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pipelines.extensions.why.decisive_turn import LEAST, difference_interval, find_decisive_turn
from tests.pipelines.extensions.why.planted_faults import BUDGET, WORKFLOWS, decisive_turn_of, plant, true_cost

pytestmark = pytest.mark.fast

Wanted = Sequence[tuple[int, int]]


@pytest.mark.parametrize(
    "workflow",
    [
        pytest.param("math_chain", marks=pytest.mark.test),
        *(pytest.param(w, marks=pytest.mark.nightly) for w in WORKFLOWS if w != "math_chain"),
    ],
)
def test_a_planted_fault_is_found_with_an_interval_around_what_it_cost(workflow: str) -> None:
    episodes = [plant(workflow, number) for number in range(12)]
    assert len({episode.fault for episode in episodes}) >= 2, "faults of several turns"
    found = [decisive_turn_of(episode) for episode in episodes]
    assert sum(of.turn_index == episode.fault for of, episode in zip(found, episodes, strict=True)) >= 10
    costs = {episode.fault: true_cost(episode, episode.fault, number=100) for episode in episodes}
    covered = [of.ci95[0] <= costs[of.turn_index] <= of.ci95[1] for of in found if of.turn_index in costs]
    assert sum(covered) >= len(covered) - 1
    for of in found:
        assert of.num_replays <= BUDGET
        assert sum(value.num_replays for value in of.values) == of.num_replays
        assert of.best is not None and of.best[0] == of.turn_index


def test_the_value_after_the_last_turn_is_the_outcome_itself() -> None:
    found = find_decisive_turn([3], 0.0, lambda wanted: {key: 1.0 for key in wanted}, budget=20)
    assert (found.turn_index, found.before, found.after, found.cost) == (3, 1.0, 0.0, 1.0)
    assert found.ci95[1] == 1.0 and 0.6 < found.ci95[0] < 1.0


def test_a_team_that_never_succeeds_has_no_turn_that_certainly_cost_anything() -> None:
    found = find_decisive_turn([0, 1, 2], 0.0, lambda wanted: {key: 0.0 for key in wanted}, budget=40)
    assert found.cost == 0.0 and not found.is_certain and found.best is None


def test_replays_are_numbered_on_and_the_last_ones_are_used_for_nothing_else() -> None:
    played: list[tuple[int, int]] = []

    def replays(wanted: Wanted) -> dict[tuple[int, int], float]:
        played.extend(wanted)
        return {(turn, number): float(turn <= 4) for turn, number in wanted}

    found = find_decisive_turn([0, 2, 4, 7], 0.0, replays, budget=48)
    assert found.turn_index == 4 and (found.before, found.after) == (1.0, 0.0)
    assert len(played) == len(set(played)) == found.num_replays <= 48
    last = [key for key in played if key[0] == 4]
    assert [number for _, number in last] == list(range(len(last)))


def test_replays_that_failed_outside_of_the_team_are_left_out() -> None:
    dice = random.Random(0)

    def replays(wanted: Wanted) -> dict[tuple[int, int], float]:
        return {(turn, number): float(turn <= 1) for turn, number in wanted if dice.random() < 0.5}

    found = find_decisive_turn([0, 1, 2], 0.0, replays, budget=60)
    assert (found.turn_index, found.cost) == (1, 1.0)
    assert sum(value.num_replays for value in found.values) < found.num_replays
    with pytest.raises(ValueError, match="no replay from turn 0 came to an end"):
        find_decisive_turn([0], 0.0, lambda wanted: {}, budget=20)
    with pytest.raises(ValueError, match="an episode without turns"):
        find_decisive_turn([], 0.0, lambda wanted: {}, budget=20)


@pytest.mark.parametrize(
    ("num_turns", "budget"),
    [(1, 16), (2, 24), (3, 24), (5, 48), (8, 48), (16, 64), (16, 200), (40, 200), (64, 200), (300, 400)],
)
def test_the_budget_is_kept_however_many_turns_there_are(num_turns: int, budget: int) -> None:
    fault = num_turns * 2 // 3

    def replays(wanted: Wanted) -> dict[tuple[int, int], float]:
        return {(turn, number): float(turn <= fault) for turn, number in wanted}

    found = find_decisive_turn(list(range(num_turns)), 0.0, replays, budget=budget)
    assert found.turn_index == fault and found.cost == 1.0
    assert found.num_replays <= budget and found.is_certain


def test_where_replays_rarely_succeed_all_of_them_name_the_fault() -> None:
    dice, named = random.Random(0), 0
    for _ in range(100):
        fault = dice.randrange(12)

        def replays(wanted: Wanted, fault: int = fault) -> dict[tuple[int, int], float]:
            return {key: float(key[0] <= fault and dice.random() < 0.3) for key in wanted}

        named += find_decisive_turn(range(12), 0.0, replays, budget=200).turn_index == fault
    assert named >= 90, "45 where each of 12 turns gets a few replays, 77 by halving turns at equal numbers of replays"


def test_the_default_budget_is_enough_for_forty_turns() -> None:
    found = find_decisive_turn(range(40), 0.0, lambda wanted: {key: float(key[0] <= 23) for key in wanted}, budget=64)
    assert found.turn_index == 23 and found.is_certain


def test_a_budget_that_says_nothing_is_refused() -> None:
    for num_turns, budget in ((1, 7), (2, 10), (16, 18), (40, 20)):
        played: list[int] = []

        def replays(wanted: Wanted, played: list[int] = played) -> dict[tuple[int, int], float]:
            played.append(len(wanted))
            return {key: 1.0 for key in wanted}

        with pytest.raises(
            ValueError, match=rf"{budget} replays are too few for an episode of {num_turns} turns: give \d+"
        ) as refused:
            find_decisive_turn(list(range(num_turns)), 0.0, replays, budget=budget)
        enough = int(str(refused.value).split()[-3])
        found = find_decisive_turn(list(range(num_turns)), 0.0, replays, budget=enough)
        assert found.num_replays <= enough and found.turn_index == num_turns - 1
        assert min(played) >= LEAST


def test_the_interval_is_newcombes() -> None:
    # 56/70 - 48/80, the example (a) of Newcombe 1998, table II, method 10.
    low, high = difference_interval(56 / 70, 70, 48 / 80, 80)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)
    assert difference_interval(0.5, None, 0.25, None) == (0.25, 0.25)
