"""Model groups that share a base: what a config may say, which app serves them, what the warm start makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.run.serving import app_names, app_specs
from pipelines.runners.validate import check
from pipelines.stages.warmstart import warmstart
from stores.weights.manifest import whole_model
from train_loops.engine.adapters import is_fresh

pytestmark = pytest.mark.nightly

TEAM = Path(__file__).parents[2] / "e2e" / "adapter_team.yaml"
GROUPS = ("solver", "verifier", "closer")


def groups(**changes: Any) -> dict[str, Any]:
    """Two of the three groups as in the file, the first one changed."""
    return {
        "solver": {"agents": ["solver"], "base": "shared", **changes},
        "rest": {"agents": ["verifier", "refiner", "finalizer"], "base": "shared"},
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_groups": groups(base="")}, r"model_groups\.solver: train\.lora trains an adapter, but of which base"),
        ({"train.lora": None}, r"base = 'shared': a base stays frozen, so train\.lora is needed"),
        ({"model_groups": groups(base="rest")}, "base = 'rest' is a model group: a base needs a name of its own"),
        ({"model_groups": groups(serve={"max_num_seqs": 3})}, "share one model on one app, but differ in `serve`"),
        (
            {"model_groups": {name: {**g, "model": name} for name, g in groups().items()}, "warmstart": None},
            "share one model on one app, but differ in `model`",
        ),
    ],
)
def test_what_groups_of_a_base_cannot_be_is_named_when_it_is_parsed(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_config(TEAM, changes)


def test_a_rank_above_a_layer_is_refused_by_validate_with_the_nearest_that_works() -> None:
    check(load_config(TEAM, {"train.lora.rank": 32}))
    with pytest.raises(ValueError, match=r"rank = 33 is above the smaller dimension of k_proj \(32\): take at most 32"):
        check(load_config(TEAM, {"train.lora.rank": 33}))
    narrow = {"rank": 64, "target_modules": ["q_proj", "up_proj"]}
    closer = {"agents": ["refiner", "finalizer"], "base": "shared"}
    team = groups() | {"rest": {"agents": ["verifier"], "base": "shared"}, "closer": closer}
    check(load_config(TEAM, {"model_groups": team, "train.lora": narrow}))


def test_a_base_changes_the_identity_of_a_run_and_none_leaves_it() -> None:
    config = load_config(TEAM)
    assert config.sha256 != load_config(TEAM, {"model_groups": groups()}).sha256
    assert config.bases == {"shared": [*GROUPS]}
    assert [config.weights_name(group) for group in GROUPS] == ["shared"] * 3
    plain = load_config(TEAM.with_name("small.yaml"))
    assert plain.bases == {} and plain.weights_name("team") == "team"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run after a short warm start."""
    short = {"warmstart.num_demonstrations": 24, "warmstart.num_epochs": 1}
    run = Run(load_config(TEAM, {"storage.root": str(tmp_path_factory.mktemp("started")), **short}))
    run.open()
    warmstart(run)
    return run


def test_the_warm_start_makes_the_base_once_and_a_fresh_adapter_for_every_group(started: Run) -> None:
    base = started.weights.ref("shared", 0)
    assert base is not None
    seen = set()
    for group in GROUPS:
        ref = started.weights.ref(group, 0)
        assert ref is not None and whole_model(ref) == base
        folder = started.weights.fetch(ref)
        assert is_fresh(folder)
        assert started.weights.manifest(ref).probe == started.weights.manifest(base).probe
        seen.add((folder / "adapter_model.safetensors").read_bytes())
    assert len(seen) == 3, "each group begins from another A"
    assert started.weights.manifest(base).base is None
    models = warmstart(started).models
    assert models == {group: started.weights.ref(group, 0) for group in GROUPS}, "done once"


def test_one_app_serves_all_adapters_of_a_base(started: Run) -> None:
    assert app_names(started) == dict.fromkeys(GROUPS, "adapters-rollout-shared")
    models = started.trained(0)
    (spec,) = app_specs(started, models, app_names(started))
    assert (spec.model_group, spec.model) == ("shared", started.weights.ref("shared", 0))
    assert spec.adapters == models
    assert spec.room is not None
    assert (spec.room.model_groups, spec.room.max_rank) == (GROUPS, 8)
    assert set(spec.room.target_modules) >= {"q_proj", "down_proj"}


def test_tokenizers_of_adapters_are_their_base_s(started: Run) -> None:
    team = started.team_spec(started.trained(0)).build()
    ids = team.tokenizers["solver"].encode_completion("12+3")
    assert ids == team.tokenizers["closer"].encode_completion("12+3") and ids
