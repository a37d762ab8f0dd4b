"""learner: the training rows of one order -> optimizer steps and metrics. Pure orchestration of the maths modules.

    pinned traces + rewards --read_rows--> samples
      samples --policy--> old logprobs --mismatch--> keep | truncate | fail
              --reference--> KL (if it has a coefficient)      --critic--> values (PPO)
      rewards, KL, values --ppo | grpo | dr_mas--> advantages
      num_epochs x num_minibatches: microbatches --backward--> step (policy, and critic for PPO)

Every worker knows all rows and all per-row numbers; only forward and backward passes are shared out.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from stores.traces import TraceStore
from stores.types import RewardsRef, TracesRef
from train_loops.advantages.dr_mas import dr_mas
from train_loops.advantages.gae import gae, whiten
from train_loops.advantages.grpo import grpo
from train_loops.batching import Batch, collate, deal_minibatches, lay, lift, plan
from train_loops.config import TrainConfig
from train_loops.critic import completion_values
from train_loops.engine import Engine, device
from train_loops.kl import kl_estimate, token_rewards
from train_loops.logprobs import completion_logprobs, completion_logprobs_and_entropy
from train_loops.losses import Denominators, aggregate, ppo_clip, value_loss
from train_loops.mismatch import decide, measure, truncated_weights
from train_loops.rows import Funnel, Sample, samples_of, trajectories_of

Rows = Sequence[NDArray[np.floating]]

MAX_SKIPPED_STEPS = 3
"""So many steps in a row whose loss or gradient is not finite end the order; so does an order without any other step."""
KL_PROBE_SHARE, MIN_KL_PROBE_TOKENS, MAX_KL_PROBE_TOKENS = 1 / 16, 1024, 4096
"""Of an order's tokens: on how many the KL between the old and the new policy is measured after the last step."""


class TrainingDivergedError(ValueError):
    """Loss or gradients stayed not finite: the order cannot be finished with these settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What an order trains, and what it compares with."""

    policy: Engine
    critic: Engine | None = None
    """For PPO."""
    reference: Callable[..., Any] | None = None
    """A frozen `PolicyScorer`, where a KL coefficient is set."""


@dataclass(slots=True, kw_only=True)
class Learned:
    """What came out of one order's rows."""

    reason: str = ""
    """Why nothing was trained; empty if something was."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`train/<name>`."""
    agents: dict[str, dict[str, float]] = field(default_factory=dict)


def read_rows(
    store: TraceStore, traces: TracesRef, rewards: RewardsRef, *, model_group: str, config: TrainConfig
) -> tuple[list[Sample], Funnel]:
    """The training rows of `model_group` in a fixed order, and the counts of what fell out."""
    reward_of = {r.episode_id: r for r in store.read_rewards(rewards)}
    settings: dict[str, Any] = {
        "statuses": config.train_statuses,
        "train_mixed_versions": config.train_mixed_versions,
    }
    funnel = Funnel(model_group=model_group, **settings)
    samples: list[Sample] = []
    for trace in store.read_traces(traces, model_group=model_group):
        episode_rewards = reward_of.get(trace.episode_id)
        funnel.see(trace, episode_rewards)
        samples += samples_of(trace, episode_rewards, model_group=model_group, **settings)
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
) -> Learned:
    """Trains `models` on `samples`; every worker calls it with the same arguments.

    Args:
        samples: all rows, the same on every worker.
        credit_kind: what the credit rule declares its turn rewards to be.
        seed: of the dealing of rows into minibatches.
        funnel: gets the last two counts.
        trains_policy: False while only the critic learns.
        pad_id: fills rows up; any token id.

    Raises:
        MismatchError: the rows were not sampled by the weights that the policy engine holds.
        TrainingDivergedError: three steps in a row were not finite, or all steps of the order.
    """
    learned = Learned()
    if not samples:
        learned.reason = "no trainable rows: see the funnel for where they fell out"
        _add_agents(learned, samples, funnel)
        return learned
    clock = _Clock(learned.metrics)
    with clock.measures("old_logprobs"):
        scores = _score_rows(samples, models, config=config, seed=seed, pad_id=pad_id)
        rollout = [np.asarray(s.rollout_logprobs, dtype=np.float64) for s in samples]
        agreements = measure(scores["old"], rollout, [s.agent for s in samples], config=config.mismatch)
        is_truncated = decide(agreements, config=config.mismatch) == "truncate"
    with clock.measures("advantages"):
        weights = truncated_weights(scores["old"], rollout, cap=config.mismatch.truncation) if is_truncated else None
        advantages, returns = _advantages(samples, scores, config=config, credit_kind=credit_kind)
        is_active = np.array([bool(np.any(a)) for a in advantages])
    learned.metrics |= _row_metrics(samples, scores, advantages, returns, is_active)
    learned.metrics["train/is_truncated"] = float(is_truncated)
    funnel.add("non_zero_advantage", [s.agent for s, active in zip(samples, is_active, strict=True) if active])
    has_other_loss = config.loss.entropy_coef != 0 or config.loss.kl_in_loss_coef > 0
    if not is_active.any() and not has_other_loss and models.critic is None:
        learned.reason = (
            f"all advantages of {len(samples)} rows are zero: every group of episodes earned the same; "
            "use harder or easier tasks, or more episodes per task"
        )
    else:
        with clock.measures("update"):
            update = _Update(
                samples=samples,
                models=models,
                config=config,
                scores=scores,
                advantages=advantages,
                returns=returns,
                weights=weights,
                is_picked=is_active | has_other_loss | (models.critic is not None),
                trains_policy=trains_policy,
                pad_id=pad_id,
            )
            learned.metrics |= update.run(seed=seed)
        has_trained = update.is_in_policy_step & (is_active | has_other_loss)
        funnel.add("trained", [s.agent for s, has in zip(samples, has_trained, strict=True) if has])
    _add_agents(learned, samples, funnel, advantages=advantages, agreements=agreements)
    num_tokens = sum(len(s.token_ids) for s in samples)
    learned.metrics["train/tokens_per_s"] = num_tokens / max(clock.total, 1e-9)
    return learned


