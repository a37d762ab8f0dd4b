"""summaries: finished iterations -> their figures, computed once and kept in the journal, and what they add up to.

    iteration k ── figures, warnings ──> `summary/<k>` ─┐
                                       `so-far` of k-1 ─┴─> `so-far` of k

What `record` reads of earlier iterations is bounded: `so-far`, and the figures of those that its warnings are compared with.
Figures are kept from when `record` of their iteration has begun: the seconds of an iteration are known only after its last stage.
A run that is only read keeps nothing.

Up to `MOST_DRAWN` iterations every one is drawn. Beyond, every fourth is, then every eighth and so on, so that between half of
`MOST_THINNED` and all of it are left; the first, the last and the latest promotions always are, and of each line its highest and
lowest value.
Evaluated iterations are counted apart from the others by the same rule. Sums, counts and maxima are over all iterations.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from pipelines.report.summary import figures_of_iteration
from pipelines.report.training_warnings import TrainingWarning, compared_iterations, latest_warnings
from pipelines.run.run import Run
from pipelines.stages.promote import git_commit
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Decided

MOST_DRAWN = 200
MOST_THINNED = 100
MOST_EVENTS = 100
"""Warnings, failed trainings and the like that are listed, the latest ones; all are counted."""
DRAWN_WHOLE = ("seconds", "evaluation")
"""Parts of a row that are drawn with all that belongs to them: bars, intervals, a verdict."""

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
    promoted: list[int] = field(default_factory=list)
    """The latest iterations whose team became the champion."""
    extremes: Extremes = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage, `total` included: seconds of all iterations."""
    gap_sum: float = 0.0
    """Of the mean gap in logprobs between trainer and engine, over `num_gaps` trainings."""
    num_gaps: int = 0
    gap_max: float | None = None
    sync_seconds: float | None = None
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
        return cls(**{**data, **drawn})

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
        """Adds the figures of the next finished iteration, see `ReportData.iterations`."""
        number = int(row["iteration"])
        self.missing += range(self.last + 1, number)
        self.last = number
        self.drawn.add(number)
        if judged := row.get("evaluation"):
            self.evaluated.add(number)
            self.promoted = [*self.promoted, *([number] if judged["verdict"] == "promote" else [])][-MOST_EVENTS:]
        for part, name, figure, value in _values(row):
            _widen(self.extremes.setdefault(part, {}).setdefault(name, {}), figure, number, value)
        for stage, seconds in row["seconds"].items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        for metrics in row["groups"].values():
            if "train/logprob_gap_mean" in metrics:
                self.gap_sum += metrics["train/logprob_gap_mean"]
                self.num_gaps += 1
                self.gap_max = max(self.gap_max or 0.0, metrics["train/logprob_gap_max"])
        self.sync_seconds = max(self.sync_seconds or 0.0, row["metrics"]["sync_seconds"])
        self._add_events(row)

    def shown_warnings(self) -> list[TrainingWarning]:
        """Returns the latest warnings, the oldest first."""
        return [TrainingWarning(**warning) for warning in self.warnings]

    def numbers_to_draw(self) -> list[int]:
        """Returns the iterations whose figures are drawn, in order."""
        last = [self.last] if self.last else []
        ends = [number for part, _, _, number, _ in self._ends() if part in DRAWN_WHOLE]
        return sorted({*self.drawn.numbers, *self.evaluated.numbers, *self.promoted, *last, *ends})

    def extreme_rows(self) -> list[dict[str, Any]]:
        """Returns rows that hold the highest and the lowest value of each line and nothing else; none while all are drawn."""
        if not self.is_thinned:
            return []
        rows: dict[int, dict[str, Any]] = {}
        is_drawn = set(self.numbers_to_draw())
        for part, name, figure, number, value in self._ends():
            if number not in is_drawn:
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
    judged = row.get("evaluation") or {}
    for side in ("candidate", "champion"):
        if judged.get(side):
            yield "evaluation", side, "mean", judged[side]["mean"]


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


logger = logging.getLogger(__name__)

RECORD = "record"
"""The journal's stage that shows an iteration to people."""

