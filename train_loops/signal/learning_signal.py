"""learning_signal: rows, their rewards, values and team signal -> one advantage per completion token.

turn rewards (or the mixer's credit) - overlong penalty - beta KL
  --gae | estimator | the team's advantages--> advantages
  x NLL gain x weight of the agent x HAPPO's M
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stores.by_name import open_by_name
from stores.traces.conventions import allowed_tokens
from train_loops.advantages.gae import gae, whiten
from train_loops.advantages.rewarded_rows import CreditKind, RewardedRows, Rows
from train_loops.config import TrainConfig
from train_loops.estimators import NLL_GAIN
from train_loops.rows.samples import Sample, trajectories_of
from train_loops.signal.kl import kl_estimate, token_rewards
from train_loops.signal.team_signal import TeamSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSignal:
    """What N rows are trained for, in the order of the samples."""

    advantages: Rows
    """N rows, one advantage per completion token; the policy loss is multiplied by it."""
    credit: NDArray[np.float64]
    """[N]: each turn's reward, or the mixer's credit; penalties included, KL not."""
    group_ids: Sequence[str]
    """[N]."""
    returns: Rows | None = None
    """Targets of the model group's own critic, for ppo and ippo."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures of the estimator itself: for gigpo, `train/anchor_share`."""


def learning_signal(
    samples: Sequence[Sample],
    scores: Mapping[str, Rows],
    *,
    config: TrainConfig,
    credit_kind: CreditKind,
    beta: float,
    team: TeamSignal | None,
) -> LearningSignal:
    """Computes the signal of all rows of one job.

    Args:
        scores: per row and completion token: `old` logprobs; `ref` logprobs where beta > 0; `values` for ppo and ippo.
        credit_kind: what the credit rule declares its turn rewards to be.
        beta: the KL coefficient in the reward.
        team: the signal of the whole-team learner for these turns; None where there is none.

    Raises:
        ValueError: the algorithm needs a team signal that is not there, or that misses a turn.
    """
    rewards = _turn_rewards(samples, config=config, team=team)
    lengths = [s.completion_length for s in samples]
    per_token = token_rewards(list(rewards), lengths, kl=_kl(scores) if beta > 0 else None, beta=beta)
    returns, metrics = None, {}
    if config.has_team_critic:
        advantages = _team_advantages(samples, team, algorithm=config.algorithm)
    elif config.has_critic:
        advantages, returns = _gae(samples, per_token, scores["values"], config=config, credit_kind=credit_kind)
    else:
        # A turn's Q is what the team can expect from there on, so that a mixer's credit is a return, whatever the rule pays.
        has_q_credit = team is not None and team.credit is not None
        rows = _rewarded_rows(samples, per_token, credit_kind="returns" if has_q_credit else credit_kind)
        metrics = config.estimator.metrics(rows, config.advantage)
        estimates = config.estimator(rows, config.advantage)  # one per row, or one per token
        advantages = _per_token(estimates, lengths, algorithm=config.algorithm)
    if config.advantage.nll_gain > 0:
        gains = open_by_name(NLL_GAIN, place="train.advantage.nll_gain")(
            scores["old"],
            keys=[(s.group_id, s.agent, s.round_index) for s in samples],
            alpha=config.advantage.nll_gain,
        )
        advantages = [a * gain for a, gain in zip(advantages, gains, strict=True)]
    factors = _factors(samples, config=config, team=team)
    if any(factor != 1.0 for factor in factors):
        advantages = [a * factor for a, factor in zip(advantages, factors, strict=True)]
    return LearningSignal(
        advantages=advantages,
        credit=rewards,
        group_ids=[s.group_id for s in samples],
        returns=returns,
        metrics=metrics,
    )


def _per_token(estimates: Any, lengths: Sequence[int], *, algorithm: str) -> Rows:
    """Returns N arrays, one advantage per completion token, of what an estimator, maybe a user's own, gives.

    Raises ValueError where that has another form than the rows, or numbers that are not finite.
    """
    if not isinstance(estimates, Sequence) and np.ndim(estimates) == 0:  # None, a generator, a number, a dict
        raise ValueError(
            f"train.algorithm: {algorithm} gives {estimates!r:.80}: give a list of {len(lengths)} advantages"
        )
    if len(estimates) != len(lengths):
        raise ValueError(f"train.algorithm: {algorithm} gives {len(estimates)} advantages for {len(lengths)} rows")
    advantages = []
    for row, (estimate, length) in enumerate(zip(estimates, lengths, strict=True)):
        try:
            values = np.asarray(estimate, dtype=np.float64)
        except (TypeError, ValueError):
            raise ValueError(
                f"train.algorithm: {algorithm} gives row {row} {estimate!r:.80}: give one number, or one per completion token"
            ) from None
        if values.shape not in ((), (1,), (length,)):
            raise ValueError(
                f"train.algorithm: {algorithm} gives row {row} advantages of shape {values.shape}: it has {length} completion tokens, so "
                f"give one number, or an array of shape ({length},)"
            )
        if not np.isfinite(values).all():
            raise ValueError(f"train.algorithm: {algorithm} gives row {row} an advantage that is not finite")
        advantages.append(np.broadcast_to(values, (length,)))
    return advantages


