"""Teams that try to be promoted without being better. Their episodes come from the real runner; the models are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from one_group import team_in_one_group

from pipelines.config.run_config import load_config
from pipelines.credit.math_final_answer import MathFinalAnswer
from pipelines.evaluation.gate import Verdict, decide_promotion, worst_case
from pipelines.evaluation.played import Played
from pipelines.evaluation.statistics import Interval, paired_interval
from pipelines.evaluation.teams import Models
from pipelines.figures.registry import FIGURES
from pipelines.stages.evaluate import _examine, _look_until_sure
from serve_apps.authoring.agent import Agent, Tool, ToolFault
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.config import EpisodeConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.scripted import ByteTokenizer
from serve_apps.episode.team import AgentCall
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.workflows.program import Program
from stores.journal.stage_results import Evaluated
from stores.types import (
    SOUND,
    Cause,
    Completion,
    EpisodeStatus,
    FinishReason,
    ModelVersionRef,
    Purpose,
    Task,
    Trace,
)

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
TASK = Task(task_id="t", prompt="3 * 4", answers=("12",))
NUM_TASKS = 400


async def _double(number: int) -> str:
    if number == 99:
        raise ToolFault("a service that this number brings down")
    return str(2 * number)


class Pair(Workflow):
    """Writes, doubles with a typed tool, and asks again as long as the answer says so."""

    writer = Agent(prompt="Compute {question}", contract=Tags("ANSWER"))
    double = Tool(_double)

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        answer = (await agents.writer(question=task.prompt))["answer"]
        while answer == "wait":
            answer = (await agents.writer(question=task.prompt))["answer"]
        if answer.startswith("I cannot"):
            return Outcome(answer=answer)
        _ = {"12": 1, "11": 2, "eleven": 3, "99": 4}[answer]
        await tools.double(number=answer)
        return Outcome(answer=answer)


def tagged(answer: str) -> str:
    return f"<ANSWER>{answer}</ANSWER>"


def play(workflow: Workflow, text: str, *, max_model_len: int = 512) -> Trace:
    async def complete(call: AgentCall) -> Completion:
        await asyncio.sleep(0.001)
        ids = ByteTokenizer().encode_completion(text)[: call.request.sampling.max_tokens]
        finish = FinishReason.STOP if ids[-1] == ByteTokenizer().eos_id else FinishReason.LENGTH
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=finish, policy_version=0)

    team = team_in_one_group(workflow, ByteTokenizer(), max_model_len=max_model_len, max_tokens=64)
    spec = EpisodeSpec(
        run_id="r", iteration=1, purpose=Purpose.GATE, team_key="team", task=TASK, episode_index=0, run_seed=0
    )
    limits = EpisodeConfig(turn_timeout_s=5, episode_timeout_s=5 if isinstance(workflow, Program) else 0.1)
    return asyncio.run(run_episode(spec, team=team, complete=complete, limits=limits))


def copies(kinds: Sequence[Trace]) -> list[Trace]:
    """An episode per task, each like one that was played."""
    return [
        replace(trace, episode_id=f"e{i}", task=replace(TASK, task_id=f"t{i}", source="ab"[i % 2]))
        for i, trace in enumerate(kinds)
    ]


def played(traces: Sequence[Trace], models: Models = MappingProxyType({})) -> Played:
    run: Any = SimpleNamespace(
        traces=SimpleNamespace(read_traces=lambda ref: traces), credit=MathFinalAnswer(), credit_version="v"
    )
    sampled: Any = SimpleNamespace(traces=None, sampling_seconds=0.0, num_tokens=0)
    return Played(run, sampled, models)


def verdict(
    champion: Sequence[Trace], candidate: Sequence[Trace], **changes: Any
) -> tuple[Verdict, Interval, Interval]:
    """The gate's verdict without floors and guards, the gain as it stands, and the one that decides."""
    guards = dict.fromkeys(("format_share", "refusal_share", "completion_tokens", "turns", "tool_calls"))
    alone = {"promote.min_ok_share": 0.0, "promote.guards": guards, "evaluate.bootstrap_samples": 500}
    config = load_config(SMALL, alone | changes)
    run: Any = SimpleNamespace(config=config, credit=MathFinalAnswer(), credit_version="v", seed=0, figures=FIGURES)
    tasks = [trace.task for trace in champion]
    evidence = _examine(
        run,
        tasks,
        played(champion),
        played(candidate),
        planned=None,
        family_of={},
        sources=sorted({task.source for task in tasks}),
        num_looks=1,
        num_contenders=1,
        margin_spent=0.0,
    )
    assert evidence.gain is not None and evidence.deciding_gain is not None
    return decide_promotion(config.promote, evidence), evidence.gain, evidence.deciding_gain


