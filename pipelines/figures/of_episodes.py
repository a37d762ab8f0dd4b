"""of_episodes: an episode, its rewards or an answer of the gateway -> how the team behaves, whatever it earns.

A team that learns to please its credit rule often pays for it elsewhere: twice the tokens, more tools, empty answers. A new figure is
an entry of `EPISODE_FIGURES`: guards, floors, metrics, reports and reference pages follow from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pipelines.figures.checks import Check, grown_completions, vanished_entropy
from pipelines.figures.figure import INSPECT, Figure
from serve_apps.authoring.thinking import after_thinking
from serve_apps.tools.plain_signs import in_plain_signs
from stores.traces.conventions import num_world_calls, num_world_steps
from stores.types import SOUND, Cause, EpisodeRewards, FinishReason, Trace, Turn

NEAR = 0.8
"""Share of common word trigrams from which on two texts are the same."""
REFUSAL = re.compile(
    r"""\A\W*sorry\b(?!\s+(?:for|about|to)\b) | \bas\s+an\s+ai\b
    | \bi\s+(?:(?:\w+ly|so|very|just)\s+)?(?:can(?:\s*no|'?)t|won'?t|will\s+not)\b(?!\s+(?:wait|only|stress|emphasi[sz]e|help\s+but)\b)
    | \bi(?:\s*'?|\s+a)m\s+(?:(?:\w+ly|so|very|just)\s+)?(?:not\s+able|unable|sorry(?!\s+(?:for|about|to)\b))\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Beginnings of a refusal in English, of which an answer's first sentence is searched.

Who is sorry for a mistake, or cannot wait to tell, answers.
"""


def is_refusal(answer: str) -> bool:
    """Returns whether an answer is empty, or its first sentence declines, however its apostrophes and emphasis are typed.

    Thoughts are no part of an answer.
    """
    spoken = after_thinking(answer).strip()
    plain = re.sub(r"[*_#>]", " ", in_plain_signs(spoken).replace("`", "'")).strip()
    return not spoken or REFUSAL.search(re.split(r"(?<=[.!?])\s", plain, maxsplit=1)[0]) is not None


def num_repeats(texts: Sequence[str]) -> int:
    """How many of an episode's texts say again what an earlier one said, whoever said it.

    Two texts are the same where the Jaccard index of their sets of word trigrams is at least `NEAR` (Broder 1997,
    resemblance of w-shingles); of fewer than three words, where the words are. Case and white space do not count, and an
    empty text repeats nothing.
    """
    earlier: list[frozenset[tuple[str, ...]]] = []
    num = 0
    for text in texts:
        words = text.lower().split()
        if not words:
            continue
        own = frozenset(tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2)))
        num += any(len(own & other) >= NEAR * len(own | other) for other in earlier)
        earlier.append(own)
    return num


def _num_tokens(turns: Sequence[Turn]) -> float:
    """NaN where a turn is redacted and has no tokens; an episode that ended before its first turn sampled none."""
    if any(turn.completion_text and not turn.completion_token_ids for turn in turns):
        return math.nan
    return float(sum(len(turn.completion_token_ids) for turn in turns))


def _format_share(turns: Sequence[Turn]) -> float:
    return sum(turn.is_format_ok for turn in turns) / len(turns) if turns else math.nan


def _cut_share(trace: Trace) -> float:
    cut = sum(turn.finish_reason is FinishReason.LENGTH for turn in trace.turns)
    return cut / len(trace.turns) if trace.turns else math.nan


def _entropy(turns: Sequence[Turn]) -> float:
    """Mean over the sampled tokens of -log p(token), whose expectation at each place is the entropy of the distribution that the
    token was drawn from; of turns whose sampling is unfiltered, with the temperature they had.
    """
    logprobs = [value for turn in turns if turn.sampling.is_unfiltered for value in turn.rollout_logprobs]
    return -math.fsum(logprobs) / len(logprobs) if logprobs else math.nan


def _repeat_share(trace: Trace) -> float:
    texts = [turn.completion_text for turn in trace.turns]
    return num_repeats(texts) / (len(texts) - 1) if len(texts) > 1 else math.nan


def _reward_over_outcome(rewards: EpisodeRewards) -> float:
    if not rewards.rewards:
        return math.nan
    return math.fsum(r.reward for r in rewards.rewards) / len(rewards.rewards) - rewards.outcome


INPUT_DRIFT, FEEDBACK, FAILURES = "input_drift", "feedback_score", "failure_share"
EPISODE_FIGURES = (
    Figure(
        name="format_share",
        meaning="share of well-formed turns",
        worse="lower",
        changed="fewer turns are well-formed",
        try_="a larger weight of format in the credit rule",
        of_episode=lambda trace: _format_share(trace.turns),
        of_agent=_format_share,
        guard=0.05,
        traffic_guard=0.05,
        floor=0.05,
    ),
    Figure(
        name="refusal_share",
        meaning="share of answers that are empty or decline",
        worse="higher",
        changed="more answers are empty or decline",
        # An engine that died in between declined nothing.
        of_episode=lambda trace: float(is_refusal(trace.answer)) if trace.is_outcome else math.nan,
        guard=0.05,
        floor=0.05,
    ),
    Figure(
        name="completion_tokens",
        meaning="sampled tokens of an episode or of an answer; of one agent or in training, of a completion",
        worse="higher",
        changed="the length of what is sampled has changed",
        try_=f"{INSPECT}; train.overlong, loss.aggregation token_mean, a lower max_tokens",
        compared_by="ratio",
        least=1,
        of_episode=lambda trace: _num_tokens(trace.turns),
        in_windows=lambda trace: bool(trace.turns),
        of_agent=lambda turns: _num_tokens(turns) / max(len(turns), 1),
        guard=0.5,
        traffic_guard=0.5,
        floor=0.25,
        is_watched_both_ways=True,
        check=Check(kind="hacking", seen=grown_completions, is_of_agents=True),
    ),
    Figure(
        name="turns",
        meaning="turns of an episode",
        worse="higher",
        changed="the number of turns has changed",
        try_=f"{INSPECT}; a limit on rounds",
        compared_by="ratio",
        least=1,
        of_episode=lambda trace: float(len(trace.turns)),
        guard=0.5,
        floor=0.25,
        is_watched_both_ways=True,
    ),
    Figure(
        name="tool_calls",
        meaning="tool calls of an episode, its actions in worlds aside",
        worse="higher",
        changed="the number of tool calls has changed",
        try_=f"whether the tools answer; {INSPECT}",
        compared_by="ratio",
        least=1,
        of_episode=lambda trace: float(len(trace.tool_calls) - num_world_calls(trace)),
        guard=0.5,
        floor=0.25,
        is_watched_both_ways=True,
    ),
    Figure(
        name="world_steps",
        meaning="actions of an episode in its worlds",
        worse="higher",
        changed="the number of actions in a world has changed",
        try_=f"whether the worlds answer as before; {INSPECT}",
        compared_by="ratio",
        least=1,
        of_episode=lambda trace: float(num_world_steps(trace)),
        in_windows=lambda trace: num_world_calls(trace) > 0,
        guard=math.inf,  # a team that does not give up acts longer
        floor=0.25,
        is_watched_both_ways=True,
    ),
    Figure(
        name="latency_s",
        meaning="seconds that an episode or an answer takes",
        worse="higher",
        changed="answers take longer",
        try_="the dashboard: load; num_replicas",
        compared_by="ratio",
        least=0.1,
        of_episode=lambda trace: math.nan if trace.cause is Cause.INFRASTRUCTURE else trace.duration_s,
        guard=math.inf,  # both teams play on engines that others may use, too
        traffic_guard=1.0,
        floor=0.5,
        is_watched=False,
    ),
    Figure(
        name="cut_share",
        meaning="share of turns or answers that are cut at a token limit",
        worse="higher",
        changed="more turns or answers are cut at max_tokens",
        try_="a higher max_tokens, train.overlong",
        of_episode=_cut_share,
        traffic_guard=0.05,
        floor=0.05,
    ),
    Figure(
        name="empty_share",
        meaning="share of the gateway's answers without text",
        worse="higher",
        changed="more answers are empty",
        traffic_guard=0.05,
        floor=0.05,
    ),
    Figure(
        name=FAILURES,
        meaning="share of episodes that fail, or of requests that the engines do not answer",
        worse="higher",
        changed="more episodes fail",
        try_="the errors in the traces; tools, engines, deadlines",
        of_episode=lambda trace: float(trace.status not in SOUND),
        traffic_guard=0.02,
        floor=0.02,
    ),
    Figure(
        name="entropy",
        meaning="entropy of sampling in nats per token",
        worse="lower",
        changed="the entropy of sampling has changed",
        try_="loss.entropy_coef above 0, a higher loss.clip_high, a lower optimizer.lr; agents.*.temperature",
        compared_by="ratio",
        least=0.1,
        of_episode=lambda trace: _entropy(trace.turns),
        of_agent=_entropy,
        floor=0.25,
        is_watched_both_ways=True,
        check=Check(kind="collapse", seen=vanished_entropy),
    ),
    Figure(
        name="repeat_share",
        meaning="share of turns that repeat an earlier turn of the episode",
        worse="higher",
        changed="more turns repeat an earlier turn of the episode",
        try_=f"{INSPECT}; credit per turn, so that a repeat earns nothing",
        of_episode=_repeat_share,
        floor=0.05,
    ),
    Figure(
        name="prompt_words",
        meaning="words of a prompt",
        worse="higher",
        changed="prompts have another length",
        try_="tasks of the new kind",
        compared_by="ratio",
        least=1,
        of_episode=lambda trace: float(len(trace.task.prompt.split())),
        floor=0.25,
        is_watched_both_ways=True,
    ),
    Figure(
        name="outcome",
        meaning="mean outcome, which is the share of solved tasks where outcomes are 0 or 1",
        worse="lower",
        changed="fewer tasks are solved",
        try_="troupe rollback; look at what changed",
        of_rewards=lambda rewards: rewards.outcome,
        floor=0.05,
    ),
    Figure(
        name="reward_over_outcome",
        meaning="mean reward of a turn less the outcome",
        worse="higher",
        changed="the reward has left the outcome behind (hacking)",
        try_="look at episodes with a high reward (troupe show); make the credit rule pay the outcome",
        of_rewards=_reward_over_outcome,
        floor=0.1,
    ),
    Figure(
        name=FEEDBACK,
        meaning="score that callers gave to an answer, between -1 and 1",
        worse="lower",
        changed="callers rate answers worse",
        try_="troupe rollback; collect.from_service",
        floor=0.1,
    ),
    Figure(
        name=INPUT_DRIFT,
        meaning="pseudo-F of the prompts now against those before: 1 in the mean where nothing changed; its floor is the distance "
        "of their means, in spreads of single prompts",
        worse="higher",
        changed="prompts are about something else",
        try_="train and test on tasks of the new kind",
        compared_by="ratio",
        floor=0.2,
    ),
)
