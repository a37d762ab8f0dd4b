"""acting_team: everything that acts in an episode: a workflow, its tokenizers, and what answers the agents' model calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from serve_apps.policy.client import PolicyClient
from serve_apps.tokenizer import ChatTokenizer
from serve_apps.workflow import Workflow
from stores.types import Completion, GenerateRequest, Sampling, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """A model call with what it was built from."""

    agent: str
    inputs: Mapping[str, str]
    task: Task
    request: GenerateRequest


Complete = Callable[[AgentCall], Awaitable[Completion]]


@dataclass(frozen=True, kw_only=True)
class ActingTeam:
    """Everything that acts in an episode, as the runner needs it."""

    workflow: Workflow
    workflow_path: str
    group_of: Mapping[str, str]
    """Model group of every agent."""
    tokenizers: Mapping[str, ChatTokenizer]
    """By model group."""
    max_model_len: Mapping[str, int]
    """By model group: prompt and completion together, tokens."""
    sampling: Mapping[str, Sampling]
    """By agent."""
    policy_versions: Mapping[str, int]
    team_key: str


def via(client: PolicyClient) -> Complete:
    """Model calls answered by a policy client."""

    async def complete(call: AgentCall) -> Completion:
        return await client.generate(call.request)

    return complete
