"""stores.registry.registry on a real MLflow in a SQLite file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus

from stores.files import read_file, write_file
from stores.registry.experiment import EXPERIMENT
from stores.registry.registry import CANDIDATE, CHAMPION, PAGE, PREVIOUS, TeamRegistry
from stores.registry.team import Team, tags_of
from stores.types import ModelVersionRef

pytestmark = pytest.mark.test


def _team(iteration: int = 1, **changes: object) -> Team:
    models = {
        group: ModelVersionRef(
            model_group=group, version=iteration, uri=f"s3://b/{group}/v1", manifest_sha256="ab" * 32
        )
        for group in ("small", "large")
    }
    team = Team(
        workflow="package.module:Flow",
        prompts={"solver": "Solve:\n{question}", "verifier": "Check ✓ it's right"},
        credit={"path": "package.credit:Rule", "settings": {"weight": 0.5}, "version": "c1"},
        models=models,
        git_commit="0123abc",
        run_id="run.1",
        iteration=iteration,
        evaluation={"accuracy": 0.75, "gain": {"mean": 0.1, "low": -0.02}, "verdict": "promote", "is_better": True},
    )
    return replace(team, **changes)


def test_a_team_comes_back_by_version_and_by_alias(mlflow_place: tuple[str, str]) -> None:
    registry = TeamRegistry(*mlflow_place)
    assert registry.versions("by-alias") == [] and registry.alias("by-alias", CHAMPION) is None
    first, second = registry.register("by-alias", _team(1)), registry.register("by-alias", _team(2))
    assert registry.alias("by-alias", CHAMPION) is None
    registry.set_alias("by-alias", CANDIDATE, second)
    registry.set_alias("by-alias", CHAMPION, first)
    assert registry.load("by-alias", CHAMPION) == (first, _team(1))
    assert registry.load("by-alias", second) == (second, _team(2))
    registry.set_alias("by-alias", CHAMPION, second)
    assert TeamRegistry(*mlflow_place).load("by-alias", CHAMPION) == (second, _team(2))
    registry.set_alias("by-alias", PREVIOUS, first)
    for _ in range(2):
        registry.remove_alias("by-alias", PREVIOUS)
        assert registry.alias("by-alias", PREVIOUS) is None
    lines = registry.versions("by-alias")
    assert [(v.version, v.aliases, v.iteration) for v in lines] == [(1, (), 1), (2, (CANDIDATE, CHAMPION), 2)]
    assert lines[0].evaluation == {"accuracy": 0.75, "gain/mean": 0.1, "gain/low": -0.02, "is_better": 1.0}
    assert lines[1].policy_versions == {"small": 2, "large": 2}


def test_gain_and_champion_are_among_the_figures_that_a_tag_keeps_of_a_large_team() -> None:
    agents = {f"agent{i}": {f"figure{k}": 0.5 for k in range(20)} for i in range(6)}
    report = {"agents": agents, "champion": {"accuracy": 0.5, "agents": agents}, "gain": {"mean": 0.1}}
    kept = json.loads(tags_of(_team(1, evaluation=report))["troupe.evaluation"])
    assert len(kept) == 100 and {"champion/accuracy", "gain/mean"} <= kept.keys()


def test_the_same_team_is_registered_once(mlflow_place: tuple[str, str]) -> None:
    registry = TeamRegistry(*mlflow_place)
    versions = [registry.register("once", _team(1)) for _ in range(2)]
    versions.append(registry.register("once", _team(1, evaluation={"accuracy": 0.1})))
    assert versions == [1, 1, 1]
    later = {"config": {"iterations": 20}, "git_commit": "4567def", "code": {"own.py": "edited"}}
    assert registry.register("once", _team(1, **later)) == 1, "a stage that is repeated after `iterations` was raised"
    assert registry.register("once", _team(1, prompts={"solver": "Other"})) == 2
    assert registry.load("once", 1) == (1, _team(1))


@pytest.mark.parametrize(
    "write",
    [
        "create_logged_model",
        "log_model_artifacts",
        "log_batch",
        "finalize_logged_model",
        "create_model_version",
        "set_logged_model_tags",
    ],
)
def test_a_team_whose_registration_was_killed_after_any_write_is_there_once_and_complete(
    mlflow_place: tuple[str, str], write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, name = TeamRegistry(*mlflow_place), f"killed-{write}"
    team = _team(1, run_id=name)
    written = getattr(MlflowClient, write)

    def killed(*args: Any, **kwargs: Any) -> None:
        written(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MlflowClient, write, killed)
        registry.register(name, team)
    version = registry.register(name, team)
    assert (version, registry.register(name, team)) == (1, 1) and registry.load(name, 1) == (1, team)
    client = MlflowClient(mlflow_place[0], mlflow_place[0])
    entry = client.get_model_version(name, "1")
    assert entry.description.startswith("promote 0.750: run ")
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    (model,) = client.search_logged_models([experiment], filter_string=f"source_run_id = '{entry.run_id}'")
    assert model.status is LoggedModelStatus.READY and json.loads(model.tags["mlflow.modelVersions"]) == [
        {"name": name, "version": 1}
    ]
    assert len(client.get_metric_history(entry.run_id, "team/accuracy")) == 1


def test_sources_of_any_name_are_metrics_and_a_version_of_somebody_else_is_none_of_ours(
    mlflow_place: tuple[str, str],
) -> None:
    """A task's source is whatever its author wrote, and empty by default: promote failed on it after the evaluation."""
    registry, name = TeamRegistry(*mlflow_place), "sources"
    sources = {
        "": 0.1,
        "AIME'24": 0.2,
        "AIME_24": 0.3,
        "MATH/": 0.4,
        "math (hard)": 0.5,
        "..": 0.6,
        "x" * 300: 0.7,
        "é+": 0.8,
    }
    evaluation = {"accuracy": 0.5, "sources": {source: {"accuracy": value} for source, value in sources.items()}}
    assert registry.register(name, _team(1, run_id=name, evaluation=evaluation)) == 1
    client = MlflowClient(mlflow_place[0], mlflow_place[0])
    metrics = client.get_run(client.get_model_version(name, "1").run_id).data.metrics
    assert sorted(metrics.values()) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.6, 0.7, 0.8]
    assert metrics["team/sources/AIME_24/accuracy"] == 0.2 and metrics["team/sources/_/accuracy"] == 0.1
    client.create_model_version(name, source=mlflow_place[1])
    assert [entry.version for entry in registry.versions(name)] == [1]