def _score_rows(
    samples: Sequence[Sample], models: Models, *, config: TrainConfig, seed: int, pad_id: int
) -> dict[str, Rows]:
    """Per row and completion token: `old` logprobs and `entropy`; `ref` logprobs and `values` if there are such models."""
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    found: dict[str, dict[int, NDArray[np.float32]]] = {"old": {}, "entropy": {}}
    if models.reference is not None:
        found["ref"] = {}
    if models.critic is not None:
        found["values"] = {}
    [mine] = plan(
        [len(s.token_ids) for s in samples],
        num_minibatches=1,
        microbatch_tokens=config.microbatch_tokens,
        num_workers=num_workers,
        rank=rank,
        seed=seed,
    )
    for rows in mine:
        batch = collate(samples, rows, pad_id=pad_id).to(device())
        with models.policy.evaluating():
            logprobs, entropy = completion_logprobs_and_entropy(models.policy, batch)  # type: ignore[arg-type]
            found["old"] |= lift(logprobs, batch)
            found["entropy"] |= lift(entropy, batch)
            if models.reference is not None:
                found["ref"] |= lift(completion_logprobs(models.reference, batch), batch)  # type: ignore[arg-type]
        if models.critic is not None:
            with models.critic.evaluating():
                found["values"] |= lift(completion_values(models.critic, batch), batch)  # type: ignore[arg-type]
    if num_workers > 1:
        parts: list[Any] = [None] * num_workers
        dist.all_gather_object(parts, found)
        found = {name: {row: x for part in parts for row, x in part[name].items()} for name in found}
    return {name: [rows_of[i] for i in range(len(samples))] for name, rows_of in found.items()}


