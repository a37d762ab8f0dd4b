"""stores.traces.tables keeps each iteration in tables of its own: exactly once beside maintenance and kills, at a cost that does not grow."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lancedb
import pytest
from records import build_rewards, build_trace

from stores.traces.store import TraceStore
from stores.traces.tables import TraceTables, is_table_of, iteration_of_table, table_name
from stores.types import EpisodeRewards, Purpose, Trace, episode_id, hinted_iteration

pytestmark = pytest.mark.test

KEY = {"run_id": "run", "iteration": 3, "purpose": Purpose.TRAIN, "team_key": "team"}
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.nightly)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TraceStore:
    store = TraceStore(str(tmp_path / "traces") if request.param == "local" else request.getfixturevalue("s3_uri"))
    store.create()
    return store


def _write(uri: str, traces: list[Trace], rewards: list[EpisodeRewards], start: Any) -> None:
    store = TraceStore(uri)
    start.wait()
    for i in range(0, len(traces), 4):
        store.write_episodes(traces[i : i + 4])
        store.write_rewards(rewards[i : i + 4])


def _maintain(uri: str, run_id: str, start: Any, stop: Any) -> None:
    """Compacts whatever is there until it is told to stop, or is killed."""
    store = TraceStore(uri)
    newest: dict[str, int] = {}
    start.wait()
    while not stop.is_set():
        tables = store.tables(run_id)
        store.compact(drop_before={name: newest.get(name, 0) for name in tables}, margin_s=5.0)
        newest = store.newest_versions(tables)


@pytest.mark.nightly
def test_writers_of_the_same_episodes_store_each_once_while_others_maintain_and_are_killed(store: TraceStore) -> None:
    traces = [build_trace(i, iteration=k) for k in (3, 4) for i in range(24)]
    rewards = [build_rewards(trace) for trace in traces]
    start, stop = SPAWN.Barrier(6), SPAWN.Event()
    writers = [
        SPAWN.Process(target=_write, args=(store.uri, traces[::step], rewards[::step], start)) for step in (1, -1, 1)
    ]
    maintainers = [SPAWN.Process(target=_maintain, args=(store.uri, "run", start, stop)) for _ in range(2)]
    for process in (*writers, *maintainers):
        process.start()
    start.wait()
    writers[2].join(timeout=0.3)
    for victim in (writers[2], maintainers[1]):  # one in the middle of its writes, one in the middle of its maintenance
        if victim.pid is not None and victim.is_alive():
            os.kill(victim.pid, signal.SIGKILL)
    for writer in writers:
        writer.join()
    stop.set()
    for maintainer in maintainers:
        maintainer.join()
    assert [process.exitcode for process in (*writers[:2], maintainers[0])] == [0, 0, 0]
    assert store.write_episodes(traces) == store.write_rewards(rewards) == 0
    for k in (3, 4):
        ref = store.pin_episodes(**{**KEY, "iteration": k})
        own = {t.episode_id: t for t in traces if t.iteration == k}
        read = list(store.read_traces(ref))
        assert {t.episode_id: t for t in read} == own and len(read) == len(own)
        pinned = store.pin_rewards(run_id="run", iteration=k, purpose=Purpose.TRAIN, credit_version="c1", traces=ref)
        assert pinned.num_episodes == store.count_rows(pinned) == len(own)


def test_a_table_that_a_killed_process_began_is_completed_by_the_next_writer(tmp_path: Path) -> None:
    store = TraceStore(str(tmp_path))
    store.create()
    begun = tmp_path / f"{table_name('episodes', 'run', 3)}.lance"
    (begun / "_transactions").mkdir(parents=True)
    (begun / "_transactions" / "0-x.txn").write_bytes(b"half")
    assert store.stored_ids(**KEY) == set() and store.find_traces(run_id="run") == []
    assert store.tables("run") == [] and store.count_others("other") == 0
    assert store.write_episodes([build_trace(0)]) == 1
    assert store.get_trace(build_trace(0).episode_id) == build_trace(0)
    assert store.tables("run") == [table_name("episodes", "run", 3)]


def test_a_table_that_another_process_makes_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = TraceStore(str(tmp_path)), TraceStore(str(tmp_path))
    reader.create()
    has_data = TraceTables._has_data

    def late(tables: TraceTables, name: str) -> bool:
        monkeypatch.setattr(TraceTables, "_has_data", has_data)
        writer.write_episodes([build_trace(0)])
        return has_data(tables, name)

    monkeypatch.setattr(TraceTables, "_has_data", late)
    assert reader.stored_ids(**KEY) == {build_trace(0).episode_id}


def test_what_one_iteration_needs_is_read_from_no_table_of_another(tmp_path: Path) -> None:
    store = TraceStore(str(tmp_path))
    store.create()
    for k in (1, 2, 3):
        store.write_episodes([build_trace(i, iteration=k) for i in range(4)])
        store.write_rewards([build_rewards(build_trace(i, iteration=k)) for i in range(4)])
    for k in (1, 2):
        for kind in ("episodes", "rewards"):
            for manifest in (tmp_path / f"{table_name(kind, 'run', k)}.lance" / "_versions").glob("*.manifest"):
                manifest.write_bytes(b"whoever reads this fails")
    with pytest.raises((RuntimeError, ValueError)):
        store.pin_episodes(**{**KEY, "iteration": 2})
    store = TraceStore(str(tmp_path))
    assert store.write_episodes([build_trace(i) for i in range(6)]) == 2
    store.write_rewards([build_rewards(build_trace(i)) for i in range(6)])
    ref = store.pin_episodes(**KEY)
    trace = build_trace(5)
    assert len(list(store.read_traces(ref))) == 6
    rewards = store.pin_rewards(run_id="run", iteration=3, purpose=Purpose.TRAIN, credit_version="c1", traces=ref)
    assert len(list(store.read_rewards(rewards))) == 6
    assert store.get_trace(trace.episode_id) == store.get_trace(trace.episode_id[:12], run_id="run") == trace
    assert len(store.rewards_of(trace.episode_id, run_id="run", iteration=3)) == 1
    assert len(store.newest_episodes(limit=5, run_id="run")) == 5
    assert len(store.find_traces(run_id="run", iteration=3)) == 6


def test_an_id_begins_with_its_iteration() -> None:
    key: dict[str, Any] = {"run_id": "r", "purpose": Purpose.TRAIN, "team_key": "t", "task_id": "a", "episode_index": 0}
    hinted = {k: hinted_iteration(episode_id(**key, iteration=k)) for k in (0, 7, 1000, 65_535, 65_543)}
    assert hinted == {0: 0, 7: 7, 1000: 1000, 65_535: 65_535, 65_543: 7}
    assert len(episode_id(**key, iteration=1000)) == 32 and episode_id(**key, iteration=1000).startswith("03e8")
    assert hinted_iteration("03e") is None and hinted_iteration("chatcmpl-1") is None


def test_ids_that_begin_with_another_number_are_found_too(store: TraceStore) -> None:
    hashed = build_trace(0, iteration=2, episode_id="0005" + "ab" * 14)
    late = build_trace(1, iteration=65_543)
    store.write_episodes([hashed, late, build_trace(2, iteration=5), build_trace(2, iteration=7)])
    for run_id in (None, "run", "other"):
        assert store.get_trace(hashed.episode_id, run_id=run_id) == hashed
        assert store.get_trace("0005abab", run_id=run_id) == hashed
        assert store.get_trace(late.episode_id, run_id=run_id) == late
    with pytest.raises(ValueError, match="no episode"):
        store.get_trace("0007" + "cd" * 14, run_id="run")


def test_a_list_goes_on_where_its_page_ended(store: TraceStore) -> None:
    traces = [build_trace(i, iteration=k, started_at=1e9 + (i * 7) % 5) for k in (0, 1, 2, 10) for i in range(5)]
    store.write_episodes([*traces, build_trace(0, run_id="other")])
    wanted = sorted(traces, key=lambda t: (-t.iteration, -t.started_at, t.episode_id))
    seen: list[str] = []
    while page := store.newest_episodes(limit=3, run_id="run", before=seen[-1] if seen else ""):
        seen += [row["episode_id"] for row in page]
    assert seen == [t.episode_id for t in wanted]
    of_task = store.newest_episodes(limit=9, run_id="run", task_id="t0")
    assert [row["iteration"] for row in of_task] == [k for k in (10, 2, 1, 0) for _ in range(2)]
    assert len(store.newest_episodes(limit=99)) == 21
    with pytest.raises(ValueError, match="not in this list"):
        store.newest_episodes(limit=3, run_id="other", before=seen[0])


def test_runs_do_not_see_each_other_though_their_names_share_a_table(store: TraceStore) -> None:
    assert table_name("episodes", "a b", 3) == table_name("episodes", "a/b", 3) == "episodes.a_b.it3"
    assert iteration_of_table("episodes.a.it7.it12") == 12 and iteration_of_table("episodes") == 0
    assert is_table_of("episodes.a.it7.it12", "episodes", "a.it7") and not is_table_of("episodes.a.it7", "rewards")
    mine, other = build_trace(0, run_id="a b"), replace(build_trace(1, run_id="a/b"), run_id="a/b")
    store.write_episodes([mine, other])
    assert list(store.read_traces(store.pin_episodes(**{**KEY, "run_id": "a b"}))) == [mine]
    assert store.count_others("a b") == 1


def test_the_store_can_be_opened_by_anybody_who_has_lancedb(tmp_path: Path) -> None:
    store = TraceStore(str(tmp_path))
    store.create()
    store.write_episodes([build_trace(0)])
    assert lancedb.connect(str(tmp_path)).open_table("episodes.run.it3").count_rows() == 1
