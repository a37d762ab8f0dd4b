"""one_group: a workflow, and what answers its model calls -> an episode of a team all of whose agents are in the model group `g`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from serve_apps.authoring.workflow import Workflow
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.scripted import ByteTokenizer
from serve_apps.episode.team import ActingTeam, AgentCall, Complete
from serve_apps.episode_spec import EpisodeSpec, Script
from stores.types import Completion, FinishReason, Purpose, Sampling, Task, Trace

BYTES = ByteTokenizer()
TASK = Task(task_id="t", prompt="3 * 4", answers=("12",))
ONCE = EpisodeConfig(max_attempts=1)


def team_in_one_group(
    workflow: Workflow, tokenizer: ChatTokenizer, *, max_model_len: int, max_tokens: int, version: int = 0, **more: Any
) -> ActingTeam:
    """Args: max_tokens: of each completion. version: the policy version that should answer. more: other fields of the team."""
    return ActingTeam(
        workflow=workflow,
        workflow_path="tests:flow",
        group_of=dict.fromkeys(workflow.agents, "g"),
        tokenizers={"g": tokenizer},
        max_model_len={"g": max_model_len},
        sampling=dict.fromkeys(workflow.agents, Sampling(max_tokens=max_tokens)),
        policy_versions={"g": version},
        team_key="team",
        **more,
    )


def saying(
    says: Callable[[AgentCall], str],
    tokenizer: ChatTokenizer = BYTES,
    *,
    version: Callable[[AgentCall], int] = lambda call: 3,
    **more: Any,
) -> Complete:
    """Answers calls by texts. Args: more: fields of every completion."""

    async def complete(call: AgentCall) -> Completion:
        ids = call.written(says(call), tokenizer)
        fields = {"logprobs": [-0.5] * len(ids), "finish_reason": FinishReason.STOP, "policy_version": version(call)}
        return Completion(token_ids=ids, **(fields | more))

    return complete


async def start(
    workflow: Workflow,
    complete: Complete,
    *,
    task: Task = TASK,
    tokenizer: ChatTokenizer = BYTES,
    limits: EpisodeConfig = ONCE,
    max_model_len: int = 4096,
    max_tokens: int = 64,
    index: int = 0,
    script: Script | None = None,
    **of_team: Any,
) -> Trace:
    """Runs an episode of a team whose policy version is 3. Args: script: what is played again."""
    about = {"max_model_len": max_model_len, "max_tokens": max_tokens, "version": 3, **of_team}
    team = team_in_one_group(workflow, tokenizer, **about)
    spec = EpisodeSpec(
        run_id="r",
        iteration=1,
        purpose=Purpose.TRAIN,
        team_key="team",
        task=task,
        episode_index=index,
        run_seed=0,
        script=script,
    )
    return await run_episode(spec, team=team, complete=complete, limits=limits)


def play(workflow: Workflow, complete: Complete, **settings: Any) -> Trace:
    """Runs it in a loop of its own. Args: settings: those of `start`."""
    return asyncio.run(start(workflow, complete, **settings))