def _turn_rewards(samples: Sequence[Sample], *, config: TrainConfig, team: TeamSignal | None) -> NDArray[np.float64]:
    """Returns [N]: the mixer's credit where there is one, else the stored reward; minus the penalty for long completions."""
    credit = team.credit if team is not None else None  # None also while the mixer warms up
    rewards = np.array([s.reward for s in samples], dtype=np.float64)
    if credit is not None:
        rewards = np.array([_of_turn(credit, s, what="credit") for s in samples], dtype=np.float64)
    for i, s in enumerate(samples):
        own = config.agents.get(s.agent)
        overlong = own.overlong if own is not None and own.overlong is not None else config.overlong
        # A choice is one token long, which is also its limit: it can be no shorter.
        if overlong is not None and not allowed_tokens(s.constraint):
            rewards[i] += overlong_penalty(
                s.completion_length,
                max_tokens=s.max_tokens,
                buffer_tokens=overlong.buffer_tokens,
                penalty=overlong.penalty,
            )
    return rewards


def _kl(scores: Mapping[str, Rows]) -> list[NDArray[np.floating]]:
    # Other estimators would also punish tokens that the policy makes less likely than the reference does.
    return [
        kl_estimate(torch.from_numpy(old), torch.from_numpy(ref), "k1").numpy()
        for old, ref in zip(scores["old"], scores["ref"], strict=True)
    ]


def _gae(
    samples: Sequence[Sample], per_token: Rows, values: Rows, *, config: TrainConfig, credit_kind: CreditKind
) -> tuple[Rows, Rows]:
    """Computes advantages and returns of PPO (arXiv 1707.06347) and IPPO (2011.09533), which differ in what is whitened."""
    settings = config.advantage
    advantages, returns = gae(
        per_token,
        values,
        trajectories=trajectories_of(samples, credit_kind=credit_kind),
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
    )
    over = settings.whiten or config.estimator.whitens
    if over != "none":
        advantages = whiten(advantages, labels=[s.agent for s in samples] if over == "agent" else None)
    return advantages, returns


def _team_advantages(samples: Sequence[Sample], team: TeamSignal | None, *, algorithm: str) -> Rows:
    if team is None or team.advantages is None:
        raise ValueError(
            f"algorithm {algorithm!r} needs the advantages of the team's central critic: train `team` first"
        )
    return [np.full(s.completion_length, _of_turn(team.advantages, s, what="advantage")) for s in samples]


def _rewarded_rows(samples: Sequence[Sample], per_token: Rows, *, credit_kind: CreditKind) -> RewardedRows:
    return RewardedRows(
        token_rewards=per_token,
        group_ids=[s.group_id for s in samples],
        episode_ids=[s.episode_id for s in samples],
        agents=[s.agent for s in samples],
        turn_indices=[s.turn_index for s in samples],
        round_indices=[s.round_index for s in samples],
        episode_rounds=[s.episode_round for s in samples],
        prompts=[s.token_ids[: s.prompt_length] for s in samples],
        states=[s.anchor for s in samples],
        baselines=[s.baseline for s in samples],
        credit_kind=credit_kind,
    )


def _factors(samples: Sequence[Sample], *, config: TrainConfig, team: TeamSignal | None) -> list[float]:
    """Returns [N]: the weight of each row's agent, times M of its episode."""
    weight = {agent: settings.weight for agent, settings in config.agents.items()}
    factors = [weight.get(s.agent, 1.0) for s in samples]
    if team is not None and config.estimator.updates_in_turn:
        factors = [f * math.exp(team.log_factor.get(s.episode_id, 0.0)) for f, s in zip(factors, samples, strict=True)]
    return factors


def _of_turn(values: Mapping[tuple[str, int], float], sample: Sample, *, what: str) -> float:
    key = (sample.episode_id, sample.turn_index)
    if key not in values:
        raise ValueError(
            f"the team's learner has no {what} for turn {sample.turn_index} of episode {sample.episode_id}: it was "
            "trained on other traces; train `team` of this iteration again"
        )
    return values[key]


def overlong_penalty(length: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Returns min(-(length - (max_tokens - buffer_tokens)) / buffer_tokens * penalty, 0), to be added to the turn's reward.

    Args:
        length: completion tokens.
        max_tokens: the completion's limit.
        buffer_tokens: over so many tokens below the limit the penalty grows; at most as many as the limit has.
        penalty: the penalty at the limit, at least 0.
    """
    buffer_tokens = min(buffer_tokens, max_tokens)
    return min(-(length - (max_tokens - buffer_tokens)) / buffer_tokens * penalty, 0.0)
