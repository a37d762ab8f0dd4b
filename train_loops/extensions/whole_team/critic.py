"""critic: episodes and a central critic -> an advantage per turn, and a better critic (MAPPO, arXiv 2103.01955).

GAE (arXiv 1506.02438) runs over the turns of the whole team in the order in which they were taken, one step per turn:

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lambda A_{t+1}

A turn is worth what the team can expect after it, minus what it could expect before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from train_loops.advantages.gae import gae, whiten
from train_loops.config import OptimizerConfig, TeamConfig
from train_loops.extensions.whole_team.episodes import TeamEpisode, TeamTurn
from train_loops.extensions.whole_team.models import CentralCritic
from train_loops.extensions.whole_team.value_norm import ValueNorm
from train_loops.signal.learning_rate import learning_rate
from train_loops.signal.losses import value_loss
from train_loops.signal.team_signal import TurnKey


def central_advantages(
    critic: CentralCritic, norm: ValueNorm, episodes: Sequence[TeamEpisode], *, config: TeamConfig
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Returns advantages, returns and values of all turns, [T] each, in the order of `turns_of`; nothing is whitened yet."""
    turns = turns_of(episodes)
    with torch.no_grad():
        raw = critic(turns).double().numpy()
    values = norm.denormalized(raw) if config.value_norm else raw
    chains, first_turn = [], 0
    for episode in episodes:
        chains.append(list(range(first_turn, first_turn + len(episode.turns))))
        first_turn += len(episode.turns)
    advantages, returns = gae(
        [np.array([turn.reward]) for turn in turns],
        [np.array([v]) for v in values],
        trajectories=chains,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )
    return np.concatenate(advantages), np.concatenate(returns), values


def learn_values(
    critic: CentralCritic,
    optimizer: torch.optim.Optimizer,
    norm: ValueNorm,
    episodes: Sequence[TeamEpisode],
    *,
    returns: NDArray[np.float64],
    config: TeamConfig,
    seed: int,
) -> float:
    """Makes steps on the Huber loss of the (normalised) returns, clipped around the critic's present values.

    The present values are the network's raw output. If they were denormalised and normalised again, the statistics, which
    have just been updated, would make them look changed. Returns the mean loss of the last epoch.
    """
    turns = turns_of(episodes)
    scale = norm.normalized if config.value_norm else np.asarray
    target = torch.from_numpy(scale(returns)).float()
    with torch.no_grad():
        old = critic(turns)
    random = np.random.default_rng(seed)
    losses: list[float] = []
    for _ in range(config.num_epochs):
        losses = []
        for part in np.array_split(random.permutation(len(turns)), min(config.num_minibatches, len(turns))):
            new = critic([turns[i] for i in part])
            per_turn, _ = value_loss(
                new, old[part], target[part], value_clip=config.value_clip, huber_delta=config.huber_delta
            )
            step(optimizer, critic, per_turn.mean(), settings=config.optimizer)
            losses.append(float(per_turn.detach().mean()))
    return float(np.mean(losses))


def turn_advantages(
    episodes: Sequence[TeamEpisode], advantages: NDArray[np.float64], *, whitened: str
) -> dict[TurnKey, float]:
    """Returns the advantage of each turn, whitened over all turns, over each agent's, or not (`all`, `agent`, `none`)."""
    turns = turns_of(episodes)
    rows = [np.array([a]) for a in advantages]
    if whitened != "none":
        rows = whiten(rows, labels=[turn.agent for turn in turns] if whitened == "agent" else None)
    return {key: float(row[0]) for key, row in zip(keys_of(episodes), rows, strict=True)}


def turns_of(episodes: Sequence[TeamEpisode]) -> list[TeamTurn]:
    """Returns all turns, episode by episode."""
    return [turn for episode in episodes for turn in episode.turns]


def keys_of(episodes: Sequence[TeamEpisode]) -> list[TurnKey]:
    """Returns the keys of all turns, in the order of `turns_of`."""
    return [(episode.episode_id, turn.turn_index) for episode in episodes for turn in episode.turns]


def step(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, loss: torch.Tensor, *, settings: OptimizerConfig
) -> None:
    """Makes one optimizer step on a scalar loss, with the gradient clipped and the rate of the schedule."""
    # Adam counts its steps, and the count is stored with its moments, so that the schedule goes on after a restart.
    num_steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, num_steps)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), settings.max_grad_norm)
    optimizer.step()
