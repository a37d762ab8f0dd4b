"""cpu_threads: cores of this machine, what computes at once, size of the model -> threads of an engine or a training worker.

Engines and trainers take turns, so each gets the cores divided by how many of its kind compute at once; with `loop.max_lag` they compute
side by side, so each gets them divided by how many there are of both. More threads than
cores stall an engine: OpenMP threads that wait for each other spin. Tiny models are not split at all, since handing a
matrix of a hundred columns to another core takes longer than multiplying it.
"""

from __future__ import annotations

import os
from math import prod

from pipelines.run.run import Run
from stores.resources import cpu_quota
from stores.weights.manifest import read_manifest, whole_model

PARAMETERS_PER_THREAD = 20_000_000
"""A model gets at most one thread more than it has this many parameters."""


def engine_threads(run: Run, model_group: str) -> int:
    """Returns the threads of one engine of a model group's app; the engines of all apps sample at once."""
    setting = run.config.serve_config(model_group).threads
    return _threads(run, model_group, setting, _num_engines(run), _num_workers(run, model_group))


def trainer_threads(run: Run, model_group: str) -> int:
    """Returns the torch threads of one training worker of a model group; all groups train at once, unless the team does."""
    setting = run.config.train_config(model_group).threads
    return _threads(run, model_group, setting, _num_workers(run, model_group), _num_engines(run))


def _threads(run: Run, model_group: str, setting: int | str, num_alike: int, num_others: int) -> int:
    if isinstance(setting, int):
        return setting
    num_at_once = num_alike + (num_others if run.config.loop.max_lag else 0)
    return threads_of(num_parameters(run, model_group), num_at_once=num_at_once, num_cores=usable_cores())


def _num_engines(run: Run) -> int:
    first_of = {run.config.weights_name(group): group for group in run.config.model_groups}
    return sum(run.config.serve_config(group).num_replicas for group in first_of.values())


def _num_workers(run: Run, model_group: str) -> int:
    """Returns the training workers that compute at once: those of all model groups, unless the team trains one by one."""
    groups = [model_group] if run.config.team_config is not None else list(run.config.model_groups)
    return sum(run.config.train_config(group).num_workers for group in groups)


def threads_of(num_parameters: int, *, num_at_once: int, num_cores: int) -> int:
    """Returns how many threads one of `num_at_once` processes gets on `num_cores` cores, at least 1."""
    return max(1, min(num_cores // num_at_once, 1 + num_parameters // PARAMETERS_PER_THREAD))


def num_parameters(run: Run, model_group: str) -> int:
    """Returns the number of parameters of a model group's version 0, its base included."""
    ref = run.weights.ref(model_group, 0)
    assert ref is not None, "version 0 is there before anything is served or trained"
    return sum(prod(shape) for _, shape in read_manifest(whole_model(ref)).tensors.values())


def usable_cores() -> int:
    """Returns how many cores this process may use: of its affinity, its cgroup's quota and OMP_NUM_THREADS the fewest.

    A process that Ray started as a job has OMP_NUM_THREADS=1 from Ray, unless somebody set it before.
    """
    cores = [float(len(os.sched_getaffinity(0)))]
    cores += [quota for quota in (cpu_quota(),) if quota]
    cores += [float(part) for part in (os.environ.get("OMP_NUM_THREADS", "").split(",")[0],) if part.isdigit()]
    return max(1, int(min(cores)))
