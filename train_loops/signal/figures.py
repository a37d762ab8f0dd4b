"""figures: rows of a job, their scores, advantages and agreements -> metrics of the model group and of each agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from train_loops.rows.samples import Funnel, Sample
from train_loops.signal.kl import k3
from train_loops.signal.learning_signal import LearningSignal
from train_loops.signal.mismatch import Agreement

Rows = Sequence[NDArray[np.floating]]


def row_figures(
    samples: Sequence[Sample], scores: Mapping[str, Rows], signal: LearningSignal, is_active: NDArray[np.bool_]
) -> dict[str, float]:
    """Returns `train/<name>` of all rows together, before the first step; means of rewards are of whole episodes alone."""
    flat = np.concatenate(signal.advantages)
    whole = _of_whole_episodes(samples, range(len(samples)))
    metrics = {
        "train/rows": float(len(samples)),
        "train/tokens": float(sum(len(s.token_ids) for s in samples)),
        "train/completion_tokens": float(sum(s.completion_length for s in samples)),
        "train/non_zero_advantage_rows": float(is_active.sum()),
        "train/reward_mean": float(np.mean([samples[i].reward for i in whole])),
        "train/credit_mean": float(signal.credit[whole].mean()),
        "train/advantage_mean": float(flat.mean()),
        "train/advantage_std": float(flat.std()),
        "train/groups_without_signal": _share_without_signal([signal.group_ids[i] for i in whole], is_active[whole]),
    }
    if num_siblings := sum(s.is_sibling for s in samples):
        metrics["train/sibling_rows"] = float(num_siblings)
    if "entropy" in scores:
        metrics["train/entropy"] = float(np.concatenate(scores["entropy"]).mean())
    if "ref" in scores:
        metrics["train/kl_ref_k3"] = _kl_ref(scores["old"], scores["ref"])
    if signal.returns is not None:
        target, value = np.concatenate(signal.returns), np.concatenate(scores["values"])
        metrics["train/return_mean"] = float(target.mean())
        metrics["train/value_mean"] = float(value.mean())
        metrics |= explained_variance(target, value)
    if taken := metrics.keys() & signal.metrics.keys():
        raise ValueError(
            f"train.algorithm: a figure of the estimator has the name of another one, {min(taken)}: take a new name"
        )
    return metrics | dict(signal.metrics)


def explained_variance(target: NDArray[np.floating], value: NDArray[np.floating]) -> dict[str, float]:
    """Returns `train/explained_variance`: 1 - var(target - value) / var(target); nothing where the target does not vary."""
    if not _varies(target):
        return {}
    return {"train/explained_variance": float(1 - (target - value).var() / target.var())}


def agent_figures(
    samples: Sequence[Sample],
    scores: Mapping[str, Rows],
    signal: LearningSignal,
    is_active: NDArray[np.bool_],
    agreements: Mapping[str, Agreement],
    *,
    is_off_policy: bool = False,
) -> dict[str, dict[str, float]]:
    """Returns figures per agent: those of `row_figures`, its agreement, and how its credit follows the outcome.

    Args: is_off_policy: see `agreement_figures`.
    """
    rows_of: dict[str, list[int]] = defaultdict(list)
    for i, s in enumerate(samples):
        rows_of[s.agent].append(i)
    figures = {}
    for agent, rows in rows_of.items():
        whole = _of_whole_episodes(samples, rows)
        about = {
            "rows": float(len(rows)),
            "completion_tokens": float(sum(samples[i].completion_length for i in rows)),
            "reward_mean": float(np.mean([samples[i].reward for i in whole])),
            "credit_mean": float(signal.credit[whole].mean()),
            "advantage_std": float(np.concatenate([signal.advantages[i] for i in rows]).std()),
            "groups_without_signal": _share_without_signal([signal.group_ids[i] for i in whole], is_active[whole]),
        }
        if (a := agreements.get(agent)) is not None:  # none where all of its rows are from service
            about |= _agreement_of_agent(a, is_off_policy=is_off_policy)
        if "entropy" in scores:
            about["entropy"] = float(np.concatenate([scores["entropy"][i] for i in rows]).mean())
        if "ref" in scores:
            about["kl_ref_k3"] = _kl_ref([scores["old"][i] for i in rows], [scores["ref"][i] for i in rows])
        correlation = credit_correlation(
            [float(np.mean(signal.advantages[i])) for i in whole], [samples[i].outcome for i in whole]
        )
        if correlation is not None:
            about["credit_correlation"] = correlation
        figures[agent] = about
    return figures


def _agreement_of_agent(a: Agreement, *, is_off_policy: bool) -> dict[str, float]:
    if is_off_policy:
        gaps = {"policy_gap_mean": a.mean_abs, "policy_gap_max": a.max_abs, "policy_kl_k3": a.kl_k3}
        return {**gaps, "policy_weight_mean": a.weight_mean, "ess": a.ess}
    gaps = {"logprob_gap_mean": a.mean_abs, "logprob_gap_max": a.max_abs, "mismatch_kl_k3": a.kl_k3}
    return {**gaps, "ess": a.ess}


def _of_whole_episodes(samples: Sequence[Sample], rows: Sequence[int]) -> list[int]:
    """Returns the rows that are not turns of a replay, which are chosen, and played after an agent's silence, too."""
    return [i for i in rows if not samples[i].is_sibling] or list(rows)


