"""stores.traces.store on a real LanceDB in a temporary folder and on S3."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from records import build_rewards, build_trace

from stores.traces.lookup import EPISODE, TOOL_CALL, TURN
from stores.traces.rows import episode_table, reward_table, traces_of
from stores.traces.store import TraceStore
from stores.traces.tables import TraceTables, table_name
from stores.types import COUNTED, Cause, EpisodeRewards, EpisodeStatus, Purpose, RewardsRef, Trace, TracesRef

pytestmark = pytest.mark.test

KEY = {"run_id": "run", "iteration": 3, "purpose": Purpose.TRAIN, "team_key": "team"}


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.nightly)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TraceStore:
    uri = str(tmp_path / "traces") if request.param == "local" else request.getfixturevalue("s3_uri")
    store = TraceStore(uri)
    store.create()
    return store


def test_a_trace_comes_back_as_it_was_written(store: TraceStore) -> None:
    traces = [
        build_trace(0),
        build_trace(1, turns=(), tool_calls=(), status=EpisodeStatus.TIMEOUT, error="no end after 3 s"),
        build_trace(2, tool_calls=(), variant="greedy", outcome_metadata={}, policy_versions={}),
    ]
    assert store.write_episodes(traces) == 3
    assert {t.episode_id: t for t in store.read_traces(store.pin_episodes(**KEY))} == {t.episode_id: t for t in traces}


class Unspeakable:
    """Has no repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ({(1, 2): "x"}, {"(1, 2)": "'x'"}),
        ({"text": {(1, 2): "x"}, "n": 1}, {"text": "{(1, 2): 'x'}", "n": "1"}),
        ([{(1, 2)}, {(1,): 2}], "[{(1, 2)}, {(1,): 2}]"),
        ({"it": Unspeakable()}, {"it": "<Unspeakable>"}),
        ("half a pair \ud83d", "half a pair \ud83d"),
        ({"won": np.bool_(False), "score": [np.float32(0.25), np.int64(3)]}, {"won": False, "score": [0.25, 3]}),
        (
            {"grid": np.array([[1, 2]]), "of": {"frozen": MappingProxyType({"a": 1})}},
            {"grid": [[1, 2]], "of": {"frozen": {"a": 1}}},
        ),
        ({1: "a", "1": "b"}, {"1": "'a'", "'1'": "'b'"}),
        ({"of": [{1: "a", "1": "b"}]}, {"of": "[{1: 'a', '1': 'b'}]"}),
    ],
)
def test_no_answer_of_a_tool_loses_its_episode(answer: Any, kept: Any) -> None:
    trace = build_trace()
    trace = replace(trace, task=replace(trace.task, answers=("\ud83d", "b")))
    trace = replace(trace, error="\ud83d", tool_calls=(replace(trace.tool_calls[0], response=answer),))
    (stored,) = traces_of(episode_table([trace]).to_batches()[0])
    assert stored.tool_calls[0].response == kept
    assert stored.error == "\\ud83d" and stored.task.answers == ("\\ud83d", "b")


def test_a_table_of_another_version_is_not_added_to(tmp_path: Path) -> None:
    import lancedb

    old = episode_table([build_trace(0)]).drop_columns("cause")
    lancedb.connect(str(tmp_path)).create_table("episodes", old)
    with pytest.raises(ValueError, match=r"another version of Troupe .its columns cause differ.: .* storage.root"):
        TraceStore(str(tmp_path)).create()


def test_the_first_writer_of_an_episode_wins(store: TraceStore) -> None:
    assert store.write_episodes([build_trace(0, answer="first"), build_trace(0, answer="twin")]) == 1
    assert store.write_episodes([build_trace(0, answer="second"), build_trace(1)]) == 1
    assert sorted(t.answer for t in store.find_traces()) == ["5", "first"]
    assert store.stored_ids(**KEY) == {build_trace(0).episode_id, build_trace(1).episode_id}
    assert store.write_episodes([]) == 0


def _write_all(uri: str, traces: list[Trace], start: object) -> None:
    store = TraceStore(uri)
    store.create()
    start.wait()
    for i in range(0, len(traces), 5):
        store.write_episodes(traces[i : i + 5])


