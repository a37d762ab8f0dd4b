"""Which iteration a DAG run does, and why it does none. A real journal and trace store; stages are only recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import stage_records as records
from stage_records import finish

from pipelines.config.run_config import load_config
from pipelines.report.progress import Screen
from pipelines.run.iterations import QUIET_S, next_iteration
from pipelines.run.run import Run, plain
from pipelines.runners.schedule import (
    begin_iteration,
    champion_accuracy,
    claimed,
    pin,
    reason_to_skip,
    take,
)
from stores.journal.stage_results import Evaluated

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


def run_in(folder: Path, *, max_lag: int = 0, **schedule: Any) -> Run:
    tasks = folder / "train.jsonl"
    if not tasks.exists():
        tasks.write_text("".join(json.dumps({"question": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(64)))
    changes = {"storage.root": str(folder), "iterations": 4, "schedule": schedule, "tasks.train": {"path": str(tasks)}}
    changes |= {"loop.max_lag": max_lag}
    run = Run(load_config(SMALL, changes))
    run.open()
    return run


def with_champion(run: Run, version: int) -> None:
    run.journal.put_value(run.run_id, "champion", {"team_version": version, "models": {}})


def decided(run: Run, iteration: int, verdict: str, accuracy: float = 0.5) -> None:
    finish(run, iteration, records.evaluated(candidate=records.team_score(accuracy=accuracy)))
    version = iteration + 1
    finish(run, iteration, records.decided(verdict=verdict, condition=f"because {iteration}", team_version=version))
    if verdict == "promote":
        with_champion(run, iteration + 1)


def test_the_same_claim_keeps_its_iteration_for_ever(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert (next_iteration(run), claimed(run, "one")) == (1, None)
    assert pin(run, "one", 1) == 1
    decided(run, 1, "promote")
    assert next_iteration(run) == 2
    assert pin(run, "one", 2) == 1, "a retry of the first DAG run"
    assert pin(run, "two", 2) == 2
    assert (claimed(run, "one"), claimed(run, "two")) == (1, 2)


def test_claims_made_at_once_agree(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda n: pin(run_in(tmp_path), "one", n), range(1, 9)))
    assert found == {claimed(run, "one")}


def test_after_the_last_iteration_there_is_nothing_to_do(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    for iteration in range(1, 5):
        assert reason_to_skip(run) == ""
        decided(run, iteration, "promote")
    assert reason_to_skip(run) == "iteration 4 of 4 is done: raise `iterations` to train on"


def test_a_reached_target_skips_with_the_number(tmp_path: Path) -> None:
    run = run_in(tmp_path, target_accuracy=0.8)
    decided(run, 0, "promote", accuracy=0.1)
    decided(run, 1, "promote", accuracy=0.79)
    assert reason_to_skip(run) == ""
    decided(run, 2, "promote", accuracy=0.81)
    assert "0.810: schedule.target_accuracy = 0.8 is reached" in reason_to_skip(run)
    run.journal.put_value(run.run_id, "watched", {"team_version": 3, "accuracy": 0.7})
    assert champion_accuracy(run) == 0.7, "what evaluate_team found since"
    assert reason_to_skip(run) == ""


def test_a_target_is_reached_by_the_champions_latest_evaluation(tmp_path: Path) -> None:
    run = run_in(tmp_path, target_accuracy=0.8)
    decided(run, 1, "promote", accuracy=0.79)
    models = {"team": plain(records.model_ref("team", 1))}
    run.journal.put_value(run.run_id, "champion", {"team_version": 2, "models": models})
    assert reason_to_skip(run) == ""
    for iteration, accuracy in ((2, 0.83), (3, 0.75)):
        champion = records.team_score(policy_versions={"team": 1}, accuracy=accuracy)
        finish(run, iteration, records.evaluated(verdict="reject", champion=champion))
        finish(run, iteration, records.decided(verdict="inconclusive", team_version=iteration + 1))
        assert champion_accuracy(run) == accuracy
        assert ("schedule.target_accuracy = 0.8 is reached" in reason_to_skip(run)) == (accuracy > 0.8)


def test_rejections_in_a_row_skip_and_others_break_the_row(tmp_path: Path) -> None:
    run = run_in(tmp_path, max_rejections=2)
    decided(run, 0, "promote")
    decided(run, 1, "reject")
    reason = "evaluate.every = 2"
    finish(run, 2, Evaluated(verdict="skipped", condition=reason, skipped=reason))
    finish(run, 2, records.decided(verdict="skipped", condition=reason, team_version=None))
    assert reason_to_skip(run) == ""
    decided(run, 3, "reject")
    assert "rejected the last 2 candidates" in reason_to_skip(run)
    assert "because 3" in reason_to_skip(run)

    (tmp_path / "other").mkdir()
    other = run_in(tmp_path / "other", max_rejections=2)
    for iteration, verdict in enumerate(["promote", "reject", "inconclusive", "reject"]):
        decided(other, iteration, verdict)
    assert reason_to_skip(other) == ""


def test_nothing_new_skips_until_the_task_file_changes(tmp_path: Path) -> None:
    run = run_in(tmp_path, cron="@daily", on_new_tasks=True, min_fresh_traces=100)
    decided(run, 0, "promote")
    assert reason_to_skip(run) == "", "the first scheduled iteration needs no reason"
    pin(run, "one", 1)
    assert reason_to_skip(run) == "", "what was begun for new tasks and failed is finished"
    decided(run, 1, "inconclusive")
    assert "train.jsonl: no change and 0 fresh episodes, schedule.min_fresh_traces = 100" in reason_to_skip(run)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"question": "1+1", "answer": "2"}\n')
    assert reason_to_skip(run) == ""


def test_a_claim_that_is_killed_while_it_is_pinned_makes_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path, cron="@daily", on_new_tasks=True)
    decided(run, 0, "promote")
    written: list[Any] = []

    def killed_after_one(write: Any) -> Any:
        def work(*args: Any) -> Any:
            if written:
                raise KeyboardInterrupt
            written.append(args)
            return write(*args)

        return work

    for name in ("put_value", "pin_value"):
        monkeypatch.setattr(run.journal, name, killed_after_one(getattr(run.journal, name)))
    with pytest.raises(KeyboardInterrupt):
        take(run, "one", otherwise=1)
    again = run_in(tmp_path, cron="@daily", on_new_tasks=True)
    assert claimed(again, "one") or not reason_to_skip(again)
    assert claimed(again, "one") or take(again, "one", otherwise=1) == 1, "what `begin` does when it is repeated"
    decided(again, 1, "inconclusive")
    assert reason_to_skip(again).startswith("nothing new since the last scheduled iteration")


def test_episodes_of_other_runs_are_counted_only_where_the_schedule_waits_for_them(tmp_path: Path) -> None:
    run = run_in(tmp_path, cron="@daily")
    decided(run, 0, "promote")
    pin(run, "one", 1)
    decided(run, 1, "inconclusive")
    seen = run.journal.value(run.run_id, "seen")
    assert seen is not None and seen["num_others"] is None
    waiting = run_in(tmp_path, cron="@daily", min_fresh_traces=3)
    assert reason_to_skip(waiting) == "", "nobody knows how many there were"
    pin(waiting, "two", 2)
    decided(waiting, 2, "inconclusive")
    assert "0 fresh episodes, schedule.min_fresh_traces = 3" in reason_to_skip(waiting)


def test_an_iteration_does_not_begin_with_tasks_that_it_is_measured_on(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    shared = run.tasks("gate")[0]
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"question": shared.prompt, "answer": "1"}) + "\n")
    with pytest.raises(ValueError, match=r"tasks\..* and tasks\..*"):
        begin_iteration(run, "one", is_forced=False, address="", screen=Screen())
    assert claimed(run, "one") is None


def test_dag_runs_that_overlap_get_iterations_of_their_own(tmp_path: Path) -> None:
    run = run_in(tmp_path, max_lag=1)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda claim: take(run_in(tmp_path, max_lag=1), claim, otherwise=1), ("one", "two")))
    assert sorted(found) == [1, 2]
    assert reason_to_skip(run) == (
        "iterations 1 to 2 are under way, or were less than 120 s ago: loop.max_lag = 1 lets no other begin"
    )
    decided(run, 1, "promote")
    assert (take(run, "three", otherwise=2), take(run, "one", otherwise=2)) == (3, found[0]), "a retry keeps its own"
    for iteration in (2, 3):
        decided(run, iteration, "promote")
    assert take(run, "four", otherwise=4) == 4
    assert reason_to_skip(run).startswith("iteration 4 is under way, or was less than 120 s ago")


def test_a_claim_that_has_its_iteration_takes_no_other(tmp_path: Path) -> None:
    run = run_in(tmp_path, max_lag=1)
    assert [take(run, "one", otherwise=0) for _ in range(2)] == [1, 1]
    assert take(run, "two", otherwise=0) == 2


def test_an_iteration_whose_owner_was_killed_a_moment_ago_is_not_given_away(tmp_path: Path) -> None:
    run = run_in(tmp_path, max_lag=1)
    lines = "import sys; from stores.journal.journal import Journal, StageKey\nimport os\n"
    lines += "Journal(sys.argv[1]).once(StageKey('small', 1, 'train', 'team'), lambda lease: os._exit(9))"
    subprocess.run([sys.executable, "-c", lines, run.journal.url], cwd=SMALL.parents[2], timeout=60, check=False)
    assert take(run, "one", otherwise=0) == 2


def test_an_iteration_that_was_left_is_the_first_to_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path, max_lag=1)
    assert [take(run, claim, otherwise=0) for claim in ("one", "two")] == [1, 2]
    now = time.time()
    monkeypatch.setattr("pipelines.run.iterations.time.time", lambda: now + QUIET_S + 1)
    assert take(run, "three", otherwise=0) == 1


def test_without_lag_whoever_comes_joins_the_iteration_that_is_under_way(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert [take(run, claim, otherwise=1) for claim in ("one", "two")] == [1, 1]


def test_an_iteration_that_is_under_way_makes_nothing_new(tmp_path: Path) -> None:
    run = run_in(tmp_path, max_lag=1, cron="@daily", on_new_tasks=True)
    decided(run, 0, "promote")
    with_champion(run, 0)
    take(run, "one", otherwise=0)
    assert reason_to_skip(run).startswith("nothing new since the last scheduled iteration")
