"""code_progress: trace -> per turn, the change of the share of hidden tests that pass (UnityMAS-O, arXiv 2605.26646).

round t:  planner_t, coder_t   R_t - R_(t-1)      R_0 at t = 0
          reflector_t          R_(t+1) - R_t      the effect of its advice
plus `format_weight` * (0 or -1) each; R_t is the pass rate of round t
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from stores.settings import AgentName, NotNegative
from stores.types import ToolCall, Trace, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    index: int
    """Of its call."""
    rate: float | None
    """The pass rate; None where the verdict is lost."""


class CodeProgress:
    """Rewards a turn only if the verdicts that it is measured by exist: an episode that ends early gives no more rewards."""

    kind: Literal["returns"] = "returns"

    def __init__(
        self,
        format_weight: NotNegative = 1.0,
        verify: str = "verify",
        workers: Sequence[AgentName] = ("planner", "coder"),
        advisers: Sequence[AgentName] = ("reflector",),
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
        verdicts = self._verdicts(trace)
        rates = [verdict.rate for verdict in verdicts if verdict.rate is not None]
        return self._credit(trace, verdicts, rates[-1] if rates else 0.0)

    def assign_failed(self, trace: Trace) -> Credit:
        """Returns the credit of an episode whose failure the policy caused: as if none of the tests had passed after its last turn.

        So the turns whose round it ends lose what had passed before, as they do by code that is wrong.
        """
        end = max((turn.turn_index for turn in trace.turns), default=0)
        before = [verdict for verdict in self._verdicts(trace) if verdict.index < end]
        return self._credit(trace, [*before, _Verdict(index=end + 1, rate=0.0)], 0.0)

    def _credit(self, trace: Trace, verdicts: Sequence[_Verdict], outcome: float) -> Credit:
        rewards = []
        for position, turn in enumerate(trace.turns):
            change = self._change(turn, trace, verdicts)
            if change is not None:
                parts = {"progress": change, "format": format_penalty(turn, self.format_weight)}
                rewards.append(turn_reward(trace, position, parts))
        return Credit(outcome=outcome, rewards=tuple(rewards))

    def pays(self, agent: str) -> bool:
        """Says whether `agent` is measured by verdicts."""
        return agent in self.workers or agent in self.advisers

    def _verdicts(self, trace: Trace) -> list[_Verdict]:
        """Returns them in time order."""
        calls = sorted((c for c in trace.tool_calls if c.tool == self.verify), key=lambda call: call.call_index)
        return [_Verdict(index=call.call_index, rate=_rate(call)) for call in calls]

    def _change(self, turn: Turn, trace: Trace, verdicts: Sequence[_Verdict]) -> float | None:
        """Returns the change from the verdict before a turn to the one after it; None if one is missing or the turn has no reward."""
        own_next = min(
            (t.turn_index for t in trace.turns if t.agent == turn.agent and t.turn_index > turn.turn_index),
            default=None,
        )
        before = [v.rate for v in verdicts if v.index < turn.turn_index]
        after = [v.rate for v in verdicts if v.index > turn.turn_index and (own_next is None or v.index < own_next)]
        old = before[-1] if before else 0.0
        if turn.agent in self.workers:
            new = after[0] if after else None
        elif turn.agent in self.advisers and before:
            new = after[0] if after else old  # the last advice has no later verdict: it changed nothing
        else:
            return None
        return None if old is None or new is None else new - old


def _rate(call: ToolCall) -> float | None:
    return float(call.response["pass_rate"]) if _is_verdict(call) else None


def _is_verdict(call: ToolCall) -> bool:
    return not call.error and isinstance(call.response, dict) and "pass_rate" in call.response
