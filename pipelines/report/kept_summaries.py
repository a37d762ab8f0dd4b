"""kept_summaries: finished iterations -> their figures, computed once and kept in the journal, and what they add up to.

    iteration k ── figures, warnings ──> `summary/<k>` ─┐
                                       `so-far` of k-1 ─┴─> `so-far` of k

What `record` reads of earlier iterations is bounded: `so-far`, and the figures of those that its warnings are compared with.
A run of an earlier version has none of this: all is computed once then. Figures are kept from when `record` of their
iteration has begun: the seconds of an iteration are known only after its last stage. A run that is only read keeps nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from pipelines.monitoring.training_warnings import TrainingWarning, compared_iterations, latest_warnings
from pipelines.report.kept_timelines import Timelines
from pipelines.report.so_far import SoFar
from pipelines.report.summary import figures_of_iteration
from pipelines.run.run import Run
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Decided

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
        self.timelines = Timelines(run)

    def row(self, iteration: int) -> Row | None:
        """Returns the figures of an iteration with its warnings, as `ReportData.iterations`; None before it is done."""
        self.load([iteration])
        row = self._rows[iteration]
        return row if row is None or "warnings" in row else self._with_warnings(row)

    def rows(self, iterations: Iterable[int]) -> list[Row]:
        """Returns the figures of those of the iterations that are done, in this order, and as `time` who worked and who waited."""
        numbers = list(iterations)
        self.load(numbers)
        rows = [row for number in numbers if (row := self.row(number)) is not None]
        accounts = self.timelines.accounts(row["iteration"] for row in rows)
        return [row | {"time": accounts[row["iteration"]]} for row in rows]

    def so_far(self) -> SoFar:
        """Returns what the finished iterations add up to, and keeps it as far as their `record` has begun and their time is settled."""
        journal, run_id = self._run.journal, self._run.run_id
        kept = journal.value(run_id, RunValue.SO_FAR)
        if kept is not None and "time" not in kept:
            kept = None  # of an earlier version
        so_far = (None if kept is None else self._parsed(RunValue.SO_FAR, kept, SoFar.from_json)) or SoFar()
        if so_far.missing and journal.finished(run_id, Decided.STAGE, among=so_far.missing):
            so_far = SoFar()  # an iteration was finished after a later one: all is added up again, in order
        numbers = [n for n in journal.finished(run_id, Decided.STAGE, after=so_far.last) if n > 0]
        recorded = set(journal.finished(run_id, RECORD, after=so_far.last, is_begun_enough=True)) if numbers else set()
        self.load(numbers)
        is_kept = True
        for number in numbers:
            if (row := self.row(number)) is None:
                continue
            if is_kept and not (number in recorded and self.timelines.is_settled(number)):
                is_kept = False
                self._keep(so_far)
            so_far.add(row | {"time": self.timelines.accounts([number])[number]})
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
