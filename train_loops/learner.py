"""learner: the training rows of one order -> optimizer steps and figures. Pure orchestration of the maths modules.

    pinned traces + rewards --read_rows--> samples
      samples --policy--> old logprobs --mismatch--> keep | weigh | mask | fail
              --reference--> KL (if it has a coefficient)      --critic--> values (ppo, ippo)
      rewards, KL, values, the team's signal --learning_signal--> advantages
      num_epochs x num_minibatches --Update--> steps

Every worker knows all rows and all per-row numbers; only forward and backward passes are shared out.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stores.traces import TraceStore
from stores.types import RewardsRef, Trace, TracesRef
from train_loops.advantages.rewarded_rows import CreditKind
from train_loops.baselines import baselines_of
from train_loops.config import BASELINE_ALGORITHMS, TrainConfig
from train_loops.figures import agent_figures, agreement_figures, funnel_figures, row_figures
from train_loops.kl import adapted_coef
from train_loops.layout import Layout
from train_loops.learning_signal import learning_signal
from train_loops.mismatch import Agreement, correct, correct_served, decide, is_close, measure
from train_loops.models import Models
from train_loops.rows import Funnel, Sample, samples_of
from train_loops.scoring import Rows, measured_on_probe, probe_rows, score_rows
from train_loops.team.happo import effective_sample_size
from train_loops.team.signal import TeamSignal
from train_loops.update import Update


@dataclass(slots=True, kw_only=True)
class Learned:
    """What came out of one order's rows."""

    reason: str = ""
    """Why nothing was trained; empty if something was."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`train/<name>`."""
    agents: dict[str, dict[str, float]] = field(default_factory=dict)
    log_ratios: dict[str, float] = field(default_factory=dict)
    """HAPPO: per episode the sum over its turns and tokens of logprob after - logprob before."""
    advantages: dict[tuple[str, int], NDArray[np.floating]] = field(default_factory=dict)
    """[completion tokens] by episode id and turn index, for people to look at."""
    kl_coef: float = 0.0
    """The KL coefficient in the reward for the next order: what it was, or adapted."""


def read_rows(
    store: TraceStore,
    traces: TracesRef,
    rewards: RewardsRef,
    *,
    model_group: str,
    config: TrainConfig,
    credit_kind: CreditKind,
) -> tuple[list[Sample], Funnel]:
    """The training rows of `model_group` in a fixed order, and the counts of what fell out."""
    reward_of = {r.episode_id: r for r in store.read_rewards(rewards)}
    settings: dict[str, Any] = {
        "statuses": config.train_statuses,
        "train_mixed_versions": config.train_mixed_versions,
    }
    funnel = Funnel(model_group=model_group, **settings)
    samples: list[Sample] = []
    seen: list[Trace] = []
    for trace in store.read_traces(traces, model_group=model_group):
        episode_rewards = reward_of.get(trace.episode_id)
        funnel.see(trace, episode_rewards)
        samples += samples_of(trace, episode_rewards, model_group=model_group, **settings)
        seen += [trace] if config.algorithm in BASELINE_ALGORITHMS else []
    baselines = baselines_of(seen, reward_of, credit_kind=credit_kind)
    samples = [replace(s, baseline=baselines.get((s.episode_id, s.turn_index))) for s in samples]
    return sorted(samples, key=lambda s: (s.episode_id, s.turn_index)), funnel


