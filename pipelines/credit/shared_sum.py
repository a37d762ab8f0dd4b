"""shared_sum: every turn earns the sum of what all turns of the episode earn (CORY: r1 + r2, seed-systems 2.8)."""

from __future__ import annotations

from pipelines.credit.rule import CreditKind
from pipelines.credit.shaping import Played, Shaping
from stores.types import Turn


class SharedSum(Shaping):
    """The whole team's return, for each turn of it: GAE ends at each turn."""

    kind: CreditKind = "returns"
    needs_scores = False

    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """`sum`."""
        return {"sum": sum(sum(scores.values()) for scores in played.rounds)}
