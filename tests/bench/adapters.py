"""adapters: three adapters of one base beside the whole model, at 100M: seconds of a sync that is proven, and tokens per second."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.cluster.connect import connect
from pipelines.config.sections import SyncConfig
from serve_apps.config import CallConfig, ServeConfig
from serve_apps.engines.port import AdapterRoom
from serve_apps.policy.deployment import PolicyAppSpec, ensure_apps, sync_apps
from serve_apps.policy.proving import Target
from serve_apps.policy.serve_client import ServeClient
from stores.types import GenerateRequest, ModelVersionRef, Sampling
from stores.weights.store import WeightStore
from tests.bench.figures import Figure, ratio
from tests.bench.setting import build_100m
from tests.serve_apps.deployed_apps import replica_statuses
from train_loops.config import LoraConfig

GROUPS = ("solver", "verifier", "refiner")
WHOLE, SHARED = "bench-whole", "bench-adapters"
NUM_SYNCS = 6
NUM_REQUESTS, NUM_TOKENS, NUM_PASSES = 48, 32, 3
"""Requests at once, tokens of each, and how often both apps take turns to sample them."""
NOISE = 0.02
"""Of what a version differs from the one before, in standard deviations of each tensor (whole), or in B (adapters)."""


def measure(folder: Path) -> list[Figure]:
    """Two versions of a whole model, and of three adapters of the same one, take turns; each is proven on its replica.

    Then both apps sample the same number of tokens, the adapters mixed in every step.
    """
    store, lora = WeightStore(str(folder / "weights")), LoraConfig(rank=8)
    whole = _whole_versions(store, build_100m(folder / "base"), folder)
    base = whole[0]
    adapters = {group: _adapter_versions(store, base, group, lora, folder) for group in GROUPS}
    connect()
    serve = ServeConfig(kv_cache_gib=0.5, max_num_seqs=NUM_REQUESTS)
    room = AdapterRoom(model_groups=GROUPS, max_rank=lora.rank, target_modules=lora.target_modules)
    first = {group: refs[0] for group, refs in adapters.items()}
    specs = [
        PolicyAppSpec(name=WHOLE, model_group=base.model_group, model=base, serve=serve),
        PolicyAppSpec(name=SHARED, model_group=base.model_group, model=base, serve=serve, adapters=first, room=room),
    ]
    ensure_apps(specs, state_file=folder / "apps.json", timeout_s=400)
    before = {s["pid"] for app in (WHOLE, SHARED) for s in replica_statuses(app)}
    seconds: dict[str, list[float]] = {WHOLE: [], SHARED: []}
    for number in range(1, 1 + NUM_SYNCS):
        new, old = number % 2, 1 - number % 2
        targets = {
            WHOLE: [Target(app=WHOLE, model=whole[new], before=whole[old])],
            SHARED: [Target(app=SHARED, model=refs[new], before=refs[old]) for refs in adapters.values()],
        }
        for app, wanted in targets.items():
            seconds[app].append(_timed(lambda wanted=wanted: _sync(wanted, store)))  # type: ignore[misc]
        print({app: round(found[-1], 3) for app, found in seconds.items()}, flush=True)
    rates: dict[str, list[float]] = {WHOLE: [], SHARED: []}
    for seed in range(NUM_PASSES):
        for app, groups in ((WHOLE, (base.model_group,)), (SHARED, GROUPS)):
            rates[app].append(_sampled_per_second(app, groups, seed))
        print({app: round(found[-1]) for app, found in rates.items()}, flush=True)
    is_in_place = {s["pid"] for app in (WHOLE, SHARED) for s in replica_statuses(app)} == before
    whole_s, adapters_s = (statistics.median(seconds[app]) for app in (WHOLE, SHARED))
    size = sum(store.manifest(refs[1]).size_bytes for refs in adapters.values())
    return [
        Figure("sync of the whole model, 100M", whole_s, "s", note=f"median of {NUM_SYNCS}"),
        Figure(
            f"sync of {len(GROUPS)} adapters of it",
            adapters_s,
            "s",
            note=f"{size / 1e6:.1f} MB beside {store.manifest(base).size_bytes / 1e6:.0f} MB, rank {lora.rank}",
        ),
        Figure("adapters / whole model", adapters_s / whole_s, "x", most=0.5),
        ratio("bytes, whole model / adapters", store.manifest(base).size_bytes, size),
        ratio(
            "tokens/s, adapters / whole model",
            statistics.median(rates[SHARED]),
            statistics.median(rates[WHOLE]),
            least=0.7,
            note=f"{NUM_REQUESTS} requests of {NUM_TOKENS} tokens, median of {NUM_PASSES}",
        ),
        Figure("replica processes kept", float(is_in_place), least=1.0),
    ]


def _sync(targets: list[Target], store: WeightStore) -> None:
    proofs = sync_apps(targets, store, timeout_s=SyncConfig().timeout_s)
    assert [p.verdict for p in proofs] == ["proven"] * len(targets), proofs


def _sampled_per_second(app: str, groups: Sequence[str], seed: int) -> float:
    """Returns completion tokens per second while all requests are under way, dealt over the groups in turn."""

    async def sample() -> int:
        client = ServeClient(dict.fromkeys(groups, app), CallConfig())
        calls = [
            client.generate(
                GenerateRequest(
                    request_id=f"{app}-{seed}-{number}",
                    model_group=groups[number % len(groups)],
                    prompt_token_ids=[(number * 37 + j * 11 + seed) % 1000 + 3 for j in range(40)],
                    sampling=Sampling(max_tokens=NUM_TOKENS),
                    seed=number,
                )
            )
            for number in range(NUM_REQUESTS)
        ]
        return sum(len(completion.token_ids) for completion in await asyncio.gather(*calls))

    began = time.perf_counter()
    return asyncio.run(sample()) / (time.perf_counter() - began)


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _whole_versions(store: WeightStore, folder: Path, scratch: Path) -> list[ModelVersionRef]:
    """Version 0, which is the base of the adapters, too, and version 1, which differs from it by noise."""
    import torch

    from train_loops.config import DeepSpeedConfig
    from train_loops.engine.deepspeed_engine import load_model
    from train_loops.engine.warmstart import adopt, make_probe, probe_sequences

    model = load_model(folder, DeepSpeedConfig()).eval()
    sequences = probe_sequences(folder, length=64)
    first = adopt(folder, store=store, model_group="whole", run_id="bench", sequences=sequences)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += NOISE * parameter.std(correction=0) * torch.randn(parameter.shape, generator=random)
    model.save_pretrained(scratch / "second")
    second = store.commit(
        scratch / "second",
        model_group="whole",
        version=1,
        parent=0,
        run_id="bench",
        iteration=1,
        probe=make_probe(model, sequences),
    )
    return [first, second]


def _adapter_versions(
    store: WeightStore, base: ModelVersionRef, group: str, lora: LoraConfig, scratch: Path
) -> list[ModelVersionRef]:
    """Versions 0 and 1 of an adapter that changes the base a little, each in its own way."""
    import torch
    from safetensors.torch import load_file, save_file

    from train_loops.config import DeepSpeedConfig
    from train_loops.engine.adapters import ADAPTER_WEIGHTS, load_adapted, make_adapter
    from train_loops.engine.deepspeed_engine import load_model
    from train_loops.engine.warmstart import make_probe

    refs = []
    for version in (0, 1):
        seed = 10 * GROUPS.index(group) + version
        out = scratch / f"{group}-{version}"
        make_adapter(load_model(store.fetch(base), DeepSpeedConfig()), lora, seed=seed, out=out)
        tensors, random = load_file(out / ADAPTER_WEIGHTS), torch.Generator().manual_seed(seed)
        for name in [name for name in tensors if ".lora_B." in name]:
            tensors[name] = NOISE * torch.randn(tensors[name].shape, generator=random)
        save_file(tensors, out / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        model = load_adapted(store.fetch(base), out, DeepSpeedConfig()).model.eval()
        refs.append(
            store.commit(
                out,
                model_group=group,
                version=version,
                parent=0 if version else None,
                run_id="bench",
                iteration=version,
                probe=make_probe(model, store.manifest(base).probe.sequences),
                base=base,
            )
        )
    return refs
