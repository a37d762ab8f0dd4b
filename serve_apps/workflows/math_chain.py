"""math_chain: solver -> verifier -> refiner -> finalizer, no loop (UnityMAS-O, arXiv 2605.26646)."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task

STATUSES = ("correct", "incorrect", "uncertain")


class MathChain(Workflow):
    """Runs four agents, each of which reads the earlier replies; the finalizer's answer is the team's."""

    solver = Agent(
        prompt=(
            "Solve the problem step by step. "
            "Reply with <SOLUTION>steps</SOLUTION><ANSWER>answer</ANSWER> only.\n"
            "Problem: {question}"
        ),
        contract=Tags("SOLUTION", "ANSWER"),
    )
    verifier = Agent(
        prompt=(
            "Check the solution. "
            "Reply with <STATUS>correct, incorrect or uncertain</STATUS><ERROR_TYPE>kind</ERROR_TYPE>"
            "<FEEDBACK>advice</FEEDBACK> only.\n"
            "Solution: {solution}\nAnswer: {answer}\nProblem: {question}"
        ),
        contract=Tags("STATUS", "ERROR_TYPE", "FEEDBACK", choices={"STATUS": STATUSES}),
    )
    refiner = Agent(
        prompt=(
            "Improve the solution with the feedback. "
            "Reply with <REFINED_SOLUTION>steps</REFINED_SOLUTION><ANSWER>answer</ANSWER> only.\n"
            "Solution: {solution}\nAnswer: {answer}\nStatus: {status}\nFeedback: {feedback}\nProblem: {question}"
        ),
        contract=Tags("REFINED_SOLUTION", "ANSWER"),
    )
    finalizer = Agent(
        prompt=(
            "Write the final answer. "
            "Reply with <FINAL_SOLUTION>steps</FINAL_SOLUTION><FINAL_ANSWER>answer</FINAL_ANSWER> only.\n"
            "Problem: {question}\nSolution: {solution}\nAnswer: {answer}"
        ),
        contract=Tags("FINAL_SOLUTION", "FINAL_ANSWER"),
    )

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the answer of the finalizer."""
        draft = await agents.solver(question=task.prompt)
        check = await agents.verifier(question=task.prompt, solution=draft["solution"], answer=draft["answer"])
        refined = await agents.refiner(
            question=task.prompt,
            solution=draft["solution"],
            answer=draft["answer"],
            status=check["status"],
            feedback=check["feedback"],
        )
        final = await agents.finalizer(
            question=task.prompt, solution=refined["refined_solution"], answer=refined["answer"]
        )
        return Outcome(answer=final["final_answer"])
