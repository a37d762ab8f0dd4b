"""rounds: an episode's turns -> the round of the episode in which each was taken."""

from __future__ import annotations

from collections.abc import Sequence

from stores.types import Turn


def rounds_in_time(turns: Sequence[Turn]) -> dict[int, int]:
    """Returns turn index -> round, from 0: a round is over when one of its agents acts again.

    `Turn.round_index` will not do: it counts each agent's own calls, and an agent that acts once, at the end, would be in
    the first round.
    """
    round_of: dict[int, int] = {}
    number, acted = 0, set[str]()
    for turn in sorted(turns, key=lambda turn: turn.turn_index):
        if turn.agent in acted:
            number, acted = number + 1, set()
        acted.add(turn.agent)
        round_of[turn.turn_index] = number
    return round_of
