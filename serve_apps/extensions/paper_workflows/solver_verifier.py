"""solver_verifier: the solver answers, the verifier approves or rejects, until approved (Dr. MAS math, arXiv 2602.08847)."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Boxed, Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.settings import Count
from stores.types import Task

APPROVED, REJECTED = "approve", "reject"


class SolverVerifier(Workflow):
    """Runs two agents. The verifier's reply to an answer goes back to the solver; the last answer is not verified.

    A missing verdict is a fault of format and counts as a rejection.
    """

    solver = Agent(
        prompt=(
            "Solve the problem step by step. Put the answer into \\boxed{{}}.\n"
            "Earlier answer: {answer}\nWhat the verifier said of it: {critique}\nProblem: {question}"
        ),
        contract=Boxed(),
        cut=("critique", "answer"),
    )
    verifier = Agent(
        prompt=(
            "Is the answer right? Reply with <CRITIQUE>what is wrong</CRITIQUE><VERDICT>approve or reject</VERDICT> only.\n"
            "Solution: {solution}\nAnswer: {answer}\nProblem: {question}"
        ),
        contract=Tags("CRITIQUE", "VERDICT", choices={"VERDICT": (APPROVED, REJECTED)}),
        cut=("solution",),
    )

    def __init__(self, max_rounds: Count = 2) -> None:
        """Sets the workflow up. Args: max_rounds: answers at most; 1 is a solver alone."""
        self.max_rounds = max_rounds

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the last answer of the solver."""
        answer, critique = "", ""
        for left in reversed(range(self.max_rounds)):
            draft = await agents.solver(question=task.prompt, answer=answer, critique=critique)
            answer = draft["answer"]
            if not left:
                break
            check = await agents.verifier(question=task.prompt, solution=draft.text, answer=answer)
            if check["verdict"] == APPROVED:
                return Outcome(answer=answer, stop_reason="approved")
            critique = check["critique"] or REJECTED
        return Outcome(answer=answer, stop_reason="last_round")
