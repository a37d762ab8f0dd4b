"""config: YAML -> one frozen run config. Unknown keys name the nearest known one; rules that join fields are validators.

Pydantic and the standard library only, so that the command line answers at once and Airflow parses without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from pipelines.config.schedule import ClusterConfig, ScheduleConfig
from pipelines.config.sections import (
    AgentConfig,
    CollectConfig,
    DottedConfig,
    EvaluateConfig,
    ModelGroupConfig,
    PromoteConfig,
    ScoreConfig,
    SwapConfig,
    SyncConfig,
    TasksConfig,
    TrafficConfig,
    WatchConfig,
    WatchdogConfig,
)
from serve_apps.config import GatewayConfig, ServeConfig, Settings
from stores.config import MaintainConfig, StorageConfig
from train_loops.config import (
    BASELINE_ALGORITHMS,
    GROUP_ALGORITHMS,
    TEAM,
    TEAM_CRITIC_ALGORITHMS,
    TinyModelConfig,
    TrainConfig,
    WarmstartConfig,
)

T = TypeVar("T", bound=BaseModel)


class RunConfig(Settings):
    """One training of a team."""

    run: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: key of everything it keeps."""
    seed: int = 0
    iterations: int = Field(10, ge=1)
    workflow: DottedConfig
    credit: DottedConfig
    model_groups: dict[str, ModelGroupConfig] = Field(min_length=1)
    swap: SwapConfig | None = None
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    tasks: TasksConfig
    storage: StorageConfig = StorageConfig()
    serve: ServeConfig = ServeConfig()
    warmstart: WarmstartConfig | None = None
    collect: CollectConfig = CollectConfig()
    score: ScoreConfig = ScoreConfig()
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    promote: PromoteConfig = PromoteConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    schedule: ScheduleConfig | None = None
    cluster: ClusterConfig = ClusterConfig()
    maintain: MaintainConfig = MaintainConfig()
    gateway: GatewayConfig = GatewayConfig()
    traffic: TrafficConfig = TrafficConfig()
    watch: WatchConfig = WatchConfig()

    @model_validator(mode="after")
    def _agents_have_one_group(self) -> Self:
        owner: dict[str, str] = {}
        for group, settings in self.model_groups.items():
            for agent in settings.agents:
                if agent in owner:
                    raise ValueError(f"agent {agent!r} is mapped to two model groups, {owner[agent]!r} and {group!r}")
                owner[agent] = group
        return self

    @model_validator(mode="after")
    def _swapped_groups_can_be(self) -> Self:
        if self.swap is None:
            return self
        groups = self.swap.groups
        if len(groups) != len(set(groups)):
            raise ValueError(f"swap.groups: {groups[0]!r} cannot exchange agents with itself: name two model groups")
        for group in groups:
            if group not in self.model_groups:
                raise ValueError(f"swap.groups: {group!r} is no model group{near(group, self.model_groups)}")
            if len(agents := self.model_groups[group].agents) != 1:
                raise ValueError(
                    f"swap.groups: model group {group!r} has the agents {', '.join(agents)}: two roles change places, so "
                    "each of the two groups has exactly one; give the agents model groups of their own"
                )
        return self

    @model_validator(mode="after")
    def _trained_agents_are_there(self) -> Self:
        for agent in self.train.agents:
            if agent not in self.group_of:
                raise ValueError(f"train.agents: {agent!r} is mapped to no model group{near(agent, self.group_of)}")
        for group, settings in self.model_groups.items():
            place, agents = f"model_groups.{group}.train.agents", self.agents_of(group)
            signals = self.train_config(group).agents
            for agent in settings.train.get("agents", {}):
                if agent not in agents:
                    raise ValueError(f"{place}: {agent!r} is no agent of this model group{near(agent, agents)}")
            if all(agent in signals and signals[agent].weight == 0 for agent in agents):
                raise ValueError(
                    f"{place}: every agent of model group {group!r} has weight 0 ({', '.join(agents)}), so that nothing "
                    "of it would be trained: give one of them a weight above 0, or drop theirs (1)"
                )
        return self

    @model_validator(mode="after")
    def _every_group_has_a_model(self) -> Self:
        made = self.warmstart is not None and self.warmstart.tiny_model is not None
        for group, settings in self.model_groups.items():
            if not settings.model and not made:
                raise ValueError(
                    f"model_groups.{group}.model is missing: name a Hugging Face folder, "
                    "or give a `warmstart` section with a `tiny_model`"
                )
        return self

    @model_validator(mode="after")
    def _overrides_parse(self) -> Self:
        for group in self.model_groups:
            self.train_config(group)
            self.serve_config(group)
            self.tiny_model(group)
        return self

    @model_validator(mode="after")
    def _adapters_have_one_base(self) -> Self:
        for group, settings in self.model_groups.items():
            has_lora = self.train_config(group).lora is not None
            if has_lora and not settings.base:
                raise ValueError(
                    f"model_groups.{group}: train.lora trains an adapter, but of which base? name one: base: shared"
                )
            if settings.base and not has_lora:
                raise ValueError(
                    f"model_groups.{group}.base = {settings.base!r}: a base stays frozen, so train.lora is needed: "
                    "give train: {lora: {rank: 8}}, or drop the base to train all weights"
                )
            if settings.base in self.model_groups:
                raise ValueError(
                    f"model_groups.{group}.base = {settings.base!r} is a model group: a base needs a name of its own"
                )
        for base, members in self.bases.items():
            for what in ("model", "tiny_model", "serve"):
                given = {group: getattr(self.model_groups[group], what) for group in members}
                if any(value != given[members[0]] for value in given.values()):
                    raise ValueError(
                        f"model_groups with base {base!r} share one model on one app, but differ in `{what}`: {given}"
                    )
        return self

    @model_validator(mode="after")
    def _variants_are_what_train_needs(self) -> Self:
        kind = self.collect.variants.kind if self.collect.variants is not None else ""
        needed = {group: BASELINE_ALGORITHMS.get(self.train_config(group).algorithm, "") for group in self.model_groups}
        for group, want in needed.items():
            if want and want != kind:
                raise ValueError(
                    f"model group {group!r}: algorithm {self.train_config(group).algorithm!r} holds turns against "
                    f"{want} episodes, which collect does not play: set collect.variants: {{kind: {want}}}, or take rloo, "
                    "which needs none"
                )
        if kind and kind not in needed.values():
            name = next(name for name, of in BASELINE_ALGORITHMS.items() if of == kind)
            raise ValueError(
                f"collect.variants.kind: {kind}: no algorithm of this run uses such episodes: drop it, or set "
                f"train.algorithm: {name}"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        if self.collect.episodes_per_task > 1:
            return self
        for group in self.model_groups:
            train = self.train_config(group)
            by = train.advantage.group_by
            if train.algorithm == "gigpo":
                raise ValueError(
                    f"model group {group!r}: gigpo compares turns of a task that saw the same prompt (anchors), and "
                    "collect.episodes_per_task is 1: no turn has one; give at least 2, or take ppo"
                )
            if train.algorithm in GROUP_ALGORITHMS and train.advantage.singleton == "zero" and by != "batch_agent":
                raise ValueError(
                    f"model group {group!r}: algorithm {train.algorithm!r} compares the episodes of a task, and "
                    "collect.episodes_per_task is 1: every advantage would be 0; give at least 2, or take ppo, or "
                    "train.advantage.group_by: batch_agent"
                )
        return self

    @model_validator(mode="after")
    def _team_learns_as_one(self) -> Self:
        configs = {group: self.train_config(group) for group in self.model_groups}
        first = self.team_config
        if first is None:
            return self
        if TEAM in configs:
            raise ValueError(f"model_groups.{TEAM}: this name is the whole-team learner's: take another")
        if first.algorithm == "happo" and len(configs) == 1:
            raise ValueError(
                "train.algorithm: happo updates model groups one after another, and there is only one: with one group "
                "take mappo (the same central critic) or ippo"
            )
        for group, config in configs.items():
            for name in ("train_statuses", "train_mixed_versions"):
                if getattr(config, name) != getattr(first, name):
                    raise ValueError(
                        f"model_groups.{group}.train.{name} = {getattr(config, name)}: the whole team learns from the same "
                        f"episodes, and another model group has {getattr(first, name)}: set it in `train`, not per model group"
                    )
            if config.algorithm in TEAM_CRITIC_ALGORITHMS and config.advantage.whiten != first.advantage.whiten:
                raise ValueError(
                    f"model_groups.{group}.train.advantage.whiten = {config.advantage.whiten!r}: the central critic's "
                    "advantages are whitened once for all model groups: set it in `train`, not per model group"
                )
            if config.team != first.team or (
                config.algorithm != first.algorithm
                and {config.algorithm, first.algorithm} & set(TEAM_CRITIC_ALGORITHMS)
            ):
                raise ValueError(
                    f"model_groups.{group}.train: the whole team learns first, so all model groups have the same "
                    f"train.team and, with {' or '.join(TEAM_CRITIC_ALGORITHMS)}, the same train.algorithm: set both in "
                    "`train`, not per model group"
                )
        return self

    @model_validator(mode="after")
    def _served_episodes_can_be_learnt_from(self) -> Self:
        if self.collect.from_service is None:
            return self
        if self.team_config is not None:
            raise ValueError(
                "collect.from_service: a learner of the whole team sees whole episodes of what it samples; episodes from "
                "service are for model groups by themselves (rloo, grpo, reinforce_pp, gae): drop one of the two"
            )
        for group in self.model_groups:
            if self.train_config(group).mismatch.old_logprobs != "recompute":
                raise ValueError(
                    f"collect.from_service: other versions sampled what was served, so model group {group!r} needs "
                    "train.mismatch.old_logprobs: recompute"
                )
        return self

    @model_validator(mode="after")
    def _the_rest_can_be_promoted(self) -> Self:
        if self.promote.on_failed_group == "hold":
            return self
        if len(self.model_groups) == 1:
            raise ValueError(
                "promote.on_failed_group: rest promotes the other model groups where one failed to train, and there is only "
                "one: give hold"
            )
        if self.team_config is not None:
            raise ValueError(
                f"promote.on_failed_group: rest, but with train.algorithm: {self.team_config.algorithm} all model groups are "
                "trained in one stage, each on what the team learnt before: give hold"
            )
        return self

    @model_validator(mode="after")
    def _sampling_is_unfiltered(self) -> Self:
        for name, agent in self.agents.items():
            for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                value = getattr(agent, key)
                if value is not None and value != off:
                    raise ValueError(
                        f"agents.{name}.{key} = {value}: training turns are sampled unfiltered, because a filtered "
                        f"distribution is not the policy's; drop it or set it to {off:g}"
                    )
        return self

    @model_validator(mode="after")
    def _deadlines_nest(self) -> Self:
        """Every wait inside a stage ends before the stage's deadline, and that before the one of whoever submitted it."""
        call, episode = self.collect.call, self.collect.episode
        chain = [
            ("collect.call.call_timeout_s", call.call_timeout_s),
            ("collect.episode.turn_timeout_s", episode.turn_timeout_s),
            ("collect.episode.episode_timeout_s", episode.episode_timeout_s),
            ("collect.stage_timeout_s", self.collect.stage_timeout_s),
        ]
        evaluate = ("evaluate.stage_timeout_s", self.evaluate.stage_timeout_s)
        sync = ("sync.stage_timeout_s", self.sync.stage_timeout_s)
        pairs = [*pairwise(chain), (chain[2], evaluate)]
        if self.collect.budget.seconds is not None:
            pairs.append((("collect.budget.seconds", self.collect.budget.seconds), chain[3]))
        for stage in (chain[3], sync, evaluate):
            pairs.append((("sync.timeout_s", self.sync.timeout_s), stage))
            starts = {self.serve_config(group).start_timeout_s for group in self.model_groups}
            pairs += [(("serve.start_timeout_s", start), stage) for start in starts]
        if self.promote.into_service != "never":
            promote = ("promote.stage_timeout_s", self.promote.stage_timeout_s)
            pairs += [(("serve.start_timeout_s", start), promote) for start in starts]
        trains = [self.train_config(group) for group in self.model_groups]
        for train in trains:
            stage = ("train.stage_timeout_s", train.stage_timeout_s)
            pairs.append((("train.job_timeout_s", train.job_timeout_s), stage))
        if self.schedule is not None:
            stages = [chain[3], sync, evaluate, *(("train.stage_timeout_s", t.stage_timeout_s) for t in trains)]
            stages += [
                (f"{name}.stage_timeout_s", getattr(self, name).stage_timeout_s) for name in ("score", "promote")
            ]
            if self.warmstart is not None:
                stages.append(("warmstart.stage_timeout_s", self.warmstart.stage_timeout_s))
            pairs += [(stage, ("schedule.stage_timeout_s", self.schedule.stage_timeout_s)) for stage in stages]
        for (inner, a), (outer, b) in pairs:
            if a >= b:
                raise ValueError(f"deadlines must nest: {inner} = {a:g} s is not below {outer} = {b:g} s")
        return self

    @model_validator(mode="after")
    def _new_tasks_can_be_seen(self) -> Self:
        schedule = self.schedule
        if schedule is None or not (schedule.on_new_tasks or schedule.min_fresh_traces):
            return self
        if not (schedule.cron or schedule.on_assets):
            key = "on_new_tasks" if schedule.on_new_tasks else "min_fresh_traces"
            raise ValueError(f"schedule.{key} needs schedule.cron, which says how often to look (or on_assets)")
        if schedule.on_new_tasks and not self.tasks.train.path:
            raise ValueError(
                "schedule.on_new_tasks needs tasks.train.path: what a generator gives never changes; drop it or name a file"
            )
        return self

    @model_validator(mode="after")
    def _uploaded_runs_keep_elsewhere(self) -> Self:
        root = self.storage.root
        if self.cluster.working_dir and "://" not in root and not Path(root).is_absolute():
            raise ValueError(
                f"storage.root = {root!r} is relative, and cluster.working_dir is a copy that ends with the job: "
                "give storage.root as an absolute path or URI that every machine of the cluster sees"
            )
        return self

    @property
    def group_of(self) -> dict[str, str]:
        """Model group of every agent."""
        return {agent: group for group, settings in self.model_groups.items() for agent in settings.agents}

    @property
    def bases(self) -> dict[str, list[str]]:
        """The model groups of every base that adapters share."""
        found: dict[str, list[str]] = {}
        for group, settings in self.model_groups.items():
            if settings.base:
                found.setdefault(settings.base, []).append(group)
        return found

    @property
    def canary_timeout_s(self) -> float:
        """What a canary may take on its way through `traffic.shares`."""
        return (len(self.traffic.shares) + bool(self.traffic.shadow)) * self.traffic.step_timeout_s

    def weights_name(self, model_group: str) -> str:
        """Whose whole weights the group's policy is made of: its base's or its own."""
        return self.model_groups[model_group].base or model_group

    def groups_at(self, iteration: int) -> dict[str, str]:
        """Model group of every agent in the episodes that `iteration` trains on: see `swap`."""
        if self.swap is None or not self.swap.is_swapped(iteration):
            return self.group_of
        a, b = self.swap.groups
        return {agent: {a: b, b: a}.get(group, group) for agent, group in self.group_of.items()}

    def agents_of(self, model_group: str) -> tuple[str, ...]:
        """The agents that a model group acts for, in any iteration."""
        swapped = self.swap.groups if self.swap is not None else ()
        groups = swapped if model_group in swapped else (model_group,)
        return tuple(agent for group in groups for agent in self.model_groups[group].agents)

    def train_config(self, model_group: str) -> TrainConfig:
        """The `train` section with this model group's overrides."""
        return _override(self.train, self.model_groups[model_group].train, f"model_groups.{model_group}.train")

    @property
    def team_config(self) -> TrainConfig | None:
        """The train settings of a run whose whole team learns (they agree in what concerns it); None for any other run."""
        return next((c for c in map(self.train_config, self.model_groups) if c.is_whole_team), None)

    @property
    def train_tasks(self) -> tuple[str, ...]:
        """What stage train is called with in each iteration: every model group, or `team` for all of them together."""
        return tuple(self.model_groups) if self.team_config is None else (TEAM,)

    def serve_config(self, model_group: str) -> ServeConfig:
        """The `serve` section with this model group's overrides."""
        return _override(self.serve, self.model_groups[model_group].serve, f"model_groups.{model_group}.serve")

    def tiny_model(self, model_group: str) -> TinyModelConfig | None:
        """`warmstart.tiny_model` with this model group's overrides; None where version 0 is a given model."""
        changes, place = self.model_groups[model_group].tiny_model, f"model_groups.{model_group}.tiny_model"
        if self.warmstart is None or self.warmstart.tiny_model is None:
            if changes:
                raise ValueError(f"{place}: there is no warmstart.tiny_model that it could change")
            return None
        return _override(self.warmstart.tiny_model, changes, place)

    def agent_changes(self, name: str) -> dict[str, Any]:
        """What the `agents` section changes of the workflow's agent: setting -> value, None where it changes nothing."""
        return self.agents[name].model_dump() if name in self.agents else {}

    @cached_property
    def sha256(self) -> str:
        """Identity of everything that changes results: two configs with the same hash are the same run.

        Where things are kept, how many iterations there are, who answers people and how it is watched, deadlines, pure capacity
        and what only fails a stage for too small an effective sample size do not count. Nor does what is at a default under which it does nothing: runs that
        began before it existed go on.
        """
        sampling = ("budget", "oversample", "tail")
        unused = {name for name in sampling if getattr(self.collect, name) == getattr(CollectConfig(), name)}
        capacity: dict[str, Any] = {
            "iterations": True,
            "storage": True,
            "schedule": True,
            "cluster": True,
            "maintain": True,
            "serve": {"num_replicas", "threads", "cpus", "gpus", "start_timeout_s", "drain_timeout_s"},
            "tasks": {"sentinel"},
            "gateway": True,
            "traffic": True,
            "watch": True,
            "watchdog": True,
            "score": True,
            "warmstart": {"stage_timeout_s": True, "traces": {"weights"}},
            "collect": {"num_workers", "episodes_in_flight", "write_batch", "stage_timeout_s"} | unused,
            "sync": {"stage_timeout_s"} | ({"proof_noise"} if self.sync.proof_noise is None else set()),
            "evaluate": {"stage_timeout_s"},
            "promote": {"stage_timeout_s", "into_service"}
            | ({"on_failed_group"} if self.promote.on_failed_group == "hold" else set()),
            "train": {
                "threads": True,
                "cpus_per_worker": True,
                "gpus_per_worker": True,
                "keep_warm": True,
                "job_timeout_s": True,
                "start_timeout_s": True,
                "stage_timeout_s": True,
                "mismatch": {"min_ess"},
            },
        }
        data = self.model_dump(mode="json", exclude=capacity)
        if self.swap is None:
            del data["swap"]
        for group in data["model_groups"].values():
            for unused_key in ("tiny_model", "base"):
                if not group[unused_key]:
                    del group[unused_key]
        if self.warmstart and self.warmstart.tiny_model and self.warmstart.tiny_model.architecture == "qwen3":
            del data["warmstart"]["tiny_model"]["architecture"]
        return sha256(repr(_sorted(data)).encode()).hexdigest()


def near(name: str, known: Iterable[str]) -> str:
    """For the end of a message: the name of `known` that was probably meant, or all there are."""
    names = sorted(known)
    found = get_close_matches(name, names, n=1)
    return f": did you mean {found[0]!r}?" if found else f"; there are {', '.join(names)}"


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [(k, _sorted(v)) for k, v in sorted(value.items())]
    if isinstance(value, (list, tuple)):
        return [_sorted(v) for v in value]
    return value


def _override(base: T, changes: Mapping[str, Any], place: str) -> T:
    """`base` with nested `changes`, validated again; errors carry `place`."""
    try:
        return type(base).model_validate(_merge(base.model_dump(exclude_unset=True), changes))
    except ValidationError as error:
        raise ValueError(explain(error, type(base), place)) from None


def _merge(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`, mapping by mapping."""
    for key, value in new.items():
        nested = isinstance(value, Mapping) and isinstance(old.get(key), dict)
        old[key] = _merge(old[key], value) if nested else value
    return old


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads and validates a run config; `overrides` maps dotted keys to values.

    A config may begin from another one: `extends: other.yaml`, relative to its own folder. Its keys replace those of the
    other, section by section; `model_groups` replaces the whole mapping.

    Raises ValueError with value, place and fix for anything that is wrong with the file or its content.
    """
    data = _read_config(Path(path), ())
    for key, value in (overrides or {}).items():
        _assign(data, key, value)
    return parse_config(data, str(path))


def _read_config(file: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    by = f" (named by `extends` in {extended_by[-1]})" if extended_by else ""
    if not file.is_file():
        raise ValueError(f"run config {file}{by} does not exist: check the path, from {Path.cwd()}")
    try:
        data = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a date that does not exist
        raise ValueError(f"{file} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file}: a run config is a mapping of sections, this is {type(data).__name__}")
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ValueError(f"{file}: extends = {base!r} is no path: name one run config")
    parent, chain = file.parent / base, (*extended_by, file)
    if parent.resolve() in {one.resolve() for one in chain}:
        raise ValueError(f"{file}: extends = {base} leads back to itself: {' -> '.join(map(str, (*chain, parent)))}")
    inherited = _read_config(parent, chain)
    if "model_groups" in data:  # a mapping is one thing: an agent must not keep its group of before
        inherited.pop("model_groups", None)
    return _merge(inherited, data)


def parse_config(data: Mapping[str, Any], place: str) -> RunConfig:
    """A run config from plain data; raises ValueError naming `place`, key and fix."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ValueError(explain(error, RunConfig, place)) from None


def _assign(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ValueError(f"--set {dotted}: {key!r} is not a section")
    data[last] = value


def explain(error: ValidationError, model: type[BaseModel], place: str) -> str:
    """One line per fault: place, key, what is wrong and, for a misspelt key, the nearest known one."""
    lines = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = _keys_at(model, fault["loc"][:-1])
            near = get_close_matches(str(fault["loc"][-1]), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            lines.append(f"{place}: unknown key {where!r}: {hint}")
        elif fault["type"] == "missing":
            lines.append(f"{place}: {where!r} is missing")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            got = f" (got {fault['input']!r})" if where and not isinstance(fault["input"], (dict, list)) else ""
            lines.append(f"{place}: {where + ': ' if where else ''}{message}{got}")
    return "\n".join(lines)


def _keys_at(model: Any, location: tuple[Any, ...]) -> list[str]:
    """The keys that are known at `location` below `model`."""
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = model.model_fields[part].annotation
        elif get_args(model):
            model = get_args(model)[-1]
        candidates = [m for m in (model, *get_args(model)) if isinstance(m, type) and issubclass(m, BaseModel)]
        model = candidates[-1] if candidates else model
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
