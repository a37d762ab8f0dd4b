"""scoring: traces -> rewards under the run's credit rule, and the mean figures of every agent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipelines.credit.rule import SCORED_STATUSES, score_traces
from pipelines.run.run import Run
from serve_apps.program.conversations import CONVERSATIONS
from stores.stage_results import Collected
from stores.types import EpisodeRewards, EpisodeStatus, FinishReason, Trace
from train_loops.rows import Funnel


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


def refuse_hopeless(
    run: Run, iteration: int, collected: Collected, traces: Sequence[Trace], rewards: Sequence[EpisodeRewards]
) -> None:
    """Raises ValueError where no turn can be trained on and none was before: the run would sample and learn nothing.

    Args:
        traces: those with a scored status.
    """
    if any(version > 0 for version in collected.policy_versions.values()):
        return  # it has learnt before, so that the cause lies in this iteration and may pass
    reward_of = {reward.episode_id: reward for reward in rewards}
    counts: Counter[str] = Counter()
    trained: set[str] = set()
    for group in run.config.model_groups:
        train = run.config.train_config(group)
        trained |= set(train.train_statuses)
        funnel = Funnel(
            model_group=group, statuses=train.train_statuses, train_mixed_versions=train.train_mixed_versions
        )
        for trace in traces:
            funnel.see(trace, reward_of.get(trace.episode_id))
        for stages in funnel.counts.values():
            counts.update(stages)
    if counts["scored"]:
        return
    seen = ", ".join(f"{number} {status}" for status, number in sorted(collected.statuses.items())) or "none"
    if not counts["with_ids"]:
        why = (
            "every completion of the episodes that count is empty"
            if counts["calls"]
            else "no episode that counts has a turn"
        )
        fix = "look at the episodes and their errors (troupe show), at max_tokens and at the end tokens of the model folder"
    elif not counts["episodes_ok"]:
        why = f"no episode has a status that trains ({', '.join(sorted(trained))}) and one policy version throughout"
        fix = "look at the errors in the traces (troupe show), raise max_tokens where episodes are truncated, or add to train.train_statuses"
    else:
        why = f"credit rule {run.config.credit.path!r} pays no turn of an episode that counts"
        fix = "let the rule return a reward for each turn that is to learn"
    raise ValueError(f"iteration {iteration}: nothing can be trained: {why}. Episodes: {seen}. To mend it, {fix}")


def per_agent(traces: list[Trace], rewards: list[EpisodeRewards]) -> dict[str, dict[str, float]]:
    """Mean reward, shares of well-formed and of cut turns, calls and completion length of every agent."""
    earned: dict[str, list[float]] = {}
    for episode in rewards:
        for reward in episode.rewards:
            earned.setdefault(reward.agent, []).append(reward.reward)
    turns = [turn for trace in traces for turn in trace.turns]
    return {
        agent: {
            "reward": mean(earned.get(agent, [])),
            "format_share": mean([float(t.is_format_ok) for t in turns if t.agent == agent]),
            "cut_share": mean([float(t.finish_reason is FinishReason.LENGTH) for t in turns if t.agent == agent]),
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
