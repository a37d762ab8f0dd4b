"""dr_mas: rewards compared per agent within groups of episodes of the same task (arXiv 2602.08847; seed-systems 2.3).

Agents that share weights have rewards of different scale and are called at different rates; normalised together, one
agent's gradient drowns the other's. Every invocation counts: an agent called three times in an episode brings three
entries to its group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, normalize
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def dr_mas(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """[N]: (R - mean) / (std + eps) over the rows of the same task and agent; ddof 1 as in its code, 0 in its paper."""
    keys = group_keys(rows, settings, default="task_agent")
    return normalize(rows.scores, keys, settings, batch_keys=rows.agents)
