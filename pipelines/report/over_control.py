"""over_control: the measurement of a team and of its control -> how much better the team is with the same tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipelines.evaluation.statistics import Interval, paired_interval
from pipelines.run.run import Run
from stores.journal.stage_results import Measured


def team_over_control(run: Run, measured: Measured) -> dict[str, Any] | None:
    """What report.json says of a control: the paired difference team minus control on the tasks that both have."""
    control = measured.control
    if control is None:
        return None
    gain: Interval | None = None
    if both := sorted(measured.outcomes.keys() & control.outcomes.keys()):
        gain = paired_interval(
            {task: list(measured.outcomes[task]) for task in both},
            {task: list(control.outcomes[task]) for task in both},
            families=measured.families,
            seed=run.config.seed,
            num_samples=run.config.evaluate.bootstrap_samples,
        )
    return {
        "agent": control.agent,
        "accuracy": control.score.accuracy,
        "ci95": list(control.score.ci95),
        "num_tasks": control.score.num_tasks,
        "tokens_of_team": control.budget_tokens,
        "tokens": control.num_tokens,
        "answers": control.num_answers,
        "team_minus_control": None if gain is None else asdict(gain),
    }
