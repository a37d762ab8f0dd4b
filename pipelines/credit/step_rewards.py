"""step_rewards: trace -> rewards of a world's steps, to the turn that acted and to the turn that had sent it.

a turn that acted              (1 - planner_share) * the reward of its step, or all of it where nobody had planned yet
a turn that did not, a plan    planner_share * what was earned until the next plan, by whichever agent
plus `format_weight` * (0 or -1) each

A planner is an agent none of whose turns acted. A step that no turn acted in pays the plan alone; apart from such steps the
rewards of an episode add up to its return.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipelines.credit.rule import Credit, CreditKind, failed_credit, format_penalty, turn_reward
from stores.settings import NotNegative, Share
from stores.traces.conventions import info_of
from stores.types import EpisodeStatus, ToolCall, Trace

OUTCOMES = ("success", "return")


def answered_calls(trace: Trace, environment: str) -> list[ToolCall] | None:
    """Returns the calls of an environment that it answered; None where the episode failed or was cut before there was one.

    Raises ValueError where no world of the environment was opened.
    """
    calls = [call for call in trace.tool_calls if call.tool == environment and call.response is not None]
    if not calls and trace.status is not EpisodeStatus.OK:
        return None
    if not calls:
        known = ", ".join(sorted({call.tool for call in trace.tool_calls})) or "none"
        raise ValueError(
            f"credit.settings.environment: episode {trace.episode_id} opened no world {environment!r}; its tools and "
            f"environments: {known}"
        )
    return calls


class StepRewards:
    """Pays what a world pays, step by step."""

    kind: CreditKind = "increments"

    def __init__(
        self,
        environment: str,
        planner_share: Share = 0.5,
        outcome: str = "success",
        success: str = "is_won",
        format_weight: NotNegative = 0.1,
    ) -> None:
        """Args:
        environment: what the workflow calls the environment.
        planner_share: 0 to 1, see above.
        outcome: `success`: 1 if `info` of the last step says `success`, else 0; `return`: the sum of all rewards, cut to [0, 1].
        success: name in `info`.
        format_weight: penalty of a turn with an invalid format.

        Raises ValueError for a setting that cannot be.
        """
        if not 0 <= planner_share <= 1:
            raise ValueError(f"credit.settings.planner_share: {planner_share} is not a number of 0 to 1")
        if outcome not in OUTCOMES:
            raise ValueError(f"credit.settings.outcome: {outcome!r} is not known: one of {', '.join(OUTCOMES)}")
        self.environment, self.planner_share, self.outcome = environment, planner_share, outcome
        self.success, self.format_weight = success, format_weight

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit of an episode. Raises ValueError where no world of the environment was opened."""
        events = answered_calls(trace, self.environment)
        if events is None:
            return failed_credit(self, trace)
        acted = acting_turns(trace, events)
        planners = {turn.agent for turn in trace.turns} - {agent for agent, _ in acted.values()}
        paid = dict.fromkeys((turn.turn_index for turn in trace.turns), 0.0)
        for event in events:
            reward = event.response["reward"]
            latest = [t.turn_index for t in trace.turns if t.agent in planners and t.turn_index < event.call_index]
            if event.call_index in acted:
                paid[acted[event.call_index][1]] += (1 - self.planner_share if latest else 1.0) * reward
            if latest:
                paid[max(latest)] += self.planner_share * reward
        rewards = [
            turn_reward(
                trace,
                position,
                {"steps": paid[turn.turn_index], "format": format_penalty(turn, self.format_weight)},
            )
            for position, turn in enumerate(trace.turns)
        ]
        return Credit(outcome=self._outcome(events), rewards=tuple(rewards))

    def _outcome(self, events: list[ToolCall]) -> float:
        if self.outcome == "return":
            return min(1.0, max(0.0, sum(event.response["reward"] for event in events)))
        return float(bool(info_of(events[-1]).get(self.success)))


def acting_turns(trace: Trace, events: list[ToolCall]) -> Mapping[int, tuple[str, int]]:
    """Returns by step of a world the agent and the index of the turn whose text was the action: the latest that it was read from.

    Who writes the settings with which a world begins does not act in it.
    """
    agents = {turn.turn_index: turn.agent for turn in trace.turns}
    acting = {}
    for event in events:
        if "step" not in event.request:
            continue
        turns = [parent for parent in event.parents if parent in agents]
        if turns:
            acting[event.call_index] = (agents[max(turns)], max(turns))
    return acting
