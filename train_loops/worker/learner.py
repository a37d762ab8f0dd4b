"""learner: the training rows of one job -> optimizer steps and figures. It only joins the modules that do the maths.

    pinned traces + rewards --read_rows--> samples
      score     samples --policy--> old logprobs          --reference--> KL (if it has a coefficient)
                        --critic--> values (ppo, ippo)
      correct   old logprobs against the engine's --mismatch--> nothing | weights | mask | error
      signal    rewards, KL, values, the team's signal --learning_signal--> advantages
      step      num_epochs x num_minibatches --Update--> optimizer steps

Every worker knows all rows and all numbers per row; only forward and backward passes are divided among the workers. So
every worker takes the same decisions, and enters the same collectives in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stores.traces.store import TraceStore
from stores.types import RewardsRef, Trace, TracesRef
from train_loops.advantages.rewarded_rows import CreditKind
from train_loops.config import AdaptiveKLConfig, MismatchConfig, TrainConfig
from train_loops.engine.models import Models
from train_loops.rows.batching import Layout
from train_loops.rows.packed_attention import why_not_packed
from train_loops.rows.samples import Funnel, Sample, samples_of
from train_loops.signal.baselines import baselines_of, sibling_turns
from train_loops.signal.figures import agent_figures, agreement_figures, funnel_figures, row_figures
from train_loops.signal.kl import adapted_coef
from train_loops.signal.learning_signal import LearningSignal, learning_signal
from train_loops.signal.mismatch import (
    Agreement,
    check_masks,
    check_mean_weight,
    correct,
    correct_served,
    decide,
    effective_sample_size,
    is_close,
    measure,
    off_policy,
)
from train_loops.signal.team_signal import TeamSignal
from train_loops.worker.scoring import Rows, measured_on_probe, score_rows
from train_loops.worker.update import Update


@dataclass(slots=True, kw_only=True)
class Learned:
    """What came out of one job's rows."""

    reason: str = ""
    """Why nothing was trained; empty if something was."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`train/<name>`."""
    agents: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures by agent."""
    log_ratios: dict[str, float] = field(default_factory=dict)
    """HAPPO: per episode the sum over its turns and tokens of logprob after - logprob before."""
    advantages: dict[tuple[str, int], NDArray[np.floating]] = field(default_factory=dict)
    """[completion tokens] by episode id and turn index, for people to look at."""
    kl_coef: float = 0.0
    """The KL coefficient in the reward for the next job: unchanged, or adapted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The scores of the rows before the first step, and what follows from them."""

    scores: dict[str, Rows]
    """Per row and completion token: `old` logprobs, and where they are used `entropy`, `ref` and `values`."""
    agreements: dict[str, Agreement]
    """Per agent, how near the engine's logprobs are to the trainer's; without agents whose rows are all from service."""
    needs_correction: bool
    """Whether an agent is beyond the tolerance, or the settings always correct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The off-policy correction of the rows; all None where the engine's logprobs agree with the trainer's."""

    weights: Rows | None
    """Importance weights per row and completion token."""
    keep_mask: Rows | None
    """Per row and completion token: 1, or 0 where the token is rejected and has no gradient."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableRows:
    """Which of the N rows have a gradient, and on which tokens."""

    is_active: NDArray[np.bool_]
    """[N]: the row has an advantage other than 0."""
    has_loss: NDArray[np.bool_]
    """[N]: the row has a gradient: of its advantage, its agent's entropy bonus or the KL in the loss."""
    keep_mask: Rows | None
    """As `Correction.keep_mask`, and 0 on all tokens of the agents whose weight is 0; None: every token counts."""


