"""acting_team: a workflow, its tokenizers and what answers its agents' model calls -> the team that acts in an episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from serve_apps.authoring.agent import AuthorError
from serve_apps.authoring.parsers import Parsers
from serve_apps.authoring.workflow import Workflow
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.policy.client import PolicyClient
from stores.types import Completion, GenerateRequest, Sampling, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """A model call, with the inputs and the task that its prompt was built from."""

    agent: str
    inputs: Mapping[str, str]
    task: Task
    request: GenerateRequest
    options: Mapping[str, int] = field(default_factory=dict)
    """Where the completion is a choice, the token of each option that is offered; empty otherwise."""

    def written(self, text: str, tokenizer: ChatTokenizer) -> list[int]:
        """Returns the tokens of a completion that was written, not sampled: for a choice an option's name, else any text.

        Raises AuthorError for a choice that is not offered.
        """
        if not self.options:
            return tokenizer.encode_completion(text)
        if text not in self.options:
            raise AuthorError(
                f"agent {self.agent!r} was to choose {text[:40]!r}: offered are {', '.join(self.options)}; a choice is written as the "
                "option's name alone"
            )
        return [self.options[text]]


Complete = Callable[[AgentCall], Awaitable[Completion]]


@dataclass(frozen=True, kw_only=True)
class ActingTeam:
    """Holds everything that acts in an episode, as the runner needs it."""

    workflow: Workflow
    workflow_path: str
    group_of: Mapping[str, str]
    """The model group of every agent."""
    tokenizers: Mapping[str, ChatTokenizer]
    """The tokenizer of every model group."""
    max_model_len: Mapping[str, int]
    """The context of every model group in tokens, prompt and completion together."""
    sampling: Mapping[str, Sampling]
    """The sampling settings of every agent."""
    policy_versions: Mapping[str, int]
    team_key: str
    parsers: Mapping[str, Parsers] = field(default_factory=dict)
    """What reads the completions of the model groups that it names; of the others their model folder says it."""

    def parsers_of(self, model_group: str) -> Parsers:
        """Returns what reads the completions of a model group."""
        return self.parsers.get(model_group, Parsers())


def via(client: PolicyClient) -> Complete:
    """Returns a `Complete` that hands every model call to a policy client."""

    async def complete(call: AgentCall) -> Completion:
        return await client.generate(call.request)

    return complete
