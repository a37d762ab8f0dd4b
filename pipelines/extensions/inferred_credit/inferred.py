"""inferred: outcomes of this and of earlier iterations -> the reward of each turn, by a model of what turns lead to success.

    reward of turn t = slope * factor of its agent * (log-odds of the outcome after turn t - log-odds before it), by `turn_values`
    slope = range of outcomes * m (1 - m), m the mean outcome within the range: what one unit of log-odds changes of the outcome there

The rewards of an episode add up to what its turns together change, and of two things that an agent may say the one after which more is to be expected
is paid more. What later turns change is no part of a turn's reward, and 0 on average, so that `kind` is `returns`.

Only the inner rule's outcome is used, so that a team whose outcome is all that is known gets credit by turn. An episode is credited by
a model that never saw its task; only the factors of agents are fitted on all episodes. How a model orders the outcomes of episodes that
it never saw is the *credit fidelity*:

    (pairs of episodes with different outcomes in the right order - pairs in the wrong order) / number of these pairs

1: the turns explain the outcome; 0: no better than chance (Somers' D of the prediction, 2 AUC - 1 where outcomes are right or wrong).
Pairs are of one model each: models of different episodes differ in their level. Where it is 0 or less, or chance may explain the outcomes as
well (`CHANCE`), all turns keep the rewards of the inner rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri

from pipelines.credit.rule import (
    Credit,
    CreditKind,
    Inferred,
    PastEpisode,
    caps_failed,
    credits_of,
    failed_credit,
    pays,
    preflight,
    reads,
    shares,
    worst_outcome,
)
from pipelines.extensions.inferred_credit.turn_values import beginnings, fit, logistic_regression, turn_features
from pipelines.extensions.paper_credit.inner import PLACE, load_inner
from stores.types import Cause, EpisodeRewards, Trace, TurnReward

PART = "inferred"
"""The name of what was inferred in the breakdown of a reward."""
MAX_LOG_ODDS = 5.0
MAX_FACTOR = 3.0
NUM_FOLDS = 8
"""Tasks are split into at most so many parts; the episodes of each are predicted by a model that is fitted without it."""
CHANCE = 0.125
"""How often outcomes of chance may look as well explained. Twice the log-likelihood that factors without a meaning add has a chi-squared distribution
with as many degrees of freedom as there are factors (Wilks 1938), so that the bar rises with them; each pair of episodes counts twice, once
either way, so that twice as much is asked for."""
MIN_EVIDENCE = 1.0
"""Log-likelihood that one agent's turns must add: that of one parameter by Akaike's criterion."""
FAILED_BELOW = 1.0
"""Log-odds by which failing is paid less than anything else."""


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

    @property
    def worst_outcome(self) -> float:
        """That of the inner rule: outcomes are not inferred."""
        return worst_outcome(self.inner)

    @property
    def caps_failed(self) -> bool:
        """As the inner rule has it, whose rewards stay where none are inferred."""
        return caps_failed(self.inner)

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit of the inner rule."""
        return self.inner.assign_credit(trace)

    def assign_all(self, traces: Sequence[Trace]) -> list[Credit]:
        """Returns the credit of the inner rule, which may compare episodes."""
        return credits_of(self.inner, traces)

    def assign_failed(self, trace: Trace) -> Credit:
        """Returns the credit of an episode whose failure the policy caused: that of the inner rule."""
        return failed_credit(self.inner, trace)

    def pays(self, agent: str) -> bool:
        """Says whether the inner rule pays `agent`."""
        return pays(self.inner, agent)

    def shares(self, agent: str) -> bool:
        """Says whether `agent` shares the outcome of the inner rule."""
        return shares(self.inner, agent)

    def preflight(self) -> list[str]:
        """Returns what the inner rule says of whom it asks."""
        return preflight(self.inner)

    def reads(self, reference: str) -> bool:
        """Says whether the inner rule can read a reference."""
        return reads(self.inner, reference)

    def infer(
        self, rewards: Sequence[EpisodeRewards], traces: Sequence[Trace], past: Sequence[PastEpisode]
    ) -> Inferred:
        """Returns the rewards with inferred ones in the place of the inner rule's, format penalties apart.

        Each turn of an episode that the policy caused to fail gets `FAILED_BELOW` less than the lowest of the inferred rewards: failing
        must not pay more than being wrong.

        Args:
            rewards: those of the inner rule, for the episodes of `traces`; neither their order nor that of `past` matters.
        """
        past_traces = sorted((p.trace for p in past), key=lambda trace: trace.episode_id)
        own = sorted(traces, key=lambda trace: trace.episode_id)
        every = [*past_traces, *own]
        outcome_of = {p.trace.episode_id: p.outcome for p in past} | {r.episode_id: r.outcome for r in rewards}
        outcomes, span = _from_0_to_1([outcome_of[trace.episode_id] for trace in every])
        features = turn_features([trace.turns for trace in every])
        added = [np.zeros(len(trace.turns)) for trace in every]
        folds = _folds(every)
        for fold in folds:
            members = set(fold)
            seen = [i for i in range(len(every)) if i not in members]
            weights = fit([features[i] for i in seen], outcomes[seen])
            for i in fold:
                of_turns = np.array([weights[of_turn].sum() for of_turn in features[i]])
                added[i] = np.clip(of_turns, -MAX_LOG_ODDS, MAX_LOG_ODDS)
        fidelity = _order([(outcomes[fold], np.array([added[i].sum() for i in fold])) for fold in folds])
        factors = _factors(every, added, outcomes) if fidelity is not None and fidelity > 0 else {}
        if not factors:
            return Inferred(rewards=list(rewards), fidelity=fidelity, is_used=False)
        slope = span * float(outcomes.mean() * (1 - outcomes.mean()))
        earned = {t.episode_id: _earned(t, slope * values, factors) for t, values in zip(every, added, strict=True)}
        lowest = min([0.0, *(value for trace in own for value in earned[trace.episode_id].values())])
        for trace in own:
            if trace.cause is Cause.POLICY:
                earned[trace.episode_id] = dict.fromkeys(earned[trace.episode_id], lowest - slope * FAILED_BELOW)
        inferred = [_replaced(episode, earned[episode.episode_id]) for episode in rewards]
        return Inferred(rewards=inferred, fidelity=fidelity, is_used=True)


