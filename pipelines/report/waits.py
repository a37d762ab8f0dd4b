"""waits: the timeline of an iteration -> who was at work, who waited for whom and how long; the same of a run, in words.

An iteration is cut wherever anything begins or ends. At each moment one is at work whom the others wait for, the first of

    a trainer (of several that which ends last) > an engine > a tool (that which ends last) > the collectors, while episodes are
    between two calls > the stage, around its episodes and trainers > nobody: between two stages

An engine that is idle while another engine is at work waits for that one; a trainer likewise. Only engines and trainers
count as waiting: they hold the accelerators. Nothing is counted twice: work and waits of a lane add up to the iteration's seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.report.timeline import Kind, Lane, Span, StageTime, Timeline

WAITING_KINDS = (Kind.ENGINE, Kind.TRAINER)
NUM_LARGEST = 3
STAGE, WHOLE, PAUSE = "stage", "whole", "pause"
"""Kinds of causes that are no lanes: a stage around its episodes and trainers; a stage of whose episodes nothing is known, because
no traces are stored; the time between two stages."""
AIRFLOW, RUNNER, STOP = "Airflow", "runner", "stop"
"""Why nobody was at work between two stages: the job of the next one was not begun, the process that runs all stages went on to
the next, or the run was stopped and continued."""


class Cause(NamedTuple):
    """Whom or what others wait for."""

    kind: str
    """A `Kind`, or `STAGE`, `WHOLE`, `PAUSE`."""
    name: str
    """Of the model group or tool; for a pause, its reason. Empty for all engines."""
    stage: str
    """The stage that is at work; before a stage that was repeated or continued, that stage, and empty in other pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Who waited for whom, and how long."""

    who: str
    """Key of a lane; without a name all of its kind, e.g. `engine/`, or of several kinds, e.g. `engine+trainer/`."""
    cause: Cause
    seconds: float
    longest_in: int
    """The iteration with the most of it."""
    longest_s: float
    """How many of the seconds were in that iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Work and waits of one iteration or of several."""

    num_iterations: int = 0
    last: int = 0
    """The last of them."""
    seconds: float = 0.0
    lanes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By key of the lane: seconds at work, and seconds of the iterations in which that is known."""
    work: Mapping[str, float] = field(default_factory=dict)
    """By whom the others waited for (a `Kind`, `pause`, or `stage/<name>`): seconds. They add up to all seconds."""
    waits: tuple[Wait, ...] = ()
    """The largest first."""

    def plus(self, later: Account) -> Account:
        """Returns the account of these iterations and of later ones."""
        lanes = dict.fromkeys([*self.lanes, *later.lanes])
        return Account(
            num_iterations=self.num_iterations + later.num_iterations,
            last=max(self.last, later.last),
            seconds=self.seconds + later.seconds,
            lanes={key: _both(self.lanes.get(key), later.lanes.get(key)) for key in lanes},
            work={key: self.work.get(key, 0.0) + later.work.get(key, 0.0) for key in {**self.work, **later.work}},
            waits=_merged([*self.waits, *later.waits]),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values of every field."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Account:
        """The inverse of `to_json`, also after a way through JSON."""
        waits = tuple(Wait(**{**wait, "cause": Cause(*wait["cause"])}) for wait in data["waits"])
        lanes = {key: (busy, known) for key, (busy, known) in data["lanes"].items()}
        return cls(**{**data, "waits": waits, "lanes": lanes})


def account(timeline: Timeline) -> Account:
    """Adds up who was at work in an iteration, and who waited for whom."""
    work: dict[str, float] = {}
    waits: dict[tuple[str, Cause], float] = {}
    for moment in _moments(timeline):
        cause = _cause(moment)
        key = f"{STAGE}/{cause.stage}" if cause.kind in (STAGE, WHOLE) else cause.kind
        work[key] = work.get(key, 0.0) + moment.seconds
        for who, waited_for in _waiting(timeline, moment, cause):
            waits[who, waited_for] = waits.get((who, waited_for), 0.0) + moment.seconds
    return Account(
        num_iterations=1,
        last=timeline.iteration,
        seconds=timeline.seconds,
        lanes={
            lane.key: (sum(span.end_s - span.start_s for span in spans), timeline.seconds)
            for lane, spans in timeline.lanes.items()
        },
        work=work,
        waits=_merged(
            Wait(who=who, cause=cause, seconds=seconds, longest_in=timeline.iteration, longest_s=seconds)
            for (who, cause), seconds in waits.items()
        ),
    )


def _both(first: tuple[float, float] | None, second: tuple[float, float] | None) -> tuple[float, float]:
    (busy, known), (more_busy, more_known) = first or (0.0, 0.0), second or (0.0, 0.0)
    return busy + more_busy, known + more_known


def _merged(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    merged: dict[tuple[str, Cause], Wait] = {}
    for wait in waits:
        known = merged.get((wait.who, wait.cause), wait)
        longest = max(known, wait, key=lambda each: each.longest_s)
        merged[wait.who, wait.cause] = Wait(
            who=wait.who,
            cause=wait.cause,
            seconds=wait.seconds if known is wait else known.seconds + wait.seconds,
            longest_in=longest.longest_in,
            longest_s=longest.longest_s,
        )
    return tuple(sorted(merged.values(), key=lambda wait: (-wait.seconds, wait.who, wait.cause)))


# ---- moments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """All parts of an iteration in which the same ones were at work."""

    seconds: float
    at_work: frozenset[Lane]
    ends_last: Mapping[Kind, Lane]
    """By kind that is at work, the lane whose work ends last."""
    stage: StageTime | None
    """None between stages."""
    before: StageTime
    """The stage that ended last before; between stages only."""
    after: StageTime | None
    """The stage that begins next; None after the begin of the last one."""
    has_calls: bool


def _moments(timeline: Timeline) -> Iterator[_Moment]:
    lanes, stages = list(timeline.lanes), timeline.stages
    times = [(span.start_s, span.end_s) for spans in timeline.lanes.values() for span in spans]
    edges = np.unique(np.array([*times, *((stage.start_s, stage.end_s) for stage in stages)]))
    if len(edges) < 2:
        return
    middles = (edges[1:] + edges[:-1]) / 2
    ends = np.array([_end_of_work(timeline.lanes[lane], middles) for lane in lanes]).reshape(len(lanes), len(middles))
    begun, ended = (np.array([getattr(s, name) for s in stages])[:, None] for name in ("start_s", "end_s"))
    is_on = (begun < middles) & (middles < ended)
    # Equal columns are equal moments: who is at work, who of each kind ends last, and which stages are on, were and will be.
    columns = [
        *np.isfinite(ends).astype(int),
        *(_last_of(kind, lanes, ends) for kind in Kind),
        np.where(is_on.any(axis=0), len(stages) - 1 - is_on[::-1].argmax(axis=0), -1),
        np.where(ended < middles, ended, -np.inf).argmax(axis=0),
        np.searchsorted(begun[:, 0], middles),
    ]
    different, which = np.unique(np.array(columns), axis=1, return_inverse=True)
    seconds = np.bincount(which.ravel(), weights=np.diff(edges))
    for values, length in zip(different.T.tolist(), seconds.tolist(), strict=True):
        *who, stage, before, after = values
        at_work = frozenset(lane for lane, is_at_work in zip(lanes, who, strict=False) if is_at_work)
        last = [lanes[index] for index in who[len(lanes) :] if index >= 0]
        yield _Moment(
            seconds=length,
            at_work=at_work,
            ends_last={lane.kind: lane for lane in last if lane in at_work},
            stage=stages[stage] if stage >= 0 else None,
            before=stages[before],
            after=stages[after] if after < len(stages) else None,
            has_calls=timeline.has_calls,
        )


def _end_of_work(spans: Sequence[Span], middles: NDArray[np.float64]) -> NDArray[np.float64]:
    """At each moment, when the lane's work ends; minus infinity where it is idle.

    Spans that follow one another at once, as the parts of training, are one work.
    """
    if not spans:
        return np.full(len(middles), -np.inf)
    starts = np.array([span.start_s for span in spans])
    ends = np.array([span.end_s for span in spans])
    is_last = np.r_[starts[1:] > ends[:-1], True]
    end_of_work = ends[is_last][np.r_[0, np.cumsum(is_last)[:-1]]]
    index = np.maximum(np.searchsorted(starts, middles, side="right") - 1, 0)
    return np.where((starts[index] < middles) & (middles < ends[index]), end_of_work[index], -np.inf)


def _last_of(kind: Kind, lanes: Sequence[Lane], ends: NDArray[np.float64]) -> NDArray[np.int64]:
    """At each moment, the index of the lane of this kind whose work ends last; any where none is at work, -1 where there is none."""
    own = np.array([index for index, lane in enumerate(lanes) if lane.kind is kind], dtype=np.int64)
    return own[ends[own].argmax(axis=0)] if len(own) else np.full(ends.shape[1], -1)


# ---- who waits for whom


def _cause(moment: _Moment) -> Cause:
    """Whom the others wait for at this moment."""
    stage = moment.stage
    if stage is None:
        assert moment.after is not None, "an iteration ends with a stage"
        reason = _reason(moment.before, moment.after)
        # Short pauses before every stage add up: they are one cause, whatever stage comes next.
        return Cause(PAUSE, reason, moment.after.stage if reason == STOP else "")
    for kind in (Kind.TRAINER, Kind.ENGINE, Kind.TOOL, Kind.COLLECTORS):
        if kind in moment.ends_last:
            return Cause(kind.value, "" if kind is Kind.ENGINE else moment.ends_last[kind].name, stage.stage)
    return Cause(STAGE if moment.has_calls else WHOLE, "", stage.stage)


def _reason(before: StageTime, after: StageTime) -> str:
    if after.attempt == 1 and before.process == after.process:
        return RUNNER
    return AIRFLOW if after.attempt == 1 and after.is_job else STOP


def _waiting(timeline: Timeline, moment: _Moment, cause: Cause) -> Iterator[tuple[str, Cause]]:
    """Those who wait at this moment, each with its cause: all engines, all trainers, both, or one for another of its kind."""
    idle = {lane.kind for lane in timeline.lanes if lane.kind in WAITING_KINDS and lane.kind not in moment.ends_last}
    if idle:
        yield "+".join(sorted(idle)) + "/", cause
    for lane in timeline.lanes:
        peer = moment.ends_last.get(lane.kind)
        if lane.kind in WAITING_KINDS and peer is not None and lane not in moment.at_work:
            yield lane.key, Cause(lane.kind.value, peer.name, cause.stage)


# ---- words


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTime:
    """How long a lane worked and waited, for a table."""

    label: str
    at_work_s: float
    idle_s: float
    share: float
    """At work, of the time in which that is known."""
    waited_for: str
    """The largest wait, in words with its seconds; empty for tools and collectors, which wait for nobody."""


def lane_times(total: Account) -> list[LaneTime]:
    """Returns work and waits by lane, engines first."""
    rows = []
    for key, (busy, known) in total.lanes.items():
        lane = Lane.of(key)
        causes: dict[Cause, float] = {}
        for wait in total.waits:
            kinds, _, name = wait.who.partition("/")
            if lane.kind in kinds.split("+") and name in ("", lane.name):
                causes[wait.cause] = causes.get(wait.cause, 0.0) + wait.seconds
        largest = max(causes, key=lambda cause: causes[cause], default=None)
        rows.append(
            LaneTime(
                label=lane.label,
                at_work_s=busy,
                idle_s=max(known - busy, 0.0),
                share=busy / max(known, 1e-9),
                waited_for="" if largest is None else f"{causes[largest]:.1f} s: {cause_in_words(largest)}",
            )
        )
    return rows


_AROUND = {
    "collect": "collect was at work around its episodes",
    "train": "train was at work around its trainers",
    "sync": "sync loaded the new weights",
    "evaluate": "evaluate was at work around its episodes",
}


def largest_waits(total: Account, number: int = NUM_LARGEST) -> list[str]:
    """Returns the largest waits of a run as sentences without their full stop."""
    return [in_words(wait, total) for wait in total.waits[:number]]


def in_words(wait: Wait, total: Account) -> str:
    """Returns a wait as a sentence without its full stop.

    For example `engines waited 31.2 s (42% of iteration 3): the trainer of model group solver was at work`.
    """
    is_one = total.num_iterations == 1
    iterations = f"iteration {total.last}" if is_one else f"{total.num_iterations} iterations"
    longest = "" if is_one else f"; most in iteration {wait.longest_in} ({wait.longest_s:.1f} s)"
    share = wait.seconds / max(total.seconds, 1e-9)
    return f"{who_in_words(wait)} waited {wait.seconds:.1f} s ({share:.0%} of {iterations}): {cause_in_words(wait.cause)}{longest}"


def who_in_words(wait: Wait) -> str:
    """Names who waited: one engine or trainer, all of a kind, or all of both kinds."""
    kinds, _, name = wait.who.partition("/")
    if name:
        return _trainer(name) if kinds == Kind.TRAINER else _engine(name)
    return " and ".join(f"{kind}s" for kind in kinds.split("+"))


def cause_in_words(cause: Cause) -> str:
    """Returns whom or what was waited for, as a clause."""
    clauses = {
        Kind.TRAINER.value: f"{_trainer(cause.name)} was at work",
        Kind.ENGINE.value: f"{f'{_engine(cause.name)} was' if cause.name else 'engines were'} at work ({cause.stage})",
        Kind.TOOL.value: f"tool {cause.name} was at work ({cause.stage})",
        Kind.COLLECTORS.value: f"episodes were between two calls ({cause.stage})",
        STAGE: _AROUND.get(cause.stage, f"{cause.stage} was at work"),
        WHOLE: f"{cause.stage} was at work",
    }
    pauses = {
        AIRFLOW: "Airflow had not begun the next stage yet",
        RUNNER: "the runner had not begun the next stage yet",
        STOP: f"the run was stopped before {cause.stage} was done, or {cause.stage} failed and was repeated",
    }
    return pauses[cause.name] if cause.kind == PAUSE else clauses[cause.kind]


def _trainer(name: str) -> str:
    return f"the trainer of model group {name}"


def _engine(name: str) -> str:
    return f"the engine of {name}"  # a model group, or the base whose adapters several of them are