def _advantages(
    samples: Sequence[Sample],
    scores: Mapping[str, Rows],
    *,
    config: TrainConfig,
    credit_kind: Literal["returns", "increments"],
) -> tuple[Rows, Rows | None]:
    """Per row and completion token; returns only for PPO."""
    settings, beta = config.advantage, config.loss.kl_in_reward_coef
    kl = None
    if beta > 0:
        estimator = config.loss.kl_estimator
        kl = [
            kl_estimate(torch.from_numpy(old), torch.from_numpy(ref), estimator).numpy()
            for old, ref in zip(scores["old"], scores["ref"], strict=True)
        ]
    lengths = [s.completion_length for s in samples]
    per_token = token_rewards([s.reward for s in samples], lengths, kl=kl, beta=beta)
    if config.algorithm == "ppo":
        advantages, returns = gae(
            per_token,
            scores["values"],
            trajectories=trajectories_of(samples, credit_kind=credit_kind),
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
        )
        if settings.whiten != "none":
            advantages = whiten(advantages, labels=[s.agent for s in samples] if settings.whiten == "agent" else None)
        return advantages, returns
    family: dict[str, Any] = {
        "group_ids": [s.group_id for s in samples],
        "normalize_std": settings.normalize_std,
        "ddof": settings.ddof,
        "eps": settings.eps,
        "singleton": settings.singleton,
    }
    row_scores = [r.sum() for r in per_token]
    if config.algorithm == "grpo":
        per_row = grpo(row_scores, episode_ids=[s.episode_id for s in samples], **family)
    else:
        per_row = dr_mas(row_scores, agents=[s.agent for s in samples], **family)
    return [np.full(n, a) for n, a in zip(lengths, per_row, strict=True)], None


