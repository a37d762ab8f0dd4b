"""one_group: a workflow and a tokenizer -> a team that acts, all of whose agents are in the model group `g`."""

from __future__ import annotations

from serve_apps.acting_team import ActingTeam
from serve_apps.tokenizer import ChatTokenizer
from serve_apps.workflow import Workflow
from stores.types import Sampling


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