def read_rows(
    store: TraceStore,
    traces: TracesRef,
    rewards: RewardsRef,
    *,
    model_group: str,
    config: TrainConfig,
    credit_kind: CreditKind,
) -> tuple[list[Sample], Funnel]:
    """Returns the training rows of `model_group` in a fixed order, and the counts of the turns that fell out."""
    reward_of = {r.episode_id: r for r in store.read_rewards(rewards)}
    mixed = config.train_mixed_versions
    funnel = Funnel(model_group=model_group, train_mixed_versions=mixed)
    samples: list[Sample] = []
    compared: list[Trace] = []

    def take(trace: Trace, sibling_turns: Collection[int] = ()) -> None:
        paid = reward_of.get(trace.episode_id)
        funnel.see(trace, paid, sibling_turns=sibling_turns)
        samples.extend(
            samples_of(trace, paid, model_group=model_group, train_mixed_versions=mixed, sibling_turns=sibling_turns)
        )

    has_baselines = bool(config.estimator.variants)
    # A variant in which the model group was never called is a baseline of the group's turns in other episodes.
    for trace in store.read_traces(traces, model_group=None if has_baselines else model_group):
        compared += [trace] if has_baselines else []
        if not trace.variant:
            take(trace)
    siblings = sibling_turns(compared)
    for trace in compared:  # which of a variant's turns train follows from the episode that it replays
        if turns := siblings.get(trace.episode_id):
            take(trace, turns)
    baselines = baselines_of(compared, reward_of, credit_kind=credit_kind)
    samples = [replace(s, baseline=baselines.get((s.episode_id, s.turn_index))) for s in samples]
    # The store returns rows in no particular order, and workers must agree on which row is the i-th.
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
    is_off_policy: bool = False,
    has_all_groups: bool = True,
) -> Learned:
    """Trains `models` on `samples`; every worker calls it with the same arguments.

    Args:
        samples: all rows, the same on every worker.
        credit_kind: what the credit rule declares its turn rewards to be.
        seed: decides how rows are dealt into minibatches.
        funnel: receives the last two counts.
        trains_policy: False while only the critic learns.
        pad_id: fills rows up; any token id.
        team: the signal of the whole-team learner for these rows.
        kl_coef: in the reward; None: `loss.kl_in_reward_coef`. It differs from that where it was adapted before.
        is_off_policy: whether another version than the one that the policy engine holds sampled the rows. They are then learned
            with the settings of `mismatch.off_policy`, and their mean weight is checked.
        has_all_groups: False: groups of episodes were left out after they had been sampled, for their outcomes (dynamic
            sampling) or their length (oversampling, budgets). What is left does not have the mean weight of what was drawn.

    Raises:
        MismatchError: the rows were not sampled by the weights that the policy engine holds; off policy: by weights too far from
            them, or not with the logprobs that are stored.
        TrainingDivergedError: three steps in a row were not finite, or all steps of the job.
    """
    learned = Learned(
        kl_coef=config.loss.kl_in_reward_coef if kl_coef is None else kl_coef,
        agents=funnel_figures(funnel),
        metrics={"train/trained_rows": 0.0},
    )
    if not samples:
        learned.reason = "no trainable rows: see the funnel for where they fell out"
        return learned
    if is_off_policy:
        config = config.model_copy(update={"mismatch": off_policy(config.mismatch)})
    clock = _Clock(learned.metrics)
    layout = Layout(
        samples,
        rows=config.rows,
        microbatch_tokens=config.microbatch_tokens,
        pad_id=pad_id,
        can_pack=not why_not_packed(models.policy.module.model),
        sequence_parallel=config.deepspeed.sequence_parallel,
    )
    with clock.measures("old_logprobs"):
        scored = score(
            samples, layout, models, config=config, is_off_policy=is_off_policy, has_all_groups=has_all_groups
        )
    with clock.measures("advantages"):
        correction = correct_rows(samples, scored, config=config.mismatch)
        signal = learning_signal(
            samples, scored.scores, config=config, credit_kind=credit_kind, beta=learned.kl_coef, team=team
        )
        rows = trainable_rows(samples, signal, correction, config=config)
    learned.advantages = {(s.episode_id, s.turn_index): a for s, a in zip(samples, signal.advantages, strict=True)}
    learned.metrics |= row_figures(samples, scored.scores, signal, rows.is_active)
    learned.metrics |= agreement_figures(scored.agreements, is_off_policy=is_off_policy) | correction.metrics
    learned.metrics |= _factor_figures(samples, team, config=config)
    agents = agent_figures(
        samples, scored.scores, signal, rows.is_active, scored.agreements, is_off_policy=is_off_policy
    )
    learned.metrics["train/unique_token_share"], unique_share = layout.savings()
    _merge(agents, {agent: {"unique_token_share": share} for agent, share in unique_share.items()})
    _count(funnel, "non_zero_advantage", samples, rows.is_active)
    # A critic learns also where no row has a gradient of the policy. A head on the policy's trunk does so in its warm-up alone: later
    # AdamW's moments would move the policy.
    if rows.has_loss.any() or models.critic is not None or (models.shares_trunk and not trains_policy):
        trains_policy = trains_policy and bool(rows.has_loss.any())
        with clock.measures("update"):
            update = Update(
                samples=samples,
                layout=layout,
                models=models,
                config=config,
                scores=scored.scores,
                signal=signal,
                weights=correction.weights,
                keep_mask=rows.keep_mask,
                is_picked=rows.has_loss | models.has_values,
                trains_policy=trains_policy,
            )
            metrics, figures = update.run(seed=seed)
            if trains_policy:
                learned.log_ratios = update.measure_change(metrics, figures)
        is_trained = update.is_in_policy_step & rows.has_loss
        learned.metrics |= metrics | {"train/trained_rows": float(is_trained.sum())}
        _merge(agents, figures)
        _count(funnel, "trained", samples, is_trained)
    else:
        learned.reason = _why_nothing(samples, rows.is_active, config=config)
    if config.loss.adaptive_kl is not None:
        _adapt_kl(learned, config.loss.adaptive_kl, num_episodes=len({s.episode_id for s in samples}))
    learned.agents = funnel_figures(funnel)
    _merge(learned.agents, agents)
    num_tokens = sum(len(s.token_ids) for s in samples)
    learned.metrics["train/tokens_per_s"] = num_tokens / max(clock.total_s, 1e-9)
    return learned


