"""adapters: a frozen base and LoRA settings -> a policy whose adapter alone trains, its folder, and the merge of both.

    base folder + adapter folder --load_adapted--> PolicyScorer --Engine--> steps --export_adapter--> adapter folder
                                                                  `AdapterOff`: the same weights as a reference
    base folder + adapter folder --merge_adapter--> a whole model folder

An adapter folder has peft's layout: `PeftModel.from_pretrained(base, folder)` reads it, and so does vLLM. The layers of
peft are put into the model itself, so whatever takes the model takes it with an adapter, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stores.types import ModelVersionRef
from stores.weights.model_folder import num_known_rows
from stores.weights.store import WeightStore
from train_loops.config import DeepSpeedConfig, LoraConfig
from train_loops.engine.deepspeed_engine import Engine, freeze, load_model, load_policy
from train_loops.engine.export import NOT_COPIED, save_model
from train_loops.engine.logprobs import PolicyScorer

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the names of the model's own tensors."""
ADAPTER = "default"


def load_version(store: WeightStore, ref: ModelVersionRef, config: DeepSpeedConfig, lora: LoraConfig | None) -> Any:
    """Loads the policy of a model version, whole or an adapter, ready for an `Engine`.

    Raises ValueError where the version is not what `lora` says: whole, or an adapter of this rank.
    """
    base = store.manifest(ref).base
    if (base is None) != (lora is None):
        raise ValueError(
            f"{ref.uri} is {'a whole model' if base is None else 'an adapter'}, but train.lora is "
            f"{'set' if lora is not None else 'not set'}: begin another run, or take the setting back"
        )
    if base is None or lora is None:
        return load_policy(store.fetch(ref), config)
    policy = load_adapted(store.fetch(base), store.fetch(ref), config)
    rank = policy.model.peft_config[ADAPTER].r
    if rank != lora.rank:
        raise ValueError(f"{ref.uri} has rank {rank}, train.lora.rank is {lora.rank}: an adapter keeps its rank")
    return policy


def load_adapted(base: str | Path, adapter: str | Path, config: DeepSpeedConfig) -> PolicyScorer:
    """Loads the base, frozen, with the adapter, trainable; ValueError if one does not fit the other."""
    import peft

    model = load_model(base, config)
    _inject(model, peft.LoraConfig.from_pretrained(str(adapter)))
    _fill(model, adapter)
    return PolicyScorer(model, num_known=num_known_rows(Path(base)))


def load_reference_of(policy: Engine, store: WeightStore, ref: ModelVersionRef, config: DeepSpeedConfig) -> Any:
    """Returns the adapter version `ref` as a reference for KL terms.

    If `ref` does not change its base, the policy with its adapter switched off is the same model, and needs no memory.
    A version that was adopted from another run may change the base: then it is loaded as a model of its own.
    """
    base = store.manifest(ref).base
    assert base is not None
    adapter = store.fetch(ref)
    return AdapterOff(policy) if is_fresh(adapter) else freeze(load_adapted(store.fetch(base), adapter, config), config)


class AdapterOff:
    """The base of a policy, called like the policy: it uses the weights that are in memory anyway."""

    def __init__(self, policy: Engine) -> None:
        self._policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the policy's forward pass without its adapter; to be called without gradients only."""
        with adapter_off(self._policy.module):
            return self._policy(*args, **kwargs)


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Switches all adapter layers off inside, so that the model computes what its base does."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def make_adapter(model: PreTrainedModel, config: LoraConfig, *, seed: int, out: Path) -> Path:
    """Writes a fresh adapter of `model` to `out` (LoRA, arXiv 2106.09685: W + (alpha / rank) B A).

    A is drawn at random and B is zero, so the adapter changes nothing yet. Raises ValueError where `config` names layers that the model does not have, or a rank that they cannot have.
    """
    import peft

    check_fit(model, config)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    _inject(
        model,
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # a float serves as well
            target_modules=sorted(config.target_modules),
            bias="none",
            task_type="CAUSAL_LM",
        ),
    )
    torch.random.set_rng_state(state)
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return _write(dict(named), model.peft_config[ADAPTER], out)  # type: ignore[index]


