"""What stages leave in the journal comes back as it was, and what is not whole is refused with the key."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import stage_records as records

from stores.journal.stage_results import (
    Collected,
    Evaluated,
    Gain,
    Measured,
    StageResult,
    TeamScore,
    TracesSource,
    Trained,
    TrainedTeam,
    WarmStarted,
    result_of,
)

pytestmark = pytest.mark.fast

RESULTS: dict[str, StageResult] = {
    "sampled": records.collected(carried=("t3",), stopped_by="enough", served={"taken": 2, "held_out": 0, "left": 1}),
    "taken from another run": records.collected(
        source=TracesSource(run="other", iteration=2, store="/runs"), sampled_by={"a": 4}
    ),
    "scored": records.scored(),
    "trained": records.trained(reason="no trainable row", metrics={"train/rows": 0.0}),
    "trained, with its times": records.trained(
        parts={"load": (1795775113.25, 1795775114.5), "learn": (1795775114.5, 1795775119.0)}
    ),
    "failed": records.trained(is_failed=True, reason="training failed: x"),
    "the whole team": TrainedTeam(
        order=("b", "a"),
        team=records.learner(model=None, reason="no episode", parts={"read": (1.0, 2.5)}),
        model_groups={"a": records.trained("a"), "b": records.trained("b")},
    ),
    "synced": records.synced(proofs=({"app": "x", "max_difference_old": None},)),
    "evaluated": records.evaluated(
        promotes=("a",),
        champion=records.team_score(accuracy=0.3, pass_at_k=None),
        promoted=records.team_score(accuracy=0.7),
        gain=Gain(mean=0.2, low=0.1, high=0.3, num_tasks=20),
        guards={"turns": {"mean": 1.0, "low": 0.9, "high": 1.1, "num_tasks": 20, "limit": 1.5, "state": "holds"}},
        contenders=({"groups": ["a"], "verdict": "promote", "condition": "", "gain": None},),
        num_looks=2,
        num_unpaired=0,
        sampling_seconds=3.0,
        num_tokens=99,
    ),
    "not evaluated": Evaluated(verdict="skipped", condition="every", skipped="every", failed_groups={"a": "why"}),
    "decided": records.decided(),
    "not decided": records.decided(verdict="skipped", team_version=None),
    "measured": records.measured(),
    "warm start": WarmStarted(models={"a": records.model_ref("a", 0)}, metrics={"loss": 0.5}),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_comes_back_from_json_as_it_was(name: str) -> None:
    result = RESULTS[name]
    stored = json.loads(json.dumps(result.to_json()))
    assert type(result).from_json(stored) == result
    assert result_of(result.STAGE, stored) == result


def test_optional_fields_are_left_out_where_they_hold_their_default() -> None:
    data = records.collected().to_json()
    assert "served" not in data and "from" not in data and data["stopped_by"] is None
    assert "is_failed" not in records.trained().to_json()
    taken = records.collected(source=TracesSource(run="other", iteration=2, store="/runs")).to_json()
    assert taken["from"] == {"run": "other", "iteration": 2, "store": "/runs"}


def test_the_candidates_figures_are_keys_beside_the_verdict() -> None:
    assert {"accuracy", "verdict", "champion"} <= RESULTS["evaluated"].to_json().keys()
    assert RESULTS["measured"].to_json()["accuracy"] == 0.5
    own = {f.name for kind in (Evaluated, Measured) for f in fields(kind)}
    assert not own & {f.name for f in fields(TeamScore)}, "a key would stand for two things"


def test_a_missing_an_unknown_and_a_wrong_key_are_named_with_the_stage() -> None:
    data = records.collected().to_json() | {"num_tokns": 1, "num_new": "many"}
    del data["traces"]
    with pytest.raises(ValueError, match=r"the result of stage 'collect' \(Collected\) cannot be read") as raised:
        Collected.from_json(data)
    message = str(raised.value)
    assert "traces: is missing" in message and "num_tokns: is an unknown key" in message and "num_new: " in message
    with pytest.raises(ValueError, match=r"champion\.accuracy: is missing"):
        Evaluated.from_json({"verdict": "reject", "condition": "", "champion": _without_accuracy()})
    with pytest.raises(ValueError, match=r"model\.version: is missing"):
        Trained.from_json({"model": {"model_group": "a"}, "reason": "", "metrics": {}, "agents": {}})


def test_a_stage_without_a_record_has_no_result_of_a_kind() -> None:
    assert result_of("record", {"watch": {}}) is None


def _without_accuracy() -> dict[str, object]:
    return {name: value for name, value in records.team_score().to_json().items() if name != "accuracy"}
