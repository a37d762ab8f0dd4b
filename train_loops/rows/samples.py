"""samples: traces and their rewards -> training rows (`Sample`), and the funnel that shows what fell out where."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stores.traces.conventions import anchor_before, rounds_in_time
from stores.types import FILTERS, SERVED, EpisodeRewards, EpisodeStatus, Trace, Turn

FUNNEL_STAGES = ("attempts", "calls", "with_ids", "episodes_ok", "scored", "non_zero_advantage", "trained")
"""In order: where turns fall out between the model call and the gradient; every count is a number of turns, but for
`attempts`, which is how often the calls were made for them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masks:
    """Which tokens could be sampled at each token of one row's completion."""

    table: NDArray[np.int32]
    """[M, ceil(V / 32)]: all masks of a job's rows, each once; token `i` is bit `i % 32` of word `i // 32`. The first mask allows
    every token. Rows share the table."""
    of_token: NDArray[np.int64]
    """[completion tokens]: which of the table's masks holds at each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training row: one turn of one agent."""

    episode_id: str
    group_id: str
    task_id: str
    agent: str
    turn_index: int
    round_index: int
    """Which of the agent's own calls in the episode it is."""
    episode_round: int
    """Round of the episode, counted over all of its agents."""
    token_ids: Sequence[int]
    """Prompt and completion."""
    prompt_length: int
    rollout_logprobs: Sequence[float]
    """One per completion token, under the sampling distribution."""
    reward: float
    temperature: float
    max_tokens: int
    """The limit on completion tokens: the agent's, or less where its context had no room for as many."""
    constraint: str = ""
    """What the completion had to match: see `Sampling.constraint`."""
    masks: Masks | None = None
    """Which tokens its constraint allowed; None until `masks.with_masks` makes them, and where there is no constraint."""
    status: EpisodeStatus
    is_served: bool = False
    """Whether the episode is from service: another version than the parent may have sampled it."""
    outcome: float = 0.0
    """The episode's result, with which credit is compared in the figures."""
    baseline: float | None = None
    """What variants of the episode, in which this turn was replaced, earned there; None where there are none."""
    anchor: str = ""
    """Names the state of the world that the turn acted in; empty where the episode had no world."""
    is_sibling: bool = False
    """Whether the turn was sampled in a replay, in the place of another one, or after one: see `baselines`."""

    @property
    def completion_length(self) -> int:
        """Counts the trainable tokens."""
        return len(self.token_ids) - self.prompt_length


def samples_of(
    trace: Trace,
    rewards: EpisodeRewards | None,
    *,
    model_group: str,
    train_mixed_versions: bool = False,
    sibling_turns: Collection[int] = (),
) -> list[Sample]:
    """Returns the turns of `model_group` that train, in the order of time.

    Left out are turns of variants of an episode (replayed with another turn, or greedily) that are not in `sibling_turns`,
    episodes that are no outcome of the policy (`Trace.cause`), episodes sampled by more than one version of a model group
    (unless `train_mixed_versions`), turns without completion tokens, and turns that the credit rule gave no reward (nothing
    becomes reward 0 by accident). The `Funnel` counts each.

    Raises:
        ValueError: broken rows: token ids and logprobs that do not match, rewards for another episode or for a turn
            that does not exist, filtered sampling.
    """
    if rewards is None or not is_trainable(trace, train_mixed_versions=train_mixed_versions):
        return []
    reward_of = _rewards_by_turn(trace, rewards)
    round_of = rounds_in_time(trace.turns)
    samples = []
    for turn in sorted(_trained_turns(trace, model_group, sibling_turns), key=lambda t: t.turn_index):
        if turn.turn_index not in reward_of or len(turn.completion_token_ids) == 0:
            continue
        _check_turn(trace, turn)
        samples.append(
            Sample(
                episode_id=trace.episode_id,
                group_id=trace.group_id,
                task_id=trace.task.task_id,
                agent=turn.agent,
                turn_index=turn.turn_index,
                round_index=turn.round_index,
                episode_round=round_of[turn.turn_index],
                token_ids=[*turn.prompt_token_ids, *turn.completion_token_ids],
                prompt_length=len(turn.prompt_token_ids),
                rollout_logprobs=list(turn.rollout_logprobs),
                reward=reward_of[turn.turn_index],
                temperature=turn.sampling.temperature,
                max_tokens=turn.sampling.max_tokens,
                constraint=turn.sampling.constraint,
                status=trace.status,
                is_served=SERVED in trace.outcome_metadata,
                anchor=anchor_before(trace, turn.turn_index),
                is_sibling=bool(trace.variant),
                outcome=rewards.outcome,
            )
        )
    return samples


