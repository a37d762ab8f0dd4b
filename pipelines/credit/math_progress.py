"""math_progress: each turn that states an answer earns what it changed about the answer's correctness, plus format.

solver 0 -> 1: +1    verifier states none: 0    refiner 1 -> 0: -1    finalizer 0 -> 1: +1    sum = 1 = accuracy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipelines.credit.rule import Credit, turn_reward
from serve_apps.tools.math_answer import is_correct
from stores.types import Trace, Turn


class MathProgress:
    """r_t = c_t - c_(t-1) + `format_weight` * (0 or -1), c the correctness of the answer that stands after a turn.

    c starts at 0; a turn that fills none of `answer_fields` leaves it. After the last turn the team's own final answer
    stands, so that a last turn which loses a right answer pays for it, and the progress of an episode always adds up
    to its accuracy.
    """

    kind: Literal["increments"] = "increments"

    def __init__(self, format_weight: float = 1.0, answer_fields: Sequence[str] = ("final_answer", "answer")) -> None:
        self.format_weight = format_weight
        self.answer_fields = tuple(answer_fields)

    def assign_credit(self, trace: Trace) -> Credit:
        """Outcome: accuracy of `trace.answer`; turns are taken in the order of their index."""
        references = trace.task.answers
        accuracy = float(is_correct(trace.answer, references))
        order = sorted(range(len(trace.turns)), key=lambda i: trace.turns[i].turn_index)
        standing = 0.0
        rewards = []
        for i in order:
            turn = trace.turns[i]
            before = standing
            stated = self._stated(turn)
            if i == order[-1]:
                standing = accuracy
            elif stated:
                standing = float(is_correct(stated, references))
            penalty = 0.0 if turn.is_format_ok else -self.format_weight
            rewards.append(turn_reward(trace, i, {"progress": standing - before, "format": penalty}))
        return Credit(outcome=accuracy, rewards=tuple(rewards))

    def _stated(self, turn: Turn) -> str:
        return next((turn.fields[f] for f in self.answer_fields if turn.fields.get(f, "").strip()), "")