def adopt_adapter(
    base: ModelVersionRef,
    *,
    store: WeightStore,
    model_group: str,
    run_id: str,
    config: LoraConfig,
    seed: int,
    out: Path,
) -> ModelVersionRef:
    """Commits a fresh adapter of `base` as version 0 of `model_group`; on the base's probe it gives the base's logprobs."""
    make_adapter(load_model(store.fetch(base), DeepSpeedConfig()), config, seed=seed, out=out)
    return store.commit(
        out,
        model_group=model_group,
        version=0,
        parent=None,
        run_id=run_id,
        iteration=0,
        probe=store.manifest(base).probe,
        note=f"fresh adapter of {base.model_group}",
        base=base,
    )


def export_adapter(engine: Engine, out: str | Path) -> Path:
    """Writes the adapter of an engine around `load_adapted`; all workers call it, worker 0 writes."""
    model: Any = engine.module.model
    tensors = dict(engine.tensors(model, only_trainable=True))
    if torch.distributed.get_rank() == 0:
        _write(tensors, model.peft_config[ADAPTER], Path(out))
    return Path(out)


def merge_adapter(base: str | Path, adapter: str | Path, out: str | Path) -> Path:
    """Writes base + adapter as one model in Hugging Face layout, in float32; config and tokenizer are the base's."""
    from peft.tuners.lora import Linear

    merged = load_model(base, DeepSpeedConfig())
    with torch.no_grad():
        for name, layer in load_adapted(base, adapter, DeepSpeedConfig()).model.named_modules():
            if isinstance(layer, Linear):
                merged.get_submodule(name).weight += layer.get_delta_weight(ADAPTER)
    shutil.copytree(base, out, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
    save_model(merged, Path(out), source=Path(base))
    for weights in Path(out).glob("*.safetensors"):  # safetensors writes them for the owner alone
        shutil.copymode(Path(out) / "config.json", weights)
    return Path(out)


def is_fresh(adapter: str | Path) -> bool:
    """Says whether an adapter changes nothing: every B is zero."""
    from safetensors.torch import load_file

    tensors = load_file(Path(adapter) / ADAPTER_WEIGHTS)
    return not any(bool(tensor.any()) for name, tensor in tensors.items() if ".lora_B." in name)


def check_fit(model: nn.Module, config: LoraConfig) -> None:
    """Raises ValueError where the model lacks a target, or one is smaller than the rank; names the nearest that works."""
    linear = {name.rpartition(".")[2]: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for target in config.target_modules:
        if target == "lm_head":
            raise ValueError(
                "train.lora.target_modules: 'lm_head' is the output head, which stays the base's: leave it out"
            )
        if target not in linear:
            near = get_close_matches(target, linear, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(linear))}"
            raise ValueError(f"train.lora.target_modules: the model has no linear layer {target!r}: {hint}")
    largest = {target: min(linear[target].in_features, linear[target].out_features) for target in config.target_modules}
    narrowest = min(largest, key=lambda target: largest[target])
    if config.rank > largest[narrowest]:
        raise ValueError(
            f"train.lora.rank = {config.rank} is above the smaller dimension of {narrowest} ({largest[narrowest]}): "
            f"take at most {largest[narrowest]}"
        )


def _inject(model: PreTrainedModel, config: peft.LoraConfig) -> None:
    """Freezes the model and puts the layers of an adapter into it."""
    import peft

    model.requires_grad_(False)
    peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    model.peft_config = {ADAPTER: config}  # type: ignore[assignment]


def _fill(model: nn.Module, adapter: str | Path) -> None:
    """Copies the tensors of an adapter folder into the adapter layers of a model."""
    from safetensors.torch import load_file

    file = Path(adapter) / ADAPTER_WEIGHTS
    tensors = load_file(file)
    parameters = {peft_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if tensors.keys() != parameters.keys():
        raise ValueError(
            f"{file} does not fit the base: tensors {sorted(tensors.keys() ^ parameters.keys())[:3]} differ"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if tensors[name].shape != parameter.shape:
                raise ValueError(
                    f"{file}: {name} has shape {tuple(tensors[name].shape)}, the base needs {tuple(parameter.shape)}"
                )
            parameter.copy_(tensors[name])


def peft_name(name: str) -> str:
    """Maps the name of an adapter's parameter in the model to its name in the file."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def _write(tensors: dict[str, torch.Tensor], config: peft.LoraConfig, out: Path) -> Path:
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    named = {peft_name(name): tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(named, out / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(out))
    return out
