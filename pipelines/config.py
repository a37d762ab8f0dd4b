"""config: YAML -> one frozen run config. Unknown keys name the nearest known one; rules that join fields are validators.

Pydantic and the standard library only, so that the command line answers at once and Airflow parses without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipelines.schedule import ClusterConfig, ScheduleConfig
from serve_apps.config import CallConfig, EpisodeConfig, ServeConfig
from stores.config import MaintainConfig, StorageConfig
from train_loops.config import TrainConfig, WarmstartConfig

T = TypeVar("T", bound=BaseModel)


class Settings(BaseModel):
    """Frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DottedConfig(Settings):
    """Something a user names by dotted path, with settings for its constructor."""

    path: str
    """`package.module:Name`."""
    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("path")
    @classmethod
    def _has_two_parts(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not module or not name:
            raise ValueError(f"{value!r} is not of the form 'package.module:Name'")
        return value


class TaskSourceConfig(Settings):
    """One set of tasks: a file, or a seeded generator."""

    path: str = ""
    """JSON, JSONL or Parquet file."""
    generator: DottedConfig | None = None
    """Called with `seed`, `split` and `count` and its settings; yields tasks. Splits never overlap."""
    count: int | None = Field(None, ge=1)
    """How many tasks (generator), or at most how many (file)."""
    split: str = ""
    """For a generator: which of its disjoint splits; default is the name of the section."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.path) == bool(self.generator):
            raise ValueError("give exactly one of `path` and `generator`")
        if self.generator and self.count is None:
            raise ValueError("a generator needs `count`")
        return self


class TasksConfig(Settings):
    """Sets that never overlap: what trains, what the gate decides on, what before/after is reported on, what is watched."""

    train: TaskSourceConfig
    gate: TaskSourceConfig | None = None
    test: TaskSourceConfig | None = None
    sentinel: TaskSourceConfig | None = None
    """What the champion must not forget: played by `evaluate_team` on its own schedule, never decided on."""


class AgentConfig(Settings):
    """Sampling of one agent; what is null keeps the workflow's own setting."""

    temperature: float | None = Field(None, gt=0)
    max_tokens: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, lt=1)


class ModelGroupConfig(Settings):
    """Agents that share one set of weights."""

    agents: tuple[str, ...] = Field(min_length=1)
    model: str = ""
    """Hugging Face folder (path or URI) of version 0; empty: what the warm start made."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the `train` section for this model group."""
    serve: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the `serve` section for this model group."""


class BudgetConfig(Settings):
    """What collect may spend in one iteration. Groups under way when it is spent are completed, no others begun."""

    tokens: int | None = Field(None, ge=1)
    """Completion tokens, of stored episodes."""
    seconds: float | None = Field(None, gt=0)
    """In which episodes are under way; pauses of an interrupted collect do not count."""


class CollectConfig(Settings):
    """How episodes are sampled."""

    tasks_per_iteration: int = Field(64, ge=1)
    episodes_per_task: int = Field(8, ge=1)
    """Size of a group (GRPO sense)."""
    budget: BudgetConfig = BudgetConfig()
    oversample: float = Field(1.0, ge=1, le=4)
    """Above 1: so many times the tasks are begun, and collect ends once `tasks_per_iteration` groups are complete."""
    tail: Literal["carry", "cut"] = "carry"
    """Groups that budget or over-sampling left incomplete: their tasks come first in the next iteration, or are dropped
    until their turn comes again. What that does to the choice of tasks: pipelines/groups.py."""
    num_workers: int = Field(1, ge=1)
    """Collector actors; each runs many episodes at once."""
    episodes_in_flight: int = Field(512, ge=1)
    """Per worker."""
    write_batch: int = Field(128, ge=1)
    """Finished episodes written per commit, at most."""
    stage_timeout_s: float = Field(3600, gt=0)
    """Every stage has one: its deadline, at which the watchdog writes stacks and ends it."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """Share of agent_error, tool_error, timeout and infra_error beyond which the stage fails."""
    episode: EpisodeConfig = EpisodeConfig()
    call: CallConfig = CallConfig()

    @property
    def num_tasks_begun(self) -> int:
        """Tasks that an iteration begins, over-sampling included."""
        return ceil(self.tasks_per_iteration * self.oversample)

    @property
    def may_stop_early(self) -> bool:
        """Whether a collect may end before every group that it planned is complete."""
        return self.oversample > 1 or self.budget != BudgetConfig()


class ScoreConfig(Settings):
    """Scoring; the rule itself is in `credit`."""

    stage_timeout_s: float = Field(900, gt=0)


class SyncConfig(Settings):
    """How new weights reach the engines, and what proves that they did."""

    timeout_s: float = Field(120, gt=0)
    stage_timeout_s: float = Field(900, gt=0)
    """With the start of engines that are not running."""
    proof_tolerance: float = Field(1e-3, gt=0)
    """Largest |logprob difference| on the probe; about 1e-5 is seen in float32. A demo-sized model run in
    bfloat16 is 0.1 from a probe made in float32: there give this and `proof_noise`."""
    proof_noise: float | None = Field(None, gt=0)
    """What of it is the engine's rounding; null: a fiftieth of `proof_tolerance`. Two versions that differ by less cannot
    be told apart, and a version that there is no other to tell apart from has to be as near as this."""

    @property
    def noise(self) -> float:
        """`proof_noise` or what stands for it."""
        return self.proof_tolerance / 50 if self.proof_noise is None else self.proof_noise

    @model_validator(mode="after")
    def _noise_is_tolerated(self) -> Self:
        if self.noise > self.proof_tolerance:
            raise ValueError(
                f"proof_noise = {self.noise:g} is above proof_tolerance = {self.proof_tolerance:g}: raise the second"
            )
        return self


class EvaluateConfig(Settings):
    """When and how the candidate meets the champion."""

    every: int = Field(1, ge=1)
    """Iterations between evaluations; the last iteration is always evaluated."""
    tasks_per_decision: int | None = Field(None, ge=1)
    """A fresh slice of the gate's tasks for every decision; null: all of them."""
    episodes_per_task: int = Field(1, ge=1)
    """k of avg@k and pass@k."""
    temperature: float | None = Field(None, gt=0)
    """null: as in training."""
    bootstrap_samples: int = Field(10_000, ge=100)
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of the interval of the gain that the gate decides by; accuracies are reported with 95% intervals in any case."""
    stage_timeout_s: float = Field(3600, gt=0)
    """Of every measurement: of the gate's tasks, the test tasks before and after, a file of tasks."""


