"""group_estimators: what papers compare a turn or an episode with, among the turns or episodes of its task."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import are_equal, group_keys, members_of, minus_mean, normalize, per_episode
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def at_grpo(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: A_i = (R_i - mean_g) / (std_g + eps), where g holds the rows of the same task, agent and round.

    This is AT-GRPO of PettingLLMs (arXiv 2510.11062).
    """
    keys = group_keys(rows, settings, default="task_agent_round")
    return normalize(rows.scores, keys, settings, batch_keys=rows.agents)


def opo(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: A_i = R_i - sum_g(length R) / sum_g(length), the baseline of least variance (OPO, arXiv 2505.23585).

    Turns are compared, not episodes: the weights stand for the size of gradients, and each turn has its own length and
    credit. A group of one is treated as `settings.singleton` says.
    """
    scores, lengths = rows.scores, np.asarray(rows.lengths, dtype=np.float64)
    out = np.zeros(len(scores))
    for members in members_of(group_keys(rows, settings, default="task")):
        if len(members) > 1:
            among = members
        elif settings.singleton == "batch":
            among = [i for i, agent in enumerate(rows.agents) if agent == rows.agents[members[0]]]
        else:
            out[members] = scores[members] if settings.singleton == "raw" else 0.0
            continue
        group, weights = scores[among], lengths[among]
        if not are_equal(group):
            out[members] = scores[members] - (weights @ group) / weights.sum()
    return out


def gpg(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: A_i = alpha (R_i - mean_g), alpha = rows / rows with a reward other than 0 (f_norm 1, as in verl).

    It scales up to make good for rows without reward (GPG, arXiv 2504.02546). Turns are compared, not episodes: the paper
    has one completion per episode, and a turn keeps its own credit.
    """
    scores = rows.scores
    alpha = len(scores) / max(int(np.count_nonzero(scores)), 1)
    keys = group_keys(rows, settings, default="task")
    return alpha * minus_mean(scores, keys, settings, batch_keys=rows.agents)


def pass_at_k(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: (R_max - R_second) / (std_g + eps) for all turns of the group's best episode, 0 for the others (arXiv 2503.19595).

    Episodes are compared whatever `group_by` says, each by the mean over its turns in the group, so that an agent that is
    called twice in the best episode does not compete with itself. If two episodes tie, the lead is 0. A group of one
    gives 0, because it has no second.
    """
    scores, groups, episode_of = per_episode(rows, group_keys(rows, settings, default="task"))
    out = np.zeros(len(scores))
    for members in members_of(groups):
        if len(members) < 2:
            continue
        group = scores[members]
        second, best = np.sort(group)[-2:]
        if are_equal([second, best]):
            continue
        scale = group.std(ddof=settings.ddof) + settings.eps if settings.normalize_std else 1.0
        out[members[int(group.argmax())]] = (best - second) / scale
    return out[episode_of]
