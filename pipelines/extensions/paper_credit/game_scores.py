"""game_scores: trace -> what each player of a game has earned at its end, to all of that player's turns.

a turn of a player in `trained`    the score of its player, plus `format_weight` * (0 or -1)
a turn of any other                nothing: it does not train, so that its model group is a frozen opponent
"""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.credit.rule import Credit, CreditKind, failed_credit, format_penalty, turn_reward
from pipelines.credit.step_rewards import answered_calls
from stores.settings import AgentName, NotNegative
from stores.traces.conventions import info_of
from stores.types import Trace


class GameScores:
    """Pays players by the scores that their game says in `info` of its last step. Players are agents."""

    kind: CreditKind = "returns"

    def __init__(
        self,
        environment: str,
        player: str,
        trained: Sequence[AgentName] = (),
        scores: str = "scores",
        format_weight: NotNegative = 0.1,
    ) -> None:
        """Args:
        environment: what the workflow calls the environment.
        player: the agent whose score is the episode's outcome, cut to [0, 1].
        trained: the agents that learn; default: `player` alone, against frozen opponents. Name all for self-play.
        scores: name in `info`, of a mapping from agents to numbers; a player that is missing there has 0.
        format_weight: penalty of a turn with an invalid format.
        """
        self.environment, self.player, self.trained = environment, player, tuple(trained) or (player,)
        self.scores, self.format_weight = scores, format_weight

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit of an episode. Raises ValueError where no world of the environment was opened."""
        shown = answered_calls(trace, self.environment)
        if shown is None:
            return failed_credit(self, trace)
        scores = info_of(shown[-1]).get(self.scores, {})
        rewards = [
            turn_reward(
                trace,
                position,
                {"score": float(scores.get(turn.agent, 0.0)), "format": format_penalty(turn, self.format_weight)},
            )
            for position, turn in enumerate(trace.turns)
            if self.pays(turn.agent)
        ]
        outcome = min(1.0, max(0.0, float(scores.get(self.player, 0.0))))
        return Credit(outcome=outcome, rewards=tuple(rewards))

    def pays(self, agent: str) -> bool:
        """Says whether `agent` learns."""
        return agent in self.trained
