"""scoring: traces -> rewards under the run's credit rule, and the mean figures of every agent."""

from __future__ import annotations

from pipelines.credit.rule import SCORED_STATUSES, score_traces
from pipelines.run.run import Run
from serve_apps.program.conversations import CONVERSATIONS
from stores.types import EpisodeRewards, EpisodeStatus, Trace


def scored_statuses(run: Run) -> tuple[EpisodeStatus, ...]:
    """Statuses of episodes that get a reward: those that always count, and what a model group's `train_statuses` adds."""
    groups = [run.config.train_config(group) for group in run.config.model_groups]
    trained = {EpisodeStatus(status) for train in groups for status in train.train_statuses}
    return tuple(status for status in EpisodeStatus if status in SCORED_STATUSES or status in trained)


def assign_credit(
    run: Run, traces: list[Trace], *, statuses: tuple[EpisodeStatus, ...] = SCORED_STATUSES
) -> list[EpisodeRewards]:
    """Credits traces by the run's rule and checks that every reward belongs to a turn that happened."""
    return score_traces(run.credit, traces, version=run.credit_version, statuses=statuses)


def per_agent(traces: list[Trace], rewards: list[EpisodeRewards]) -> dict[str, dict[str, float]]:
    """Mean reward, share of well-formed turns, calls and completion length of every agent."""
    earned: dict[str, list[float]] = {}
    for episode in rewards:
        for reward in episode.rewards:
            earned.setdefault(reward.agent, []).append(reward.reward)
    turns = [turn for trace in traces for turn in trace.turns]
    return {
        agent: {
            "reward": mean(earned.get(agent, [])),
            "format_share": mean([float(t.is_format_ok) for t in turns if t.agent == agent]),
            "calls": float(sum(t.agent == agent for t in turns)),
            "completion_tokens": mean([float(len(t.completion_token_ids)) for t in turns if t.agent == agent]),
            **_broken_share(traces, agent),
        }
        for agent in sorted({turn.agent for turn in turns})
    }


def _broken_share(traces: list[Trace], agent: str) -> dict[str, float]:
    """Of an agent that a program calls: the share of calls that continue a conversation but not its tokens."""
    counts = [trace.outcome_metadata.get(CONVERSATIONS, {}).get(agent, {}) for trace in traces]
    broken, grown = (sum(count.get(kind, 0) for count in counts) for kind in ("broken", "grown"))
    return {"broken_share": broken / (broken + grown)} if broken + grown else {}


def mean(values: list[float]) -> float:
    """The mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
