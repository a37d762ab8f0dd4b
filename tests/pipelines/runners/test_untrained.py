"""A model folder as it is becomes a registered team, once for the files that it has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from pipelines.config.run_config import load_config
from pipelines.report.progress import Screen
from pipelines.run.run import Run, plain
from pipelines.runners.begin import measure_last, plain_config, register_first_team, untrained_team
from stores.journal.run_values import RunValue
from stores.types import ModelVersionRef

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


@pytest.mark.nightly
def test_a_folder_is_a_team_of_one_agent_and_with_other_weights_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "my model")
    config = plain_config(folder, root=str(tmp_path / "runs"), changes={"serve.max_model_len": 128})
    assert (config.run, config.group_of) == ("my-model", {"model": "model"})
    assert config.serve.max_model_len == 128 and config.agents["model"].max_tokens == 64
    run = Run(config)
    version, team = untrained_team(run, folder=folder)
    assert version == 1 and team.models["model"].version == 0 and team.iteration == 0
    assert untrained_team(run, folder=folder)[0] == 1, "the same again"
    tensors = load_file(folder / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"made of .* when it had other files .* with --set run=NAME"):
        untrained_team(run, folder=folder)


@pytest.mark.parametrize(("length", "limit"), [("abc", 512), (1.5, 512), (None, "512")])
def test_a_length_that_is_no_number_is_refused_by_its_key_or_unknown(
    tmp_path: Path, length: object, limit: object
) -> None:
    folder = tmp_path / "_model_"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": limit}))
    if length is None:
        config = plain_config(folder, root=str(tmp_path), changes={})
        assert (config.run, config.serve.max_model_len, config.agents["model"].max_tokens) == ("model_", 4096, 2048)
        return
    with pytest.raises(ValueError, match=r"serve\.max_model_len: Input should be a valid integer"):
        plain_config(folder, root=str(tmp_path), changes={"serve.max_model_len": length})


def test_a_first_team_that_a_killed_process_made_the_champion_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    run.begin()
    ref = ModelVersionRef(model_group="team", version=0, uri="", manifest_sha256="")
    run.__dict__["weights"] = SimpleNamespace(ref=lambda group, version: ref)
    entry = {"team_version": 1, "at": 0.0, "reason": "the first team", "is_rollback": False}
    run.journal.put_value(run.run_id, RunValue.CHAMPIONS, {"history": [entry]})
    run.journal.put_value(run.run_id, RunValue.CHAMPION, {"team_version": 1, "models": {"team": plain(ref)}})
    assert register_first_team(run) == register_first_team(run) == 1
    assert run.iteration(0).decided.team_version == 1


def test_a_finished_run_without_test_tasks_needs_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(SMALL, {"storage.root": str(tmp_path), "iterations": 1})
    run = Run(config.model_copy(update={"tasks": config.tasks.model_copy(update={"test": None})}))
    run.begin()
    run.journal.put_value(run.run_id, RunValue.CHAMPION, {"team_version": 1, "models": {}})
    monkeypatch.setattr("pipelines.runners.begin.connect", lambda address: pytest.fail("connects for nothing"))
    measure_last(run, address="", screen=Screen())


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_what_is_no_model_folder_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"is no model folder: config.json cannot be read"):
        plain_config(tmp_path, root=str(tmp_path), changes={})
