"""sync: seconds from a committed version to proven engines, for the demo's two models, beside a copy of the bytes."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path

from pipelines.cluster.connect import connect
from pipelines.run.run import Run
from pipelines.run.serving import app_names, serve, start
from pipelines.runners.begin import make_version_zero
from stores.types import ModelVersionRef
from tests.bench.figures import Figure
from tests.bench.setting import open_run
from tests.serve_apps.deployed_apps import replica_statuses

NUM_SYNCS = 5


def measure(folder: Path) -> list[Figure]:
    """Versions 1 to n differ from version 0 by noise; each is swapped in and proven on every replica."""
    run = open_run("bench-sync", folder, {"warmstart.num_demonstrations": 200, "warmstart.num_epochs": 1})
    make_version_zero(run)
    connect()
    models = run.trained(0)
    start(run, models)
    before = _pids(run)
    seconds, copies, size = [], [], 0
    for version in range(1, 1 + NUM_SYNCS):
        models = {group: _next_version(run, ref, folder / "scratch") for group, ref in models.items()}
        began = time.perf_counter()
        proofs, swap_s = serve(run, models, always_prove=True)
        seconds.append(time.perf_counter() - began)
        print(f"sync to version {version}: {seconds[-1]:.3f} s (swap and proof {swap_s:.3f})", proofs, flush=True)
        assert all(p.version == version and p.verdict == "proven" for p in proofs), proofs
        files = [run.weights.fetch(ref) / "model.safetensors" for ref in models.values()]
        size = sum(file.stat().st_size for file in files)
        began = time.perf_counter()
        for number, file in enumerate(files):
            shutil.copyfile(file, folder / f"copy-{number}")
        copies.append(time.perf_counter() - began)
    is_in_place = _pids(run) == before
    sync_s, copy_s = statistics.median(seconds), statistics.median(copies)
    return [
        Figure(
            "sync, demo's two models",
            sync_s,
            "s",
            most=2.0,
            note=f"median of {NUM_SYNCS}, largest {max(seconds):.2f} s, proof on every replica included",
        ),
        Figure("plain copy of the same bytes", copy_s, "s", note=f"{size / 1e6:.1f} MB"),
        Figure("sync / copy", sync_s / copy_s, "x"),
        Figure(
            "replica processes kept",
            float(is_in_place),
            least=1.0,
            note=f"pids {sorted(before.values())} before and after" if is_in_place else f"{before} -> {_pids(run)}",
        ),
    ]


def _pids(run: Run) -> dict[str, int]:
    return {s["replica_id"]: s["pid"] for app in app_names(run).values() for s in replica_statuses(app)}


def _next_version(run: Run, parent: ModelVersionRef, scratch: Path) -> ModelVersionRef:
    """Commits the parent's weights with a little noise, with a probe as a trainer writes it."""
    import torch
    from transformers import AutoModelForCausalLM

    from train_loops.engine.warmstart import make_probe

    folder = run.weights.fetch(parent)
    out = scratch / f"{parent.model_group}-{parent.version + 1}"
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("manifest.json", "*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(parent.version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=random)
    model.save_pretrained(out)
    return run.weights.commit(
        out,
        model_group=parent.model_group,
        version=parent.version + 1,
        parent=parent.version,
        run_id=run.run_id,
        iteration=parent.version + 1,
        probe=make_probe(model, run.weights.manifest(parent).probe.sequences),
    )