@pytest.mark.nightly
def test_processes_that_write_the_same_episodes_store_each_once(store: TraceStore) -> None:
    uri, traces = store.uri, [build_trace(i) for i in range(40)]
    store.begin(run_id="run", iteration=3)
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    workers = [context.Process(target=_write_all, args=(uri, traces[::step], start)) for step in (1, -1, 1)]
    for worker in workers:
        worker.start()
    start.wait()
    for worker in workers:
        worker.join()
    assert [w.exitcode for w in workers] == [0, 0, 0]
    assert sorted(t.episode_id for t in store.find_traces(limit=1000)) == sorted(t.episode_id for t in traces)
    assert store.pin_episodes(**KEY).num_episodes == 40


def _write_in_step(uri: str, traces: list[Trace], step: Any) -> None:
    store = TraceStore(uri)
    for trace in traces:
        step.wait(60)
        store.write_episodes([trace])


@pytest.mark.nightly
def test_processes_that_write_the_first_episodes_of_an_iteration_at_once_lose_none(tmp_path: Path) -> None:
    store = TraceStore(str(tmp_path / "traces"))
    store.create()
    context = multiprocessing.get_context("spawn")
    step = context.Barrier(3)
    workers = [
        context.Process(target=_write_in_step, args=(store.uri, [build_trace(i, iteration=k) for k in range(25)], step))
        for i in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [w.exitcode for w in workers] == [0, 0, 0]
    assert [store.pin_episodes(**KEY | {"iteration": k}).num_episodes for k in range(25)] == [3] * 25


def test_a_pinned_set_stays_while_others_write_and_compact(store: TraceStore) -> None:
    store.write_episodes([build_trace(i) for i in range(6)])
    ref = store.pin_episodes(**KEY)
    store.write_episodes([build_trace(i) for i in range(6, 9)])
    store.write_episodes([build_trace(0, iteration=4), build_trace(0, team_key="other")])
    assert store.pin_episodes(**KEY).num_episodes == 9
    store.compact(drop_before=store.newest_versions())
    assert len({t.episode_id for t in store.read_traces(ref)}) == store.count_rows(ref) == ref.num_episodes == 6


def test_pinning_the_same_rows_again_gives_the_same_ref(store: TraceStore) -> None:
    store.write_episodes([build_trace(i) for i in range(4)])
    ref = store.pin_episodes(**KEY)
    store.write_episodes([build_trace(0, iteration=4)])
    assert pickle.loads(pickle.dumps(store)).pin_episodes(**KEY) == ref


def test_rows_that_are_there_twice_are_not_pinned(store: TraceStore) -> None:
    store.write_episodes([build_trace(0), build_trace(1)])
    store.write_rewards([build_rewards(build_trace(i)) for i in (0, 1)])
    traces = store.pin_episodes(**KEY)
    database = TraceTables(store.uri, store.schemas).connect()
    database.open_table(table_name("rewards", "run", 3)).add(reward_table([build_rewards(build_trace(1))]))
    database.open_table(table_name("episodes", "run", 3)).add(episode_table([build_trace(1)]))
    with pytest.raises(
        ValueError, match=r"3 rows but 2 different reward_id where .*: the table must not be trained on"
    ):
        _pin_rewards(store, traces)
    with pytest.raises(
        ValueError, match=r"3 rows but 2 different episode_id where .*: the table must not be trained on"
    ):
        store.pin_episodes(**KEY)


def test_a_ref_of_another_store_is_refused(tmp_path: Path, store: TraceStore) -> None:
    store.write_episodes([build_trace(0)])
    ref = store.pin_episodes(**KEY)
    other = TraceStore(str(tmp_path / "other"))
    other.create()
    with pytest.raises(ValueError, match=r"does not exist in .*other"):
        list(other.read_traces(ref))


def test_filters_keep_the_episodes_of_an_agent_a_model_group_a_status(store: TraceStore) -> None:
    both, alone, none = build_trace(0), build_trace(1), build_trace(2, turns=(), status=EpisodeStatus.TIMEOUT)
    alone = replace(alone, turns=alone.turns[:1], status=EpisodeStatus.TRUNCATED)
    store.write_episodes([both, alone, none])
    ref = store.pin_episodes(**KEY)

    def ids(**filters: object) -> set[str]:
        return {t.episode_id for t in store.read_traces(ref, **filters)}

    assert ids(model_group="large") == {both.episode_id}
    assert ids(model_group="smal_") == ids(model_group="mall") == ids(causes=[]) == set()
    assert ids(model_group="small") == {both.episode_id, alone.episode_id}
    assert ids(causes=[Cause.AUTHOR]) == {none.episode_id}
    assert ids(model_group="small", causes=COUNTED) == {both.episode_id, alone.episode_id}


def test_a_limit_of_zero_finds_nothing(store: TraceStore) -> None:
    store.write_episodes([build_trace(0)])
    assert store.find_traces(limit=0) == store.newest_episodes(limit=0) == []


def test_a_list_leaves_out_what_was_removed_while_it_was_made(
    store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write_episodes([build_trace(0), build_trace(1)])
    newest = store._newest_ids
    monkeypatch.setattr(store, "_newest_ids", lambda *asked: [*newest(*asked), "removed"])
    assert len(store.newest_episodes(limit=5)) == 2


def test_a_run_with_two_dots_in_its_name_is_pinned(store: TraceStore) -> None:
    store.write_episodes([replace(build_trace(0), run_id="a..b")])
    ref = store.pin_episodes(**(KEY | {"run_id": "a..b"}))
    assert [t.run_id for t in store.read_traces(ref)] == ["a..b"]


def test_batches_are_small_and_hold_the_columns_asked_for(store: TraceStore) -> None:
    traces = [build_trace(i) for i in range(10)]
    store.write_episodes(traces)
    batches = list(store.read_batches(store.pin_episodes(**KEY), columns=["episode_id", "turns"], batch_size=3))
    assert max(b.num_rows for b in batches) <= 3
    assert {tuple(b.schema.names) for b in batches} == {("episode_id", "turns")}
    turns = {row["episode_id"]: row["turns"] for b in batches for row in b.to_pylist()}
    logprobs = turns[traces[4].episode_id][1]["rollout_logprobs"]
    assert np.float32(logprobs).tolist() == list(traces[4].turns[1].rollout_logprobs)


def test_an_episode_is_found_by_the_start_of_its_id(store: TraceStore) -> None:
    traces = [build_trace(0, episode_id="aab0"), build_trace(1, episode_id="aac'0"), build_trace(2, episode_id="aab")]
    store.write_episodes(traces)
    assert store.get_trace("aac'") == traces[1]
    assert store.get_trace("aab") == traces[2]
    with pytest.raises(ValueError, match=r"'aa' is not unique.*give more characters"):
        store.get_trace("aa")
    with pytest.raises(ValueError, match="no episode 'b'"):
        store.get_trace("b")
    assert [t.episode_id for t in store.find_traces(task_id="t1", status=EpisodeStatus.OK)] == ["aab"]
    assert len(store.find_traces(run_id="run", limit=2)) == 2


def test_episodes_are_found_by_the_versions_that_played_them(store: TraceStore) -> None:
    played = [{"a": 1, "b": 12}, {"b": 1, "a": 1}, {"a": 12}, {"it's": 3, 'q"': 1}, {}]
    store.write_episodes([build_trace(i, episode_id=f"e{i}", policy_versions=v) for i, v in enumerate(played)])

    def found(**policy_versions: int) -> list[str]:
        return sorted(t.episode_id for t in store.find_traces(run_id="run", policy_versions=policy_versions))

    assert found(a=1, b=1) == found(b=1) == ["e1"] and found(a=1) == ["e0", "e1"]
    assert found(a=12) == ["e2"] and found(b=2) == [] and len(found()) == 5
    assert [t.episode_id for t in store.find_traces(policy_versions={'q"': 1, "it's": 3})] == ["e3"]
    store.write_episodes([build_trace(5, episode_id="e5", policy_versions={"löser": 7})])
    assert [t.episode_id for t in store.find_traces(policy_versions={"löser": 7})] == ["e5"]


def test_outcomes_are_found_for_listed_episodes_of_several_iterations_and_credit_versions(store: TraceStore) -> None:
    first, second, uncredited = build_trace(0), build_trace(1, iteration=4), build_trace(2, iteration=5)
    store.write_episodes([first, second, uncredited])
    store.write_rewards([build_rewards(first, outcome=0.25), build_rewards(first, credit_version="c2", outcome=0.5)])
    store.write_rewards([build_rewards(second, outcome=1.0)])
    listed = store.newest_episodes(limit=9)
    assert store.outcomes_of(listed) == {
        first.episode_id: {"c1": 0.25, "c2": 0.5},
        second.episode_id: {"c1": 1.0},
    }
    assert store.outcomes_of(row for row in listed if row["episode_id"] == second.episode_id) == {
        second.episode_id: {"c1": 1.0}
    }


def test_the_tables_of_an_iteration_are_there_once_it_has_begun(store: TraceStore) -> None:
    store.begin(run_id="run", iteration=3)
    names = set(store._tables.all_names())
    assert {table_name(kind, "run", 3) for kind in ("episodes", "rewards")} <= names


def test_rewards_come_back_as_written_and_once_per_credit_version(store: TraceStore) -> None:
    traces = [build_trace(i) for i in range(3)]
    store.write_episodes(traces)
    ref = store.pin_episodes(**KEY)
    rewards = [build_rewards(t, outcome=i / 2) for i, t in enumerate(traces)]
    assert store.write_rewards(rewards) == 3
    assert store.write_rewards([build_rewards(t, outcome=9.0) for t in traces]) == 0
    assert store.write_rewards([build_rewards(traces[0], credit_version="c2")]) == 1
    pinned = _pin_rewards(store, ref)
    assert pinned.num_episodes == store.count_rows(pinned) == 3
    assert _by_id(store.read_rewards(pinned)) == _by_id(rewards)
    assert [r.credit_version for r in store.rewards_of(traces[0].episode_id)] == ["c1", "c2"]
    assert _pin_rewards(store, ref) == pinned


def test_an_excluded_group_is_stored_but_no_reader_of_the_ref_sees_it(store: TraceStore) -> None:
    store.write_episodes([build_trace(i) for i in range(6)])
    ref = store.pin_episodes(**KEY, excluded_groups=["g1"])
    assert ref == TracesRef(**json.loads(json.dumps(asdict(ref))))
    assert ref.num_episodes == store.count_rows(ref) == 4
    assert {t.group_id for t in store.read_traces(ref)} == {"g0", "g2"}
    assert {t.group_id for t in store.read_traces(ref, model_group="small", causes=COUNTED)} == {"g0", "g2"}
    store.write_rewards([build_rewards(build_trace(i)) for i in (0, 1, 4, 5)])
    assert _pin_rewards(store, ref).num_episodes == 4
    assert store.pin_episodes(**KEY).num_episodes == 6
    assert store.stored_episodes(**KEY, with_tokens=True).num_rows == 6


def test_only_what_failed_is_replaced_and_what_was_pinned_stays(store: TraceStore) -> None:
    store.write_episodes([build_trace(0, answer="first"), build_trace(1, status=EpisodeStatus.INFRA_ERROR, answer="")])
    before = store.pin_episodes(**KEY)
    again = [build_trace(0, answer="second"), build_trace(1, answer="second"), build_trace(2, answer="second")]
    store.write_episodes(again, replaced=[Cause.INFRASTRUCTURE])
    assert {t.episode_id: t.answer for t in store.find_traces()} == {
        build_trace(0).episode_id: "first",
        build_trace(1).episode_id: "second",
        build_trace(2).episode_id: "second",
    }
    assert sorted(t.answer for t in store.read_traces(before)) == ["", "first"]


def test_what_was_pinned_before_it_was_replaced_does_not_come_back_when_it_is_pinned_after(store: TraceStore) -> None:
    first = [build_trace(i) for i in (0, 1)]
    failed = [build_trace(i, status=EpisodeStatus.INFRA_ERROR) for i in (2, 3)]
    store.write_episodes(first)
    pinned_first = store.pin_episodes(**KEY)
    store.write_episodes(failed)
    repeated = store.pin_episodes(**KEY, excluded_groups=["g1"])  # the first pass again, with nothing to play
    with_failed = store.pin_episodes(**KEY)
    assert {repeated.num_episodes, store.count_rows(repeated), store.count_rows(pinned_first)} == {2}
    again = [build_trace(2), build_trace(3, status=EpisodeStatus.INFRA_ERROR, started_at=1_700_000_100.0)]
    store.write_episodes(again, replaced=[Cause.INFRASTRUCTURE])
    ref = store.pin_episodes(**KEY)
    assert {t.episode_id: t for t in store.read_traces(ref)} == {t.episode_id: t for t in [*first, *again]}
    assert {t.episode_id: t for t in store.read_traces(with_failed)} == {t.episode_id: t for t in [*first, *failed]}
    assert store.pin_episodes(**KEY) == ref, "another driver has the same ref"


def test_rewards_of_other_episodes_have_another_pin(store: TraceStore) -> None:
    store.write_episodes([build_trace(i) for i in range(4)])
    for left_out, scored in (("g1", (0, 1)), ("g0", (2, 3))):  # each time two episodes
        store.write_rewards([build_rewards(build_trace(i)) for i in scored])
        ref = _pin_rewards(store, store.pin_episodes(**KEY, excluded_groups=[left_out]))
        assert {build_trace(i).episode_id for i in scored} <= {r.episode_id for r in store.read_rewards(ref)}


def test_rewards_are_asked_only_of_the_causes_that_count_and_of_no_unscored_episode(store: TraceStore) -> None:
    store.write_episodes([build_trace(0), build_trace(1, status=EpisodeStatus.TIMEOUT)])
    store.write_rewards([build_rewards(build_trace(0))])
    traces = store.pin_episodes(**KEY)
    assert _pin_rewards(store, traces, causes=COUNTED).num_episodes == 1
    assert _pin_rewards(store, traces, unscored=[build_trace(1).episode_id]).num_episodes == 1
    with pytest.raises(ValueError, match="1 of 2 episodes"):
        _pin_rewards(store, traces)


def test_the_texts_of_completions_are_read_of_the_episodes_that_are_asked_for(store: TraceStore) -> None:
    store.write_episodes([build_trace(0), build_trace(1)])
    said = tuple(turn.completion_text for turn in build_trace(0).turns)
    assert store.completions_of([build_trace(0).episode_id]) == {build_trace(0).episode_id: said}
    assert store.completions_of([]) == {}


def _pin_rewards(store: TraceStore, traces: TracesRef, **changes: Any) -> RewardsRef:
    key: dict[str, Any] = {"run_id": "run", "iteration": 3, "purpose": Purpose.TRAIN, "credit_version": "c1"}
    return store.pin_rewards(**key, traces=traces, **changes)


def _by_id(rewards: object) -> dict[str, EpisodeRewards]:
    return {r.episode_id: r for r in rewards}


def test_variants_are_no_examples(store: TraceStore) -> None:
    plain = build_trace(0)
    variant = replace(plain, episode_id="v", group_id="v", variant="without-solver")
    store.write_episodes([plain, variant])
    store.write_rewards([build_rewards(plain), build_rewards(variant)])
    where = {"run_id": plain.run_id, "purpose": plain.purpose}
    rewarded = store.rewarded_traces(**where, iteration=None, min_outcome=1.0)
    assert [trace.episode_id for trace in rewarded] == [plain.episode_id]
    assert [trace.episode_id for trace in store.find_traces(**where, variant="")] == [plain.episode_id]
    assert len(store.find_traces(**where)) == 2


OTHER_KEYS = [
    KEY | {"run_id": "r:n"},  # two names of which one table is made
    KEY | {"run_id": "r?n"},
    KEY | {"run_id": "r?n", "iteration": 4},
    KEY | {"run_id": "r?n", "purpose": Purpose.GATE},
    KEY | {"run_id": "r?n", "team_key": "champion"},
]


@pytest.fixture
def shared(store: TraceStore) -> TraceStore:
    """Two episodes of each key, all credited under c1 with 0 and 1, and the first also under c2."""
    for key in OTHER_KEYS:
        traces = [build_trace(i, **key) for i in range(2)]
        store.write_episodes(traces)
        store.write_rewards([build_rewards(trace, outcome=float(i)) for i, trace in enumerate(traces)])
        store.write_rewards([build_rewards(traces[0], credit_version="c2", outcome=0.5)])
    return store


@pytest.mark.parametrize("key", OTHER_KEYS, ids=lambda key: "/".join(map(str, key.values())))
def test_every_reader_gets_the_rows_of_its_own_key(shared: TraceStore, key: dict[str, Any]) -> None:
    own = [build_trace(i, **key).episode_id for i in range(2)]
    of_purpose = {name: key[name] for name in ("run_id", "iteration", "purpose")}
    teams = [k for k in OTHER_KEYS if {name: k[name] for name in of_purpose} == of_purpose]
    of_all_teams = sorted(build_trace(i, **k).episode_id for k in teams for i in range(2))
    stored = shared.stored_episodes(**key)
    assert sorted(stored["episode_id"].to_pylist()) == sorted(own)
    assert stored.column_names == [
        *("episode_id", "group_id", "task_id", "status", "cause", "stop_reason", "error", "num_turns"),
        *("started_at", "duration_s"),
    ]
    assert shared.stored_episodes(**key, with_tokens=True)["num_tokens"].to_pylist() == [
        sum(len(turn.completion_token_ids) for turn in shared.get_trace(i, run_id=key["run_id"]).turns)
        for i in shared.stored_episodes(**key)["episode_id"].to_pylist()
    ]
    assert sorted(shared.stored_ids(**key)) == sorted(own)
    traces = shared.pin_episodes(**key)
    assert traces.num_episodes == 2
    pinned = shared.pin_rewards(**of_purpose, credit_version="c1", traces=traces)
    assert pinned.num_episodes == 2
    assert sorted(r.episode_id for r in shared.read_rewards(pinned)) == sorted(own)
    assert {r.credit_version for r in shared.read_rewards(pinned)} == {"c1"}
    with pytest.raises(ValueError, match=r"1 of 2 episodes .* have no rewards of credit version 'c2'"):
        shared.pin_rewards(**of_purpose, credit_version="c2", traces=traces)
    assert sorted(t.episode_id for t in shared.find_traces(**of_purpose)) == of_all_teams
    for known in ({"run_id": key["run_id"], "iteration": key["iteration"]}, {"run_id": key["run_id"]}, {}):
        assert [r.credit_version for r in shared.rewards_of(own[0], **known)] == ["c1", "c2"]
        assert [r.outcome for r in shared.rewards_of(own[1], **known)] == [1.0]
    good = shared.rewarded_traces(**of_purpose, min_outcome=0.6)
    assert sorted(t.episode_id for t in good) == sorted(build_trace(1, **k).episode_id for k in teams)
    assert list(shared.rewarded_traces(**of_purpose, min_outcome=1.1)) == []
    assert set(shared.completions_of(own)) == set(own)


def test_what_is_not_named_is_found_in_all_and_later_iterations_come_first(shared: TraceStore) -> None:
    found = shared.find_traces()
    assert len(found) == 2 * len(OTHER_KEYS)
    assert [trace.iteration for trace in found] == [4, 4, *[3] * 8]
    assert len(shared.find_traces(limit=3)) == 3
    assert {t.run_id for t in shared.find_traces(run_id="r:n")} == {"r:n"}
    assert {t.iteration for t in shared.find_traces(iteration=4)} == {4}
    assert {t.purpose for t in shared.find_traces(purpose=Purpose.GATE)} == {Purpose.GATE}
    assert len(shared.find_traces(task_id="t0")) == 10 and shared.find_traces(task_id="t1") == []
    assert shared.find_traces(status=EpisodeStatus.TIMEOUT) == []
    assert shared.rewards_of("0003nothing") == []
    both = shared.rewarded_traces(run_id="r?n", iteration=None, purpose=Purpose.TRAIN, min_outcome=1.0)
    assert sorted(trace.iteration for trace in both) == [3, 3, 4]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"run_id": "r?n"},
        {"run_id": "r?n", "iteration": 3},
        {"iteration": 3},
        {"purpose": Purpose.GATE},
        {"run_id": "r:n", "purpose": Purpose.TRAIN, "task_id": "t0", "status": EpisodeStatus.OK},
        {"status": EpisodeStatus.TIMEOUT},
        {"task_id": "t7"},
    ],
    ids=str,
)
def test_a_list_holds_what_was_asked_for_and_goes_on_in_the_same_list(
    shared: TraceStore, asked: dict[str, Any]
) -> None:

    def held(trace: Trace) -> dict[str, Any]:
        return {name: getattr(trace, name, trace.task.task_id) for name in asked}

    wanted = {t.episode_id for t in shared.find_traces() if all(held(t)[k] == v for k, v in asked.items())}
    listed = [row["episode_id"] for row in shared.newest_episodes(limit=99, **asked)]
    assert set(listed) == wanted and len(listed) == len(wanted)
    for i, before in enumerate(listed):
        page = shared.newest_episodes(limit=99, before=before, **asked)
        assert [row["episode_id"] for row in page] == listed[i + 1 :]
    for other in {t.episode_id for t in shared.find_traces()} - wanted:
        with pytest.raises(ValueError, match="not in this list"):
            shared.newest_episodes(limit=1, before=other, **asked)


