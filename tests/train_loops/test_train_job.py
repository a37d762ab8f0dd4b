"""train_job: a job says who sampled; its result says when each part began and ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stores.types import ModelVersionRef, Purpose, RewardsRef, TracesRef
from train_loops.config import TrainConfig
from train_loops.train_job import TrainJob, train_parts
from train_loops.worker.trainer import _note

pytestmark = pytest.mark.fast


def train_job(**changes: Any) -> TrainJob:
    """Version 3 of group `shared` from version 2."""
    about = {"uri": "traces", "version": 1, "tag": "t", "run_id": "run", "iteration": 3, "purpose": Purpose.TRAIN}
    data = {
        "job_id": "run/3/shared",
        "run_id": "run",
        "iteration": 3,
        "model_group": "shared",
        "seed": 0,
        "parent": ModelVersionRef(model_group="shared", version=2, uri="weights/2", manifest_sha256="0"),
        "version": 3,
        "traces": TracesRef(**about, team_key="v1", num_episodes=1),
        "rewards": RewardsRef(**about, credit_version="c1", num_episodes=1),
        "credit_kind": "returns",
        "train": TrainConfig(),
        "traces_uri": "traces",
        "weights_uri": "weights",
    }
    return TrainJob(**data | changes)


def test_episodes_of_another_run_are_off_policy() -> None:
    """As on-policy ones, their masks of choices were judged by the engine's own logprobs: half of the jobs failed."""
    assert train_job(is_foreign=True).is_off_policy


@pytest.mark.parametrize("given", [{}, {"sampled_by": None}, {"sampled_by": 2}])
def test_the_parent_sampled_unless_another_version_is_named(given: dict[str, Any]) -> None:
    assert not train_job(**given).is_off_policy


@pytest.mark.parametrize("version", [0, 1, 5])
def test_an_earlier_version_or_one_that_was_left_again_may_have_sampled(version: int) -> None:
    job = train_job(sampled_by=version)
    assert (job.sampled_by, job.is_off_policy) == (version, True)


@pytest.mark.parametrize("version", [-1, 1.0, "1", True, [1]])
def test_what_is_no_version_is_refused(version: Any) -> None:
    with pytest.raises(ValueError, match=r"job run/3/shared: sampled_by is .*: give the number of the version"):
        train_job(sampled_by=version)


def test_each_part_begins_where_the_one_before_ended() -> None:
    ends = {"load": 101.0, "read": 101.5, "learn": 109.0}
    assert train_parts(100.0, ends) == {"load": (100.0, 101.0), "read": (101.0, 101.5), "learn": (101.5, 109.0)}
    assert list(train_parts(100.0, ends | {"store": 110.0})) == ["load", "read", "learn", "store"]


@pytest.mark.parametrize(
    ("trained_rows", "note"),
    [
        (8.0, "dr_mas on 8 rows; critic started afresh"),
        (
            0.0,
            "critic alone on 8 rows (its warm-up, or no advantages): the policy is its parent's; critic started afresh",
        ),
    ],
)
def test_a_version_says_whether_its_policy_was_trained(trained_rows: float, note: str) -> None:
    learned: Any = SimpleNamespace(metrics={"train/rows": 8.0, "train/trained_rows": trained_rows})
    assert _note(train_job(), learned, lost=["critic"]) == note
