"""mismatch: trainer's and engine's logprobs of the same tokens -> agreement per agent, and what to do about it.

Design rule 4. `old` is recomputed by the trainer under the parent weights, `rollout` came from the serving engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from train_loops.config import MismatchConfig

MIN_ESS = 0.5
"""Least effective sample size of what other versions sampled, where `train.mismatch.min_ess` sets none."""
NO_LIMIT = 100.0
"""Nats: other versions may differ from the parent by more than an engine may; the effective sample size decides."""
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
    """Mean of e^x - x - 1, x = old - rollout: KL(engine || trainer), never negative."""
    ess: float
    """Effective sample size of the weights before truncation, (sum w)^2 / (n sum w^2): 1 where they agree.

    w = exp(old - rollout) over tokens; with `correction: sequence` the products of a turn's, over turns.
    """


def measure(old: Rows, rollout: Rows, agents: Sequence[str], *, config: MismatchConfig) -> dict[str, Agreement]:
    """Agreement per agent. Rows are parallel: one array over completion tokens per row, and its agent.

    Rows of all workers: the decision must be the same everywhere.
    """
    of_agent: dict[str, list[NDArray[np.float64]]] = {}
    for o, r, agent in zip(old, rollout, agents, strict=True):
        x = np.asarray(o, dtype=np.float64) - np.asarray(r, dtype=np.float64)
        of_agent.setdefault(agent, []).append(x)
    return {agent: _agreement(xs, config=config) for agent, xs in sorted(of_agent.items())}


def is_close(agreements: Mapping[str, Agreement], *, config: MismatchConfig) -> bool:
    """Whether all agents are within tolerance."""
    return all(a.mean_abs <= config.tolerance_mean and a.max_abs <= config.tolerance_max for a in agreements.values())


def decide(agreements: Mapping[str, Agreement], *, config: MismatchConfig) -> Literal["none", "correct"]:
    """`none` where all agents are within tolerance, `correct` where one is beyond or `always` is set (use `correct`).

    Raises:
        MismatchError: an agent's mean difference is beyond `limit_mean`, or not a number, or its effective sample size
            is below `min_ess`.
    """
    for agent, a in sorted(agreements.items(), key=lambda item: item[1].ess):  # the worst first: it is what to accept
        found = (
            f"agent {agent!r}: trainer and engine differ by {a.mean_abs:.3g} nats on average (max {a.max_abs:.3g}, "
            f"KL {a.kl_k3:.3g}, effective sample size {a.ess:.3f}, {a.num_tokens} tokens)"
        )
        if not a.mean_abs <= config.limit_mean:
            raise MismatchError(
                f"{found}, beyond train.mismatch.limit_mean={config.limit_mean:g}; the engine served other weights, "
                "another temperature or another precision than the trainer's parent version"
            )
        if a.ess < config.min_ess:
            raise MismatchError(
                f"{found}; the effective sample size is below train.mismatch.min_ess={config.min_ess:g}: these turns say "
                "too little about the weights to train; sample again, or train on traces of a nearer version, or accept "
                f"it with train.mismatch.min_ess={math.floor(a.ess * 1000) / 1000:g}"
            )
    return "correct" if config.always or not is_close(agreements, config=config) else "none"


def correct(
    old: Rows, rollout: Rows, *, config: MismatchConfig
) -> tuple[list[NDArray[np.float64]] | None, list[NDArray[np.float64]] | None]:
    """Importance weights and what is kept, per completion token; None for what the settings leave out.

    token      w_t = min(exp(old_t - rollout_t), truncation)           (Ionides 2008)
    sequence   w_t = min(exp(sum_t (old_t - rollout_t)), truncation)   for all tokens of a turn
    kept_t     1 where exp(old_t - rollout_t) lies in `reject_token` and the turn's geometric mean
               exp(mean_t (old_t - rollout_t)) in `reject_sequence`, else 0
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
    kept = [_within(x, config.reject_token) * _within(np.full(len(x), x.mean()), config.reject_sequence) for x in gaps]
    return weights, kept


def off_policy(config: MismatchConfig) -> MismatchConfig:
    """Settings for what other versions sampled: weights always on, and a floor under the effective sample size."""
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
    kept: list[NDArray[np.float64]] | None,
    config: MismatchConfig,
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]], dict[str, Agreement]]:
    """Importance weights and what is kept (see `correct`) once more, with those of rows from service by `off_policy`.

    Returns also how near these rows are, per agent. Those of an agent whose effective sample size is below `min_ess` say
    too little about the weights: none of their tokens is kept.
    """
    config = off_policy(config)
    rows = [i for i, served in enumerate(is_served) if served]
    found = measure([old[i] for i in rows], [rollout[i] for i in rows], [agents[i] for i in rows], config=config)
    own_weights, own_kept = correct([old[i] for i in rows], [rollout[i] for i in rows], config=config)
    assert own_weights is not None, "off_policy: a correction is always on"
    weights = weights if weights is not None else [np.ones(len(of)) for of in old]
    kept = kept if kept is not None else [np.ones(len(of)) for of in old]
    for place, i in enumerate(rows):
        is_near = found[agents[i]].ess >= config.min_ess
        weights[i] = own_weights[place]
        kept[i] = (own_kept[place] if own_kept is not None else np.ones(len(old[i]))) * is_near
    return weights, kept, found


def _within(log_weights: NDArray[np.float64], bounds: tuple[float, float] | None) -> NDArray[np.float64]:
    if bounds is None:
        return np.ones(len(log_weights))
    low, high = bounds
    return ((log_weights >= np.log(max(low, 1e-300))) & (log_weights <= np.log(high))).astype(np.float64)


def _agreement(rows: Sequence[NDArray[np.float64]], *, config: MismatchConfig) -> Agreement:
    x = np.concatenate(rows)
    w = np.exp(np.clip(x, -20, 20))
    weighed = np.array([row.sum() for row in rows]) if config.correction == "sequence" else x
    return Agreement(
        num_tokens=len(x),
        mean_abs=float(np.abs(x).mean()),
        max_abs=float(np.abs(x).max()),
        kl_k3=float((w - 1 - np.clip(x, -20, 20)).mean()),
        ess=_effective_share(weighed),
    )


def _effective_share(log_weights: NDArray[np.float64]) -> float:
    w = np.exp(log_weights - log_weights.max())  # a common factor cancels
    return float(w.sum() ** 2 / (len(w) * np.square(w).sum()))