def _folds(traces: Sequence[Trace]) -> list[list[int]]:
    """Returns lists of indices; the episodes of a task are in one of them. None where there is one task only."""
    tasks = sorted({trace.task.task_id for trace in traces})
    fold_of = {task: i % NUM_FOLDS for i, task in enumerate(tasks)}
    count = min(NUM_FOLDS, len(tasks)) if len(tasks) > 1 else 0
    return [[i for i, trace in enumerate(traces) if fold_of[trace.task.task_id] == fold] for fold in range(count)]


def _from_0_to_1(outcomes: Sequence[float]) -> tuple[NDArray[np.float64], float]:
    """Returns outcomes between the worst, 0, and the best, 1, and the range between them; those in [0, 1] as they are."""
    low, high = min([0.0, *outcomes]), max([1.0, *outcomes])
    return (np.array(outcomes, dtype=np.float64) - low) / (high - low), high - low


def _earned(trace: Trace, added: NDArray[np.float64], factors: Mapping[str, float]) -> dict[int, float]:
    """Returns by index what each turn is paid."""
    turns = zip(trace.turns, added, strict=True)
    return {turn.turn_index: factors[turn.agent] * float(value) for turn, value in turns}


def _order(parts: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> float | None:
    """Returns how well outcomes are ordered by what was predicted, -1 to 1; None where all outcomes of each part are equal.

    Args: parts: outcomes and predictions of one model each.
    """
    right_minus_wrong, num_pairs = 0.0, 0
    for outcomes, predicted in parts:
        for outcome, prediction in zip(outcomes, predicted, strict=True):
            right_minus_wrong += float((np.sign(outcome - outcomes) * np.sign(prediction - predicted)).sum())
            num_pairs += int((outcomes != outcome).sum())
    return right_minus_wrong / num_pairs if num_pairs else None


def _factors(
    traces: Sequence[Trace], added: Sequence[NDArray[np.float64]], outcomes: NDArray[np.float64]
) -> dict[str, float]:
    """Returns by agent the factor, 0 to `MAX_FACTOR`, by which what its turns add predicts the outcomes of unseen episodes best.

    The factors are fitted together (stacked regressions, Breiman 1996), at every beginning of every episode. An agent without which the fit is
    worse by less than `MIN_EVIDENCE` gets 0, unless all are such: then each may stand in for the others. Empty where the whole fit is no
    better than chance would be in `CHANCE` of all iterations.
    """
    of_turns = np.array([turn.agent for trace in traces for turn in trace.turns])
    agents = sorted(set(of_turns.tolist()))
    lengths = [len(trace.turns) for trace in traces]
    by_turn = np.concatenate(added)[:, None] * (of_turns[:, None] == np.array(agents))
    by_episode = np.array([turns.sum(axis=0) for turns in np.split(by_turn, np.cumsum(lengths)[:-1])])
    ones, bounds = np.ones(len(traces)), (0.0, MAX_FACTOR)
    of_all, of_none = (
        logistic_regression(x, outcomes, ones, bounds=bounds)[0] for x in (by_episode, by_episode[:, :0])
    )
    if of_all - of_none < chdtri(len(agents), CHANCE):
        return {}
    sums, episode_of, weights = beginnings(lengths)
    x, targets = sums @ by_turn, outcomes[episode_of]
    best, factors = logistic_regression(x, targets, weights, bounds=bounds)
    without = [
        logistic_regression(np.delete(x, i, axis=1), targets, weights, bounds=bounds)[0] for i in range(len(agents))
    ]
    is_needed = [best - other >= MIN_EVIDENCE for other in without]
    if not any(is_needed):
        is_needed = [True] * len(agents)
    return {agent: float(f) if needed else 0.0 for agent, f, needed in zip(agents, factors, is_needed, strict=True)}


def _replaced(episode: EpisodeRewards, added: Mapping[int, float]) -> EpisodeRewards:
    return replace(episode, rewards=tuple(_reward(reward, added[reward.turn_index]) for reward in episode.rewards))


def _reward(reward: TurnReward, added: float) -> TurnReward:
    parts = {PART: added} | {name: value for name, value in reward.breakdown.items() if name == "format"}
    return replace(reward, reward=sum(parts.values()), breakdown=parts)
