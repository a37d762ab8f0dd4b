"""Adapters of one base: what trains, what is written, what reads it again, and that the base stays as it is."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stores.types import ModelVersionRef
from stores.weights.store import WeightStore
from train_loops.config import DeepSpeedConfig, LoraConfig, OptimizerConfig
from train_loops.engine.adapters import (
    ADAPTER_WEIGHTS,
    AdapterOff,
    adopt_adapter,
    export_adapter,
    is_fresh,
    load_adapted,
    load_reference_of,
    load_version,
    make_adapter,
    merge_adapter,
)
from train_loops.engine.deepspeed_engine import Engine, join_workers, load_model
from train_loops.engine.logprobs import completion_logprobs
from train_loops.engine.warmstart import adopt
from train_loops.rows.batching import collate_turns

pytestmark = pytest.mark.test

PLAIN = DeepSpeedConfig()
LORA = LoraConfig(rank=4, alpha=8)
TOKENS = torch.tensor([[(i * 37 + j * 11) % 300 + 3 for j in range(24)] for i in range(3)])


@pytest.fixture(autouse=True, scope="module")
def workers() -> None:
    join_workers()


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    return make_adapter(load_model(tiny_model, PLAIN), LORA, seed=1, out=tmp_path / "fresh")


def logprobs(model: Any) -> torch.Tensor:
    """log p of every token after the first, [B, T-1], of a Hugging Face model."""
    with torch.no_grad():
        logits = model.eval()(TOKENS).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, TOKENS[:, 1:, None])[..., 0]


def loss_of(model: Any) -> torch.Tensor:
    logits = model(TOKENS).logits[:, :-1].double()
    return -logits.log_softmax(-1).gather(2, TOKENS[:, 1:, None]).mean()


def trained(base: Path, adapter: Path, out: Path, *, steps: int = 3, config: DeepSpeedConfig = PLAIN) -> Engine:
    """An engine after some steps that make the tokens likelier, its adapter in `out`."""
    engine = Engine(load_adapted(base, adapter, config), optimizer=OptimizerConfig(lr=1e-2), config=config)
    for _ in range(steps):
        model: Any = engine.module.model
        engine.backward(loss_of(model).float(), is_last=True)
        assert engine.step().is_applied
    export_adapter(engine, out)
    return engine


def test_a_fresh_adapter_changes_nothing_and_is_a_fraction_of_the_base(tiny_model: Path, adapter: Path) -> None:
    assert is_fresh(adapter)
    assert torch.equal(
        logprobs(load_adapted(tiny_model, adapter, PLAIN).model), logprobs(load_model(tiny_model, PLAIN))
    )
    names = load_file(adapter / ADAPTER_WEIGHTS)
    assert len(names) == 2 * 7 * 2, "A and B of seven layers in two blocks"
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert sorted(p.name for p in adapter.iterdir()) == ["adapter_config.json", ADAPTER_WEIGHTS]


def test_a_seed_decides_a_fresh_adapter_and_the_dice_of_others_are_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    one, same, other = (
        load_file(make_adapter(load_model(tiny_model, PLAIN), LORA, seed=s, out=tmp_path / n) / ADAPTER_WEIGHTS)
        for n, s in (("one", 1), ("same", 1), ("other", 2))
    )
    assert torch.equal(torch.rand(1), wanted)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_only_the_adapter_trains_and_it_is_what_peft_reads(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    import peft

    engine = trained(tiny_model, adapter, tmp_path / "v1")
    bases = {n: p for n, p in engine.module.named_parameters() if "lora_" not in n}
    before = dict(load_model(tiny_model, PLAIN).named_parameters())
    assert bases and all(
        torch.equal(p, before[n.removeprefix("model.").replace(".base_layer", "")]) for n, p in bases.items()
    )
    assert not is_fresh(tmp_path / "v1")
    read = peft.PeftModel.from_pretrained(load_model(tiny_model, PLAIN), str(tmp_path / "v1"))
    assert (logprobs(read) - logprobs(engine.module.model)).abs().max() < 1e-6
    assert (logprobs(read) - logprobs(load_model(tiny_model, PLAIN))).abs().max() > 0.05
    engine.close()


def test_the_gradient_of_an_adapter_is_that_of_finite_differences(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    trained(tiny_model, adapter, tmp_path / "v1").close()
    model = load_adapted(tiny_model, tmp_path / "v1", PLAIN).model.double().eval()
    loss_of(model).backward()
    generator = torch.Generator().manual_seed(0)
    for part in (
        "layers.0.self_attn.v_proj.lora_A",
        "layers.1.mlp.down_proj.lora_B",
        "layers.1.self_attn.q_proj.lora_B",
    ):
        (parameter,) = (p for name, p in model.named_parameters() if part in name)
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        expected = float((parameter.grad * direction).sum())
        losses = []
        for epsilon in (1e-3, -1e-3):
            with torch.no_grad():
                parameter += epsilon * direction
                losses.append(float(loss_of(model)))
                parameter -= epsilon * direction
        assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_as_if_never_stopped(
    tiny_model: Path, adapter: Path, tmp_path: Path, stage: int
) -> None:
    config = DeepSpeedConfig(zero_stage=stage)  # type: ignore[arg-type]
    engine = trained(tiny_model, adapter, tmp_path / "v1", config=config)
    (tmp_path / "checkpoint").mkdir()
    engine.save(tmp_path / "checkpoint", tag="policy", state={"version": 1})
    size = sum(f.stat().st_size for f in (tmp_path / "checkpoint").rglob("*") if f.is_file())
    assert size < (tiny_model / "model.safetensors").stat().st_size, "the adapter and two moments of it"
    again = Engine(load_adapted(tiny_model, tmp_path / "v1", config), optimizer=OptimizerConfig(lr=1e-2), config=config)
    assert again.load(tmp_path / "checkpoint", tag="policy") == {"version": 1}
    for one in (engine, again):
        model: Any = one.module.model
        one.backward(loss_of(model).float(), is_last=True)
        one.step()
    assert torch.allclose(logprobs(engine.module.model), logprobs(again.module.model), atol=1e-6)
    engine.close()
    again.close()


def test_merged_base_and_adapter_are_one_model_with_the_same_logprobs(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    trained(tiny_model, adapter, tmp_path / "v1").close()
    merged = merge_adapter(tiny_model, tmp_path / "v1", tmp_path / "merged")
    modes = {file.name: file.stat().st_mode & 0o777 for file in merged.iterdir()}
    assert len(set(modes.values())) == 1, f"who may read one file of a model may read all: {modes}"
    both, one = load_adapted(tiny_model, tmp_path / "v1", PLAIN).model, load_model(merged, PLAIN)
    assert (logprobs(both) - logprobs(one)).abs().max() < 1e-5
    assert {p.name for p in merged.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    names = lambda folder: set(load_file(folder / "model.safetensors"))  # noqa: E731
    assert names(merged) == names(tiny_model)


def test_the_reference_of_an_adapter_is_its_base_unless_it_was_taken_over(tiny_model: Path, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    base, fresh = adopted(store, tiny_model, tmp_path)
    policy = trained(tiny_model, store.fetch(fresh), tmp_path / "v1")
    taken = store.commit(tmp_path / "v1", model_group="taken", version=0, parent=None, run_id="r", iteration=0,
                         probe=store.manifest(fresh).probe, base=base)  # fmt: skip
    batch = collate_turns([(row[:1], row[1:]) for row in TOKENS.tolist()])
    models: dict[str, Any] = {"base": load_model(tiny_model, PLAIN), "taken": policy.module.model}
    exact = {name: logprobs(model).flatten() for name, model in models.items()}
    off, own = (load_reference_of(policy, store, ref, PLAIN) for ref in (fresh, taken))
    assert isinstance(off, AdapterOff)
    with torch.no_grad():
        assert torch.allclose(completion_logprobs(off, batch), exact["base"], atol=1e-5)
        assert torch.allclose(completion_logprobs(own, batch), exact["taken"], atol=1e-5)
        assert torch.allclose(completion_logprobs(policy, batch), exact["taken"], atol=1e-5), "and it is on again"
    assert [p.requires_grad for n, p in policy.module.named_parameters() if "lora_" in n].count(False) == 0
    policy.close()


def test_a_version_knows_its_base_and_a_policy_is_loaded_as_the_settings_say(tiny_model: Path, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    base, fresh = adopted(store, tiny_model, tmp_path)
    manifest = store.manifest(fresh)
    assert (manifest.base, manifest.version, manifest.parent) == (base, 0, None)
    assert manifest.probe == store.manifest(base).probe
    store.verify(fresh)
    assert manifest.size_bytes < 0.5 * store.manifest(base).size_bytes
    assert torch.equal(logprobs(load_version(store, fresh, PLAIN, LORA).model), logprobs(load_model(tiny_model, PLAIN)))
    with pytest.raises(ValueError, match=r"is an adapter, but train\.lora is not set"):
        load_version(store, fresh, PLAIN, None)
    with pytest.raises(ValueError, match=r"is a whole model, but train\.lora is set"):
        load_version(store, base, PLAIN, LORA)
    with pytest.raises(ValueError, match=r"has rank 4, train\.lora\.rank is 8"):
        load_version(store, fresh, PLAIN, LoraConfig(rank=8))


def adopted(store: WeightStore, folder: Path, scratch: Path) -> tuple[ModelVersionRef, ModelVersionRef]:
    """A base, and version 0 of a model group on it."""
    base = adopt(folder, store=store, model_group="shared", run_id="r")
    fresh = adopt_adapter(
        base, store=store, model_group="solver", run_id="r", config=LORA, seed=5, out=scratch / "fresh"
    )
    return base, fresh


def test_the_base_in_the_store_stays_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    base, fresh = adopted(store, tiny_model, tmp_path)
    digest = sha256((store.fetch(base) / "model.safetensors").read_bytes()).hexdigest()
    trained(store.fetch(base), store.fetch(fresh), tmp_path / "v1").close()
    assert sha256((store.fetch(base) / "model.safetensors").read_bytes()).hexdigest() == digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 33}, r"rank = 33 is above the smaller dimension of k_proj \(32\): take at most 32"),
        ({"target_modules": ("q_proj", "k_porj")}, "no linear layer 'k_porj': did you mean 'k_proj'"),
        ({"target_modules": ("lm_head",)}, "'lm_head' is the output head"),
        ({"target_modules": ()}, r"target_modules\n.*at least 1 item"),
    ],
)
def test_a_rank_or_a_layer_that_cannot_be_is_refused_with_the_nearest_that_works(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_adapter(load_model(tiny_model, PLAIN), LoraConfig(**changes), seed=0, out=tmp_path / "a")


def test_an_adapter_of_another_base_is_refused(tiny_model: Path, adapter: Path) -> None:
    file = adapter / ADAPTER_WEIGHTS
    from safetensors.torch import save_file

    tensors = load_file(file)
    first = sorted(tensors)[0]
    save_file({**tensors, first: torch.zeros(4, 7)}, file)
    with pytest.raises(ValueError, match=r"has shape \(4, 7\), the base needs"):
        load_adapted(tiny_model, adapter, PLAIN)
    del tensors[first]
    save_file(tensors, file)
    with pytest.raises(ValueError, match="does not fit the base: tensors"):
        load_adapted(tiny_model, adapter, PLAIN)
