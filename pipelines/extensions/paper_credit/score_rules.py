"""score_rules: scores -> {last, current, discounted_sum} x {all, individual}, with bonuses (MAPoRL, arXiv 2502.18439).

persuaded    + if the agent was wrong and the others right, and it is now right; - if the others misled it
corrected    + if it becomes right while all were wrong; - if it becomes wrong while all were right
persuading   + if it is right and the others, wrong in this round, are right in the next; - if it misleads them

MAPoRL's code has the signs of the third the other way round, which would reward misleading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.credit.rule import CreditKind
from pipelines.extensions.paper_credit.rounds import Horizon, Rounds, Sharing, check_choice, mean_of, shared_score
from pipelines.extensions.paper_credit.shaping import Played, Shaping
from stores.settings import AgentName, Share
from stores.types import Turn

THRESHOLD = 0.5
"""A score above it is right, below it wrong, equal to it neither."""


class ScoreRules(Shaping):
    """Rewards every turn with the scores that followed it, which is a return: GAE ends at each turn."""

    kind: CreditKind = "returns"

    def __init__(
        self,
        inner: Mapping[str, Any],
        horizon: Horizon = "discounted_sum",
        sharing: Sharing = "all",
        gamma: Share = 0.3,
        persuaded: float = 0.0,
        corrected: float = 0.0,
        persuading: float = 0.0,
        agents: Sequence[AgentName] = (),
    ) -> None:
        """Args:
        horizon: the last round's scores, this round's, or this and the later ones', discounted.
        sharing: `all`: the mean over the agents; `individual`: the agent's own.
        gamma: per round, of `discounted_sum`.
        """
        super().__init__(inner, agents)
        check_choice("horizon", horizon, Horizon)
        check_choice("sharing", sharing, Sharing)
        self.horizon, self.sharing, self.gamma = horizon, sharing, gamma
        self.persuaded, self.corrected, self.persuading = persuaded, corrected, persuading

    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """Returns the part `score` and, if bonuses are set, `bonus`."""
        t, agent = played.round_of[turn.turn_index], turn.agent
        score = shared_score(played.rounds, t, agent, horizon=self.horizon, sharing=self.sharing, gamma=self.gamma)
        if not (self.persuaded or self.corrected or self.persuading):
            return {"score": score}
        return {"score": score, "bonus": self._bonus(played.rounds, t, agent)}

    def _bonus(self, rounds: Rounds, t: int, agent: str) -> float:
        own, before = _side(rounds[t][agent]), _side(_at(rounds, t - 1).get(agent))
        others_before, others, others_after = (_side(mean_of(_at(rounds, k), but=agent)) for k in (t - 1, t, t + 1))
        bonus = 0.0
        if own and own == -before:
            follows = own == others_before
            bonus += own * (self.persuaded if follows else self.corrected)
        if own and own == others_after == -others:
            bonus += own * self.persuading
        return bonus


def _at(rounds: Rounds, t: int) -> Mapping[str, float]:
    return rounds[t] if 0 <= t < len(rounds) else {}


def _side(score: float | None) -> int:
    """1 right, -1 wrong, 0 neither or unknown."""
    return 0 if score is None else (score > THRESHOLD) - (score < THRESHOLD)
