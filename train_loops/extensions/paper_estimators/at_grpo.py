"""at_grpo: compares turns of one agent in one round of a task's episodes (AT-GRPO of PettingLLMs, arXiv 2510.11062)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, normalize
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def at_grpo(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: A_i = (R_i - mean_g) / (std_g + eps), where g holds the rows of the same task, agent and round."""
    keys = group_keys(rows, settings, default="task_agent_round")
    return normalize(rows.scores, keys, settings, batch_keys=rows.agents)