def test_a_version_shows_its_params_and_metrics_in_mlflow(mlflow_place: tuple[str, str]) -> None:
    from mlflow import MlflowClient

    registry = TeamRegistry(*mlflow_place)
    registry.register("shown", _team(3))
    client = MlflowClient(tracking_uri=registry.tracking_uri)
    model = client.get_logged_model(client.get_model_version("shown", "1").tags["troupe.model_id"])
    assert model.status == "READY" and model.params["model.small"] == "v3 s3://b/small/v1"
    assert {m.key: m.value for m in model.metrics} == {
        "team/accuracy": 0.75,
        "team/gain/mean": 0.1,
        "team/gain/low": -0.02,
        "team/is_better": 1.0,
    }


def test_a_version_says_what_it_is_on_its_page(mlflow_place: tuple[str, str]) -> None:
    from mlflow import MlflowClient

    registry = TeamRegistry(*mlflow_place)
    pinned = {"iteration": 3, "traces": {"version": 57, "num_episodes": 412}, "rewards": {"version": 31}}
    provenance = {"made_by": "Ray job troupe-r-it3-promote-a1", "workflow_commit": "fee1", "data": {"small": pinned}}
    provenance["links"] = {"dag_run": "https://airflow/dags/d/runs/7"}
    report = {"accuracy": 0.75, "num_tasks": 64, "verdict": "promote", "condition": "gain +0.1", "champion": None}
    version = registry.register("page", _team(3, provenance=provenance, evaluation=report))
    assert registry.load("page", version)[1].provenance == provenance
    assert registry.register("page", _team(3, evaluation=report)) == version, "the same team, whoever made it"
    client = MlflowClient(tracking_uri=registry.tracking_uri)
    assert "troupe serve page@champion" in client.get_registered_model("page").description
    shown = client.get_model_version("page", str(version))
    for text in (
        "**Verdict**: promote: gain +0.1",
        "**Accuracy**: 0.750 on 64 tasks of the gate",
        "| small | v3 | `abababababab` | 412 episodes of iteration 3 (traces@57, rewards@31) | `s3://b/small/v1` |",
        "Troupe `0123abc`, workflow `fee1`",
        "dag_run: https://airflow/dags/d/runs/7",
        f"troupe lineage page@{version}",
    ):
        assert text in shown.description, shown.description
    assert shown.description.startswith("promote 0.750: run run.1, iteration 3\n")
    assert shown.tags["troupe.verdict"] == "promote"
    assert shown.tags["troupe.dag_run"] == "https://airflow/dags/d/runs/7"
    assert shown.tags["troupe.prompts_sha256"] == _team(3).prompts_sha256