def test_a_list_by_outcomes_begins_after_no_episode_that_it_leaves_out(store: TraceStore) -> None:
    traces = [build_trace(i, started_at=float(-i)) for i in range(3)]
    store.write_episodes(traces)
    store.write_rewards([build_rewards(t, outcome=float(i != 1)) for i, t in enumerate(traces)])
    solved: dict[str, Any] = {"run_id": "run", "outcomes": (0.5, None)}
    first, lost, last = (t.episode_id for t in traces)
    assert [row["episode_id"] for row in store.newest_episodes(limit=9, before=first, **solved)] == [last]
    with pytest.raises(ValueError, match="not in this list: begin without it"):
        store.newest_episodes(limit=9, before=lost, **solved)


def test_a_failed_episode_counts_as_stored_unless_its_cause_is_to_be_repeated(store: TraceStore) -> None:
    ok = build_trace(0)
    lost = build_trace(1, status=EpisodeStatus.INFRA_ERROR, cause=Cause.INFRASTRUCTURE)
    wrong = build_trace(2, status=EpisodeStatus.AGENT_ERROR, cause=Cause.POLICY)
    store.write_episodes([ok, lost, wrong])
    assert store.stored_ids(**KEY) == {t.episode_id for t in (ok, lost, wrong)}
    assert store.stored_ids(**KEY, but_not=[Cause.INFRASTRUCTURE]) == {ok.episode_id, wrong.episode_id}
    assert store.stored_ids(**KEY, but_not=[Cause.INFRASTRUCTURE, Cause.POLICY]) == {ok.episode_id}


