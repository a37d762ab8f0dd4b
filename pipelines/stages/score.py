"""score: pinned traces -> rewards per turn, by credit version.

Reads: the iteration's traces. Writes: one reward row per episode that counts. Recomputable at any time.
"""

from __future__ import annotations

from typing import Any

from pipelines.run.run import Run, plain
from pipelines.run.scoring import _mean, assign, per_agent, scored_statuses
from stores.types import TracesRef


def score(run: Run, iteration: int) -> dict[str, Any]:
    """Scores the episodes of `collect`; returns {"rewards": RewardsRef, "credit_version", "agents", "outcome"}."""
    collected = run.journal.ref(run.key(iteration, "collect"))
    if collected is None:
        raise ValueError(f"stage score of iteration {iteration} needs its collect, which is not done: run that first")
    ref = TracesRef(**collected["traces"])
    statuses = scored_statuses(run)
    traces = list(run.traces.read_traces(ref, statuses=statuses))
    rewards = assign(run, traces, statuses=statuses)
    variants = {trace.episode_id for trace in traces if trace.variant}
    run.traces.write_rewards(rewards)
    pinned = run.traces.pin_rewards(
        run_id=ref.run_id,  # of the traces: another run's, where they are taken over from it
        iteration=ref.iteration,
        purpose=ref.purpose,
        credit_version=run.credit_version,
        traces=ref,
        statuses=statuses,
    )
    return {
        "rewards": plain(pinned),
        "credit_version": run.credit_version,
        "outcome": _mean([r.outcome for r in rewards if r.episode_id not in variants]),
        "agents": per_agent(
            [trace for trace in traces if not trace.variant], [r for r in rewards if r.episode_id not in variants]
        ),
    }
