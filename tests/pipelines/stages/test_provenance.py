"""Where a registered team comes from: its manifest, as promote writes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage_records import collected, finish, scored, traces_ref

from pipelines.cli.new_team import write_team
from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.stages.promote import commit_of, provenance_of, register_team
from serve_apps.episode.team import TeamSpec
from stores.registry.team import Team
from stores.types import ModelVersionRef

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t")
    return subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_commit_of_a_checkout_is_told_with_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    git(tmp_path, "init", "-q")
    (tmp_path / "team.py").write_text("a = 1")
    git(tmp_path, "add", "team.py")
    git(tmp_path, "commit", "-qm", "x")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert commit_of(tmp_path) == commit
    (tmp_path / "team.py").write_text("a = 2")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_a_teams_manifest_names_the_pinned_data_of_each_model_and_who_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_DAG_RUN_URL", "https://airflow/dags/d/runs/7")
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    for iteration in (1, 2):
        for result in (collected(traces=traces_ref(version=10 * iteration)), scored()):
            finish(run, iteration, result)
    models = {
        group: ModelVersionRef(model_group=group, version=version, uri="", manifest_sha256="")
        for group, version in (("a", 0), ("b", 1), ("c", 2))
    }
    provenance = provenance_of(run, models, 2)
    assert {group: data["traces"]["version"] for group, data in provenance["data"].items()} == {"b": 10, "c": 20}
    assert provenance["links"] == {"dag_run": "https://airflow/dags/d/runs/7"} and provenance["made_by"]
    assert provenance["workflow_commit"] == commit_of(Path(__file__).parent)

    registered: list[Any] = []
    run.__dict__["registry"] = SimpleNamespace(
        register=lambda name, team, code: registered.append(team) or 4, set_alias=lambda *_: None
    )
    assert register_team(run, models, iteration=2, evaluation={"verdict": "promote"}) == 4
    (team,) = registered
    assert team.provenance == provenance and team.prompts_sha256 == run.workflow.prompts_sha256
    assert team.credit["version"] == run.credit_version and team.evaluation == {"verdict": "promote"}


def test_a_team_version_carries_the_modules_that_it_was_evaluated_with_and_acts_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever became of the files meanwhile, and where there is no such folder."""
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    write_team(tmp_path / "own_team")
    file = tmp_path / "own_team" / "own_team.py"
    before = file.read_text()
    registered: list[Any] = []
    registry = SimpleNamespace(register=lambda _, team, code: registered.append(team), set_alias=lambda *_: None)
    models = {"team": ModelVersionRef(model_group="team", version=0, uri="", manifest_sha256="")}
    with monkeypatch.context() as place:
        place.chdir(tmp_path / "own_team")
        place.syspath_prepend(str(tmp_path / "own_team"))
        for edited in (before.replace("Solve it.", "Solve it at once."), "nothing of a team"):
            run = Run(load_config("own_team.yaml"))
            run.__dict__["registry"] = registry
            assert run.workflow.agents
            file.write_text(edited)
            register_team(run, models, iteration=0, evaluation={})
            sys.modules.pop("own_team")
    first, second = registered
    assert dict(first.code) == {"own_team.py": before} and "at once" in second.code["own_team.py"]
    assert first.sha256 != second.sha256 and Team.from_text(first.to_text()) == first

    elsewhere = Run(run.config)
    for team, prompt in ((first, "Solve it. "), (second, "Solve it at once. ")):
        spec = TeamSpec.from_dict(elsewhere.team_spec(models, code=team.code).to_dict())
        assert spec.code == dict(team.code) and set(spec.sampling) == {"solver", "reviewer"}
        assert elsewhere.workflow_of(spec.code).agents["solver"].prompt.startswith(prompt)
