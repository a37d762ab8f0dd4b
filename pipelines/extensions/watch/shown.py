"""shown: an iteration -> its check in MLflow and the journal, from where observers get it; the latest checks -> a section of the report."""

from __future__ import annotations

from pathlib import Path

from pipelines.extensions.watch.watching import (
    CHAMPION,
    ITERATION,
    check_iteration,
    check_metrics,
    check_tags,
)
from pipelines.report.page import section
from pipelines.report.parts import Found, Part
from pipelines.run.run import Run
from stores.journal.run_values import RunValue

TEMPLATE = Path(__file__).with_name("watch.html.jinja")


def found(run: Run, iteration: int, *, at: float) -> Found:
    """Checks the training episodes of an iteration. The whole check is the result: whoever connects to Ray next tells Prometheus of it."""
    check = check_iteration(run, iteration, at=at)
    return Found(metrics=check_metrics(check), tags=check_tags(check), result=check)


def part(run: Run, last: int) -> Part | None:
    """Returns the section on the latest check of each kind; None where there was none."""
    latest = {kind: run.journal.value(run.run_id, RunValue.WATCH_LATEST.of(kind)) for kind in (ITERATION, CHAMPION)}
    checks = {kind: check for kind, check in latest.items() if check is not None}
    return Part(html=section(TEMPLATE, checks=checks)) if checks else None
