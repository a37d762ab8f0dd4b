"""overlap: seconds per iteration with `loop.max_lag: 1` over those without, trainers on a core of their own.

Of 6 iterations the last 4 count: in the first ones nothing overlaps yet, or everything is still being loaded. Where tools wait, 12 episodes
are in flight, so that collect mostly waits, and so many epochs that train takes about as long; at a learning rate at which the policy hardly
moves, since turns of a policy that is far away are refused (`train.mismatch.min_ess`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from pipelines.config.run_config import load_config
from pipelines.report.progress import Screen
from pipelines.run.run import Run
from pipelines.runners.local_runner import train_team
from stores.journal.stage_results import Collected, Decided, Trained
from tests.bench.figures import Figure
from tests.bench.setting import ROOT

CONFIG = ROOT / "tests" / "e2e" / "small.yaml"
ITERATIONS, FIRST = 6, 2
"""Periods are counted from the end of iteration `FIRST` on."""
LIMIT = 0.65
CHANGES: Mapping[str, Any] = {
    "iterations": ITERATIONS,
    "tasks.train.count": 200,
    "collect.tasks_per_iteration": 12,
    "train.num_epochs": 70,
    "train.optimizer.lr": 1e-6,
    "serve.threads": 1,
    "train.threads": 1,
    "evaluate.every": 99,
}
WAITING: Mapping[str, Any] = {
    "workflow.path": "tests.bench.waiting_team:WaitingTeam",
    "collect.episodes_in_flight": 12,
}
TRAINER = "ray::RayTrainWorker"
"""The title of the processes that have a core of their own; all others have the rest."""


def measure(folder: Path) -> list[Figure]:
    """Trains with and without overlap: where tools wait, and where nothing does."""
    with _cores_of_their_own():
        waiting = _both(folder, "waiting", WAITING)
    plain = _both(folder, "plain", {})
    return [
        _ratio("tools that wait, trainers on a core of their own", waiting, limit=LIMIT),
        _ratio("nothing waits, the same cores for both", plain),
        Figure("least effective sample size of an agent", waiting[1].ess),
    ]


class _Periods:
    """What the journal says of a run's iterations."""

    def __init__(self, run: Run) -> None:
        rows = run.journal.stages(run.run_id)
        ends = {row.iteration: row.ended_at or 0.0 for row in rows if row.stage == Decided.STAGE}
        self.seconds = [b - a for a, b in pairwise(ends[k] for k in range(FIRST, ITERATIONS))]
        counted = range(FIRST + 1, ITERATIONS)
        self.collect_s, self.train_s = (
            mean(
                (row.ended_at or 0.0) - row.started_at
                for row in rows
                if row.stage == stage and row.iteration in counted
            )
            for stage in (Collected.STAGE, Trained.STAGE)
        )
        results = [run.iteration(k).trained["team"] for k in counted]
        self.ess = min((a.get("ess", 1.0) for result in results for a in result.agents.values()), default=1.0)


def _both(folder: Path, name: str, changes: Mapping[str, Any]) -> tuple[_Periods, _Periods]:
    periods = []
    for max_lag in (0, 1):
        run_name = f"bench-{name}-{max_lag}"
        settings = {"run": run_name, "storage.root": str(folder / run_name), "loop.max_lag": max_lag}
        config = load_config(CONFIG, {**CHANGES, **changes, **settings})
        train_team(config, screen=Screen())
        periods.append(_Periods(Run(config)))
    return periods[0], periods[1]


def _ratio(name: str, both: tuple[_Periods, _Periods], *, limit: float | None = None) -> Figure:
    without, overlapping = both
    each = ", ".join(f"{s:.1f}" for s in overlapping.seconds)
    return Figure(
        f"seconds per iteration, max_lag 1 over 0: {name}",
        mean(overlapping.seconds) / mean(without.seconds),
        "x",
        most=limit,
        note=f"{mean(without.seconds):.1f} s without (collect {without.collect_s:.1f}, train {without.train_s:.1f}), "
        f"{mean(overlapping.seconds):.1f} s with ({each}; collect {overlapping.collect_s:.1f}, train {overlapping.train_s:.1f})",
    )


@contextmanager
def _cores_of_their_own() -> Iterator[None]:
    """Keeps trainers on the last core and all other processes below this one on the others, those that start later, too."""
    ended = threading.Event()
    *others, last = cores = psutil.Process().cpu_affinity() or []

    def keep() -> None:
        while not ended.wait(2.0):
            _keep_below(lambda title: [last] if TRAINER in title else others)

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    yield
    ended.set()
    keeper.join()
    _keep_below(lambda _: cores)


def _keep_below(cores_of: Callable[[str], list[int]]) -> None:
    """Gives each process below this one, with all its threads, the cores for its title."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            cores = cores_of(" ".join(process.cmdline()))
            for thread in process.threads():
                if os.sched_getaffinity(thread.id) != set(cores):
                    os.sched_setaffinity(thread.id, cores)
