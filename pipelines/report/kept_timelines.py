"""kept_timelines: a run's journal, results and traces -> the timelines of its iterations, the last of them kept in the journal.

    iteration k ── stages, parts of training, calls ──> timeline ──> `time/<k>`: work and waits, added up
                                                                └──> `timelines`: those of the last `NUM_KEPT` iterations, to draw

The traces of an iteration are read once, when it is recorded; where iterations overlap, again until the stages of others that were running at
its end are done. What is not kept, as of a run that an earlier version recorded, is computed from them again. A run that is only read
keeps nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.cluster.owner_links import JOB_OWNER
from pipelines.report.timeline import (
    STOPPED,
    Calls,
    Kind,
    Lane,
    Span,
    StageTime,
    Timeline,
    iteration_timeline,
    trainer_spans,
)
from pipelines.report.waits import Account, account
from pipelines.run.run import Run
from pipelines.stages.table import STAGES
from stores.journal.journal import RUNNING, StageRow
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Collected, Decided, Trained, TrainParts
from stores.traces.lookup import EPISODE, TOOL_CALL, TURN
from train_loops.config import TEAM

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_KEPT = 20
"""So many timelines are kept, and are in timeline.json."""


class Timelines:
    """Reads and keeps the timelines of a run's iterations; each is computed at most once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._computed: dict[int, Timeline] = {}
        self._accounts: dict[int, Account] = {}

    def accounts(self, finished: Iterable[int]) -> dict[int, Account]:
        """Returns by iteration who worked and who waited, and keeps it once it is settled."""
        numbers = list(finished)
        journal, run_id = self._run.journal, self._run.run_id
        names = {RunValue.TIME.of(k): k for k in numbers if k not in self._accounts}
        kept = journal.values(run_id, names)
        for name, number in names.items():
            total = self._parsed(name, kept[name], Account.from_json) if name in kept else None
            if total is None:
                timeline = self._compute(number)
                total = account(timeline)
                if timeline.is_settled and not self._run.is_read_only:
                    journal.put_value(run_id, name, total.to_json())
            self._accounts[number] = total
        return {number: self._accounts[number] for number in numbers}

    def is_settled(self, iteration: int) -> bool:
        """Says whether who worked and who waited in a finished iteration is known for good."""
        return (
            self._run.journal.value(self._run.run_id, RunValue.TIME.of(iteration)) is not None
            or self._compute(iteration).is_settled
        )

    def latest(self, last: int) -> list[Timeline]:
        """Returns the timelines of the `NUM_KEPT` iterations up to `last` that are finished, without short gaps, and keeps the settled ones."""
        journal, run_id = self._run.journal, self._run.run_id
        recent = range(max(last - NUM_KEPT, 0) + 1, last + 1)
        numbers = journal.finished(run_id, Decided.STAGE, among=recent)
        kept = self._kept()
        timelines = {k: kept.get(k) or self._compute(k).without_short_gaps() for k in numbers}
        settled = {k: timeline for k, timeline in timelines.items() if timeline.is_settled}
        if settled != kept and not self._run.is_read_only:
            data = {str(k): timeline.to_json() for k, timeline in settled.items()}
            journal.put_value(run_id, RunValue.TIMELINES, data)
        return list(timelines.values())

    def unfinished(self, iteration: int) -> Timeline | None:
        """Returns the timeline of an iteration that is not finished, as far as it has come; None before it has begun."""
        timeline = read_timeline(self._run, iteration)
        return None if timeline is None else timeline.without_short_gaps()

    def _kept(self) -> dict[int, Timeline]:
        data = self._run.journal.value(self._run.run_id, RunValue.TIMELINES)
        if data is None:
            return {}

        def parse(timelines: dict[str, Any]) -> dict[int, Timeline]:
            return {int(k): Timeline.from_json(timeline) for k, timeline in timelines.items()}

        return self._parsed(RunValue.TIMELINES, data, parse) or {}

    def _parsed(self, name: str, data: dict[str, Any], parse: Callable[[dict[str, Any]], T]) -> T | None:
        """What was kept; None where it is damaged: it is computed anew then."""
        try:
            return parse(data)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            journal = self._run.journal.shown_url
            logger.warning(
                "%s of run %s in %s is damaged (%r): it is computed anew", name, self._run.run_id, journal, error
            )
            return None

    def _compute(self, iteration: int) -> Timeline:
        if iteration not in self._computed:
            timeline = read_timeline(self._run, iteration)
            assert timeline is not None, f"no stage of iteration {iteration} has begun"
            self._computed[iteration] = timeline
        return self._computed[iteration]