def agreement_figures(agreements: Mapping[str, Agreement], *, is_off_policy: bool = False) -> dict[str, float]:
    """Joins the agreements of all agents: the mean over tokens, the worst maximum, the least effective sample size.

    Args:
        agreements: without any, as where all rows are from service, there are no figures.
        is_off_policy: another version than the parent sampled. Then the figures say how far the two policies are from each other
            (`policy_*`, nats), and not whether trainer and engine agree (`logprob_gap_*`).
    """
    if not agreements:
        return {}
    every = agreements.values()
    num_tokens = sum(a.num_tokens for a in every)
    if is_off_policy:
        return {
            "train/policy_gap_mean": sum(a.mean_abs * a.num_tokens for a in every) / num_tokens,
            "train/policy_gap_max": max(a.max_abs for a in every),
            "train/policy_kl_k3": sum(a.kl_k3 * a.num_tokens for a in every) / num_tokens,
            "train/policy_weight_mean": sum(a.weight_mean * a.num_tokens for a in every) / num_tokens,
            "train/ess": min(a.ess for a in every),
        }
    return {
        "train/logprob_gap_mean": sum(a.mean_abs * a.num_tokens for a in every) / num_tokens,
        "train/logprob_gap_max": max(a.max_abs for a in every),
        "train/ess": min(a.ess for a in every),
    }


def funnel_figures(funnel: Funnel) -> dict[str, dict[str, float]]:
    """Returns `funnel/<stage>` per agent, in turns."""
    return {agent: {f"funnel/{stage}": float(n) for stage, n in c.items()} for agent, c in funnel.counts.items()}


def credit_correlation(credit: Sequence[float], outcomes: Sequence[float]) -> float | None:
    """Returns Pearson's r of turns' advantages and their episodes' outcomes; None where either does not vary."""
    x, y = np.asarray(credit, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    if not (_varies(x) and _varies(y)):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _varies(x: NDArray[np.floating]) -> bool:
    """Says whether the values differ by more than rounding."""
    return bool(np.ptp(x) > 1e-6 * max(float(np.abs(x).max()), 1e-6))


def _share_without_signal(group_ids: Sequence[str], is_active: NDArray[np.bool_]) -> float:
    """Returns the share of groups none of whose rows has an advantage."""
    active = {group for group, active in zip(group_ids, is_active, strict=True) if active}
    return 1 - len(active) / max(len(set(group_ids)), 1)


def _kl_ref(old: Rows, ref: Rows) -> float:
    return float(k3(np.concatenate(ref).astype(np.float64) - np.concatenate(old)).mean())
