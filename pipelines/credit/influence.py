"""influence: a turn earns more where the others do better after it, less where they do worse (UMAD, seed-systems 2.4).

I_(t,i) = `strength` * sign(mean over j != i of (r_(t+1,j) - r_(t,j))) for every round but the last, r as the inner rule
pays it: no agent's bonus changes another's, whatever the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.credit.rounds import influence
from pipelines.credit.shaping import Played, Shaping
from stores.types import Turn


class InfluenceReward(Shaping):
    """Added to what the inner rule pays, and of its kind."""

    needs_scores = False

    def __init__(self, inner: Mapping[str, Any], strength: float = 0.2, agents: Sequence[str] = ()) -> None:
        """Args: strength: UMAD's 0.2."""
        super().__init__(inner, agents)
        self.strength, self.kind = strength, self.inner.kind

    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """`score` and `influence`."""
        t, agent = played.round_of[turn.turn_index], turn.agent
        return {
            "score": played.rounds[t][agent],
            "influence": self.strength * influence(played.rounds, t, agent),
        }
