"""scoring: traces -> rewards under the run's credit rule, and the mean figures of every agent."""

from __future__ import annotations

from pipelines.credit.rule import SCORED_STATUSES, score_traces
from pipelines.run.run import Run
from serve_apps.program.conversations import CONVERSATIONS
from stores.types import EpisodeRewards, EpisodeStatus, Trace


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
