"""hierarchical_search: a router sends the question to the searcher or to the answerer, up to four rounds (Dr. MAS search,
arXiv 2602.08847)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_apps.authoring.agent import Agent, TracedText
from serve_apps.authoring.contracts import Tags, Thinking
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.extensions.retrieval.retrieval import retriever_tool
from stores.settings import Count
from stores.types import Task

ENOUGH, MORE = "yes", "no"


class HierarchicalSearch(Workflow):
    """Calls the answerer after the last round in any case: a router that never says yes does not lose the episode.

    A missing verdict is a fault of format and means no.
    """

    router = Agent(
        prompt=(
            "Is this enough to answer? Reply with <verify>yes or no</verify> only.\n"
            "Found: {found}\nQuestion: {question}"
        ),
        contract=Tags("verify", choices={"verify": (ENOUGH, MORE)}),
        cut=("found",),
    )
    searcher = Agent(
        prompt="Search for what is missing. Reply with <search>words</search> only.\nFound: {found}\nQuestion: {question}",
        contract=Tags("search"),
        cut=("found",),
    )
    answerer = Agent(
        prompt="Answer. Reply with <answer>answer</answer> only.\nFound: {found}\nQuestion: {question}",
        contract=Tags("answer"),
        cut=("found",),
    )

    def __init__(
        self, max_rounds: Count = 4, top_k: Count = 3, retriever: dict[str, Any] | None = None, think: bool = False
    ) -> None:
        """Sets the workflow up.

        Args:
            max_rounds: decisions of the router at most; the last of them is made for it.
            top_k: documents per search.
            retriever: where documents come from, see `serve_apps/extensions/retrieval/retrieval.py`.
            think: replies of searcher and answerer begin with one <think> block, as those of Dr. MAS do.
        """
        self.max_rounds = max_rounds
        if think:
            thinking = {name: self.agents[name] for name in ("searcher", "answerer")}
            changed = {name: replace(agent, contract=Thinking(agent.contract)) for name, agent in thinking.items()}
            self.agents = {**self.agents, **changed}
        self.tools = {"retrieve": retriever_tool(retriever or {}, top_k=top_k)}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the answerer's answer."""
        found, reason = "", "last_round"
        for _ in range(self.max_rounds - 1):
            route = await agents.router(question=task.prompt, found=found)
            if route["verify"] == ENOUGH:
                reason = "routed"
                break
            query = await agents.searcher(question=task.prompt, found=found)
            documents = await tools.retrieve(queries=[query["search"]])
            found = TracedText.joined(found, "\n" if found else "", query["search"], ": ", documents)
        final = await agents.answerer(question=task.prompt, found=found)
        return Outcome(answer=final["answer"], stop_reason=reason)
