"""training: one row and seed of a comparison -> result.json, on engines and trainers that are warm from the row before.

    version 0 (once per seed) ──> swapped in, proven ──> collect, score, train, sync (each iteration) ──> test tasks

No gate and no registry: what is compared is what training does. A row that was interrupted begins again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.episodes.sampling import Progress
from pipelines.report.progress import Screen
from pipelines.run.run import Run
from pipelines.run.serving import serve
from pipelines.runners.begin import make_version_zero, measure_team
from pipelines.stages.steps import do_step
from pipelines.stages.table import Step
from stores.journal.stage_results import Scored
from stores.types import Purpose, Trace
from tests.algorithms.rows import Comparison, model_of
from tests.algorithms.spending import spending

Result = Mapping[str, Any]


def train_row(comparison: Comparison, row: str, seed: int, *, root: Path, screen: Screen) -> Result:
    """Trains a row from the seed's version 0 and keeps its result; one that is done is read.

    Returns {"sha256", "before", "after", "outcomes_before", "outcomes_after", "curve", "seconds", "costs", "spending"}: `curve` is
    [[iteration, mean outcome]], `seconds` one number per iteration without the measurements, `costs` a `Scored.cost` per iteration of a run
    that has a limit, `spending` see `spending.spending`, None where the comparison names no classes of tasks.
    """
    config = comparison.row_config(row, seed=seed, root=root)
    kept = result_file(root, row, seed)
    found = read_result(comparison, row, seed, root=root)
    if found is not None:
        return found
    folder = kept.parent
    shutil.rmtree(folder, ignore_errors=True)
    start = _start(comparison, seed, root=root, screen=screen)
    run = Run(config)
    folder.mkdir(parents=True)
    if comparison.is_of_one_model:
        run.open()
        with screen.stage(f"{row} seed {seed}: adopts the model") as progress:
            make_version_zero(run, progress=progress)
    else:
        shutil.copytree(start["weights"], run.weights_uri)
        run.open()
    with run.hold_engines(), screen.stage(f"{row} seed {seed}: version 0"):
        serve(run, run.trained(0), always_prove=True)
    if comparison.is_of_one_model:  # rows differ in their workflows, too
        with screen.stage(f"{row} seed {seed}: before") as progress:
            start |= _measured(run, progress=progress)
    curve = [[0, start["accuracy"]]]
    outcomes = start["outcomes"]
    seconds: list[float] = []
    for iteration in range(1, config.iterations + 1):
        seconds.append(_iterate(run, iteration, screen))
        if iteration % comparison.measure_every == 0 or iteration == config.iterations:
            with screen.stage("test tasks", iteration) as progress:
                measured = measure_team(run, run.trained(iteration), iteration=iteration, progress=progress)
            assert measured is not None, "the common configs have test tasks"
            curve.append([iteration, measured.score.accuracy])
            outcomes = measured.outcomes
    result = {
        "sha256": _identity(comparison, row, seed, root),
        "before": start["accuracy"],
        "after": curve[-1][1],
        "outcomes_before": start["outcomes"],
        "outcomes_after": outcomes,
        "curve": curve,
        "seconds": seconds,
        "costs": [cost for i in range(1, config.iterations + 1) if (cost := _cost(run, i)) is not None],
        "spending": comparison.difficulty and spending(_last_measured(run), outcomes, comparison.difficulty),
    }
    for stored in ("traces", "weights"):
        shutil.rmtree(folder / stored)
    kept.write_text(json.dumps(result))
    return result


def result_file(root: Path, row: str, seed: int) -> Path:
    """Where a row's result is kept; it is written last."""
    return root / "rows" / f"{row}-{seed}" / "result.json"


def read_result(comparison: Comparison, row: str, seed: int, *, root: Path) -> Result | None:
    """A kept result; None where there is none, or it is of other settings."""
    kept = result_file(root, row, seed)
    if not kept.is_file():
        return None
    result = json.loads(kept.read_text())
    return result if result["sha256"] == _identity(comparison, row, seed, root) else None


def _identity(comparison: Comparison, row: str, seed: int, root: Path) -> str:
    """Of the settings and the number of iterations."""
    config = comparison.row_config(row, seed=seed, root=root)
    return f"{config.sha256[:16]}/{config.iterations}"


def _start(comparison: Comparison, seed: int, *, root: Path, screen: Screen) -> dict[str, Any]:
    """Version 0 of a seed and what it scores on the test tasks: made once, shared by all rows."""
    config = comparison.row_config("", seed=seed, root=root)
    folder = root / "rows" / f"-{seed}"
    kept = folder / f"{config.sha256[:16]}.json"
    if not kept.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run = Run(config)
        run.open()
        with screen.stage(f"warm start of seed {seed}") as progress:
            make_version_zero(run, progress=progress)
        if comparison.is_of_one_model:
            (first,) = run.trained(0).values()
            shutil.copytree(run.weights.fetch(first), model_of(root, seed))
        with screen.stage(f"before, seed {seed}: test tasks") as progress:
            kept.write_text(json.dumps(_measured(run, progress=progress)))
    return {**json.loads(kept.read_text()), "weights": str(folder / "weights")}


def _measured(run: Run, *, progress: Progress) -> dict[str, Any]:
    measured = measure_team(run, run.trained(0), iteration=0, progress=progress)
    assert measured is not None, "the common configs have test tasks"
    return {"accuracy": measured.score.accuracy, "outcomes": measured.outcomes}


def _cost(run: Run, iteration: int) -> Mapping[str, float] | None:
    scored = run.iteration(iteration).find(Scored)
    return None if scored is None else scored.cost


def _last_measured(run: Run) -> list[Trace]:
    versions = {group: ref.version for group, ref in run.trained(run.config.iterations).items()}
    return run.traces.find_traces(
        run_id=run.run_id,
        purpose=Purpose.TEST,
        policy_versions=versions,
        limit=len(run.tasks("test")) * run.config.evaluate.episodes_per_task,
    )


def _iterate(run: Run, iteration: int, screen: Screen) -> float:
    """Does an iteration; with `loop.max_lag` the next ones are sampled before its weights are served, as where they overlap."""
    began = time.perf_counter()
    newest = iteration + run.config.loop.max_lag
    collects = range(1 if iteration == 1 else newest, min(newest, run.config.iterations) + 1)
    for stage, of in [
        *(("collect", k) for k in collects),
        ("score", iteration),
        ("train", iteration),
        ("sync", iteration),
    ]:
        with screen.stage(stage, of) as progress:
            do_step(run, Step(of, stage), progress=progress)
    return time.perf_counter() - began