def learn(
    samples: Sequence[Sample],
    models: Models,
    *,
    config: TrainConfig,
    credit_kind: Literal["returns", "increments"],
    seed: int,
    funnel: Funnel,
    trains_policy: bool = True,
    pad_id: int = 0,
    team: TeamSignal | None = None,
    kl_coef: float | None = None,
) -> Learned:
    """Trains `models` on `samples`; every worker calls it with the same arguments.

    Args:
        samples: all rows, the same on every worker.
        credit_kind: what the credit rule declares its turn rewards to be.
        seed: of the dealing of rows into minibatches.
        funnel: gets the last two counts.
        trains_policy: False while only the critic learns.
        pad_id: fills rows up; any token id.
        team: what the whole-team learner says of these rows.
        kl_coef: in the reward; None: `loss.kl_in_reward_coef`. Another one where it was adapted before.

    Raises:
        MismatchError: the rows were not sampled by the weights that the policy engine holds.
        TrainingDivergedError: three steps in a row were not finite, or all steps of the order.
    """
    learned = Learned(kl_coef=config.loss.kl_in_reward_coef if kl_coef is None else kl_coef)
    learned.agents = funnel_figures(funnel)
    learned.metrics["train/trained_rows"] = 0.0
    if not samples:
        learned.reason = "no trainable rows: see the funnel for where they fell out"
        return learned
    clock = _Clock(learned.metrics)
    layout = Layout(samples, rows=config.rows, microbatch_tokens=config.microbatch_tokens, pad_id=pad_id)
    with clock.measures("old_logprobs"):
        scores, agreements = _score(samples, layout, models, config=config)
        is_corrected = decide(agreements, config=config.mismatch) == "correct"
    with clock.measures("advantages"):
        rollout = [s.rollout_logprobs for s in samples]
        weights, kept = correct(scores["old"], rollout, config=config.mismatch) if is_corrected else (None, None)
        is_served = [s.is_served for s in samples]
        if any(is_served):
            weights, kept, far = correct_served(
                scores["old"],
                rollout,
                [s.agent for s in samples],
                is_served,
                weights=weights,
                kept=kept,
                config=config.mismatch,
            )
            learned.metrics |= _served_figures(is_served, kept, far)
        signal = learning_signal(
            samples, scores, config=config, credit_kind=credit_kind, beta=learned.kl_coef, team=team
        )
        is_active = np.array([bool(np.any(a)) for a in signal.advantages])
    learned.advantages = {(s.episode_id, s.turn_index): a for s, a in zip(samples, signal.advantages, strict=True)}
    learned.metrics |= row_figures(samples, scores, signal, is_active) | agreement_figures(agreements)
    learned.metrics |= _correction_figures(weights, kept)
    learned.metrics["train/is_corrected"] = float(weights is not None or kept is not None)
    if team is not None and config.algorithm == "happo":
        factors = [team.log_factor.get(episode, 0.0) for episode in {s.episode_id for s in samples}]
        learned.metrics["train/factor_ess"] = effective_sample_size(factors)
    funnel.add("non_zero_advantage", [s.agent for s, active in zip(samples, is_active, strict=True) if active])
    figures = agent_figures(samples, scores, signal, is_active, agreements)
    learned.metrics["train/unique_token_share"], unique = layout.savings()
    _merge(figures, {agent: {"unique_token_share": share} for agent, share in unique.items()})
    with_gradient = _without_unweighted(samples, kept, config=config)
    has_loss = (is_active | _has_other_loss(samples, config)) & _any(samples, with_gradient)
    if not has_loss.any() and not models.has_values:
        learned.reason = _why_nothing(samples, is_active, config=config)
    else:
        trains_policy = trains_policy and bool(has_loss.any())
        with clock.measures("update"):
            update = Update(
                samples=samples,
                layout=layout,
                models=models,
                config=config,
                scores=scores,
                signal=signal,
                weights=weights,
                kept=with_gradient,
                is_picked=has_loss | models.has_values,
                trains_policy=trains_policy,
            )
            metrics, per_agent = update.run(seed=seed)
            learned.metrics |= metrics
            _merge(figures, per_agent)
            if trains_policy:
                _after(learned, figures, samples, layout, models, scores, config=config)
        has_trained = update.is_in_policy_step & has_loss
        funnel.add("trained", [s.agent for s, has in zip(samples, has_trained, strict=True) if has])
        learned.metrics["train/trained_rows"] = float(has_trained.sum())
    if config.loss.adaptive_kl is not None and not learned.reason:
        learned.kl_coef = adapted_coef(
            learned.kl_coef,
            kl=learned.metrics["train/kl_ref_k3"],
            num_episodes=len({s.episode_id for s in samples}),
            target=config.loss.adaptive_kl.target,
            horizon=config.loss.adaptive_kl.horizon,
        )
    if config.loss.adaptive_kl is not None:
        learned.metrics["train/kl_coef"] = learned.kl_coef
    learned.agents = funnel_figures(funnel)
    _merge(learned.agents, figures)
    num_tokens = sum(len(s.token_ids) for s in samples)
    learned.metrics["train/tokens_per_s"] = num_tokens / max(clock.total, 1e-9)
    return learned


def _score(
    samples: Sequence[Sample], layout: Layout, models: Models, *, config: TrainConfig
) -> tuple[dict[str, Rows], dict[str, Agreement]]:
    """`old` logprobs and what else the settings use, and how near the engine's are to the trainer's.

    Where that is allowed and right the engine's stand for the old ones; the agreement is then that of the rows on which
    it was measured. An agent of whom none was measured has them all scored.
    """
    names = ["ref"] * (models.reference is not None) + ["values"] * models.has_values
    rollout = [np.asarray(s.rollout_logprobs, dtype=np.float64) for s in samples]
    agents = [s.agent for s in samples]
    if config.mismatch.old_logprobs == "rollout_if_close":
        found = measured_on_probe(samples, layout, models, config=config.mismatch)
        if is_close(found, config=config.mismatch) and found.keys() == set(agents):
            scores = score_rows(layout, models, rows=range(len(samples)), names=names)
            return scores | {"old": [x.astype(np.float32) for x in rollout]}, found
    scores = score_rows(layout, models, rows=range(len(samples)), names=[*names, "old", "entropy"])
    own = [i for i, s in enumerate(samples) if not s.is_served] or list(range(len(samples)))
    old = [scores["old"][i] for i in own]
    return scores, measure(old, [rollout[i] for i in own], [agents[i] for i in own], config=config.mismatch)


