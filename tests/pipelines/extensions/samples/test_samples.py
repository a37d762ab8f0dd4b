"""Episodes that the report shows: those of which the outcome changed most, one of the best and one of the worst."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipelines.extensions.samples import samples as samples_module
from pipelines.extensions.samples.samples import choose
from stores.journal.stage_results import Evaluated

pytestmark = pytest.mark.fast


def test_what_changed_most_comes_first_then_the_best_and_the_worst() -> None:
    before = {"a": {"a0": 0.0, "a1": 0.0}, "b": {"b0": 1.0}, "c": {"c0": 1.0}, "d": {"d0": 0.0}, "e": {"e0": 0.5}}
    after = {"a": {"a2": 1.0, "a3": 0.0}, "b": {"b2": 0.0}, "c": {"c2": 1.0}, "d": {"d2": 0.0}, "e": {"e2": 1.0}}
    assert list(choose(before, after)) == [
        ("better than", True, "a", "a0", "a2"),
        ("better than", True, "e", "e0", "e2"),
        ("worse than", True, "b", "b0", "b2"),
        ("among the best", False, "c", "c0", "c2"),
        ("among the worst", False, "d", "d0", "d2"),
    ]


def test_a_task_is_shown_once_and_only_where_both_teams_played_it() -> None:
    same = {"a": {"a0": 1.0}}
    assert list(choose({**same, "b": {"b0": 0.0}}, same)) == [("among the best", False, "a", "a0", "a0")]
    assert list(choose({}, same)) == []


def test_no_more_than_two_tasks_are_shown_of_those_that_changed_alike() -> None:
    before = {f"t{n}": {f"old{n}": 1.0} for n in range(9)}
    after = {f"t{n}": {f"new{n}": 0.0} for n in range(9)}
    assert [task for _, _, task, _, _ in choose(before, after)] == ["t0", "t1", "t2", "t3"]


def test_before_training_is_over_the_last_gate_at_which_a_champion_was_met_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met = SimpleNamespace(candidate="new", champion="old")
    results = {(2, Evaluated): met, (3, Evaluated): SimpleNamespace(candidate="newer", champion=None)}
    run = SimpleNamespace(
        config=SimpleNamespace(iterations=9),
        iteration=lambda number: SimpleNamespace(find=lambda kind: results.get((number, kind))),
    )
    monkeypatch.setattr(
        samples_module, "outcomes_by_task", lambda run, score: {"t": {f"{score}'s": float(score == "new")}}
    )
    (found,) = samples_module.samples(run, last=4)  # type: ignore[arg-type]
    assert found.title == "better than champion"
    assert found.episodes == {"champion": "old's", "candidate of iteration 2": "new's"}
    results.clear()
    assert samples_module.samples(run, last=4) == []  # type: ignore[arg-type]
