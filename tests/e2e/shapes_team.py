"""Agents that say anything, and a credit rule that pays for tokens of an even id: untrained models have something to learn."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pipelines.credit.rule import Credit, turn_reward
from serve_apps.authoring.agent import Agent
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Trace


class Talk(Workflow):
    """Three agents, one after the other."""

    one = Agent(prompt="Say something about {question}", max_tokens=12)
    two = Agent(prompt="Say something else about {question}", max_tokens=12)
    three = Agent(prompt="Say it again: {question}", max_tokens=12)

    async def run(self, task: Any, agents: Any, tools: Any) -> Outcome:
        """Asks each agent the task's question."""
        for agent in (agents.one, agents.two, agents.three):
            last = await agent(question=task.prompt)
        return Outcome(answer=last.text)


class EvenTokens:
    """Rewards a turn with the share of its tokens that have an even id."""

    kind: ClassVar[Literal["returns"]] = "returns"

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit; the outcome is the mean reward."""
        shares = [
            sum(token % 2 == 0 for token in turn.completion_token_ids) / max(1, len(turn.completion_token_ids))
            for turn in trace.turns
        ]
        rewards = tuple(turn_reward(trace, i, {"even": share}) for i, share in enumerate(shares))
        return Credit(outcome=sum(shares) / max(1, len(shares)), rewards=rewards)
