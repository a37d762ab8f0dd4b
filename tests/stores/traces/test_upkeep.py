"""stores.traces.upkeep merges files and drops old versions: what is pinned, what is newer and what others write all stay."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from records import build_rewards, build_trace

from stores.traces.store import TraceStore
from stores.traces.tables import PAGE, table_name
from stores.traces.upkeep import OPTIMIZE_ATTEMPTS, _optimize
from stores.types import Cause, EpisodeStatus, Purpose

pytestmark = pytest.mark.test

KEY = {"run_id": "run", "iteration": 3, "purpose": Purpose.TRAIN, "team_key": "team"}
NAME = table_name("episodes", "run", 3)
MARGIN_S = 0.5
"""Lance drops by age, and looks at the clock a little after we do."""


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    store = TraceStore(str(tmp_path / "traces"))
    store.create()
    return store


def versions(store: TraceStore, name: str = NAME) -> set[int]:
    return {version["version"] for version in store._tables.open(name).list_versions()}


def test_versions_from_the_given_one_on_stay_and_older_ones_go(store: TraceStore) -> None:
    store.write_episodes([build_trace(0)])
    store.write_episodes([build_trace(1)])
    old = versions(store)
    time.sleep(3 * MARGIN_S)
    for i in range(2, 6):
        store.write_episodes([build_trace(i)])
    new = versions(store) - old
    store.compact(drop_before={NAME: 0}, margin_s=MARGIN_S)
    assert old | new <= versions(store), "0 keeps every version"
    store.compact(drop_before={NAME: min(new)}, margin_s=60)
    assert old | new <= versions(store), "all are younger than the margin"
    store.compact(drop_before={NAME: min(new)}, margin_s=MARGIN_S)
    assert new <= versions(store) and not old & versions(store)
    assert {t.episode_id for t in store.find_traces(run_id="run")} == {build_trace(i).episode_id for i in range(6)}


def test_a_pinned_version_stays_with_all_that_came_after_it(store: TraceStore) -> None:
    store.write_episodes([build_trace(0)])
    ref = store.pin_episodes(**KEY)
    store.write_episodes([build_trace(1)])
    time.sleep(3 * MARGIN_S)
    store.write_episodes([build_trace(2)])
    before = versions(store)
    store.compact(drop_before=store.newest_versions(), margin_s=MARGIN_S)
    assert {v for v in before if v >= ref.version} <= versions(store)
    assert list(store.read_traces(ref)) == [build_trace(0)]


def test_newest_versions_are_those_of_the_named_tables_or_of_all(store: TraceStore) -> None:
    store.write_episodes([build_trace(0), build_trace(0, iteration=4)])
    all_tables = store.newest_versions()
    assert set(all_tables) == {"episodes", "rewards", NAME, table_name("episodes", "run", 4)}
    assert store.newest_versions([NAME, "episodes.run.it99"]) == {NAME: max(versions(store))}
    assert store.num_versions([NAME]) == len(versions(store))


def test_tables_are_those_of_one_run_after_an_iteration(store: TraceStore) -> None:
    store.write_episodes([build_trace(0, iteration=k, run_id=run) for run in ("run", "other") for k in (0, 1, 2, 3)])

    def names(*iterations: int) -> set[str]:
        return {table_name("episodes", "run", k) for k in iterations}

    assert set(store.tables("run")) == names(0, 1, 2, 3)
    assert set(store.tables("run", after=1)) == names(0, 2, 3)
    assert set(store.tables("run", after=2)) == names(0, 3), "iteration 0 may be added to at any time"


def test_a_moved_pin_shows_the_same_rows_and_one_with_new_rows_stays(store: TraceStore) -> None:
    store.write_episodes([build_trace(0)])
    ref = store.pin_episodes(**KEY)
    store.write_episodes([build_trace(0, purpose=Purpose.GATE)])
    gate = store.pin_episodes(**{**KEY, "purpose": Purpose.GATE})
    assert store.move_pins([ref, ref, gate], is_dry_run=True) == store.move_pins([ref, ref, gate]) == 1
    assert store.move_pins([ref, gate]) == 0, "it is at the newest version now"
    assert list(store.read_traces(ref)) == [build_trace(0)]
    store.write_episodes([build_trace(1)])
    assert store.move_pins([ref]) == 0, "a row of its key was added"
    assert list(store.read_traces(ref)) == [build_trace(0)]
    assert store.move_pins([replace(ref, tag="never-made"), replace(ref, iteration=9)]) == 0


def test_a_pin_of_rows_that_were_replaced_since_stays(store: TraceStore) -> None:
    failed = build_trace(0, status=EpisodeStatus.INFRA_ERROR)
    store.write_episodes([failed])
    ref = store.pin_episodes(**KEY)
    store.write_episodes([build_trace(0)], replaced=[Cause.INFRASTRUCTURE])
    assert store.move_pins([ref], is_dry_run=True) == store.move_pins([ref]) == 0
    assert list(store.read_traces(ref)) == [failed]


def test_stray_pins_are_old_unknown_and_of_this_run(store: TraceStore) -> None:
    store.write_episodes([build_trace(0), build_trace(0, purpose=Purpose.GATE)])
    known = store.pin_episodes(**KEY)
    stray = store.pin_episodes(**{**KEY, "purpose": Purpose.GATE})
    store._tables.open(NAME).tags.create("by-hand", known.version)
    assert store.stray_pins("run", [known.tag], older_than_s=0, tables=[NAME]) == {stray.tag: NAME}
    assert store.stray_pins("run", [known.tag], older_than_s=3600, tables=[NAME]) == {}
    assert store.stray_pins("ru", [known.tag], older_than_s=0, tables=[NAME]) == {}
    store.drop_pins({stray.tag: NAME})
    assert store.stray_pins("run", [known.tag], older_than_s=0, tables=[NAME]) == {}
    assert list(store.read_traces(known)) == [build_trace(0)]


def test_what_another_run_pinned_of_this_runs_rows_is_no_stray_pin(store: TraceStore) -> None:
    store.write_episodes([build_trace(0)])
    store.write_rewards([build_rewards(build_trace(0))])
    mine, theirs = store.pin_episodes(**KEY), store.pin_episodes(**KEY, by_run="run-it3-train-2")
    assert mine.tag != theirs.tag, "one run drops its own without the other's"
    key: dict[str, Any] = {"run_id": "run", "iteration": 3, "purpose": Purpose.TRAIN, "credit_version": "c1"}
    paid = store.pin_rewards(**key, traces=theirs, by_run="run-it3-train-2")
    tables = store.tables("run")
    assert store.stray_pins("run", [], older_than_s=0, tables=tables) == {mine.tag: NAME}
    assert store.tables("run-it3-train-2") == [] and store.tables_with([paid]) == tables
    assert store.stray_pins("run-it3-train-2", [paid.tag], older_than_s=0, tables=tables) == {theirs.tag: NAME}


def test_runs_that_share_a_table_have_stray_pins_of_their_own(store: TraceStore) -> None:
    store.write_episodes([build_trace(0, run_id=run_id) for run_id in ("a b", "a_b")])
    refs = [store.pin_episodes(**{**KEY, "run_id": run_id}) for run_id in ("a b", "a_b")]
    name = table_name("episodes", "a b", 3)
    for run_id, ref in zip(("a b", "a_b"), refs, strict=True):
        assert store.stray_pins(run_id, [], older_than_s=0, tables=[name]) == {ref.tag: name}


class Contended:
    """A table at which so many other maintainers commit first."""

    def __init__(self, *, conflicts: int, error: str = "lance error: Retryable commit conflict for version 3") -> None:
        self.conflicts, self.error = conflicts, error
        self.calls: list[Any] = []

    def optimize(self, *, cleanup_older_than: timedelta) -> None:
        self.calls.append(cleanup_older_than)
        if len(self.calls) <= self.conflicts:
            raise RuntimeError(self.error)

    def checkout_latest(self) -> None:
        self.calls.append("latest")
        self.conflicts += 1


def test_maintenance_tries_again_where_another_process_was_first() -> None:
    age = timedelta(seconds=7)
    table = Contended(conflicts=OPTIMIZE_ATTEMPTS - 1)
    _optimize(table, cleanup_older_than=age)
    assert table.calls == [*([age, "latest"] * (OPTIMIZE_ATTEMPTS - 1)), age]
    table = Contended(conflicts=OPTIMIZE_ATTEMPTS)
    with pytest.raises(RuntimeError, match="Retryable"):
        _optimize(table, cleanup_older_than=age)
    assert table.calls.count(age) == OPTIMIZE_ATTEMPTS
    table = Contended(conflicts=1, error="disk quota exceeded")
    with pytest.raises(RuntimeError, match="quota"):
        _optimize(table, cleanup_older_than=age)
    assert table.calls == [age]


def test_every_page_of_tables_is_listed(store: TraceStore) -> None:
    for i in range(PAGE + 5):
        (Path(store.uri) / f"a{i}.lance").mkdir()
    store.write_episodes([build_trace(0)])
    names = store._tables.all_names()
    assert len(names) == len(set(names)) == PAGE + 8
    assert NAME in names and NAME > "a", "it is on the second page"
    assert store.tables("run") == [NAME]
