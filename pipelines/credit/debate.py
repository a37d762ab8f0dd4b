"""debate: what a round's answers are worth to those who gave them, and to the team (UMAD, MAPoRL; seed-systems 1.3, 2.4).

r_(t,i) = correctness of what agent i answers in round t
team_t  = sum, max or mean of r_(t,i) over i, or one agent's (`dictator`); `individual`: each its own
dense         round t earns team_t                  sparse        the last round earns it, the others 0
accumulative  sum of team_t' over t' >= t            discounted    the same with `gamma`^(t' - t)
influence     + strength * sign(mean over j != i of (r_(t+1,j) - r_(t,j))), but in the last round
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from serve_apps.tools.math_answer import is_correct
from stores.types import Trace

Scores = Mapping[str, float]
"""By agent, of one round."""


class DebateReward:
    """Rewards of debaters; anybody else in the workflow (a summarizer) earns the team's outcome."""

    kind: Literal["returns"] = "returns"

    def __init__(
        self,
        timing: Literal["dense", "sparse", "accumulative", "discounted"] = "dense",
        team: Literal["individual", "sum", "max", "mean", "dictator"] = "individual",
        gamma: float = 0.9,
        influence: float = 0.0,
        format_weight: float = 0.0,
        debaters: Sequence[str] = (),
        answer_field: str = "answer",
    ) -> None:
        """Args:
        timing: when a round is paid.
        team: who is paid for whom; `dictator`: all by the first debater.
        gamma: of `discounted`, per round.
        influence: strength of the influence reward; UMAD: 0.2.
        format_weight: what a broken format costs.
        debaters: agents that debate, in order; empty: those whose names begin with `debater`.
        """
        if timing not in ("dense", "sparse", "accumulative", "discounted"):
            raise ValueError(f"credit.settings.timing: {timing!r}: one of dense, sparse, accumulative, discounted")
        if team not in ("individual", "sum", "max", "mean", "dictator"):
            raise ValueError(f"credit.settings.team: {team!r}: one of individual, sum, max, mean, dictator")
        self.timing, self.team, self.gamma, self.influence = timing, team, gamma, influence
        self.format_weight, self.debaters, self.answer_field = format_weight, tuple(debaters), answer_field

    def assign_credit(self, trace: Trace) -> Credit:
        """Outcome: whether `trace.answer` is right."""
        references = trace.task.answers
        outcome = float(is_correct(trace.answer, references))
        rounds: dict[int, dict[str, float]] = defaultdict(dict)
        for turn in trace.turns:
            if self._debates(turn.agent):
                answer = turn.fields.get(self.answer_field, "")
                rounds[turn.round_index][turn.agent] = float(is_correct(answer, references))
        scores = [rounds[t] for t in sorted(rounds)]
        rewards = []
        for position, turn in enumerate(trace.turns):
            parts = {"format": format_penalty(turn, self.format_weight)}
            if self._debates(turn.agent):
                parts["debate"] = self._paid(scores, turn.round_index, turn.agent)
                parts["influence"] = self.influence * _influence(scores, turn.round_index, turn.agent)
            else:
                parts["outcome"] = outcome
            rewards.append(turn_reward(trace, position, parts))
        return Credit(outcome=outcome, rewards=tuple(rewards))

    def _debates(self, agent: str) -> bool:
        return agent in self.debaters if self.debaters else agent.startswith("debater")

    def _paid(self, scores: Sequence[Scores], t: int, agent: str) -> float:
        earned = [self._team(score, agent) for score in scores]
        if self.timing == "dense":
            return earned[t]
        if self.timing == "sparse":
            return earned[t] if t == len(earned) - 1 else 0.0
        gamma = self.gamma if self.timing == "discounted" else 1.0
        return sum(gamma ** (later - t) * earned[later] for later in range(t, len(earned)))

    def _team(self, scores: Scores, agent: str) -> float:
        """An agent that did not speak in a round earned nothing in it."""
        if self.team == "individual":
            return scores.get(agent, 0.0)
        if self.team == "dictator":
            return scores.get(self.debaters[0] if self.debaters else min(scores), 0.0)
        values = list(scores.values())
        return {"sum": sum(values), "max": max(values), "mean": sum(values) / len(values)}[self.team]


def _influence(scores: Sequence[Scores], t: int, agent: str) -> int:
    """Which way the others moved after this turn: 1, 0 or -1. Computed on what was scored, not on what was paid."""
    if t + 1 >= len(scores):
        return 0
    changes = [scores[t + 1][j] - scores[t][j] for j in scores[t] if j != agent and j in scores[t + 1]]
    mean = sum(changes) / len(changes) if changes else 0.0
    return (mean > 0) - (mean < 0)
