"""gigpo: episodes compared by task, and turns by what they saw (GiGPO, arXiv 2505.10978; seed-systems 2.2).

A = A_episode + step_weight A_step
A_episode   GRPO over the episode's reward (the mean over its rows), or by `group_by`
A_step      turns of a task whose prompts are one anchor, by the discounted sum of the rewards from there on

Where the credit rule pays `returns`, a turn's reward is that sum already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import normalize
from train_loops.advantages.grpo import grpo
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def gigpo(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """[N]; a turn whose anchor no other turn shares has no step advantage, whatever `singleton` says."""
    steps = normalize(
        rows.scores if rows.credit_kind == "returns" else _returns(rows, gamma=settings.step_gamma),
        _anchors(rows, similarity=settings.similarity),
        settings.model_copy(update={"singleton": "zero"}),
    )
    return grpo(rows, settings) + settings.step_weight * steps


def anchor_share(rows: RewardedRows, settings: AdvantageConfig) -> float:
    """Share of turns whose anchor another turn shares: only these have a step advantage; 0 makes gigpo plain grpo."""
    sizes = Counter(anchors := _anchors(rows, similarity=settings.similarity))
    return sum(sizes[anchor] > 1 for anchor in anchors) / max(1, len(anchors))


def _returns(rows: RewardedRows, *, gamma: float) -> NDArray[np.float64]:
    """[N]: G_k = R_k + gamma G_{k+1} along the turns of each episode, in time order."""
    scores = rows.scores
    out, last = np.zeros(len(scores)), dict.fromkeys(rows.episode_ids, 0.0)
    for i in sorted(range(len(scores)), key=lambda i: -rows.turn_indices[i]):
        last[rows.episode_ids[i]] = scores[i] + gamma * last[rows.episode_ids[i]]
        out[i] = last[rows.episode_ids[i]]
    return out


def _anchors(rows: RewardedRows, *, similarity: float) -> list[tuple[str, str, int]]:
    """(task group, agent, anchor) of each row: prompts are one anchor if equal, or alike enough to its first one."""
    found: dict[tuple[str, str], list[Sequence[int]]] = {}
    exact: dict[tuple[str, str, tuple[int, ...]], int] = {}
    keys = []
    for group, agent, prompt in zip(rows.group_ids, rows.agents, rows.prompts, strict=True):
        anchors = found.setdefault((group, agent), [])
        same = (group, agent, tuple(prompt))
        if same not in exact:
            alike = (i for i, anchor in enumerate(anchors) if similarity < 1 and _ratio(anchor, prompt) >= similarity)
            exact[same] = next(alike, len(anchors))
            if exact[same] == len(anchors):
                anchors.append(prompt)
        keys.append((group, agent, exact[same]))
    return keys


def _ratio(a: Sequence[int], b: Sequence[int]) -> float:
    return SequenceMatcher(None, list(a), list(b), autojunk=False).ratio()
