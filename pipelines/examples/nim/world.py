"""world: heaps of matches; in turn each player takes some of one heap, and who takes the last match wins (Bouton 1901).

    take 2 from b

A move that the rules do not have loses the game, so that nobody is better off by not playing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from operator import xor
from typing import Any

NAMES = "abc"
MOVE = re.compile(r"take (\d{1,3}) from ([a-c])")


def best_move(heaps: Sequence[int]) -> str:
    """Returns a move after which the other player loses, or one match of the largest heap where there is none."""
    balance = reduce(xor, heaps)
    for name, heap in zip(NAMES, heaps, strict=True):
        if balance and heap ^ balance < heap:
            return f"take {heap - (heap ^ balance)} from {name}"
    return f"take 1 from {NAMES[max(range(len(heaps)), key=lambda n: heaps[n])]}"


def is_won_by_who_begins(heaps: Sequence[int]) -> bool:
    """Whether the player to move wins if nobody errs."""
    return reduce(xor, heaps) != 0


class Nim:
    """A game of two named players. `info` says whose turn it is, and at the end what each has earned."""

    def __init__(self, heaps: Sequence[int], players: Sequence[str]) -> None:
        """Args: heaps: three numbers of matches. players: their names; the first one begins."""
        if len(heaps) != len(NAMES) or len(set(players)) != 2 or min(heaps) < 0 or not any(heaps):
            raise ValueError(
                f"heaps = {list(heaps)}, players = {list(players)}: three heaps, not all empty, and two names"
            )
        self.heaps, self.players = list(heaps), list(players)
        self.turn = 0
        self.winner = ""

    def reset(self) -> dict[str, Any]:
        """Returns the heaps, and whose turn it is."""
        return self._shown(0.0)

    def step(self, action: str) -> dict[str, Any]:
        """Makes the move of the player whose turn it is. The reward is that player's: 1 for the last match, else 0."""
        mover, other = self.players[self.turn], self.players[1 - self.turn]
        match = MOVE.fullmatch(action.strip())
        heap = NAMES.index(match[2]) if match else -1
        if match is None or not 1 <= int(match[1]) <= self.heaps[heap]:
            self.winner = other
        else:
            self.heaps[heap] -= int(match[1])
            self.turn = 1 - self.turn
            self.winner = "" if any(self.heaps) else mover
        return self._shown(float(self.winner == mover))

    def _shown(self, reward: float) -> dict[str, Any]:
        heaps = ", ".join(f"{name} {heap}" for name, heap in zip(NAMES, self.heaps, strict=True))
        scores = {player: float(player == self.winner) for player in self.players} if self.winner else {}
        return {
            "text": heaps,
            "reward": reward,
            "is_done": bool(self.winner),
            "info": {"player": self.players[self.turn], "scores": scores},
            "anchor": f"{self.players[self.turn]}: {heaps}",
        }