def _adapt_kl(learned: Learned, settings: AdaptiveKLConfig, *, num_episodes: int) -> None:
    """Sets the coefficient of the next job; it stays where the policy was not trained, as while a critic warms up."""
    if learned.metrics["train/trained_rows"]:
        learned.kl_coef = adapted_coef(
            learned.kl_coef,
            kl=learned.metrics["train/kl_ref_k3"],
            num_episodes=num_episodes,
            target=settings.target,
            horizon=settings.horizon,
        )
    learned.metrics["train/kl_coef"] = learned.kl_coef


def score(
    samples: Sequence[Sample],
    layout: Layout,
    models: Models,
    *,
    config: TrainConfig,
    is_off_policy: bool = False,
    has_all_groups: bool = True,
) -> Scored:
    """Scores the rows under the parent weights, and measures how near the engine's logprobs are to the trainer's.

    With `old_logprobs: rollout_if_close` the engine's logprobs are taken as the old ones where they are close on a part of
    the rows; that saves a forward pass. The agreement is then that of this part. If the part has no row of some agent, or a
    row is from service, all rows are scored: whatever version sampled that one, its logprobs are not the parent's.

    Args:
        is_off_policy, has_all_groups: see `learn`; `config` has the settings of `mismatch.off_policy` already.

    Raises:
        MismatchError: see `decide`, `check_mean_weight` and `check_masks` in `mismatch`.
    """
    names = ["ref"] * (models.reference is not None) + ["values"] * models.has_values
    rollout = [np.asarray(s.rollout_logprobs, dtype=np.float64) for s in samples]
    agents = [s.agent for s in samples]
    if config.mismatch.old_logprobs == "rollout_if_close" and not any(s.is_served for s in samples):
        agreements = measured_on_probe(samples, layout, models, config=config.mismatch)
        if is_close(agreements, config=config.mismatch) and agreements.keys() == set(agents):
            scores = score_rows(layout, models, rows=range(len(samples)), names=names)
            scores["old"] = [x.astype(np.float32) for x in rollout]
            return Scored(
                scores=scores,
                agreements=agreements,
                needs_correction=decide(agreements, config=config.mismatch) == "correct",
            )
    scores = score_rows(layout, models, rows=range(len(samples)), names=[*names, "old", "entropy"])
    # Rows from service may come from another version: they say nothing about the agreement of this version's engine.
    own = [i for i, s in enumerate(samples) if not s.is_served]
    # Where there are no others, there is nothing to decide here: `correct_served` judges them.
    agreements = measure(
        [scores["old"][i] for i in own], [rollout[i] for i in own], [agents[i] for i in own], config=config.mismatch
    )
    if is_off_policy and has_all_groups:  # first: wrong logprobs also have a small effective sample size
        check_mean_weight(agreements)
    if not is_off_policy:
        constrained = [None if s.masks is None or s.is_served else s.masks.of_token > 0 for s in samples]
        check_masks(scores["old"], rollout, agents, constrained, config=config.mismatch)
    verdict = decide(agreements, config=config.mismatch, is_off_policy=is_off_policy)
    return Scored(scores=scores, agreements=agreements, needs_correction=is_off_policy or verdict == "correct")


