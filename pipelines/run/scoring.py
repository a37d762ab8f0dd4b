"""scoring: traces -> rewards under the run's credit rule, and the mean figures of every agent."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from statistics import fmean
from typing import TypeVar

from pipelines.credit.rule import score_traces
from pipelines.run.run import Run
from serve_apps.episode.runner import TOOL_RAISED, WORKFLOW_RAISED
from serve_apps.program.conversations import CONVERSATIONS
from stores.journal.stage_results import CALLED, CHOSEN, PART, PROBABILITY, Collected
from stores.types import COUNTED, Cause, EpisodeRewards, FinishReason, Trace, Turn, TurnReward
from train_loops.rows.samples import Funnel

R = TypeVar("R")

MAX_STOP_REASONS = 10
"""Reasons for which episodes end that are shown by name: a workflow may write as many as it likes."""


def assign_credit(run: Run, traces: list[Trace]) -> list[EpisodeRewards]:
    """Credits traces by the run's rule and checks that every reward belongs to a turn that happened."""
    return score_traces(run.credit, traces, version=run.credit_version)


def rewards_for(run: Run, trace: Trace) -> EpisodeRewards | None:
    """Returns the stored rewards of an episode that the run gave or would take: its latest ones; None where there are none."""
    stored = run.traces.rewards_of(trace.episode_id, run_id=trace.run_id, iteration=trace.iteration)
    if not stored:
        return None
    return of_latest_version(run, {rewards.credit_version: rewards for rewards in stored})


