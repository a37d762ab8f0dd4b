"""Version 0 of model groups of different families: each learns its own agents' turns with its own tokenizer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow import fs
from transformers import AutoModelForCausalLM

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.stages.warmstart import _demonstrations, _TextSpy, warmstart
from stores.files import open_filesystem
from stores.types import EpisodeStatus
from stores.weights.manifest import Probe
from train_loops.config import TEAM, TinyModelConfig, WarmstartConfig
from train_loops.extensions.whole_team.trainer import train_team_learner

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUPS = {
    "qwen": {"agents": ["solver", "refiner"]},
    "llama": {"agents": ["verifier", "finalizer"], "tiny_model": {"architecture": "llama", "vocab_size": 360}},
}


@pytest.mark.nightly
def test_two_families_begin_from_the_same_demonstrations(tmp_path: Path) -> None:
    changes = {"warmstart.num_demonstrations": 60, "warmstart.num_epochs": 1, "model_groups": GROUPS}
    changes["agents"] = {name: {"max_tokens": 64} for name in ("solver", "verifier")}  # Llama's tokens are shorter
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path), **changes}))
    run.open()
    made = warmstart(run)
    folders = {group: Path(run.weights.fetch(ref)) for group, ref in made.models.items()}
    models = {group: type(AutoModelForCausalLM.from_pretrained(folder)).__name__ for group, folder in folders.items()}
    assert models == {"qwen": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    sizes = {group: json.loads((folder / "config.json").read_text())["vocab_size"] for group, folder in folders.items()}
    assert sizes["llama"] < sizes["qwen"]
    for group, ref in made.models.items():
        assert max(max(ids) for ids in run.weights.manifest(ref).probe.sequences) < sizes[group]
    assert {"qwen/warmstart/loss", "llama/warmstart/loss"} <= set(made.metrics)


def test_a_program_with_tools_is_listened_to_before_there_is_a_tokenizer(tmp_path: Path) -> None:
    config = Path(__file__).parents[3] / "infra" / "workflows" / "calculator_program.yaml"
    run = Run(load_config(config, {"storage.root": str(tmp_path), "warmstart.num_demonstrations": 8}))
    spy = _TextSpy()
    assert run.config.warmstart is not None
    traces = _demonstrations(run, run.config.warmstart, {}, spy, {})
    assert len(traces) == 8 and {trace.status for trace in traces} <= {EpisodeStatus.OK, EpisodeStatus.TRUNCATED}
    assert any('"name": "calculate"' in text for text in spy.texts), "the tool, and calls of it, are in the vocabulary"


def test_a_tokenizer_is_made_of_as_many_demonstrations_as_the_settings_say(tmp_path: Path) -> None:
    config = Path(__file__).parents[3] / "infra" / "workflows" / "calculator_program.yaml"
    changes = {"warmstart.num_demonstrations": 8, "warmstart.tokenizer_demonstrations": 3}
    run = Run(load_config(config, {"storage.root": str(tmp_path), **changes}))
    assert run.config.warmstart is not None
    assert len(_demonstrations(run, run.config.warmstart, {}, _TextSpy(), {})) == 3
    fewer = run.config.warmstart.model_copy(update={"num_demonstrations": 2})
    assert len(_demonstrations(run, fewer, {}, _TextSpy(), {})) == 2


def test_demonstrations_for_a_tokenizer_that_is_not_made_are_refused() -> None:
    settings = {"demonstrator": "m:f", "tokenizer_demonstrations": 3}
    with pytest.raises(ValueError, match="tokenizer_demonstrations: only a `tiny_model` has a tokenizer"):
        WarmstartConfig(**settings)
    assert WarmstartConfig(**settings, tiny_model=TinyModelConfig()).tokenizer_demonstrations == 3


def test_a_model_at_a_uri_is_named_by_it_and_missed_by_it(tmp_path: Path, tiny_model: Path) -> None:
    """The manifest named the folder into which it was copied for a minute; a wrong URI was a FileNotFoundError without a fix."""
    uri = "mock://bucket/models/tiny"  # pyarrow's own, in the memory of this process
    filesystem, path = open_filesystem(uri)
    assert filesystem is not None
    filesystem.create_dir(path, recursive=True)
    fs.copy_files(str(tiny_model), path, destination_filesystem=filesystem)
    changes = {"storage.root": str(tmp_path), "warmstart": None, "model_groups.team.model": uri}
    run = Run(load_config(SMALL, changes))
    run.open()
    assert run.weights.manifest(warmstart(run).models["team"]).note == f"adopted from {uri}"
    wrong = Run(load_config(SMALL, {**changes, "run": "wrong", "model_groups.team.model": f"{uri}-2"}))
    wrong.open()
    with pytest.raises(ValueError, match=rf"model folder {uri}-2 does not exist: give a folder"):
        warmstart(wrong)


def test_version_zero_of_another_run_in_a_shared_store_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """It was taken for this run's own, whatever model its config names."""
    changes = {
        "storage.root": str(tmp_path),
        "storage.weights": str(tmp_path / "weights"),
        "warmstart": None,
        "model_groups.team.model": str(tiny_model),
    }
    first, second = (Run(load_config(SMALL, {**changes, "run": name})) for name in ("first", "second"))
    for run in (first, second):
        run.open()
    made = warmstart(first)
    assert warmstart(first).models == made.models, "its own"
    with pytest.raises(ValueError, match=r"storage\.weights: .*/team/v0 is of run 'first', .*: give each run"):
        warmstart(second)


def test_the_learner_of_another_runs_team_in_a_shared_store_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """Its values were taken for those of this run's episodes."""
    changes = {
        "storage.root": str(tmp_path),
        "storage.weights": str(tmp_path / "weights"),
        "warmstart": None,
        "train.algorithm": "mappo",
        "model_groups": {"own": {"agents": ["solver", "verifier", "refiner", "finalizer"], "model": str(tiny_model)}},
    }
    run = Run(load_config(SMALL, changes))
    run.open()
    commit = partial(run.weights.commit, tiny_model, model_group=TEAM, version=1, parent=None, iteration=1)
    ref = commit(run_id="first", probe=Probe(sequences=(), logprobs=()))
    with pytest.raises(ValueError, match=r"storage\.weights: .*/team/v1 is of run 'first', and 'small' needs"):
        warmstart(run)
    job = SimpleNamespace(weights_uri=run.weights_uri, version=ref.version, run_id=run.run_id)
    with pytest.raises(ValueError, match=r"storage\.weights: .*/team/v1 is of run 'first', and 'small' needs"):
        train_team_learner(job)  # type: ignore[arg-type]
