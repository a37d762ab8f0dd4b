"""parts: what extensions add to the record and the report of a run.

an iteration whose stages are done ── Extension.records ──> Found: metrics and tags for MLflow, a result
a run ─────────────────────────────── Extension.reports ──> Part: a section, values, files, lines
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.run.run import Run
from stores.extensions import hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an extension finds of an iteration when it is recorded."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    """JSON values, which whoever follows the job of `record` gets under the extension's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What an extension adds to a report."""

    html: str = ""
    """A section of the page, see `page.section`."""
    is_result: bool = False
    """The section stands below the headline, and not after those of training."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of report.json."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Content of files beside the page, by their names."""
    lines: Sequence[str] = ()
    """What the terminal says of it at the end of a run."""


def found_of(run: Run, iteration: int, *, at: float) -> dict[str, Found]:
    """Returns by extension what it finds of an iteration. Args: at: when its stages were done, Unix seconds."""
    return {name: hook(run, iteration, at=at) for name, hook in hooks("records").items()}


def parts_of(run: Run, last: int) -> list[Part]:
    """Returns what extensions say of a run. Args: last: its last finished iteration."""
    return [part for hook in hooks("reports").values() if (part := hook(run, last)) is not None]