def exits() -> Trace:
    program = Program({"writer": {}}, function=f"{__name__}:call_and_exit")
    return play(program, tagged("11"))


def call_and_exit(prompt: str, client: Any) -> str:
    client.chat.completions.create(model="writer", messages=[{"role": "user", "content": prompt}])
    raise SystemExit("cannot read this")


ESCAPES: dict[str, Callable[[], Trace]] = {
    "a malformed call": lambda: play(Pair(), tagged("eleven")),
    "a crash of the workflow": lambda: play(Pair(), tagged("no such key")),
    "turns without end": lambda: play(Pair(), tagged("wait")),
    "a refusal": lambda: play(Pair(), tagged("I cannot say")),
    "length": lambda: play(Pair(), "so " * 200),
    "a tool that it breaks": lambda: play(Pair(), tagged("99")),
    "only easy tasks": lambda: play(Pair(), ""),
    "a prompt that fills the context": lambda: play(Pair(), tagged("12"), max_model_len=8),
}


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("escape", [*ESCAPES, pytest.param("a program that exits", marks=pytest.mark.nightly)])
def test_an_equal_team_that_escapes_from_what_it_would_lose_is_not_promoted(escape: str, share: float) -> None:
    right, wrong = play(Pair(), tagged("12")), play(Pair(), tagged("11"))
    escaped = ESCAPES[escape]() if escape in ESCAPES else exits()
    drawn = np.random.default_rng(0)
    champion = [right if solved else wrong for solved in drawn.random(NUM_TASKS) < 0.5]
    candidate = [right if solved else wrong for solved in drawn.random(NUM_TASKS) < 0.5]
    fleeing = [escaped if t is wrong and drawn.random() < share else t for t in candidate]
    decided, _, honest = verdict(copies(champion), copies(candidate))
    assert decided.verdict != "promote"
    decided, _, bound = verdict(copies(champion), copies(fleeing))
    assert decided.verdict != "promote" and bound.low <= honest.low + 1e-9, decided.condition


def test_what_is_missing_is_shown_beside_the_gain_of_what_there_is() -> None:
    right, wrong = play(Pair(), tagged("12")), play(Pair(), tagged("11"))
    broken = play(Pair(), tagged("99"))
    assert (broken.cause, broken.is_outcome) == (Cause.INFRASTRUCTURE, False)
    champion = copies([wrong, right] * 200)
    decided, gain, bound = verdict(champion, copies([broken if i % 8 == 0 else right for i in range(400)]))
    assert gain.num_tasks == 350 and bound.num_tasks == 400 and gain.mean > bound.mean
    assert decided.verdict == "promote", "it is better in the worst case, too"
    assert (
        "with the missing episodes against the candidate (50 of its own lost, 0 of the champion's won)"
        in decided.condition
    )
    turns = [copies([broken if i % 2 == rest else right for i in range(400)]) for rest in (0, 1)]
    decided, gain, bound = verdict(*turns)
    assert decided.verdict == "reject" and gain == bound and bound.mean == -0.5, "no task has both"


def test_a_candidate_that_is_missing_where_a_source_is_lost_does_not_hide_it() -> None:
    right, broken = play(Pair(), tagged("12")), play(Pair(), tagged("99"))
    champion, candidate = copies([right] * 400), copies([broken if i % 2 else right for i in range(400)])
    decided, _, _ = verdict(champion, candidate, **{"promote.max_source_loss": 0.1})
    assert decided.verdict == "reject" and "source 'b' loses" in decided.condition


FAILURES = st.sampled_from([s for s in EpisodeStatus if s not in SOUND])
CAUSES = st.sampled_from([c for c in Cause if c])
Tasks = list[tuple[bool, bool, bool]]
"""Of each task: whether the champion solves it, whether the candidate does, and whether it flees where it does not."""


def sides(tasks: Tasks, status: EpisodeStatus, cause: Cause) -> tuple[list[Trace], list[Trace], list[Trace]]:
    """The champion, the candidate, and the candidate that flees."""
    right, wrong = ENDS
    champion = copies([right if old else wrong for old, _, _ in tasks])
    candidate = copies([right if new else wrong for _, new, _ in tasks])
    moved = [
        replace(trace, status=status, cause=cause, answer="", turns=()) if is_moved and not new else trace
        for trace, (_, new, is_moved) in zip(candidate, tasks, strict=True)
    ]
    return champion, candidate, moved


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=20, max_size=60),
    FAILURES,
    CAUSES,
)
def test_moving_lost_episodes_to_any_failure_never_raises_the_lower_bound(
    tasks: Tasks, status: EpisodeStatus, cause: Cause
) -> None:
    champion, candidate, moved = sides(tasks, status, cause)
    for changes in ({}, {"evaluate.test": "mcnemar"}):
        before, _, honest = verdict(champion, candidate, **changes)
        after, _, bound = verdict(champion, moved, **changes)
        assert bound.low <= honest.low + 1e-9
        assert before.verdict == "promote" or after.verdict != "promote"