class PromoteConfig(Settings):
    """The gate."""

    min_gain: float = 0.0
    """The lower confidence bound of the paired gain must exceed it: promote."""
    non_inferiority: float | None = Field(None, gt=0)
    """If set, a candidate that is certainly not worse than this margin is promoted too."""
    min_ok_share: float = Field(0.9, ge=0, le=1)
    """Floor on the share of episodes with status ok."""
    min_format_share: float = Field(0.0, ge=0, le=1)
    """Floor on the share of well-formed turns, per agent."""
    on_reject: Literal["continue", "champion"] = "continue"
    """What the next iteration trains from after a rejection. The last two checkpoints are kept: after two rejections in a
    row `champion` goes on with its weights, but optimizer and critic start afresh (metric `train/is_state_lost`)."""
    stage_timeout_s: float = Field(300, gt=0)


class WatchdogConfig(Settings):
    """Who watches a stage: says what it waits for, and ends it at its deadline (`stage_timeout_s` of its section)."""

    every_s: float = Field(30, gt=0)
    """Between two lines on what is waited for."""
    grace_s: float = Field(30, gt=0)
    """How long an interrupted stage may take to end by itself before its process is ended."""


class RunConfig(Settings):
    """One training of a team."""

    run: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: key of everything it keeps."""
    seed: int = 0
    iterations: int = Field(10, ge=1)
    workflow: DottedConfig
    credit: DottedConfig
    model_groups: dict[str, ModelGroupConfig] = Field(min_length=1)
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
        trains = {self.train_config(group) for group in self.model_groups}
        for train in trains:
            stage = ("train.stage_timeout_s", train.stage_timeout_s)
            pairs.append((("train.order_timeout_s", train.order_timeout_s), stage))
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

    def train_config(self, model_group: str) -> TrainConfig:
        """The `train` section with this model group's overrides."""
        return _override(self.train, self.model_groups[model_group].train, f"model_groups.{model_group}.train")

    def serve_config(self, model_group: str) -> ServeConfig:
        """The `serve` section with this model group's overrides."""
        return _override(self.serve, self.model_groups[model_group].serve, f"model_groups.{model_group}.serve")

    @cached_property
    def sha256(self) -> str:
        """Identity of everything that changes results: two configs with the same hash are the same run.

        Where things are kept, how many iterations there are, deadlines and pure capacity do not count. Nor does what is
        at a default under which it does nothing: runs that began before it existed go on.
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
            "watchdog": True,
            "score": True,
            "warmstart": {"stage_timeout_s"},
            "collect": {"num_workers", "episodes_in_flight", "write_batch", "stage_timeout_s"} | unused,
            "sync": {"stage_timeout_s"} | ({"proof_noise"} if self.sync.proof_noise is None else set()),
            "evaluate": {"stage_timeout_s"},
            "promote": {"stage_timeout_s"},
            "train": {
                "threads",
                "cpus_per_worker",
                "gpus_per_worker",
                "keep_warm",
                "order_timeout_s",
                "start_timeout_s",
                "stage_timeout_s",
            },
        }
        data = self.model_dump(mode="json", exclude=capacity)
        return sha256(repr(_sorted(data)).encode()).hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [(k, _sorted(v)) for k, v in sorted(value.items())]
    if isinstance(value, (list, tuple)):
        return [_sorted(v) for v in value]
    return value


def _override(base: T, changes: Mapping[str, Any], place: str) -> T:
    """`base` with nested `changes`, validated again; errors carry `place`."""

    def merge(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in new.items():
            nested = isinstance(value, Mapping) and isinstance(old.get(key), dict)
            old[key] = merge(old[key], value) if nested else value
        return old

    try:
        return type(base).model_validate(merge(base.model_dump(exclude_unset=True), changes))
    except ValidationError as error:
        raise ValueError(explain(error, type(base), place)) from None


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads and validates a run config; `overrides` maps dotted keys to values.

    Raises ValueError with value, place and fix for anything that is wrong with the file or its content.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"run config {path} does not exist: check the path, from {Path.cwd()}")
    try:
        data = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a date that does not exist
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a run config is a mapping of sections, this is {type(data).__name__}")
    for key, value in (overrides or {}).items():
        _assign(data, key, value)
    return parse_config(data, str(path))


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