def trajectories_of(samples: Sequence[Sample], *, credit_kind: Literal["returns", "increments"]) -> list[list[int]]:
    """Returns the row indices over which GAE runs as one sequence, for samples of one model group.

    `returns`: every row by itself, because a turn's reward already stands for the rest of the episode, and chaining would
    count it once per turn. `increments`: the rows of an episode, in time order.
    """
    if credit_kind == "returns":
        return [[i] for i in range(len(samples))]
    if credit_kind != "increments":
        raise ValueError(f"credit_kind is {credit_kind!r}: a credit rule declares 'returns' or 'increments'")
    chains: dict[str, list[int]] = {}
    for i in sorted(range(len(samples)), key=lambda i: samples[i].turn_index):
        chains.setdefault(samples[i].episode_id, []).append(i)
    return list(chains.values())


@dataclass
class Funnel:
    """Counts turns per agent on their way from call to gradient: `counts[agent][stage]`, stages as in `FUNNEL_STAGES`.

    `see` fills the first five stages; the learner adds the last two with `add`.
    """

    model_group: str
    train_mixed_versions: bool = False
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def see(self, trace: Trace, rewards: EpisodeRewards | None, *, sibling_turns: Collection[int] = ()) -> None:
        """Counts one episode, of a variant only `sibling_turns`; `rewards` is None where the credit rule gave none."""
        is_ok = is_trainable(trace, train_mixed_versions=self.train_mixed_versions)
        scored = {r.turn_index for r in rewards.rewards} if rewards is not None else set()
        for turn in _trained_turns(trace, self.model_group, sibling_turns):
            has_ids = len(turn.completion_token_ids) > 0
            passed = [True, has_ids, has_ids and is_ok, has_ids and is_ok and turn.turn_index in scored]
            self.add("attempts", [turn.agent] * turn.num_attempts)
            for stage, has_passed in zip(FUNNEL_STAGES[1:], passed, strict=False):
                self.add(stage, [turn.agent] * has_passed)

    def add(self, stage: str, agents: Iterable[str]) -> None:
        """Counts one turn, or attempt, at `stage` for every name in `agents`."""
        for agent in agents:
            self.counts.setdefault(agent, dict.fromkeys(FUNNEL_STAGES, 0))[stage] += 1


def _trained_turns(trace: Trace, model_group: str, sibling_turns: Collection[int]) -> list[Turn]:
    """Returns the turns of a model group that may train: of a variant the ones named, of another episode all."""
    turns = [turn for turn in trace.turns if turn.model_group == model_group]
    return [turn for turn in turns if turn.turn_index in sibling_turns] if trace.variant else turns


def is_trainable(trace: Trace, *, train_mixed_versions: bool) -> bool:
    """Says whether an episode is an outcome of the policy and its versions may be trained on."""
    # Several versions sampled a mixed episode: no single version's logprobs are those of its behaviour policy.
    is_mixed = trace.is_version_mixed or any(turn.is_version_mixed for turn in trace.turns)
    return trace.is_outcome and (train_mixed_versions or not is_mixed)


def _rewards_by_turn(trace: Trace, rewards: EpisodeRewards) -> dict[int, float]:
    context = f"rewards of episode {trace.episode_id} (credit {rewards.credit_version})"
    if rewards.episode_id != trace.episode_id:
        raise ValueError(
            f"{context}: they belong to episode {rewards.episode_id}; join traces and rewards by episode_id"
        )
    turns = {turn.turn_index: turn for turn in trace.turns}
    reward_of: dict[int, float] = {}
    for r in rewards.rewards:
        turn = turns.get(r.turn_index)
        if turn is None:
            raise ValueError(
                f"{context}: reward for turn {r.turn_index}, but the turns are {sorted(turns)}; score again"
            )
        if (turn.agent, turn.model_group) != (r.agent, r.model_group):
            raise ValueError(
                f"{context}: reward of turn {r.turn_index} names agent {r.agent!r} in {r.model_group!r}, the trace has "
                f"{turn.agent!r} in {turn.model_group!r}; score again"
            )
        if r.turn_index in reward_of:
            raise ValueError(f"{context}: turn {r.turn_index} is rewarded twice; a credit rule sums its parts itself")
        if not math.isfinite(r.reward):
            raise ValueError(f"{context}: reward of turn {r.turn_index} is {r.reward}; rewards must be finite")
        reward_of[r.turn_index] = r.reward
    return reward_of


def _check_turn(trace: Trace, turn: Turn) -> None:
    context = f"episode {trace.episode_id}, turn {turn.turn_index} ({turn.agent})"
    if len(turn.completion_token_ids) != len(turn.rollout_logprobs):
        raise ValueError(
            f"{context}: {len(turn.completion_token_ids)} completion tokens but {len(turn.rollout_logprobs)} logprobs; "
            "the policy app must return one logprob per sampled token"
        )
    if not turn.prompt_token_ids:
        raise ValueError(f"{context}: no prompt tokens; the first completion token would have no context")
    if not all(map(math.isfinite, turn.rollout_logprobs)):
        raise ValueError(f"{context}: a rollout logprob is not finite; check the policy app's logprobs")
    if not turn.sampling.is_unfiltered:
        raise ValueError(
            f"{context}: sampled with {turn.sampling}; training needs "
            f"{', '.join(f'{name}={off:g}' for name, off in FILTERS.items())} and temperature>0, "
            "because the logprobs of a filtered distribution are not the policy's"
        )
