"""The checks of `make chaos` find what they are for: each is shown a sound iteration, then the same with a fault in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lancedb
import pytest
from records import MakeTrace
from stage_records import collected, finish, trained

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from stores.journal import journal
from stores.journal.stage_results import Trained
from stores.traces.tables import table_name
from stores.types import Purpose
from stores.weights.manifest import Probe
from tests.chaos import checks
from tests.chaos.report import Cell, Report
from tests.chaos.scene import CONFIG

pytestmark = pytest.mark.test

SETTINGS = {"collect.tasks_per_iteration": 3, "collect.episodes_per_task": 2}
PROBE = Probe(sequences=((1, 2),), logprobs=((-0.5,),))


@pytest.fixture
def run(tmp_path: Path, make_trace: MakeTrace, tiny_model: Path) -> Run:
    """A run with one finished iteration: six episodes, version 1 after two optimizer steps, served."""
    run = Run(load_config(CONFIG, {"storage.root": str(tmp_path), **SETTINGS}))
    run.open()
    where: dict[str, Any] = {"run_id": run.run_id, "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
    run.traces.write_episodes([make_trace(i, **where) for i in range(6)])
    pinned = run.traces.pin_episodes(**where)
    zero = run.weights.commit(
        tiny_model, model_group="team", version=0, parent=None, run_id=run.run_id, iteration=0, probe=PROBE
    )
    assert zero is not None
    finish(run, 1, collected(traces=pinned, policy_versions={"team": 0}))
    finish(run, 1, train(run, tiny_model, steps_in_checkpoint=2), "team")
    return run


def train(run: Run, model: Path, *, steps_in_checkpoint: int) -> Trained:
    folder = Path(run.folder) / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "policy.json").write_text(json.dumps({"num_steps": steps_in_checkpoint}))
    about: dict[str, Any] = {
        "parent": 0,
        "run_id": run.run_id,
        "iteration": 1,
        "probe": PROBE,
        "checkpoint": str(folder),
    }
    ref = run.weights.commit(model, model_group="team", version=1, **about)
    return trained(model=ref, metrics={"train/steps": 2.0, "train/skipped_steps": 0.0})


def found(run: Run, before: checks.Look, *, served: int = 1) -> set[str]:
    """Names of the checks that object."""
    keys = checks.collected(run, 1)
    faults = checks.faults(run, 1, before, served={"team": [1, served]}, keys=keys)
    return {name for name, fault in faults.items() if fault}


def episodes(run: Run) -> lancedb.table.Table:
    return lancedb.connect(run.traces.uri).open_table(table_name("episodes", run.run_id, 1))


def lose(run: Run) -> None:
    name = min(checks.look(run, 1).episodes)
    episodes(run).delete(f"episode_id = '{name}'")


def rewrite(run: Run) -> None:
    name = min(checks.look(run, 1).episodes)
    episodes(run).update(where=f"episode_id = '{name}'", values={"answer": "6"})


def double(run: Run) -> None:
    table = episodes(run)
    table.add(table.search().limit(1).to_arrow())


def replay(run: Run) -> None:
    trace = run.traces.find_traces(run_id=run.run_id, limit=1)[0]
    run.traces.write_episodes([replace(trace, episode_id="f" * 32)])


def change(run: Run) -> None:
    with run.journal._connect() as connection:
        connection.execute(journal.STAGES.update().where(journal.STAGES.c.stage == "collect").values(token=2))


def repeat_steps(run: Run) -> None:
    (Path(run.folder) / "checkpoint" / "policy.json").write_text(json.dumps({"num_steps": 4}))


def test_a_sound_iteration_passes_every_check(run: Run) -> None:
    assert found(run, checks.look(run, 1)) == set()


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (lose, "episodes kept"),
        (rewrite, "episodes kept"),
        (double, "no episode twice"),
        (replay, "no episode twice"),
        (change, "refs unchanged"),
        (repeat_steps, "steps go on"),
    ],
)
def test_each_check_finds_the_fault_it_is_for(run: Run, fault: Callable[[Run], None], check: str) -> None:
    before = checks.look(run, 1)
    fault(run)
    assert check in found(run, before)


def test_a_replica_at_another_version_is_found(run: Run) -> None:
    assert found(run, checks.look(run, 1), served=0) == {"served versions"}


def test_other_episodes_than_those_of_the_undisturbed_run_are_found(run: Run) -> None:
    before = checks.look(run, 1)
    faults = checks.faults(run, 1, before, served={"team": [1]}, keys=["somebody else's"])
    assert faults["same episodes as undisturbed"]


def test_a_cell_is_kept_with_its_verdict_and_a_failed_one_is_played_again(tmp_path: Path) -> None:
    good = Cell(victim="node", stage="train", number=0, share=0.5, iteration=1, seconds=4.0)
    bad = replace(good, stage="sync", checks={"served versions": "the journal says 1"})
    Report(tmp_path / "report.json").keep([good, bad])
    again = Report(tmp_path / "report.json")
    assert again.has("node", "train", 0)
    assert not again.has("node", "sync", 0)
    assert again.data["cells"]["node/sync/0"]["verdict"] == "FAILED"