def _has_other_loss(samples: Sequence[Sample], config: TrainConfig) -> NDArray[np.bool_]:
    """[rows], whether a row without advantage has a gradient all the same: of its agent's entropy, or of the KL."""
    return np.array([config.loss.kl_in_loss_coef > 0 or config.entropy_coef(s.agent) != 0 for s in samples])


def _without_unweighted(samples: Sequence[Sample], kept: Rows | None, *, config: TrainConfig) -> Rows | None:
    """`kept`, where agents of weight 0 have no token."""
    unweighted = {agent for agent, a in config.agents.items() if a.weight == 0}
    if not unweighted:
        return kept
    kept = kept if kept is not None else [np.ones(s.completion_length) for s in samples]
    return [np.zeros_like(of) if s.agent in unweighted else of for s, of in zip(samples, kept, strict=True)]


def _any(samples: Sequence[Sample], kept: Rows | None) -> NDArray[np.bool_]:
    """[rows], whether a row has a token that is kept."""
    return np.array([bool(np.any(of)) for of in kept]) if kept is not None else np.ones(len(samples), dtype=bool)


def _why_nothing(samples: Sequence[Sample], is_active: NDArray[np.bool_], *, config: TrainConfig) -> str:
    if is_active.any():
        return (
            f"train.mismatch.reject_token and reject_sequence mask every token of the {int(is_active.sum())} rows that "
            "have an advantage: allow wider bounds, or sample again"
        )
    agents = sorted({s.agent for s in samples})
    if all(a in config.agents and config.agents[a].weight == 0 for a in agents):
        return (
            f"the only rows are of {', '.join(agents)}, whose train.agents.<name>.weight is 0: was nobody else called?"
        )
    return (
        f"all advantages of {len(samples)} rows are zero: every group of episodes earned the same; "
        "use harder or easier tasks, or more episodes per task"
    )


def _served_figures(is_served: Sequence[bool], kept: Rows, found: dict[str, Agreement]) -> dict[str, float]:
    num_kept = sum(bool(np.any(of)) for served, of in zip(is_served, kept, strict=True) if served)
    return {
        "train/served_rows": float(sum(is_served)),
        "train/served_rows_kept": float(num_kept),
        "train/served_ess": min(a.ess for a in found.values()),
    }


def _correction_figures(weights: Rows | None, kept: Rows | None) -> dict[str, float]:
    figures = {}
    if weights is not None:
        figures["train/importance_weight"] = float(np.concatenate(weights).mean())
    if kept is not None:
        figures["train/rejected_share"] = 1 - float(np.concatenate(kept).mean())
    return figures


def _after(
    learned: Learned,
    figures: dict[str, dict[str, float]],
    samples: Sequence[Sample],
    layout: Layout,
    models: Models,
    scores: dict[str, Rows],
    *,
    config: TrainConfig,
) -> None:
    """KL(old || new) by k3 after the last step, on rows drawn from all; for HAPPO the log ratio of every episode."""
    is_whole = config.algorithm == "happo"
    rows = list(range(len(samples))) if is_whole else probe_rows([len(s.token_ids) for s in samples])
    new = score_rows(layout, models, rows=rows, names=["old"])["old"]
    kl_of: dict[str, list[NDArray[np.floating]]] = defaultdict(list)
    for row, after in zip(rows, new, strict=True):
        d = np.asarray(after, dtype=np.float64) - scores["old"][row]
        kl_of[samples[row].agent].append(np.exp(np.clip(d, -20, 20)) - d - 1)
        if is_whole:
            episode = samples[row].episode_id
            learned.log_ratios[episode] = learned.log_ratios.get(episode, 0.0) + float(d.sum())
    learned.metrics["train/kl_k3"] = float(np.concatenate([x for xs in kl_of.values() for x in xs]).mean())
    _merge(figures, {agent: {"kl_k3": float(np.concatenate(xs).mean())} for agent, xs in kl_of.items()})


def _merge(agents: dict[str, dict[str, float]], more: dict[str, dict[str, float]]) -> None:
    for agent, figures in more.items():
        agents.setdefault(agent, {}).update(figures)


class _Clock:
    """Seconds of named parts, as metrics."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self._metrics, self.total = metrics, 0.0

    @contextmanager
    def measures(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.total += seconds
        self._metrics[f"train/{name}_s"] = seconds
