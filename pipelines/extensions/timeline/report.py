"""report: the last timelines of a run -> the largest waits in words, the work of each lane, timeline.json."""

from __future__ import annotations

import json
from pathlib import Path

from pipelines.extensions.timeline.chrome_trace import chrome_trace
from pipelines.extensions.timeline.timeline import largest_waits, latest_timelines, read_timeline, work_of_lanes
from pipelines.report.page import section
from pipelines.report.parts import Part
from pipelines.run.run import Run

TEMPLATE = Path(__file__).with_name("timeline.html.jinja")
HEADING = "the largest waits (every stage, call and trainer: open timeline.json in ui.perfetto.dev)"


def part(run: Run, last: int) -> Part:
    """Returns what the report says of the iterations up to `last`; the trace has the one that is going on, too."""
    timelines = latest_timelines(run, last)
    waits, work = largest_waits(timelines), work_of_lanes(timelines)
    sentences = [str(wait["sentence"]) for wait in waits]
    going_on = read_timeline(run, last + 1)
    trace = chrome_trace(run.run_id, [*timelines, *([] if going_on is None else [going_on])])
    return Part(
        html=section(TEMPLATE, waits=sentences, work=work) if work else "",
        values={"waits": waits},
        files={"timeline.json": json.dumps(trace)},
        lines=[HEADING, *(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))] if waits else (),
    )
