"""workflow: a searcher chooses words and a product, a buyer chooses the color and buys or goes back, and both see one shop."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.environment import Environment
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task


class Shopping(Workflow):
    """The buyer acts on the page of a product, the searcher on all others."""

    searcher = Agent(
        prompt="Wanted: {wanted}\nPage: {see}\nReply with <ACT>search[words] or click[product]</ACT> only.",
        contract=Tags("ACT"),
        max_tokens=24,
    )
    buyer = Agent(
        prompt="Wanted: {wanted}\nItem: {see}\nReply with <ACT>click[color], click[buy now] or click[back]</ACT> only.",
        contract=Tags("ACT"),
        max_tokens=24,
    )
    shop = Environment("pipelines.examples.shop.world:Shop", max_steps=8, example={"seed": 0})

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Buys what the task wants; the answer is the reward of the purchase, 0 to 1."""
        async with tools.shop(**task.metadata) as shop:
            while not shop.seen.is_done:
                acting = agents.buyer if shop.seen.info["page"] == "item" else agents.searcher
                reply = await acting(wanted=task.prompt, see=shop.seen.text)
                await shop.step(reply["act"])
            return Outcome(answer=f"{shop.total_reward:g}", stop_reason=shop.stop_reason)
