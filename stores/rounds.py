"""rounds: an episode's turns -> the round of each, in time."""

from __future__ import annotations

from collections.abc import Sequence

from stores.types import Turn


def rounds_in_time(turns: Sequence[Turn]) -> dict[int, int]:
    """Turn index -> round, from 0: a round is over when one of its agents speaks again.

    `Turn.round_index` counts each agent's own calls: one that speaks once, at the end, would be in the first round.
    """
    found: dict[int, int] = {}
    number, spoken = 0, set[str]()
    for turn in sorted(turns, key=lambda turn: turn.turn_index):
        if turn.agent in spoken:
            number, spoken = number + 1, set()
        spoken.add(turn.agent)
        found[turn.turn_index] = number
    return found
