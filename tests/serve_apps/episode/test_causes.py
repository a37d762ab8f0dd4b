"""Who caused a failure: what a model wrote, the infrastructure, or the author of the workflow. Scripted, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from one_group import TASK, play, saying
from pair import Pair

from pipelines.credit.math_final_answer import MathFinalAnswer
from pipelines.credit.rule import score_trace
from serve_apps.authoring.agent import Agent, AuthorError, Tool, ToolError, ToolFault
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.config import EpisodeConfig
from serve_apps.episode.causes import CallTimeout, cause_of_delay, cause_of_error
from serve_apps.episode.replay import ReplayError
from serve_apps.episode.scripted import play_scripted
from serve_apps.episode.team import AgentCall, Complete
from serve_apps.episode_clock import current_clock
from serve_apps.policy.client import PolicyCallError
from serve_apps.program.conversations import CONVERSATIONS
from serve_apps.program.episode import PostedOutcome, ProgramEpisode
from stores.types import Cause, Completion, Task, Trace

pytestmark = pytest.mark.fast

QUICK = EpisodeConfig(turn_timeout_s=5, episode_timeout_s=0.2, max_attempts=1)


async def _double(number: int) -> str:
    if number == 13:
        raise ToolError("13 brings bad luck")
    if number == 14:
        raise ToolFault("the service behind it is down")
    return str(2 * number)


class Runs(Workflow):
    """Asks once where it is told so, then does what it is made with."""

    writer = Agent(prompt="Compute {question}")

    def __init__(self, then: Callable[[Any], Any], *, asks: bool = True, **tools: Tool) -> None:
        self.then, self.asks, self.tools = then, asks, tools

    async def run(self, task: Task, agents: Any, tools: Any) -> Any:
        if self.asks:
            await agents.writer(question=task.prompt)
        return await self.then(SimpleNamespace(agents=agents, tools=tools))


def raises(error: BaseException) -> Callable[[Any], Any]:
    async def then(_: Any) -> Any:
        raise error

    return then


def said(answer: str) -> Trace:
    tagged = f"<ANSWER>{answer}</ANSWER>"
    return play_scripted(Pair(Tool(_double)), TASK, {"writer": [tagged], "reader": [tagged]})


@pytest.mark.parametrize(
    ("answer", "status", "stop_reason", "cause", "outcome"),
    [
        ("12", "ok", "finished", "", 1.0),
        ("11", "ok", "finished", "", 0.0),
        ("eleven", "tool_error", "tool_refused", "policy", 0.0),
        ("13", "tool_error", "tool_refused", "policy", 0.0),
        ("14", "tool_error", "tool_failed", "infrastructure", None),
    ],
)
def test_a_malformed_call_is_a_lost_outcome_and_a_fault_of_the_tool_is_none(
    answer: str, status: str, stop_reason: str, cause: str, outcome: float | None
) -> None:
    trace = said(answer)
    assert (trace.status, trace.stop_reason, trace.cause, trace.is_outcome) == (
        status,
        stop_reason,
        cause,
        outcome is not None,
    )
    if outcome is not None:
        scored = score_trace(MathFinalAnswer(), trace, version="v")
        assert scored.outcome == outcome and len(scored.rewards) == len(trace.turns)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    ("error", "after_a_turn"),
    [
        (KeyError("x"), "policy"),
        (SystemExit(3), "policy"),
        (AuthorError("wrong in any case"), "author"),
        (ReplayError("another call"), "author"),
        (ToolFault("a service is down"), "infrastructure"),
        (PolicyCallError("no replica"), "infrastructure"),
        (ExceptionGroup("of tasks", [ValueError("x"), PolicyCallError("no replica")]), "infrastructure"),
        (ExceptionGroup("of tasks", [ValueError("x")]), "policy"),
        (TimeoutError("one of the workflow's own"), "policy"),
        (asyncio.CancelledError(), "policy"),
    ],
)
def test_what_a_workflow_raises_counts_as_the_policys_once_a_turn_was_answered(
    error: BaseException, after_a_turn: str, asks: bool
) -> None:
    trace = play_scripted(Runs(raises(error), asks=asks), TASK, {"writer": ["hm"]})
    assert trace.cause == ("author" if after_a_turn == "policy" and not asks else after_a_turn)
    assert len(trace.turns) == asks and trace.error


def test_an_error_raised_in_the_handling_of_the_engines_is_theirs() -> None:
    try:
        try:
            raise PolicyCallError("no replica")
        except PolicyCallError as error:
            raise ValueError("no draft") from error
    except ValueError as error:
        assert cause_of_error(error, num_turns=3) is Cause.INFRASTRUCTURE


def test_a_workflow_that_returns_nonsense_after_a_turn_is_the_policys_until_the_group_shows_otherwise() -> None:
    async def nothing(_: Any) -> None:
        return None

    assert play_scripted(Runs(nothing), TASK, {"writer": ["hm"]}).cause is Cause.POLICY
    assert play_scripted(Runs(nothing, asks=False), TASK, {}).cause is Cause.AUTHOR


async def _raises(text: str) -> str:
    raise KeyError(text)


async def _hangs(text: str) -> str:
    await asyncio.sleep(30)
    return text


@pytest.mark.parametrize(
    ("tool", "stop_reason", "cause"),
    [
        (Tool(_raises), "tool_raised", "policy"),
        (Tool(_hangs, timeout_s=0.01), "tool_failed", "infrastructure"),
        (Tool(_hangs, timeout_s=0.01, timeout_cause=Cause.POLICY), "tool_refused", "policy"),
    ],
)
def test_a_tool_that_raises_or_is_late_is_the_policys_where_its_text_can_make_it_so(
    tool: Tool, stop_reason: str, cause: str
) -> None:
    async def use(at: Any) -> Outcome:
        return Outcome(answer=await at.tools.use(text="x"))

    trace = play_scripted(Runs(use, use=tool), TASK, {"writer": ["hm"]})
    assert (trace.status, trace.stop_reason, trace.cause) == ("tool_error", stop_reason, cause)


def answers(*, seconds: float = 0.0, num_attempts: int = 1) -> Complete:
    said = saying(lambda call: "hm", num_attempts=num_attempts)

    async def complete(call: AgentCall) -> Completion:
        await asyncio.sleep(seconds)
        return await said(call)

    return complete


async def go_on(at: Any) -> Outcome:
    for _ in range(20):
        await at.agents.writer(question="and now?")
    raise TimeoutError("no end in sight")


async def wait(at: Any) -> Outcome:
    await at.agents.writer(question="and now?")
    return Outcome(answer="")


async def sleep(at: Any) -> Outcome:
    await asyncio.sleep(30)
    return Outcome(answer="")


async def hang(at: Any) -> Outcome:
    return Outcome(answer=await at.tools.hang(text="x"))


@pytest.mark.parametrize(
    ("workflow", "complete", "limits", "cause"),
    [
        (Runs(go_on), answers(), {}, "policy"),  # turn after turn
        (Runs(go_on), answers(seconds=0.002, num_attempts=9), {}, "infrastructure"),  # most attempts failed
        (Runs(wait), answers(seconds=30), {"turn_timeout_s": 0.05}, "infrastructure"),  # a call past its own limit
        (Runs(wait), answers(seconds=30), {}, "infrastructure"),  # the only call was never answered
        (Runs(sleep), answers(), {}, "policy"),  # what it read may have made it sleep
        (Runs(sleep, asks=False), answers(), {}, "author"),
        (Runs(hang, hang=Tool(_hangs)), answers(), {}, "infrastructure"),
        (Runs(hang, hang=Tool(_hangs, timeout_cause=Cause.POLICY)), answers(), {}, "policy"),
    ],
)
def test_a_deadline_is_the_infrastructures_only_where_most_of_the_time_was_spent_waiting_for_it(
    workflow: Workflow, complete: Complete, limits: dict[str, float], cause: str
) -> None:
    trace = play(workflow, complete, limits=QUICK.model_copy(update=limits))
    assert (trace.status, trace.cause) == ("timeout", cause), trace.error


@pytest.mark.parametrize(
    ("waited_s", "num_turns", "cause"), [(5.1, 9, "infrastructure"), (5.0, 9, "policy"), (0.0, 0, "author")]
)
def test_half_of_the_time_decides(waited_s: float, num_turns: int, cause: str) -> None:
    assert cause_of_delay(seconds=10, waited_s=waited_s, num_turns=num_turns) == cause


def queued(seconds: float, complete: Complete) -> Complete:
    """`complete` after a wait for an engine, as `ServeClient` has its calls wait."""

    async def wait_first(call: AgentCall) -> Completion:
        clock, waiting = current_clock(), object()
        assert clock is not None
        clock.starts_waiting(waiting)
        await asyncio.sleep(seconds)
        clock.has_begun(waiting)
        return await complete(call)

    return wait_first


def test_a_place_in_a_queue_uses_up_neither_the_turns_time_nor_the_episodes() -> None:
    limits = EpisodeConfig(turn_timeout_s=0.05, episode_timeout_s=0.1, max_attempts=1)
    trace = play(Runs(wait), queued(0.12, answers()), limits=limits)
    assert (trace.status, trace.cause) == ("ok", Cause.NONE) and trace.duration_s > 0.2


def test_a_policy_that_uses_up_its_time_is_not_excused_by_a_queue_before() -> None:
    trace = play(Runs(go_on), queued(0.15, answers(seconds=0.15)), limits=QUICK)
    assert (trace.status, trace.cause) == ("timeout", "policy")


def test_what_the_infrastructure_caused_is_repeated_and_what_the_policy_caused_is_not() -> None:
    seen: list[str] = []

    async def complete(call: AgentCall) -> Completion:
        seen.append(call.agent)
        raise CallTimeout("late") if len(seen) == 1 else KeyError("x")

    trace = play(Runs(sleep), complete, limits=EpisodeConfig(max_attempts=5))
    assert (len(seen), trace.attempt, trace.cause) == (2, 2, "author"), "no turn was answered"


def scored(score: Any) -> Callable[[Any], Any]:
    """A workflow's end with this score in the outcome's metadata, as every program's score arrives, too."""

    async def end(_: Any) -> Outcome:
        return Outcome(answer="12", metadata={"score": score})

    return end


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -3, 7, "much", 10**400])
def test_a_score_that_is_none_is_an_authors_error(score: Any) -> None:
    trace = play_scripted(Runs(scored(score)), TASK, {"writer": ["hm"]})
    assert (trace.status, trace.cause, trace.outcome_metadata) == ("agent_error", "author", {})
    assert "score is " in trace.error and ": a score is a number of 0 to 1" in trace.error