def test_rewards_of_an_episode_whose_id_names_no_iteration_are_found(store: TraceStore) -> None:
    trace = build_trace(0, episode_id="chatcmpl-1")
    store.write_episodes([trace])
    store.write_rewards([build_rewards(trace)])
    for run_id in (None, "run"):
        assert [r.episode_id for r in store.rewards_of("chatcmpl-1", run_id=run_id)] == ["chatcmpl-1"]
    assert store.rewards_of("chatcmpl-1", run_id="other") == []


def test_pins_of_different_keys_never_meet(shared: TraceStore) -> None:
    refs = [shared.pin_episodes(**key) for key in OTHER_KEYS]
    paid = [
        shared.pin_rewards(
            **{name: key[name] for name in ("run_id", "iteration", "purpose")}, credit_version="c1", traces=ref
        )
        for key, ref in zip(OTHER_KEYS, refs, strict=True)
    ]
    assert len({ref.tag for ref in refs}) == len({ref.tag for ref in paid}) == len(OTHER_KEYS)
    for key, ref in zip(OTHER_KEYS, refs, strict=True):
        own = {build_trace(i, **key).episode_id for i in range(2)}
        assert {trace.episode_id for trace in shared.read_traces(ref)} == own
    shared.write_episodes([build_trace(2, **OTHER_KEYS[1])])
    assert shared.pin_episodes(**OTHER_KEYS[1]).tag != refs[1].tag, "another row is another set"


