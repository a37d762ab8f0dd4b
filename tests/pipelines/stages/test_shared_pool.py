"""Sleep in the list of apps, and around stage train: who is asleep when, also after a failure. The cluster is a fake."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.stages import train
from pipelines.stages.steps import _alone
from pipelines.stages.table import STAGES
from pipelines.stages.train import gpus_for_training
from serve_apps.policy import live_settings
from serve_apps.policy.live_settings import with_setting

pytestmark = pytest.mark.fast


def run(pool: str) -> Any:
    settings = SimpleNamespace(stage_timeout_s=100.0, start_timeout_s=300.0)
    config = SimpleNamespace(
        pool=pool,
        model_groups={"a": None, "b": None},
        train_tasks=("a", "b"),
        weights_name=lambda group: group,
        train_config=lambda group: settings,
        serve_config=lambda group: settings,
    )
    return SimpleNamespace(run_id="r", config=config)


@pytest.fixture
def failing() -> list[BaseException]:
    """What putting engines to sleep raises, if anything."""
    return []


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch, failing: list[BaseException]) -> list[Any]:
    """What was done to the apps, of which r-rollout-b is not deployed."""
    done: list[Any] = []

    def put_to_sleep(apps: Iterable[str], *, until: float, timeout_s: float) -> list[str]:
        done.append(("sleep", sorted(apps), until, timeout_s))
        if failing:
            raise failing[0]
        return ["r-rollout-a"]

    def wake_apps(apps: Iterable[str], *, timeout_s: float) -> None:
        done.append(("wake", list(apps), timeout_s))

    monkeypatch.setattr(live_settings, "put_to_sleep", put_to_sleep)
    monkeypatch.setattr(live_settings, "wake_apps", wake_apps)
    monkeypatch.setattr(train.time, "time", lambda: 1000.0)
    return done


def test_all_engines_of_the_run_sleep_while_one_group_trains_until_the_deadline_of_its_stage(done: list[Any]) -> None:
    with gpus_for_training(run("shared"), "a"):
        done.append("train")
    assert done == [
        ("sleep", ["r-rollout-a", "r-rollout-b"], 1100.0, 300.0),
        "train",
        ("wake", ["r-rollout-a", "r-rollout-b"], 300.0),
    ]


def test_a_team_that_learns_as_one_has_the_time_of_all_its_groups(done: list[Any]) -> None:
    with gpus_for_training(run("shared")):
        pass
    assert done[0][2] == 1200.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_a_failure_engines_are_told_to_wake_and_nothing_waits_for_them(
    done: list[Any], error: type[BaseException]
) -> None:
    with pytest.raises(error), gpus_for_training(run("shared"), "a"):
        raise error
    assert done[1] == ("wake", ["r-rollout-a", "r-rollout-b"], 0)


def test_engines_are_told_to_wake_where_one_of_them_does_not_fall_asleep(
    done: list[Any], failing: list[BaseException]
) -> None:
    failing.append(TimeoutError("1 of 2 replicas are asleep"))
    with pytest.raises(TimeoutError), gpus_for_training(run("shared"), "a"):
        raise AssertionError("nothing trains beside an engine that is awake")
    assert done[1] == ("wake", ["r-rollout-a", "r-rollout-b"], 0)


def test_engines_with_gpus_of_their_own_are_left_alone(done: list[Any]) -> None:
    with gpus_for_training(run("separate"), "a"):
        pass
    assert done == []


@pytest.mark.parametrize(("pool", "held"), [("shared", [200.0]), ("separate", [])])
def test_stage_train_has_the_engines_alone_where_it_puts_them_to_sleep_and_waits_for_the_other_groups(
    pool: str, held: list[float]
) -> None:
    waits: list[float] = []
    fake = run(pool)
    fake.hold_engines = lambda *, wait_s=0.0: waits.append(wait_s) or nullcontext()
    assert (_alone(fake, STAGES["train"]) is not None) == bool(held)
    assert waits == held
    assert _alone(fake, STAGES["score"]) is None
    assert _alone(fake, STAGES["sync"]) is not None


def test_sleep_changes_neither_version_nor_priority_of_an_app_and_goes_without_a_trace() -> None:
    settings = {"version": 3, "uri": "u", "manifest_sha256": "s", "low_priority": True}
    entry = {"name": "a", "deployments": [{"name": "Policy", "user_config": settings}]}
    asleep = with_setting(entry, "asleep_until", 5.0)
    assert asleep["deployments"][0]["user_config"] == settings | {"asleep_until": 5.0}
    assert with_setting(with_setting(asleep, "asleep_until", 6.0), "asleep_until", None) == entry
