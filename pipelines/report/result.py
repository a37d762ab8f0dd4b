"""result: what a run has come to -> report.json: accuracy before and after, the gain, the control, and the figures that it rests on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipelines.evaluation.statistics import Families, Interval, Resampling, paired_interval
from pipelines.report.summaries import SoFar
from pipelines.report.summary import repeated_calls, wall_seconds
from pipelines.run.champions import champion_version
from pipelines.run.run import Run
from pipelines.stages.promote import git_commit
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Measured, WarmStarted

TaskOutcomes = Mapping[str, Sequence[float]]


def run_report(run: Run, so_far: SoFar, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """report.json: the run's result with the figures it rests on; null for what was not measured.

    Args: rows: the figures of the iterations that are drawn, see `ReportData.iterations`; the last is the latest.
    """
    before, after = run.iteration(0).find(Measured), run.iteration(run.config.iterations).find(Measured)
    delta = _delta(run, before, after)
    last: Mapping[str, Any] = rows[-1] if rows else {}
    return {
        "run": run.run_id,
        "workflow": run.config.workflow.path,
        "algorithm": {group: run.config.train_config(group).algorithm for group in run.config.model_groups},
        "model_groups": {group: list(settings.agents) for group, settings in run.config.model_groups.items()},
        "seed": run.config.seed,
        "before": _measured(before),
        "after": _measured(after),
        "delta": delta.mean if delta else None,
        "delta_ci95": delta.ci95 if delta else None,
        "control": {
            name: team_over_control(run, measured)
            for name, measured in (("before", before), ("after", after))
            if measured is not None and measured.control is not None
        },
        "iterations": so_far.num_iterations,
        "seconds": _seconds_of_run(run, so_far.seconds),
        "overhead_share": [row["metrics"].get("overhead_share") for row in rows],
        "logprob_gap": {"mean": so_far.gap_sum / so_far.num_gaps if so_far.num_gaps else None, "max": so_far.gap_max},
        "sync_seconds": so_far.sync_seconds,
        "failed_groups": so_far.failed_groups,
        "warnings": [str(warning) for warning in so_far.shown_warnings()],
        "num_warnings": so_far.num_warnings,
        "agents": last.get("agents", {}),
        "funnel": last.get("funnel", {}),
        "versions": last.get("versions", {}),
        "team_version": champion_version(run),
        "commit": last.get("commit") or git_commit(),
        "cores": os.cpu_count(),
        "written_at": time.time(),
    }


def _delta(run: Run, before: Measured | None, after: Measured | None) -> Interval | None:
    """The paired gain on the test tasks that both measurements have; None before both are there."""
    if before is None or after is None:
        return None
    return _paired(run, after.outcomes, before.outcomes, after.families)


def team_over_control(run: Run, measured: Measured) -> dict[str, Any] | None:
    """What report.json says of a control: the paired difference team minus control on the tasks that both have."""
    control = measured.control
    if control is None:
        return None
    gain = _paired(run, measured.outcomes, control.outcomes, measured.families)
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


def _paired(run: Run, first: TaskOutcomes, second: TaskOutcomes, families: Families) -> Interval | None:
    """The interval of first less second; None where they have no task in common."""
    both = sorted(first.keys() & second.keys())
    if not both:
        return None
    return paired_interval(
        {task: list(first[task]) for task in both},
        {task: list(second[task]) for task in both},
        Resampling.of(run.config, families),
    )


def _seconds_of_run(run: Run, by_stage: Mapping[str, float]) -> dict[str, float | None]:
    """By stage over all iterations; `iterations` is their total, `total` the wall time of the run."""
    totals = dict(by_stage)
    iterations = totals.pop("total", 0.0)
    begun = [row for row in run.journal.stages(run.run_id, 0) if row.stage == WarmStarted.STAGE]
    return {
        **totals,
        "warmstart": begun[0].seconds if begun else None,
        "iterations": iterations,
        "total": max(wall_seconds(run, RunValue.WALL, iterations), iterations),
    }


def _measured(measured: Measured | None) -> dict[str, Any] | None:
    if measured is None:
        return None
    score = measured.score
    return {
        "accuracy": score.accuracy,
        "num_tasks": score.num_tasks,
        "ci95": list(score.ci95),
        "policy_versions": dict(score.policy_versions),
        "k": score.k,
        "solved": score.solved,
        "pass_at_k": score.pass_at_k,
        "num_failed": score.num_failed,
        "ok_share": score.ok_share,
        "repeated": repeated_calls(score.agents),
        "sources": dict(score.sources),
        "format_share": {agent: figures["format_share"] for agent, figures in score.agents.items()},
    }
