"""What runs when a workflow runs: policy apps, agents, workflows, tools, worlds and their deployment.

The names below are all that the author of a workflow needs; everything else is imported from the module that defines it.

    from serve_apps import Agent, Outcome, Tags, Tool, Workflow

    class SolverVerifier(Workflow):
        solver = Agent(prompt="Solve: {question}", contract=Tags("ANSWER"))
        verifier = Agent(prompt="Is {answer} right? {question}", contract=Tags("VERDICT"))

        async def run(self, task, agents, tools):
            solution = await agents.solver(question=task.prompt)
            verdict = await agents.verifier(question=task.prompt, answer=solution["answer"])
            return Outcome(answer=str(solution["answer"]), metadata={"is_accepted": verdict["verdict"] == "yes"})
"""

from serve_apps.authoring.agent import Agent, Tool
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.environment import Environment
from serve_apps.authoring.workflow import Outcome, Workflow, together

__all__ = ["Agent", "Environment", "Outcome", "Tags", "Tool", "Workflow", "together"]