def test_a_missing_team_names_what_there_is(mlflow_place: tuple[str, str]) -> None:
    registry = TeamRegistry(*mlflow_place)
    registry.register("present", _team(1))
    registry.set_alias("present", CANDIDATE, 1)
    with pytest.raises(ValueError, match=r"no team 'absent' 'champion' .*: teams are .*'present'"):
        registry.load("absent", CHAMPION)
    with pytest.raises(ValueError, match=r"no team 'present' 'champion' .*: versions are 1; aliases are candidate = 1"):
        registry.load("present", CHAMPION)
    with pytest.raises(ValueError, match=r"no team 'present' 7 .*: versions are 1"):
        registry.set_alias("present", CHAMPION, 7)


def test_a_team_behind_a_hundred_others_is_found_and_listed(mlflow_place: tuple[str, str]) -> None:
    registry = TeamRegistry(*mlflow_place)
    for number in range(PAGE):
        registry._make_name(f"among-many-{number:03}")
    registry.register("zz-last", _team(1))
    registry.set_alias("zz-last", CANDIDATE, 1)
    assert {"among-many-000", "zz-last"} <= set(registry.names()) and len(registry.names()) > PAGE
    with pytest.raises(ValueError, match=r"no team 'zz-last' 'champoin' .*: versions are 1; aliases are candidate = 1"):
        registry.load("zz-last", "champoin")


def test_a_team_file_that_was_changed_after_it_was_registered_is_refused(mlflow_place: tuple[str, str]) -> None:
    registry = TeamRegistry(*mlflow_place)
    version = registry.register("changed", _team(1))
    entry = next(v for v in registry._client.search_model_versions("name = 'changed'"))
    file = f"{entry.source.removeprefix('file://')}/team.json"
    stored = read_file(file)
    assert stored is not None
    write_file(file, stored.replace(_team(1).workflow.encode(), b"evilmod:Workflow"))
    with pytest.raises(ValueError, match=rf"was changed after .*, the registry has {_team(1).sha256}"):
        registry.load("changed", version)
    write_file(file, _team(1).to_text().encode())
    assert registry.load("changed", version) == (version, _team(1))


CODE = """
import mlflow
from mlflow.pyfunc import PythonModel

class Echo(PythonModel):
    def load_context(self, context):
        self.team = open(context.artifacts["team"]).read()

    def predict(self, context, model_input, params=None):
        return [f"{prompt}? {'small' in self.team}" for prompt in model_input["prompt"]]

mlflow.models.set_model(Echo())
"""


def test_a_team_registered_with_code_is_a_model_that_mlflow_loads_by_alias(
    mlflow_place: tuple[str, str], tmp_path: Path
) -> None:
    import mlflow
    import pandas as pd

    (tmp_path / "echo.py").write_text(CODE)
    registry = TeamRegistry(*mlflow_place)
    version = registry.register("loaded", _team(1), code=tmp_path / "echo.py")
    registry.set_alias("loaded", CHAMPION, version)
    assert registry.load("loaded", CHAMPION) == (version, _team(1)), "the manifest is where it was"
    mlflow.set_tracking_uri(registry.tracking_uri)
    model = mlflow.pyfunc.load_model("models:/loaded@champion")
    assert model.predict(pd.DataFrame({"prompt": ["Why", "How"]})) == ["Why? True", "How? True"]
    assert model.metadata.signature and model.metadata.signature.inputs.input_names() == ["prompt", "seed"]
    assert model.metadata.metadata == {"troupe.run_id": "run.1", "troupe.iteration": 1}


def test_a_team_of_another_version_of_troupe_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Team cannot be read: .*origin: is an unknown key"):
        Team.from_text(_team().to_text().replace('"git_commit"', '"origin"'))


def test_a_run_with_another_root_on_one_server_keeps_its_teams_under_its_own(
    mlflow_place: tuple[str, str], tmp_path: Path
) -> None:
    """They lay under the root of whoever was first on the server: a folder of another machine, or another bucket."""
    tracking, first_root = mlflow_place
    TeamRegistry(tracking, first_root).register("first-root", _team(1))
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    own = TeamRegistry(tracking, str(tmp_path / "own"))
    assert own.load("own-root", own.register("own-root", _team(1))) == (1, _team(1))
    client = MlflowClient(tracking, tracking)
    assert client.get_model_version("own-root", "1").source.startswith(f"file://{tmp_path}/own/")
    experiments = len(client.search_experiments())
    for registry in (TeamRegistry(tracking, first_root), TeamRegistry(tracking, str(tmp_path / "link"))):
        registry.register("again", _team(2))
    assert len(client.search_experiments()) == experiments, "a link leads to the same place"
