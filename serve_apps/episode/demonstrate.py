"""demonstrate: tasks and a demonstrator -> traces whose turns were written, not sampled.

The real workflow runs with the real tokenizer and recorder; only the completions come from a function
`(agent, task, inputs, rng) -> text`. The result has the form of any trace, so a warm start learns from
demonstrations and from chosen traces in the same way. A tool is called once for the same arguments: demonstrations repeat
themselves, and a sandbox takes 20 ms per test. A tool that remembers is refused: a world is an `Environment`, which every demonstration
plays. A few episodes play at a time, because a program and its framework run in processes of
their own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import wraps
from typing import Any

from serve_apps.authoring.agent import AuthorError
from serve_apps.authoring.workflow import Workflow
from serve_apps.config import EpisodeConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import ActingTeam, AgentCall, Complete
from serve_apps.episode_spec import EpisodeSpec
from stores.types import Completion, FinishReason, Purpose, Task, Trace

Demonstrator = Callable[[str, Task, Mapping[str, str], random.Random], str]
ToolAnswers = dict[tuple[str, str], Any]
"""Responses of tools, by the name of the tool and its arguments."""
EPISODES_AT_ONCE = 4
NUM_COMPARED = 3
"""Responses of a tool from earlier demonstrations that are compared with the tool's own."""


def demonstrate(
    tasks: Sequence[Task],
    *,
    team: ActingTeam,
    demonstrator: Demonstrator,
    count: int,
    run_id: str,
    seed: int,
    answers: ToolAnswers | None = None,
    limits: EpisodeConfig = EpisodeConfig(),
) -> list[Trace]:
    """Returns `count` traces over `tasks` in turn; the same seed gives the same traces.

    Args:
        answers: responses of tools from an earlier call; those of this call are added.
        limits: of each episode.

    Raises ValueError with the first error if a demonstration does not run to its end or is longer than its agent may write, and for a tool that remembers its calls.
    """

    try:
        acting = replace(team, workflow=_remembering(team.workflow, {} if answers is None else answers))
    except AuthorError as fault:
        raise ValueError(f"no demonstrations: {fault}") from None

    async def run_all() -> list[Trace]:
        slots = asyncio.Semaphore(EPISODES_AT_ONCE)

        async def play(index: int) -> Trace:
            spec = EpisodeSpec(
                run_id=run_id,
                iteration=0,
                purpose=Purpose.DEMONSTRATION,
                team_key=team.team_key,
                task=tasks[index % len(tasks)],
                episode_index=index // len(tasks),
                run_seed=seed,
            )
            async with slots:
                return await run_episode(spec, team=acting, complete=_written_by(demonstrator, team), limits=limits)

        return await asyncio.gather(*map(play, range(count)))

    traces = asyncio.run(run_all())
    failed = next((t for t in traces if t.error), None)
    if failed is not None:
        raise ValueError(f"a demonstration of task {failed.task.task_id!r} failed: {failed.error}")
    return traces


def _written_by(demonstrator: Demonstrator, team: ActingTeam) -> Complete:
    """Returns what answers the calls of agents; AuthorError for an answer that is longer than its agent may write."""

    async def complete(call: AgentCall) -> Completion:
        text = demonstrator(call.agent, call.task, call.inputs, random.Random(call.request.seed))
        token_ids = call.written(text, team.tokenizers[call.request.model_group])
        if len(token_ids) > (most := call.request.sampling.max_tokens):
            raise AuthorError(
                f"agent {call.agent!r} was to write {len(token_ids)} tokens and may write {most}: raise its max_tokens, or max_model_len "
                "where its prompt fills that, or demonstrate less"
            )
        return Completion(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )

    return complete


def _remembering(workflow: Workflow, answers: ToolAnswers) -> Workflow:
    """Returns a copy of `workflow` whose tools look into `answers` before they are called.

    The first responses that are taken from there are compared with those of the tool, which may remember without saying so.
    """
    left = dict.fromkeys(workflow.tools, NUM_COMPARED)

    def remembering(name: str, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @wraps(function)
        async def ask(*args: Any, **kwargs: Any) -> Any:
            key = (name, repr((args, sorted(kwargs.items()))))
            if key not in answers:
                answers[key] = await function(*args, **kwargs)
            elif left[name]:
                left[name] -= 1
                if await function(*args, **kwargs) != answers[key]:
                    raise _remembers(name)
            return deepcopy(answers[key])

        return ask

    for name, tool in workflow.tools.items():
        if tool.is_stateful:
            raise _remembers(name)
    same = copy(workflow)
    same.tools = {name: replace(t, function=remembering(name, t.function)) for name, t in workflow.tools.items()}
    return same


def _remembers(name: str) -> AuthorError:
    return AuthorError(
        f"tool {name!r} answers the same arguments differently: demonstrations call it once for the same arguments; where it "
        "remembers its calls, declare an Environment instead"
    )
