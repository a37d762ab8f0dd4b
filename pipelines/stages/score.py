"""score: pinned traces -> rewards per turn, by credit version.

Reads: the iteration's traces. Writes: one reward row per episode that is an outcome of the policy; those that the
infrastructure or the workflow's author caused to fail have none. It can be repeated at any time.
"""

from __future__ import annotations

from pipelines.run.run import Run
from pipelines.run.scoring import (
    assign_credit,
    author_faults,
    counts_by_cause,
    mean,
    per_agent,
    refuse_hopeless,
)
from stores.stage_results import Scored
from stores.types import COUNTED


def score(run: Run, iteration: int) -> Scored:
    """Scores the episodes of `collect` that are outcomes of the policy.

    Raises NotDone where that is not done, ValueError where nothing could ever be trained.
    """
    collected = run.iteration(iteration, needed_by="score").collected
    ref = collected.traces
    every = list(run.traces.read_traces(ref))
    authors = author_faults(every)
    traces = [trace for trace in every if trace.is_outcome and trace.episode_id not in authors]
    rewards = assign_credit(run, traces)
    refuse_hopeless(run, iteration, collected, traces, rewards)
    run.traces.write_rewards(rewards)
    pinned = run.traces.pin_rewards(
        run_id=ref.run_id,  # of the traces: another run's, where they are taken over from it
        iteration=ref.iteration,
        purpose=ref.purpose,
        credit_version=run.credit_version,
        traces=ref,
        causes=COUNTED,
        unscored=authors,
    )
    # Variants are played with one turn changed: they serve as baselines and would distort the figures.
    variants = {trace.episode_id for trace in traces if trace.variant}
    sampled_rewards = [reward for reward in rewards if reward.episode_id not in variants]
    return Scored(
        rewards=pinned,
        credit_version=run.credit_version,
        outcome=mean([reward.outcome for reward in sampled_rewards]),
        causes=counts_by_cause(every, authors=authors),
        agents=per_agent([trace for trace in traces if not trace.variant], sampled_rewards),
    )
