"""dr_mas: compares rewards per agent within the episodes of one task (Dr. MAS, arXiv 2602.08847).

Agents that share weights have rewards of different scale and are called at different rates. If they are normalised
together, one agent's gradient drowns the other's. Every call counts: an agent that is called three times in an episode
has three entries in its group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, normalize
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def dr_mas(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: A_i = (R_i - mean_g) / (std_g + eps), where g holds the rows of the same task and agent.

    `settings.ddof` is 1 by default, as in the authors' code; the paper divides by N (ddof 0).
    """
    keys = group_keys(rows, settings, default="task_agent")
    return normalize(rows.scores, keys, settings, batch_keys=rows.agents)
