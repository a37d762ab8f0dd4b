"""figures: what guards, canary traffic, watching and training warnings compare: one name per figure, wherever it appears.

A figure has the same name in `promote.guards`, `traffic.guards`, `watch.floors`, in the metrics and in the report. A figure of
one agent is called `<figure>/<agent>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Direction = Literal["higher", "lower"]
Comparison = Literal["ratio", "difference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What a figure means, when it has become worse, and what to try then."""

    meaning: str
    worse: Direction
    changed: str
    """What an alarm or a warning begins with."""
    try_: str
    compared_by: Comparison = "difference"
    """How two values are compared. Shares are compared by their difference, amounts by their ratio."""
    is_watched_both_ways: bool = False
    """Whether watching raises an alarm for a change in either direction."""
    least: float = 0.0
    """Of a ratio: a usual value below this counts as this, so that twice nothing is no change."""


INPUT_DRIFT = "input_drift"
INDISTINGUISHABLE = "is_indistinguishable"
INSPECT = "look at episodes (troupe show)"
FIGURES: Mapping[str, Figure] = {
    "completion_tokens": Figure(
        meaning="sampled tokens of an episode or of an answer; of one agent or in training, of a completion",
        worse="higher",
        changed="the length of what is sampled has changed",
        try_=f"{INSPECT}; train.overlong, loss.aggregation token_mean, a lower max_tokens",
        compared_by="ratio",
        is_watched_both_ways=True,
        least=1,
    ),
    "turns": Figure(
        meaning="turns of an episode",
        worse="higher",
        changed="the number of turns has changed",
        try_=f"{INSPECT}; a limit on rounds",
        compared_by="ratio",
        is_watched_both_ways=True,
        least=1,
    ),
    "tool_calls": Figure(
        meaning="tool calls of an episode, its actions in worlds aside",
        worse="higher",
        changed="the number of tool calls has changed",
        try_=f"whether the tools answer; {INSPECT}",
        compared_by="ratio",
        is_watched_both_ways=True,
        least=1,
    ),
    "world_steps": Figure(
        meaning="actions of an episode in its worlds",
        worse="higher",
        changed="the number of actions in a world has changed",
        try_=f"whether the worlds answer as before; {INSPECT}",
        compared_by="ratio",
        is_watched_both_ways=True,
        least=1,
    ),
    "latency_s": Figure(
        meaning="seconds that an episode or an answer takes",
        worse="higher",
        changed="answers take longer",
        try_="the dashboard: load; num_replicas",
        compared_by="ratio",
        least=0.1,
    ),
    "format_share": Figure(
        meaning="share of well-formed turns",
        worse="lower",
        changed="fewer turns are well-formed",
        try_="a larger weight of format in the credit rule",
    ),
    "cut_share": Figure(
        meaning="share of turns or answers that are cut at a token limit",
        worse="higher",
        changed="more turns or answers are cut at max_tokens",
        try_="a higher max_tokens, train.overlong",
    ),
    "refusal_share": Figure(
        meaning="share of answers that are empty or decline",
        worse="higher",
        changed="more answers are empty or decline",
        try_=INSPECT,
    ),
    "empty_share": Figure(
        meaning="share of the gateway's answers without text",
        worse="higher",
        changed="more answers are empty",
        try_=INSPECT,
    ),
    "failure_share": Figure(
        meaning="share of episodes that fail, or of requests that the engines do not answer",
        worse="higher",
        changed="more episodes fail",
        try_="the errors in the traces; tools, engines, deadlines",
    ),
    "entropy": Figure(
        meaning="entropy of sampling in nats per token",
        worse="lower",
        changed="the entropy of sampling has changed",
        try_="loss.entropy_coef above 0, a higher loss.clip_high, a lower optimizer.lr; agents.*.temperature",
        compared_by="ratio",
        is_watched_both_ways=True,
        least=0.1,
    ),
    "repeat_share": Figure(
        meaning="share of turns that repeat an earlier turn of the episode",
        worse="higher",
        changed="more turns repeat an earlier turn of the episode",
        try_=f"{INSPECT}; credit per turn, so that a repeat earns nothing",
    ),
    "outcome": Figure(
        meaning="mean outcome, which is the share of solved tasks where outcomes are 0 or 1",
        worse="lower",
        changed="fewer tasks are solved",
        try_="troupe rollback; look at what changed",
    ),
    "reward_over_outcome": Figure(
        meaning="mean reward of a turn less the outcome",
        worse="higher",
        changed="the reward has left the outcome behind (hacking)",
        try_="look at episodes with a high reward (troupe show); make the credit rule pay the outcome",
    ),
    "feedback_score": Figure(
        meaning="score that callers gave to an answer, between -1 and 1",
        worse="lower",
        changed="callers rate answers worse",
        try_="troupe rollback; collect.from_service",
    ),
    "prompt_words": Figure(
        meaning="words of a prompt",
        worse="higher",
        changed="prompts have another length",
        try_="tasks of the new kind",
        compared_by="ratio",
        is_watched_both_ways=True,
        least=1,
    ),
    INPUT_DRIFT: Figure(
        meaning="pseudo-F of the prompts now against those before: 1 in the mean where nothing changed",
        worse="higher",
        changed="prompts are about something else",
        try_="train and test on tasks of the new kind",
        compared_by="ratio",
    ),
    INDISTINGUISHABLE: Figure(
        meaning="whether the logprobs of a new version lie within the engine's rounding of its parent's",
        worse="higher",
        changed="new versions cannot be told apart from their parents",
        try_="a higher optimizer.lr: steps are below what bfloat16 stores; or serve.dtype float32 with deepspeed.bf16 false",
    ),
    "groups_without_signal": Figure(
        meaning="share of groups (GRPO sense) whose episodes all earned the same",
        worse="higher",
        changed="most groups have no signal",
        try_="easier or harder tasks, more collect.episodes_per_task, collect.dynamic_sampling, a credit rule per turn",
    ),
    "anchor_share": Figure(
        meaning="share of turns that have the prompt of another turn of their task (gigpo)",
        worse="lower",
        changed="few turns share their prompt with another",
        try_="a lower advantage.similarity (0.9), more collect.episodes_per_task, algorithm dr_mas",
    ),
    "credit_correlation": Figure(
        meaning="correlation of an agent's credit with the outcome",
        worse="lower",
        changed="its credit goes against the outcome",
        try_="a credit rule that pays what helps the team, a smaller weight of its other parts (format ...)",
    ),
    "explained_variance": Figure(
        meaning="share of the variance of returns that the critic explains",
        worse="lower",
        changed="the critic explains less than nothing",
        try_="critic.warmup_iterations, another critic.optimizer.lr, an algorithm without a critic",
    ),
    "kl_k3": Figure(
        meaning="KL of an update to the parent version in nats per token, estimator k3",
        worse="higher",
        changed="the update moved the policy far from its parent (KL)",
        try_="lower optimizer.lr, or add loss.kl_in_loss_coef",
        compared_by="ratio",
    ),
    "kl_ref_k3": Figure(
        meaning="KL to the reference in nats per token, estimator k3",
        worse="higher",
        changed="the policy left its reference (KL)",
        try_="raise loss.kl_in_loss_coef or loss.kl_in_reward_coef",
        compared_by="ratio",
    ),
    "grad_norm": Figure(
        meaning="norm of the gradient before clipping",
        worse="higher",
        changed="the gradient's norm jumped",
        try_="lower optimizer.max_grad_norm or optimizer.lr",
        compared_by="ratio",
    ),
    "clip_share": Figure(
        meaning="share of tokens whose ratio is clipped",
        worse="higher",
        changed="far more tokens than before were clipped",
        try_="lower optimizer.lr, num_epochs or num_minibatches",
        compared_by="ratio",
    ),
}
"""By their names."""


def figure_of(name: str) -> Figure:
    """Returns the figure of a name, which may be that of one agent; KeyError for an unknown one."""
    return FIGURES[base_name(name)]


def base_name(name: str) -> str:
    """Returns `entropy` for `entropy/solver`."""
    return name.partition("/")[0]
