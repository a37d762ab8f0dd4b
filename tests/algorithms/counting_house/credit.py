"""credit: trace -> rewards: the outcome for all turns, what each turn did, or what each turn changed.

outcome    every turn gets 1 if the answer is right, else 0: a broadcast reward
own        a teller's turn 1 where its count is right; the auditor 1 where it keeps the books; the clerk 0
progress   phi = 1 while every count so far is right (at the end: the answer), a turn earns its change: -1 for the turn
           that lost the answer, 0 for all others; an episode's rewards add up to its outcome - 1
"""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.credit.rule import Credit, CreditKind, turn_reward
from stores.types import Trace, Turn
from tests.algorithms.counting_house.workflow import KEEP, MAX_TRIES, read_count

PAYS = ("outcome", "own", "progress")


class CountingHouseCredit:
    """Rewards the same episodes in one of three ways; the outcome is the same in all."""

    def __init__(self, pay: str = "outcome") -> None:
        """Args: pay: `outcome`, `own` or `progress`."""
        if pay not in PAYS:
            raise ValueError(f"credit.settings.pay: {pay!r} is not known: one of {', '.join(PAYS)}")
        self.pay = pay
        self.kind: CreditKind = "increments" if pay == "progress" else "returns"

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit; the outcome is 1 if the answer is the number of good coins, else 0."""
        outcome = float(trace.answer in trace.task.answers)
        order = sorted(range(len(trace.turns)), key=lambda i: trace.turns[i].turn_index)
        verdicts = _verdicts([trace.turns[i] for i in order], trace.task.prompt.split())
        rewards = []
        standing = 1.0
        for position, (i, is_right) in enumerate(zip(order, verdicts, strict=True)):
            earned = outcome
            if self.pay == "own":
                earned = float(bool(is_right))
            elif self.pay == "progress":
                is_last = position == len(order) - 1
                after = outcome if is_last else standing * float(is_right is not False)
                earned, standing = after - standing, after
            rewards.append(turn_reward(trace, i, {self.pay: earned}))
        return Credit(outcome=outcome, rewards=tuple(rewards))


def _verdicts(turns: Sequence[Turn], piles: Sequence[str]) -> list[bool | None]:
    """Says whether each turn was right: None if it has nothing to get right, or another try follows."""
    verdicts: list[bool | None] = []
    pile, tries = 0, 0
    for turn in turns:
        if turn.agent == "teller":
            count = read_count(turn.fields.get("count", ""))
            tries += 1
            is_over = count is not None or tries == MAX_TRIES
            verdicts.append(count == int(piles[pile].partition("+")[0]) if is_over else None)
            pile, tries = (pile + 1, 0) if is_over else (pile, tries)
        elif turn.agent == "auditor":
            verdicts.append(turn.fields.get("verdict") == KEEP)
        else:
            verdicts.append(None)
    return verdicts
