"""timeline_chart: the timeline of an iteration -> positions of what the page draws of it as SVG; see `timeline` in the templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import floor, log10

import numpy as np

from pipelines.report.figures import LANE_COLORS, STAGE_COLORS
from pipelines.report.timeline import Kind, Lane, Span, Timeline, union
from pipelines.report.waits import WAITING_KINDS
from stores.journal.stage_results import Scored, Trained

LEFT, RIGHT, WIDTH = 190.0, 980.0, 1180.0
"""Where the time begins and ends, and the width of the whole, in units of the drawing."""
TOP, ROW_HEIGHT, BAR_HEIGHT = 6.0, 26.0, 18.0
MOST_TOOLS = 6
"""Tools that have a row, those that worked most."""
CHARACTER = 6.4
"""Width of a character; what does not fit into its bar is left out."""
OPACITY = {"learn": 1.0, Trained.STAGE: 1.0, "calls": 0.3}
"""Of a bar, by what it is of; others are 0.55."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One rectangle of a row."""

    x: float
    width: float
    color: str
    opacity: float
    title: str
    """Shown where the mouse rests."""
    label: str = ""
    """Written into it; empty where it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One lane: what worked in it is a bar, what is not covered waited."""

    label: str
    y: float
    bars: Sequence[Bar]
    note: str
    """At the right: how much it worked."""
    gaps: Sequence[tuple[float, str]] = ()
    """Middle of each wait that is long enough to be named, and its seconds in words."""
    area: str = ""
    """Path of the number of calls at once over the time; empty where it has none."""
    color: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One iteration as a drawing."""

    title: str
    width: float
    height: float
    left: float
    right: float
    rows: Sequence[Row]
    borders: Sequence[float]
    """Where a stage begins."""
    stages: Mapping[str, str]
    """Colours of its stages, by name."""
    ticks: Sequence[tuple[float, str]]
    """Position and label of the marks of the time axis."""
    note: str = ""


def timeline_chart(timeline: Timeline) -> Chart:
    """Draws an iteration: a row of its stages, or several where they overlap, then one per engine, trainer and tool and one of the collectors."""
    scale = _Scale(timeline)
    tools = [lane for lane in timeline.lanes if lane.kind is Kind.TOOL]
    shown = sorted(tools, key=lambda tool: -_seconds(timeline.lanes[tool]))[:MOST_TOOLS]
    lanes = [lane for lane in timeline.lanes if lane.kind is not Kind.TOOL or lane in shown]
    rows = _stage_rows(timeline, scale)
    borders = [bar.x for row in rows for bar in row.bars]
    rows += [
        _lane_row(timeline, lane, scale, y=TOP + ROW_HEIGHT * index) for index, lane in enumerate(lanes, len(rows))
    ]
    notes = [f"{len(tools) - len(shown)} more tools worked less."] if len(tools) > len(shown) else []
    if not timeline.has_calls:
        notes.append("No traces of it are stored: engines, tools and collectors are unknown.")
    return Chart(
        title=f"Iteration {timeline.iteration}, {timeline.seconds:.1f} s",
        width=WIDTH,
        height=TOP + ROW_HEIGHT * len(rows) + 26,
        left=LEFT,
        right=RIGHT,
        rows=rows,
        stages={name: STAGE_COLORS[name] for name, _ in stage_spans(timeline)},
        borders=borders,
        ticks=[(scale.x(timeline.start_s + second), f"{second:g} s") for second in _ticks(timeline.seconds)],
        note=" ".join(notes),
    )


class _Scale:
    """Turns Unix seconds into positions."""

    def __init__(self, timeline: Timeline) -> None:
        self._begin, self._per_s = timeline.start_s, (RIGHT - LEFT) / max(timeline.seconds, 1e-9)

    def x(self, time_s: float) -> float:
        return LEFT + (time_s - self._begin) * self._per_s

    def bar(self, span: Span, *, color: str, opacity: float = 1.0, label: str = "") -> Bar:
        x, width = self.x(span.start_s), max(self.x(span.end_s) - self.x(span.start_s), 0.5)
        seconds = span.end_s - span.start_s
        fits = (text for text in (label, label.partition(" ")[0]) if len(text) * CHARACTER + 4 < width)
        title = f"{span.what}: {seconds:.2f} s, from {span.start_s - self._begin:.2f} s on"
        return Bar(x=x, width=width, color=color, opacity=opacity, title=title, label=next(fits, ""))


def _stage_rows(timeline: Timeline, scale: _Scale) -> list[Row]:
    at_work = union(np.array([(stage.start_s, stage.end_s) for stage in timeline.stages]))
    between_s = timeline.seconds - float((at_work[:, 1] - at_work[:, 0]).sum())
    return [
        Row(
            label=label,
            y=TOP + ROW_HEIGHT * index,
            bars=[
                scale.bar(span, color=STAGE_COLORS[stage], label=f"{span.what} {span.end_s - span.start_s:.1f} s")
                for stage, span in spans
            ],
            note="" if index else f"{max(between_s, 0):.2f} s between them",
        )
        for index, (label, spans) in enumerate(stage_rows(timeline).items())
    ]


def stage_rows(timeline: Timeline) -> dict[str, list[tuple[str, Span]]]:
    """Returns name and time of the stages by the label of the row that shows them; those of one row do not overlap.

    One row, where none overlap; else those of engines and those of trainers, each in a further row while it waits for another's end.
    """
    spans = sorted(stage_spans(timeline), key=lambda each: each[1].start_s)
    if all(span.end_s <= after.start_s for (_, span), (_, after) in pairwise(spans)):
        return {"stages": spans}
    rows: dict[str, list[tuple[str, Span]]] = {}
    for stage, span in spans:
        kind = "trainers" if stage in (Scored.STAGE, Trained.STAGE) else "engines"
        labels = (f"stages of {kind}" if number == 1 else f"stages of {kind} {number}" for number in count(1))
        label = next(label for label in labels if label not in rows or rows[label][-1][1].end_s <= span.start_s)
        rows.setdefault(label, []).append((stage, span))
    return dict(sorted(rows.items()))


def stage_spans(timeline: Timeline) -> Iterator[tuple[str, Span]]:
    """Yields name and time of each stage, in order; of one that is done per model group, as long as any of them is at it."""
    for name in dict.fromkeys(stage.stage for stage in timeline.stages):
        own = [stage for stage in timeline.stages if stage.stage == name]
        for start, end in union(np.array([(stage.start_s, stage.end_s) for stage in own])).tolist():
            inside = [stage for stage in own if start <= stage.start_s <= end]
            yield name, Span(start, end, inside[0].label if len(inside) == 1 else name)


def _lane_row(timeline: Timeline, lane: Lane, scale: _Scale, *, y: float) -> Row:
    spans, color = timeline.lanes[lane], LANE_COLORS[lane.kind]
    seconds = _seconds(spans)
    at_once = timeline.at_once.get(lane, ())
    unit = "episodes" if lane.kind is Kind.COLLECTORS else "calls"
    most = f", up to {max(at_once):.0f} {unit}" if at_once and max(at_once) >= 1 else ""
    return Row(
        label=lane.label,
        y=y,
        bars=[
            scale.bar(span, color=color, opacity=OPACITY.get(span.what, 0.55), label=_part_label(span))
            for span in spans
        ],
        note=f"{seconds:.1f} s ({seconds / max(timeline.seconds, 1e-9):.0%}){most}",
        gaps=list(_gaps(timeline, spans, scale)) if lane.kind in WAITING_KINDS else (),
        area=_area(at_once, y=y),
        color=color,
    )


def _gaps(timeline: Timeline, spans: Sequence[Span], scale: _Scale) -> Iterator[tuple[float, str]]:
    edges = [timeline.start_s, *(time for span in spans for time in (span.start_s, span.end_s)), timeline.end_s]
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        label = f"waits {end - begin:.1f} s"
        if len(label) * CHARACTER < scale.x(end) - scale.x(begin):
            yield (scale.x(begin) + scale.x(end)) / 2, label


def _part_label(span: Span) -> str:
    return "" if span.what == "calls" else f"{span.what} {span.end_s - span.start_s:.1f} s"


def _area(at_once: Sequence[float], *, y: float) -> str:
    """An SVG path under the numbers, the largest of which is as high as a bar."""
    most = max(at_once, default=0.0)
    if most <= 0:
        return ""
    piece = (RIGHT - LEFT) / len(at_once)
    bottom = y + BAR_HEIGHT
    steps = "".join(f"V{bottom - BAR_HEIGHT * n / most:.1f}h{piece:.2f}" for n in at_once)
    return f"M{LEFT:.1f} {bottom:.1f}{steps}V{bottom:.1f}Z"


def _ticks(seconds: float) -> list[float]:
    """Up to ten round numbers of seconds."""
    rough = max(seconds, 1e-3) / 8
    unit = 10 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [round(index * step, 6) for index in range(int(seconds / step) + 1)]


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.end_s - span.start_s for span in spans)
