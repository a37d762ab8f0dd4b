"""so_far: the figures of one iteration after another -> what the report needs of all of them, in a size that is bounded.

Up to `MOST_DRAWN` iterations every one is drawn. Beyond, every fourth is, then every eighth and so on, so that between half of
`MOST_THINNED` and all of it are left; the first and the last always are, and of each line its highest and lowest value.
Evaluated iterations are counted apart from the others by the same rule. Sums, counts and maxima are over all iterations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipelines.monitoring.training_warnings import TrainingWarning
from pipelines.report.waits import Account

MOST_DRAWN = 200
MOST_THINNED = 100
MOST_EVENTS = 100
"""Warnings, failed trainings and the like that are listed, the latest ones; all are counted."""

Row = Mapping[str, Any]
Extremes = dict[str, dict[str, dict[str, list[list[float]]]]]
"""Part of a row -> agent or model group -> figure -> [[iteration, lowest value], [iteration, highest value]]."""


@dataclass(slots=True, kw_only=True)
class Drawn:
    """The iterations that are drawn: each `stride`-th that was added."""

    numbers: list[int] = field(default_factory=list)
    stride: int = 1
    num_added: int = 0

    def add(self, number: int) -> None:
        """Adds the next iteration."""
        if self.num_added % self.stride == 0:
            while len(self.numbers) >= (MOST_DRAWN if self.stride == 1 else MOST_THINNED):
                self.numbers = self.numbers[::2]
                self.stride *= 2
            if self.num_added % self.stride == 0:
                self.numbers.append(number)
        self.num_added += 1


@dataclass(slots=True, kw_only=True)
class SoFar:
    """What is known of iterations 1 to `last`; JSON values."""

    last: int = 0
    missing: list[int] = field(default_factory=list)
    """Iterations before `last` that were not finished when a later one was added."""
    drawn: Drawn = field(default_factory=Drawn)
    evaluated: Drawn = field(default_factory=Drawn)
    extremes: Extremes = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage, `total` included: seconds of all iterations."""
    time: Account = field(default_factory=Account)
    """Who worked in all iterations, and who waited for whom."""
    gap_sum: float = 0.0
    """Of the mean gap in logprobs between trainer and engine, over `num_gaps` trainings."""
    num_gaps: int = 0
    gap_max: float = 0.0
    sync_seconds: float = 0.0
    """The longest sync."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    num_warnings: int = 0
    keys_before: list[str] = field(default_factory=list)
    """Keys of the last iteration's warnings: one that stays is listed once."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """By kind, what a reader must know of single iterations: `source`, `failed`, `lost`."""
    failed_groups: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SoFar:
        """The inverse of `to_json`."""
        drawn = {name: Drawn(**data[name]) for name in ("drawn", "evaluated")}
        return cls(**{**data, **drawn, "time": Account.from_json(data["time"])})

    def to_json(self) -> dict[str, Any]:
        """Returns what the journal keeps, JSON values."""
        return asdict(self)

    @property
    def num_iterations(self) -> int:
        """Counts the finished iterations."""
        return self.drawn.num_added

    @property
    def is_thinned(self) -> bool:
        """Says whether not every iteration is drawn."""
        return self.drawn.stride > 1 or self.evaluated.stride > 1

    def add(self, row: Row) -> None:
        """Adds the figures of the next finished iteration, see `ReportData.iterations`, and its time, where it is known."""
        number = int(row["iteration"])
        self.time = self.time.plus(row.get("time") or Account())
        self.missing += range(self.last + 1, number)
        self.last = number
        self.drawn.add(number)
        if row.get("evaluation"):
            self.evaluated.add(number)
        for part, name, figure, value in _values(row):
            _widen(self.extremes.setdefault(part, {}).setdefault(name, {}), figure, number, value)
        for stage, seconds in row["seconds"].items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        for metrics in row["groups"].values():
            if "train/logprob_gap_mean" in metrics:
                self.gap_sum += metrics["train/logprob_gap_mean"]
                self.num_gaps += 1
                self.gap_max = max(self.gap_max, metrics["train/logprob_gap_max"])
        self.sync_seconds = max(self.sync_seconds, row["metrics"]["sync_seconds"])
        self._add_events(row)

    def shown_warnings(self) -> list[TrainingWarning]:
        """Returns the latest warnings, the oldest first."""
        return [TrainingWarning(**warning) for warning in self.warnings]

    def numbers_to_draw(self) -> list[int]:
        """Returns the iterations whose figures are drawn, in order."""
        last = [self.last] if self.last else []
        slowest = [int(number) for number, _ in self.extremes.get("seconds", {}).get("", {}).get("total", [])]
        return sorted({*self.drawn.numbers, *self.evaluated.numbers, *last, *slowest})

    def extreme_rows(self) -> list[dict[str, Any]]:
        """Returns rows that hold the highest and the lowest value of each line and nothing else; none while all are drawn."""
        if not self.is_thinned:
            return []
        rows: dict[int, dict[str, Any]] = {}
        is_drawn = set(self.numbers_to_draw())
        for part, name, figure, number, value in self._ends():
            if part != "seconds" and number not in is_drawn:
                of_part = rows.setdefault(number, {"iteration": number, "is_part": True}).setdefault(part, {})
                (of_part if part == "metrics" else of_part.setdefault(name, {}))[figure] = value
        return list(rows.values())

    def _ends(self) -> Iterator[tuple[str, str, str, int, float]]:
        """Yields (part, agent or model group, figure, iteration, value) of both ends of every line."""
        for part, names in self.extremes.items():
            for name, figures in names.items():
                for figure, ends in figures.items():
                    yield from ((part, name, figure, int(number), value) for number, value in ends)

    def _add_events(self, row: Row) -> None:
        number = int(row["iteration"])
        new = [w for w in row["warnings"] if w.key not in self.keys_before]
        self.warnings = [*self.warnings, *({**asdict(w)} for w in new)][-MOST_EVENTS:]
        self.num_warnings += len(new)
        self.keys_before = [w.key for w in row["warnings"]]
        if row["failed_groups"]:
            self.failed_groups[str(number)] = dict(row["failed_groups"])
            self.failed_groups = dict(list(self.failed_groups.items())[-MOST_EVENTS:])
        self._note("source", f"{number} ({row['source']})" if row["source"] else "")
        for group, reason in row["failed_groups"].items():
            kept = f"model group {group} kept version {row['versions'][group]}"
            self._note("failed", f"Iteration {number}: {kept}, {reason}")
        for group, metrics in row["groups"].items():
            self._note("lost", f"{number} ({group})" if metrics.get("train/is_state_lost") else "")

    def _note(self, kind: str, note: str) -> None:
        if note:
            self.notes[kind] = [*self.notes.get(kind, []), note][-MOST_EVENTS:]


def _values(row: Row) -> Iterator[tuple[str, str, str, float]]:
    """Yields (part, agent or model group, figure, value) of every line that can be drawn."""
    for part in ("agents", "groups"):
        for name, figures in (row.get(part) or {}).items():
            yield from ((part, name, figure, value) for figure, value in figures.items() if _is_number(value))
    for agent, counts in (row.get("funnel") or {}).items():
        first, last = _ends([count for step, count in counts.items() if step != "attempts"])
        if first:
            yield "funnel", agent, "trained", last / first
    yield from (("metrics", "", figure, value) for figure, value in row["metrics"].items() if _is_number(value))
    if _is_number(total := row["seconds"].get("total")):
        yield "seconds", "", "total", total


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return (values[0], values[-1]) if values else (0.0, 0.0)


def _widen(lines: dict[str, list[list[float]]], figure: str, number: int, value: float) -> None:
    low, high = lines.setdefault(figure, [[number, value], [number, value]])
    if value < low[1]:
        lines[figure][0] = [number, value]
    if value > high[1]:
        lines[figure][1] = [number, value]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