@pytest.mark.parametrize(("score", "kept"), [(0, 0.0), (1, 1.0), (True, 1.0), ("0.5", 0.5), (None, None)])
def test_a_score_of_0_to_1_is_kept(score: Any, kept: float | None) -> None:
    trace = play_scripted(Runs(scored(score)), TASK, {"writer": ["hm"]})
    assert (trace.status, trace.outcome_metadata) == ("ok", {"score": kept})


def test_a_posted_score_goes_before_the_returned_one_and_leaves_other_metadata() -> None:
    recorder: Any = SimpleNamespace(team=SimpleNamespace(group_of={}))
    episode = ProgramEpisode(recorder=recorder, id="e")
    episode.outcome = PostedOutcome(score=0.25, metadata={"from": "grader"})
    outcome = episode.outcome_of({"answer": "55", "score": 1, "metadata": {"lines": 3}}, error="late")
    assert (outcome.answer, outcome.error) == ("55", "late")
    assert {**outcome.metadata} == {"score": 0.25, "from": "grader", "lines": 3, **{CONVERSATIONS: episode.growth}}


def test_a_sound_episode_keeps_the_error_that_its_workflow_notes() -> None:
    async def noted(_: Any) -> Outcome:
        return Outcome(answer="12", error="exit code 1")

    trace = play_scripted(Runs(noted), TASK, {"writer": ["hm"]})
    assert (trace.status, trace.cause, trace.error) == ("ok", "", "exit code 1")
