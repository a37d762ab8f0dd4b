"""watch_table: the latest drift checks of a team -> tables of metrics, each with its usual range and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

STATES = ("alarm", "sound", "learning")
"""States of a metric, in the order of the table's rows."""
TITLES = {"iteration": "Training episodes of the latest iteration", "champion": "The champion's latest window"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRow:
    """One metric of one source, its numbers as text; a dash stands for a number that is not known yet."""

    source: str
    figure: str
    now: str
    usual: str
    range: str
    num_windows: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTable:
    """The result of one kind of drift check."""

    title: str
    state: str
    time: str
    alarms: tuple[Mapping[str, Any], ...]
    """What alarms, as `what` and `try`."""
    waiting: Mapping[str, str]
    """How far each source is that has too few episodes for a window."""
    rows: tuple[WatchRow, ...]


def watch_tables(checks: Mapping[str, Mapping[str, Any] | None]) -> list[WatchTable]:
    """A table per kind of check that was made, alarms first. `checks` is as in `ReportData.checks`."""
    return [_table(TITLES[kind], check) for kind, check in checks.items() if check is not None]


def _table(title: str, check: Mapping[str, Any]) -> WatchTable:
    rows = [
        _row(source, name, judged) for source, figures in check["sources"].items() for name, judged in figures.items()
    ]
    return WatchTable(
        title=title,
        state=check["state"],
        time=datetime.fromtimestamp(check["at"], UTC).strftime("%Y-%m-%d %H:%M UTC"),
        alarms=tuple(check["alarms"]),
        waiting=check["waiting"],
        rows=tuple(sorted(rows, key=lambda row: STATES.index(row.state))),
    )


def _row(source: str, figure: str, judged: Mapping[str, Any]) -> WatchRow:
    return WatchRow(
        source=source,
        figure=figure.replace("_", " "),
        now=f"{judged['now']:.3g}",
        usual="–" if judged["usual"] is None else f"{judged['usual']:.3g}",
        range=_range(judged["low"], judged["high"]),
        num_windows=judged["num_windows"],
        state=judged["state"],
    )


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low:.3g} to {high:.3g}"
    return f"at least {low:.3g}" if low is not None else f"at most {high:.3g}" if high is not None else "–"
