"""loop: the run of one part -> two iterations of its stages, each with its time and the memory of the GPU.

The check of a part fails where a stage does, and that includes: a replica that cannot prove that it serves what was trained,
a trainer whose logprobs are not the engine's, an engine that finds no room to wake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pipelines.cluster.connect import connect
from pipelines.run.run import Run
from pipelines.run.serving import start
from pipelines.runners.begin import make_version_zero, register_first_team
from pipelines.stages.steps import do_step, run_stage
from pipelines.stages.table import Step
from stores.journal.stage_results import Collected, Synced, Trained
from tests.bench.setting import build_100m, open_run
from tests.gpu_check.memory import watched
from tests.gpu_check.parts import Part, changes_of
from tests.gpu_check.rows import Row

T = TypeVar("T")


def play(name: str, part: Part, folder: Path, *, model: str, on_gpu: bool, num_cores: int) -> Iterator[Row]:
    """Yields a row after each stage.

    Args:
        folder: an empty one for the run.
        model: a model's folder; empty: one of 100M parameters is made on a GPU, a tiny one on the CPU.
    """
    if on_gpu and not model:
        model = str(build_100m(folder / "model-100m"))
    run = open_run(f"gpu-check-{name}", folder, changes_of(part, model=model, on_gpu=on_gpu, num_cores=num_cores))
    make_version_zero(run)
    connect()
    yield _timed("start engines", lambda: start(run, run.trained(0)), lambda _: "")
    register_first_team(run)
    for iteration in (1, 2):
        yield _timed(f"collect {iteration}", lambda: run_stage(run, "collect", iteration), _sampled)  # noqa: B023
        run_stage(run, "score", iteration)
        yield _timed(f"train {iteration}", lambda: _train(run, iteration), _trained)  # noqa: B023
        yield _timed(f"sync {iteration}", lambda: run_stage(run, "sync", iteration), _synced)  # noqa: B023


def _timed(stage: str, work: Callable[[], Any], say: Callable[[Any], str]) -> Row:
    with watched() as used:
        began = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - began
    return Row(stage=stage, seconds=seconds, peak_gib=used.peak_gib, last_gib=used.last_gib, seen=say(result))


def _train(run: Run, iteration: int) -> dict[str, Trained]:
    do_step(run, Step(iteration, "train"))
    trained = run.iteration(iteration).trained
    for group, result in trained.items():
        if result.model.version != iteration:
            raise RuntimeError(f"model group {group} has no version {iteration}: {result.reason}")
    return trained


def _sampled(result: Any) -> str:
    assert isinstance(result, Collected)
    statuses = ", ".join(f"{num} {status}" for status, num in sorted(result.statuses.items()))
    return f"{result.num_tokens / max(result.sampling_seconds, 1e-9):,.0f} tokens/s; episodes: {statuses}"


def _trained(trained: dict[str, Trained]) -> str:
    metrics = [result.metrics for result in trained.values()]
    tokens = sum(found["train/tokens"] for found in metrics)
    parts = {
        part: sum(found.get(f"train/{part}_s", 0.0) for found in metrics)
        for part in ("load", "old_logprobs", "update", "commit")
    }
    gap = max(found["train/logprob_gap_mean"] for found in metrics)
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in parts.items())
    return f"{tokens:,.0f} tokens; {seconds}; trainer and engine differ by {gap:.2g} nats in the mean"


def _synced(result: Any) -> str:
    assert isinstance(result, Synced)
    verdicts = sorted({proof["verdict"] for proof in result.proofs})
    largest = max(proof["max_difference_new"] for proof in result.proofs)
    return f"{len(result.proofs)} replies {' and '.join(verdicts)}, at most {largest:.2g} nats off; swap {result.seconds:.1f} s"