def test_times_of_events_are_unix_seconds_of_the_episodes_in_a_span_of_time(store: TraceStore) -> None:
    def played(index: int, began: float) -> Trace:
        return replace(build_trace(index, **KEY), started_at=began, duration_s=10.0)

    store.write_episodes([played(0, 1000.0), played(1, 1100.0), replace(played(2, 1200.0), turns=(), tool_calls=())])
    where = {"run_id": "run", "iteration": 3}
    found = store.event_times(**where, since=1105.0, until=1205.0)
    trace = played(1, 1100.0)
    expected = [(EPISODE, "", 1100.0, 1110.0), (EPISODE, "", 1200.0, 1210.0)]
    expected += [(TURN, t.model_group, 1100 + t.start_s, 1100 + t.start_s + t.duration_s) for t in trace.turns]
    expected += [(TOOL_CALL, c.tool, 1100 + c.start_s, 1100 + c.start_s + c.duration_s) for c in trace.tool_calls]
    rows = sorted((row["kind"], row["name"], row["start_s"], row["end_s"]) for row in found.to_pylist())
    assert len(rows) == len(expected) > 4
    for row, known in zip(rows, sorted(expected), strict=True):
        assert row[:2] == known[:2] and row[2:] == pytest.approx(known[2:])
    assert store.event_times(**where, since=1110.0, until=1200.0).num_rows == 0
    assert store.event_times(run_id="run", iteration=4, since=0.0, until=1e10).num_rows == 0
