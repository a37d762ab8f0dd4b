"""Iterations that overlap, on the real parts: who samples and who trains by number, and the same weights after a kill in the middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from tests.chaos import victims
from tests.e2e.local_runs import (
    CONFIG,
    distance,
    finish,
    is_running,
    keys,
    kill_one_when,
    kill_when,
    report_of,
    rows_of,
    start,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

SETTINGS = {"loop.max_lag": 1, "iterations": 4}
WORDS = tuple(f"{key}={value}" for key, value in SETTINGS.items())


def opened(root: Path) -> Run:
    return Run(load_config(CONFIG, {"storage.root": str(root), **SETTINGS}))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run as it goes when nothing happens."""
    root = tmp_path_factory.mktemp("overlap")
    log = root / "log.txt"
    finish(start(root, log, settings=WORDS), log)
    return opened(root)


def test_each_iteration_is_sampled_and_trained_by_the_versions_of_its_number(twin: Run) -> None:
    sampled_by = [twin.iteration(k).collected.policy_versions["team"] for k in (1, 2, 3, 4)]
    parents = [twin.weights.manifest(twin.trained(k)["team"]).parent for k in (1, 2, 3, 4)]
    assert (sampled_by, parents) == ([0, 0, 1, 2], [0, 1, 2, 3])
    for k, version in enumerate(sampled_by, 1):
        traces = list(twin.traces.read_traces(twin.iteration(k).collected.traces))
        assert {turn.policy_version for trace in traces for turn in trace.turns} == {version}


def test_sampling_runs_beside_training(twin: Run) -> None:
    rows = rows_of(twin)
    engines = [rows[str(twin.key(k, stage))] for k in (2, 3, 4) for stage in ("collect", "evaluate")]
    trainers = [
        rows[str(twin.key(k, stage, group))] for k in (1, 2, 3) for stage, group in (("score", ""), ("train", "team"))
    ]
    beside = [
        (one.key, other.key)
        for one in engines
        for other in trainers
        if one.started_at < (other.ended_at or 0) and other.started_at < (one.ended_at or 0)
    ]
    assert {key.stage for _, key in beside} == {"score", "train"}, beside


def test_turns_of_an_older_version_are_weighted_and_say_how_far_it_is(twin: Run) -> None:
    on_policy, off_policy = (twin.iteration(k).trained["team"] for k in (1, 3))
    assert "train/logprob_gap_mean" in on_policy.metrics and on_policy.metrics["train/is_corrected"] == 0.0
    assert "train/logprob_gap_mean" not in off_policy.metrics and off_policy.metrics["train/is_corrected"] == 1.0
    assert 0 < off_policy.agents["solver"]["policy_gap_mean"] < 0.5
    assert 0.5 < off_policy.agents["solver"]["ess"] <= 1.0
    assert report_of(twin)["logprob_gap"]["mean"] < 1e-3


def in_the_middle(run: Run) -> bool:
    """The engines are at work on iteration 1 or 3 while iteration 2 trains."""
    return is_running(run, 2, "train", "team") and any(
        is_running(run, k, stage) for k, stage in ((1, "evaluate"), (3, "collect"), (2, "collect"))
    )


def beside_collect(iteration: int) -> Callable[[Run], bool]:
    """The engines sample an iteration while the one before is scored or trains."""
    return lambda run: (
        is_running(run, iteration, "collect")
        and any(is_running(run, iteration - 1, stage, group) for stage, group in (("score", ""), ("train", "team")))
    )


def sampling(iteration: int) -> Callable[[Run], bool]:
    return lambda run: is_running(run, iteration, "collect")


def training(iteration: int) -> Callable[[Run], bool]:
    return lambda run: is_running(run, iteration, "train", "team")


@pytest.mark.parametrize(
    "moment",
    [in_the_middle, training(1), lambda run: is_running(run, 2, "sync")],
    ids=["both lanes at work", "train 1", "sync 2"],
)
def test_a_run_that_is_killed_ends_with_the_weights_of_its_twin(
    twin: Run, tmp_path: Path, moment: Callable[[Run], bool]
) -> None:
    log, run = tmp_path / "log.txt", opened(tmp_path)
    kill_when(start(tmp_path, log, settings=WORDS), lambda: moment(run), log)
    finish(start(tmp_path, log, settings=WORDS), log)
    assert all(keys(run, k) == keys(twin, k) for k in (1, 2, 3, 4))
    assert distance(run, twin) == 0.0


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("trainer worker", training(2)),
        ("collector", beside_collect(2)),
        ("replica", beside_collect(3)),
        # The engines evaluate before collect 4, so that train 3 may have ended when it begins.
        ("engine", sampling(4)),
        ("trainer supervisor", in_the_middle),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_process_that_dies_changes_no_weight(
    twin: Run, tmp_path: Path, name: str, moment: Callable[[Run], bool]
) -> None:
    log, run = tmp_path / "log.txt", opened(tmp_path)
    running = start(tmp_path, log, settings=WORDS)
    kill_one_when(running, lambda: moment(run), victims.BY_NAME[name].title, log)
    finish(running, log)
    assert all(keys(run, k) == keys(twin, k) for k in (1, 2, 3, 4))
    assert distance(run, twin) == 0.0