def correct_rows(samples: Sequence[Sample], scored: Scored, *, config: MismatchConfig) -> Correction:
    """Weights and rejects tokens where `scored` asks for it, and always those of rows from service."""
    old, rollout = scored.scores["old"], [s.rollout_logprobs for s in samples]
    metrics: dict[str, float] = {}
    weights, keep_mask = correct(old, rollout, config=config) if scored.needs_correction else (None, None)
    is_served = [s.is_served for s in samples]
    if any(is_served):
        weights, keep_mask, agreements = correct_served(
            old, rollout, [s.agent for s in samples], is_served, weights=weights, keep_mask=keep_mask, config=config
        )
        metrics |= _served_figures(is_served, keep_mask, agreements)
    if weights is not None:
        metrics["train/importance_weight"] = float(np.concatenate(weights).mean())
    if keep_mask is not None:
        metrics["train/rejected_share"] = 1 - float(np.concatenate(keep_mask).mean())
    metrics["train/is_corrected"] = float(weights is not None or keep_mask is not None)
    return Correction(weights=weights, keep_mask=keep_mask, metrics=metrics)


def trainable_rows(
    samples: Sequence[Sample], signal: LearningSignal, correction: Correction, *, config: TrainConfig
) -> TrainableRows:
    """Finds the rows that have a gradient: rows without one are not computed in the update."""
    is_active = np.array([bool(np.any(a)) for a in signal.advantages])
    has_other_loss = np.array([config.loss.kl_in_loss_coef > 0 or config.entropy_coef(s.agent) != 0 for s in samples])
    keep_mask = correction.keep_mask
    weightless = {agent for agent, settings in config.agents.items() if settings.weight == 0}
    if weightless:
        ones = keep_mask if keep_mask is not None else [np.ones(s.completion_length) for s in samples]
        keep_mask = [np.zeros_like(x) if s.agent in weightless else x for s, x in zip(samples, ones, strict=True)]
    has_token = (
        np.ones(len(samples), dtype=bool) if keep_mask is None else np.array([bool(np.any(x)) for x in keep_mask])
    )
    return TrainableRows(is_active=is_active, has_loss=(is_active | has_other_loss) & has_token, keep_mask=keep_mask)


def _why_nothing(samples: Sequence[Sample], is_active: NDArray[np.bool_], *, config: TrainConfig) -> str:
    if is_active.any():
        about, causes = config.mismatch, []
        if about.reject_token is not None or about.reject_sequence is not None:
            causes.append(
                "train.mismatch.reject_token and reject_sequence mask tokens: allow wider bounds, or sample again"
            )
        if any(s.is_served for s in samples):
            least = off_policy(about).min_ess
            causes.append(
                f"rows from service whose effective sample size (train/served_ess) is below {least:g} are masked: lower "
                "collect.from_service.max_policy_lag, or accept them with train.mismatch.min_ess"
            )
        return f"every token of the {int(is_active.sum())} rows that have an advantage is masked: {'; '.join(causes)}"
    agents = sorted({s.agent for s in samples})
    if all(a in config.agents and config.agents[a].weight == 0 for a in agents):
        return (
            f"the only rows are of {', '.join(agents)}, whose train.agents.<name>.weight is 0: was nobody else called?"
        )
    return (
        f"all advantages of {len(samples)} rows are zero: every group of episodes earned the same; "
        "use harder or easier tasks, or more episodes per task"
    )


def _served_figures(is_served: Sequence[bool], keep_mask: Rows, agreements: dict[str, Agreement]) -> dict[str, float]:
    num_kept = sum(bool(np.any(x)) for served, x in zip(is_served, keep_mask, strict=True) if served)
    return {
        "train/served_rows": float(sum(is_served)),
        "train/served_rows_kept": float(num_kept),
        "train/served_ess": min(a.ess for a in agreements.values()),
    }


def _factor_figures(samples: Sequence[Sample], team: TeamSignal | None, *, config: TrainConfig) -> dict[str, float]:
    """Returns for HAPPO how evenly M weights the episodes."""
    if team is None or not config.estimator.updates_in_turn:
        return {}
    log_factors = [team.log_factor.get(episode, 0.0) for episode in {s.episode_id for s in samples}]
    return {"train/factor_ess": effective_sample_size(np.array(log_factors))}


def _count(funnel: Funnel, stage: str, samples: Sequence[Sample], has_passed: NDArray[np.bool_]) -> None:
    funnel.add(stage, [s.agent for s, passed in zip(samples, has_passed, strict=True) if passed])


def _merge(agents: dict[str, dict[str, float]], more: dict[str, dict[str, float]]) -> None:
    for agent, figures in more.items():
        agents.setdefault(agent, {}).update(figures)


class _Clock:
    """Measures the seconds of named parts and writes them into metrics."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self._metrics, self.total_s = metrics, 0.0

    @contextmanager
    def measures(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.total_s += seconds
        self._metrics[f"train/{name}_s"] = seconds
