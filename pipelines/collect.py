"""collect: a slice of tasks + the served policy versions -> episodes and turns.

Reads: the train tasks; the versions that the iteration before left. Writes: episodes, exactly once.
"""

from __future__ import annotations

import random
from typing import Any

from pipelines.run import Run, plain
from pipelines.sampling import Progress, sample_episodes
from pipelines.serving import app_names, serve
from stores.types import Purpose, Task


def collect(run: Run, iteration: int, *, progress: Progress | None = None) -> dict[str, Any]:
    """Samples the iteration's episodes with the versions it trains from.

    Returns {"traces": TracesRef, "policy_versions", "statuses", "num_tokens", "sampling_seconds"}.
    """
    settings = run.config.collect
    models = run.parents(iteration)
    serve(run, models)
    cast = run.cast(models)
    sampled = sample_episodes(
        task_slice(run.tasks("train"), iteration=iteration, count=settings.tasks_per_iteration, seed=run.config.seed),
        run_id=run.run_id,
        iteration=iteration,
        purpose=Purpose.TRAIN,
        cast=cast,
        apps=app_names(run),
        store=run.traces,
        config=settings,
        episodes_per_task=settings.episodes_per_task,
        seed=run.config.seed,
        progress=progress,
    )
    return {
        "traces": plain(sampled.traces),
        "policy_versions": cast.policy_versions,
        "statuses": dict(sampled.statuses),
        "num_new": sampled.num_new,
        "num_tokens": sampled.num_tokens,
        "sampling_seconds": sampled.sampling_seconds,
    }


def task_slice(tasks: list[Task], *, iteration: int, count: int, seed: int) -> list[Task]:
    """The tasks of one iteration: each pass over the set is a new seeded order, no task twice within a slice.

    Raises ValueError where the set is smaller than a slice.
    """
    if count > len(tasks):
        raise ValueError(f"collect.tasks_per_iteration = {count} but tasks.train holds {len(tasks)}: lower it")
    per_pass = len(tasks) // count
    number, place = divmod(iteration - 1, per_pass)
    order = list(tasks)
    random.Random(f"{seed}/{number}").shuffle(order)
    return order[place * count : (place + 1) * count]
