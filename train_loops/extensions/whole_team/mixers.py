"""mixers: Qs of the turns of one step -> Q of the team (VDN, arXiv 1706.05296; QMIX, arXiv 1803.11485).

Shapes: T turns and S steps of a batch, states of H numbers, E hidden units of the mixer. A step is a round of an episode
(see `models.batch_of`); any number of turns may belong to it. Both mixers are monotonic, dQ_tot/dQ_i >= 0: the actions that
are best for each turn's Q are best for the team's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def vdn_total(q: torch.Tensor, step_of_turn: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Maps Qs [T] and the step of each turn [T] to [S]: Q_tot = sum_i Q_i (VDN, arXiv 1706.05296)."""
    return q.new_zeros(num_steps).index_add(0, step_of_turn, q)


def qmix_total(
    q: torch.Tensor,
    step_of_turn: torch.Tensor,
    *,
    w1: torch.Tensor,
    b1: torch.Tensor,
    wf: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """Returns [S]: Q_tot = wf . ELU(sum_i Q_i w1_i + b1) + v (QMIX, arXiv 1803.11485).

    Args:
        q: [T], of each turn.
        step_of_turn: [T], from 0 to S - 1.
        w1: [T, E], must not be negative.
        b1: [S, E].
        wf: [S, E], must not be negative.
        v: [S].
    """
    hidden = F.elu(b1.index_add(0, step_of_turn, q[:, None] * w1))
    return (hidden * wf).sum(-1) + v


class VdnMixer(nn.Module):
    """VDN: the team's Q is the sum of the turns'. It has no parameters."""

    def forward(
        self, q: torch.Tensor, step_of_turn: torch.Tensor, turn_states: torch.Tensor, step_states: torch.Tensor
    ) -> torch.Tensor:
        """Has the arguments and result of `QMixer.forward`; states are not used."""
        return vdn_total(q, step_of_turn, len(step_states))

    def without(
        self,
        q: torch.Tensor,
        default: torch.Tensor,
        step_of_turn: torch.Tensor,
        turn_states: torch.Tensor,
        step_states: torch.Tensor,
    ) -> torch.Tensor:
        """Has the arguments and result of `QMixer.without`."""
        return self(q, step_of_turn, turn_states, step_states)[step_of_turn] - q + default


class QMixer(nn.Module):
    """QMIX: hypernetworks make the mixing weights from states, and absolute values keep them from being negative."""

    def __init__(self, state_size: int, *, mixer_size: int, hidden_size: int) -> None:
        super().__init__()
        self.w1 = _hypernet(state_size, hidden_size, mixer_size)
        """From the state of each turn, which says who acts: its column of the mixing matrix."""
        self.b1 = nn.Linear(state_size, mixer_size)
        self.wf = _hypernet(state_size, hidden_size, mixer_size)
        self.v = _hypernet(state_size, hidden_size, 1)

    def forward(
        self, q: torch.Tensor, step_of_turn: torch.Tensor, turn_states: torch.Tensor, step_states: torch.Tensor
    ) -> torch.Tensor:
        """Returns the team's Q of each step, [S].

        Args:
            q: [T], of each turn.
            step_of_turn: [T], from 0 to S - 1.
            turn_states: [T, H].
            step_states: [S, H].
        """
        return qmix_total(q, step_of_turn, **self._weights(turn_states, step_states))

    def without(
        self,
        q: torch.Tensor,
        default: torch.Tensor,
        step_of_turn: torch.Tensor,
        turn_states: torch.Tensor,
        step_states: torch.Tensor,
    ) -> torch.Tensor:
        """Returns [T]: Q_tot of each turn's step if this turn alone had the Q `default` [T]."""
        weights = self._weights(turn_states, step_states)
        # The hidden layer is linear in each Q before ELU, so replacing one Q is one addition per turn, not a pass per turn.
        before = weights["b1"].index_add(0, step_of_turn, q[:, None] * weights["w1"])[step_of_turn]
        hidden = F.elu(before + (default - q)[:, None] * weights["w1"])
        return (hidden * weights["wf"][step_of_turn]).sum(-1) + weights["v"][step_of_turn]

    def _weights(self, turn_states: torch.Tensor, step_states: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "w1": self.w1(turn_states).abs(),
            "b1": self.b1(step_states),
            "wf": self.wf(step_states).abs(),
            "v": self.v(step_states).squeeze(-1),
        }


def _hypernet(state_size: int, hidden_size: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(state_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, out))
