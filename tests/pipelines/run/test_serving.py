"""What `serve` finds served already, and what it has the new version told apart from. Engines are in test_policy_app."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_dtypes import in_dtype

from pipelines.config.run_config import load_config
from pipelines.run import serving
from pipelines.run.run import Run
from serve_apps.policy.deployment import ServedModel
from serve_apps.policy.policy_app import PolicyArgs
from serve_apps.policy.proof import Limits, limits_for
from serve_apps.policy.proving import Target
from stores.types import ModelVersionRef
from stores.weights.manifest import Probe

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
PROBE = Probe(sequences=((1, 2),), logprobs=((-0.5,),))


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Run:
    """Versions 0, 1 and 2, each trained from the one before."""
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    for version in range(3):
        run.weights.commit(
            tiny_model,
            model_group="team",
            version=version,
            parent=version - 1 if version else None,
            run_id="small",
            iteration=version,
            probe=PROBE,
        )
    return run


def ref(run: Run, version: int) -> ModelVersionRef:
    found = run.weights.ref("team", version)
    assert found is not None
    return found


def served(model: ModelVersionRef) -> ServedModel:
    return model.version, model.manifest_sha256


def told_apart(
    monkeypatch: pytest.MonkeyPatch, run: Run, version: int, *replicas: ServedModel, always: bool = False
) -> Any:
    """The version that the new one is told apart from, None without one; "nothing to do" where it is served already."""
    given: list[Target] = []

    def sync(targets: list[Target], *_: Any, **__: Any) -> list[Any]:
        given.extend(targets)
        return []

    monkeypatch.setattr(serving, "start", lambda run, models, kind: None)
    monkeypatch.setattr(serving, "served_models", lambda apps: {group: dict(enumerate(replicas)) for group in apps})
    monkeypatch.setattr(serving, "sync_apps", sync)
    serving.serve(run, {"team": ref(run, version)}, always_prove=always)
    return (given[0].before and given[0].before.version) if given else "nothing to do"


def test_a_version_is_told_apart_from_what_was_served_before_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one, two = (served(ref(run, version)) for version in range(3))
    assert told_apart(monkeypatch, run, 0, two) == 2, "a rollback to a version without a parent"
    assert told_apart(monkeypatch, run, 2, zero) == 0, "not its parent, which nobody served"
    assert told_apart(monkeypatch, run, 2, two, zero) == 0, "a swap that was interrupted"
    assert told_apart(monkeypatch, run, 2, two, always=True) == 1, "served already: its parent"
    assert told_apart(monkeypatch, run, 0, zero, always=True) is None
    assert told_apart(monkeypatch, run, 2, two, two) == "nothing to do"
    assert told_apart(monkeypatch, run, 1, one, two) == 2
    assert told_apart(monkeypatch, run, 1) == 0, "no replica answers now"


def test_an_earlier_run_of_the_same_name_left_other_weights_of_the_same_number(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served(replace(ref(run, 0), manifest_sha256="of another run"))
    assert told_apart(monkeypatch, run, 0, before) is None, "swapped, and its probe is gone"
    assert told_apart(monkeypatch, run, 1, before) == 0, "its parent"


def test_a_proof_allows_what_the_dtypes_of_trainer_and_engine_ask_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limits(**changes: Any) -> Limits:
        other = Run(load_config(SMALL, {"storage.root": str(tmp_path), **changes}))
        given: list[Target] = []
        monkeypatch.setattr(serving, "sync_apps", lambda targets, *_, **__: given.extend(targets) or [])
        monkeypatch.setattr(serving, "start", lambda run, models, kind: None)
        monkeypatch.setattr(serving, "served_models", lambda apps: {group: {} for group in apps})
        serving.serve(other, {"team": ref(run, 1)})
        return given[0].limits

    assert limits() == limits_for("float32", "float32")
    assert limits(**{"serve.dtype": "bfloat16"}) == limits_for("float32", "bfloat16")
    assert limits(**{"train.deepspeed.bf16": True}) == limits_for("bfloat16", "float32")
    assert limits(**{"sync.proof_noise": 0.25}).noise == 0.25


@pytest.mark.parametrize(("kind", "engine"), [("vllm", {"enable_sleep_mode": True}), ("transformers", {})])
def test_an_engine_that_lends_its_gpu_is_started_so_that_it_can_sleep(
    kind: str, engine: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    changes = {"pool": "shared", "serve.gpus": 0.5, "train.gpus_per_worker": 0.5, "serve.engine_kind": kind}
    other = Run(load_config(SMALL, {"storage.root": str(tmp_path), **changes}))
    (spec,) = serving.app_specs(other, {"team": ref(run, 1)}, {"team": "app"})
    assert spec.serve.engine == engine
    assert PolicyArgs.from_dict(spec.args.to_dict()) == spec.args, "a replica takes it"


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_an_engine_of_the_models_own_dtype_keeps_that_of_version_0(
    stored: str, run: Run, tiny_model: Path, tmp_path: Path
) -> None:
    other = Run(load_config(SMALL, {"storage.root": str(tmp_path / "auto"), "serve.dtype": "auto"}))
    for version, dtype in enumerate((stored, "float32")):
        folder = in_dtype(tiny_model, tmp_path / f"v{version}", dtype)
        about = {"model_group": "team", "version": version, "parent": None, "run_id": "small", "iteration": version}
        other.weights.commit(folder, probe=PROBE, **about)  # type: ignore[arg-type]
    latest = other.weights.ref("team", 1)
    assert latest is not None
    (spec,) = serving.app_specs(other, {"team": latest}, {"team": "app"})
    assert spec.serve.dtype == stored
    assert serving.app_specs(run, {"team": ref(run, 1)}, {"team": "app"})[0].serve.dtype == "float32"
