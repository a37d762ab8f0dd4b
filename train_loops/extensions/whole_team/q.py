"""q: episodes and a mixer -> what each turn contributed to the team's Q (VDN, arXiv 1706.05296; QMIX, arXiv 1803.11485).

    y = r + gamma Q_tot^-(next step, the actions that were taken there)      loss (Q_tot - y)^2

An action is a whole completion. Nothing is sampled again: the next actions are those of the trace (as in SARSA). `^-` is a
target copy of critics and mixer that follows slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from train_loops.config import TeamConfig
from train_loops.extensions.whole_team.critic import keys_of, step, turns_of
from train_loops.extensions.whole_team.episodes import TeamEpisode
from train_loops.extensions.whole_team.models import TeamBatch, TeamQ, batch_of
from train_loops.signal.team_signal import TurnKey

EPISODES_PER_STEP = 64


def learn_qs(
    model: TeamQ,
    target: TeamQ,
    optimizer: torch.optim.Optimizer,
    episodes: Sequence[TeamEpisode],
    *,
    config: TeamConfig,
    seed: int,
) -> float:
    """Makes `num_epochs` passes over the replayed episodes; returns the mean squared error of the last pass."""
    random = np.random.default_rng(seed)
    losses: list[float] = []
    for _ in range(config.num_epochs):
        losses = []
        order = random.permutation(len(episodes))
        for part in np.array_split(order, max(1, len(order) // EPISODES_PER_STEP)):
            batch = batch_of([episodes[i] for i in part])
            error = temporal_error(model, target, batch, gamma=config.gamma)
            loss = error.square().mean()
            step(optimizer, model, loss, settings=config.optimizer)
            follow(target, model, tau=config.target_tau)
            losses.append(float(loss.detach()))
    return float(np.mean(losses))


def temporal_error(model: TeamQ, target: TeamQ, batch: TeamBatch, *, gamma: float) -> torch.Tensor:
    """Returns [S]: Q_tot - y; gradients flow through Q_tot only."""
    _, total = model(batch)
    with torch.no_grad():
        _, later = target(batch)
        # After an episode's last step `next_step` is -1: indexing then takes some other step, which `where` drops.
        has_next = batch.next_step >= 0
        y = batch.rewards + gamma * torch.where(has_next, later[batch.next_step], 0.0)
    return total - y


def follow(target: torch.nn.Module, model: torch.nn.Module, *, tau: float) -> None:
    """Moves all parameters of the target copy: target <- (1 - tau) target + tau model."""
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, tau)


def q_credit(model: TeamQ, episodes: Sequence[TeamEpisode]) -> dict[TurnKey, float]:
    """Returns per turn: Q_tot - Q_tot with this turn's Q replaced by the mean over its alternatives.

    The alternatives are what its agent did in that round of the task's other episodes, evaluated in this turn's own state.
    So gains and losses before the turn are not credited to it, and a turn whose action makes no difference (of a free
    rider), or that has no alternative, gets about 0. For VDN the credit is Q_i minus that mean; for QMIX it is in the same
    unit, the team's return. The idea is COMA's counterfactual baseline (arXiv 1705.08926).
    """
    batch = batch_of(episodes)
    # A turn is among its own alternatives, so that one without others is compared with itself, which gives 0.
    alternatives = [(e.group_id, turn.agent, turn.round_index) for e in episodes for turn in e.turns]
    with torch.no_grad():
        _, total = model(batch)
        credit = total[batch.step_of_turn] - model.without(batch, model.expected(batch, alternatives))
    assert len(turns_of(episodes)) == len(credit)
    return dict(zip(keys_of(episodes), credit.tolist(), strict=True))
