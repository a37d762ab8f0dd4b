"""warnings_table: the warnings of a run's iterations -> rows for the page, and lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.monitoring.training_warnings import TrainingWarning


def newest_first(warnings: Sequence[TrainingWarning]) -> list[TrainingWarning]:
    """The warnings in the order of the page's table; those of one iteration stay in theirs."""
    return sorted(warnings, key=lambda warning: -warning.iteration)


def warning_lines(row: Mapping[str, Any]) -> list[str]:
    """The warnings of one iteration, a line each."""
    return [f"! {warning}" for warning in row.get("warnings") or ()]
