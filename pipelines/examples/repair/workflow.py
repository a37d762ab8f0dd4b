"""workflow: a locator names a file and a function, a coder changes a line of it, and a verifier reads the tests and submits or sends it back.

To look for the file first, for the function in it and then for the line is the way of Agentless (arXiv 2407.01489).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipelines.tasks.repository_rows import REPAIRED
from serve_apps.authoring.agent import Agent, TracedText
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.environment import Environment
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task

SUBMIT, AGAIN = "submit", "again"


class Repair(Workflow):
    """At most `rounds` changes, of one line each."""

    locator = Agent(
        prompt="Issue: {issue}\n{files}\nTests: {test_report}\nReply with <FILE>path</FILE><FUNCTION>name</FUNCTION> only.",
        contract=Tags("FILE", "FUNCTION"),
        max_tokens=32,
    )
    coder = Agent(
        prompt="Issue: {issue}\n{lines}\nReply with <LINE>number</LINE><NEW>code</NEW> only.",
        contract=Tags("LINE", "NEW"),
        max_tokens=40,
        cut=("lines",),
    )
    verifier = Agent(
        prompt="Issue: {issue}\nTests: {test_report}\nReply with <VERDICT>submit or again</VERDICT> only.",
        contract=Tags("VERDICT", choices={"VERDICT": (SUBMIT, AGAIN)}),
        max_tokens=16,
    )
    repo = Environment(
        "pipelines.examples.repair.world:Repair", max_steps=16, workers=2, memory_mib=2048, example={"seed": 0}
    )

    def __init__(self, rounds: int = 2) -> None:
        """Raises ValueError for less than one round."""
        if rounds < 1:
            raise ValueError(f"rounds = {rounds}: at least one change is needed")
        self.rounds = rounds
        self.environments = {"repo": replace(self.repo, max_steps=3 * rounds + 1)}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Repairs the repository that the task's metadata describes; the answer is `repaired` where its hidden tests say so."""
        async with tools.repo(**task.metadata) as repo:
            files, test_report = repo.seen.text, "not run"
            for _ in range(self.rounds):
                place = await agents.locator(issue=task.prompt, files=files, test_report=test_report)
                lines = (await repo.step(TracedText.joined("read ", place["file"], " ", place["function"]))).text
                change = await agents.coder(issue=task.prompt, lines=lines)
                await repo.step(TracedText.joined("edit ", place["file"], " ", change["line"], "\n", change["new"]))
                test_report = (await repo.step("test")).text
                if (await agents.verifier(issue=task.prompt, test_report=test_report))["verdict"] == SUBMIT:
                    break
            graded = await repo.step("submit")
        return Outcome(answer=REPAIRED if graded.info["is_resolved"] else "", stop_reason=repo.stop_reason)