def read_timeline(run: Run, iteration: int) -> Timeline | None:
    """Computes the timeline of an iteration from what is stored; None before its time has begun.

    What is still running lasts until now. The calls of a stage are known when it is done: its episodes are stored in batches.
    """
    max_lag = run.config.loop.max_lag
    own = _stages(run, iteration)
    stages = own if not max_lag or not own else _overlapping(run, iteration, own)
    if not stages:  # where iterations overlap, perhaps all that is done of it was done before the last one ended
        return None
    trainers: dict[str, list[Span]] = {}
    for stage in stages:
        if stage.stage == Trained.STAGE:
            number = iteration if stage.iteration is None else stage.iteration
            for group, spans in trainer_spans(stage, _parts(run, number, stage.model_group)).items():
                trainers[group] = sorted([*trainers.get(group, []), *spans])
    begin, end = min(stage.start_s for stage in stages), max(stage.end_s for stage in stages)
    is_running = any(stage.status == RUNNING for stage in own)
    return iteration_timeline(
        iteration,
        stages,
        trainers=trainers,
        engines=list(dict.fromkeys(map(run.config.weights_name, run.config.model_groups))),
        calls=None if is_running else _calls(run, iteration, max_lag=max_lag, since=begin, until=end),
    )


def _stages(run: Run, iteration: int) -> list[StageTime]:
    """The stages of an iteration that have begun; those of model groups in the order of the run config."""
    now = time.time()
    rows = [row for row in run.journal.stages(run.run_id, iteration) if row.stage in STAGES]
    order = list(run.config.train_tasks)
    rows.sort(key=lambda row: order.index(row.model_group) if row.model_group in order else -1)
    return [stage_time(row, now=now) for row in rows]


def _overlapping(run: Run, iteration: int, own: Sequence[StageTime]) -> list[StageTime]:
    """What was done from the end of the iteration before to the end of this one, cut to that time, with its iteration's number."""
    others = {k: _stages(run, k) for k in range(max(1, iteration - 1), iteration + run.config.loop.max_lag + 1)}
    before = [stage.end_s for stage in others.get(iteration - 1, ()) if stage.stage == Decided.STAGE]
    begin = before[0] if before else min(stage.start_s for stage in own)
    end = max(stage.end_s for stage in own)
    return [
        replace(stage, iteration=k, start_s=max(stage.start_s, begin), end_s=min(stage.end_s, end))
        for k, stages in others.items()
        for stage in stages
        if stage.start_s <= end and stage.end_s > begin
    ]


def stage_time(row: StageRow, *, now: float) -> StageTime:
    """Returns when a stage of the journal was done. One that is running lasts until `now`, or until its lease ended: it was stopped."""
    is_running = row.status == RUNNING
    end = min(now, row.expires_at) if is_running or row.ended_at is None else row.ended_at
    return StageTime(
        stage=row.stage,
        model_group=row.model_group,
        start_s=row.started_at,
        end_s=max(end, row.started_at),
        attempt=row.token,
        process=row.process,
        is_job=row.owner.startswith(JOB_OWNER),
        status=STOPPED if is_running and row.expires_at < now else row.status,
    )


def _parts(run: Run, iteration: int, model_group: str) -> dict[str, TrainParts | None]:
    """By model group that a stage `train` has trained, the parts of its training; none before the stage is done."""
    stored = run.iteration(iteration)
    if stored.is_team_trained:
        team = stored.find_team()
        if team is None:
            return {}
        return {TEAM: team.team.parts} | {group: trained.parts for group, trained in team.model_groups.items()}
    trained = stored.find(Trained, model_group)
    return {} if trained is None else {model_group: trained.parts}


def _calls(run: Run, iteration: int, *, max_lag: int, since: float, until: float) -> Calls | None:
    """Begin and end of every call and episode; None where episodes were played of which no trace is stored."""
    events = pa.concat_tables(
        run.traces.event_times(run_id=run.run_id, iteration=k, since=since, until=until)
        for k in range(iteration, iteration + max_lag + 1)
    )
    collected = run.iteration(iteration).find(Collected)
    has_sampled = collected is not None and collected.num_new > 0 and collected.source is None
    if has_sampled and not events.num_rows:
        return None
    lanes: dict[Lane, list[np.ndarray]] = {}
    for kind, of_kind in ((Kind.COLLECTORS, EPISODE), (Kind.ENGINE, TURN), (Kind.TOOL, TOOL_CALL)):
        table = events.filter(pc.equal(events["kind"], of_kind))
        for name in pc.unique(table["name"]).to_pylist():
            own = table.filter(pc.equal(table["name"], name))
            known = name in run.config.model_groups
            lane = Lane(kind, run.config.weights_name(name) if kind is Kind.ENGINE and known else name)
            lanes.setdefault(lane, []).append(np.stack([own["start_s"].to_numpy(), own["end_s"].to_numpy()], axis=1))
    return {lane: np.concatenate(each) for lane, each in lanes.items()}
