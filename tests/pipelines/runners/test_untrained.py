"""A model folder as it is becomes a registered team, once for the files that it has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pipelines.run.run import Run
from pipelines.runners.begin import plain_config, untrained_team

pytestmark = pytest.mark.test


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


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_what_is_no_model_folder_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"is no model folder: config.json cannot be read"):
        plain_config(tmp_path, root=str(tmp_path), changes={})