Row = dict[str, Any]
T = TypeVar("T")


class Summaries:
    """Reads and keeps the figures of a run's iterations; each is read or computed at most once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows: dict[int, Row | None] = {}

    def row(self, iteration: int) -> Row | None:
        """Returns the figures of an iteration with its warnings, as `ReportData.iterations`; None before it is done."""
        self.load([iteration])
        row = self._rows[iteration]
        return row if row is None or "warnings" in row else self._with_warnings(row)

    def rows(self, iterations: Iterable[int]) -> list[Row]:
        """Returns the figures of those of the iterations that are done, in this order."""
        numbers = list(iterations)
        self.load(numbers)
        return [row for number in numbers if (row := self.row(number)) is not None]

    def so_far(self) -> SoFar:
        """Returns what the finished iterations add up to, and keeps it as far as their `record` has begun."""
        journal, run_id = self._run.journal, self._run.run_id
        stored = journal.value(run_id, RunValue.SO_FAR)
        so_far = (None if stored is None else self._parsed(RunValue.SO_FAR, stored, SoFar.from_json)) or SoFar()
        if so_far.missing and journal.finished(run_id, Decided.STAGE, among=so_far.missing):
            so_far = SoFar()  # an iteration was finished after a later one: all is added up again, in order
        numbers = [n for n in journal.finished(run_id, Decided.STAGE, after=so_far.last) if n > 0]
        recorded = set(journal.finished(run_id, RECORD, after=so_far.last, is_begun_enough=True)) if numbers else set()
        self.load(numbers)
        is_kept = True
        for number in numbers:
            if (row := self.row(number)) is None:
                continue
            if is_kept and number not in recorded:
                is_kept = False
                self._keep(so_far)
            so_far.add(row)
        if is_kept and numbers:
            self._keep(so_far)
        return so_far

    def load(self, iterations: Iterable[int]) -> None:
        """Reads the kept figures of these iterations, and computes those that are not kept."""
        unread = [number for number in iterations if number not in self._rows]
        names = {RunValue.SUMMARY.of(number): number for number in unread}
        kept = self._run.journal.values(self._run.run_id, names)
        for name, number in names.items():
            row = self._parsed(name, kept[name], _from_json) if name in kept else None
            self._rows[number] = figures_of_iteration(self._run, number) if row is None else row

    def _parsed(self, name: str, data: Row, parse: Callable[[Row], T]) -> T | None:
        """What was kept; None where it is damaged: it is computed anew then."""
        try:
            return parse(data)
        except (KeyError, TypeError, AttributeError) as error:
            journal = self._run.journal.shown_url
            logger.warning(
                "%s of run %s in %s is damaged (%r): it is computed anew", name, self._run.run_id, journal, error
            )
            return None

    def _with_warnings(self, row: Row) -> Row:
        """Adds the warnings to figures that are computed, and keeps both once `record` of the iteration has begun."""
        number = row["iteration"]
        earlier = compared_iterations(number)
        self.load(earlier)
        history = [found for k in earlier if (found := self._rows[k]) is not None]
        row = row | {"warnings": latest_warnings([*history, row])}
        self._rows[number] = row
        run = self._run
        is_kept = not run.is_read_only and run.journal.finished(
            run.run_id, RECORD, among=[number], is_begun_enough=True
        )
        if is_kept:
            row["commit"] = git_commit()  # whoever writes the report again may be of another one
            run.journal.put_value(run.run_id, RunValue.SUMMARY.of(number), _to_json(row))
        return row

    def _keep(self, so_far: SoFar) -> None:
        if so_far.last and not self._run.is_read_only:
            self._run.journal.put_value(self._run.run_id, RunValue.SO_FAR, so_far.to_json())


def iteration_summary(run: Run, iteration: int) -> Row | None:
    """Figures of one finished iteration, in the form of `report.ReportData.iterations`; None before it is done."""
    return Summaries(run).row(iteration)


def _to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "warnings": [asdict(warning) for warning in row["warnings"]]}


def _from_json(data: Mapping[str, Any]) -> Row:
    return {**data, "warnings": [TrainingWarning(**warning) for warning in data["warnings"]]}
