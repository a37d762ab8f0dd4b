"""two_workers: plays jobs by one worker, or by two in processes of their own, and returns what they made of them.

A `Job` builds the models, resumes from a checkpoint or not, learns, saves and learns again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from synthetic_traces import GROUP, sample_traces

from stores.types import ModelVersionRef
from stores.weights.store import WeightStore
from train_loops.config import TrainConfig
from train_loops.engine.deepspeed_engine import Engine, join_workers
from train_loops.engine.models import Models, build_models
from train_loops.rows.samples import Funnel, Sample, samples_of
from train_loops.worker.learner import learn

FIGURES = ("loss", "critic_loss", "grad_norm", "critic_grad_norm", "explained_variance", "ratio", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Learns twice from the same rows, with a checkpoint before the first time (`begin`) and one between them (`half`)."""

    name: str
    config: TrainConfig
    resumes: str = ""
    """Folder of a checkpoint to start from; then it learns only the second time."""
    warms_up: bool = False
    """Whether only the critic learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a job did."""

    figures: tuple[float, ...]
    """Those of `FIGURES` that the learner has, of the first time and then of the second."""
    weights: torch.Tensor
    """All parameters, of policy and critic, in the end."""
    head: torch.Tensor
    """Those of the value head on the policy's trunk; empty where there is none."""


def play(jobs: Sequence[Job], out: Path, *, weights_uri: str, parent: ModelVersionRef) -> dict[str, Result]:
    """Every worker calls it; checkpoints come to lie in `out / name`."""
    store = WeightStore(weights_uri)
    samples = rows(store.fetch(parent))
    results = {}
    for job in jobs:
        models = build_models(store, parent, job.config)
        if job.resumes:
            load(models, Path(job.resumes))
        save(models, out / job.name / "begin")
        figures: list[float] = []
        for seed in (2,) if job.resumes else (1, 2):
            funnel = Funnel(model_group=GROUP)
            about = {"config": job.config, "seed": seed, "funnel": funnel, "trains_policy": not job.warms_up}
            metrics = learn(samples, models, credit_kind="returns", **about).metrics
            figures += [metrics[f"train/{name}"] for name in FIGURES if f"train/{name}" in metrics]
            if seed == 1:
                save(models, out / job.name / "half")
        named = [(name, x.flatten()) for e in engines(models).values() for name, x in e.tensors(e.module)]
        results[job.name] = Result(
            figures=tuple(figures),
            weights=torch.cat([x for _, x in named]),
            head=torch.cat([x for name, x in named if name.startswith("value_head.")] or [torch.zeros(0)]),
        )
        models.close()
    return results


def play_by_two(jobs: Sequence[Job], out: Path, *, weights_uri: str, parent: ModelVersionRef) -> dict[str, Result]:
    """The same by two worker processes; the results are worker 0's."""
    out.mkdir(parents=True, exist_ok=True)
    mp.spawn(_work, args=(list(jobs), out, weights_uri, parent), nprocs=2)
    return torch.load(out / "results.pt", weights_only=False)


def _work(rank: int, jobs: Sequence[Job], out: Path, weights_uri: str, parent: ModelVersionRef) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    join_workers()
    results = play(jobs, out, weights_uri=weights_uri, parent=parent)
    if rank == 0:
        torch.save(results, out / "results.pt")
    dist.destroy_process_group()


def rows(folder: Path) -> list[Sample]:
    """18 samples of both agents: 3 minibatches of 6, which two workers cannot always share evenly."""
    traces, rewards = sample_traces(folder, num_tasks=3, group_size=3)
    samples = [s for t, r in zip(traces, rewards, strict=True) for s in samples_of(t, r, model_group=GROUP)]
    return sorted(samples, key=lambda s: (s.episode_id, s.turn_index))


def engines(models: Models) -> dict[str, Engine]:
    """By the tag of their checkpoint."""
    return {"policy": models.policy} | ({"critic": models.critic} if models.critic is not None else {})


def save(models: Models, folder: Path) -> None:
    """A checkpoint of all engines."""
    folder.mkdir(parents=True, exist_ok=True)
    for tag, engine in engines(models).items():
        engine.save(folder, tag=tag, state={})
    if dist.get_world_size() > 1:
        dist.barrier()


def load(models: Models, folder: Path) -> None:
    """What `save` wrote, in whatever layout."""
    for tag, engine in engines(models).items():
        engine.load(folder, tag=tag)
