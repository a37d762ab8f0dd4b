"""run_sections: all sections of a run config, and what follows from them for a model group, an agent or an iteration.

The rules that join sections are functions of `RunSections` in `rules`; `run_config.RunConfig` applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from pipelines.config.messages import explain
from pipelines.config.schedule import ClusterConfig, ScheduleConfig
from pipelines.config.sections import (
    AgentConfig,
    CollectConfig,
    CostConfig,
    DottedConfig,
    EvaluateConfig,
    LoopConfig,
    ModelGroupConfig,
    PromoteConfig,
    ScoreConfig,
    SwapConfig,
    SyncConfig,
    TasksConfig,
    TrafficConfig,
)
from serve_apps.config import GatewayConfig, ServeConfig
from stores.config import MaintainConfig, StorageConfig
from stores.settings import IDENTITY_IF_CHANGED, NOT_IDENTITY, Settings
from train_loops.config import TEAM, TinyModelConfig, TrainConfig, WarmstartConfig

T = TypeVar("T", bound=BaseModel)


class RunSections(Settings):
    """This class holds the sections of one training of a team, each valid by itself."""

    run: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The name of the run, under which everything that belongs to it is stored."""
    seed: int = Field(0, ge=0, lt=2**32)
    """The seed of everything that is drawn at random in the run: tasks, sampling, minibatches."""
    iterations: int = Field(10, ge=1, json_schema_extra=NOT_IDENTITY)
    """The number of iterations. Raise it to continue a run that has ended."""
    workflow: DottedConfig
    """The workflow: a class that lets agents work on a task, with its settings."""
    credit: DottedConfig
    """The credit rule: a class that turns an episode into an outcome and rewards of its turns, with its settings."""
    cost: CostConfig | None = Field(None, json_schema_extra=IDENTITY_IF_CHANGED)
    """What an episode may cost on average; null: costs are not counted."""
    model_groups: dict[str, ModelGroupConfig] = Field(min_length=1)
    """The model groups by their names; the agents of one group share their weights."""
    swap: SwapConfig | None = Field(None, json_schema_extra=IDENTITY_IF_CHANGED)
    """The two model groups that exchange their agents from time to time; null: none do."""
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """The sampling settings of single agents, by their names."""
    tasks: TasksConfig
    """The sets of tasks: for training, for the gate, for the report."""
    storage: StorageConfig = Field(StorageConfig(), json_schema_extra=NOT_IDENTITY)
    """Where episodes, weights, journal and metrics are stored."""
    serve: ServeConfig = ServeConfig()
    """How the engines run that serve the model groups; `model_groups.<name>.serve` changes it for one of them."""
    pool: Literal["separate", "shared"] = Field("separate", json_schema_extra=NOT_IDENTITY)
    """Whether engines and trainers have GPUs of their own, or share them. `shared`: the engines sleep while stage train has
    the GPUs, with their weights in the host's memory, and model groups train one after another."""
    warmstart: WarmstartConfig | None = None
    """The supervised training before the first iteration; null: none."""
    loop: LoopConfig = Field(LoopConfig(), json_schema_extra=IDENTITY_IF_CHANGED)
    """Whether the next iteration is sampled while this one is trained."""
    collect: CollectConfig = CollectConfig()
    """How episodes are sampled (stage collect)."""
    score: ScoreConfig = Field(ScoreConfig(), json_schema_extra=NOT_IDENTITY)
    """How episodes are scored (stage score)."""
    train: TrainConfig = TrainConfig()
    """How the model groups learn (stage train); `model_groups.<name>.train` changes it for one of them."""
    sync: SyncConfig = SyncConfig()
    """How new weights reach the engines (stage sync)."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """How the candidate is compared with the champion (stage evaluate)."""
    promote: PromoteConfig = PromoteConfig()
    """How the gate decides and what a promotion does (stage promote)."""
    schedule: ScheduleConfig | None = Field(None, json_schema_extra=NOT_IDENTITY)
    """When Airflow runs the next iteration; null: the run has no DAG."""
    cluster: ClusterConfig = Field(ClusterConfig(), json_schema_extra=NOT_IDENTITY)
    """The Ray cluster that stages are sent to as jobs."""
    maintain: MaintainConfig = Field(MaintainConfig(), json_schema_extra=NOT_IDENTITY)
    """What `troupe maintain` keeps, and for how long."""
    gateway: GatewayConfig = Field(GatewayConfig(), json_schema_extra=NOT_IDENTITY)
    """How the HTTP gateway listens, whom it lets in and how much it takes on."""
    traffic: TrafficConfig = Field(TrafficConfig(), json_schema_extra=NOT_IDENTITY)
    """How a canary advances through shares of the traffic, and what sends it back."""

    def section_of(self, name: str, model: type[T]) -> T | None:
        """Returns the section that an extension adds; None where the config has none, or the extension is not there."""
        section = getattr(self, name, None)
        assert section is None or isinstance(section, model), f"{name} is a {model.__name__}"
        return section

    @property
    def group_of(self) -> dict[str, str]:
        """Returns the model group of every agent."""
        return {agent: group for group, settings in self.model_groups.items() for agent in settings.agents}

    @property
    def bases(self) -> dict[str, list[str]]:
        """Returns the model groups of every base that adapters share."""
        members: dict[str, list[str]] = {}
        for group, settings in self.model_groups.items():
            if settings.base:
                members.setdefault(settings.base, []).append(group)
        return members

    @property
    def canary_timeout_s(self) -> float:
        """Returns the seconds that a canary may take on its way through `traffic.shares`."""
        return (len(self.traffic.shares) + bool(self.traffic.shadow_share)) * self.traffic.step_timeout_s

    def weights_name(self, model_group: str) -> str:
        """Returns the name under which the whole weights of the group's policy are stored: its base's or its own."""
        return self.model_groups[model_group].base or model_group

    def groups_at(self, iteration: int) -> dict[str, str]:
        """Returns the model group of every agent in the episodes that `iteration` trains on: see `swap`."""
        if self.swap is None or not self.swap.is_swapped(iteration):
            return self.group_of
        a, b = self.swap.groups
        return {agent: {a: b, b: a}.get(group, group) for agent, group in self.group_of.items()}

    def agents_of(self, model_group: str) -> tuple[str, ...]:
        """Returns the agents that a model group acts for, in any iteration."""
        swapped = self.swap.groups if self.swap is not None else ()
        groups = swapped if model_group in swapped else (model_group,)
        return tuple(agent for group in groups for agent in self.model_groups[group].agents)

    def train_config(self, model_group: str) -> TrainConfig:
        """Returns the `train` section with this model group's overrides."""
        return _override(self.train, self.model_groups[model_group].train, f"model_groups.{model_group}.train")

    @property
    def team_config(self) -> TrainConfig | None:
        """Returns the train settings of a run whose whole team learns (they agree in what concerns it); None for any
        other run."""
        return next((c for c in map(self.train_config, self.model_groups) if c.is_whole_team), None)

    @property
    def train_tasks(self) -> tuple[str, ...]:
        """Returns what stage train is called with in each iteration: every model group, or `team` for all of them
        together."""
        return tuple(self.model_groups) if self.team_config is None else (TEAM,)

    def serve_config(self, model_group: str) -> ServeConfig:
        """Returns the `serve` section with this model group's overrides."""
        return _override(self.serve, self.model_groups[model_group].serve, f"model_groups.{model_group}.serve")

    def tiny_model(self, model_group: str) -> TinyModelConfig | None:
        """Returns `warmstart.tiny_model` with this model group's overrides; None where version 0 is a given model."""
        changes, place = self.model_groups[model_group].tiny_model, f"model_groups.{model_group}.tiny_model"
        if self.warmstart is None or self.warmstart.tiny_model is None:
            if changes:
                raise ValueError(f"{place}: there is no warmstart.tiny_model that it could change")
            return None
        return _override(self.warmstart.tiny_model, changes, place)

    def agent_changes(self, name: str) -> dict[str, Any]:
        """Returns what the `agents` section changes of the sampling of the workflow's agent: setting -> value, None where it changes
        nothing."""
        return self.agents[name].model_dump(exclude={"chat_template_kwargs"}) if name in self.agents else {}

    def template_kwargs(self, group_of: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Returns the variables of the chat template by agent, where it has any. Args: group_of: the model group of every agent."""
        own = {name: agent.chat_template_kwargs for name, agent in self.agents.items()}
        of_agent = {
            agent: self.model_groups[group].chat_template_kwargs | own.get(agent, {})
            for agent, group in group_of.items()
        }
        return {agent: kwargs for agent, kwargs in of_agent.items() if kwargs}


def _override(base: T, changes: Mapping[str, Any], place: str) -> T:
    """Returns a section with nested `changes`, validated again; errors name `place`."""
    try:
        return type(base).model_validate(merged(base.model_dump(exclude_unset=True), changes))
    except ValidationError as error:
        raise ValueError(explain(error, type(base), place)) from None


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `old` with the values of `new`, mapping by mapping. Neither is changed: what an anchor of YAML names is one object in
    several places."""
    values = dict(old)
    for key, value in new.items():
        is_nested = isinstance(value, Mapping) and isinstance(values.get(key), Mapping)
        values[key] = merged(values[key], value) if is_nested else value
    return values
