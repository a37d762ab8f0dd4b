"""workflow: piles of coins -> a teller counts each, a clerk remarks on the total, an auditor keeps it or loses it."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task

KEEP, BURN = "keep", "burn"
MAX_TRIES = 2


class CountingHouse(Workflow):
    """A workflow in which credit matters: the share of each turn in the outcome is known, but the outcome alone hides it.

    The teller is called once per pile, and again for a count that nobody can read: more often where it did worse. The
    clerk is a free rider. The auditor is a saboteur: what it keeps is the tellers' total, what it burns is lost.
    """

    teller = Agent(
        prompt="How many good coins? Reply with <COUNT>number</COUNT> only.\nPile: {pile}",
        contract=Tags("COUNT"),
    )
    clerk = Agent(
        prompt="Say something of the day. Reply with <REMARK>word</REMARK> only.\nTotal: {total}",
        contract=Tags("REMARK"),
    )
    auditor = Agent(
        prompt="Keep or burn the books? Reply with <VERDICT>keep or burn</VERDICT> only.\nTotal: {total}",
        contract=Tags("VERDICT", choices={"VERDICT": (KEEP, BURN)}),
    )

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the sum of all counts; no answer if a count is missing or the auditor burns the books."""
        counts = [await self._counted(agents, pile) for pile in task.prompt.split()]
        read = [count for count in counts if count is not None]
        total = str(sum(read)) if len(read) == len(counts) else ""
        await agents.clerk(total=total)
        audit = await agents.auditor(total=total)
        if audit["verdict"] != KEEP:
            return Outcome(answer="", stop_reason="burnt")
        return Outcome(answer=total, stop_reason="kept")

    async def _counted(self, agents: Any, pile: str) -> int | None:
        for _ in range(MAX_TRIES):
            reply = await agents.teller(pile=pile)
            if (count := read_count(reply["count"])) is not None:
                return count
        return None


def read_count(text: str) -> int | None:
    """Returns the count in a teller's reply; None if it is not a number of at most two digits."""
    digits = str(text).strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 2 else None