def decided_in_looks(champion: Sequence[Trace], candidate: Sequence[Trace]) -> tuple[Evaluated, list[float]]:
    """The decision after looks at a third of the tasks each, and the lower bound that each look that was had rested on."""
    guards = dict.fromkeys(("format_share", "refusal_share", "completion_tokens", "turns", "tool_calls"))
    changes = {"promote.min_ok_share": 0.0, "promote.guards": guards, "evaluate.bootstrap_samples": 100}
    config = load_config(SMALL, changes | {"evaluate.tasks_per_look": len(champion) // 3})
    run: Any = SimpleNamespace(config=config, credit=MathFinalAnswer(), credit_version="v", seed=0, figures=FIGURES)
    team, parent = (
        {"team": ModelVersionRef(model_group="team", version=v, uri="", manifest_sha256="")} for v in (2, 1)
    )
    sizes: list[int] = []

    def play_tasks(models: Models, tasks: list[Task]) -> Played:
        sizes.append(len(tasks))
        traces = (candidate if models["team"].version == 2 else champion)[: len(tasks)]
        return played(traces, models)

    tasks = [trace.task for trace in champion]
    run.tasks = lambda section: tasks
    evaluated = _look_until_sure(run, team, parent, tasks, play_tasks)
    examine = partial(
        _examine, run, planned=len(tasks), family_of={}, sources=(), num_looks=3, num_contenders=1, margin_spent=0.0
    )
    found = [examine(tasks[:size], played(champion[:size]), played(candidate[:size])) for size in sizes[::2]]
    return evaluated, [evidence.deciding_gain.low for evidence in found if evidence.deciding_gain]


BEATEN = [(False, True, False)] * 60 + [(True, True, False)] * 30
FLEEING = [(i % 2 == 0, i % 2 == 1, True) for i in range(90)]
"""As good as the champion, and none of what it loses is there: it gains on every task that is left."""


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=60, max_size=60),
    FAILURES,
    CAUSES,
)
@example(BEATEN, EpisodeStatus.INFRA_ERROR, Cause.INFRASTRUCTURE)
@example(FLEEING, EpisodeStatus.INFRA_ERROR, Cause.INFRASTRUCTURE)
@example(FLEEING, EpisodeStatus.AGENT_ERROR, Cause.AUTHOR)
def test_moving_lost_episodes_to_any_failure_raises_the_lower_bound_at_no_look(
    tasks: Tasks, status: EpisodeStatus, cause: Cause
) -> None:
    champion, candidate, moved = sides(tasks, status, cause)
    before, honest = decided_in_looks(champion, candidate)
    after, bounds = decided_in_looks(champion, moved)
    assert all(bound <= low + 1e-9 for bound, low in zip(bounds, honest, strict=False))
    # What is missing rejects nobody, so that a candidate that was rejected may be looked at again instead.
    is_rejected_sooner = before.verdict == "reject" and before.num_looks < after.num_looks
    assert before.verdict == "promote" or after.verdict != "promote" or is_rejected_sooner
    if tasks is BEATEN:
        assert before.verdict == after.verdict == "promote", "the rule can promote"


ENDS = (play(Pair(), tagged("12")), play(Pair(), tagged("11")))


def test_the_worst_case_fills_up_every_task_and_takes_outcomes_beyond_0_and_1_as_they_are() -> None:
    new, old = worst_case(
        {"a": [1.0], "b": [0.0, 1.0]}, {"b": [2.0, 0.5], "c": [0.0]}, tasks=["a", "b", "c", "a"], episodes_per_task=2
    )
    assert new == {"a": [1.0, 0.0], "b": [0.0, 1.0], "c": [0.0, 0.0]}
    assert old == {"a": [2.0, 2.0], "b": [2.0, 0.5], "c": [0.0, 2.0]}
    assert paired_interval(new, old).mean == pytest.approx((-1.5 - 0.75 - 1.0) / 3)
    new, _ = worst_case({"a": []}, {}, tasks=["a"], episodes_per_task=1, lost=-1.0)
    assert new == {"a": [-1.0]}
