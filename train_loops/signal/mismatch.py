"""mismatch: trainer's and engine's logprobs of the same tokens -> agreement per agent, and what to do about it.

`old` is recomputed by the trainer under the parent weights, `rollout` came from the serving engine. The two must agree: a
gap means that the tokens were not sampled by the policy that is trained, and it is measured before every update.

Where an earlier version than the parent sampled (off policy), a gap is what training did in between. Then the weights lead from
one to the other, and what shows logprobs that are not the sampler's is the mean of the weights: see `check_mean_weight`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from train_loops.config import MismatchConfig
from train_loops.signal.kl import k3

MIN_ESS = 0.5
"""The least effective sample size of turns that other versions sampled, where `train.mismatch.min_ess` sets none."""
NO_LIMIT = 100.0
"""Nats: other versions may differ from the parent by more than an engine may; for them the effective sample size decides."""
MEAN_WEIGHT_TOLERANCE = 0.05
"""A mean weight that differs from 1 by less is never called wrong: missing episodes, whose causes are not quite independent of
their tokens (long ones miss deadlines), move it by some hundredths."""
MEAN_WEIGHT_ERRORS = 8.0
"""How many standard errors the mean weight may differ from 1. Weights are skewed to the right, so that a mean over few of them is
too low more often than a normal distribution says."""
MIN_EFFECTIVE = 500.0
"""How many tokens of equal weight uneven ones must be worth before a mean weight below 1 counts."""
UNSEEN_WEIGHT = 100.0
"""What may be missing from the sum of the weights because it was not drawn. A token that ought to come ln 10,000 = 9.2 times is absent
once in 10,000 times; where the parent takes it 10 times as often as the sampler, its weights would have added 92."""
MIN_GAPS = 50
"""How many tokens under a constraint must differ by more than the tolerance before the sign of their differences says anything."""
ONE_SIDED = 0.9
"""The share of these with one sign from which the masks are held to be wrong: noise of rounding goes both ways."""
LEAST_BIAS = 0.005
"""How far the mean weight of tokens under a constraint must be from 1 for their masks to matter."""
Rows = Sequence[NDArray[np.floating] | Sequence[float]]


class MismatchError(ValueError):
    """Trainer and engine disagree beyond the hard limit: what was sampled is not what would be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How near `old` is to `rollout` over one agent's completion tokens; differences in nats."""

    num_tokens: int
    mean_abs: float
    max_abs: float
    kl_k3: float
    """Mean of e^x - x - 1, x = old - rollout: estimates KL(engine || trainer) (k3 of kl.py), never negative."""
    ess: float
    """Effective sample size of the weights before truncation, (sum w)^2 / (n sum w^2) (Kish 1965): 1 where they agree.

    w = exp(old - rollout) over tokens; with `correction: sequence` the product over a turn's tokens, over turns.
    """
    weight_mean: float
    """Mean of exp(old - rollout) over tokens, before truncation."""
    weight_sd: float
    """Its standard deviation over tokens."""

    @property
    def mean_weight_allowance(self) -> float:
        """Returns by how much `weight_mean` may differ from 1 by chance: see `check_mean_weight`."""
        by_chance = MEAN_WEIGHT_ERRORS * self.weight_sd / math.sqrt(self.num_tokens)
        return max(MEAN_WEIGHT_TOLERANCE, by_chance, UNSEEN_WEIGHT / self.num_tokens)


def measure(old: Rows, rollout: Rows, agents: Sequence[str], *, config: MismatchConfig) -> dict[str, Agreement]:
    """Returns the agreement per agent.

    Args:
        old, rollout: N rows, one logprob per completion token; the rows of all workers, so that each decides the same.
        agents: [N].
    """
    gaps_of: dict[str, list[NDArray[np.float64]]] = {}
    for old_row, rollout_row, agent in zip(old, rollout, agents, strict=True):
        gap = np.asarray(old_row, dtype=np.float64) - np.asarray(rollout_row, dtype=np.float64)
        gaps_of.setdefault(agent, []).append(gap)
    return {agent: _agreement(gaps, config=config) for agent, gaps in sorted(gaps_of.items())}


