"""table: the six stages of an iteration, what each of them reads, and in which order they use the engines.

    W(k)                        what iteration k leaves; W(0) is version 0
    P(k) = W(k-1)               what it trains from; after a rejection with `on_reject: champion` the champion
    S(k) = P(max(1, k - lag))   what samples it

    lag 0   collect 1 | sync 1, evaluate 1, promote 1 | collect 2 | sync 2, evaluate 2, promote 2 | collect 3 ...
    lag 1   collect 1, collect 2 | sync 1, evaluate 1, promote 1 | collect 3 | sync 2, evaluate 2, promote 2 | collect 4 ...
               train 1 begins ──┘  train 2 begins ────────────────┘

What a run makes follows from S and P alone, which are numbers. The order only spares swaps of weights: between two collects the engines
take the new version and meet the champion, and keep what evaluate leaves, unless a rejection goes back to the champion.

Light: the module of a stage, which bears its name, is imported to do its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from stores.journal.stage_results import (
    Collected,
    Decided,
    Evaluated,
    Scored,
    StageResult,
    Synced,
    Trained,
    TrainedTeam,
)

if TYPE_CHECKING:
    from pipelines.config.run_config import RunConfig
    from pipelines.episodes.sampling import Progress
    from pipelines.run.iteration import Iteration
    from pipelines.run.run import Run
    from stores.journal.journal import Lease


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A stage of an iteration, for all its model groups."""

    iteration: int
    stage: str

    def __str__(self) -> str:
        return f"{self.stage} of iteration {self.iteration}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCall:
    """What a stage's work is given."""

    run: Run
    """Config, stores and the user's code; what is done is read from `iteration`."""
    iteration: Iteration
    """As it was when the stage began."""
    model_group: str = ""
    """Empty unless the stage is done per model group."""
    lease: Lease
    progress: Progress | None = None

    def skip(self, reason: str) -> None:
        """Says to who watches that there is nothing to do, and why."""
        if self.progress is not None:
            self.progress(0, 0, f"skipped: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the loop."""

    name: str
    result: type[StageResult]
    reads: tuple[str, ...] = ()
    """Stages of its own iteration whose results it reads."""
    reads_before: tuple[str, ...] = ()
    """Stages of the iteration before."""
    num_before: Callable[[Run], int] = lambda run: 1
    """How many iterations before it reads; it goes on as far as the last one in which `reads_before` are done."""
    versions: Literal["", "samplers", "parents", "trained"] = ""
    """The model versions that it starts from: see the head of this file."""
    handed_on: tuple[str, ...]
    """Keys of the result that whoever follows the stage's job gets; the journal keeps all of it."""
    changes_engines: bool = False
    """True where the stage says which versions the engines serve: nobody else may change them meanwhile."""
    needs_cluster: Callable[[RunConfig], bool] = lambda config: True
    is_per_model_group: bool = False
    """True where there is one call for each of `RunConfig.train_tasks`."""
    own_timeout_s: Callable[[RunConfig, str], float]
    """Deadline of the stage's own work by run config and model group, from when it begins."""
    extra_s: Callable[[RunConfig], float] = lambda config: 0.0
    """How much longer it may take because it waits for production traffic."""

    def work(self, call: StageCall) -> StageResult:
        """Does the stage: the function of its name in the module of its name."""
        result: StageResult = getattr(self._module, self.name)(call)
        return result

    def recover(self, run: Run, model_group: str) -> None:
        """Ends what hangs and would outlive the stage, so that a repetition starts with a new one; by `recover` of its module.

        A hung replica needs nothing: Serve's health checks replace it.
        """
        if (recover := getattr(self._module, "recover", None)) is not None:
            recover(run, model_group)

    @property
    def _module(self) -> ModuleType:
        return import_module(f"pipelines.stages.{self.name}")

    def timeout_s(self, config: RunConfig, model_group: str = "") -> float:
        """Deadline of the stage, from when it begins to work."""
        return self.own_timeout_s(config, model_group) + self.extra_s(config)

    def job_timeout_s(self, config: RunConfig, timeout_s: float) -> float:
        """Deadline of a Ray job that does this stage alone, from its submission, where most jobs have `timeout_s`.

        With overlap it may wait for such a stage of an earlier iteration, or do it.
        """
        return timeout_s * (1 + config.loop.max_lag) + self.extra_s(config)

    def groups(self, config: RunConfig) -> tuple[str, ...]:
        """The model groups that have a call of their own; one empty name where it is done for all at once."""
        return tuple(config.train_tasks) if self.is_per_model_group else ("",)

    def check_model_group(self, config: RunConfig, model_group: str) -> None:
        """ValueError where a model group is missing, unknown, or given to a stage that is done for all at once."""
        if model_group in self.groups(config):
            return
        if model_group and not self.is_per_model_group:
            raise ValueError(f"stage {self.name} is done for all model groups at once: drop --model-group")
        known = ", ".join(config.train_tasks)
        raise ValueError(f"stage {self.name} needs --model-group, one of {known} (got {model_group!r})")

    def parse(self, ref: Mapping[str, Any]) -> StageResult:
        """The record of what the journal holds of this stage."""
        return (TrainedTeam if "model_groups" in ref and self.result is Trained else self.result).from_json(ref)

    def hand_on(self, ref: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a result, as the journal holds it, that whoever follows the stage's job gets."""
        return {key: ref[key] for key in self.handed_on if key in ref}


def stage_named(name: str) -> Stage:
    """The stage of this name; ValueError for an unknown one."""
    if name not in STAGES:
        raise ValueError(f"unknown stage {name!r}: one of {', '.join(STAGES)}")
    return STAGES[name]


def needs(config: RunConfig, step: Step) -> list[Step]:
    """Returns the steps whose results a step reads. They are of earlier iterations, or earlier in its own."""
    stage, k = STAGES[step.stage], step.iteration
    needed = [Step(k, name) for name in stage.reads] + [Step(k - 1, name) for name in stage.reads_before]
    if stage.versions in ("samplers", "parents"):
        first = config.loop.sampler_of(k) if stage.versions == "samplers" else k
        ends = (Trained.STAGE, Decided.STAGE) if config.promote.on_reject == "champion" else (Trained.STAGE,)
        needed += [Step(first - 1, name) for name in ends]
    return [need for need in needed if need.iteration > 0]


def engine_order(iterations: int, max_lag: int) -> Iterator[Step]:
    """Yields the stages that use the engines, in their order, from the first to the last iteration."""
    for iteration in range(1, min(1 + max_lag, iterations) + 1):
        yield Step(iteration, Collected.STAGE)
    for iteration in range(1, iterations + 1):
        for stage in (Synced.STAGE, Evaluated.STAGE, Decided.STAGE):
            yield Step(iteration, stage)
        if iteration + max_lag + 1 <= iterations:
            yield Step(iteration + max_lag + 1, Collected.STAGE)


def _train_timeout_s(config: RunConfig, model_group: str) -> float:
    groups = [model_group] if model_group in config.model_groups else config.model_groups
    return sum(config.train_config(group).stage_timeout_s for group in groups)


STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="collect",
            result=Collected,
            reads_before=("collect",),  # which tasks it carried over, which served episodes it took
            versions="samplers",
            handed_on=("traces", "num_tokens"),
            changes_engines=True,
            own_timeout_s=lambda config, _: config.collect.stage_timeout_s,
        ),
        Stage(
            name="score",
            result=Scored,
            reads=("collect",),
            reads_before=("score",),  # the multiplier of `cost` and inferred credit go on from it
            num_before=lambda run: getattr(run.credit, "past_iterations", 1),
            handed_on=("rewards", "outcome"),
            needs_cluster=lambda config: False,
            own_timeout_s=lambda config, _: config.score.stage_timeout_s,
        ),
        Stage(
            name="train",
            result=Trained,
            reads=("collect", "score"),
            versions="parents",
            handed_on=("model", "reason"),
            is_per_model_group=True,
            own_timeout_s=_train_timeout_s,
        ),
        Stage(
            name="sync",
            result=Synced,
            reads=("train",),
            versions="trained",
            handed_on=("policy_versions", "seconds"),
            changes_engines=True,
            own_timeout_s=lambda config, _: config.sync.stage_timeout_s,
        ),
        Stage(
            name="evaluate",
            result=Evaluated,
            reads=("train", "sync"),
            reads_before=("promote",),  # it says who the champion is
            versions="trained",
            handed_on=("verdict", "condition", "accuracy", "num_tasks"),
            changes_engines=True,
            own_timeout_s=lambda config, _: config.evaluate.stage_timeout_s,
        ),
        Stage(
            name="promote",
            result=Decided,
            reads=("train", "evaluate"),
            versions="trained",
            handed_on=("verdict", "condition", "team_version"),
            needs_cluster=lambda config: config.promote.deploy != "never",
            own_timeout_s=lambda config, _: config.promote.stage_timeout_s,
            extra_s=lambda config: config.canary_timeout_s if config.promote.deploy == "canary" else 0.0,
        ),
    )
}
"""By name, in the order of the loop."""
