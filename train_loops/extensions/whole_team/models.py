"""models: hashed features of turns -> values of states (central critic), or Qs of turns and of the team.

The networks are small and have embeddings of their own, so that they learn on a CPU in seconds. Shapes: T turns and S steps
of a batch, embeddings of H numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from train_loops.config import TeamConfig
from train_loops.extensions.whole_team.episodes import NUM_BUCKETS, TeamEpisode, TeamTurn
from train_loops.extensions.whole_team.mixers import QMixer, VdnMixer


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamBatch:
    """T turns of episodes, and the S steps that they form; both in the order of time per episode."""

    turns: tuple[TeamTurn, ...]
    step_of_turn: torch.Tensor
    """[T]: the step that each turn belongs to."""
    first_turn: torch.Tensor
    """[S]: the step's first turn, whose state is the step's."""
    next_step: torch.Tensor
    """[S]: the episode's next step, -1 after its last."""
    rewards: torch.Tensor
    """[S]: the sum over the step's turns."""


def batch_of(episodes: Sequence[TeamEpisode]) -> TeamBatch:
    """Joins turns of one round that follow each other into steps, so that no reward is in a step before its turn.

    `round_index` counts each agent's own calls. An agent that acts for the first time at the end of an episode has index 0
    there; it gets a step of its own at the end, and does not join the first one.
    """
    turns: list[TeamTurn] = []
    step_of_turn: list[int] = []
    first_turn: list[int] = []
    next_step: list[int] = []
    rewards: list[float] = []
    for episode in episodes:
        for number, turn in enumerate(episode.turns):
            if number == 0 or turn.round_index != turns[-1].round_index:
                if number > 0:
                    next_step[-1] = len(first_turn)
                first_turn.append(len(turns))
                next_step.append(-1)
                rewards.append(0.0)
            rewards[-1] += turn.reward
            step_of_turn.append(len(first_turn) - 1)
            turns.append(turn)
    return TeamBatch(
        turns=tuple(turns),
        step_of_turn=torch.tensor(step_of_turn, dtype=torch.long),
        first_turn=torch.tensor(first_turn, dtype=torch.long),
        next_step=torch.tensor(next_step, dtype=torch.long),
        rewards=torch.tensor(rewards, dtype=torch.float32),
    )


class Tower(nn.Module):
    """Maps bags of features to embeddings, [T, H]: the mean of the features' vectors."""

    def __init__(self, embedding_size: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(NUM_BUCKETS, embedding_size, mode="mean")

    def forward(self, bags: Sequence[np.ndarray]) -> torch.Tensor:
        """Returns [T, H]; an empty bag gives the zero vector."""
        offsets = np.concatenate([[0], np.cumsum([len(b) for b in bags])[:-1]]).astype(np.int64)
        flat = np.concatenate([np.empty(0, dtype=np.int64), *bags]).astype(np.int64)
        return self.bag(torch.from_numpy(flat), torch.from_numpy(offsets))


class CentralCritic(nn.Module):
    """MAPPO's central critic (arXiv 2103.01955): V(everything before a turn, and the agent that acts), normalised, [T]."""

    def __init__(self, config: TeamConfig) -> None:
        super().__init__()
        self.tower = Tower(config.embedding_size)
        self.head = _perceptron(config.embedding_size, config.hidden_size)

    def forward(self, turns: Sequence[TeamTurn]) -> torch.Tensor:
        """Returns the normalised value of the state of each turn, [T]."""
        return self.head(self.tower([turn.state for turn in turns])).squeeze(-1)


class TeamQ(nn.Module):
    """Q of each turn, and of the team at each step."""

    def __init__(self, config: TeamConfig) -> None:
        super().__init__()
        size = config.embedding_size
        self.states, self.actions = Tower(size), Tower(size)
        self.head = _perceptron(3 * size, config.hidden_size)
        self.mixer: VdnMixer | QMixer = (
            QMixer(size, mixer_size=config.mixer_size, hidden_size=config.hidden_size)
            if config.mixer == "qmix"
            else VdnMixer()
        )

    def forward(self, batch: TeamBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns Q of the turns [T] and of the team [S]."""
        q, states = self._turn_qs(batch)
        return q, self.mixer(q, batch.step_of_turn, states, states[batch.first_turn])

    def without(self, batch: TeamBatch, default: torch.Tensor) -> torch.Tensor:
        """Returns [T]: the team's Q at each turn's step if this turn alone had the Q `default` [T]."""
        q, states = self._turn_qs(batch)
        return self.mixer.without(q, default, batch.step_of_turn, states, states[batch.first_turn])

    def expected(self, batch: TeamBatch, alternatives: Sequence[Hashable]) -> torch.Tensor:
        """Returns [T]: the mean of Q(own state, a) over the actions a of the turns that have the same label.

        Args:
            alternatives: T labels; a turn is one of its own alternatives.
        """
        turns_of: dict[Hashable, list[int]] = {}
        for i, label in enumerate(alternatives):
            turns_of.setdefault(label, []).append(i)
        pairs = [(i, j) for i, label in enumerate(alternatives) for j in turns_of[label]]
        of_state, of_action = torch.tensor(pairs).unbind(1)
        states, actions = self._embedded(batch)
        q = self._of_pairs(states[of_state], actions[of_action])
        return torch.zeros(len(batch.turns)).index_add(0, of_state, q) / torch.bincount(of_state)

    def _turn_qs(self, batch: TeamBatch) -> tuple[torch.Tensor, torch.Tensor]:
        states, actions = self._embedded(batch)
        return self._of_pairs(states, actions), states

    def _embedded(self, batch: TeamBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.states([t.state for t in batch.turns]), self.actions([t.action for t in batch.turns])

    def _of_pairs(self, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([states, actions, states * actions], dim=-1)).squeeze(-1)


def _perceptron(size: int, hidden_size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 1))
