"""update: rows with their learning signal -> the optimizer steps of one job, and what they did.

    num_epochs x num_minibatches: microbatches --backward--> step (policy, and critic for ppo and ippo)

What a row adds to the gradient does not depend on how rows are cut into microbatches or dealt to workers. DeepSpeed averages
gradients over W workers, so every share of a loss is multiplied by W.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from train_loops.config import TrainConfig
from train_loops.engine.models import Models
from train_loops.rows.batching import Batch, Layout, device, lay, picked
from train_loops.rows.samples import Sample
from train_loops.rows.sharing import Chain
from train_loops.signal.kl import k3, kl_estimate
from train_loops.signal.learning_signal import LearningSignal
from train_loops.signal.losses import Denominators, aggregate, policy_loss, value_loss
from train_loops.worker.scoring import Rows, probe_rows, score_rows

MAX_SKIPPED_STEPS = 3
"""So many steps in a row whose loss or gradient is not finite end the job; so does a job without any other step."""

CRITIC_FIGURES = ("critic_loss", "value_clip_share", "num_value_tokens")
"""Figures that count when the critic's step was made, not the policy's."""


class TrainingDivergedError(ValueError):
    """Loss or gradients stayed not finite: the job cannot be finished with these settings."""


@dataclass(slots=True, kw_only=True)
class Update:
    """The optimizer steps of one job; `run` makes them."""

    samples: Sequence[Sample]
    layout: Layout
    models: Models
    config: TrainConfig
    scores: Mapping[str, Rows]
    """`old` logprobs; `ref` and `values` where they are used."""
    signal: LearningSignal
    weights: Rows | None
    """Importance weights per completion token."""
    keep_mask: Rows | None
    """Per row and completion token: 1, or 0 where it has no gradient (rejected as off-policy, or its agent's weight is 0)."""
    is_picked: NDArray[np.bool_]
    """[N]: rows with a gradient. The others are not computed; they count in the denominators all the same."""
    trains_policy: bool
    """False while only the critic learns."""
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Per figure [agents], the sum over each agent's tokens in the steps that were made.

    It stays on the device until the end, because a transfer per microbatch would make the device wait.
    """
    _sums_of_step: dict[str, torch.Tensor] = field(default_factory=dict)
    """The same sums over the microbatches since the last step: they are dropped if the next step is skipped."""
    _not_finite: torch.Tensor = field(init=False)
    """[N]: how many tokens of each row had a loss that is not finite, since the last step that was made."""
    is_in_policy_step: NDArray[np.bool_] = field(init=False)
    """[N]: rows that were in a step of the policy that was made."""
    _agents: list[str] = field(init=False)
    _agent_of_row: torch.Tensor = field(init=False)
    """[N], indices into `_agents`."""
    _entropy_coefs: list[float] = field(init=False)
    """[N], of each row's agent."""

    def __post_init__(self) -> None:
        num_rows = len(self.samples)
        self.is_in_policy_step = np.zeros(num_rows, dtype=bool)
        self._agents = sorted({s.agent for s in self.samples})
        index_of = {agent: i for i, agent in enumerate(self._agents)}
        self._agent_of_row = torch.tensor([index_of[s.agent] for s in self.samples], device=device())
        self._not_finite = torch.zeros(num_rows, device=device())
        self._entropy_coefs = [self.config.entropy_coef(s.agent) for s in self.samples]

    def run(self, *, seed: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Makes the steps; every worker calls it. Returns the model group's metrics and each agent's figures.

        Raises TrainingDivergedError after three steps in a row that were not finite, or where no step of the job was.
        """
        num_steps, num_skipped = 0, 0
        dealt: list[int] = []
        norms: dict[str, list[float]] = defaultdict(list)
        in_a_row: dict[str, int] = defaultdict(int)
        last_norm: dict[str, float] = {}
        engines = {"policy": self.models.policy} if self.trains_policy else {}
        if self.models.critic is not None:
            engines["critic"] = self.models.critic
        elif self.models.shares_trunk and not self.trains_policy:
            engines["critic"] = self.models.policy  # its value head alone has a gradient, see `_value_head_loss`
        for epoch in range(self.config.num_epochs):
            for parts, dealt, denominators in self._minibatches(seed=seed + epoch):
                self._backward(parts, denominators)
                for name, engine in engines.items():
                    step = engine.step(with_decay=self.trains_policy or engine is not self.models.policy)
                    last_norm[name] = step.grad_norm
                    norms[name] += [step.grad_norm] if step.is_applied else []
                    in_a_row[name] = 0 if step.is_applied else in_a_row[name] + 1
                    num_skipped += not step.is_applied
                    self.is_in_policy_step[dealt] |= name == "policy" and step.is_applied
                    if step.is_applied:
                        self._count_step(of_critic=name == "critic", has_critic="critic" in engines)
                    if in_a_row[name] >= MAX_SKIPPED_STEPS:
                        raise self._diverged(
                            f"{MAX_SKIPPED_STEPS} steps in a row of the {name}", last_norm[name], dealt
                        )
                self._sums_of_step.clear()
                if not any(in_a_row.values()):
                    self._not_finite.zero_()
                num_steps += 1
        for name in engines:
            if not norms[name]:  # fewer steps than MAX_SKIPPED_STEPS, none of them made
                raise self._diverged(f"every step of the {name} in this job ({num_steps})", last_norm[name], dealt)
        return self._figures(num_steps, num_skipped, norms)

    def measure_change(self, metrics: dict[str, float], agents: dict[str, dict[str, float]]) -> dict[str, float]:
        """Adds KL(old || new) by k3 to what `run` returned, over some rows; for HAPPO returns the log ratio of every episode."""
        # The next group's M is a product over all tokens of an episode, so that HAPPO scores every row again.
        scores_all = self.config.estimator.updates_in_turn
        num_rows = len(self.samples)
        rows = list(range(num_rows)) if scores_all else probe_rows([len(s.token_ids) for s in self.samples])
        new = score_rows(self.layout, self.models, rows=rows, names=["old"])["old"]
        kl_of: dict[str, list[NDArray[np.floating]]] = defaultdict(list)
        log_ratios: dict[str, float] = {}
        for row, after in zip(rows, new, strict=True):
            d = np.asarray(after, dtype=np.float64) - self.scores["old"][row]
            kl_of[self.samples[row].agent].append(k3(d))
            if scores_all:
                episode = self.samples[row].episode_id
                log_ratios[episode] = log_ratios.get(episode, 0.0) + float(d.sum())
        metrics["train/kl_k3"] = float(np.concatenate([x for xs in kl_of.values() for x in xs]).mean())
        for agent, xs in kl_of.items():
            agents[agent]["kl_k3"] = float(np.concatenate(xs).mean())
        return log_ratios

    def _minibatches(self, *, seed: int) -> Iterator[tuple[list[list[Chain]], list[int], Denominators]]:
        """Yields this worker's microbatches of each minibatch, with the rows and the denominators of all workers."""
        for parts, dealt in self.layout.minibatches(self.config.num_minibatches, seed=seed):
            mine = [picked(chains, lambda i: bool(self.is_picked[i])) for chains in parts]
            # With several workers empty microbatches stay: every worker must enter backward equally often, or the
            # collectives of ZeRO wait for one that never comes. A worker alone may skip them, but for one per step.
            if dist.get_world_size() == 1:
                mine = [chains for chains in mine if chains] or [[]]
            lengths = [self.samples[i].completion_length for i in dealt]
            yield mine, dealt, Denominators.of(lengths, norm_tokens=self.config.loss.norm_tokens)

    @property
    def _num_replicas(self) -> int:
        """Workers, or groups of them that compute the same rows: the engine divides gradients by the workers.

        In such a group a gradient comes from every worker's equal loss, so that the group counts once.
        """
        return dist.get_world_size() // self.config.deepspeed.sequence_parallel

    def _backward(self, parts: list[list[Chain]], denominators: Denominators) -> None:
        """Runs forward and backward over this worker's microbatches of one minibatch."""
        for i, chains in enumerate(parts):
            batch = self.layout.batch(chains)
            is_last = i == len(parts) - 1
            if self.trains_policy:
                self.models.policy.backward(self._policy_loss(batch, denominators), is_last=is_last)
            elif self.models.shares_trunk:
                self.models.policy.backward(self._value_head_loss(batch, denominators), is_last=is_last)
            if self.models.critic is not None:
                share = self._critic_loss(self.models.critic(batch), batch, denominators)
                self.models.critic.backward(share * self._num_replicas, is_last=is_last)

    def _policy_loss(self, batch: Batch, denominators: Denominators) -> torch.Tensor:
        """Returns this microbatch's share of: policy loss + kl_coef KL - entropy_coef H (+ value_coef value loss)."""
        loss = self.config.loss
        entropy_coefs = lay(self._entropy_coefs, batch) if any(self._entropy_coefs) else None
        keep_mask = None if self.keep_mask is None else lay(self.keep_mask, batch) > 0
        logprobs, entropy, values = self.models.policy(
            batch, with_entropy=entropy_coefs is not None, with_values=self.models.shares_trunk
        )
        per_token, about = policy_loss(
            logprobs,
            lay(self.scores["old"], batch),
            lay(self.signal.advantages, batch),
            batch.row_of_token,
            loss=loss,
            importance_weights=None if self.weights is None else lay(self.weights, batch),
            keep_mask=keep_mask,
        )
        # GSPO's ratio is a mean over the completion: its loss is defined per sequence, whatever the other terms use.
        mode = "seq_mean_token_mean" if loss.policy == "gspo" else loss.aggregation
        share = aggregate(per_token, batch.row_of_token, mode=mode, denominators=denominators)
        extra = torch.zeros_like(per_token)
        if loss.kl_in_loss_coef > 0:
            kl = kl_estimate(logprobs, lay(self.scores["ref"], batch), loss.kl_in_loss_estimator)
            extra = extra + loss.kl_in_loss_coef * kl
            about["kl_ref"] = kl.detach()
        if entropy_coefs is not None:
            extra = extra - entropy_coefs * entropy
        counted = torch.ones_like(per_token)
        if keep_mask is not None:
            extra, counted = torch.where(keep_mask, extra, 0.0), keep_mask.float()
            about = {name: torch.where(keep_mask, x, 0.0) for name, x in about.items()}
        if loss.kl_in_loss_coef > 0 or entropy_coefs is not None:
            share = share + aggregate(extra, batch.row_of_token, mode=loss.aggregation, denominators=denominators)
        self._note_not_finite(per_token + extra, batch)
        self._add(about | {"num_tokens": counted}, batch)
        self._add_total("loss", share)
        if self.models.shares_trunk:
            value_share = self._critic_loss(values, batch, denominators)
            share = share + self.config.critic.value_coef * value_share
        return share * self._num_replicas

    def _value_head_loss(self, batch: Batch, denominators: Denominators) -> torch.Tensor:
        """Warms up a head on the policy's trunk: every other parameter gets a gradient of exactly zero.

        They must get one: ZeRO-3 would step with the gradients that are left from the step before.
        """
        logprobs, _, values = self.models.policy(batch, with_values=True, trains_trunk=False)
        share = self.config.critic.value_coef * self._critic_loss(values, batch, denominators)
        return (share + 0.0 * logprobs.sum()) * self._num_replicas

    def _critic_loss(self, values: torch.Tensor, batch: Batch, denominators: Denominators) -> torch.Tensor:
        assert self.signal.returns is not None
        per_token, about = value_loss(
            values,
            lay(self.scores["values"], batch),
            lay(self.signal.returns, batch),
            value_clip=self.config.critic.value_clip,
        )
        share = aggregate(per_token, batch.row_of_token, mode=self.config.loss.aggregation, denominators=denominators)
        self._note_not_finite(per_token, batch)
        ones = torch.ones_like(per_token)
        self._add({"value_clip_share": about["value_clip_share"], "num_value_tokens": ones}, batch)
        self._add_total("critic_loss", share)
        return share

    def _add(self, about: Mapping[str, torch.Tensor], batch: Batch) -> None:
        """Adds figures per token to the sums of their agents."""
        agents = self._agent_of_row[self._sample_of_token(batch)]
        for name, x in about.items():
            total = self._sums_of_step.setdefault(name, torch.zeros(len(self._agents), device=x.device))
            total.index_add_(0, agents, x.detach().float())

    def _add_total(self, name: str, share: torch.Tensor) -> None:
        """Adds a figure that belongs to no agent; it is kept in the first agent's place, and read as the sum of all."""
        total = self._sums_of_step.setdefault(name, torch.zeros(len(self._agents), device=share.device))
        total[0] += share.detach()

    def _count_step(self, *, of_critic: bool, has_critic: bool) -> None:
        """Adds the figures of a step that was made to the job's. A head on the policy's trunk steps with the policy."""
        for name, x in self._sums_of_step.items():
            if has_critic and of_critic != (name in CRITIC_FIGURES):
                continue
            self._sums[name] = self._sums[name] + x if name in self._sums else x

    def _note_not_finite(self, per_token: torch.Tensor, batch: Batch) -> None:
        is_bad = ~torch.isfinite(per_token.detach())
        self._not_finite.index_add_(0, self._sample_of_token(batch), is_bad.float())

    @staticmethod
    def _sample_of_token(batch: Batch) -> torch.Tensor:
        """Returns [N], which of the job's rows each token belongs to."""
        rows = torch.tensor(batch.rows, dtype=torch.long, device=batch.row_of_token.device)
        return rows[batch.row_of_token]

    def _figures(
        self, num_steps: int, num_skipped: int, norms: Mapping[str, list[float]]
    ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        per_agent = self._summed(self._sums)
        metrics = {"train/steps": float(num_steps), "train/skipped_steps": float(num_skipped)}
        zeros = [0.0] * len(self._agents)
        counts = {"num_tokens": per_agent.pop("num_tokens", zeros)}
        counts["num_value_tokens"] = per_agent.pop("num_value_tokens", zeros)
        agents: dict[str, dict[str, float]] = {agent: {} for agent in self._agents}
        for name, values in per_agent.items():
            if name in ("loss", "critic_loss"):
                steps_made = norms["critic" if name == "critic_loss" and "critic" in norms else "policy"]
                metrics[f"train/{name}"] = sum(values) / len(steps_made)
                continue
            num = counts["num_value_tokens" if name == "value_clip_share" else "num_tokens"]
            if any(num):
                metrics[f"train/{name}"] = sum(values) / sum(num)
            for agent, value, n in zip(self._agents, values, num, strict=True):
                if n:
                    agents[agent][name] = value / n
        for name, engine_norms in norms.items():
            prefix = "train/" if name == "policy" else "train/critic_"
            metrics[f"{prefix}grad_norm"] = float(np.mean(engine_norms))
        return metrics, agents

    def _summed(self, sums: Mapping[str, Any]) -> dict[str, list[float]]:
        """Returns the sums of {name: [n] tensor} over all workers, as lists; every worker calls it with the same names.

        What workers that compute the same rows have counts once.
        """
        if not sums:
            return {}
        names = sorted(sums)  # the tensors of all workers are added up as one: they must lie in the same order
        sizes = [len(sums[name]) for name in names]
        stacked = torch.cat([sums[name].detach().float() for name in names])
        if dist.get_world_size() > 1:
            dist.all_reduce(stacked)
        stacked /= self.config.deepspeed.sequence_parallel
        return {name: part.tolist() for name, part in zip(names, stacked.split(sizes), strict=True)}

    def _diverged(self, which: str, norm: float, dealt: Sequence[int]) -> TrainingDivergedError:
        """Builds the error, which names the turns whose loss was not finite; all workers call it, it sums over them."""
        counts = self._summed({"rows": self._not_finite})["rows"]
        causes = [i for i, n in enumerate(counts) if n]
        named = "the losses of its rows are finite, their gradient is not; they are" if not causes else "it came from"
        causes = causes or list(dealt)
        turns = ", ".join(
            f"turn {self.samples[i].turn_index} of episode {self.samples[i].episode_id} ({self.samples[i].agent})"
            for i in causes[:5]
        )
        more = f" and {len(causes) - 5} more" if len(causes) > 5 else ""
        return TrainingDivergedError(
            f"{which} had a loss or gradient that is not finite (the last norm is {norm}); {named} {turns}{more}: lower "
            "the learning rate, or look at the rewards and logprobs of these turns"
        )
