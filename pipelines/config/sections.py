"""sections: the sections of a run config that belong to its stages, each one frozen model.

What the fields of one section say together is checked here; what joins sections is in `config.py`. Pydantic and the
standard library only.
"""

from __future__ import annotations

from math import ceil
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from serve_apps.config import CallConfig, EpisodeConfig, Settings


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
    """Which of a generator's disjoint splits, or of the parts of `shares`; default is the name of the section."""
    shares: dict[str, float] = Field(default_factory=dict)
    """Cuts a file into parts by task id, e.g. {train: 0.8, gate: 0.1, test: 0.1}, so that one file gives all sets."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.path) == bool(self.generator):
            raise ValueError("give exactly one of `path` and `generator`")
        if self.generator and self.count is None:
            raise ValueError("a generator needs `count`")
        if self.generator and self.shares:
            raise ValueError("a generator has splits of its own: drop `shares`")
        if self.shares and (min(self.shares.values()) < 0 or sum(self.shares.values()) > 1 + 1e-9):
            raise ValueError(f"`shares` are parts of 1, got {self.shares}")
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
    base: str = ""
    """Name of a frozen model that all groups which name it share; each trains an adapter of it, as `train.lora` says."""
    tiny_model: dict[str, Any] = Field(default_factory=dict)
    """Overrides of `warmstart.tiny_model` for this model group: another family, shape or vocabulary."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the `train` section for this model group."""
    serve: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the `serve` section for this model group."""


class SwapConfig(Settings):
    """Two model groups of one agent each that exchange their agents, so that neither is only one of the roles (CORY).

    It holds for the episodes that are trained on. Evaluations and what is served keep the roles of `model_groups`: what
    the gate compares and what goes into service is always the same team.
    """

    groups: tuple[str, str]
    every: int = Field(5, ge=1)
    """Iterations between two exchanges: the first `every` iterations are played in the roles of `model_groups`."""

    def is_swapped(self, iteration: int) -> bool:
        """Whether the groups have each other's agent in the episodes of `iteration`."""
        return (max(iteration, 1) - 1) // self.every % 2 == 1


class BudgetConfig(Settings):
    """What collect may spend in one iteration. Groups under way when it is spent are completed, no others begun."""

    tokens: int | None = Field(None, ge=1)
    """Completion tokens, of stored episodes."""
    seconds: float | None = Field(None, gt=0)
    """In which episodes are under way; pauses of an interrupted collect do not count."""


class VariantsConfig(Settings):
    """Episodes beside those that train, against which these are held: the baselines of remax and its like."""

    kind: Literal["greedy", "counterfactual", "leave_one_out"]
    """`greedy`: a task played without chance (remax). `counterfactual`: a finished episode from one of its turns on, this
    turn sampled anew. `leave_one_out`: the same with an agent that says nothing from its first turn on."""
    per_task: int = Field(1, ge=1)
    """How many of each task; with `episodes_per_task` they are what a task costs. Of greedy ones, one is enough."""

    @model_validator(mode="after")
    def _greedy_ones_are_all_alike(self) -> Self:
        if self.kind == "greedy" and self.per_task != 1:
            raise ValueError(
                f"collect.variants.per_task = {self.per_task}: greedy episodes of a task are alike: give 1"
            )
        return self


class DynamicSamplingConfig(Settings):
    """DAPO: groups in which everything earned the same teach nothing and are replaced by other tasks' groups."""

    max_refills: int = Field(10, ge=1)
    """Passes after the first one, each over as many tasks as groups without signal were left."""


class FromServiceConfig(Settings):
    """Served episodes that callers have judged, trained on beside those that are sampled (`gateway.capture`)."""

    max_episodes: int = Field(64, ge=1)
    """Of an iteration; the newest, each once in a run."""
    max_age_days: float = Field(7, gt=0)
    max_policy_lag: int = Field(10, ge=0)
    """Versions between the one that answered and the one that is trained, of any model group."""


