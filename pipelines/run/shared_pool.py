"""shared_pool: stage train of a run with `pool: shared` -> its engines asleep meanwhile, awake afterwards.

    engines sleep ──> the trainer loads its state, trains, commits, leaves the GPU ──> engines wake ──> sync

Whoever begins train may be killed at any moment. The trainer ends its job without it and leaves the GPU by itself; the
engines then wake at the next stage that asks them for something (`serving.serve`), or at the deadline of stage train.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.run.run import Run


@contextmanager
def gpus_for_training(run: Run, model_group: str = "") -> Iterator[None]:
    """Keeps the run's engines asleep inside, where they share GPUs with the trainers; else it does nothing.

    All of them sleep, because Ray may have placed the trainer beside any of them. After a failure they are told to wake, but
    nothing waits for it: a trainer that is still at work, as after Ctrl-C, keeps its GPU until its job ends.

    Args: model_group: the one that is trained; empty: all of them.

    Raises TimeoutError where an engine does not fall asleep, or does not wake because its GPU has no room.
    """
    if run.config.pool == "separate":
        yield
        return
    from pipelines.run.serving import app_names  # imports ray.serve, which stage train needs for nothing else
    from serve_apps.policy.sleeping_apps import put_to_sleep, wake_apps

    groups = [model_group] if model_group else list(run.config.model_groups)
    train_s = sum(run.config.train_config(group).stage_timeout_s for group in groups)
    wait_s = max(run.config.serve_config(group).start_timeout_s for group in run.config.model_groups)
    apps = list(app_names(run).values())
    try:
        put_to_sleep(apps, until=time.time() + train_s, timeout_s=wait_s)
        yield
    except BaseException:
        wake_apps(apps, timeout_s=0)
        raise
    wake_apps(apps, timeout_s=wait_s)
