"""The table of stages: deadlines, model groups, who needs a cluster, and what is handed on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stage_records as records

from pipelines.config.run_config import load_config
from pipelines.stages.table import STAGES, stage_named
from stores.journal.stage_results import StageResult, TrainedTeam

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUPS = {"a": {"agents": ["solver"]}, "b": {"agents": ["verifier", "refiner", "finalizer"]}}
RESULTS: dict[str, StageResult] = {
    "collect": records.collected(),
    "score": records.scored(),
    "train": records.trained(metrics={f"train/{i}": 0.0 for i in range(1000)}),
    "sync": records.synced(proofs=({"app": "x" * 1000},)),
    "evaluate": records.evaluated(contenders=({"condition": "x" * 1000},)),
    "promote": records.decided(),
}


def test_the_stages_are_those_of_the_loop_in_order() -> None:
    assert [*STAGES] == ["collect", "score", "train", "sync", "evaluate", "promote"]
    assert all(name == stage.result.STAGE for name, stage in STAGES.items())
    with pytest.raises(ValueError, match="unknown stage 'colect': one of collect, score"):
        stage_named("colect")


@pytest.mark.parametrize("name", STAGES)
def test_what_is_handed_on_is_small_and_part_of_the_result(name: str) -> None:
    stage, ref = STAGES[name], RESULTS[name].to_json()
    handed_on = stage.hand_on(ref)
    assert handed_on.keys() == set(stage.handed_on) and handed_on.items() <= ref.items()
    assert len(json.dumps(handed_on)) < 300
    assert stage.parse(ref) == RESULTS[name]


def test_a_team_trained_at_once_is_a_result_of_train() -> None:
    team = TrainedTeam(order=("a",), team=records.learner(), model_groups={"a": records.trained()})
    assert STAGES["train"].parse(team.to_json()) == team


def test_only_train_takes_a_model_group_and_it_must_be_one_of_its_tasks() -> None:
    config = load_config(SMALL, {"model_groups": GROUPS})
    STAGES["train"].check_model_group(config, "a")
    STAGES["score"].check_model_group(config, "")
    with pytest.raises(ValueError, match=r"stage train needs --model-group, one of a, b \(got ''\)"):
        STAGES["train"].check_model_group(config, "")
    with pytest.raises(ValueError, match="stage score is done for all model groups at once"):
        STAGES["score"].check_model_group(config, "a")


def test_deadlines_are_those_of_the_config() -> None:
    config = load_config(SMALL, {"model_groups": GROUPS, "train.stage_timeout_s": 5000, "score.stage_timeout_s": 7})
    assert STAGES["score"].timeout_s(config) == 7
    assert STAGES["train"].timeout_s(config, "a") == 5000
    assert STAGES["train"].timeout_s(config, "team") == 10_000, "one model group after another"
    assert STAGES["promote"].timeout_s(config) == config.promote.stage_timeout_s
    canary = load_config(SMALL, {"promote.deploy": "canary", "gateway": {}})
    assert STAGES["promote"].timeout_s(canary) == canary.promote.stage_timeout_s + canary.canary_timeout_s
