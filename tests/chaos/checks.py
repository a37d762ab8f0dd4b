"""checks: the stores before a kill and after -> what was lost, doubled or changed. Logs are not asked.

kill ── look(run, k) ── ... recovered, iteration k done ... ── faults(run, k, look) -> {check: fault, or ""}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pipelines.run.run import Run
from stores.journal.journal import DONE, StageRow
from stores.journal.stage_results import Collected
from stores.types import Trace

LIMIT = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was finished at one moment: nothing of it may change any more."""

    done: Mapping[str, StageRow]
    """Finished stages of the run."""
    episodes: Mapping[str, str]
    """Content hash by id of the iteration's stored episodes; failed ones may be played again."""


def look(run: Run, iteration: int) -> Look:
    """The run as it is now."""
    rows = {str(row.key): row for row in run.journal.stages(run.run_id) if row.status == DONE}
    traces = run.traces.find_traces(run_id=run.run_id, iteration=iteration, limit=LIMIT)
    return Look(done=rows, episodes={t.episode_id: content(t) for t in traces if t.is_outcome})


def has_episodes(run: Run, iteration: int) -> bool:
    """Whether anything of the iteration is stored yet."""
    return bool(run.traces.find_traces(run_id=run.run_id, iteration=iteration, limit=1))


def content(trace: Trace) -> str:
    """Hash of everything that a trace holds."""
    return sha256(repr(trace).encode()).hexdigest()


def faults(
    run: Run, iteration: int, before: Look, *, served: Mapping[str, Sequence[int]], keys: Sequence[str] | None
) -> dict[str, str]:
    """By check, what is wrong with a finished iteration; empty strings where nothing is.

    Args:
        before: the look taken when something was killed in this iteration.
        served: what every replica says it serves, by model group, after the iteration.
        keys: episode keys of `collect` in the undisturbed run, if it went as far.
    """
    traces = run.traces.find_traces(run_id=run.run_id, iteration=iteration, limit=LIMIT)
    rows = {str(row.key): row for row in run.journal.stages(run.run_id)}
    return {
        "episodes kept": _kept(before, traces),
        "no episode twice": _twice(traces) or _count(run, iteration),
        "refs unchanged": _changed(before, rows),
        "served versions": _served(run, iteration, served),
        "steps go on": _steps(run, iteration),
        "same episodes as undisturbed": _same_keys(run, iteration, keys),
    }


def collected(run: Run, iteration: int) -> list[str]:
    """Episode keys that `collect` pinned."""
    result = run.iteration(iteration).find(Collected)
    if result is None:
        return []
    return sorted(trace.episode_id for trace in run.traces.read_traces(result.traces))


def _kept(before: Look, traces: Sequence[Trace]) -> str:
    now = {trace.episode_id: content(trace) for trace in traces}
    lost = before.episodes.keys() - now.keys()
    changed = [name for name, digest in before.episodes.items() if name in now and now[name] != digest]
    if lost:
        return f"{len(lost)} of {len(before.episodes)} finished episodes are gone, e.g. {min(lost)}"
    return f"{len(changed)} finished episodes have another content, e.g. {min(changed)}" if changed else ""


def _twice(traces: Sequence[Trace]) -> str:
    twice = {name: n for name, n in Counter(trace.episode_id for trace in traces).items() if n > 1}
    places = {p: n for p, n in Counter(map(_place, traces)).items() if n > 1}
    if twice:
        return f"{len(twice)} episode ids are stored more than once, e.g. {min(twice)}"
    return f"{len(places)} episodes were played again under another id, e.g. {min(places)}" if places else ""


def _place(trace: Trace) -> tuple[str, str, str, int, str]:
    return trace.purpose.value, trace.team_key, trace.task.task_id, trace.episode_index, trace.variant


def _count(run: Run, iteration: int) -> str:
    settings = run.config.collect
    wanted, found = settings.tasks_per_iteration * settings.episodes_per_task, len(set(collected(run, iteration)))
    return "" if found == wanted else f"collect pinned {found} episodes, not {wanted}"


def _changed(before: Look, rows: Mapping[str, StageRow]) -> str:
    changed = [name for name, row in before.done.items() if rows.get(name) != row]
    return f"done before the kill and changed since: {', '.join(changed)}" if changed else ""


def _served(run: Run, iteration: int, served: Mapping[str, Sequence[int]]) -> str:
    wanted = {group: ref.version for group, ref in run.trained(iteration).items()}
    wrong = {group: list(served.get(group, [])) for group, v in wanted.items() if set(served.get(group, [])) != {v}}
    return f"the journal says {wanted}, the replicas serve {wrong}" if wrong else ""


def _steps(run: Run, iteration: int) -> str:
    """Parents follow each other, and the optimizer has done exactly the order's steps since the parent's checkpoint."""
    parents = run.parents(iteration)
    for group, model in run.trained(iteration).items():
        manifest, parent = run.weights.manifest(model), parents[group]
        if model.version == parent.version:
            continue
        run.weights.verify(model)
        if (model.version, manifest.parent) != (iteration, parent.version):
            return f"{group} v{model.version} of iteration {iteration} comes from v{manifest.parent}, not v{parent.version}"
        old, new = num_steps(run.weights.manifest(parent).checkpoint), num_steps(manifest.checkpoint)
        metrics = run.iteration(iteration).trained[group].metrics
        done = metrics["train/steps"] - metrics.get("train/skipped_steps", 0.0)
        if new != old + done:
            return f"{group}: optimizer at step {new:g} after {done:g} steps from step {old:g}"
    return ""


def num_steps(checkpoint: str) -> int:
    """Optimizer steps of a checkpoint's policy; 0 for a version without one."""
    return json.loads((Path(checkpoint) / "policy.json").read_text())["num_steps"] if checkpoint else 0


def _same_keys(run: Run, iteration: int, keys: Sequence[str] | None) -> str:
    if keys is None:
        return ""
    mine = collected(run, iteration)
    return "" if mine == list(keys) else f"{len(set(mine) ^ set(keys))} episode keys differ from the undisturbed run's"


def running(run: Run, stage: str, iteration: int) -> StageRow | None:
    """The stage's row while it runs."""
    rows = run.journal.stages(run.run_id, iteration)
    return next((row for row in rows if row.stage == stage and row.status == "running"), None)


def is_done(run: Run, stage: str, iteration: int) -> bool:
    """Whether the stage is done, for all model groups."""
    rows = [row for row in run.journal.stages(run.run_id, iteration) if row.stage == stage and row.status == DONE]
    return len(rows) == (len(run.config.model_groups) if stage == "train" else 1)
