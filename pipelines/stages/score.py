"""score: pinned traces -> rewards per turn, by credit version.

Reads: the iteration's traces. Writes: one reward row per episode that is an outcome of the policy; those that the
infrastructure or the workflow's author caused to fail have none. Where credit is inferred, the traces and rewards of earlier
iterations are read, too; where costs are counted, rewards are charged with them. It can be repeated at any time.
Rewards that depend on more than their episode are stored under a credit version that names run and iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from pipelines.config.sections import CostConfig
from pipelines.credit.cost import charge, mean_cost, next_multiplier
from pipelines.credit.rule import InferringRule, PastEpisode, caller_score, caps_failed
from pipelines.figures.registry import FIGURES, figures_of
from pipelines.run.iteration import Iteration
from pipelines.run.run import Run
from pipelines.run.scoring import (
    assign_credit,
    author_faults,
    counts_by_cause,
    per_agent,
    refuse_hopeless,
    solved_share,
    stop_reasons,
)
from pipelines.stages.table import StageCall
from stores.journal.stage_results import Collected, Scored
from stores.types import COUNTED, EpisodeRewards, Trace


def score(call: StageCall) -> Scored:
    """Scores the episodes of `collect` that are outcomes of the policy.

    Raises NotDone where that is not done, ValueError where nothing could ever be trained.
    """
    run, iteration = call.run, call.iteration
    collected = iteration.collected
    ref = collected.traces
    every = list(run.traces.read_traces(ref))
    authors = author_faults(every)
    traces = [trace for trace in every if trace.is_outcome and trace.episode_id not in authors]
    rewards = assign_credit(run, traces)
    sampled = [trace for trace in traces if not trace.variant]
    inferred = None
    if isinstance(run.credit, InferringRule):
        inferred = run.credit.infer(rewards, traces, _past(run, iteration.before[: run.credit.past_iterations]))
        rewards = inferred.rewards
    limit, cost = run.config.cost, None
    if limit is not None:
        cost = _cost(iteration, limit, sampled)
        rewards = charge(
            rewards,
            traces,
            limit,
            multiplier=cost["multiplier"],
            mean=cost.get("mean", limit.at_most),
            caps_failed=caps_failed(run.credit),
        )
    refuse_hopeless(run, iteration.number, collected, traces, rewards)
    version = run.scored_version(iteration.number)
    run.traces.write_rewards([replace(reward, credit_version=version) for reward in rewards])
    pinned = run.traces.pin_rewards(
        run_id=ref.run_id,  # of the traces: another run's, where they are taken over from it
        iteration=ref.iteration,
        purpose=ref.purpose,
        credit_version=version,
        traces=ref,
        causes=COUNTED,
        unscored=authors,
        by_run=run.run_id,
    )
    # Variants are played with one turn changed: they serve as baselines and would distort the figures. So would production episodes, of
    # other tasks than the run's, chosen by who gave feedback.
    own = [trace for trace in sampled if caller_score(trace) is None]
    own_ids = {trace.episode_id for trace in own}
    own_rewards = [reward for reward in rewards if reward.episode_id in own_ids]
    return Scored(
        rewards=pinned,
        credit_version=run.credit_version,
        outcome=fmean(reward.outcome for reward in own_rewards) if own_rewards else None,
        causes=counts_by_cause(every, authors=authors),
        agents=per_agent(own, own_rewards),
        cost=cost,
        credit_fidelity=None if inferred is None else inferred.fidelity,
        is_credit_inferred=None if inferred is None else inferred.is_used,
        figures=_own_figures(run, own, own_rewards),
        solved=solved_share(own_rewards),
        stop_reasons=stop_reasons(own) if own else None,
    )


def _own_figures(run: Run, traces: Sequence[Trace], rewards: Sequence[EpisodeRewards]) -> dict[str, float] | None:
    """Returns the means of the figures that `evaluate.figures` adds; None where it adds none."""
    own = {name: figure for name, figure in run.figures.items() if name not in FIGURES}
    if not own:
        return None
    paid = {reward.episode_id: reward for reward in rewards}
    found = [figures_of(trace, paid.get(trace.episode_id), figures=own) for trace in traces]
    values = {name: [of[name] for of in found if name in of] for name in own}
    return {name: fmean(numbers) for name, numbers in values.items() if numbers}


def _past(run: Run, before: Sequence[Iteration]) -> list[PastEpisode]:
    """Returns the scored episodes of these iterations, the oldest first."""
    episodes = []
    for earlier in reversed(before):
        collected, scored = earlier.find(Collected), earlier.find(Scored)
        if collected is None or scored is None:
            continue
        outcomes = {reward.episode_id: reward.outcome for reward in run.traces.read_rewards(scored.rewards)}
        traces = run.traces.read_traces(collected.traces, causes=COUNTED)
        episodes += [PastEpisode(trace=t, outcome=outcomes[t.episode_id]) for t in traces if t.episode_id in outcomes]
    return episodes


def _cost(iteration: Iteration, config: CostConfig, traces: Sequence[Trace]) -> dict[str, float]:
    """Returns `Scored.cost`; the multiplier is what the last iteration that was scored left."""
    last = next((scored for earlier in iteration.before if (scored := earlier.find(Scored)) is not None), None)
    multiplier = config.initial if last is None or not last.cost else last.cost["next_multiplier"]
    mean = mean_cost(traces, config)
    if mean is None:
        return {"multiplier": multiplier, "next_multiplier": multiplier}
    return {"mean": mean, "multiplier": multiplier, "next_multiplier": next_multiplier(multiplier, mean, config)}
