"""iteration: what the stages of an iteration have left, read once, as records.

    run.iteration(3).collected        Collected, or NotDone: "iteration 3 of run 'demo' needs collect, which is not done: run ..."
    run.iteration(3).find(Collected)  Collected, or None

What another process finishes later is not seen: whoever waits for it reads the iteration again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from stores.journal.stage_results import (
    Collected,
    Decided,
    Evaluated,
    Scored,
    StageResult,
    Synced,
    TracesSource,
    Trained,
    TrainedTeam,
)
from stores.types import ModelVersionRef
from train_loops.config import TEAM

R = TypeVar("R", bound=StageResult)


class NotDone(ValueError):
    """A stage whose result is needed is not done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration of a run as it was when it was read; a stage is given it as it was when the stage began."""

    run_id: str
    number: int
    """From 1; 0 is what comes before training."""
    results: Mapping[tuple[str, str], Mapping[str, Any]]
    """Of every stage that was done, by its name and model group, what the journal holds."""
    journal: str
    """URL of the journal, for messages."""
    model_groups: Sequence[str]
    is_team_trained: bool = False
    """True where one train stage trains all model groups (mappo, happo, mixers)."""
    needed_by: str = ""
    """The stage that reads the others, for messages."""
    before: Sequence[Iteration] = ()
    """For a stage: the iterations before this one that it reads, the last one first."""
    models: Mapping[str, ModelVersionRef] = field(default_factory=dict)
    """For a stage: the versions that it starts from, by model group; see `Stage.versions`."""
    source: TracesSource | None = None
    """For a stage: where the iteration has its traces from; None if it samples them itself."""

    def find(self, kind: type[R], model_group: str = "") -> R | None:
        """The result of this kind; None where its stage was not done."""
        ref = self.results.get((kind.STAGE, model_group))
        try:
            return None if ref is None else kind.from_json(ref)
        except ValueError as error:
            place = f"iteration {self.number} of run {self.run_id!r} in {self.journal}"
            raise ValueError(f"{place}: {error}") from None

    @property
    def collected(self) -> Collected:
        """Reads what `collect` of this iteration recorded; raises NotDone before it is done."""
        return self._need(Collected)

    @property
    def scored(self) -> Scored:
        """Reads what `score` of this iteration recorded; raises NotDone before it is done."""
        return self._need(Scored)

    @property
    def trained(self) -> dict[str, Trained]:
        """Reads what `train` recorded, by model group; raises NotDone before every group is done."""
        trained = self.find_trained()
        for group in self.model_groups:
            if group not in trained:
                self.fail(Trained.STAGE, TEAM if self.is_team_trained else group)
        return trained

    @property
    def synced(self) -> Synced:
        """Reads what `sync` of this iteration recorded; raises NotDone before it is done."""
        return self._need(Synced)

    @property
    def evaluated(self) -> Evaluated:
        """Reads what `evaluate` of this iteration recorded; raises NotDone before it is done."""
        return self._need(Evaluated)

    @property
    def decided(self) -> Decided:
        """Reads what `promote` of this iteration recorded; raises NotDone before it is done."""
        return self._need(Decided)

    def find_trained(self) -> dict[str, Trained]:
        """By model group whose training is done, what it left, whether each was trained by itself or with the team."""
        if self.is_team_trained:
            team = self.find_team()
            return {} if team is None else dict(team.model_groups)
        results = {group: self.find(Trained, group) for group in self.model_groups}
        return {group: result for group, result in results.items() if result is not None}

    def find_team(self) -> TrainedTeam | None:
        """What the one train stage of a whole team left; None where it is not done, or every model group has its own."""
        return self.find(TrainedTeam, TEAM) if self.is_team_trained else None

    @property
    def failed_groups(self) -> Mapping[str, str]:
        """Model groups that kept their parent because training failed, and why (`promote.on_failed_group: keep_parent`)."""
        return {group: result.reason for group, result in self.find_trained().items() if result.is_failed}

    def has(self, stage: str) -> bool:
        """Whether a stage was done, of train at least one."""
        return any(name == stage for name, _ in self.results)

    def require(self, stage: str) -> None:
        """Raises NotDone unless a stage is done, for every model group."""
        if stage == Trained.STAGE:
            _ = self.trained
        elif not self.has(stage):
            self.fail(stage)

    def fail(self, stage: str, model_group: str = "") -> NoReturn:
        """Raises NotDone for a stage, with the command that does it."""
        group = f" --model-group {model_group}" if model_group else ""
        of_group = f" of model group {model_group!r}" if model_group else ""
        who = f"{self.needed_by} of iteration {self.number}" if self.needed_by else f"iteration {self.number}"
        raise NotDone(
            f"{who} of run {self.run_id!r} needs {stage}{of_group}, which is not done: run "
            f"`troupe stage {stage} --run {self.run_id} --iteration {self.number}{group}` first"
        )

    def _need(self, kind: type[R]) -> R:
        result = self.find(kind)
        if result is None:
            self.fail(kind.STAGE)
        return result
