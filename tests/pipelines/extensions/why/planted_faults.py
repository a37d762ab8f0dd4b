"""planted_faults: episodes of three shipped workflows that failed because of one known turn, and a way to play them again.

    python -m tests.pipelines.extensions.why.planted_faults [NUMBER]       finds the decisive turn of so many; prints what share was right

The agents are written: each does what is right, but now and then not (SLIP). In a planted episode everybody does what is right, and one
turn does not. The real runner plays and replays them, without an engine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipelines.extensions.why.decisive_turn import DecisiveTurn, find_decisive_turn
from serve_apps.authoring.workflow import load_workflow
from serve_apps.episode.scripted import play_saying
from serve_apps.episode.team import AgentCall
from serve_apps.episode_spec import Script
from stores.types import EpisodeStatus, Task, Trace

SLIP = 0.12
"""How often an agent does what is wrong, in replays."""
BUDGET = 64
RIGHT, WRONG = "55", "13"
TASK = Task(task_id="t", prompt="7+6*8", answers=(RIGHT,))
Says = Callable[[str, Mapping[str, str], bool], str]
"""(agent, inputs, whether it slips) -> a completion."""


def chain(agent: str, inputs: Mapping[str, str], slips: bool) -> str:
    """The solver works it out, the others pass it on."""
    answer = WRONG if slips else inputs.get("answer", RIGHT)
    return {
        "solver": f"<SOLUTION>x</SOLUTION><ANSWER>{answer}</ANSWER>",
        "verifier": "<STATUS>correct</STATUS><ERROR_TYPE>none</ERROR_TYPE><FEEDBACK>keep it</FEEDBACK>",
        "refiner": f"<REFINED_SOLUTION>x</REFINED_SOLUTION><ANSWER>{answer}</ANSWER>",
        "finalizer": f"<FINAL_SOLUTION>x</FINAL_SOLUTION><FINAL_ANSWER>{answer}</FINAL_ANSWER>",
    }[agent]


def loop(agent: str, inputs: Mapping[str, str], slips: bool) -> str:
    """The first answer is wrong, the verifier says so, the second is right."""
    if agent == "solver":
        return rf"\boxed{{{RIGHT if inputs['critique'] and not slips else WRONG}}}"
    verdict = "approve" if slips or inputs["answer"] == RIGHT else "reject"
    return f"<CRITIQUE>look again</CRITIQUE><VERDICT>{verdict}</VERDICT>"


def orchestrated(agent: str, inputs: Mapping[str, str], slips: bool) -> str:
    """A draft is wrong until it is refined; the orchestrator should not stop before that."""
    if agent == "orchestrator":
        offered = [line.split()[1] for line in inputs["options"].splitlines()]
        ahead = [
            step for step in ("solve", "check", "refine", "stop") if step in offered and step not in inputs["done"]
        ]
        return "stop" if slips and "stop" in offered else ahead[0]
    if agent == "solver":
        return f"<SOLUTION>x</SOLUTION><ANSWER>{WRONG}</ANSWER>"
    if agent == "verifier":
        return "<STATUS>incorrect</STATUS><ERROR_TYPE>reasoning</ERROR_TYPE><FEEDBACK>multiply first</FEEDBACK>"
    return f"<REFINED_SOLUTION>x</REFINED_SOLUTION><ANSWER>{WRONG if slips else RIGHT}</ANSWER>"


STEPS = {
    "solve": {"agent": "solver", "max_calls": 1},
    "check": {"agent": "verifier", "needs": ["answer"], "max_calls": 1},
    "refine": {"agent": "refiner", "needs": ["feedback"], "max_calls": 1},
}
CHAIN = "serve_apps.workflows.math_chain:MathChain"
WORKFLOWS: Mapping[str, tuple[str, Mapping[str, object], Says]] = {
    "math_chain": (CHAIN, {}, chain),
    "solver_verifier": (
        "serve_apps.extensions.paper_workflows.solver_verifier:SolverVerifier",
        {"max_rounds": 2},
        loop,
    ),
    "orchestrated": (
        "serve_apps.extensions.orchestration.orchestrated:Orchestrated",
        {"team": {"path": CHAIN}, "steps": STEPS},
        orchestrated,
    ),
}


@dataclass(frozen=True)
class Planted:
    """A failed episode whose turn `fault` is the one that failed it."""

    workflow: str
    trace: Trace
    fault: int

    def replays(self, wanted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """Plays the episode again; agents slip as often as they do."""
        agents = {turn.turn_index: turn.agent for turn in self.trace.turns}

        def again(index: int, sibling: int) -> float:
            dice = random.Random(f"{self.trace.seed}/{self.fault}/{index}/{sibling}")
            script = Script(
                kind="counterfactual", agent=agents[index], base=self.trace, changed_at=index, sibling=sibling
            )
            return outcome_of(play(self.workflow, lambda _: dice.random() < SLIP, script=script))

        return {(index, sibling): again(index, sibling) for index, sibling in wanted}


def plant(workflow: str, number: int) -> Planted:
    """Returns the n-th planted episode of a workflow: the fault comes at one after another of the turns where it fails the episode."""
    sound = play(workflow, lambda _: False)
    assert outcome_of(sound) == 1.0, sound.error
    faulty = [play(workflow, lambda turn, at=at: turn == at) for at in range(len(sound.turns))]
    fatal = [(at, trace) for at, trace in enumerate(faulty) if outcome_of(trace) == 0.0]
    at, trace = fatal[number % len(fatal)]
    return Planted(workflow, replace(trace, seed=number), trace.turns[at].turn_index)


def play(workflow: str, slips: Callable[[int], bool], *, script: Script | None = None) -> Trace:
    """Plays an episode; `slips` is asked at each turn that is not replayed, with its number among those."""
    path, settings, says = WORKFLOWS[workflow]
    numbers = iter(range(1000))

    def say(call: AgentCall) -> str:
        return says(call.agent, call.inputs, slips(next(numbers)))

    return play_saying(load_workflow(path, settings), TASK, say, script=script)


def outcome_of(trace: Trace) -> float:
    """Whether the answer is right."""
    assert trace.status is EpisodeStatus.OK, trace.error
    return float(trace.answer == RIGHT)


def decisive_turn_of(planted: Planted, *, budget: int = BUDGET) -> DecisiveTurn:
    """Finds the decisive turn of a planted episode."""
    turns = [turn.turn_index for turn in planted.trace.turns]
    return find_decisive_turn(turns, 0.0, planted.replays, budget=budget)


def true_cost(planted: Planted, turn_index: int, *, number: int = 1000) -> float:
    """What a turn cost, from many replays."""
    turns = [turn.turn_index for turn in planted.trace.turns]
    place = turns.index(turn_index)
    outcomes = planted.replays([(turn_index, 10_000 + i) for i in range(number)])
    before = sum(outcomes.values()) / number
    if place + 1 == len(turns):
        return before
    later = planted.replays([(turns[place + 1], 10_000 + i) for i in range(number)])
    return before - sum(later.values()) / number


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for workflow in WORKFLOWS:
        episodes = [plant(workflow, i) for i in range(number)]
        found = [decisive_turn_of(episode) for episode in episodes]
        right = [of.turn_index == episode.fault for of, episode in zip(found, episodes, strict=True)]
        costs = {fault: true_cost(episode, fault) for fault, episode in {e.fault: e for e in episodes}.items()}
        pairs = [(of, costs[of.turn_index]) for of in found if of.turn_index in costs]
        covered = [of.ci95[0] <= cost <= of.ci95[1] for of, cost in pairs]
        used = sum(of.num_replays for of in found) / number
        print(
            f"{workflow}: right {sum(right) / number:.3f} of {number}, interval covers the true cost in {sum(covered) / len(covered):.3f}, "
            f"certain {sum(of.is_certain for of in found) / number:.3f}, {used:.0f} replays each"
        )


if __name__ == "__main__":
    main()