def is_close(agreements: Mapping[str, Agreement], *, config: MismatchConfig) -> bool:
    """Says whether all agents are within tolerance."""
    return all(a.mean_abs <= config.tolerance_mean and a.max_abs <= config.tolerance_max for a in agreements.values())


def decide(
    agreements: Mapping[str, Agreement], *, config: MismatchConfig, is_off_policy: bool = False
) -> Literal["none", "correct"]:
    """Returns `none` where all agents are within tolerance; `correct` where one is beyond it, or `always` is set.

    Args:
        is_off_policy: whether another version than the parent, or another run's, sampled the rows; changes the error's advice.

    Raises:
        MismatchError: an agent's mean difference is beyond `limit_mean`, or not a number, or its effective sample size
            is below `min_ess`.
    """
    whose = "the version that sampled and the parent" if is_off_policy else "trainer and engine"
    advice = "sample again, or train on traces of a nearer version"
    if is_off_policy:  # the same episodes are trained on again, however often the stage is repeated
        advice = (
            "ids and logprobs that do not belong together look like this, too; if it is the distance, take traces of a nearer version, or "
            "start a run with a smaller loop.max_lag or a smaller learning rate"
        )
    # The worst agent first: the error names the `min_ess` that would accept all of them.
    for agent, a in sorted(agreements.items(), key=lambda item: item[1].ess):
        gap = (
            f"agent {agent!r}: {whose} differ by {a.mean_abs:.3g} nats on average (max {a.max_abs:.3g}, "
            f"KL {a.kl_k3:.3g}, effective sample size {a.ess:.3f}, {a.num_tokens} tokens)"
        )
        if not a.mean_abs <= config.limit_mean:  # written so that NaN is an error, too
            raise MismatchError(
                f"{gap}, beyond train.mismatch.limit_mean={config.limit_mean:g}; the engine served other weights, "
                "another temperature or another precision than the trainer's parent version"
            )
        if a.ess < config.min_ess:
            raise MismatchError(
                f"{gap}; the effective sample size is below train.mismatch.min_ess={config.min_ess:g}: these turns say "
                f"too little about the weights to train; {advice}, or accept "
                f"it with train.mismatch.min_ess={math.floor(a.ess * 1000) / 1000:g}"
            )
    return "correct" if config.always or not is_close(agreements, config=config) else "none"


def check_mean_weight(agreements: Mapping[str, Agreement]) -> None:
    """Fails where the stored logprobs cannot be those of the distribution from which the tokens were drawn.

        x ~ p:  E[q(x) / p(x)] = sum_x p(x) q(x) / p(x) = 1    for every q whose support lies in that of p

    whatever was drawn before, so that 1 is also the mean over all tokens of a job, p the sampler's and q the parent's. (The
    deviations w_t - 1 are martingale differences: they are uncorrelated, however many tokens a turn has, and the mean's standard
    error is sd / sqrt(n).) Called wrong is

        |mean w - 1| > max(MEAN_WEIGHT_TOLERANCE, MEAN_WEIGHT_ERRORS * sd / sqrt(n), UNSEEN_WEIGHT / n)

    A mean below 1 counts only where the effective sample size over tokens is at least `MIN_ESS`, or worth `MIN_EFFECTIVE` tokens: few uneven
    weights usually have one, because the large ones were not drawn. A mean above 1 always counts: uneven weights have a large sd. By the last term up to
    100 tokens say hardly anything.

    It finds logprobs of another temperature than the tokens', and a trainer or an engine that leaves out the mask of allowed tokens.
    Ids beside their logprobs give weights of which few count: the effective sample size finds them. Nothing here finds what is
    wrong in p and q alike: a temperature, or the number of the version.

    Args:
        agreements: of tokens that were not chosen after they had been drawn: where only episodes of some outcomes are left, the
            expectation is another one.

    Raises:
        MismatchError: an agent's mean weight is wrong.
    """
    for agent, a in agreements.items():
        ess = a.weight_mean**2 / (a.weight_mean**2 + a.weight_sd**2)
        counts = a.weight_mean > 1 or ess >= MIN_ESS or a.num_tokens * ess >= MIN_EFFECTIVE
        if counts and abs(a.weight_mean - 1) > a.mean_weight_allowance:
            raise MismatchError(
                f"agent {agent!r}: the mean of exp(old - rollout) is {a.weight_mean:.4f} over {a.num_tokens} tokens, and 1 within "
                f"{a.mean_weight_allowance:.2g} for tokens drawn from the distribution whose logprobs are stored: the engine stored "
                "logprobs of another temperature or of other allowed tokens than it drew with (see its logprobs_mode), or the trainer "
                "takes other tokens for allowed; mend that, and sample again"
            )


