"""Points for Prometheus from journal rows and episodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stage_records as records

from pipelines.config.run_config import load_config
from pipelines.extensions.prometheus import points as sending
from pipelines.extensions.prometheus.meter import METRICS, send
from pipelines.extensions.prometheus.points import check_points, episode_points, stage_points
from pipelines.run.run import Run
from pipelines.stages.steps import run_stage
from stores.journal.journal import Journal, StageKey, StageRow
from stores.journal.stage_results import StageResult, TrainedTeam
from stores.types import EpisodeStatus, Purpose

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[3] / "e2e" / "small.yaml"
FIGURES = {"trained_rows": 96.0, "logprob_gap_mean": 1e-7, "logprob_gap_max": 2e-6, "kl": 0.1}
METRICS_OF_TRAINING = {f"train/{name}": value for name, value in FIGURES.items()}
RESULTS: tuple[StageResult, ...] = (
    records.collected(),
    records.scored(),
    records.trained("a", 3, metrics=METRICS_OF_TRAINING),
    records.synced(policy_versions={"a": 3, "b": 2}),
    records.evaluated(candidate=records.team_score(accuracy=0.6), champion=records.team_score(accuracy=0.5)),
    records.decided(team_version=4),
)


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, StageRow]:
    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    for result in RESULTS:
        key = StageKey("r", 3, result.STAGE, "a" if result.STAGE == "train" else "")
        journal.once(key, lambda lease, result=result: result.to_json())
    with pytest.raises(OSError):
        journal.once(StageKey("r", 3, "measure"), fail)
    return {row.stage: row for row in journal.stages("r", 3)}


def fail(lease: Any) -> dict[str, Any]:
    raise OSError("disk full")


def values(points: list[Any], name: str) -> dict[str, Any]:
    return {"/".join(v for k, v in tags.items() if k != "run"): value for n, value, tags in points if n == name}


def test_each_stage_shows_its_result_under_declared_names_and_tags(rows: dict[str, StageRow]) -> None:
    points = [point for row in rows.values() for point in stage_points(row)]
    for name, _, tags in points:
        assert tuple(tags) == METRICS[name].tags, name
    assert values(points, "troupe_stages")["train/a/done"] == 1
    assert values(points, "troupe_stages")["measure//failed"] == 1
    assert values(points, "troupe_policy_version") == {"a/trained": 3, "a/served": 3, "b/served": 2}
    assert values(points, "troupe_trained_rows") == {"a": 96}
    assert values(points, "troupe_logprob_gap_max") == {"a": 2e-6}
    assert values(points, "troupe_accuracy") == {"candidate": 0.6, "champion": 0.5}


def test_the_end_of_an_earlier_iterations_training_does_not_turn_the_iteration_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(sending, "send", lambda points, key="": sent.extend(points))
    changes = {"storage.root": str(tmp_path), "loop.max_lag": 1, "evaluate.every": 1}
    run = Run(load_config(SMALL, changes))
    run.begin()
    for k in (1, 2):
        records.finish(run, k, records.collected())
        run_stage(run, "collect", k)
    records.finish(run, 1, records.trained("team", 1), "team")
    run_stage(run, "train", 1, model_group="team")
    assert [value for name, value, _ in sent if name == "troupe_iteration"] == [1, 2, 2]


def test_an_old_stage_that_is_done_again_does_not_turn_the_iteration_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(sending, "send", lambda points, key="": sent.extend(points))
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    run.begin()
    for k in (1, 2, 3, 1):
        records.finish(run, k, records.collected())
        run_stage(run, "collect", k)
    assert [value for name, value, _ in sent if name == "troupe_iteration"] == [1, 2, 3]


def test_a_stage_that_ended_while_no_cluster_was_there_is_sent_to_the_next(
    rows: dict[str, StageRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def take(points: Any, key: str = "") -> bool:
        sent.append(key)
        return True

    monkeypatch.setattr(sending, "_sent", set())
    monkeypatch.setattr(sending, "send", lambda points, key="": False)
    sending.send_stage_points(rows.values())
    monkeypatch.setattr(sending, "send", take)
    for _ in range(2):
        sending.send_stage_points(rows.values())
    assert len(sent) == len(rows)


def test_a_train_task_of_the_whole_team_shows_every_model_group(tmp_path: Path) -> None:
    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    groups = {group: records.trained(group, 3, metrics=METRICS_OF_TRAINING) for group in ("b", "a")}
    team = TrainedTeam(order=("b", "a"), team=records.learner(), model_groups=groups)
    journal.once(StageKey("r", 3, "train", "team"), lambda lease: team.to_json())
    points = stage_points(journal.stages("r", 3)[0])
    assert values(points, "troupe_policy_version") == {"b/trained": 3, "a/trained": 3}
    assert values(points, "troupe_trained_rows") == {"b": 96, "a": 96}


def test_a_figure_without_a_value_is_no_point() -> None:
    drift = {"now": None, "state": "learning"}
    points = check_points("r", {"sources": {"service": {"input_drift": drift}}})
    assert [(name, value) for name, value, _ in points] == [("troupe_alarm", 0.0)]


def test_a_batch_of_episodes_is_a_handful_of_points() -> None:
    turn = SimpleNamespace(model_group="a", duration_s=0.25, prompt_token_ids=[1] * 7, completion_token_ids=[1] * 3)
    traces: list[Any] = [
        SimpleNamespace(run_id="r", purpose=Purpose.TRAIN, status=status, turns=[turn, turn])
        for status in (EpisodeStatus.OK, EpisodeStatus.OK, EpisodeStatus.TIMEOUT)
    ]
    points = episode_points(traces, num_in_flight=5, collector="0")
    for name, _, tags in points:
        assert tuple(tags) == METRICS[name].tags, name
    assert values(points, "troupe_episodes") == {"train/ok": 2, "train/timeout": 1}
    assert values(points, "troupe_tokens") == {"train/a/prompt": 42, "train/a/completion": 18}
    assert values(points, "troupe_turn_seconds") == {"train/a": [0.25] * 6}
    assert values(points, "troupe_episodes_in_flight") == {"0": 5}
    assert episode_points([], num_in_flight=0, collector="0") == []


def test_without_a_cluster_points_go_nowhere() -> None:
    send([("troupe_iteration", 1, {"run": "r"})])
