"""variants: stored episodes -> more of them, with one thing changed: the baselines of remax, counterfactual and leave_one_out.

Which turn of which episode is changed is drawn by the run's seed, so that a repetition plays the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from pipelines.episodes.sampling import Pass, Progress, Sampled, play_specs
from pipelines.run.run import Run
from serve_apps.episode_spec import EpisodeSpec, Script
from stores.types import SOUND, Trace


def play_variants(
    run: Run, passes: Sequence[Sampled], sampling_pass: Pass, *, progress: Progress | None = None
) -> Sampled:
    """Plays the variants of what was sampled and pins both; the ref of the last of `passes` names the sampled episodes."""
    settings = run.config.collect.variants
    assert settings is not None, "collect: only where variants are asked for"
    traces = [trace for trace in run.traces.read_traces(passes[-1].traces) if not trace.variant]
    scripts = choose_variants(
        traces,
        kind=settings.kind,
        per_task=settings.per_task,
        siblings=settings.siblings,
        seed=f"{run.config.seed}/{sampling_pass.iteration}",
    )
    specs = [
        EpisodeSpec(
            **sampling_pass.where,
            task=trace.task,
            episode_index=trace.episode_index,
            run_seed=run.config.seed,
            script=script,
        )
        for trace, script in scripts
    ]
    groups = {trace.group_id for trace in traces}
    return play_specs(specs, sampling_pass, kept_groups=groups, progress=progress)


def choose_variants(
    traces: Sequence[Trace], *, kind: str, per_task: int, siblings: int, seed: str
) -> list[tuple[Trace, Script]]:
    """Draws `per_task` episodes per task and what is changed in each, fewer where there are no more; by id of the task.

    Each change is played `siblings` times.

    Turns are drawn without replacement among those of episodes that came to an end; each agent's turn before any agent's
    second one, so that every agent has a baseline as soon as there are as many variants as agents.
    """
    by_task: dict[str, list[Trace]] = {}
    for trace in sorted(traces, key=lambda t: (t.task.task_id, t.episode_index)):
        by_task.setdefault(trace.task.task_id, []).append(trace)
    chosen: list[tuple[Trace, Script]] = []
    for task_id, episodes in by_task.items():
        if kind == "greedy":
            chosen.append((episodes[0], Script(kind="greedy")))
            continue
        drawn = random.Random(f"variants/{seed}/{task_id}")
        for trace, agent in _turns(episodes, drawn)[:per_task]:
            changed = _changed(trace, agent, kind, drawn)
            chosen += [(trace, replace(changed, sibling=i)) for i in range(siblings)]
    return chosen


def _turns(episodes: Sequence[Trace], drawn: random.Random) -> list[tuple[Trace, str]]:
    """Episodes and one of their agents each, shuffled, agents in turns."""
    pairs = [(t, agent) for t in episodes if t.status in SOUND for agent in {u.agent: None for u in t.turns}]
    drawn.shuffle(pairs)
    rank: dict[str, int] = {}
    ranked = []
    for trace, agent in pairs:
        rank[agent] = rank.get(agent, 0) + 1
        ranked.append((rank[agent], trace, agent))
    return [(trace, agent) for _, trace, agent in sorted(ranked, key=lambda entry: entry[0])]


def _changed(trace: Trace, agent: str, kind: str, drawn: random.Random) -> Script:
    turns = [turn.turn_index for turn in trace.turns if turn.agent == agent]
    if kind == "counterfactual":
        return Script(kind="counterfactual", agent=agent, base=trace, changed_at=drawn.choice(turns))
    return Script(kind="without", agent=agent, base=trace, changed_at=turns[0])
