"""Three agents' adapters of one base through the whole loop, as a user runs it: trained apart, served by one app."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.config.run_config import load_config
from pipelines.report.inspect import export_version
from pipelines.run.run import Run
from tests.e2e.local_runs import finish, report_of

pytestmark = pytest.mark.nightly

CONFIG = Path(__file__).parent / "adapter_team.yaml"
GROUPS = ("solver", "verifier", "closer")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of two iterations."""
    root = tmp_path_factory.mktemp("adapters")
    log = root / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "troupe"), "train", str(CONFIG), "--set", f"storage.root={root}"],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ),
        )
    finish(process, log)
    return Run(load_config(CONFIG, {"storage.root": str(root)}))


def test_every_group_is_trained_and_proven_through_its_own_adapter_in_one_app(trained: Run) -> None:
    assert report_of(trained)["versions"] == dict.fromkeys(GROUPS, 2)
    for iteration in (1, 2):
        proofs = trained.iteration(iteration).synced.proofs
        assert sorted((p["model_group"], p["version"], p["verdict"]) for p in proofs) == sorted(
            (group, iteration, "proven") for group in GROUPS
        )
        assert {p["app"] for p in proofs} == {"adapters-rollout-shared"}
        assert len({p["pid"] for p in proofs}) == 1


def test_trainer_and_engine_agree_through_every_adapter(trained: Run) -> None:
    gap = report_of(trained)["logprob_gap"]
    assert 0 < gap["mean"] < 1e-3
    assert gap["max"] < 0.05


def test_the_base_stays_as_it_is_and_versions_hold_adapters_alone(trained: Run) -> None:
    assert trained.weights.versions("shared") == [0]
    base = trained.weights.ref("shared", 0)
    assert base is not None
    trained.weights.verify(base)
    for group in GROUPS:
        assert trained.weights.versions(group) == [0, 1, 2]
        for version in (1, 2):
            ref = trained.weights.ref(group, version)
            assert ref is not None
            manifest = trained.weights.manifest(ref)
            assert manifest.base == base
            assert set(manifest.files) >= {"adapter_model.safetensors", "adapter_config.json"}
            assert "model.safetensors" not in manifest.files


def test_adapters_of_two_groups_differ_and_each_iteration_changes_them(trained: Run) -> None:
    found = {}
    for group in GROUPS:
        for version in (0, 1, 2):
            ref = trained.weights.ref(group, version)
            assert ref is not None
            found[group, version] = load_file(trained.weights.fetch(ref) / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    for group in GROUPS:
        assert not found[group, 0][name].any(), "fresh: it is the base"
        assert not torch.equal(found[group, 1][name], found[group, 2][name])
    assert found["closer", 2][name].shape[1] == 4 and found["solver", 2][name].shape[1] == 8
    assert not torch.equal(found["solver", 2][name], found["verifier", 2][name])


def test_a_group_is_exported_as_an_adapter_or_as_one_model(trained: Run, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base = trained.weights.ref("shared", 0)
    assert base is not None
    adapter = export_version(trained, "solver", 2, tmp_path / "adapter")
    merged = export_version(trained, "solver", 2, tmp_path / "merged", is_merged=True)
    whole = AutoModelForCausalLM.from_pretrained(trained.weights.fetch(base), dtype=torch.float32)
    both = peft.PeftModel.from_pretrained(whole, str(adapter))
    one = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    tokens = torch.tensor([[(3 * i) % 200 + 3 for i in range(40)]])
    with torch.no_grad():
        difference = both(tokens).logits.log_softmax(-1) - one(tokens).logits.log_softmax(-1)
    assert difference.abs().max() < 1e-5
    with pytest.raises(ValueError, match="is a whole model, no adapter: drop --merged"):
        export_version(trained, "shared", 0, tmp_path / "base", is_merged=True)
