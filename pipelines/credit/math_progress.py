"""math_progress: trace -> per turn, the change of the answer's correctness, plus format.

solver 0 -> 1: +1    verifier states none: 0    refiner 1 -> 0: -1    finalizer 0 -> 1: +1    sum = 1 = accuracy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from serve_apps.tools.math_answer import is_correct
from stores.settings import NotNegative
from stores.types import Trace, Turn


class MathProgress:
    """Rewards turn t with c_t - c_(t-1) + `format_weight` * (0 or -1), where c_t is the
    correctness of the team's answer after turn t.

    c starts at 0; a turn that fills none of `answer_fields` does not change it. After the last turn it is the correctness
    of the team's final answer: a last turn that loses a correct answer is penalized, and the progress of an episode always
    adds up to its accuracy.
    """

    kind: Literal["increments"] = "increments"

    def __init__(
        self, format_weight: NotNegative = 1.0, answer_fields: Sequence[str] = ("final_answer", "answer")
    ) -> None:
        self.format_weight = format_weight
        self.answer_fields = tuple(answer_fields)

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit; the outcome is the accuracy of `trace.answer`. Turns are taken in the order of their index."""
        return self._credit(trace, float(is_correct(trace.answer, trace.task.answers)))

    def assign_failed(self, trace: Trace) -> Credit:
        """Returns the credit of an episode whose failure the policy caused: it ends without an answer, so its last turn loses a right one."""
        return self._credit(trace, 0.0)

    def _credit(self, trace: Trace, accuracy: float) -> Credit:
        references = trace.task.answers
        order = sorted(range(len(trace.turns)), key=lambda i: trace.turns[i].turn_index)
        correctness = 0.0
        rewards = []
        for i in order:
            turn = trace.turns[i]
            before = correctness
            stated = self._stated(turn)
            if i == order[-1]:
                correctness = accuracy
            elif stated:
                correctness = float(is_correct(stated, references))
            penalty = format_penalty(turn, self.format_weight)
            rewards.append(turn_reward(trace, i, {"progress": correctness - before, "format": penalty}))
        return Credit(outcome=accuracy, rewards=tuple(rewards))

    def _stated(self, turn: Turn) -> str:
        return next((turn.fields[f] for f in self.answer_fields if turn.fields.get(f, "").strip()), "")
