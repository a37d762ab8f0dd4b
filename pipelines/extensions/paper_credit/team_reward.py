"""team_reward: scores -> the team's score of a round, now, at the end or summed over later rounds (UMAD, arXiv 2603.01221).

team_t  = sum, max or mean of the scores of round t, or one agent's (`dictator`); `individual`: each its own
dense         round t earns team_t                  sparse        the last round earns it, the others 0
accumulative  sum of team_t' over t' >= t            discounted    the same with `gamma`^(t' - t)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.extensions.paper_credit.rounds import Team, Timing, check_choice, paid_at, team_score
from pipelines.extensions.paper_credit.shaping import Played, Shaping
from stores.settings import AgentName, Share
from stores.types import Turn


class TeamReward(Shaping):
    """Rewards increments if every score counts once, for its own agent, in its own round; else returns.

    A team's score is the reward of each of its agents: GAE that chains through the turns of a model group would count it
    several times.
    """

    def __init__(
        self,
        inner: Mapping[str, Any],
        timing: Timing = "dense",
        team: Team = "sum",
        gamma: Share = 0.9,
        agents: Sequence[AgentName] = (),
    ) -> None:
        """Args:
        timing: when the reward of a round is given.
        team: whose scores an agent is rewarded by; `dictator`: those of the first of `agents`, for all.
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
        """Returns the part `team`."""
        dictator = self.agents[0] if self.agents else ""
        earned = [team_score(scores, turn.agent, team=self.team, dictator=dictator) for scores in played.rounds]
        return {"team": paid_at(earned, played.round_of[turn.turn_index], timing=self.timing, gamma=self.gamma)}
