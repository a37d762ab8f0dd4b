"""collect: a slice of tasks + the served policy versions -> episodes and turns.

Reads: the train tasks; the versions that sample the iteration. Writes: episodes, exactly once.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

from pipelines.episodes.collector import end_collectors
from pipelines.episodes.dynamic_sampling import refill
from pipelines.episodes.from_service import served_group, take_served
from pipelines.episodes.sampling import Pass, sample_episodes
from pipelines.episodes.variants import play_variants
from pipelines.run.iteration import Iteration
from pipelines.run.run import Run
from pipelines.run.serving import serve
from pipelines.stages.table import StageCall
from pipelines.tasks.splits import task_slice
from stores.by_name import open_by_name
from stores.journal.stage_results import Collected
from stores.types import Task


def collect(call: StageCall) -> Collected:
    """Samples the iteration's episodes, or takes the stored ones that it was given."""
    run, iteration, number, progress = call.run, call.iteration, call.iteration.number, call.progress
    if iteration.source is not None:
        adopt_traces = open_by_name("pipelines.extensions.other_runs.from_run:adopt_traces", place="--from-traces")
        return cast(Collected, adopt_traces(run, iteration, iteration.source))
    settings = run.config.collect
    serve(run, iteration.models)
    team_spec = run.team_spec(iteration.models, iteration=number)
    tasks = iteration_tasks(run, iteration)
    num_enough = settings.tasks_per_iteration if settings.may_stop_early else None
    by = Pass.of(run, team_spec, iteration=number)
    sampled = sample_episodes(
        tasks, by, episodes_per_task=settings.episodes_per_task, num_enough=num_enough, progress=progress
    )
    # Each pass pins all that the passes before it pinned, so that the last one's ref is the iteration's.
    passes = [sampled]
    groups = {"wanted": settings.tasks_per_iteration, "planned": len(tasks), "done": len(sampled.groups)}
    if settings.dynamic_sampling is not None:
        refills, counts = refill(run, tasks, sampled, by, progress=progress)
        passes += refills
        groups |= counts
    served = None
    if settings.from_service is not None:
        served = take_served(run, number, team_spec=team_spec, models=iteration.models)
        # A repetition may have taken the served episodes for a group left over.
        left_out = [name for name in passes[-1].traces.excluded_groups if name != served_group(run, number)]
        passes.append(passes[-1].repinned(run.traces.pin_episodes(**by.where, excluded_groups=left_out)))
    if settings.variants is not None:
        passes.append(play_variants(run, passes, by, progress=progress))
    return Collected(
        traces=passes[-1].traces,
        policy_versions=team_spec.policy_versions,
        statuses=dict(sum((Counter(p.statuses) for p in passes), Counter())),
        causes=dict(sum((Counter(p.causes) for p in passes), Counter())),
        num_new=sum(p.num_new for p in passes),
        num_tokens=sum(p.num_tokens for p in passes),
        sampling_seconds=sum(p.sampling_seconds for p in passes),
        groups=groups,
        stopped_by=sampled.stopped_by,
        carried=tuple(sampled.tasks_left) if settings.incomplete_groups == "carry" else (),
        served=served,
    )


def recover(run: Run, model_group: str) -> None:
    """Ends the collectors: see `Stage.recover`."""
    end_collectors()


def iteration_tasks(run: Run, iteration: Iteration) -> list[Task]:
    """The tasks that an iteration begins: those carried over from the one before, then fresh ones, `oversample` in all.

    Raises ValueError where the set is too small, or has lost a task that was carried over.
    """
    settings, tasks, number = run.config.collect, run.tasks("train"), iteration.number
    count = settings.num_tasks_begun
    if count > len(tasks):
        raise ValueError(
            f"collect.tasks_per_iteration = {count} (times oversample) but tasks.train holds {len(tasks)}: lower it"
        )
    fresh = task_slice(tasks, number=number, count=count, seed=str(run.config.seed))
    last = iteration.before[0].find(Collected) if iteration.before else None
    carried_ids = last.carried if last is not None and settings.incomplete_groups == "carry" else ()
    by_id = {task.task_id: task for task in tasks}
    if lost := [task_id for task_id in carried_ids if task_id not in by_id]:
        raise ValueError(f"tasks {lost[:3]} were carried over from iteration {number - 1}, but tasks.train lost them")
    carried = [by_id[task_id] for task_id in carried_ids]
    return [*carried, *(task for task in fresh if task.task_id not in carried_ids)][:count]