def check_masks(
    old: Rows,
    rollout: Rows,
    agents: Sequence[str],
    constrained: Sequence[NDArray[np.bool_] | None],
    *,
    config: MismatchConfig,
) -> None:
    """Fails where the trainer's masks of constrained tokens are not those that the engine sampled under, on policy.

    Under a mask that allows too much each token is less likely than the engine said, under one that allows too little more likely: all
    differences have one sign, where those of rounding have both. Among all tokens of an agent such differences are small.

    Args:
        old, rollout: N rows, one logprob per completion token.
        agents: [N].
        constrained: N rows: which tokens were under a constraint; None: none.

    Raises:
        MismatchError: an agent's masks are wrong.
    """
    gaps_of: dict[str, list[NDArray[np.float64]]] = {}
    for old_row, rollout_row, agent, is_constrained in zip(old, rollout, agents, constrained, strict=True):
        if is_constrained is not None:
            gap = np.asarray(old_row, dtype=np.float64) - np.asarray(rollout_row, dtype=np.float64)
            gaps_of.setdefault(agent, []).append(gap[is_constrained])
    for agent, rows in sorted(gaps_of.items()):
        gaps = np.concatenate(rows)
        far = gaps[np.abs(gaps) > config.tolerance_mean]
        share, bias = float((far < 0).mean()) if len(far) else 0.5, float(np.exp(np.minimum(gaps, 20)).mean()) - 1
        if len(far) >= MIN_GAPS and max(share, 1 - share) >= ONE_SIDED and abs(bias) > LEAST_BIAS:
            raise MismatchError(
                f"agent {agent!r}: of {len(gaps)} tokens under a constraint {len(far)} differ between trainer and engine, {share:.0%} of them "
                f"less likely in the trainer (median {float(np.median(np.abs(far))):.3g} nats, max {float(np.abs(far).max()):.3g}): the constraint "
                "that is stored is not the one that the engine sampled under, or their versions of xgrammar differ; mend that, and sample again"
            )


def correct(
    old: Rows, rollout: Rows, *, config: MismatchConfig
) -> tuple[list[NDArray[np.float64]] | None, list[NDArray[np.float64]] | None]:
    """Returns importance weights and a mask of the tokens to keep, N rows each; None for what the settings leave out.

        token      w_t = min(exp(old_t - rollout_t), truncation)           (truncated importance sampling, Ionides 2008)
        sequence   w_t = min(exp(sum_t (old_t - rollout_t)), truncation)   for all tokens of a turn
        mask_t     1 where exp(old_t - rollout_t) lies in `reject_token` and the turn's geometric mean
                   exp(mean_t (old_t - rollout_t)) in `reject_sequence`, else 0

    The PPO ratio is then taken against `old`, and these weights lead from `rollout` to `old`: decoupled PPO (Hilton et al.
    2021, arXiv 2110.00641).

    Args:
        old, rollout: N rows, one logprob per completion token.
    """
    gaps = [
        np.asarray(o, dtype=np.float64) - np.asarray(r, dtype=np.float64) for o, r in zip(old, rollout, strict=True)
    ]
    weights = None
    if config.correction == "token":
        weights = [np.exp(np.minimum(x, np.log(config.truncation))) for x in gaps]
    elif config.correction == "sequence":
        weights = [np.full(len(x), np.exp(min(float(x.sum()), np.log(config.truncation)))) for x in gaps]
    if config.reject_token is None and config.reject_sequence is None:
        return weights, None
    keep_mask = [
        _within(x, config.reject_token) * _within(np.full(len(x), x.mean()), config.reject_sequence) for x in gaps
    ]
    return weights, keep_mask