class CollectConfig(Settings):
    """How episodes are sampled."""

    tasks_per_iteration: int = Field(64, ge=1)
    episodes_per_task: int = Field(8, ge=1)
    """Size of a group (GRPO sense)."""
    variants: VariantsConfig | None = None
    dynamic_sampling: DynamicSamplingConfig | None = None
    from_service: FromServiceConfig | None = None
    """null: nothing that was served is trained on."""
    budget: BudgetConfig = BudgetConfig()
    oversample: float = Field(1.0, ge=1, le=4)
    """Above 1: so many times the tasks are begun, and collect ends once `tasks_per_iteration` groups are complete."""
    tail: Literal["carry", "cut"] = "carry"
    """Groups that budget or over-sampling left incomplete: their tasks come first in the next iteration, or are dropped
    until their turn comes again. What that does to the choice of tasks: pipelines/episodes/groups.py."""
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

    @model_validator(mode="after")
    def _dynamic_sampling_can_be(self) -> Self:
        if self.dynamic_sampling is None:
            return self
        if self.episodes_per_task == 1:
            raise ValueError(
                "collect.dynamic_sampling needs episodes to compare, and collect.episodes_per_task is 1: every group would "
                "be without signal; give at least 2"
            )
        if self.oversample > 1:
            raise ValueError(
                f"collect.dynamic_sampling and collect.oversample = {self.oversample:g} both decide which groups are kept: "
                "use one of them"
            )
        return self

    @model_validator(mode="after")
    def _variants_are_of_what_is_sampled(self) -> Self:
        if self.from_service is not None and self.variants is not None:
            raise ValueError(
                "collect.from_service and collect.variants: episodes from service cannot be played again, so there is no "
                "baseline for them; drop one of the two (rloo and grpo need no variants)"
            )
        return self

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
    """Largest |logprob difference| on the probe; about 1e-5 is seen in float32, at most 3e-5. A demo-sized model run in
    bfloat16 is 0.1 from a probe made in float32: there give this and `proof_noise`."""
    proof_noise: float | None = Field(None, gt=0)
    """What of it is the engine's rounding; null: a twentieth of `proof_tolerance`. Two versions that differ by less cannot
    be told apart, and a version that there is no other to tell apart from has to be as near as this."""

    @property
    def noise(self) -> float:
        """`proof_noise` or what stands for it."""
        return self.proof_tolerance / 20 if self.proof_noise is None else self.proof_noise

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
    test: Literal["bootstrap", "mcnemar"] = "bootstrap"
    """Where that interval comes from: BCa bootstrap of the tasks, or the exact McNemar test (one episode per task, 0 or 1)."""
    tasks_per_look: int | None = Field(None, ge=1)
    """The evaluation grows by so many tasks until the gate is sure or `tasks_per_decision` are played. The interval is then
    one that may be looked at so often (pipelines/evaluation/confidence_sequence.py); null: all tasks at once."""
    stage_timeout_s: float = Field(3600, gt=0)
    """Of every measurement: of the gate's tasks, the test tasks before and after, a file of tasks."""

    @model_validator(mode="after")
    def _exact_test_can_be(self) -> Self:
        if self.test == "mcnemar" and self.episodes_per_task > 1:
            raise ValueError(
                f"evaluate.test: mcnemar compares one episode per task, and evaluate.episodes_per_task is "
                f"{self.episodes_per_task}: give 1, or use test: bootstrap"
            )
        if self.test == "mcnemar" and self.tasks_per_look is not None:
            raise ValueError(
                "evaluate.test: mcnemar is for a fixed number of tasks, and evaluate.tasks_per_look looks in between: drop "
                "one of them"
            )
        return self


class GuardsConfig(Settings):
    """What a candidate may not be worse in than the champion, whatever it gains: by how much at most; null: not looked at.

    On the right side of the margin with its whole interval: holds. On the wrong one: the candidate is rejected. Between:
    the gate is not sure.
    """

    format_share: float | None = Field(0.05, ge=0)
    """Drop of the share of well-formed turns."""
    refusal_share: float | None = Field(0.05, ge=0)
    """Rise of the share of answers that are empty or decline."""
    completion_tokens: float | None = Field(0.5, ge=0)
    """Growth of an episode's sampled tokens: 0.5 allows half as many more."""
    turns: float | None = Field(0.5, ge=0)
    """Growth of an episode's turns."""
    tool_calls: float | None = Field(0.5, ge=0)
    """Growth of an episode's tool calls, where the champion makes any."""
    latency_s: float | None = Field(None, ge=0)
    """Growth of an episode's seconds. Off: both sides play on engines that others use too."""


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
    guards: GuardsConfig = GuardsConfig()
    max_source_loss: float | None = Field(None, ge=0)
    """Reject a candidate that certainly loses more than this on the tasks of one source, whatever it gains elsewhere."""
    cross_play: bool = False
    """Play every newly trained model group with the champion's others too, and promote only the groups that help."""
    on_reject: Literal["continue", "champion"] = "continue"
    """What the next iteration trains from after a rejection. The last two checkpoints are kept: after two rejections in a
    row `champion` goes on with its weights, but optimizer and critic start afresh (metric `train/is_state_lost`)."""
    on_failed_group: Literal["hold", "rest"] = "hold"
    """When the training of a model group fails for good (diverged, out of memory): `hold`, its stage fails and with it the
    iteration, until it is repeated; `rest`, the group keeps its parent version, which is said wherever the team is shown, and
    the other groups are evaluated and promoted with it. A group without a trainable row has not failed: it keeps its parent
    in any case. What infrastructure broke is repeated in any case."""
    into_service: Literal["never", "direct", "canary"] = "never"
    """What a promotion by the gate does where the team is behind a gateway. `never`: the champion's alias moves, people are
    answered by the team of before until `troupe serve`. `direct`: the gateway switches with the alias, as with `troupe
    promote`. `canary`: the stage waits while `traffic` decides; sent back is a rejection, undecided is inconclusive."""
    stage_timeout_s: float = Field(900, gt=0)
    """With the start of the idle set's engines, and without the time that a canary takes."""


