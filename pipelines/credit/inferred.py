"""inferred: outcomes of this and of earlier iterations -> the reward of each turn, by a model of what turns lead to success.

    reward of turn t = what t adds to the log-odds of the outcome, within +-MAX_LOG_ODDS, by `turn_values`

Only the inner rule's outcome is used, so that a team whose outcome is all that is known gets credit by turn. The episodes of a task are
credited by a model that never saw the task in this iteration, and the same model's prediction of their outcomes says how far it can be
trusted, the *credit fidelity*

    1 - sum (outcome - predicted)^2 / sum (outcome - mean outcome)^2

1: the turns explain the outcome; 0 or less: they explain nothing, and then all turns keep the rewards of the inner rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipelines.credit.inner import PLACE, load_inner
from pipelines.credit.rule import Credit, CreditKind, failed_credit
from pipelines.credit.turn_values import Features, fit, turn_features
from stores.types import Cause, EpisodeRewards, Trace, TurnReward

PART = "inferred"
"""The name of what was inferred in the breakdown of a reward."""
MAX_LOG_ODDS = 5.0
NUM_FOLDS = 8
"""The tasks of an iteration are credited in at most so many parts, each by a model that is fitted without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastEpisode:
    """An episode of an earlier iteration, and its outcome."""

    trace: Trace
    outcome: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """The rewards of an iteration, and how far they can be trusted."""

    rewards: list[EpisodeRewards]
    fidelity: float
    """Share of the variance of outcomes that the model explains in episodes that it never saw; 0 where all ended alike."""
    is_used: bool
    """False where it explains nothing: the rewards are those of the inner rule."""


class InferredReward:
    """Credit by turn, inferred from whole episodes and their outcomes.

    Evaluation, `troupe why` and the test episode of `troupe validate` need outcomes only: `assign_credit` is that of the inner rule.
    Stage score calls `infer` after it.
    """

    kind: CreditKind = "returns"

    def __init__(self, inner: Mapping[str, Any], past_iterations: int = 10) -> None:
        """Args:
        inner: the credit rule that says how an episode ended, as `{path, settings}`.
        past_iterations: how many of the latest iterations are learned from, besides the one that is credited.
        """
        self.inner, self.identity = load_inner(inner)
        if self.inner.kind != "returns":
            raise ValueError(
                f"{PLACE}: {inner['path']} pays increments, but what is inferred takes the place of returns: give a rule of kind "
                "`returns`, e.g. pipelines.credit.outcome:OutcomeShare"
            )
        if isinstance(past_iterations, bool) or not isinstance(past_iterations, int) or past_iterations < 0:
            raise ValueError(
                f"credit.settings.past_iterations: {past_iterations!r} is no number of iterations: give 0 or more"
            )
        self.past_iterations = past_iterations

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit of the inner rule."""
        return self.inner.assign_credit(trace)

    def assign_failed(self, trace: Trace) -> Credit:
        """Returns the credit of an episode whose failure the policy caused: that of the inner rule."""
        return failed_credit(self.inner, trace)

    def infer(
        self, rewards: Sequence[EpisodeRewards], traces: Sequence[Trace], past: Sequence[PastEpisode]
    ) -> Inferred:
        """Returns the rewards with inferred ones in the place of the inner rule's, format penalties apart.

        Episodes that the policy caused to fail are learned from, and keep the rewards of the inner rule.

        Args:
            rewards: those of the inner rule, for the episodes of `traces`; neither their order nor that of `past` matters.
        """
        past = sorted(past, key=lambda episode: episode.trace.episode_id)
        traces = sorted(traces, key=lambda trace: trace.episode_id)
        reward_of = {reward.episode_id: reward for reward in rewards}
        features = turn_features([trace.turns for trace in (*(p.trace for p in past), *traces)])
        earlier, own = features[: len(past)], features[len(past) :]
        scaled = _scaled([*(p.outcome for p in past), *(reward_of[t.episode_id].outcome for t in traces)])
        outcomes_before, outcomes = scaled[: len(past)], np.array(scaled[len(past) :])
        added: dict[str, Mapping[int, float]] = {}
        predicted = np.zeros(len(traces))
        for fold in _folds(traces):
            seen = [i for i in range(len(traces)) if i not in fold]
            values = fit([*earlier, *(own[i] for i in seen)], [*outcomes_before, *(outcomes[i] for i in seen)])
            for i in fold:
                predicted[i] = values.predict(own[i])
                added[traces[i].episode_id] = _by_turn(traces[i], own[i], values.of_turns(own[i]))
        fidelity = _fidelity(outcomes, predicted)
        if fidelity <= 0:
            return Inferred(rewards=list(rewards), fidelity=fidelity, is_used=False)
        failed = {trace.episode_id for trace in traces if trace.cause is Cause.POLICY}
        inferred = [r if r.episode_id in failed else _replaced(r, added[r.episode_id]) for r in rewards]
        return Inferred(rewards=inferred, fidelity=fidelity, is_used=True)


def _folds(traces: Sequence[Trace]) -> list[set[int]]:
    """Returns sets of indices; the episodes of a task are in one of them."""
    tasks = sorted({trace.task.task_id for trace in traces})
    fold_of = {task: i % NUM_FOLDS for i, task in enumerate(tasks)}
    return [
        {i for i, trace in enumerate(traces) if fold_of[trace.task.task_id] == fold}
        for fold in range(min(NUM_FOLDS, len(tasks)))
    ]


def _scaled(outcomes: Sequence[float]) -> list[float]:
    """Returns outcomes between the worst, 0, and the best, 1; those in [0, 1] as they are."""
    low, high = min(0.0, *outcomes), max(1.0, *outcomes)
    return [(outcome - low) / (high - low) for outcome in outcomes]


def _by_turn(trace: Trace, features: Sequence[Features], added: Any) -> dict[int, float]:
    clipped = np.clip(added, -MAX_LOG_ODDS, MAX_LOG_ODDS)
    return {turn.turn_index: float(value) for turn, value in zip(trace.turns, clipped, strict=True)}


def _fidelity(outcomes: Any, predicted: Any) -> float:
    spread = ((outcomes - outcomes.mean()) ** 2).sum() if len(outcomes) else 0.0
    return float(1 - ((outcomes - predicted) ** 2).sum() / spread) if spread else 0.0


def _replaced(episode: EpisodeRewards, added: Mapping[int, float]) -> EpisodeRewards:
    return replace(episode, rewards=tuple(_reward(reward, added[reward.turn_index]) for reward in episode.rewards))


def _reward(reward: TurnReward, added: float) -> TurnReward:
    parts = {PART: added} | {name: value for name, value in reward.breakdown.items() if name == "format"}
    return replace(reward, reward=sum(parts.values()), breakdown=parts)
