"""score: pinned traces -> rewards per turn, by credit version.

Reads: the iteration's traces. Writes: one reward row per episode that counts. It can be repeated at any time.
"""

from __future__ import annotations

from pipelines.run.run import Run
from pipelines.run.scoring import assign_credit, mean, per_agent, refuse_hopeless, scored_statuses
from stores.stage_results import Scored


def score(run: Run, iteration: int) -> Scored:
    """Scores the episodes of `collect`; NotDone where that is not done, ValueError where nothing could ever be trained."""
    collected = run.iteration(iteration, needed_by="score").collected
    ref = collected.traces
    statuses = scored_statuses(run)
    traces = list(run.traces.read_traces(ref, statuses=statuses))
    rewards = assign_credit(run, traces, statuses=statuses)
    refuse_hopeless(run, iteration, collected, traces, rewards)
    run.traces.write_rewards(rewards)
    pinned = run.traces.pin_rewards(
        run_id=ref.run_id,  # of the traces: another run's, where they are taken over from it
        iteration=ref.iteration,
        purpose=ref.purpose,
        credit_version=run.credit_version,
        traces=ref,
        statuses=statuses,
    )
    # Variants are played with one turn changed: they serve as baselines and would distort the figures.
    variants = {trace.episode_id for trace in traces if trace.variant}
    sampled_rewards = [reward for reward in rewards if reward.episode_id not in variants]
    return Scored(
        rewards=pinned,
        credit_version=run.credit_version,
        outcome=mean([reward.outcome for reward in sampled_rewards]),
        agents=per_agent([trace for trace in traces if not trace.variant], sampled_rewards),
    )