def off_policy(config: MismatchConfig) -> MismatchConfig:
    """Returns the settings for turns that other versions sampled: always weighted, with a least effective sample size."""
    changes = {
        "always": True,
        "old_logprobs": "recompute",
        "correction": "token" if config.correction == "none" else config.correction,
        "limit_mean": NO_LIMIT,
        "min_ess": config.min_ess or MIN_ESS,
    }
    return config.model_copy(update=changes)


def correct_served(
    old: Rows,
    rollout: Rows,
    agents: Sequence[str],
    is_served: Sequence[bool],
    *,
    weights: list[NDArray[np.float64]] | None,
    keep_mask: list[NDArray[np.float64]] | None,
    config: MismatchConfig,
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]], dict[str, Agreement]]:
    """Corrects the rows from service by `off_policy`, and leaves the other rows' weights and mask as they are.

    Args:
        old, rollout, agents, is_served: N rows.
        weights, keep_mask: of `correct`; None: 1 on every token.

    Returns:
        Weights and mask of all rows, and per agent how near its rows from service are. An agent whose effective sample size
        is below `min_ess` says too little about the weights: the mask is 0 on its rows from service.
    """
    config = off_policy(config)
    served_rows = [i for i, served in enumerate(is_served) if served]
    agreements = measure(
        [old[i] for i in served_rows],
        [rollout[i] for i in served_rows],
        [agents[i] for i in served_rows],
        config=config,
    )
    own_weights, own_mask = correct([old[i] for i in served_rows], [rollout[i] for i in served_rows], config=config)
    assert own_weights is not None, "off_policy: a correction is always on"
    weights = weights if weights is not None else [np.ones(len(row)) for row in old]
    keep_mask = keep_mask if keep_mask is not None else [np.ones(len(row)) for row in old]
    for number, i in enumerate(served_rows):
        is_near = agreements[agents[i]].ess >= config.min_ess
        weights[i] = own_weights[number]
        keep_mask[i] = (own_mask[number] if own_mask is not None else np.ones(len(old[i]))) * is_near
    return weights, keep_mask, agreements


def _within(log_weights: NDArray[np.float64], bounds: tuple[float, float] | None) -> NDArray[np.float64]:
    """Returns 1 where a weight lies within `bounds`, else 0; shaped like `log_weights`."""
    if bounds is None:
        return np.ones(len(log_weights))
    low, high = bounds
    return ((log_weights >= np.log(max(low, 1e-300))) & (log_weights <= np.log(high))).astype(np.float64)


def _agreement(rows: Sequence[NDArray[np.float64]], *, config: MismatchConfig) -> Agreement:
    x = np.concatenate(rows)
    w = np.exp(np.clip(x, -20, 20))
    log_weights = np.array([row.sum() for row in rows]) if config.correction == "sequence" else x
    return Agreement(
        num_tokens=len(x),
        mean_abs=float(np.abs(x).mean()),
        max_abs=float(np.abs(x).max()),
        kl_k3=float(k3(x).mean()),
        ess=effective_sample_size(log_weights),
        weight_mean=float(w.mean()),
        weight_sd=float(w.std()),
    )


def effective_sample_size(log_weights: NDArray[np.float64]) -> float:
    """Returns (sum w)^2 / (n sum w^2) (Kish 1965): 1 where all w are equal, 1/n where one outweighs the rest."""
    w = np.exp(log_weights - log_weights.max())  # a common factor cancels, and without it large weights would overflow
    return float(w.sum() ** 2 / (len(w) * np.square(w).sum()))