@dataclass(slots=True, kw_only=True)
class _Update:
    """The optimizer steps of one order."""

    samples: Sequence[Sample]
    models: Models
    config: TrainConfig
    scores: Mapping[str, Rows]
    advantages: Rows
    returns: Rows | None
    weights: Rows | None
    is_picked: NDArray[np.bool_]
    """Rows with a gradient. The others are not computed; they count in the denominators all the same."""
    trains_policy: bool
    pad_id: int
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metrics summed on the device: no transfer per microbatch."""
    is_in_policy_step: NDArray[np.bool_] = field(init=False)
    """Rows of which a step of the policy was made that was not skipped."""

    def __post_init__(self) -> None:
        self.is_in_policy_step = np.zeros(len(self.samples), dtype=bool)

    def run(self, *, seed: int) -> dict[str, float]:
        num_steps, num_skipped = 0, 0
        norms: dict[str, list[float]] = defaultdict(list)
        in_a_row: dict[str, int] = defaultdict(int)
        last_norm: dict[str, float] = {}
        engines = {"policy": self.models.policy} if self.trains_policy else {}
        if self.models.critic is not None:
            engines["critic"] = self.models.critic
        for epoch in range(self.config.num_epochs):
            for parts, dealt, denominators in self._minibatches(seed=seed + epoch):
                self._backward(parts, denominators)
                for name, engine in engines.items():
                    step = engine.step()
                    last_norm[name] = step.grad_norm
                    norms[name] += [step.grad_norm] if step.is_applied else []
                    in_a_row[name] = 0 if step.is_applied else in_a_row[name] + 1
                    num_skipped += not step.is_applied
                    self.is_in_policy_step[dealt] |= name == "policy" and step.is_applied
                    if in_a_row[name] >= MAX_SKIPPED_STEPS:
                        raise _diverged(f"{MAX_SKIPPED_STEPS} steps in a row of the {name}", last_norm[name])
                num_steps += 1
        for name in engines:
            if not norms[name]:  # fewer steps than MAX_SKIPPED_STEPS, none of them made
                raise _diverged(f"every step of the {name} in this order ({num_steps})", last_norm[name])
        return self._metrics(num_steps, num_skipped, norms)

    def _minibatches(self, *, seed: int) -> Iterator[tuple[list[list[int]], list[int], Denominators]]:
        """This worker's microbatches of each minibatch, with the rows and the denominators of all workers."""
        num, num_workers = self.config.num_minibatches, dist.get_world_size()
        parts = plan(
            [len(s.token_ids) for s in self.samples],
            num_minibatches=num,
            microbatch_tokens=self.config.microbatch_tokens,
            num_workers=num_workers,
            rank=dist.get_rank(),
            seed=seed,
        )
        for mine, dealt in zip(parts, deal_minibatches(len(self.samples), num, seed=seed), strict=True):
            picked = [[row for row in rows if self.is_picked[row]] for rows in mine]
            if num_workers == 1:
                picked = [rows for rows in picked if rows] or [[]]
            yield picked, dealt, Denominators.of([self.samples[i].completion_length for i in dealt])

    def _backward(self, parts: list[list[int]], denominators: Denominators) -> None:
        for i, rows in enumerate(parts):
            batch = collate(self.samples, rows, pad_id=self.pad_id).to(device())
            is_last = i == len(parts) - 1
            if self.trains_policy:
                self.models.policy.backward(self._policy_loss(batch, denominators), is_last=is_last)
            if self.models.critic is not None:
                self.models.critic.backward(self._critic_loss(batch, denominators), is_last=is_last)

    def _policy_loss(self, batch: Batch, denominators: Denominators) -> torch.Tensor:
        loss = self.config.loss
        policy: Any = self.models.policy
        if loss.entropy_coef != 0:
            logprobs, entropy = completion_logprobs_and_entropy(policy, batch)
        else:
            logprobs, entropy = completion_logprobs(policy, batch), None
        per_token, sums = ppo_clip(
            logprobs,
            lay(self.scores["old"], batch),
            lay(self.advantages, batch),
            batch.loss_mask,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip,
            importance_weights=None if self.weights is None else lay(self.weights, batch),
        )
        if loss.kl_in_loss_coef > 0:
            kl = kl_estimate(logprobs, lay(self.scores["ref"], batch), loss.kl_estimator)
            per_token = per_token + loss.kl_in_loss_coef * kl
            sums["kl_ref"] = torch.where(batch.loss_mask, kl.detach(), 0.0).sum()
        if entropy is not None:
            per_token = per_token - loss.entropy_coef * entropy
        share = aggregate(per_token, batch.loss_mask, mode=loss.aggregation, denominators=denominators)
        self._add(sums | {"num_tokens": batch.loss_mask.sum(), "loss": share.detach()})
        return share * dist.get_world_size()

    def _critic_loss(self, batch: Batch, denominators: Denominators) -> torch.Tensor:
        assert self.models.critic is not None and self.returns is not None
        per_token, sums = value_loss(
            completion_values(self.models.critic, batch),  # type: ignore[arg-type]
            lay(self.scores["values"], batch),
            lay(self.returns, batch),
            batch.loss_mask,
            value_clip=self.config.critic.value_clip,
        )
        share = aggregate(per_token, batch.loss_mask, mode=self.config.loss.aggregation, denominators=denominators)
        sums = {"value_clip_share": sums["value_clip_share"], "critic_loss": share.detach()}
        self._add(sums | {"num_value_tokens": batch.loss_mask.sum()})
        return share * dist.get_world_size()

    def _add(self, sums: Mapping[str, torch.Tensor]) -> None:
        for name, x in sums.items():
            self.sums[name] = self.sums[name] + x if name in self.sums else x

    def _metrics(self, num_steps: int, num_skipped: int, norms: Mapping[str, list[float]]) -> dict[str, float]:
        total = _sum_over_workers(self.sums)
        metrics = {"train/steps": float(num_steps), "train/skipped_steps": float(num_skipped)}
        num_tokens = max(total.pop("num_tokens", 0.0), 1.0)
        num_values = max(total.pop("num_value_tokens", 0.0), 1.0)
        for name in ("loss", "critic_loss"):
            if name in total:
                metrics[f"train/{name}"] = total.pop(name) / num_steps
        for name, x in total.items():
            metrics[f"train/{name}"] = x / (num_values if name == "value_clip_share" else num_tokens)
        for name, values in norms.items():
            prefix = "train/" if name == "policy" else "train/critic_"
            metrics[f"{prefix}grad_norm"] = float(np.mean(values)) if values else math.nan
        if self.trains_policy:
            metrics |= self._kl_after()
        return metrics

    def _kl_after(self) -> dict[str, float]:
        """KL(old || new) by k3 after the last step, on rows drawn from all."""
        rows = _probe_rows([len(sample.token_ids) for sample in self.samples])
        mine = rows[dist.get_rank() :: dist.get_world_size()]
        batch = collate(self.samples, mine, pad_id=self.pad_id).to(device())
        with self.models.policy.evaluating():
            logprobs = completion_logprobs(self.models.policy, batch)  # type: ignore[arg-type]
            kl = kl_estimate(lay(self.scores["old"], batch), logprobs, "k3")
        total = _sum_over_workers({"kl": torch.where(batch.loss_mask, kl, 0.0).sum(), "num": batch.loss_mask.sum()})
        return {"train/kl_k3": total["kl"] / max(total["num"], 1.0)}


def _diverged(which: str, norm: float) -> TrainingDivergedError:
    return TrainingDivergedError(
        f"{which} had a loss or gradient that is not finite (the last norm is {norm}): lower its learning rate, or "
        "look at the rewards and logprobs of this iteration"
    )


