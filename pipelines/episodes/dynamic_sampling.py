"""dynamic_sampling: groups in which all rewards are equal -> other tasks' groups in their place (DAPO, arXiv 2503.14476).

Which groups have no signal is decided by the run's own credit rule over what is stored, so that a repetition comes to the
same end. Their episodes stay stored, but the iteration's ref excludes them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.episodes.groups import busy_seconds
from pipelines.episodes.sampling import Pass, Progress, Sampled, sample_episodes
from pipelines.run.run import Run
from pipelines.run.scoring import assign_credit, author_faults
from stores.types import EpisodeRewards, Task, Trace, TracesRef
from train_loops.advantages.grouping import are_equal

SHARE_OF_TIME = 0.5
"""Share of the stage's deadline after which no pass begins."""


def refill(
    run: Run,
    tasks: Sequence[Task],
    first: Sampled,
    sampling_pass: Pass,
    *,
    progress: Progress | None = None,
) -> tuple[list[Sampled], dict[str, int]]:
    """Plays as many other tasks as there are groups without signal, repeatedly, up to `max_refills`, time and token budget.

    Returns the passes after the first one, of which the last ref leaves groups without signal out, and the numbers of `done`,
    `refilled` and `without_signal` groups and of `refills`.
    """
    settings = run.config.collect
    assert settings.dynamic_sampling is not None, "collect: only where it is asked for"
    used = {task.task_id for task in tasks}
    left = [task for task in run.tasks("train") if task.task_id not in used]
    random.Random(f"refill/{run.config.seed}/{sampling_pass.iteration}").shuffle(left)
    passes: list[Sampled] = []
    good, empty = _by_signal(run, first.traces)
    while len(good) < settings.tasks_per_iteration and left and len(passes) < settings.dynamic_sampling.max_refills:
        spent = [first, *passes]
        is_late = sum(p.seconds for p in spent) > SHARE_OF_TIME * settings.stage_timeout_s
        if is_late or _is_spent(sampling_pass, spent):
            break
        num_missing = settings.tasks_per_iteration - len(good)
        chosen, left = left[:num_missing], left[num_missing:]
        passes.append(
            sample_episodes(chosen, sampling_pass, episodes_per_task=settings.episodes_per_task, progress=progress)
        )
        with_signal, without_signal = _by_signal(run, passes[-1].traces)
        good, empty = good | with_signal, empty | without_signal
    counts = {
        "done": len(good),
        "without_signal": len(empty),
        "refills": len(passes),
        "refilled": sum(len(p.groups) for p in passes),
    }
    final = [first, *passes][-1].repinned(sampling_pass.pin(good))
    return [*passes, final], counts


def groups_without_signal(traces: Sequence[Trace], rewards: Sequence[EpisodeRewards]) -> set[str]:
    """Groups in which no agent's turns earned differently; episodes that are not paid do not count."""
    earned: dict[str, dict[str, list[float]]] = {trace.group_id: {} for trace in traces if not trace.variant}
    group_of = {trace.episode_id: trace.group_id for trace in traces if not trace.variant}
    for episode in rewards:
        for reward in episode.rewards if episode.episode_id in group_of else ():
            earned[group_of[episode.episode_id]].setdefault(reward.agent, []).append(reward.reward)
    return {group for group, by_agent in earned.items() if all(map(are_equal, by_agent.values()))}


def _is_spent(sampling_pass: Pass, passes: Sequence[Sampled]) -> bool:
    """Whether these passes, with what interrupted ones had stored, have used up the budget; other episodes do not count."""
    budget = sampling_pass.config.budget
    if budget.tokens is None and budget.seconds is None:
        return False
    groups = sorted({group for sampled in passes for group in sampled.groups})
    stored = sampling_pass.store.stored_episodes(**sampling_pass.where, with_tokens=True)
    stored = stored.filter(pc.is_in(stored["group_id"], pa.array(groups, stored["group_id"].type)))
    tokens, seconds = sum(stored["num_tokens"].to_pylist()), busy_seconds(stored)
    return (budget.tokens is not None and tokens >= budget.tokens) or (
        budget.seconds is not None and seconds >= budget.seconds
    )


def _by_signal(run: Run, ref: TracesRef) -> tuple[set[str], set[str]]:
    """Pinned groups with and without signal."""
    traces = list(run.traces.read_traces(ref))
    authors = author_faults(traces)
    scored = [t for t in traces if t.is_outcome and t.episode_id not in authors and not t.variant]
    empty = groups_without_signal(traces, assign_credit(run, scored))
    every = {trace.group_id for trace in traces if not trace.variant}
    return every - empty, empty & every
