"""debate: trace -> rewards of debaters by the correctness of each round (UMAD, arXiv 2603.01221; MAPoRL, arXiv 2502.18439).

r_(t,i) = correctness of what agent i answers in round t
team_t  = sum, max or mean of r_(t,i) over i, or one agent's (`dictator`); `individual`: each its own
dense         round t earns team_t                  sparse        the last round earns it, the others 0
accumulative  sum of team_t' over t' >= t            discounted    the same with `gamma`^(t' - t)
influence     + strength * sign(mean over j != i of (r_(t+1,j) - r_(t,j))), but in the last round
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from pipelines.extensions.paper_credit.rounds import Rounds, Team, Timing, check_choice, influence, paid_at, team_score
from serve_apps.tools.math_answer import is_correct
from stores.settings import AgentName, NotNegative, Share
from stores.traces.conventions import rounds_in_time
from stores.types import Trace


class DebateReward:
    """Rewards debaters by their rounds; every other agent of the workflow (e.g. a summarizer) gets the team's outcome."""

    kind: Literal["returns"] = "returns"

    def __init__(
        self,
        timing: Timing = "dense",
        team: Team = "individual",
        gamma: Share = 0.9,
        influence: NotNegative = 0.0,
        format_weight: NotNegative = 0.0,
        debaters: Sequence[AgentName] = (),
        answer_field: str = "answer",
    ) -> None:
        """Args:
        timing: when the reward of a round is given.
        team: whose scores an agent is rewarded by; `dictator`: the first debater's, for all.
        gamma: of `discounted`, per round.
        influence: strength of the influence reward; UMAD: 0.2.
        format_weight: penalty of a turn with an invalid format.
        debaters: agents that debate, in order; empty: those whose names begin with `debater`.
        """
        check_choice("timing", timing, Timing)
        check_choice("team", team, Team)
        self.timing, self.team, self.gamma, self.influence = timing, team, gamma, influence
        self.format_weight, self.debaters, self.answer_field = format_weight, tuple(debaters), answer_field

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit; the outcome is 1 if `trace.answer` is correct, else 0."""
        references = trace.task.answers
        outcome = float(is_correct(trace.answer, references))
        debating = [turn for turn in trace.turns if self._debates(turn.agent)]
        round_of = rounds_in_time(debating)
        scores: list[dict[str, float]] = [{} for _ in set(round_of.values())]
        for turn in debating:
            answer = turn.fields.get(self.answer_field, "")
            scores[round_of[turn.turn_index]][turn.agent] = float(is_correct(answer, references))
        rewards = []
        for position, turn in enumerate(trace.turns):
            parts = {"format": format_penalty(turn, self.format_weight)}
            if (t := round_of.get(turn.turn_index)) is not None:
                parts["debate"] = self._paid(scores, t, turn.agent)
                parts["influence"] = self.influence * influence(scores, t, turn.agent)
            else:
                parts["outcome"] = outcome
            rewards.append(turn_reward(trace, position, parts))
        return Credit(outcome=outcome, rewards=tuple(rewards))

    def _debates(self, agent: str) -> bool:
        return agent in self.debaters if self.debaters else agent.startswith("debater")

    def _paid(self, rounds: Rounds, t: int, agent: str) -> float:
        earned = [self._earned(rounds, k, agent) for k in range(len(rounds))]
        return paid_at(earned, t, timing=self.timing, gamma=self.gamma)

    def _earned(self, rounds: Rounds, t: int, agent: str) -> float:
        dictator = self.debaters[0] if self.debaters else min(rounds[t])
        return team_score(rounds[t], agent, team=self.team, dictator=dictator)
