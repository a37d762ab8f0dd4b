"""sections: the sections of a run config that belong to its stages, each one frozen model.

Rules about the fields of one section are its validators; rules that join sections are in `rules`. Pydantic and the
standard library only.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.figures.limits import GuardsConfig, TrafficGuardsConfig
from serve_apps.authoring.agent import COLDEST
from serve_apps.config import CallConfig, EpisodeConfig, TelemetryConfig
from serve_apps.policy.proof import Limits, limits_for
from stores.by_name import open_by_name
from stores.settings import IDENTITY_IF_CHANGED, NOT_IDENTITY, Settings

TEST_FORM = "a function (candidate, champion, how) -> Interval as pipelines.evaluation.statistics:paired_interval is"


class DottedConfig(Settings):
    """This section names a class or function by its dotted path, with settings for its constructor."""

    path: str
    """The dotted path `package.module:Name` of the class or function."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The keyword arguments that the class or function is called with."""

    @field_validator("path")
    @classmethod
    def _has_two_parts(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not module or not name:
            raise ValueError(f"{value!r} is not of the form 'package.module:Name'")
        return value


class TaskSourceConfig(Settings):
    """This section names one set of tasks, from files or from a seeded generator."""

    path: str | tuple[str, ...] = ""
    """The path of a JSON, JSONL or Parquet file of tasks, or a list of paths, whose files are read in this order. Give either
    this or `generator`."""
    generator: DottedConfig | None = None
    """The function that is called with `seed`, `split` and `count` and its settings and yields tasks. Its splits never
    overlap; null: the tasks come from `path`."""
    count: int | None = Field(None, ge=1)
    """The number of tasks that the generator yields, or that are read from the files at most; null: all tasks of the
    files."""
    split: str = ""
    """The name of one of the generator's disjoint splits, or of one of the parts in `shares`, which a file needs for it.
    Empty: the name of the section, e.g. `train`."""
    shares: dict[str, float] = Field(default_factory=dict)
    """The parts into which a file is cut by task id, e.g. {train: 0.8, gate: 0.1, test: 0.1}, so that one file gives all
    sets. Empty: the whole file is one set."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of `path`."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        return tuple(Path(path) for path in paths if path)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.files) == bool(self.generator):
            raise ValueError("give exactly one of `path` and `generator`")
        if self.generator and self.count is None:
            raise ValueError("a generator needs `count`")
        if self.generator and self.shares:
            raise ValueError("a generator has splits of its own: drop `shares`")
        if self.path and self.split and not self.shares:
            raise ValueError(
                f"split = {self.split!r}: a file has no parts without `shares`: give them, e.g. {{train: 0.9, gate: 0.1}}, or drop "
                "`split`"
            )
        if self.path and self.split and self.split not in self.shares:
            raise ValueError(f"split = {self.split!r} is none of the parts in `shares`: {', '.join(self.shares)}")
        if self.shares and (min(self.shares.values()) < 0 or sum(self.shares.values()) > 1 + 1e-9):
            raise ValueError(f"`shares` are parts of 1, got {self.shares}")
        return self


class TasksConfig(Settings):
    """This section names the sets of tasks, which never overlap."""

    train: TaskSourceConfig
    """The tasks that are trained on."""
    gate: TaskSourceConfig | None = None
    """The tasks on which the gate compares candidate and champion; null: the run cannot promote."""
    test: TaskSourceConfig | None = None
    """The tasks on which accuracy before and after the training is reported; null: none is reported."""
    sentinel: TaskSourceConfig | None = Field(None, json_schema_extra=NOT_IDENTITY)
    """The tasks that the champion must not forget. `evaluate_team` plays them on its own schedule; no decision uses them.
    null: there are none."""


class AgentConfig(Settings):
    """This section sets how one agent is sampled. What is null keeps the workflow's own setting."""

    temperature: float | None = Field(None, ge=COLDEST)
    """The sampling temperature, at least 0.01 as in vLLM; null: that of the workflow. Raise it when episodes of a task are all alike."""
    max_tokens: int | None = Field(None, ge=1)
    """The number of tokens that one completion may have; null: that of the workflow."""
    top_p: float | None = Field(None, gt=0, le=1)
    """The cumulative probability to which sampling is cut. Training refuses all but 1; null: that of the workflow."""
    top_k: int | None = Field(None, ge=0)
    """The number of most likely tokens that are sampled from. Training refuses all but 0 (off); null: that of the
    workflow."""
    min_p: float | None = Field(None, ge=0, lt=1)
    """The least probability of a token, relative to the most likely one. Training refuses all but 0 (off); null: that of
    the workflow."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, json_schema_extra=IDENTITY_IF_CHANGED)
    """Variables of the model's chat template in this agent's prompts, e.g. {enable_thinking: false}. They go before those of
    its model group."""


class ModelGroupConfig(Settings):
    """This section names agents that share one set of weights."""

    agents: tuple[str, ...] = Field(min_length=1)
    """The names of the agents, as the workflow declares them."""
    model: str = ""
    """The Hugging Face folder (path or URI) of version 0. Empty: the tiny model that the warm start makes. It is
    needed without `warmstart.tiny_model`, and refused with it."""
    base: str = Field("", json_schema_extra=IDENTITY_IF_CHANGED)
    """The name of a frozen model. All groups that give the same name share it, and each trains an adapter of it, as
    `train.lora` says. Empty: all weights are trained."""
    tiny_model: dict[str, Any] = Field(default_factory=dict, json_schema_extra=IDENTITY_IF_CHANGED)
    """The keys of `warmstart.tiny_model` that differ for this model group: another family, shape or vocabulary."""
    train: dict[str, Any] = Field(default_factory=dict)
    """The keys of the `train` section that differ for this model group."""
    serve: dict[str, Any] = Field(default_factory=dict)
    """The keys of the `serve` section that differ for this model group."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, json_schema_extra=IDENTITY_IF_CHANGED)
    """Variables of the model's chat template in the prompts of all agents of this group, e.g. {enable_thinking: false}."""


class SwapConfig(Settings):
    """This section names two model groups of one agent each that exchange their agents, so that neither learns only one of
    the roles (CORY, arXiv 2410.06101).

    The exchange holds for the episodes that are trained on. Evaluation and serving keep the roles of `model_groups`, so that
    the gate compares the team that is served.
    """

    groups: tuple[str, str]
    """The names of the two model groups that exchange their agents."""
    every: int = Field(5, ge=1)
    """The number of iterations between two exchanges. The first `every` iterations have the roles of `model_groups`."""

    def is_swapped(self, iteration: int) -> bool:
        """Returns whether the groups have each other's agent in the episodes of `iteration`."""
        return (max(iteration, 1) - 1) // self.every % 2 == 1


class BudgetConfig(Settings):
    """This section sets what collect may spend in one iteration. When it is spent, groups under way are completed and
    no others begin."""

    tokens: int | None = Field(None, ge=1)
    """The number of completion tokens of stored episodes; null: no limit."""
    seconds: float | None = Field(None, gt=0)
    """The time in seconds in which episodes are under way; pauses of an interrupted collect do not count; null: no
    limit."""


class VariantsConfig(Settings):
    """This section adds episodes that those which are trained on are compared with, for remax and similar algorithms."""

    kind: Literal["greedy", "counterfactual", "leave_one_out"]
    """What is played. `greedy`: the task at temperature 0 (remax). `counterfactual`: a finished episode again from one of
    its turns on, with this turn sampled anew. `leave_one_out`: the same with an agent that says nothing from its first turn
    on."""
    per_task: int = Field(1, ge=1)
    """The number of changes per task, each of another episode or agent, beside its `episodes_per_task`. Of greedy episodes,
    one is enough."""
    siblings: int = Field(1, ge=1, json_schema_extra=IDENTITY_IF_CHANGED)
    """The number of replays with the same change, K (C3, arXiv 2603.06859). Each is held against the mean of the others,
    and the turn that it sampled anew trains, too. Of `leave_one_out` the turns after the silence train, from 2 siblings on.
    At an equal number of replays more changes teach as much as more siblings, and reach more agents."""

    @model_validator(mode="after")
    def _greedy_ones_are_all_alike(self) -> Self:
        for name, number in (("per_task", self.per_task), ("siblings", self.siblings)):
            if self.kind == "greedy" and number != 1:
                raise ValueError(f"collect.variants.{name} = {number}: greedy episodes of a task are alike: give 1")
        return self


class DynamicSamplingConfig(Settings):
    """This section turns on DAPO's dynamic sampling (arXiv 2503.14476): groups whose episodes all earned the same are replaced
    by those of other tasks."""

    max_refills: int = Field(10, ge=1)
    """The number of passes after the first one, each over as many tasks as groups without signal were left."""


class FromServiceConfig(Settings):
    """This section sets which captured answers (`gateway.capture`) with feedback are trained on beside sampled episodes."""

    max_episodes: int = Field(64, ge=1)
    """The number of such episodes per iteration, the newest first. Each is trained on once in a run."""
    max_age_days: float = Field(7, gt=0)
    """The age in days up to which an episode is trained on."""
    max_policy_lag: int = Field(10, ge=0)
    """The number of versions between the one that answered and the one that is trained, at most, for any model group."""


class LoopConfig(Settings):
    """This section sets whether the next iteration is sampled while this one is trained."""

    max_lag: int = Field(0, ge=0, le=2)
    """How many iterations may be sampled before the one that they follow is trained. 0: each is sampled by the versions that it trains
    from. 1: iteration k is sampled by what iteration k-2 left, while k-1 trains, and learns with importance weights; engines and trainers
    then work side by side, which pays where they have cores or GPUs of their own, or where episodes wait for tools. 2 helps only where
    iterations take unequal times. See the guide on overlap."""

    def sampler_of(self, iteration: int) -> int:
        """Returns the iteration whose parents sample this one."""
        return max(1, iteration - self.max_lag)


class CollectConfig(Settings):
    """This section sets how episodes are sampled."""

    tasks_per_iteration: int = Field(64, ge=1)
    """The number of tasks that each iteration trains on."""
    episodes_per_task: int = Field(8, ge=1)
    """The number of episodes of each task: the size of a group in the sense of GRPO."""
    variants: VariantsConfig | None = None
    """The additional episodes that remax, counterfactual and leave_one_out compare with; null: none are played."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Whether and how groups without signal are replaced; null: they are kept."""
    from_service: FromServiceConfig | None = None
    """Which captured answers are trained on; null: none."""
    budget: BudgetConfig = Field(BudgetConfig(), json_schema_extra=IDENTITY_IF_CHANGED)
    """What an iteration may spend on episodes. By default there is no limit."""
    oversample: float = Field(1.0, ge=1, le=4, json_schema_extra=IDENTITY_IF_CHANGED)
    """The factor by which more tasks are begun than needed. Above 1, collect ends once `tasks_per_iteration` groups are
    complete, so that it does not wait for the slowest."""
    incomplete_groups: Literal["carry", "drop"] = Field("carry", json_schema_extra=IDENTITY_IF_CHANGED)
    """What becomes of the tasks whose groups are incomplete when budget or over-sampling ends collect. `carry`: they come
    first in the next iteration. `drop`: they wait for their next turn. pipelines/episodes/groups.py says what that does to
    the choice of tasks."""
    num_workers: int = Field(1, ge=1, json_schema_extra=NOT_IDENTITY)
    """The number of collector processes; each runs many episodes at once."""
    episodes_in_flight: int = Field(512, ge=1, json_schema_extra=NOT_IDENTITY)
    """The number of episodes that one collector runs at once, at most."""
    stage_timeout_s: float = Field(3600, gt=0, json_schema_extra=NOT_IDENTITY)
    """The deadline in seconds of stage collect, at which the watchdog writes the stacks of its processes and ends it."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """The share of episodes that infrastructure or the workflow's author caused to fail beyond which the stage fails. Failures
    that the policy caused are outcomes and do not count, unless all episodes of their task fail alike, whatever was
    sampled."""
    episode: EpisodeConfig = EpisodeConfig()
    """The limits within which an episode must end."""
    call: CallConfig = CallConfig()
    """How model calls reach the policy apps."""
    telemetry: TelemetryConfig = Field(TelemetryConfig(), json_schema_extra=NOT_IDENTITY)
    """Where spans of the episodes go that the run samples, to train on and to evaluate. By default there are none."""

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
        """Returns the number of tasks that an iteration begins, over-sampling included."""
        return ceil(self.tasks_per_iteration * self.oversample)

    @property
    def may_stop_early(self) -> bool:
        """Returns whether a collect may end before every group that it planned is complete."""
        return self.oversample > 1 or self.budget != BudgetConfig()


class CostConfig(Settings):
    """This section sets what an episode may cost on average, for algorithms that compare turns and credit rules of kind `returns`. Rewards lose the cost of their turns, times a multiplier that grows while
    episodes cost more than that and shrinks while they cost less."""

    figure: Literal["completion_tokens", "calls", "critical_path_tokens", "seconds"] = "completion_tokens"
    """What is counted: completion tokens; model and tool calls; the completion tokens, or the seconds, on the longest path of an
    episode, where calls side by side count once. Seconds depend on how busy the machine is."""
    at_most: float = Field(gt=0)
    """The mean cost of an episode that is aimed at."""
    prices: dict[str, float] = Field(default_factory=dict)
    """What a token, a call or a second of a model group costs, by the group's name; 1 where it is not named. A tool call costs 1, its
    seconds as many."""
    rate: float = Field(0.1, gt=0)
    """How fast the multiplier changes: it grows by this number in an iteration whose episodes cost twice as much as `at_most`."""
    initial: float = Field(0.0, ge=0)
    """The multiplier of the first iteration. A multiplier of 1 takes 1 from the reward of a turn from which on `at_most` is spent."""

    @field_validator("prices")
    @classmethod
    def _cost_something(cls, value: dict[str, float]) -> dict[str, float]:
        if odd := [name for name, price in value.items() if price < 0]:
            raise ValueError(f"{odd[0]}: {value[odd[0]]} is no price: give a number of at least 0")
        return value


class ScoreConfig(Settings):
    """This section sets up stage score; the credit rule itself is in `credit`."""

    stage_timeout_s: float = Field(900, gt=0)
    """The deadline in seconds of stage score."""


class SyncConfig(Settings):
    """This section sets how new weights reach the engines, and how it is proven that they did."""

    timeout_s: float = Field(120, gt=0)
    """The time in seconds within which one engine must have loaded new weights."""
    stage_timeout_s: float = Field(900, gt=0, json_schema_extra=NOT_IDENTITY)
    """The deadline in seconds of stage sync, including the start of engines that are not running."""
    proof_tolerance: float | None = Field(None, gt=0, json_schema_extra=IDENTITY_IF_CHANGED)
    """The largest difference in nats between the logprobs of engine and trainer on the probe; null: a limit by
    the dtypes of the two, 0.001 where both are float32, 1.0 where one is bfloat16."""
    proof_noise: float | None = Field(None, gt=0, json_schema_extra=IDENTITY_IF_CHANGED)
    """The part of it that is rounding, in nats; null: a limit by the dtypes of the two, 2e-4 where both are float32,
    0.5 where one is bfloat16, and at most `proof_tolerance`. Two versions that differ by less cannot be distinguished, and where there is
    no other version to compare with, the difference must be below this."""

    def limits(self, *, trainer: str, engine: str) -> Limits:
        """Returns what a proof allows between two dtypes (`float32`, `bfloat16`, ...): as configured, else by the dtypes."""
        usual = limits_for(trainer, engine)
        tolerance = (
            max(usual.tolerance, self.proof_noise or 0) if self.proof_tolerance is None else self.proof_tolerance
        )
        noise = min(usual.noise, tolerance) if self.proof_noise is None else self.proof_noise
        return Limits(tolerance=tolerance, noise=noise, pair=usual.pair)

    @model_validator(mode="after")
    def _noise_is_tolerated(self) -> Self:
        if self.proof_noise and self.proof_tolerance and self.proof_noise > self.proof_tolerance:
            raise ValueError(
                f"proof_noise = {self.proof_noise:g} is above proof_tolerance = {self.proof_tolerance:g}: raise the second"
            )
        return self


class ControlConfig(Settings):
    """This section sets a control for the test tasks: one agent that solves them alone, with the same model and as many
    completion tokens per task as the team.

    It answers again until it has spent the mean of the team's tokens, and the majority of its answers counts.
    """

    agent: str
    """The name of an agent of the workflow whose prompt has one input, the task."""
    answer: str = "answer"
    """The field of its contract that is its answer."""


class EvaluateConfig(Settings):
    """This section sets when and how the candidate is compared with the champion."""

    every: int = Field(1, ge=1)
    """The number of iterations between two evaluations. The last iteration is always evaluated."""
    tasks_per_decision: int | None = Field(None, ge=1)
    """The number of gate tasks per decision, a fresh slice each time; null: all of them."""
    episodes_per_task: int = Field(1, ge=1)
    """The number of episodes per task: the k of avg@k and pass@k."""
    temperature: float | None = Field(None, ge=0)
    """The sampling temperature of all agents in evaluations; 0: greedily, always the most likely token, but for a
    `control`, whose answers would be all alike; null: as in training."""
    bootstrap_samples: int = Field(10_000, ge=100)
    """The number of bootstrap samples of a confidence interval, or more: ten lie beyond each of its bounds."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """The confidence of the interval of the gain by which the gate decides. Accuracies are always reported with 95%
    intervals."""
    test: str = "auto"
    """The source of that interval. `auto`: the BCa bootstrap over tasks where each has one episode with outcome 0 or 1 and is a
    problem of its own (where fewer than 16 differ, the interval of the exact test), else bets (pipelines/evaluation/betting.py), which hold for
    outcomes of any distribution. `mcnemar`: the exact McNemar test (one episode per task, outcome 0 or 1). Or the dotted path `package.module:name` of a
    function of your own with the signature of `paired_interval` (pipelines/evaluation/statistics.py)."""
    tasks_per_look: int | None = Field(None, ge=1)
    """The number of tasks by which the evaluation grows until the gate can decide or `tasks_per_decision` are played. The
    interval is then a confidence sequence, which stays valid however often it is checked; null: all tasks at once."""
    control: ControlConfig | None = Field(None, json_schema_extra=IDENTITY_IF_CHANGED)
    """The control on the test tasks, before and after training; null: none."""
    figures: tuple[str, ...] = Field((), json_schema_extra=IDENTITY_IF_CHANGED)
    """The dotted paths `package.module:name` of figures of your own (pipelines/figures/figure.py). Each is shown in metrics and
    reports and watched, and may be a key of `promote.guards` and `watch.floors`."""
    stage_timeout_s: float = Field(3600, gt=0, json_schema_extra=NOT_IDENTITY)
    """The deadline in seconds of each evaluation: of the gate's tasks, of the test tasks before and after, of a task
    file."""

    @field_validator("test")
    @classmethod
    def _is_a_test(cls, value: str) -> str:
        if value in ("auto", "mcnemar"):
            return value
        if ":" not in value:
            raise ValueError(
                f"no test of this name: there are auto, mcnemar. One of your own is 'module:name', {TEST_FORM}"
            )
        open_by_name(value, place="", wanted=TEST_FORM, fits=callable, is_parsing=True)
        return value

    @model_validator(mode="after")
    def _test_can_be(self) -> Self:
        if self.test == "mcnemar" and self.episodes_per_task > 1:
            raise ValueError(
                f"evaluate.test: mcnemar compares one episode per task, and evaluate.episodes_per_task is "
                f"{self.episodes_per_task}: give 1, or use test: auto"
            )
        if self.test != "auto" and self.tasks_per_look is not None:
            raise ValueError(
                f"evaluate.test: {self.test} is for a fixed number of tasks, and evaluate.tasks_per_look looks in between: drop "
                "one of them"
            )
        return self


class PromoteConfig(Settings):
    """This section sets how the gate decides, and what a promotion does."""

    min_gain: float = 0.0
    """The gain in outcome that the lower confidence bound of the paired gain must exceed for a promotion."""
    non_inferiority: float | None = Field(None, gt=0)
    """The margin in outcome: a candidate that is certainly not worse by more than it is promoted, too; null: a gain is
    needed. What such promotions may have lost is taken off it until a certain gain, so that it is spent once."""
    min_ok_share: float = Field(0.9, ge=0, le=1)
    """The least share of episodes with status ok. A candidate below it is rejected: before the last look (`evaluate.tasks_per_look`) one
    that is certainly below it."""
    min_format_share: float = Field(0.0, ge=0, le=1)
    """The least share of well-formed turns of every agent. A candidate below it is rejected, as for `min_ok_share`."""
    guards: GuardsConfig = GuardsConfig()
    """By the names of figures, of `evaluate.figures` too: how much worse than the champion a candidate may be, whatever it gains;
    null: any. What is not named has the limit of the page on figures. A guard holds where its whole interval is on the allowed side of
    the limit; where all of it is on the other side the candidate is rejected, and between the two the decision is inconclusive."""
    max_source_loss: float | None = Field(None, ge=0)
    """The loss in outcome that no source of tasks may exceed, whatever is gained elsewhere: a candidate that certainly exceeds it is
    rejected, and where that is not certain the decision is inconclusive; null: not checked."""
    cross_play: bool = False
    """Whether every newly trained model group also plays with the champion's other groups, so that only the groups that
    help are promoted."""
    on_reject: Literal["continue", "champion"] = "continue"
    """What the next iteration trains from after a rejection: the newest versions, or those of the champion, whose
    checkpoint is kept for that beside the last two. After a rollback to an older team it may be gone: its weights go on, but
    optimizer and critic start afresh (metric `train/is_state_lost`)."""
    on_failed_group: Literal["fail", "keep_parent"] = Field("fail", json_schema_extra=IDENTITY_IF_CHANGED)
    """What happens when the training of a model group fails for good (diverged, out of memory). `fail`: its stage fails and
    with it the iteration, until it is repeated. `keep_parent`: the group keeps its parent version, which is shown wherever
    the team is, and the other groups are evaluated and promoted with it. A group without a trainable row has not failed: it
    keeps its parent in any case. Infrastructure failures are repeated in any case."""
    deploy: Literal["never", "direct", "canary"] = Field("never", json_schema_extra=NOT_IDENTITY)
    """How a team that the gate promotes is deployed, where the team is behind a gateway. `never`: the champion's alias moves,
    and the team from before serves production traffic until `troupe serve`. `direct`: the gateway switches with the alias, as
    with `troupe promote`. `canary`: the stage waits while `traffic` decides; a canary that is sent back is a rejection, an
    undecided one is inconclusive."""
    stage_timeout_s: float = Field(900, gt=0, json_schema_extra=NOT_IDENTITY)
    """The deadline in seconds of stage promote, including the start of engines for the new team, without the time of a
    canary."""


class TrafficConfig(Settings):
    """This section sets how a canary advances, and what sends it back."""

    shares: tuple[float, ...] = (0.05, 0.25, 0.5)
    """The shares of the requests that the canary answers, step by step, each below 1. After the last step it is promoted."""
    shadow_share: float = Field(0.0, ge=0, le=1)
    """The share of the champion's requests that the canary gets as shadow traffic before the first step; users never see its
    replies. 0: there is no such step."""
    answers_per_step: int = Field(200, ge=10)
    """The number of answers of the canary before it may advance to the next step."""
    step_timeout_s: float = Field(3600, gt=0)
    """The time in seconds after which a step without enough answers, or without certainty before the promotion, ends
    undecided. The share then stays as it is."""
    min_answers: int = Field(20, ge=10)
    """The number of answers of both teams before they are compared."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """The probability that a team that is not worse is not sent back, however often it is checked."""
    poll_s: float = Field(2, gt=0)
    """The time in seconds between two checks of the gateway's figures."""
    guards: TrafficGuardsConfig = TrafficGuardsConfig()
    """By the names of figures: the largest allowed change for the worse; null: any. What is not named has the limit of the page on
    figures."""

    @model_validator(mode="after")
    def _shares_grow(self) -> Self:
        if (
            not self.shares
            or any(not 0 < share < 1 for share in self.shares)  # at 1 the champion answers nothing to compare with
            or list(self.shares) != sorted(self.shares)
        ):
            raise ValueError(f"traffic.shares must be between 0 and 1 and grow, got {list(self.shares)}")
        return self
