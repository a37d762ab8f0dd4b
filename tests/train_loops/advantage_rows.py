"""Made-up rewarded rows, drawn ones, and what an estimator makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from stores.by_name import check_extension
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig
from train_loops.estimators import ESTIMATORS, Estimator


def _is_there(estimator: Estimator) -> bool:
    try:
        check_extension(estimator.extension or "train_loops", place="")
    except ValueError:
        return False
    return True


THERE = {it.function: name for name, it in ESTIMATORS.items() if not it.critic and _is_there(it)}
"""Every function once, with a name of it; those of an extension where that is installed."""


def there(*names: str, but: tuple[str, ...] = ()) -> list[str]:
    """Returns these names, or all but some, of estimators that are there."""
    return [name for name in THERE.values() if name in (names or THERE.values()) and name not in but]


def rows(
    scores: list[float],
    *,
    episodes: list[str] | None = None,
    groups: list[str] | None = None,
    agents: list[str] | None = None,
    **more: Any,
) -> RewardedRows:
    """One token per row unless `lengths` says otherwise; every row an episode of its own unless `episodes` does."""
    num = len(scores)
    lengths = more.pop("lengths", [1] * num)
    return RewardedRows(
        token_rewards=[np.array([0.0] * (n - 1) + [s]) for n, s in zip(lengths, scores, strict=True)],
        group_ids=groups or ["g"] * num,
        episode_ids=episodes or [str(i) for i in range(num)],
        agents=agents or ["a"] * num,
        turn_indices=more.pop("turns", list(range(num))),
        round_indices=more.pop("calls", [0] * num),
        episode_rounds=more.pop("rounds", [0] * num),
        prompts=more.pop("prompts", [[1]] * num),
        baselines=more.pop("baselines", [None] * num),
        states=more.pop("states", [""] * num),
        **more,
    )


def per_row(name: str, given_rows: RewardedRows, **changes: Any) -> np.ndarray:
    """One number per row: the advantage of its last token."""
    advantages = ESTIMATORS[name](given_rows, AdvantageConfig(**changes))
    return np.array([np.atleast_1d(a)[-1] for a in advantages])


table_rows = st.lists(
    st.tuples(st.sampled_from("gh"), st.sampled_from("ab"), st.integers(0, 3), st.integers(-4, 4), st.integers(1, 3)),
    min_size=1,
    max_size=16,
)


def table_of(drawn: list) -> RewardedRows:
    groups, agents, episodes, scores, lengths = (list(column) for column in zip(*drawn, strict=True))
    return rows(
        [float(s) for s in scores],
        groups=groups,
        agents=agents,
        episodes=[f"{g}{e}" for g, e in zip(groups, episodes, strict=True)],
        lengths=lengths,
        rounds=[0] * len(drawn),
        prompts=[[n] for n in lengths],
        baselines=[0.5 if n == 1 else None for n in lengths],
        turns=list(range(len(drawn))),
    )
