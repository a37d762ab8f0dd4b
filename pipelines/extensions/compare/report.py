"""report: what `troupe compare` found last -> a section of the report, and `comparison` in report.json."""

from __future__ import annotations

import json
from pathlib import Path

from pipelines.report.page import section
from pipelines.report.parts import Part
from pipelines.run.run import Run
from stores.files import read_file

TEMPLATE = Path(__file__).with_name("compare.html.jinja")


def part(run: Run, last: int) -> Part:
    """Returns what the report says of a team that was compared with one agent; `comparison` is null where nobody did that."""
    data = read_file(comparison_place(run))
    comparison = None if data is None else json.loads(data)
    html = "" if comparison is None else section(TEMPLATE, comparison=comparison)
    return Part(html=html, is_result=True, values={"comparison": comparison})


def comparison_place(run: Run) -> str:
    """Names the file that `troupe compare` writes."""
    return f"{run.folder}/compare.json"
