"""difference: a turn earns what it is better by than the agent's last one, or than the others of its round.

rounds   r_(t,i) - r_(t-1,i), r_(-1,i) = 0: adds up to the agent's last score
agents   r_(t,i) - mean over j != i of r_(t,j): what is the same for all is worth nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipelines.credit.rounds import check_choice, mean_of
from pipelines.credit.shaping import Played, Shaping
from stores.types import Turn

Between = Literal["rounds", "agents"]


class DifferenceReward(Shaping):
    """Between rounds the rewards are increments, between agents they stand for themselves."""

    def __init__(self, inner: Mapping[str, Any], between: Between = "rounds", agents: Sequence[str] = ()) -> None:
        """Args: between: what a turn is compared with."""
        super().__init__(inner, agents)
        check_choice("between", between, Between)
        self.between = between
        self.kind = "increments" if between == "rounds" else "returns"

    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """`difference`."""
        t, agent = played.round_of[turn.turn_index], turn.agent
        if self.between == "rounds":
            before = next((s[agent] for s in reversed(played.rounds[:t]) if agent in s), 0.0)
        else:
            before = mean_of(played.rounds[t], but=agent) or 0.0
        return {"difference": played.rounds[t][agent] - before}
