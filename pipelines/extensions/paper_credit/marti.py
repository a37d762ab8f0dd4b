"""marti: scores -> scores shaped by the agent's past ones (reward shaping of MARTI, github.com/TsinghuaC3I/MARTI).

margin    R + alpha (R - Q)                       rewards doing better than before
quality   R + alpha (Q R - (1 - Q)(1 - R))        rewards staying right; for scores in [0, 1]
Q is the mean score of the agent's past: of its earlier rounds in the episode, or of the other episodes of the scored set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipelines.extensions.paper_credit.rounds import check_choice
from pipelines.extensions.paper_credit.shaping import Played, Shaping
from stores.settings import AgentName, NotNegative
from stores.types import Turn

Mode = Literal["margin", "quality"]
Past = Literal["rounds", "episodes"]


class HistoryShaping(Shaping):
    """Shapes scores by the agent's past. A turn without a past keeps its score.

    The other episodes are those that are scored together with it, so that scoring stored traces again gives the same.
    """

    needs_scores = False

    def __init__(
        self,
        inner: Mapping[str, Any],
        mode: Mode = "margin",
        alpha: NotNegative = 0.5,
        past: Past = "rounds",
        agents: Sequence[AgentName] = (),
    ) -> None:
        """Args:
        past: `rounds`: the agent's earlier turns in the episode; `episodes`: its turns in all others of the iteration.
        """
        super().__init__(inner, agents)
        check_choice("mode", mode, Mode)
        check_choice("past", past, Past)
        self.mode, self.alpha, self.past, self.kind = mode, alpha, past, self.inner.kind

    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """Returns the parts `score` and `shaping`."""
        score = played.rounds[played.round_of[turn.turn_index]][turn.agent]
        quality = self._quality(turn, played)
        return {"score": score, "shaping": 0.0 if quality is None else self.alpha * self._gain(score, quality)}

    def _quality(self, turn: Turn, played: Played) -> float | None:
        if self.past == "episodes":
            return played.elsewhere.get(turn.agent)
        before = played.rounds[: played.round_of[turn.turn_index]]
        earlier = [scores[turn.agent] for scores in before if turn.agent in scores]
        return sum(earlier) / len(earlier) if earlier else None

    def _gain(self, score: float, quality: float) -> float:
        if self.mode == "margin":
            return score - quality
        return quality * score - (1 - quality) * (1 - score)
