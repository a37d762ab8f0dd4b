"""placement: rules about when and where the stages of a run run."""

from __future__ import annotations

from pathlib import Path

from pipelines.config.run_sections import RunSections


def new_tasks_can_be_seen(config: RunSections) -> None:
    """What triggers an iteration can be checked: on a schedule, in a file."""
    schedule = config.schedule
    if schedule is None or not (schedule.on_new_tasks or schedule.min_fresh_traces):
        return
    if not (schedule.cron or schedule.on_assets):
        key = "on_new_tasks" if schedule.on_new_tasks else "min_fresh_traces"
        raise ValueError(f"schedule.{key} needs schedule.cron, which says how often to look (or on_assets)")
    if schedule.on_new_tasks and not config.tasks.train.path:
        raise ValueError(
            "schedule.on_new_tasks needs tasks.train.path: what a generator gives never changes; drop it or name a file"
        )


def shared_gpus_have_room_for_both(config: RunSections) -> None:
    """Where engines and trainers share a GPU, Ray can place each of them on it."""
    if config.pool == "separate":
        return
    for group in config.model_groups:
        serve, train = config.serve_config(group), config.train_config(group)
        place = f"pool: shared, model group {group!r}"
        if bool(serve.gpus) != bool(train.gpus_per_worker):
            raise ValueError(
                f"{place}: serve.gpus = {serve.gpus:g} and train.gpus_per_worker = {train.gpus_per_worker:g} share no GPU: give "
                "both a share of one, e.g. 0.5 each, or drop pool"
            )
        if serve.gpus >= 1 or train.gpus_per_worker >= 1:
            raise ValueError(
                f"{place}: Ray gives nobody else a part of a GPU that serve.gpus = {serve.gpus:g} or train.gpus_per_worker = "
                f"{train.gpus_per_worker:g} reserves whole: give shares that add up to 1, e.g. 0.5 each"
            )
        for key, value in (
            ("serve.num_replicas", serve.num_replicas),
            ("serve.tensor_parallel_size", serve.tensor_parallel_size),
            ("train.num_workers", train.num_workers),
        ):
            if value > 1:
                raise ValueError(
                    f"{place}: {key} = {value}, but what is shared is one GPU, and Ray may put two workers of NCCL on the same: "
                    "set it to 1, or give engines and trainers GPUs of their own (pool: separate)"
                )


def uploaded_runs_are_stored_elsewhere(config: RunSections) -> None:
    """A run whose working directory is a copy stores its results outside of it."""
    root = config.storage.root
    if config.cluster.working_dir and "://" not in root and not Path(root).is_absolute():
        raise ValueError(
            f"storage.root = {root!r} is relative, and cluster.working_dir is a copy that ends with the job: "
            "give storage.root as an absolute path or URI that every machine of the cluster sees"
        )
