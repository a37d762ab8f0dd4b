"""rewarded_rows: the view that advantage estimators have of an iteration's training rows.

An estimator is one pure function, in a file of this folder or in a user's own:

    name(rows: RewardedRows, settings: AdvantageConfig) -> [N] one advantage per row, or N arrays, one value per token

`train_loops/estimators.py` finds it by `train.algorithm`. The GAE family, which needs values, is called by `learning_signal` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rows = Sequence[NDArray[np.floating]]
CreditKind = Literal["returns", "increments"]
"""What a turn's reward stands for: the whole rest of the episode, or what was earned at this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedRows:
    """N rows of one model group, in the same order everywhere; per-token arrays are over completion tokens only."""

    token_rewards: Rows
    """N rows, one reward per completion token: the turn's reward on the last one, the KL term (if any) on each."""
    group_ids: Sequence[str]
    """[N]; the episodes of one task in one iteration are a group."""
    episode_ids: Sequence[str]
    agents: Sequence[str]
    turn_indices: Sequence[int]
    """[N]: position in the episode; turns are counted in the order of time."""
    round_indices: Sequence[int]
    """[N]: which of the agent's own calls in the episode it is."""
    episode_rounds: Sequence[int]
    """[N]: round of the episode, counted over all of its agents."""
    prompts: Sequence[Sequence[int]] = ()
    """N rows, token ids of the prompt: GiGPO's anchors where there is no world."""
    states: Sequence[str] = ()
    """[N]: names the state of the world that the turn acted in; empty where there is none, or nobody asks."""
    baselines: Sequence[float | None] = ()
    """[N]: what a variant of the episode earned there (greedy, counterfactual ...); None where none was played."""
    credit_kind: CreditKind = "returns"
    """What the credit rule declares its turn rewards to be."""

    @property
    def scores(self) -> NDArray[np.float64]:
        """Returns [N]: a row's reward, minus beta times its summed KL where KL is in the reward."""
        return np.array([np.asarray(r, dtype=np.float64).sum() for r in self.token_rewards])

    @property
    def lengths(self) -> list[int]:
        """Returns [N]: the number of completion tokens of each row."""
        return [len(r) for r in self.token_rewards]
