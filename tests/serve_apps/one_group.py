"""one_group: a workflow and a tokenizer -> a team that acts, all of whose agents are in the model group `g`, and episodes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from serve_apps.authoring.workflow import Workflow
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import ActingTeam, AgentCall
from serve_apps.episode_spec import EpisodeSpec, Script
from stores.types import Completion, FinishReason, Purpose, Sampling, Task, Trace


def team_in_one_group(
    workflow: Workflow, tokenizer: ChatTokenizer, *, max_model_len: int, max_tokens: int, version: int = 0
) -> ActingTeam:
    """Args: max_tokens: of each completion. version: the policy version that should answer."""
    return ActingTeam(
        workflow=workflow,
        workflow_path="tests:flow",
        group_of=dict.fromkeys(workflow.agents, "g"),
        tokenizers={"g": tokenizer},
        max_model_len={"g": max_model_len},
        sampling=dict.fromkeys(workflow.agents, Sampling(max_tokens=max_tokens)),
        policy_versions={"g": version},
        team_key="team",
    )


def play(
    folder: Path,
    workflow: Workflow,
    task: Task,
    says: Callable[[AgentCall], str],
    *,
    limits: EpisodeConfig,
    max_model_len: int,
    max_tokens: int,
    script: Script | None = None,
    allowed_logprobs: Sequence[float] = (),
) -> Trace:
    """Runs an episode in which `says` answers for every agent. Args: folder: a model with a tokenizer. script: what is played again."""
    tokenizer = ChatTokenizer(folder)

    async def complete(call: AgentCall) -> Completion:
        ids = call.written(says(call), tokenizer)
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason=FinishReason.STOP,
            policy_version=3,
            allowed_logprobs=allowed_logprobs,
        )

    spec = EpisodeSpec(
        run_id="r",
        iteration=1,
        purpose=Purpose.TRAIN,
        team_key="team",
        task=task,
        episode_index=0,
        run_seed=0,
        script=script,
    )
    team = team_in_one_group(workflow, tokenizer, max_model_len=max_model_len, max_tokens=max_tokens, version=3)
    return asyncio.run(run_episode(spec, team=team, complete=complete, limits=limits))
