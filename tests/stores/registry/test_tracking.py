"""stores.registry.tracking on a real MLflow in a SQLite file."""

from __future__ import annotations

from pathlib import Path

import pytest

from stores.files import read_file, write_file
from stores.registry.tracking import RunTracker

pytestmark = pytest.mark.test


def test_a_restarted_run_goes_on_in_the_same_mlflow_run(mlflow_place: tuple[str, str]) -> None:
    first = RunTracker(*mlflow_place, "restarted")
    first.start({"seed": 1, "note": "x" * 9000, "settings.http://[a]": 2}, {"commit": "abc"})
    first.log_dict("run.yaml", {"seed": 1})
    first.log_metrics({f"train/m{i}": i / 2 for i in range(1500)}, 0)
    first.finish("FAILED")
    second = RunTracker(*mlflow_place, "restarted")
    assert second.start({"seed": 2, "iterations": 5}) == first.mlflow_run_id
    second.log_metrics({"train/m3": 7.0}, 1)
    run = second._client.get_run(second.mlflow_run_id)
    assert run.info.status == "RUNNING" and run.info.run_name == "restarted"
    assert (run.data.params["seed"], run.data.params["iterations"], run.data.tags["commit"]) == ("1", "5", "abc")
    assert run.data.params["settings.http:/_/_a_"] == "2"
    assert Path(second._client.download_artifacts(second.mlflow_run_id, "run.yaml")).read_text() == "seed: 1\n"
    history = second._client.get_metric_history(second.mlflow_run_id, "train/m3")
    assert [(m.step, m.value) for m in history] == [(0, 1.5), (1, 7.0)]
    assert run.data.metrics["train/m1499"] == 749.5
    assert RunTracker(*mlflow_place, "another").start() != first.mlflow_run_id


def test_an_iteration_is_a_run_under_its_parent_and_is_shown_once(
    mlflow_place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_MLFLOW_URL", "http://mlflow.example:5000/")
    tracker = RunTracker(*mlflow_place, "nested")
    tracker.start({"seed": 1})
    shown = []
    for _ in range(2):
        for iteration in (1, 2):
            ref = RunTracker(*mlflow_place, "nested").log_iteration(
                iteration,
                metrics={"reward": iteration / 2, "train/kl": float("nan")},
                tags={"troupe.link.dag_run": "http://airflow.example/7"},
                started_at=1000.0 * iteration,
                ended_at=1000.0 * iteration + 60,
            )
            shown.append((ref.mlflow_run_id, ref.mlflow_url))
    assert shown[:2] == shown[2:] and len(set(shown)) == 2
    client, parent = tracker._client, tracker.mlflow_run_id
    (first, url), _ = shown[:2]
    child = client.get_run(first)
    assert url == f"http://mlflow.example:5000/#/experiments/{child.info.experiment_id}/runs/{first}"
    assert child.data.tags["mlflow.parentRunId"] == parent
    assert {name: child.data.tags[f"troupe.{name}"] for name in ("run", "iteration", "link.dag_run")} == {
        "run": "nested",
        "iteration": "1",
        "link.dag_run": "http://airflow.example/7",
    }
    assert (child.info.status, child.info.start_time, child.info.end_time) == ("FINISHED", 1_000_000, 1_060_000)
    curve = client.get_metric_history(parent, "reward")
    assert [(m.step, m.value, m.timestamp) for m in curve] == [(1, 0.5, 1_060_000), (2, 1.0, 2_060_000)]
    assert [len(client.get_metric_history(first, name)) for name in ("reward", "train/kl")] == [1, 1]
    children = client.search_runs([child.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert len(children) == 2


def test_files_of_a_run_lie_under_the_artifact_root(mlflow_place: tuple[str, str], tmp_path: Path) -> None:
    tracker = RunTracker(*mlflow_place, "files")
    write_file(f"{tmp_path}/report.json", b'{"mean": "\xc3\xb8"}')
    tracker.log_file(f"{tmp_path}/report.json")
    shown = f"{mlflow_place[1]}/{tracker.mlflow_run_id}/artifacts/report.json"
    assert read_file(shown) == b'{"mean": "\xc3\xb8"}'
    tracker.log_file(shown)
    with pytest.raises(ValueError, match=r"absent.json does not exist"):
        tracker.log_file(f"{tmp_path}/absent.json")


def test_addresses_do_not_depend_on_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = RunTracker("sqlite:///runs/mlflow.db", "runs/artifacts", "run")
    assert tracker.tracking_uri == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert tracker.artifact_root == f"file://{tmp_path}/runs/artifacts"
    for uri in ("mlflow-artifacts:/troupe", "s3://bucket/key", "http://127.0.0.1:5000", "postgresql+psycopg2://h/db"):
        assert RunTracker(uri, uri, "run").tracking_uri == RunTracker(uri, uri, "run").artifact_root == uri


def test_an_experiment_that_was_deleted_in_mlflow_is_restored_with_its_runs(mlflow_place: tuple[str, str]) -> None:
    before = RunTracker(*mlflow_place, "before")
    before.start({"seed": 1})
    client = before._client
    client.delete_experiment(client.get_run(before.mlflow_run_id).info.experiment_id)
    other = RunTracker(*mlflow_place, "after")
    other.start({"seed": 2})
    assert RunTracker(*mlflow_place, "before").start() == before.mlflow_run_id != other.mlflow_run_id
    client.delete_run(before.mlflow_run_id)
    assert RunTracker(*mlflow_place, "before").start() != before.mlflow_run_id


def test_whatever_users_call_their_model_groups_is_shown(mlflow_place: tuple[str, str]) -> None:
    """MLflow refused the tag of model group `solver (7B)`, and no iteration of the run was recorded."""
    tracker = RunTracker(*mlflow_place, "odd-names")
    params = {"model_groups.a+b.model": 1, "model_groups.a@b.model": 2, "k" * 300: 3}
    tracker.start(params, {"troupe.of (x)": "y"})
    run = tracker._client.get_run(tracker.mlflow_run_id)
    assert sorted(run.data.params.values()) == ["1", "2", "3"] and run.data.tags["troupe.of _x_"] == "y"
    cut = {"train/" + "a" * 243 + end: number for number, end in enumerate(("/b", "/..x", "/.x"))}
    names = {f"troupe.policy_version.{group}": "1" for group in ("solver (7B)", "solver [7B]", "g" * 300)}
    shown = tracker.log_iteration(1, metrics=cut, tags=names, started_at=1.0, ended_at=2.0)
    child = tracker._client.get_run(shown.mlflow_run_id)
    assert sorted(child.data.metrics.values()) == [0, 1, 2]
    assert len([name for name in child.data.tags if name.startswith("troupe.policy_version.")]) == 3