def of_latest_version(run: Run, by_version: Mapping[str, R]) -> R | None:
    """Returns what is stored under the credit version that the run used last, or would use, or else the only one that is stored.

    The rule, or Troupe, may have changed since. None where there are several, and none of them is the run's own.
    """
    own = (run.scored_version(iteration) for iteration in range(run.config.iterations, 0, -1))
    only = by_version if len(by_version) == 1 else ()
    versions = chain(own, [run.credit_version], only)
    return next((by_version[version] for version in versions if version in by_version), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an episode ended, in the columns of its row."""

    episode_id: str
    group_id: str
    status: str
    cause: str
    stop_reason: str
    error: str


def author_faults(traces: Sequence[Trace]) -> set[str]:
    """Returns what `failures_alike` finds in these traces; variants are left out."""
    sampled = [trace for trace in traces if not trace.variant]
    completions = {t.episode_id: tuple(turn.completion_text for turn in t.turns) for t in sampled}
    endings = [Ending(**{column.name: getattr(t, column.name) for column in fields(Ending)}) for t in sampled]
    return failures_alike(endings, lambda _: completions)


def failures_alike(
    endings: Iterable[Ending], completions_of: Callable[[list[str]], Mapping[str, tuple[str, ...]]]
) -> set[str]:
    """Returns the ids of episodes that count as failures of the policy, but whose task fails whatever is sampled.

    Of their group (GRPO sense) there are at least two episodes, not all with the same completions, and each ended in the
    same error of the workflow's or a tool's own code, apart from ids and numbers. An error that another group has beside an
    episode that raised none depends on what was sampled: it is the policy's in every group. Without this, a policy of which
    60% of the replies raise one error would have 67% of its failures excused in groups of two, 38% in groups of four and
    18% in groups of eight. A policy cannot profit by the rule: what ends otherwise only makes more episodes count.

    Args: completions_of: called once, with the ids of the episodes whose completions decide.
    """
    groups: dict[str, list[Ending]] = {}
    for ending in endings:
        groups.setdefault(ending.group_id, []).append(ending)
    mixed = [group for group in groups.values() if any(map(_is_without_error, group))]
    sampled = {_error(e) for group in mixed for e in group if e.cause == Cause.POLICY and _is_raised(e)}
    alike = [group for group in groups.values() if _are_alike(group) and _error(group[0]) not in sampled]
    suspected = [[ending.episode_id for ending in group] for group in alike]
    completions = completions_of([episode for group in suspected for episode in group])
    return {episode for group in suspected if len({completions[e] for e in group}) > 1 for episode in group}


def _are_alike(endings: Sequence[Ending]) -> bool:
    """Says whether several episodes all ended in the same error, raised by the workflow's or a tool's own code."""
    return (
        len(endings) > 1
        and all(ending.cause in (Cause.POLICY, Cause.AUTHOR) for ending in endings)
        and all(map(_is_raised, endings))
        and len(set(map(_error, endings))) == 1
    )


def _is_raised(ending: Ending) -> bool:
    return ending.stop_reason in (WORKFLOW_RAISED, TOOL_RAISED)


def _is_without_error(ending: Ending) -> bool:
    """Says whether the episode is an outcome, and the code of the workflow and its tools raised nothing."""
    return ending.cause in COUNTED and not _is_raised(ending)


def _error(ending: Ending) -> tuple[str, str]:
    return ending.stop_reason, without_ids(ending.error)


def counts_by_cause(traces: Sequence[Trace], *, authors: Collection[str] = ()) -> dict[str, int]:
    """Returns the number of episodes by the cause of their failure, `sound` for none; variants are left out.

    Args: authors: ids of episodes that the author caused to fail whatever they say, see `author_faults`.
    """
    causes = [Cause.AUTHOR if t.episode_id in authors else t.cause for t in traces if not t.variant]
    return dict(Counter(str(cause) or "sound" for cause in causes))


_ID = re.compile(
    r"\b0x[0-9a-f]+|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"  # the address of an object, a UUID
    r"|[0-9a-f]{16,}(-\d+)?|(?<!\w)\d+(\.\d+)?(e[+-]?\d+)?",  # a hash; a number, also one with a unit
    re.IGNORECASE,
)


def without_ids(error: str) -> str:
    """Returns an error with its ids, addresses and numbers replaced by #, so that the same fault of many episodes counts as one."""
    return _ID.sub("#", error[:4000])[:500]


def refuse_hopeless(
    run: Run, iteration: int, collected: Collected, traces: Sequence[Trace], rewards: Sequence[EpisodeRewards]
) -> None:
    """Raises ValueError where no turn can be trained on and none was before: the run would sample and learn nothing.

    Args:
        traces: those that are outcomes of the policy.
    """
    is_later = run.config.loop.max_lag > 0 and iteration > 1  # sampled by version 0, perhaps, but not the first
    if is_later or any(version > 0 for version in collected.policy_versions.values()):
        return  # it has learnt before, so that the cause lies in this iteration and may pass
    reward_of = {reward.episode_id: reward for reward in rewards}
    counts: Counter[str] = Counter()
    for group in run.config.model_groups:
        funnel = Funnel(model_group=group, train_mixed_versions=run.config.train_config(group).train_mixed_versions)
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
        why = "more than one policy version sampled each episode that counts"
        fix = "let nothing else change what the engines serve while episodes are sampled, or set train.train_mixed_versions"
    else:
        why = f"credit rule {run.config.credit.path!r} pays no turn of an episode that counts"
        fix = "let the rule return a reward for each turn that is to learn"
    raise ValueError(f"iteration {iteration}: nothing can be trained: {why}. Episodes: {seen}. To mend it, {fix}")


def per_agent(traces: list[Trace], rewards: list[EpisodeRewards]) -> dict[str, dict[str, float]]:
    """Mean reward and its parts (of an agent that is paid), shares of well-formed and of cut turns, calls, attempts, completion length and cached
    prompt tokens of agents, and what they choose."""
    turns = [turn for trace in traces for turn in trace.turns]
    return {
        agent: {
            **_paid([r for episode in rewards for r in episode.rewards if r.agent == agent]),
            "format_share": fmean(t.is_format_ok for t in turns if t.agent == agent),
            "cut_share": fmean(t.finish_reason is FinishReason.LENGTH for t in turns if t.agent == agent),
            "calls": float(sum(t.agent == agent for t in turns)),
            "turns": sum(t.agent == agent for t in turns) / len(traces),
            "attempts": float(sum(t.num_attempts for t in turns if t.agent == agent)),
            "completion_tokens": fmean(len(t.completion_token_ids) for t in turns if t.agent == agent),
            **_cached_share([t for t in turns if t.agent == agent]),
            **_broken_share(traces, agent),
            **_choices([t for t in turns if t.agent == agent and t.option_logprobs]),
            **_tools(traces, agent),
        }
        for agent in sorted({turn.agent for turn in turns})
    }


def _paid(rewards: Sequence[TurnReward]) -> dict[str, float]:
    """The mean of an agent's rewards, and of each part of them; a turn without a part has 0 of it. Empty where no turn was paid."""
    if not rewards:
        return {}
    parts = dict.fromkeys(name for reward in rewards for name in reward.breakdown)
    return {"reward": fmean(reward.reward for reward in rewards)} | {
        f"{PART}{name}": math.fsum(reward.breakdown.get(name, 0.0) for reward in rewards) / len(rewards)
        for name in parts
    }


def solved_share(rewards: Sequence[EpisodeRewards]) -> float | None:
    """The share of episodes with an outcome of 1; None of none."""
    return fmean(reward.outcome >= 1.0 for reward in rewards) if rewards else None


def stop_reasons(traces: Sequence[Trace]) -> dict[str, float]:
    """The share of episodes by why they ended, the most frequent first; those beyond `MAX_STOP_REASONS` as `other`."""
    counts = Counter(trace.stop_reason or trace.status.value for trace in traces)
    most = counts.most_common(MAX_STOP_REASONS)
    rest = len(traces) - sum(count for _, count in most)
    return {reason: count / len(traces) for reason, count in [*most, *([("other", rest)] if rest else [])]}


def _cached_share(turns: list[Turn]) -> dict[str, float]:
    """The share of the prompt tokens that engines took from their prefix cache; none where no turn says so."""
    known = [
        (turn.num_cached_tokens, len(turn.prompt_token_ids)) for turn in turns if turn.num_cached_tokens is not None
    ]
    num_prompt = sum(length for _, length in known)
    return {"cached_prompt_share": sum(cached for cached, _ in known) / num_prompt} if num_prompt else {}


def _tools(traces: list[Trace], agent: str) -> dict[str, float]:
    """How often in an episode each tool was called with what an agent wrote, and the share of these calls that failed; empty without any."""
    calls = []
    for trace in traces:
        written = {turn.turn_index for turn in trace.turns if turn.agent == agent}
        calls += [call for call in trace.tool_calls if call.caller == agent or not written.isdisjoint(call.parents)]
    if not calls:
        return {}
    counts = Counter(call.tool for call in calls)
    figures = {f"{CALLED}{tool}": count / len(traces) for tool, count in sorted(counts.items())}
    return figures | {"tool_error_share": fmean(bool(call.error) for call in calls)}


def _choices(turns: list[Turn]) -> dict[str, float]:
    """Of an agent that chooses, by option: the share of choices that took it, and its mean probability where it was offered."""
    names = dict.fromkeys(name for turn in turns for name in turn.option_logprobs)
    taken = Counter(turn.fields["choice"] for turn in turns)
    offered = {name: [turn.option_logprobs[name] for turn in turns if name in turn.option_logprobs] for name in names}
    return {f"{CHOSEN}{name}": taken[name] / len(turns) for name in names} | {
        f"{PROBABILITY}{name}": fmean(map(math.exp, logprobs)) for name, logprobs in offered.items()
    }


def _broken_share(traces: list[Trace], agent: str) -> dict[str, float]:
    """Of an agent that a program calls: the share of calls that continue a conversation but not its tokens."""
    counts = [trace.outcome_metadata.get(CONVERSATIONS, {}).get(agent, {}) for trace in traces]
    broken, grown = (sum(count.get(kind, 0) for count in counts) for kind in ("broken", "grown"))
    return {"broken_share": broken / (broken + grown)} if broken + grown else {}
