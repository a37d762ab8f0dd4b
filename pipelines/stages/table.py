"""table: the six stages of an iteration, and what each of them needs. Light: a stage's own module is imported to do its work.

STAGES["train"].timeout_s(config, "solver"), .recover(run, "solver"), .work(StageCall(...)), .hand_on(ref)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    from pipelines.run.run import Run
    from stores.journal.journal import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCall:
    """What a stage's work is given."""

    run: Run
    iteration: int
    model_group: str
    """Empty unless the stage is done per model group."""
    lease: Lease
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the loop."""

    name: str
    work: Callable[[StageCall], StageResult]
    result: type[StageResult]
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
    recover: Callable[[Run, str], None] = lambda run, model_group: None
    """Ends what hangs and would outlive the stage, so that a repetition starts with a new one.

    A hung replica needs nothing: Serve's health checks replace it.
    """

    def timeout_s(self, config: RunConfig, model_group: str = "") -> float:
        """Deadline of the stage, from when it begins to work."""
        return self.own_timeout_s(config, model_group) + self.extra_s(config)

    def job_timeout_s(self, config: RunConfig, timeout_s: float) -> float:
        """Deadline of a Ray job that does this stage alone, from its submission, where most jobs have `timeout_s`.

        With overlap it may wait for such a stage of an earlier iteration, or do it.
        """
        return timeout_s * (1 + config.loop.max_lag) + self.extra_s(config)

    def check_model_group(self, config: RunConfig, model_group: str) -> None:
        """ValueError where a model group is missing, unknown, or given to a stage that is done for all at once."""
        if self.is_per_model_group and model_group not in config.train_tasks:
            known = ", ".join(config.train_tasks)
            raise ValueError(f"stage {self.name} needs --model-group, one of {known} (got {model_group!r})")
        if model_group and not self.is_per_model_group:
            raise ValueError(f"stage {self.name} is done for all model groups at once: drop --model-group")

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


def _collect(call: StageCall) -> StageResult:
    from pipelines.stages.collect import collect

    return collect(call.run, call.iteration, progress=call.progress)


def _score(call: StageCall) -> StageResult:
    from pipelines.stages.score import score

    return score(call.run, call.iteration)


def _train(call: StageCall) -> StageResult:
    from pipelines.stages.train import train, train_team

    attempt = str(call.lease.token)
    if call.run.config.team_config is not None:
        return train_team(call.run, call.iteration, attempt=attempt)
    return train(call.run, call.iteration, call.model_group, attempt=attempt)


def _sync(call: StageCall) -> StageResult:
    from pipelines.stages.sync import sync

    return sync(call.run, call.iteration, call.lease)


def _evaluate(call: StageCall) -> StageResult:
    from pipelines.stages.evaluate import evaluate

    return evaluate(call.run, call.iteration, progress=call.progress)


def _promote(call: StageCall) -> StageResult:
    from pipelines.stages.promote import promote

    return promote(call.run, call.iteration, call.lease)


def _end_collectors(run: Run, model_group: str) -> None:
    from pipelines.episodes.collector import end_collectors

    end_collectors()


def _end_trainers(run: Run, model_group: str) -> None:
    from pipelines.stages.train import trainer_of

    for group in [model_group] if model_group in run.config.model_groups else run.config.model_groups:
        trainer_of(run, group).stop()


def _train_timeout_s(config: RunConfig, model_group: str) -> float:
    groups = [model_group] if model_group in config.model_groups else config.model_groups
    return sum(config.train_config(group).stage_timeout_s for group in groups)


def _canary_s(config: RunConfig) -> float:
    return config.canary_timeout_s if config.promote.deploy == "canary" else 0.0


STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="collect",
            work=_collect,
            result=Collected,
            handed_on=("traces", "num_tokens"),
            changes_engines=True,
            own_timeout_s=lambda config, _: config.collect.stage_timeout_s,
            recover=_end_collectors,
        ),
        Stage(
            name="score",
            work=_score,
            result=Scored,
            handed_on=("rewards", "outcome"),
            needs_cluster=lambda config: False,
            own_timeout_s=lambda config, _: config.score.stage_timeout_s,
        ),
        Stage(
            name="train",
            work=_train,
            result=Trained,
            handed_on=("model", "reason"),
            is_per_model_group=True,
            own_timeout_s=_train_timeout_s,
            recover=_end_trainers,
        ),
        Stage(
            name="sync",
            work=_sync,
            result=Synced,
            handed_on=("policy_versions", "seconds"),
            changes_engines=True,
            own_timeout_s=lambda config, _: config.sync.stage_timeout_s,
        ),
        Stage(
            name="evaluate",
            work=_evaluate,
            result=Evaluated,
            handed_on=("verdict", "condition", "accuracy", "num_tasks"),
            changes_engines=True,
            own_timeout_s=lambda config, _: config.evaluate.stage_timeout_s,
            recover=_end_collectors,
        ),
        Stage(
            name="promote",
            work=_promote,
            result=Decided,
            handed_on=("verdict", "condition", "team_version"),
            needs_cluster=lambda config: config.promote.deploy != "never",
            own_timeout_s=lambda config, _: config.promote.stage_timeout_s,
            extra_s=_canary_s,
        ),
    )
}
"""By name, in the order of the loop."""
