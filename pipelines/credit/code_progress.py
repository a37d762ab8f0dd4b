"""code_progress: trace -> per turn, the change of the share of hidden tests that pass (UnityMAS-O, arXiv 2605.26646).

round t:  planner_t, coder_t   R_t - R_(t-1)      R_0 at t = 0
          reflector_t          R_(t+1) - R_t      the effect of its advice
plus `format_weight` * (0 or -1) each; R_t is the pass rate of round t
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from stores.types import ToolCall, Trace, Turn


class CodeProgress:
    """Rewards a turn only if the verdicts that it is measured by exist: an episode that ends early gives no more rewards."""

    kind: Literal["returns"] = "returns"

    def __init__(
        self,
        format_weight: float = 1.0,
        verify: str = "verify",
        workers: Sequence[str] = ("planner", "coder"),
        advisers: Sequence[str] = ("reflector",),
    ) -> None:
        """Args:
        format_weight: penalty of a turn with an invalid format.
        verify: the tool whose response holds `pass_rate`.
        workers: agents that act before the verdict of their round.
        advisers: agents that act after it, for the next one.
        """
        self.format_weight, self.verify = format_weight, verify
        self.workers, self.advisers = tuple(workers), tuple(advisers)

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit; the outcome is the last pass rate, or 0 if nothing was verified."""
        calls = sorted((c for c in trace.tool_calls if c.tool == self.verify), key=lambda call: call.call_index)
        rates = [call.response["pass_rate"] for call in calls if _is_verdict(call)]
        rewards = []
        for position, turn in enumerate(trace.turns):
            change = self._change(turn, trace, calls)
            if change is not None:
                parts = {"progress": change, "format": format_penalty(turn, self.format_weight)}
                rewards.append(turn_reward(trace, position, parts))
        return Credit(outcome=rates[-1] if rates else 0.0, rewards=tuple(rewards))

    def pays(self, agent: str) -> bool:
        """Says whether `agent` is measured by verdicts."""
        return agent in self.workers or agent in self.advisers

    def _change(self, turn: Turn, trace: Trace, calls: Sequence[ToolCall]) -> float | None:
        """Returns the change from the verdict before a turn to the one after it; None if one is missing or the turn has no reward."""
        own_next = min(
            (t.turn_index for t in trace.turns if t.agent == turn.agent and t.turn_index > turn.turn_index),
            default=None,
        )
        before = [call for call in calls if call.call_index < turn.turn_index]
        after = [
            call
            for call in calls
            if call.call_index > turn.turn_index and (own_next is None or call.call_index < own_next)
        ]
        old = _rate(before[-1]) if before else 0.0
        if turn.agent in self.workers:
            new = _rate(after[0]) if after else None
        elif turn.agent in self.advisers and before:
            new = _rate(after[0]) if after else old  # the last advice has no later verdict: it changed nothing
        else:
            return None
        return None if old is None or new is None else new - old


def _rate(call: ToolCall) -> float | None:
    return float(call.response["pass_rate"]) if _is_verdict(call) else None


def _is_verdict(call: ToolCall) -> bool:
    return not call.error and isinstance(call.response, dict) and "pass_rate" in call.response
