"""timeline: a run's journal, results and traces -> who was at work when in an iteration, and how long the others waited.

    journal ── stages ──────────┐
    results ── trainers ────────┼─> Timeline ──> the largest waits in words; timeline.json (`chrome_trace`)
    traces ─── calls, episodes ─┘

Times are Unix seconds by the clocks of the machines that did the work. A lane's work is the union of its intervals: calls that overlap
count once. The traces of an iteration are read once: timelines are kept in the journal as soon as no stage of them is running.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from pipelines.run.run import Run
from pipelines.stages.table import STAGES
from stores.journal.journal import RUNNING, StageRow
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Collected, Decided, Trained, TrainParts
from stores.traces.lookup import EPISODE, TOOL_CALL, TURN
from train_loops.config import TEAM

logger = logging.getLogger(__name__)

ENGINE, TRAINER, COLLECTORS, TOOL = KINDS = ("engine", "trainer", "collectors", "tool")
"""What lanes are of, in the order in which they are shown. A lane is called by its kind and the name of a model group or tool."""
CAUSES = (TRAINER, ENGINE, TOOL, COLLECTORS)
"""For what others wait, the most pressing first."""
NUM_KEPT = 20
"""So many timelines are kept, and are in timeline.json."""
NUM_PIECES = 240
"""So many equal pieces of an iteration have a number of calls at once."""
SHORTEST_GAP = 1 / 500
"""Gaps that last a smaller share of the iteration are not kept; they count as waits."""
NUM_LARGEST = 3
STOPPED = "stopped"
AROUND = {"collect": " around its episodes", "evaluate": " around its episodes", "train": " around its trainers"}

Intervals = NDArray[np.float64]
"""[number, 2]: begin and end of each."""
Mask = NDArray[np.bool_]
Calls = Mapping[str, Intervals]
"""By lane."""


class Span(NamedTuple):
    """Work without a pause."""

    start_s: float
    end_s: float
    what: str


class Wait(NamedTuple):
    """Who waited for whom, in words, and how long."""

    who: str
    waited_for: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """When a stage of the journal was done, in its last attempt: the journal keeps no earlier one."""

    stage: str
    model_group: str = ""
    iteration: int | None = None
    """The iteration that the stage is of, where stages of several overlap."""
    start_s: float
    end_s: float
    """Of one that is running: the moment that it was looked at."""
    attempt: int = 1
    status: str = "done"
    """`done`, `running`, `failed`, or `stopped`: nobody does it any more."""

    @property
    def label(self) -> str:
        """Names the stage for people."""
        number = "" if self.iteration is None else f" {self.iteration}"
        group = f" {self.model_group}" if self.model_group else ""
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"{self.stage}{number}{group}{attempt}" + ("" if self.status == "done" else f" ({self.status})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One iteration, from the begin of its first stage to the end of its last one.

    Where iterations overlap, it is the time from the end of the iteration before to its own, with all that was done then.
    """

    iteration: int
    stages: tuple[StageTime, ...]
    """In the order in which they began."""
    lanes: dict[str, tuple[Span, ...]]
    """Spans of one lane do not overlap, and are in order. A lane without any was idle."""
    at_work: dict[str, float] = field(default_factory=dict)
    """Seconds by lane, short gaps left out."""
    waits: tuple[Wait, ...] = ()
    at_once: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Of engines, tools and collectors: mean number of calls or episodes in each of `NUM_PIECES` equal pieces."""

    @property
    def start_s(self) -> float:
        """Begin of the first stage."""
        return self.stages[0].start_s

    @property
    def end_s(self) -> float:
        """End of the stage that ended last."""
        return max(stage.end_s for stage in self.stages)

    @property
    def seconds(self) -> float:
        """How long the iteration took."""
        return self.end_s - self.start_s

    @property
    def is_settled(self) -> bool:
        """False while a stage of it is running: the parts of a training and the calls of a stage are known when it is done."""
        return all(stage.status != RUNNING for stage in self.stages)


_KEPT = TypeAdapter(dict[int, Timeline])


def latest_timelines(run: Run, last: int) -> list[Timeline]:
    """Returns the timelines of the `NUM_KEPT` iterations up to `last` that are finished, and keeps those that are settled.

    A run that is only read keeps nothing.
    """
    numbers = run.journal.finished(run.run_id, Decided.STAGE, among=range(max(last - NUM_KEPT, 0) + 1, last + 1))
    stored = run.journal.value(run.run_id, RunValue.TIMELINES) or {}
    try:
        kept = _KEPT.validate_python(stored)
    except ValidationError as error:
        logger.warning("the timelines of run %s are damaged (%s): they are computed anew", run.run_id, error)
        kept = {}
    timelines = {k: timeline for k in numbers if (timeline := kept.get(k) or read_timeline(run, k)) is not None}
    settled = {k: timeline for k, timeline in timelines.items() if timeline.is_settled}
    if settled.keys() != kept.keys() and not run.is_read_only:
        run.journal.put_value(run.run_id, RunValue.TIMELINES, _KEPT.dump_python(settled, mode="json"))
    return list(timelines.values())


def largest_waits(timelines: Sequence[Timeline], number: int = NUM_LARGEST) -> list[dict[str, str | float]]:
    """Returns the largest waits of these iterations, as report.json has them; `sentence` ends without a full stop.

    For example `engines waited 31.2 s (42% of iteration 3): the trainer of model group solver was at work`.
    """
    total = sum(timeline.seconds for timeline in timelines)
    seconds: dict[tuple[str, str], float] = {}
    for who, waited_for, each in (wait for timeline in timelines for wait in timeline.waits):
        seconds[who, waited_for] = seconds.get((who, waited_for), 0.0) + each
    first, last = (timelines[0].iteration, timelines[-1].iteration) if timelines else (0, 0)
    iterations = f"iteration {last}" if first == last else f"iterations {first} to {last}"
    return [
        {
            "who": who,
            "seconds": waited,
            "share": waited / total,
            "waited_for": waited_for,
            "sentence": f"{who} waited {waited:.1f} s ({waited / total:.0%} of {iterations}): {waited_for}",
        }
        for (who, waited_for), waited in sorted(seconds.items(), key=lambda wait: (-wait[1], wait[0]))[:number]
    ]


def work_of_lanes(timelines: Sequence[Timeline]) -> dict[str, tuple[float, float]]:
    """Returns by lane the seconds that it worked, and their share of the iterations in which that is known."""
    work = {}
    for lane in in_order(lane for timeline in timelines for lane in timeline.at_work):
        known = [timeline for timeline in timelines if lane in timeline.at_work]
        seconds = sum(timeline.at_work[lane] for timeline in known)
        work[lane] = seconds, seconds / max(sum(timeline.seconds for timeline in known), 1e-9)
    return work


def in_order(lanes: Iterable[str]) -> list[str]:
    """Returns lanes as they are shown: by kind, those of one kind as they come."""
    return sorted(dict.fromkeys(lanes), key=lambda lane: KINDS.index(_kind(lane)))


def _kind(lane: str) -> str:
    return lane.partition(" ")[0]


# ---- from what is stored


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
    lanes: dict[str, list[np.ndarray]] = {}
    for kind, of_kind in ((COLLECTORS, EPISODE), (ENGINE, TURN), (TOOL, TOOL_CALL)):
        table = events.filter(pc.equal(events["kind"], of_kind))
        for name in pc.unique(table["name"]).to_pylist():
            own = table.filter(pc.equal(table["name"], name))
            is_group = kind == ENGINE and name in run.config.model_groups
            lane = f"{kind} {run.config.weights_name(name) if is_group else name}".strip()
            lanes.setdefault(lane, []).append(np.stack([own["start_s"].to_numpy(), own["end_s"].to_numpy()], axis=1))
    return {lane: np.concatenate(each) for lane, each in lanes.items()}


# ---- from times


def iteration_timeline(
    iteration: int,
    stages: Iterable[StageTime],
    *,
    trainers: Mapping[str, Sequence[Span]],
    engines: Sequence[str],
    calls: Calls | None,
) -> Timeline:
    """Puts an iteration's times into lanes, cut to the time from its first stage's begin to its last one's end.

    What lies outside is work of an earlier attempt, or of another run or the gateway whose episodes were taken over.

    Args:
        stages: those of the iteration that have begun, at least one.
        trainers: see `trainer_spans`.
        engines: names of all engines, also of those that had nothing to do.
        calls: of engines, tools and collectors; None where no traces are stored.
    """
    timeline = Timeline(iteration=iteration, stages=tuple(sorted(stages, key=lambda s: s.start_s)), lanes={})
    begin, end = timeline.start_s, timeline.end_s
    spans: dict[str, list[Span]] = {}
    at_once: dict[str, tuple[float, ...]] = {}
    if calls is not None:
        for lane in dict.fromkeys([*(f"{ENGINE} {name}" for name in engines), COLLECTORS, *calls]):
            cut = np.clip(calls.get(lane, np.empty((0, 2))), begin, end)
            cut = cut[cut[:, 1] > cut[:, 0]]
            spans[lane] = [Span(start, stop, "calls") for start, stop in union(cut).tolist()]
            at_once[lane] = tuple(np.round(mean_number(cut, begin, end), 2).tolist())
    for name, parts in trainers.items():
        inside = (Span(max(s.start_s, begin), min(s.end_s, end), s.what) for s in parts)
        spans[f"{TRAINER} {name}"] = [span for span in inside if span.end_s > span.start_s]
    return replace(
        timeline,
        lanes={lane: tuple(_closed(spans[lane], timeline.seconds * SHORTEST_GAP)) for lane in in_order(spans)},
        at_work={lane: sum(span.end_s - span.start_s for span in each) for lane, each in spans.items()},
        waits=tuple(_waits(timeline.stages, spans, has_calls=calls is not None)),
        at_once=at_once,
    )


def trainer_spans(stage: StageTime, parts: Mapping[str, TrainParts | None]) -> dict[str, list[Span]]:
    """Returns by model group what its trainer did in a stage `train`.

    Where nothing is known of its parts (training failed, the stage is not done, an earlier attempt had committed the version)
    the whole stage is the trainer's.

    Args: parts: by model group that was trained in this stage.
    """
    known = {group: times for group, times in parts.items() if times}
    if not known:
        return {stage.model_group: [Span(stage.start_s, stage.end_s, Trained.STAGE)]}
    return {
        group: [
            Span(max(start, stage.start_s), min(end, stage.end_s), part)
            for part, (start, end) in times.items()
            if start < stage.end_s and end > stage.start_s
        ]
        for group, times in known.items()
    }


def union(intervals: Intervals) -> Intervals:
    """Returns the union of intervals [n, 2], in order; those that touch become one."""
    if not len(intervals):
        return intervals
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ordered[:, 1])
    is_first = np.r_[True, ordered[1:, 0] > ends[:-1]]
    is_last = np.r_[is_first[1:], True]
    return np.stack([ordered[is_first, 0], ends[is_last]], axis=1)


def mean_number(intervals: Intervals, begin: float, end: float, num_pieces: int = NUM_PIECES) -> NDArray[np.float64]:
    """Returns [num_pieces]: how many of the intervals hold at once, on average over each equal piece of begin to end."""
    edges = np.linspace(0.0, end - begin, num_pieces + 1)
    seconds = _seconds_since(intervals[:, 0] - begin, edges) - _seconds_since(intervals[:, 1] - begin, edges)
    return np.diff(seconds) / max((end - begin) / num_pieces, 1e-9)


def _seconds_since(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """At each edge, the seconds that have passed since each of the times before it, added up."""
    ordered = np.sort(times)
    number = np.searchsorted(ordered, edges)
    return number * edges - np.r_[0.0, np.cumsum(ordered)][number]


def _closed(spans: Sequence[Span], gap_s: float) -> list[Span]:
    closed: list[Span] = []
    for span in spans:
        if closed and closed[-1].what == span.what and 0 <= span.start_s - closed[-1].end_s < gap_s:
            span = Span(closed.pop().start_s, span.end_s, span.what)
        closed.append(span)
    return closed


# ---- who waited


def _waits(stages: Sequence[StageTime], lanes: Mapping[str, Sequence[Span]], *, has_calls: bool) -> list[Wait]:
    """Returns who waited for whom: all engines or all trainers while none of them works, and one while another of its kind does.

    Tools and collectors are idle for free; engines and trainers hold the accelerators.
    """
    names = dict.fromkeys(stage.stage for stage in stages)
    times = {lane: np.array([span[:2] for span in spans]).reshape(-1, 2) for lane, spans in lanes.items()}
    on_times = {name: np.array([(s.start_s, s.end_s) for s in stages if s.stage == name]) for name in reversed(names)}
    edges = np.unique(np.concatenate([each.ravel() for each in (*times.values(), *on_times.values())]))
    seconds, middles = np.diff(edges), (edges[1:] + edges[:-1]) / 2
    busy = {lane: _holds(each, middles) for lane, each in times.items()}
    at_work = {
        kind: np.any([m for lane, m in busy.items() if _kind(lane) == kind] or [middles < -np.inf], axis=0)
        for kind in KINDS
    }
    idle = {kind: ~at_work[kind] for kind in (ENGINE, TRAINER) if any(_kind(lane) == kind for lane in lanes)}
    waits: Counter[tuple[str, str]] = Counter()
    for waited_for, cause in _causes(
        {name: _holds(each, middles) for name, each in on_times.items()}, busy, seconds, has_calls
    ):
        both = np.all(list(idle.values()), axis=0) if len(idle) == 2 else middles < -np.inf
        waits["engines and trainers", waited_for] += seconds[cause & both].sum()
        for kind, mask in idle.items():
            waits[f"{kind}s", waited_for] += seconds[cause & mask & ~both].sum()
    for lane, mask in busy.items():
        if (kind := _kind(lane)) in idle:
            waits[_named(lane), f"another {kind} was at work"] += seconds[at_work[kind] & ~mask].sum()
    return [Wait(*key, float(waited)) for key, waited in waits.items() if waited > 0]


def _causes(
    on: Mapping[str, Mask], busy: Mapping[str, Mask], seconds: NDArray[np.float64], has_calls: bool
) -> Iterator[tuple[str, Mask]]:
    """Yields what was waited for, and when: each moment has one cause.

    That is a trainer, else an engine, a tool, an episode between two calls, the stage around them, the last that began, or nobody, between
    two stages. Of several trainers or tools it is the one that works most.
    """
    order = sorted(busy, key=lambda lane: (CAUSES.index(_kind(lane)), -seconds[busy[lane]].sum()))
    rest = np.ones(len(seconds), dtype=bool)
    for stage, is_on in on.items():
        here = rest & is_on
        rest = rest & ~is_on
        for lane in order:
            words = {
                ENGINE: f"engines were at work ({stage})",
                TRAINER: f"{_named(lane)} was at work",
                COLLECTORS: f"episodes were between two calls ({stage})",
                TOOL: f"{lane} was at work ({stage})",
            }
            yield words[_kind(lane)], here & busy[lane]
            here = here & ~busy[lane]
        yield f"{stage} was at work{AROUND.get(stage, '') if has_calls else ''}", here
    yield "the next stage had not begun", rest


def _holds(intervals: Intervals, moments: NDArray[np.float64]) -> Mask:
    """At each moment, whether one of the intervals holds it."""
    ordered = union(intervals)
    index = np.searchsorted(ordered[:, 0], moments, side="right") - 1
    return (index >= 0) & (moments < ordered[np.maximum(index, 0), 1]) if len(ordered) else moments < -np.inf


def _named(lane: str) -> str:
    kind, _, name = lane.partition(" ")
    return f"the {kind} of {'model group ' if kind == TRAINER else ''}{name}"
