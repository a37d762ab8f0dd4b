"""gigpo: compares episodes by task, and turns by the state that they acted in (GiGPO, arXiv 2505.10978).

    A = A_episode + step_weight A_step
    A_episode   GRPO over the episode's reward (the mean over its rows), or by `group_by`
    A_step      (G - mean_s) / (std_s + eps), G_k = R_k + gamma G_{k+1}, over the turns of a task that share the anchor s

An anchor is the state of the world, as its environment names it. Where the episode has no world, or `anchor` says so, it is the prompt,
or a set of prompts that are similar enough. Where the credit rule pays `returns`, a turn's reward
is G already.
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
    """Returns [N]; a turn whose anchor no other turn shares has no step advantage, whatever `singleton` says."""
    steps = normalize(
        rows.scores if rows.credit_kind == "returns" else _returns(rows, gamma=settings.step_gamma),
        _anchors(rows, settings),
        settings.model_copy(update={"singleton": "zero"}),
    )
    return grpo(rows, settings) + settings.step_weight * steps


def figures(rows: RewardedRows, settings: AdvantageConfig) -> dict[str, float]:
    """Returns the share of turns whose anchor another turn shares: only these have a step advantage; at 0 this is grpo."""
    sizes = Counter(anchors := _anchors(rows, settings))
    return {"train/anchor_share": sum(sizes[anchor] > 1 for anchor in anchors) / max(1, len(anchors))}


def _returns(rows: RewardedRows, *, gamma: float) -> NDArray[np.float64]:
    """Returns [N]: G_k = R_k + gamma G_{k+1} along the turns of each episode."""
    scores = rows.scores
    returns, later = np.zeros(len(scores)), dict.fromkeys(rows.episode_ids, 0.0)
    # From the last turn to the first, so that an episode's `later` is the return of the turn that follows.
    for i in sorted(range(len(scores)), key=lambda i: -rows.turn_indices[i]):
        later[rows.episode_ids[i]] = scores[i] + gamma * later[rows.episode_ids[i]]
        returns[i] = later[rows.episode_ids[i]]
    return returns


def _anchors(rows: RewardedRows, settings: AdvantageConfig) -> list[tuple[str, str, int | str]]:
    """Returns (task group, agent, name of the anchor) of each row: a state of the world, or the number of a prompt.

    Two prompts share an anchor if they are equal, or if both are similar enough to the anchor's first prompt.
    """
    states = rows.states if settings.anchor == "state" and rows.states else [""] * len(rows.group_ids)
    anchors_of: dict[tuple[str, str], list[Sequence[int]]] = {}
    number_of: dict[tuple[str, str, tuple[int, ...]], int] = {}
    keys: list[tuple[str, str, int | str]] = []
    for group, agent, prompt, state in zip(rows.group_ids, rows.agents, rows.prompts, states, strict=True):
        if state:
            keys.append((group, agent, state))
            continue
        anchors = anchors_of.setdefault((group, agent), [])
        exact = (group, agent, tuple(prompt))
        if (
            exact not in number_of
        ):  # comparing is quadratic in the prompt's length: each distinct prompt is compared once
            similar = (i for i, anchor in enumerate(anchors) if _are_similar(anchor, prompt, settings.similarity))
            number_of[exact] = next(similar, len(anchors))
            if number_of[exact] == len(anchors):
                anchors.append(prompt)
        keys.append((group, agent, number_of[exact]))
    return keys


def _are_similar(a: Sequence[int], b: Sequence[int], similarity: float) -> bool:
    if similarity == 1:
        return False  # only equal prompts are, which have a number already
    matcher = SequenceMatcher(None, list(a), list(b), autojunk=False)
    # The bounds from above cost little and the ratio much: it takes seconds for two prompts of some thousand tokens.
    return all(r() >= similarity for r in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio))
