"""form_of_gain: the stored test episodes before and after training -> what form and substance have in the gain."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipelines.evaluation.form import Judged, is_well_formed, split_gain
from pipelines.run.run import Run
from stores.journal.stage_results import Measured


def form_of_gain(run: Run) -> dict[str, Any] | None:
    """The split of `pipelines.evaluation.form` as report.json has it; None before both measurements are there.

    Keys: `before` and `after` (the fields of `FormShare`), `gain`, `form` and `substance` with their intervals. The episodes
    are those that count in the accuracy, scored by the run's present credit rule.
    """
    before, after = (run.iteration(number).find(Measured) for number in (0, run.config.iterations))
    if before is None or after is None:
        return None
    split = split_gain(
        _judged(run, before),
        _judged(run, after),
        families=after.families,
        seed=run.config.seed,
        num_samples=run.config.evaluate.bootstrap_samples,
    )
    if split is None:
        return None
    return {
        "method": "Kitagawa 1955",
        "before": asdict(split.before),
        "after": asdict(split.after),
        "gain": split.gain,
        **{name: part.mean for name, part in (("form", split.form), ("substance", split.substance))},
        **{f"{name}_ci95": part.ci95 for name, part in (("form", split.form), ("substance", split.substance))},
    }


def _judged(run: Run, measured: Measured) -> dict[str, list[Judged]]:
    """By task id, the episodes of a measurement that have an outcome."""
    traces = [t for t in run.traces.read_traces(measured.score.traces) if t.is_outcome and not t.is_version_mixed]
    keys = [{"episode_id": t.episode_id, "run_id": t.run_id, "iteration": t.iteration} for t in traces]
    outcomes = run.traces.outcomes_of(keys)
    judged: dict[str, list[Judged]] = {}
    for trace in traces:
        outcome = outcomes.get(trace.episode_id, {}).get(run.credit_version)
        if outcome is not None:
            found = Judged(is_well_formed=is_well_formed(trace), outcome=outcome)
            judged.setdefault(trace.task.task_id, []).append(found)
    return judged
