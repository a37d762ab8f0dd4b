"""shared_sum: scores -> for each turn, the sum of the scores of all turns (r1 + r2 in CORY, arXiv 2410.06101)."""

from __future__ import annotations

from pipelines.credit.rule import CreditKind
from pipelines.extensions.paper_credit.shaping import Played, Shaping
from stores.types import Turn


class SharedSum(Shaping):
    """Rewards each turn with the return of the whole team: GAE ends at each turn."""

    kind: CreditKind = "returns"
    needs_scores = False

    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """Returns the part `sum`."""
        return {"sum": sum(sum(scores.values()) for scores in played.rounds)}
