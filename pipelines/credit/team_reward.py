"""team_reward: a round's scores as the team's, paid at once, at the end, or with all that came after (UMAD, 1.3).

team_t  = sum, max or mean of the scores of round t, or one agent's (`dictator`); `individual`: each its own
dense         round t earns team_t                  sparse        the last round earns it, the others 0
accumulative  sum of team_t' over t' >= t            discounted    the same with `gamma`^(t' - t)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.credit.rounds import Team, Timing, check_choice, paid_at, team_score
from pipelines.credit.shaping import Played, Shaping
from stores.types import Turn


class TeamReward(Shaping):
    """Increments where every score is paid once, to its own agent, when it is earned; else returns.

    A team's score is paid to each of its agents: chained through the turns of a model group it would be paid several times.
    """

    def __init__(
        self,
        inner: Mapping[str, Any],
        timing: Timing = "dense",
        team: Team = "sum",
        gamma: float = 0.9,
        agents: Sequence[str] = (),
    ) -> None:
        """Args:
        timing: when a round is paid.
        team: who is paid for whom; `dictator`: all by the first of `agents`.
        gamma: per round, of `discounted`.
        """
        super().__init__(inner, agents)
        check_choice("timing", timing, Timing)
        check_choice("team", team, Team)
        if team == "dictator" and not agents:
            raise ValueError("credit.settings.team: dictator needs credit.settings.agents: the first of them is it")
        self.timing, self.team, self.gamma = timing, team, gamma
        self.kind = "increments" if team == "individual" and timing in ("dense", "sparse") else "returns"

    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """`team`."""
        dictator = self.agents[0] if self.agents else ""
        earned = [team_score(scores, turn.agent, team=self.team, dictator=dictator) for scores in played.rounds]
        return {"team": paid_at(earned, played.round_of[turn.turn_index], timing=self.timing, gamma=self.gamma)}
