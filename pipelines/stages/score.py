"""score: pinned traces -> rewards per turn, by credit version.

Reads: the iteration's traces. Writes: one reward row per episode that counts. Recomputable at any time.
"""

from __future__ import annotations

from typing import Any

from pipelines.credit.rule import SCORED_STATUSES, score_traces
from pipelines.run.run import Run, plain
from serve_apps.program.conversations import CONVERSATIONS
from stores.types import EpisodeRewards, EpisodeStatus, Trace, TracesRef


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


def scored_statuses(run: Run) -> tuple[EpisodeStatus, ...]:
    """Which episodes are paid: those that count in any case, and what some model group's `train_statuses` adds."""
    groups = [run.config.train_config(group) for group in run.config.model_groups]
    trained = {EpisodeStatus(status) for train in groups for status in train.train_statuses}
    return tuple(status for status in EpisodeStatus if status in SCORED_STATUSES or status in trained)


def assign(
    run: Run, traces: list[Trace], *, statuses: tuple[EpisodeStatus, ...] = SCORED_STATUSES
) -> list[EpisodeRewards]:
    """The credit of traces under the run's rule, checked: every reward belongs to a turn that happened."""
    return score_traces(run.credit, traces, version=run.credit_version, statuses=statuses)


def per_agent(traces: list[Trace], rewards: list[EpisodeRewards]) -> dict[str, dict[str, float]]:
    """Mean reward, share of well-formed turns, calls and completion length of every agent."""
    paid: dict[str, list[float]] = {}
    for episode in rewards:
        for reward in episode.rewards:
            paid.setdefault(reward.agent, []).append(reward.reward)
    turns = [turn for trace in traces for turn in trace.turns]
    return {
        agent: {
            "reward": _mean(paid.get(agent, [])),
            "format_share": _mean([float(t.is_format_ok) for t in turns if t.agent == agent]),
            "calls": float(sum(t.agent == agent for t in turns)),
            "completion_tokens": _mean([float(len(t.completion_token_ids)) for t in turns if t.agent == agent]),
            **_growth(traces, agent),
        }
        for agent in sorted({turn.agent for turn in turns})
    }


def _growth(traces: list[Trace], agent: str) -> dict[str, float]:
    """Of an agent that a program calls: share of the calls that continue a conversation and do not continue its tokens."""
    found = [trace.outcome_metadata.get(CONVERSATIONS, {}).get(agent, {}) for trace in traces]
    broken, grown = (sum(counts.get(kind, 0) for counts in found) for kind in ("broken", "grown"))
    return {"broken_share": broken / (broken + grown)} if broken + grown else {}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
