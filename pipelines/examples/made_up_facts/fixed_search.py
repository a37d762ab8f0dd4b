"""fixed_search: a searcher is called a fixed number of times, then the answerer: what an orchestrated search is compared with."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import TracedText
from serve_apps.authoring.workflow import Outcome
from serve_apps.extensions.paper_workflows.hierarchical_search import HierarchicalSearch
from stores.types import Task


class FixedSearch(HierarchicalSearch):
    """Searches as often for an easy question as for a hard one. Its agents are the searcher and the answerer of `hierarchical_search`."""

    def __init__(self, num_searches: int = 3, **settings: Any) -> None:
        """Sets the workflow up. Args: settings: of `hierarchical_search`."""
        super().__init__(**settings)
        self.num_searches = num_searches
        self.agents = {name: agent for name, agent in self.agents.items() if name != "router"}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the answerer's answer."""
        found = ""
        for _ in range(self.num_searches):
            query = await agents.searcher(question=task.prompt, found=found)
            documents = await tools.retrieve(queries=[query["search"]])
            found = TracedText.joined(found, "\n" if found else "", documents)
        final = await agents.answerer(question=task.prompt, found=found)
        return Outcome(answer=final["answer"])
