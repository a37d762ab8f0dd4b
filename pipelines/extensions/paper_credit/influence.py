"""influence: scores -> scores plus a bonus if the other agents improve after a turn (UMAD, arXiv 2603.01221).

I_(t,i) = `strength` * sign(mean over j != i of (r_(t+1,j) - r_(t,j))) for every round but the last, r the rewards of the
inner rule: no agent's bonus changes another's, whatever the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.extensions.paper_credit.rounds import influence
from pipelines.extensions.paper_credit.shaping import Played, Shaping
from stores.settings import NotNegative
from stores.types import Turn


class InfluenceReward(Shaping):
    """Adds an influence bonus to the rewards of the inner rule, and has its kind."""

    needs_scores = False

    def __init__(self, inner: Mapping[str, Any], strength: NotNegative = 0.2, agents: Sequence[str] = ()) -> None:
        """Args: strength: size of the bonus; UMAD uses 0.2."""
        super().__init__(inner, agents)
        self.strength, self.kind = strength, self.inner.kind

    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """Returns the parts `score` and `influence`."""
        t, agent = played.round_of[turn.turn_index], turn.agent
        return {
            "score": played.rounds[t][agent],
            "influence": self.strength * influence(played.rounds, t, agent),
        }
