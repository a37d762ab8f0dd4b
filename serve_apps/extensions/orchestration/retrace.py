"""retrace: an episode of a fixed workflow -> the same calls under an orchestrator, whose choices are the order in which they were made.

    stored     solver  verifier  refiner  finalizer
    played     solve   check     refine   finish     stop      the orchestrator's choices; every reply is the recorded one

What the orchestrator is asked, and what it may choose then, is what it will be asked in training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from serve_apps.authoring.agent import AuthorError, ToolError
from serve_apps.authoring.workflow import Workflow
from serve_apps.config import EpisodeConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import ActingTeam, AgentCall
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.extensions.orchestration.steps import ORCHESTRATOR, STOP, Steps, StepSpec
from serve_apps.own_loop import result_of
from stores.types import Completion, FinishReason, Purpose, ToolCall, Trace, Turn

_Callee = tuple[type[Turn] | type[ToolCall], str]
"""An agent or a tool, by its name."""


class NotRetraced(AuthorError):
    """Raised where an orchestrator's steps cannot make the next call of an episode."""


def retrace(trace: Trace, *, team: ActingTeam, steps: Steps, run_id: str, seed: int) -> Trace:
    """Returns the episode as the orchestrator of `team` would have played it, as a demonstration.

    Calls of agents and tools that no step makes are left out. Every other reply and response is the recorded one.

    Args:
        trace: an episode of the agents of `team` that came to an end. It must have been tokenized as the team's model groups do.
        team: of an orchestrator, whose options are these steps.

    Raises NotRetraced where the steps cannot make the calls in their order, or where the answer at the end is another one.
    """
    calls = _RecordedCalls(trace, steps)
    spec = EpisodeSpec(
        run_id=run_id,
        iteration=0,
        purpose=Purpose.DEMONSTRATION,
        team_key=team.team_key,
        task=trace.task,
        episode_index=trace.episode_index,
        run_seed=seed,
    )
    acting = replace(team, workflow=_answered(team.workflow, calls))
    played = result_of(run_episode(spec, team=acting, complete=calls.complete, limits=EpisodeConfig(max_attempts=1)))
    if played.error:
        raise NotRetraced(f"episode {trace.episode_id}: {played.error}")
    if calls.left:
        raise NotRetraced(f"episode {trace.episode_id}: it ended before the call of {calls.left[0]}")
    if played.answer != trace.answer:
        raise NotRetraced(
            f"episode {trace.episode_id}: the answer on the board is {played.answer[:40]!r}, the episode's {trace.answer[:40]!r}"
        )
    return played


class _RecordedCalls:
    """Answers the calls of an orchestrated episode by those of a stored one."""

    def __init__(self, trace: Trace, steps: Steps) -> None:
        self._steps = steps
        calls: list[Turn | ToolCall] = [*trace.turns, *trace.tool_calls]
        made = sorted(calls, key=_index)
        called = {callee for step in self._steps.values() for callee in self._callees(step)}
        self._ahead = [call for call in made if _callee(call) in called]
        self._side_by_side: Counter[_Callee] = Counter()

    @property
    def left(self) -> list[str]:
        """The agents and tools of the calls that were not made yet, in order."""
        return [name for _, name in map(_callee, self._ahead)]

    async def complete(self, call: AgentCall) -> Completion:
        """Returns the next recorded turn of an agent; of the orchestrator, the option that makes the next calls."""
        if call.agent == ORCHESTRATOR:
            ids: Sequence[int] = [call.options[self._choose(list(call.options))]]
            reason = FinishReason.STOP
        else:
            turn = self._take((Turn, call.agent))
            ids, reason = turn.completion_token_ids, turn.finish_reason
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=reason, policy_version=0)

    def respond(self, tool: str) -> Any:
        """Returns the response of the next recorded call of a tool; ToolError where it failed."""
        call: ToolCall = self._take((ToolCall, tool))
        if call.error:  # as it was: the workflow reads the tool's fallback, or sees the error
            raise ToolError(call.error)
        return call.response

    def _choose(self, offered: Sequence[str]) -> str:
        if not self._ahead and STOP in offered:
            return STOP
        fitting = [name for name in offered if name in self._steps and self._comes_next(self._steps[name])]
        if not fitting:
            following = f"the next call is of {self.left[0]}" if self._ahead else "no call is left"
            raise NotRetraced(f"{following}, and the orchestrator may choose {', '.join(offered)}")
        chosen = max(fitting, key=lambda name: len(self._callees(self._steps[name])))
        self._side_by_side = Counter(self._callees(self._steps[chosen]))
        return chosen

    def _comes_next(self, step: StepSpec) -> bool:
        """Whether the next calls are those of the step; of steps side by side in any order."""
        callees = self._callees(step)
        ahead = [_callee(call) for call in self._ahead[: len(callees)]]
        return not step.message and (Counter(ahead) == Counter(callees) if step.together else ahead == callees)

    def _callees(self, step: StepSpec) -> list[_Callee]:
        parts = [self._steps[name] for name in step.together] or [step]
        pairs: list[_Callee] = [pair for part in parts for pair in ((Turn, part.agent), (ToolCall, part.tool))]
        return [pair for pair in pairs if pair[1]]

    def _take(self, callee: _Callee) -> Any:
        """Returns the next call, which must be of this agent or tool; of the step that was chosen, its calls in any order."""
        candidates = self._ahead if self._side_by_side[callee] else self._ahead[:1]
        recorded = next((call for call in candidates if _callee(call) == callee), None)
        if recorded is None:
            following = f"the next call is of {self.left[0]}" if self._ahead else "no call is left"
            raise NotRetraced(f"{following}, and the orchestrator's only step calls {callee[1]}")
        self._side_by_side[callee] -= 1
        self._ahead.remove(recorded)
        return recorded


def _index(call: Turn | ToolCall) -> int:
    return call.turn_index if isinstance(call, Turn) else call.call_index


def _callee(call: Turn | ToolCall) -> _Callee:
    return (Turn, call.agent) if isinstance(call, Turn) else (ToolCall, call.tool)


def _answered(workflow: Workflow, calls: _RecordedCalls) -> Workflow:
    """Returns a copy of the workflow whose tools give recorded responses."""

    def answering(name: str) -> Any:
        async def respond(**arguments: Any) -> Any:
            return calls.respond(name)

        return respond

    same = copy(workflow)
    same.tools = {name: replace(tool, function=answering(name)) for name, tool in workflow.tools.items()}
    return same
