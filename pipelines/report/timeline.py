"""timeline: when the stages, calls and trainers of an iteration began and ended -> lanes that say who was at work when.

    journal ── StageTime ─────┐
    results ── trainer_spans ─┼─> iteration_timeline ──> Timeline ──> waits, timeline_chart, chrome_trace
    traces ─── calls ─────────┘

Pure: nothing is read here. Times are Unix seconds by the clocks of the machines that did the work. A lane's work is the union of
its intervals: calls that overlap count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stores.journal.journal import RUNNING
from stores.journal.stage_results import Trained, TrainParts

STOPPED = "stopped"
NUM_PIECES = 240
"""So many equal pieces of an iteration have a number of calls at once."""
SHORTEST_GAP = 1 / 500
"""Gaps that last a smaller share of the iteration are not kept or drawn; they are counted."""


class Kind(StrEnum):
    """What a lane is about."""

    ENGINE = "engine"
    TRAINER = "trainer"
    COLLECTORS = "collectors"
    TOOL = "tool"


class Lane(NamedTuple):
    """One line of a timeline; its name is a model group or a tool, empty where there is one lane of the kind."""

    kind: Kind
    name: str = ""

    @property
    def key(self) -> str:
        """Names the lane in JSON."""
        return f"{self.kind}/{self.name}"

    @classmethod
    def of(cls, key: str) -> Lane:
        """The lane of this key."""
        kind, _, name = key.partition("/")
        return cls(Kind(kind), name)

    @property
    def label(self) -> str:
        """Names the lane for people."""
        return self.kind.value if not self.name else f"{self.kind} {self.name}"


class Span(NamedTuple):
    """Work without a pause."""

    start_s: float
    end_s: float
    what: str


Calls = Mapping[Lane, NDArray[np.float64]]
"""[number of calls or episodes, 2]: begin and end of each."""


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
    process: str = ""
    """The process that did it, and whether that is a Ray job of its own."""
    is_job: bool = False
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
    lanes: Mapping[Lane, tuple[Span, ...]]
    """Spans of one lane do not overlap, and are in order. A lane without any was idle."""
    at_once: Mapping[Lane, tuple[float, ...]] = field(default_factory=dict)
    """Of engines, tools and collectors: mean number of calls or episodes in each of `NUM_PIECES` equal pieces."""
    has_calls: bool = True
    """False where no traces are stored: nothing is known of engines, tools and collectors."""

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

    def without_short_gaps(self) -> Timeline:
        """Returns the timeline without gaps that could not be seen, so that what is kept of it is small."""
        gap_s = self.seconds * SHORTEST_GAP
        return replace(self, lanes={lane: tuple(_closed(spans, gap_s)) for lane, spans in self.lanes.items()})

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; times of spans are milliseconds since the begin."""
        return {
            "iteration": self.iteration,
            "has_calls": self.has_calls,
            "stages": [_stage_json(stage) for stage in self.stages],
            "lanes": [
                {
                    "kind": lane.kind.value,
                    "name": lane.name,
                    "spans": [[self._ms(s.start_s), self._ms(s.end_s), s.what] for s in spans],
                    "at_once": [round(number, 2) for number in self.at_once.get(lane, ())],
                }
                for lane, spans in self.lanes.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timeline:
        """The inverse of `to_json`, to the millisecond."""
        stages = tuple(StageTime(**stage) for stage in data["stages"])
        began = stages[0].start_s
        lanes = {Lane(Kind(lane["kind"]), lane["name"]): lane for lane in data["lanes"]}
        return cls(
            iteration=data["iteration"],
            has_calls=data["has_calls"],
            stages=stages,
            lanes={
                lane: tuple(Span(began + start / 1000, began + end / 1000, what) for start, end, what in kept["spans"])
                for lane, kept in lanes.items()
            },
            at_once={lane: tuple(kept["at_once"]) for lane, kept in lanes.items() if kept["at_once"]},
        )

    def _ms(self, time_s: float) -> int:
        return round(1000 * (time_s - self.start_s))


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
    begun = tuple(sorted(stages, key=lambda stage: stage.start_s))
    timeline = Timeline(iteration=iteration, stages=begun, lanes={}, has_calls=calls is not None)
    begin, end = timeline.start_s, timeline.end_s
    lanes: dict[Lane, tuple[Span, ...]] = {}
    at_once: dict[Lane, tuple[float, ...]] = {}
    if calls is not None:
        known = [*(Lane(Kind.ENGINE, name) for name in engines), Lane(Kind.COLLECTORS)]
        for lane in dict.fromkeys([*known, *calls]):
            cut = _cut(calls.get(lane, np.empty((0, 2))), begin, end)
            lanes[lane] = tuple(Span(start, stop, "calls") for start, stop in union(cut).tolist())
            at_once[lane] = tuple(mean_number(cut, begin, end).tolist())
    for name, spans in trainers.items():
        inside = [Span(max(s.start_s, begin), min(s.end_s, end), s.what) for s in spans]
        lanes[Lane(Kind.TRAINER, name)] = tuple(span for span in inside if span.end_s > span.start_s)
    return replace(timeline, lanes={lane: lanes[lane] for lane in in_order(lanes)}, at_once=at_once)


def in_order(lanes: Iterable[Lane]) -> list[Lane]:
    """Returns lanes as they are shown: by kind, those of one kind as they come."""
    kinds = list(Kind)
    return sorted(lanes, key=lambda lane: kinds.index(lane.kind))


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


def union(intervals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the union of intervals [n, 2], in order; those that touch become one."""
    if not len(intervals):
        return intervals
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ordered[:, 1])
    is_first = np.r_[True, ordered[1:, 0] > ends[:-1]]
    is_last = np.r_[is_first[1:], True]
    return np.stack([ordered[is_first, 0], ends[is_last]], axis=1)


def mean_number(
    intervals: NDArray[np.float64], begin: float, end: float, num_pieces: int = NUM_PIECES
) -> NDArray[np.float64]:
    """Returns [num_pieces]: how many of the intervals hold at once, on average over each equal piece of begin to end."""
    edges = np.linspace(0.0, end - begin, num_pieces + 1)
    seconds = _seconds_since(intervals[:, 0] - begin, edges) - _seconds_since(intervals[:, 1] - begin, edges)
    return np.diff(seconds) / max((end - begin) / num_pieces, 1e-9)


def _seconds_since(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """At each edge, the seconds that have passed since each of the times before it, added up."""
    ordered = np.sort(times)
    number = np.searchsorted(ordered, edges)
    return number * edges - np.r_[0.0, np.cumsum(ordered)][number]


def _cut(intervals: NDArray[np.float64], begin: float, end: float) -> NDArray[np.float64]:
    cut = np.clip(intervals, begin, end)
    return cut[cut[:, 1] > cut[:, 0]]


def _closed(spans: Sequence[Span], gap_s: float) -> list[Span]:
    closed: list[Span] = []
    for span in spans:
        if closed and closed[-1].what == span.what and span.start_s - closed[-1].end_s < gap_s:
            span = Span(closed.pop().start_s, span.end_s, span.what)
        closed.append(span)
    return closed


def _stage_json(stage: StageTime) -> dict[str, Any]:
    return {name: getattr(stage, name) for name in StageTime.__slots__}
