"""single_agent: one agent with a search tool, turn by turn (Search-R1, arXiv 2503.09516)."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent, TracedText
from serve_apps.authoring.contracts import OneOf
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.extensions.retrieval.retrieval import retriever_tool
from stores.settings import Count
from stores.types import Task


class SingleAgent(Workflow):
    """Runs one agent that searches as often as it likes, up to a bound, and answers."""

    agent = Agent(
        prompt=(
            "Search, or answer. Reply with <search>words</search> or <answer>answer</answer> only.\n"
            "Found: {found}\nQuestion: {question}"
        ),
        contract=OneOf("search", "answer"),
        cut=("found",),
    )

    def __init__(self, max_turns: Count = 4, top_k: Count = 3, retriever: dict[str, Any] | None = None) -> None:
        """Sets the workflow up.

        Args:
            max_turns: turns at most; one that searches in the last has no answer.
            top_k: documents per search.
            retriever: where documents come from, see `serve_apps/extensions/retrieval/retrieval.py`.
        """
        self.max_turns = max_turns
        self.tools = {"retrieve": retriever_tool(retriever or {}, top_k=top_k)}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the answer, or an empty one where the turns ran out."""
        found = ""
        for _ in range(self.max_turns):
            step = await agents.agent(question=task.prompt, found=found)
            if step["choice"] == "answer":
                return Outcome(answer=step["answer"], stop_reason="answered")
            if step["choice"] == "search":
                found = TracedText.joined(found, "\n" if found else "", await tools.retrieve(queries=[step["search"]]))
        return Outcome(answer="", stop_reason="last_turn", is_truncated=True)
