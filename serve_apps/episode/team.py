"""team: a workflow, its tokenizers and what answers model calls -> the team that acts in an episode, also from plain data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from serve_apps.authoring.agent import AuthorError
from serve_apps.authoring.parsers import Parsers
from serve_apps.authoring.workflow import Workflow, load_carried
from serve_apps.chat.tokenizer import ChatTokenizer, PromptSettings, load_tokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.openai_api.answer_reader import answer_format
from serve_apps.policy.client import PolicyClient
from stores.types import Completion, GenerateRequest, ModelVersionRef, Sampling, Task
from stores.weights.manifest import whole_model
from stores.weights.weight_cache import fetch


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
    chat_template_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Variables of the chat template in the prompts of the agents that it names."""

    def prompt_settings(self, agent: str) -> PromptSettings:
        """Returns how the template shows the prompts that are made of an agent's own."""
        return PromptSettings(variables=self.chat_template_kwargs.get(agent, {}))

    def parsers_of(self, model_group: str) -> Parsers:
        """Returns what reads the completions of a model group."""
        return self.parsers.get(model_group, Parsers())


def via(client: PolicyClient) -> Complete:
    """Returns a `Complete` that hands every model call to a policy client."""

    async def complete(call: AgentCall) -> Completion:
        return await client.generate(call.request)

    return complete


@dataclass(frozen=True, kw_only=True)
class TeamSpec:
    """Describes an `ActingTeam` in plain data, so that it crosses a process border."""

    workflow: str
    settings: dict[str, Any]
    group_of: dict[str, str]
    tokenizers: dict[str, str | ModelVersionRef]
    """The model version whose folder holds the tokenizer of a model group, fetched where the team acts;
    or a local folder."""
    max_model_len: dict[str, int]
    sampling: dict[str, Sampling]
    policy_versions: dict[str, int]
    team_key: str
    limits: EpisodeConfig
    parsers: dict[str, Parsers] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    """The user's own modules by path, of a registered team; empty: they are imported from where the team acts."""
    chat_template_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values only."""
        return asdict(self) | {"limits": self.limits.model_dump(mode="json")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TeamSpec:
        """Is the inverse of `to_dict`; raises pydantic's error or TypeError for anything else."""
        tokenizers = {
            g: ModelVersionRef(**at) if isinstance(at, Mapping) else at for g, at in data["tokenizers"].items()
        }
        sampling = {name: Sampling(**of) for name, of in data["sampling"].items()}
        limits = EpisodeConfig.model_validate(data["limits"])
        parsers = {group: Parsers(**of) for group, of in data.get("parsers", {}).items()}
        read = {"tokenizers": tokenizers, "sampling": sampling, "limits": limits, "parsers": parsers}
        return cls(**{**data, **read})

    def build(self) -> ActingTeam:
        """Loads the workflow and the tokenizers; ValueError where one of them does not load, or a parser does not fit its model."""
        folders = {
            group: source if isinstance(source, str) else str(fetch(whole_model(source), with_tensors=False))
            for group, source in self.tokenizers.items()
        }
        tokenizers = {group: load_tokenizer(folder) for group, folder in folders.items()}
        for group, parsers in self.parsers.items():
            answer_format(tokenizers[group], parsers)
        for agent, kwargs in self.chat_template_kwargs.items():
            check_template_kwargs(kwargs, tokenizers[self.group_of[agent]], agent=agent)
        return ActingTeam(
            workflow=load_carried(self.code, self.workflow, self.settings),
            workflow_path=self.workflow,
            group_of=self.group_of,
            tokenizers=tokenizers,
            max_model_len=self.max_model_len,
            sampling=self.sampling,
            policy_versions=self.policy_versions,
            team_key=self.team_key,
            parsers=self.parsers,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def check_template_kwargs(kwargs: Mapping[str, Any], tokenizer: ChatTokenizer, *, agent: str) -> None:
    """Raises ValueError for a variable that the model's chat template does not read: it would change nothing."""
    unknown = kwargs.keys() - tokenizer.known_variables(kwargs).keys()
    if unknown:
        raise ValueError(
            f"chat_template_kwargs of agent {agent!r}: the chat template of its model reads no variable {', '.join(sorted(unknown))}: "
            "correct the name, or take it out of `agents` and `model_groups`"
        )