def _probe_rows(lengths: Sequence[int]) -> list[int]:
    """Rows, drawn at random but always the same, that together have about the wanted number of tokens; at least one."""
    num_tokens = sum(lengths)
    wanted = min(MAX_KL_PROBE_TOKENS, max(MIN_KL_PROBE_TOKENS, KL_PROBE_SHARE * num_tokens))
    num_rows = min(len(lengths), max(1, round(len(lengths) * wanted / num_tokens)))
    return np.random.default_rng(0).permutation(len(lengths))[:num_rows].tolist()


def _sum_over_workers(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    if not sums:
        return {}
    stacked = torch.stack([x.detach().float() for x in sums.values()])
    if dist.get_world_size() > 1:
        dist.all_reduce(stacked)
    return dict(zip(sums, stacked.tolist(), strict=True))


def _row_metrics(
    samples: Sequence[Sample],
    scores: Mapping[str, Rows],
    advantages: Rows,
    returns: Rows | None,
    is_active: NDArray[np.bool_],
) -> dict[str, float]:
    lengths = [s.completion_length for s in samples]
    flat = np.concatenate(advantages)
    metrics = {
        "train/rows": float(len(samples)),
        "train/tokens": float(sum(len(s.token_ids) for s in samples)),
        "train/completion_tokens": float(sum(lengths)),
        "train/non_zero_advantage_rows": float(is_active.sum()),
        "train/reward_mean": float(np.mean([s.reward for s in samples])),
        "train/entropy": float(np.concatenate(scores["entropy"]).mean()),
        "train/advantage_mean": float(flat.mean()),
        "train/advantage_std": float(flat.std()),
    }
    if "ref" in scores:
        d = np.concatenate(scores["old"]).astype(np.float64) - np.concatenate(scores["ref"])
        metrics["train/kl_ref_k3"] = float((np.exp(np.clip(-d, -20, 20)) + d - 1).mean())
    if returns is not None:
        target, value = np.concatenate(returns), np.concatenate(scores["values"])
        metrics["train/return_mean"] = float(target.mean())
        metrics["train/value_mean"] = float(value.mean())
        metrics["train/explained_variance"] = float(1 - (target - value).var() / max(float(target.var()), 1e-12))
    return metrics


def _add_agents(
    learned: Learned,
    samples: Sequence[Sample],
    funnel: Funnel,
    *,
    advantages: Rows = (),
    agreements: Mapping[str, Any] | None = None,
) -> None:
    """Per agent the funnel, rewards, advantages and agreement; the worst agreement of all to the metrics."""
    for agent, counts in funnel.counts.items():
        learned.agents[agent] = {f"funnel/{stage}": float(n) for stage, n in counts.items()}
    rows_of: dict[str, list[int]] = defaultdict(list)
    for i, s in enumerate(samples):
        rows_of[s.agent].append(i)
    for agent, rows in rows_of.items():
        about = learned.agents.setdefault(agent, {})
        about["rows"] = float(len(rows))
        about["completion_tokens"] = float(sum(samples[i].completion_length for i in rows))
        about["reward_mean"] = float(np.mean([samples[i].reward for i in rows]))
        about["advantage_std"] = float(np.concatenate([advantages[i] for i in rows]).std())
        a = (agreements or {})[agent]
        about |= {"logprob_gap_mean": a.mean_abs, "logprob_gap_max": a.max_abs, "mismatch_kl_k3": a.kl_k3, "ess": a.ess}
    if agreements:
        every = agreements.values()
        num_tokens = sum(a.num_tokens for a in every)
        learned.metrics["train/logprob_gap_mean"] = sum(a.mean_abs * a.num_tokens for a in every) / num_tokens
        learned.metrics["train/logprob_gap_max"] = max(a.max_abs for a in every)
        learned.metrics["train/ess"] = min(a.ess for a in every)
    learned.metrics["train/trained_rows"] = float(sum(counts["trained"] for counts in funnel.counts.values()))


class _Clock:
    """Seconds of named parts, as metrics."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self._metrics, self.total = metrics, 0.0

    def measures(self, name: str) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def measured() -> Iterator[None]:
            started = time.perf_counter()
            yield
            seconds = time.perf_counter() - started
            self.total += seconds
            self._metrics[f"train/{name}_s"] = seconds

        return measured()