class TrafficGuardsConfig(Settings):
    """What answers of a team may not be worse in than those of the team beside or before it; null: not looked at."""

    completion_tokens: float | None = Field(0.5, ge=0)
    """Growth of an answer's sampled tokens: 0.5 allows half as many more."""
    latency_s: float | None = Field(1.0, ge=0)
    """Growth of an answer's latency."""
    cut_share: float | None = Field(0.05, ge=0)
    """Rise of the share of answers that were cut short."""
    empty_share: float | None = Field(0.05, ge=0)
    """Rise of the share of answers without text."""
    format_share: float | None = Field(0.05, ge=0)
    """Drop of the share of well-formed turns of workflow runs."""
    failure_share: float | None = Field(0.02, ge=0)
    """Rise of the share of requests that the engines did not answer."""


class TrafficConfig(Settings):
    """How a canary advances by itself, and what sends a team back."""

    shares: tuple[float, ...] = (0.05, 0.25, 0.5)
    """Of the requests, step by step; after the last one the canary is promoted."""
    shadow: float = Field(0.0, ge=0, le=1)
    """Before the first step, of the champion's requests that the canary gets too, unseen; 0: no such step."""
    answers_per_step: int = Field(200, ge=10)
    """Answers of the canary before it may advance."""
    step_timeout_s: float = Field(3600, gt=0)
    """A step without enough answers, or without certainty before the promotion, ends undecided: the share stays as it is."""
    min_answers: int = Field(20, ge=10)
    """Of both teams, before they are compared."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """That no sound team is sent back, however often it is looked at."""
    poll_s: float = Field(2, gt=0)
    """Between two looks at the gateway."""
    guards: TrafficGuardsConfig = TrafficGuardsConfig()

    @model_validator(mode="after")
    def _shares_grow(self) -> Self:
        if (
            not self.shares
            or any(not 0 < share <= 1 for share in self.shares)
            or list(self.shares) != sorted(self.shares)
        ):
            raise ValueError(f"traffic.shares must be between 0 and 1 and grow, got {list(self.shares)}")
        return self


class WatchFloorsConfig(Settings):
    """The least change of a figure that is worth an alarm, however certain it is; those of an agent are its figure's."""

    completion_tokens: float = Field(0.25, ge=0)
    """Growth or fall, in parts of what is usual."""
    turns: float = Field(0.25, ge=0)
    """The same; so are the next three."""
    tool_calls: float = Field(0.25, ge=0)
    entropy: float = Field(0.25, ge=0)
    prompt_words: float = Field(0.25, ge=0)
    seconds: float = Field(0.5, ge=0)
    """Growth, in parts of what is usual."""
    format_faults: float = Field(0.05, ge=0)
    """Rise of a share; so are the next four."""
    cut_turns: float = Field(0.05, ge=0)
    refusals: float = Field(0.05, ge=0)
    failures: float = Field(0.02, ge=0)
    repeats: float = Field(0.05, ge=0)
    success: float = Field(0.05, ge=0)
    """Fall of the share of tasks that are solved."""
    reward_over_success: float = Field(0.1, ge=0)
    """Rise of the mean reward above the outcome."""
    feedback: float = Field(0.1, ge=0)
    """Fall of the callers' score, which is between -1 and 1."""
    input_drift: float = Field(0.2, ge=0)
    """Distance between the mean of the prompts now and before, in spreads of single prompts."""


class WatchConfig(Settings):
    """What tells that a team has become worse without a word: thresholds come from the champion's own history."""

    confidence: float = Field(0.99, gt=0.5, lt=1)
    """That a look at a team that has not changed raises no alarm at all, over all figures of the look."""
    min_history: int = Field(5, ge=3)
    """Earlier windows that a figure needs before it is judged; on fixed tasks one is enough."""
    history: int = Field(20, ge=3)
    """Windows that are kept of each kind."""
    min_episodes: int = Field(30, ge=2)
    """Of captured answers, or of the gateway's, since the last watching: fewer wait for the next."""
    max_episodes: int = Field(1000, ge=2)
    """Captured answers that are read, the newest."""
    on_alarm: Literal["tell", "hold"] = "tell"
    """`hold`: an alarm of an iteration fails its DAG run, and the schedule trains on only by force or once it is accepted."""
    floors: WatchFloorsConfig = WatchFloorsConfig()

    @model_validator(mode="after")
    def _enough_is_kept(self) -> Self:
        if self.history < self.min_history:
            raise ValueError(
                f"watch.history = {self.history} windows are kept, and watch.min_history = {self.min_history} are needed: "
                "raise the first"
            )
        return self


class WatchdogConfig(Settings):
    """Who watches a stage: says what it waits for, and ends it at its deadline (`stage_timeout_s` of its section)."""

    every_s: float = Field(30, gt=0)
    """Between two lines on what is waited for."""
    grace_s: float = Field(30, gt=0)
    """How long an interrupted stage may take to end by itself before its process is ended."""
