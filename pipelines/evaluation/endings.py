"""endings: episodes that are not ok -> what became of them, and the key that would change it, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from serve_apps.episode.runner import CONTEXT_EXHAUSTED
from stores.types import EpisodeStatus, FinishReason, Trace

CURES: Mapping[EpisodeStatus, str] = {
    EpisodeStatus.TIMEOUT: "raise collect.episode.episode_timeout_s or turn_timeout_s",
    EpisodeStatus.INFRA_ERROR: "an engine, a node or the network failed, see the log",
    EpisodeStatus.TOOL_ERROR: "a tool failed, see `troupe show`",
    EpisodeStatus.AGENT_ERROR: "the workflow raised an error, see `troupe show`",
}
"""What to do about episodes of a status; `truncated` has several reasons."""


def endings_in_words(traces: Iterable[Trace], max_tokens: Mapping[str, int]) -> str:
    """Describes how the episodes ended that are not ok, the most frequent status first; empty where all are ok.

    Args: max_tokens: the limit of every agent, `agents.<agent>.max_tokens` or its default.
    """
    traces = list(traces)
    counts = Counter(trace.status for trace in traces if trace.status is not EpisodeStatus.OK)
    parts = []
    for status, count in counts.most_common():
        of_status = [trace for trace in traces if trace.status is status]
        fix = _cut(of_status, max_tokens) if status is EpisodeStatus.TRUNCATED else CURES[status]
        parts.append(f"{count} of {len(traces)} are {status} ({fix})")
    return "; ".join(parts)


def _cut(traces: Iterable[Trace], max_tokens: Mapping[str, int]) -> str:
    """Describes what cut episodes short, the most frequent reason first."""
    reasons: Counter[str] = Counter()
    for trace in traces:
        cut = {turn.agent: turn for turn in trace.turns if turn.finish_reason is FinishReason.LENGTH}
        for agent, turn in cut.items():
            limit = turn.sampling.max_tokens
            if limit < max_tokens.get(agent, 0):
                reasons[f"{agent} had room for fewer tokens than its max_tokens: raise serve.max_model_len"] += 1
            else:
                reasons[f"{agent} ran into its max_tokens = {limit}: raise agents.{agent}.max_tokens"] += 1
        if trace.stop_reason == CONTEXT_EXHAUSTED:
            reasons["a prompt left no room in the context: raise serve.max_model_len"] += 1
        elif not cut:
            reasons["the workflow ended them as truncated"] += 1
    return ", ".join(f"in {number} {reason}" for reason, number in reasons.most_common())
