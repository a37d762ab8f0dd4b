"""search_progress: trace -> per turn, the change of the answer's F1 in its round (M-ASK in UnityMAS-O, arXiv 2605.26646).

planner, answerer                     F1 of the answer they state
searcher_t, summarizer_t, updater_t   F1(answer_t) - F1(answer_(t-1)); a searcher that ends the search, in whatever form: 0
plus `format_weight` * (0 or -1) each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from serve_apps.tools.text_match import f1
from stores.settings import AgentName, NotNegative
from stores.types import Trace, Turn


class SearchProgress:
    """Rewards a turn of a round only if that round ended in an answer."""

    kind: Literal["returns"] = "returns"

    def __init__(
        self,
        format_weight: NotNegative = 1.0,
        stating: Sequence[AgentName] = ("planner", "answerer"),
        answerer: str = "answerer",
        searcher: str = "searcher",
        answer_field: str = "final_answer",
        choice_field: str = "choice",
        end: str = "end",
    ) -> None:
        """Args:
        format_weight: penalty of a turn with an invalid format.
        stating: agents that state an answer in `answer_field`, and are paid by it.
        answerer: the one whose answers the rounds are measured by: its first before any round, then one per round.
        searcher: the one that ends the search: by its decision `end` in `choice_field`, or by none that can be read.
        """
        self.format_weight, self.stating, self.answerer = format_weight, tuple(stating), answerer
        self.searcher = searcher
        self.answer_field, self.choice_field, self.end = answer_field, choice_field, end

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit; the outcome is the token F1 of `trace.answer`, in [0, 1]."""
        references = trace.task.answers
        scores = {
            t.turn_index: f1(t.fields.get(self.answer_field, ""), references)
            for t in trace.turns
            if t.agent == self.answerer
        }
        rewards = []
        for position, turn in enumerate(trace.turns):
            earned = self._earned(turn, scores, references)
            if earned is not None:
                name, value = earned
                parts = {name: value, "format": format_penalty(turn, self.format_weight)}
                rewards.append(turn_reward(trace, position, parts))
        return Credit(outcome=f1(trace.answer, references), rewards=tuple(rewards))

    def _earned(self, turn: Turn, scores: Mapping[int, float], references: Sequence[str]) -> tuple[str, float] | None:
        if turn.agent in self.stating:
            return "f1", f1(turn.fields.get(self.answer_field, ""), references)
        if turn.agent == self.searcher and turn.fields.get(self.choice_field, "") in ("", self.end):
            return "end", 0.0
        # By time: a searcher that passes a round over has more turns than there are answers.
        before = [score for index, score in scores.items() if index < turn.turn_index]
        after = [score for index, score in scores.items() if index > turn.turn_index]
        return ("progress", after[0] - before[-1]) if before and after else None
