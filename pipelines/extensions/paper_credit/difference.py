"""difference: scores -> their difference to the agent's previous round, or to the other agents of the round.

rounds   r_(t,i) - r_(t-1,i), r_(-1,i) = 0: the rewards add up to the agent's last score
agents   r_(t,i) - mean over j != i of r_(t,j): a score that all have in common cancels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipelines.extensions.paper_credit.rounds import check_choice, mean_of
from pipelines.extensions.paper_credit.shaping import Played, Shaping
from stores.settings import AgentName
from stores.types import Turn

Between = Literal["rounds", "agents"]


class DifferenceReward(Shaping):
    """Rewards differences: increments between rounds, returns between agents."""

    def __init__(self, inner: Mapping[str, Any], between: Between = "rounds", agents: Sequence[AgentName] = ()) -> None:
        """Args: between: `rounds` compares a turn with the agent's previous one, `agents` with the others of its round."""
        super().__init__(inner, agents)
        check_choice("between", between, Between)
        self.between = between
        self.kind = "increments" if between == "rounds" else "returns"

    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """Returns the part `difference`."""
        t, agent = played.round_of[turn.turn_index], turn.agent
        if self.between == "rounds":
            before = next((s[agent] for s in reversed(played.rounds[:t]) if agent in s), 0.0)
        else:
            before = mean_of(played.rounds[t], but=agent) or 0.0
        return {"difference": played.rounds[t][agent] - before}
