"""iteration: a run's journal + a number -> what the stages of that iteration have left, as records.

    run.iteration(3).collected        Collected, or NotDone: "iteration 3 of run 'demo' needs collect, which is not done: run ..."
    run.iteration(3).find(Collected)  Collected, or None

Nothing is cached: each access reads the journal, so that what another process finishes is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

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
from train_loops.config import TEAM

if TYPE_CHECKING:
    from stores.journal.journal import Journal

R = TypeVar("R", bound=StageResult)


class NotDone(ValueError):
    """A stage whose result is needed is not done."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a run: reads what its stages have left in the journal."""

    journal: Journal
    run_id: str
    number: int
    """From 1; 0 is what comes before training."""
    model_groups: Sequence[str]
    is_team_trained: bool = False
    """True where one train stage trains all model groups (mappo, happo, mixers)."""
    needed_by: str = ""
    """The stage that reads the others, for messages."""

    def find(self, kind: type[R], model_group: str = "") -> R | None:
        """The result of this kind; None where its stage is not done."""
        from stores.journal.journal import StageKey

        ref = self.journal.ref(StageKey(self.run_id, self.number, kind.STAGE, model_group))
        try:
            return None if ref is None else kind.from_json(ref)
        except ValueError as error:
            place = f"iteration {self.number} of run {self.run_id!r} in {self.journal.shown_url}"
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
                self._fail(Trained.STAGE, TEAM if self.is_team_trained else group)
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

    def _need(self, kind: type[R]) -> R:
        result = self.find(kind)
        if result is None:
            self._fail(kind.STAGE)
        return result

    def _fail(self, stage: str, model_group: str = "") -> NoReturn:
        group = f" --model-group {model_group}" if model_group else ""
        of_group = f" of model group {model_group!r}" if model_group else ""
        who = f"{self.needed_by} of iteration {self.number}" if self.needed_by else f"iteration {self.number}"
        raise NotDone(
            f"{who} of run {self.run_id!r} needs {stage}{of_group}, which is not done: run "
            f"`troupe stage {stage} --run {self.run_id} --iteration {self.number}{group}` first"
        )
