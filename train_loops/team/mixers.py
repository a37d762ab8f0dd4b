"""mixers: Qs of the turns of one step -> Q of the team (VDN, arXiv 1706.05296; QMIX, arXiv 1803.11485; seed-systems 2.7).

A step is a round of an episode (see `team_models.batch_of`); any number of turns may belong to it. Both mixers are monotonic: no turn's Q can grow while
the team's falls, so that what is best for each is best for all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def vdn_total(q: torch.Tensor, step_of_turn: torch.Tensor, num_steps: int) -> torch.Tensor:
    """[T], [T] -> [S]: Q_tot = sum_i Q_i."""
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
    """[S]: Q_tot = wf . ELU(sum_i Q_i w1_i + b1) + v; w1 [T, E] and wf [S, E] must not be negative, b1 [S, E], v [S]."""
    hidden = F.elu(b1.index_add(0, step_of_turn, q[:, None] * w1))
    return (hidden * wf).sum(-1) + v


class VdnMixer(nn.Module):
    """The sum; it has no parameters."""

    def forward(
        self, q: torch.Tensor, step_of_turn: torch.Tensor, turn_states: torch.Tensor, step_states: torch.Tensor
    ) -> torch.Tensor:
        """As `QMixer.forward`."""
        return vdn_total(q, step_of_turn, len(step_states))

    def without(
        self,
        q: torch.Tensor,
        default: torch.Tensor,
        step_of_turn: torch.Tensor,
        turn_states: torch.Tensor,
        step_states: torch.Tensor,
    ) -> torch.Tensor:
        """As `QMixer.without`."""
        return self(q, step_of_turn, turn_states, step_states)[step_of_turn] - q + default


class QMixer(nn.Module):
    """Hypernetworks make the mixing weights from states; absolute values keep them from being negative."""

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
        """[S].

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
        """[T]: Q_tot of each turn's step, had this turn alone had the Q `default`."""
        weights = self._weights(turn_states, step_states)
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
