"""measure: a team -> its accuracy on the test tasks, and that of the control, where there is one."""

from __future__ import annotations

from pipelines.episodes.sampling import Progress
from pipelines.evaluation.control import play_control
from pipelines.evaluation.played import play_team
from pipelines.evaluation.teams import Models
from pipelines.run.run import Run
from stores.journal.stage_results import Measured
from stores.types import Purpose


def measure_on_test_tasks(run: Run, models: Models, *, iteration: int, progress: Progress | None = None) -> Measured:
    """Scores a team on the test tasks, which neither training nor the gate sees: the reported before and after; beside it the control."""
    played = play_team(run, models, run.tasks("test"), iteration=0, purpose=Purpose.TEST, progress=progress)
    return Measured(
        score=played.score(run),
        iteration=iteration,
        outcomes={task: tuple(outcomes) for task, outcomes in played.outcomes.items()},
        sampling_seconds=played.sampled.sampling_seconds,
        num_tokens=played.sampled.num_tokens,
        families=played.families,
        control=play_control(run, played, progress=progress),
    )
