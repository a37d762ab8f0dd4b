"""Who waited for whom: literal times in, seconds and words out. Work and waits of each lane are all of an iteration's seconds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pipelines.report.timeline import Kind, Lane, Span, StageTime, Timeline, iteration_timeline
from pipelines.report.waits import (
    AIRFLOW,
    PAUSE,
    RUNNER,
    STAGE,
    STOP,
    WHOLE,
    Account,
    Cause,
    account,
    cause_in_words,
    lane_times,
    largest_waits,
)

pytestmark = pytest.mark.fast

Times = list[tuple[float, float]]


def stage(name: str, start: float, end: float, group: str = "", **changes: Any) -> StageTime:
    return StageTime(**{"stage": name, "model_group": group, "start_s": start, "end_s": end, "process": "p", **changes})


def played(
    *stages: StageTime,
    engines: dict[str, Times] | None = None,
    trainers: dict[str, Times] | None = None,
    tools: dict[str, Times] | None = None,
    collectors: Times | None = None,
    iteration: int = 1,
) -> Timeline:
    """A timeline; without `engines` no traces of it are stored."""
    calls = None
    if engines is not None:
        calls = {Lane(Kind.ENGINE, name): np.array(times or np.empty((0, 2))) for name, times in engines.items()}
        calls |= {Lane(Kind.TOOL, name): np.array(times) for name, times in (tools or {}).items()}
        calls[Lane(Kind.COLLECTORS)] = np.array(collectors or np.empty((0, 2)))
    spans = {name: [Span(*time, "train") for time in times] for name, times in (trainers or {}).items()}
    return iteration_timeline(iteration, stages, trainers=spans, engines=list(engines or ()), calls=calls)


def seconds_of(found: Account) -> dict[tuple[str, str, str, str], float]:
    """Seconds by who waits and the three parts of the cause."""
    return {(wait.who, *wait.cause): round(wait.seconds, 6) for wait in found.waits}


STAGES = stage("collect", 0, 40), stage("score", 40, 42), stage("train", 42, 72, "a"), stage("sync", 72, 75)


def test_engines_wait_for_the_trainer_and_trainers_for_the_engines() -> None:
    found = account(
        played(*STAGES, engines={"a": [(2, 30), (10, 38)]}, trainers={"a": [(42, 72)]}, collectors=[(2, 38)])
    )
    assert seconds_of(found) == {
        ("trainer/", "engine", "", "collect"): 36,
        ("engine/", "trainer", "a", "train"): 30,
        ("engine+trainer/", STAGE, "", "collect"): 4,
        ("engine+trainer/", STAGE, "", "sync"): 3,
        ("engine+trainer/", STAGE, "", "score"): 2,
    }
    assert found.lanes == {"engine/a": (36, 75), "trainer/a": (30, 75), "collectors/": (36, 75)}
    assert found.work == {"engine": 36, "trainer": 30, "stage/collect": 4, "stage/score": 2, "stage/sync": 3}
    assert found.seconds == sum(found.work.values()) == 75


def test_the_trainer_that_ends_last_is_waited_for_by_the_engines_and_by_the_other_trainer() -> None:
    stages = stage("train", 0, 4, "a"), stage("train", 0, 10, "b")
    found = account(played(*stages, engines={"a": []}, trainers={"a": [(0, 4)], "b": [(1, 10)]}))
    assert seconds_of(found) == {
        ("engine/", "trainer", "b", "train"): 9,
        ("trainer/a", "trainer", "b", "train"): 6,
        ("engine/", "trainer", "a", "train"): 1,
        ("trainer/b", "trainer", "a", "train"): 1,
    }


def test_parts_of_a_training_that_follow_one_another_are_one_work() -> None:
    parts: dict[str, Times] = {"a": [(0, 1), (1, 2), (2, 9)], "b": [(0, 3), (3, 4)]}
    found = account(played(stage("train", 0, 9, "a"), engines={"a": []}, trainers=parts))
    assert seconds_of(found)["engine/", "trainer", "a", "train"] == 9, "b's first part ends after a's, b does not"
    assert seconds_of(found)["trainer/b", "trainer", "a", "train"] == 5


def test_an_idle_engine_waits_for_the_engine_that_is_at_work() -> None:
    found = account(played(stage("collect", 0, 10), engines={"a": [(0, 6)], "b": [(4, 10)]}, trainers={"a": []}))
    assert seconds_of(found) == {
        ("trainer/", "engine", "", "collect"): 10,
        ("engine/a", "engine", "b", "collect"): 4,
        ("engine/b", "engine", "a", "collect"): 4,
    }


def test_engines_wait_for_a_tool_then_for_what_lies_between_calls_then_for_the_stage() -> None:
    found = account(
        played(
            stage("collect", 0, 10),
            engines={"a": [(1, 3)]},
            tools={"search": [(2, 6)], "world": [(4, 7)]},
            collectors=[(1, 9)],
        )
    )
    assert seconds_of(found) == {
        ("engine/", "tool", "world", "collect"): 3,
        ("engine/", "tool", "search", "collect"): 1,
        ("engine/", "collectors", "", "collect"): 2,
        ("engine/", STAGE, "", "collect"): 2,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, RUNNER),
        ({"process": "q", "is_job": True}, AIRFLOW),
        ({"process": "q"}, STOP),
        ({"attempt": 2}, STOP),
        ({"attempt": 2, "process": "q", "is_job": True}, STOP),
    ],
)
def test_between_two_stages_all_wait_for_whoever_begins_the_next_one(changes: dict[str, Any], reason: str) -> None:
    stages = stage("collect", 0, 5), stage("score", 25, 30, **changes)
    found = account(played(*stages, engines={"a": [(0, 5)]}, collectors=[(0, 5)]))
    assert seconds_of(found)["engine/", PAUSE, reason, "score" if reason == STOP else ""] == 20
    assert found.work[PAUSE] == 20


def test_pauses_before_all_stages_are_one_wait() -> None:
    jobs = [
        stage(name, 20 * i, 20 * i + 9, process=name, is_job=True)
        for i, name in enumerate(("collect", "score", "sync"))
    ]
    found = account(played(*jobs, engines={"a": []}))
    assert seconds_of(found)["engine/", PAUSE, AIRFLOW, ""] == 22
    assert largest_waits(found, 1) == [
        "engines waited 22.0 s (45% of iteration 1): Airflow had not begun the next stage yet"
    ]


def test_an_iteration_that_was_interrupted_and_repeated_waits_for_the_repetition() -> None:
    stages = (
        stage("collect", 1000, 1040),
        stage("train", 1045, 1060, "a"),
        stage("train", 4660, 4700, "b", attempt=2, process="q"),
        stage("sync", 4700, 4702, process="q"),
    )
    found = account(
        played(
            *stages,
            engines={"a": [(1000, 1040)], "b": []},
            trainers={"a": [(1045, 1060)], "b": [(4660, 4700)]},
            iteration=7,
        )
    )
    assert seconds_of(found)["engine+trainer/", PAUSE, STOP, "train"] == 3600
    assert largest_waits(found, 1) == [
        "engines and trainers waited 3600.0 s (97% of iteration 7): the run was stopped before train was done, or train failed and was "
        "repeated"
    ]


def test_where_no_traces_are_stored_nothing_is_said_of_engines() -> None:
    found = account(played(*STAGES, trainers={"a": [(42, 72)]}))
    assert found.lanes == {"trainer/a": (30, 75)}
    assert seconds_of(found) == {
        ("trainer/", WHOLE, "", "collect"): 40,
        ("trainer/", WHOLE, "", "sync"): 3,
        ("trainer/", WHOLE, "", "score"): 2,
    }
    assert cause_in_words(Cause(WHOLE, "", "collect")) == "collect was at work"


def test_work_and_waits_of_a_lane_are_all_seconds_whatever_happened() -> None:
    random = np.random.default_rng(0)
    engines: dict[str, Any] = {n: np.sort(random.uniform(0, 50, (40, 2)), axis=1).tolist() for n in ("a", "b", "c")}
    tools: dict[str, Any] = {"search": np.sort(random.uniform(0, 50, (30, 2)), axis=1).tolist()}
    stages = [stage("collect", 0, 45.5), stage("train", 46, 60, "a"), stage("train", 46.25, 58, "b", attempt=2)]
    trainers = {"a": [(46.5, 59.0)], "b": [(47.0, 50.0), (50.5, 58.0)]}
    found = account(played(*stages, engines=engines, tools=tools, trainers=trainers, collectors=[(0.5, 45)]))
    assert sum(found.work.values()) == pytest.approx(60)
    for lane in ("engine/a", "engine/b", "engine/c", "trainer/a", "trainer/b"):
        kind = lane.partition("/")[0]
        waited = sum(w.seconds for w in found.waits if w.who == lane or (w.who.endswith("/") and kind in w.who))
        assert found.lanes[lane][0] + waited == pytest.approx(60), lane


def test_a_stage_that_is_still_running_is_waited_for_until_now() -> None:
    stages = stage("collect", 0, 5), stage("train", 5, 25, "a", status="running")
    found = account(played(*stages, trainers={"a": [(5, 25)]}))
    assert seconds_of(found) == {("trainer/", WHOLE, "", "collect"): 5} and found.seconds == 25


def test_a_stage_that_took_no_time_is_nobodys_work() -> None:
    assert account(played(stage("collect", 3, 3), engines={"a": []})).waits == ()


def test_a_run_of_one_iteration_names_it_and_one_of_several_names_that_with_the_longest_wait() -> None:
    first = account(played(*STAGES, engines={"a": [(0, 40)]}, trainers={"a": [(42, 72)]}, iteration=3))
    assert largest_waits(first, 2) == [
        "trainers waited 40.0 s (53% of iteration 3): engines were at work (collect)",
        "engines waited 30.0 s (40% of iteration 3): the trainer of model group a was at work",
    ]
    stages = stage("collect", 0, 5), stage("train", 5, 30, "a")
    second = account(played(*stages, engines={"a": [(0, 5)]}, trainers={"a": [(5, 30)]}, iteration=4))
    assert largest_waits(first.plus(second), 2) == [
        "engines waited 55.0 s (52% of 2 iterations): the trainer of model group a was at work; most in iteration 3 (30.0 s)",
        "trainers waited 45.0 s (43% of 2 iterations): engines were at work (collect); most in iteration 3 (40.0 s)",
    ]
    assert largest_waits(Account()) == []


def test_the_share_of_a_lane_is_of_the_iterations_in_which_it_is_known() -> None:
    known = account(played(stage("collect", 0, 10), engines={"a": [(0, 4)]}, trainers={"a": []}))
    unknown = account(played(stage("collect", 0, 30), trainers={"a": []}, iteration=2))
    rows = {row.label: row for row in lane_times(known.plus(unknown))}
    assert (rows["engine a"].share, rows["engine a"].idle_s) == (0.4, 6)
    assert rows["engine a"].waited_for == "6.0 s: collect was at work around its episodes"
    assert (rows["trainer a"].idle_s, rows["trainer a"].waited_for) == (40, "30.0 s: collect was at work")
    assert rows["collectors"].waited_for == ""


def test_an_account_comes_back_from_json_as_it_was() -> None:
    found = account(played(*STAGES, engines={"a": [(0, 40)]}, trainers={"a": [(42, 72)]}))
    assert Account.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert Account.from_json(Account().to_json()) == Account()


def test_every_cause_has_words() -> None:
    for kind in ("trainer", "tool"):
        assert "x was at work" in cause_in_words(Cause(kind, "x", "collect"))
    assert cause_in_words(Cause("engine", "x", "evaluate")) == "the engine of x was at work (evaluate)"
    assert cause_in_words(Cause(PAUSE, AIRFLOW, "")) == "Airflow had not begun the next stage yet"
    assert cause_in_words(Cause(PAUSE, RUNNER, "")) == "the runner had not begun the next stage yet"
    assert cause_in_words(Cause(STAGE, "", "sync")) == "sync loaded the new weights"
    assert cause_in_words(Cause(STAGE, "", "promote")) == "promote was at work"
    assert cause_in_words(Cause("collectors", "", "collect")) == "episodes were between two calls (collect)"
