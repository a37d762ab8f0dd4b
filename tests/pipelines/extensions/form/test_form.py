"""A gain splits into form and substance: the parts add up, literal numbers, and kinds that one side does not have."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from records import MakeTrace

from pipelines.evaluation.statistics import Resampling
from pipelines.extensions.form.form import FormSplit, Judged, is_well_formed, part_of, split_gain
from stores.types import EpisodeStatus

pytestmark = pytest.mark.fast

GOOD, WRONG = Judged(is_well_formed=True, outcome=1.0), Judged(is_well_formed=True, outcome=0.0)
LUCKY, LOST = Judged(is_well_formed=False, outcome=1.0), Judged(is_well_formed=False, outcome=0.0)


def tasks(**counts: int) -> dict[str, list[Judged]]:
    """One episode per task: so many of each kind."""
    kinds = {"good": GOOD, "wrong": WRONG, "lucky": LUCKY, "lost": LOST}
    episodes = [kinds[name] for name, count in counts.items() for _ in range(count)]
    return {f"t{i}": [episode] for i, episode in enumerate(episodes)}


def split(before: dict[str, list[Judged]], after: dict[str, list[Judged]]) -> FormSplit:
    found = split_gain(before, after, Resampling(num_samples=200))
    assert found is not None
    return found


def test_the_literal_numbers_of_a_split() -> None:
    # f 0.2 -> 0.8, a 0.5 -> 0.75, b 0.125 -> 0.5; accuracy 0.2 -> 0.7
    found = split(tasks(good=2, wrong=2, lucky=2, lost=14), tasks(good=12, wrong=4, lucky=2, lost=2))
    assert found.before.well_formed_share == pytest.approx(0.2) and found.after.well_formed_share == pytest.approx(0.8)
    assert found.before.accuracy_well_formed == pytest.approx(0.5) and found.after.accuracy_other == pytest.approx(0.5)
    assert found.gain == pytest.approx(0.5)
    assert found.form.mean == pytest.approx(0.6 * ((0.5 + 0.75) / 2 - (0.125 + 0.5) / 2))  # 0.1875
    assert found.substance.mean == pytest.approx(0.5 * 0.25 + 0.5 * 0.375)  # 0.3125
    assert (found.after.num_episodes, found.after.num_well_formed, found.after.num_solved) == (20, 16, 14)


def test_better_form_alone_is_no_substance() -> None:
    found = split(tasks(good=2, wrong=2, lost=16), tasks(good=8, wrong=8, lost=4))
    assert found.form.mean == pytest.approx(found.gain) == pytest.approx(0.3)
    assert found.substance.mean == pytest.approx(0)


def test_more_right_answers_of_the_same_form_are_substance_alone() -> None:
    found = split(tasks(good=5, wrong=15), tasks(good=15, wrong=5))
    assert found.form.mean == 0 and found.substance.mean == pytest.approx(0.5)
    assert found.before.accuracy_other is None


def test_a_kind_that_one_side_lacks_counts_as_no_change_of_its_accuracy() -> None:
    found = split(tasks(lucky=2, lost=18), tasks(good=15, wrong=5))
    assert found.before.accuracy_well_formed is None
    assert found.form.mean == pytest.approx(0.75 - 0.1) and found.substance.mean == pytest.approx(0)


def test_the_parts_add_up_to_the_gain_of_accuracy_whatever_the_numbers_of_episodes() -> None:
    rng = random.Random(3)

    def side() -> dict[str, list[Judged]]:
        return {
            f"t{i}": [Judged(is_well_formed=rng.random() < 0.6, outcome=rng.random()) for _ in range(rng.randint(1, 4))]
            for i in range(30)
        }

    before, after = side(), side()
    found = split(before, after)

    def accuracy(of: dict[str, list[Judged]]) -> float:
        return sum(sum(e.outcome for e in episodes) / len(episodes) for episodes in of.values()) / len(of)

    assert found.form.mean + found.substance.mean == pytest.approx(accuracy(after) - accuracy(before))
    for part in (found.form, found.substance):
        assert part.low < part.mean < part.high


def test_only_tasks_of_both_sides_count() -> None:
    before, after = {"a": [GOOD], "b": [LOST]}, {"b": [GOOD], "c": [LOST]}
    found = split(before, after)
    assert found.gain == 1 and found.before.num_episodes == 1
    assert split_gain({"a": [GOOD]}, {"b": [GOOD]}) is None


def test_an_episode_is_well_formed_if_it_ended_soundly_and_each_turn_kept_its_contract(make_trace: MakeTrace) -> None:
    trace = make_trace(0)
    turns = tuple(replace(turn, is_format_ok=True) for turn in trace.turns)
    assert is_well_formed(replace(trace, turns=turns))
    assert not is_well_formed(replace(trace, turns=(replace(turns[0], is_format_ok=False), *turns[1:])))
    assert not is_well_formed(replace(trace, turns=turns, status=EpisodeStatus.TRUNCATED))


def test_the_page_shows_shares_with_counts_and_a_dash_for_what_there_is_none_of() -> None:
    found = split(tasks(good=5, wrong=15), tasks(good=15, wrong=5))
    page = part_of(found).html
    assert "Form and substance" in page and "25.0% <span" in page and "(5 of 20)" in page and "–" in page
    assert "substance +50.0" in page
