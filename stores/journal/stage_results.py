"""stage_results: what each stage of an iteration leaves in the journal, as records instead of bare JSON.

A stage returns one of these records, the journal keeps its `to_json()`, and whoever comes later gets the record again
through `from_json()`, which refuses what is not whole. Read them through `pipelines.run.iteration.Iteration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import Field

from stores.codec import Record
from stores.types import ModelVersionRef, RewardsRef, TracesRef

AgentFigures: TypeAlias = Mapping[str, Mapping[str, float]]
"""By agent, then by name of the figure."""
TrainParts: TypeAlias = Mapping[str, tuple[float, float]]
"""By part of a trainer's work, in order, Unix seconds of its begin and its end: `load` (weights and state of the parent), `read`
(rows or episodes), `learn` (forward and backward passes), `store` (checkpoint and version)."""
STOP = "stop/"
"""What the metric of a reason for which episodes end begins with."""
CHOSEN, PROBABILITY, PART, CALLED = "chosen/", "probability/", "part/", "tool/"
"""What the figures of an agent's choices, of the parts of its reward and of its tools begin with; the option, the part or the tool follows."""


class StageResult(Record):
    """A frozen dataclass that is kept as JSON: `from_json(to_json())` is the record itself."""

    __slots__ = ()
    STAGE: ClassVar[str]
    """Name of the stage in the journal."""
    BESIDE: ClassVar[str] = ""
    """The field with a `TeamScore` whose own fields are, in JSON, keys beside the others: so a summary is read in one step."""

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values, the fields of `BESIDE` beside the others."""
        data = Record.to_json(self)
        return {**(data.pop(self.BESIDE, None) or {}), **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Reads JSON values in which the fields of `BESIDE` stand beside the others; raises as `Record.from_json`."""
        if cls.BESIDE:
            score = {f.name: data[f.name] for f in fields(TeamScore) if f.name in data}
            rest = {name: value for name, value in data.items() if name not in score}
            data = {**rest, cls.BESIDE: score} if score else rest
        return super().from_json(data)

    @classmethod
    def described(cls) -> str:
        """Names the stage, for messages."""
        return f"the result of stage {cls.STAGE!r} ({cls.__name__})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesSource(Record):
    """Another run's iteration whose stored traces are trained on."""

    run: str
    iteration: int
    store: str
    """The folder that holds the run, or its journal's URL."""

    def __str__(self) -> str:
        return f"{self.run}@{self.iteration}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected(StageResult):
    """The episodes of an iteration."""

    STAGE: ClassVar[str] = "collect"

    traces: TracesRef
    """The pinned episodes: complete groups only."""
    policy_versions: Mapping[str, int]
    """By model group, the version that sampled the episodes, unless `sampled_by` says otherwise; without `loop.max_lag` it is trained from,
    too."""
    statuses: Mapping[str, int]
    """Number of new episodes by `EpisodeStatus`."""
    num_new: int
    """Episodes that this attempt of the stage played; what an interrupted attempt had stored is not counted again."""
    num_tokens: int
    """Completion tokens of the new episodes."""
    sampling_seconds: float
    groups: Mapping[str, int]
    """Number of groups `wanted`, `planned` and `done`; with dynamic sampling also `refilled`, `refills`, `without_signal`."""
    stopped_by: str | None
    """`tokens`, `seconds` or `enough` where sampling ended before all groups were complete."""
    carried: tuple[str, ...]
    """Ids of the tasks that come first in the next iteration, because this one left them out."""
    served: Mapping[str, int] | None = None
    """With `collect.from_service`: number of served episodes `taken`, `held_out` and `left`."""
    source: Annotated[TracesSource | None, Field(alias="from")] = None
    """Where the traces come from if nothing was sampled; key `from` in JSON."""
    sampled_by: Mapping[str, int] | None = None
    """By model group, the version that acted in traces of another run."""
    causes: Mapping[str, int] | None = None
    """Number of new episodes by `Cause` of their failure, `sound` for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored(StageResult):
    """The rewards of an iteration's episodes."""

    STAGE: ClassVar[str] = "score"

    rewards: RewardsRef
    credit_version: str
    """Identity of the credit rule with its settings and code; that of `rewards` may name run and iteration, too."""
    outcome: float | None
    """Mean outcome of the run's own episodes, variants left out; None where none of them counts."""
    agents: AgentFigures
    """`format_share`, `calls`, `attempts` at them, `completion_tokens`; `reward` where any turn was paid, `cached_prompt_share` where the
    engine has a prefix cache, for agents of a program `broken_share` and, for one that chooses, `chosen/<option>` and
    `probability/<option>`. `turns` is the mean of an episode; the means of `part/<name>` over its paid turns add up to `reward`. `tool/<name>` is how often
    in an episode the tool was called with what the agent wrote, `tool_error_share` the share of such calls, of all tools, that failed."""
    causes: Mapping[str, int] | None = None
    """Number of episodes by `Cause` of their failure, `sound` for none; variants left out."""
    cost: Mapping[str, float] | None = None
    """With `cost` in the run config: the `mean` of an episode, variants left out, where there is one, the `multiplier` that rewards were
    charged with and the `next_multiplier`."""
    credit_fidelity: float | None = None
    """Where credit is inferred: how well the model orders the outcomes of unseen episodes, -1 to 1; 0 is chance, None where all ended alike."""
    is_credit_inferred: bool | None = None
    """Where credit is inferred: False where the turns kept the rewards of the inner rule."""
    figures: Mapping[str, float] | None = None
    """Means over the episodes of the figures that `evaluate.figures` adds; those without a value left out."""
    solved: float | None = None
    """Share of the episodes of `outcome` with an outcome of 1: of graded outcomes, such as the share of tests passed, those that passed all."""
    stop_reasons: Mapping[str, float] | None = None
    """Share of these episodes by why they ended: the most frequent reasons, the others as `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainAnswer(StageResult):
    """What a trainer answers to a job: a version of a model group, or of the learner of the whole team (mappo, happo, mixers)."""

    STAGE: ClassVar[str] = "train"

    model: ModelVersionRef | None
    """None where there was nothing to learn from."""
    reason: str
    """Why there is no new version; empty where there is one."""
    metrics: Mapping[str, float]
    """`train/<name>`."""
    agents: AgentFigures
    parts: TrainParts | None = None
    """When the trainer did what; None where it did nothing in this attempt, because an earlier one had committed the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(TrainAnswer):
    """The version of one model group after training."""

    model: ModelVersionRef
    """The new version; the parent where nothing was trained."""
    is_failed: bool = False
    """True where training failed for good and `promote.on_failed_group: keep_parent` lets the other model groups go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTeam(StageResult):
    """The learner of the whole team and every model group after training; one stage for all of them."""

    STAGE: ClassVar[str] = "train"

    order: tuple[str, ...]
    """Model groups in the order in which they were updated."""
    team: TrainAnswer
    model_groups: Mapping[str, Trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced(StageResult):
    """The versions that the engines serve."""

    STAGE: ClassVar[str] = "sync"

    policy_versions: Mapping[str, int]
    """By model group."""
    proofs: tuple[Mapping[str, Any], ...]
    """What each replica answered, see `serve_apps.policy.proof.Proof`."""
    seconds: float
    """How long the swap of the weights took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamScore(Record):
    """How well a team solved a set of tasks."""

    policy_versions: Mapping[str, int]
    """By model group."""
    accuracy: float
    """Mean over tasks of the mean outcome of their episodes (avg@k)."""
    ci95: tuple[float, float]
    """Two-sided 95% interval of `accuracy`."""
    num_tasks: int
    num_failed: int
    """Episodes that do not count: infrastructure or author caused their failure, or another version had a part in them."""
    k: int
    """Episodes per task."""
    pass_at_k: float | None
    """Share of tasks with at least one solved episode; None where episodes failed."""
    ok_share: float
    """Share of episodes with status ok."""
    agents: AgentFigures
    sources: Mapping[str, float]
    """Accuracy by data set."""
    traces: TracesRef
    causes: Mapping[str, int] | None = None
    """Number of episodes by `Cause` of their failure, `sound` for none."""
    solved: float | None = None
    """Mean over tasks of the share of their episodes with an outcome of 1: of graded outcomes, those that passed everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain(Record):
    """The paired difference candidate minus champion and its confidence interval."""

    mean: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(StageResult):
    """The comparison of an iteration's versions with the champion, and the gate's verdict."""

    STAGE: ClassVar[str] = "evaluate"
    BESIDE: ClassVar[str] = "candidate"

    verdict: str
    """`promote`, `reject`, `inconclusive` or `skipped`."""
    condition: str
    """The condition that decided, in words, with the numbers."""
    promotes: tuple[str, ...] = ()
    """Model groups whose new versions are promoted; the others stay the champion's."""
    skipped: str | None = None
    """Why no episode was played; None where some were."""
    failed_groups: Mapping[str, str] | None = None
    """By model group that kept its parent because training failed, why."""
    candidate: TeamScore | None = None
    champion: TeamScore | None = None
    """None where candidate and champion are the same versions, or nothing was played."""
    promoted: TeamScore | None = None
    """With cross-play, the team that is promoted, where it is not the candidate as a whole."""
    gain: Gain | None = None
    """Over the tasks that both teams have an outcome for."""
    bound: Gain | None = None
    """Over all tasks, each missing episode lost by the candidate or won by the champion; the gate decides by its lower end."""
    guards: Mapping[str, Mapping[str, Any]] | None = None
    """By guard: the interval (`mean`, `low`, `high`, `num_tasks`), its `limit` and `state`."""
    contenders: tuple[Mapping[str, Any], ...] | None = None
    """Every team that met the champion: its new `groups`, `verdict`, `condition` and `gain`."""
    num_looks: int | None = None
    """How often the gate was asked."""
    num_unpaired: int | None = None
    """Tasks that not both teams have an outcome for."""
    num_missing: Mapping[str, int] | None = None
    """Episodes without an outcome, of the `candidate` and of the `champion`."""
    margin_spent: float | None = None
    """What a promotion leaves spent of `promote.non_inferiority`; None where nothing is promoted, or no margin is set."""
    sampling_seconds: float = 0.0
    """Of all teams together."""
    num_tokens: int = 0
    """Completion tokens of all teams together."""

    @property
    def registered(self) -> TeamScore | None:
        """The score of the team that `promote` registers."""
        return self.promoted or self.candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(StageResult):
    """What the evaluation led to."""

    STAGE: ClassVar[str] = "promote"

    verdict: str
    """`promote`, `reject`, `inconclusive` or `skipped`; a canary may have turned the gate's `promote` into another one."""
    condition: str
    team_version: int | None
    """The registered team version; None where nothing was registered and there is no champion to name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(Record):
    """How one agent did alone on the test tasks, with as many completion tokens as the team."""

    agent: str
    budget_tokens: float
    """Mean completion tokens of the team's episodes."""
    num_tokens: float
    """Mean completion tokens of its own episodes: a little more, since its last answer is not cut."""
    num_answers: float
    """Mean number of answers per episode, of which the majority counts."""
    score: TeamScore
    outcomes: Mapping[str, tuple[float, ...]]
    """By task id, the outcome of each of its episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(StageResult):
    """How a team did on the test tasks, which neither training nor the gate sees."""

    STAGE: ClassVar[str] = "measure"
    BESIDE: ClassVar[str] = "score"

    score: TeamScore
    iteration: int
    outcomes: Mapping[str, tuple[float, ...]]
    """By task id, the outcome of each of its episodes."""
    sampling_seconds: float
    num_tokens: int
    families: Mapping[str, str] = field(default_factory=dict)
    """By task id, the family of each task that names one."""
    control: Control | None = None
    """None where the config has no `evaluate.control`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStarted(StageResult):
    """Version 0 of every model group."""

    STAGE: ClassVar[str] = "warmstart"

    models: Mapping[str, ModelVersionRef]
    metrics: Mapping[str, float]


KINDS: tuple[type[StageResult], ...] = (Collected, Scored, Trained, Synced, Evaluated, Decided, Measured, WarmStarted)


def result_of(stage: str, ref: Mapping[str, Any]) -> StageResult | None:
    """The record of what the journal holds of a stage; None for a stage whose result is kept as bare JSON (`record`)."""
    if "model_groups" in ref and stage == Trained.STAGE:
        return TrainedTeam.from_json(ref)
    kind = next((kind for kind in KINDS if stage == kind.STAGE), None)
    return None if kind is None else kind.from_json(ref)
