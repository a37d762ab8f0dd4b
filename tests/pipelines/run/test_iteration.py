"""An iteration's results as its stages left them, and the error where one is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stage_records as records

from pipelines.config.run_config import load_config
from pipelines.run.iteration import NotDone
from pipelines.run.iterations import next_iteration, unfinished_iterations
from pipelines.run.run import Run
from stores.journal.stage_results import Collected, Measured, TrainedTeam

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUPS = {"a": {"agents": ["solver"]}, "b": {"agents": ["verifier", "refiner", "finalizer"]}}


def run_in(folder: Path, **changes: Any) -> Run:
    return Run(load_config(SMALL, {"storage.root": str(folder), "model_groups": GROUPS, **changes}))


def test_what_a_stage_left_is_read_as_a_record(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    results = (records.collected(), records.scored(), records.synced(), records.evaluated(), records.decided())
    for result in (*results, records.measured()):
        records.finish(run, 1, result)
    for group in GROUPS:
        records.finish(run, 1, records.trained(group), group)
    done = run.iteration(1)
    assert (done.collected, done.scored, done.synced, done.evaluated, done.decided) == results
    assert done.trained == {group: records.trained(group) for group in GROUPS}
    assert done.find(Measured) == records.measured()
    assert run.trained(1) == {group: records.model_ref(group, 1) for group in GROUPS}
    assert (next_iteration(run), unfinished_iterations(run)) == (2, [2])


def test_a_stage_that_is_not_done_is_named_with_the_command_that_does_it(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert run.iteration(3).find(Collected) is None
    with pytest.raises(NotDone) as raised:
        _ = run.iteration(3, needed_by="train").scored
    assert str(raised.value) == (
        "train of iteration 3 of run 'small' needs score, which is not done: run "
        "`troupe stage score --run small --iteration 3` first"
    )
    records.finish(run, 3, records.trained("a"), "a")
    assert run.iteration(3).find_trained() == {"a": records.trained("a")}
    with pytest.raises(NotDone, match=r"needs train of model group 'b', .* --iteration 3 --model-group b` first"):
        _ = run.iteration(3).trained


def test_a_team_that_was_trained_by_one_stage_is_read_by_model_group(tmp_path: Path) -> None:
    run = run_in(tmp_path, **{"train.algorithm": "mappo"})
    groups = {"a": records.trained("a"), "b": records.trained("b", 0, is_failed=True, reason="training failed: x")}
    with pytest.raises(NotDone, match="--model-group team` first"):
        _ = run.iteration(1).trained
    team = TrainedTeam(order=("b", "a"), team=records.learner(), model_groups=groups)
    records.finish(run, 1, team, "team")
    assert (run.iteration(1).trained, run.iteration(1).find_team()) == (groups, team)
    assert run.iteration(1).failed_groups == {"b": "training failed: x"}


def test_a_result_that_cannot_be_read_is_named_with_its_run_and_journal(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.journal.once(run.key(2, Collected.STAGE), lambda lease: {"num_new": 4})
    with pytest.raises(
        ValueError, match=r"iteration 2 of run 'small' in sqlite:.*journal\.db: the result of stage 'collect'"
    ):
        _ = run.iteration(2).collected
