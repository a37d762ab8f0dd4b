"""gae: token rewards and values -> advantages and returns, over trainable tokens only; and whitening.

Rows are lists of arrays over completion tokens. Prompt and tool tokens never enter, so masked tokens between turns change
nothing. Everything is computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import are_equal

Rows = Sequence[NDArray[np.floating]]


def gae(
    token_rewards: Rows, values: Rows, *, trajectories: Sequence[Sequence[int]], gamma: float, gae_lambda: float
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Computes generalised advantage estimates (arXiv 1506.02438) along each trajectory, with V = 0 after its last token.

    So it is after a truncated episode, too: nothing is paid after a limit, which is a part of the task and no pause in it (Pardo et al.
    2018, arXiv 1712.00378, "time-awareness"; to bootstrap is for limits that are none of the task's).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lambda A_{t+1}
        returns = A + V

    Args:
        token_rewards: N rows, one reward per completion token (see `kl.token_rewards`).
        values: N rows of the same lengths.
        trajectories: indices of the rows that follow one another, in time order; every row exactly once (see
            `samples.trajectories_of`). With one row per trajectory GAE ends at each turn; with all rows of an episode the
            token after a turn's last one is the next turn's first.

    Returns:
        Advantages (not whitened) and returns, shaped like the inputs.
    """
    seen = sorted(row for chain in trajectories for row in chain)
    assert seen == list(range(len(values))), "every row belongs to exactly one trajectory"
    lengths = [len(v) for v in values]
    assert lengths == [len(r) for r in token_rewards], "rewards and values have different lengths"
    widths = [sum(lengths[row] for row in chain) for chain in trajectories]
    # All trajectories are computed at once, aligned on the right: column -1 is every trajectory's last token, and left of
    # its first one stand zeros, which the backward recursion reaches last and nobody reads.
    r = np.zeros((len(trajectories), max(widths, default=0)))
    v = np.zeros((r.shape[0], r.shape[1] + 1))
    for i, (chain, width) in enumerate(zip(trajectories, widths, strict=True)):
        r[i, r.shape[1] - width :] = np.concatenate([token_rewards[row] for row in chain])
        v[i, r.shape[1] - width : -1] = np.concatenate([values[row] for row in chain])
    delta = r + gamma * v[:, 1:] - v[:, :-1]
    advantage = np.zeros_like(r)
    last = np.zeros(len(trajectories))
    for t in range(r.shape[1] - 1, -1, -1):
        last = delta[:, t] + gamma * gae_lambda * last
        advantage[:, t] = last
    advantages: list[NDArray[np.float64]] = [np.empty(0)] * len(values)
    for i, (chain, width) in enumerate(zip(trajectories, widths, strict=True)):
        cuts = np.cumsum([lengths[row] for row in chain])[:-1]
        for row, part in zip(chain, np.split(advantage[i, r.shape[1] - width :], cuts), strict=True):
            advantages[row] = part
    return advantages, [a + np.asarray(value, dtype=np.float64) for a, value in zip(advantages, values, strict=True)]


def whiten(advantages: Rows, *, labels: Sequence[str] | None = None) -> list[NDArray[np.float64]]:
    """Returns (x - mean) / sqrt(var + 1e-8), var with ddof 1, over all tokens of all rows that share a label.

    Args:
        advantages: N rows, one value per completion token; the rows of all workers.
        labels: [N], e.g. each row's agent; None: all rows together. (`whiten: none` does not call this.)
    """
    labels = labels if labels is not None else [""] * len(advantages)
    out = [np.asarray(a, dtype=np.float64) for a in advantages]
    for label in set(labels):
        rows = [i for i, name in enumerate(labels) if name == label]
        x = np.concatenate([out[i] for i in rows])
        is_equal = are_equal(x)
        scale = 0.0 if is_equal else 1 / np.sqrt(x.var(ddof=1) + 1e-8)
        for i in rows:
            out[i] = np.zeros_like(out[i]) if is_equal else (out[i] - x.mean()) * scale
    return out
