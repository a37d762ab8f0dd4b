"""shown: explanations that are kept -> a section of the report, and a view for `troupe show` and `troupe why`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table

from pipelines.report.inspect import ForeignText
from pipelines.report.page import section
from pipelines.report.parts import Part
from pipelines.run.run import Run
from stores.traces.explanations import find_explanation, newest_explanations
from stores.types import Trace

TEMPLATE = Path(__file__).with_name("why.html.jinja")
NUM_EXPLANATIONS = 20


def part(run: Run, last: int) -> Part | None:
    """Returns the section on what was found last; None where nobody asked."""
    explanations = newest_explanations(run.traces_uri, run.run_id, limit=NUM_EXPLANATIONS)
    return Part(html=section(TEMPLATE, explanations=explanations)) if explanations else None


def shown(run: Run, trace: Trace) -> RenderableType | None:
    """Shows what was found about an episode; None where nobody asked."""
    explanation = find_explanation(run.traces_uri, trace.run_id, trace.episode_id)
    return None if explanation is None else explanation_view(explanation)


def explanation_view(explanation: Mapping[str, Any]) -> RenderableType:
    """Shows what replays say of every turn, and of the one that cost most."""
    table = Table("turn", "agent", "outcome if it is sampled anew", "replays")
    for value in explanation["values"]:
        is_found = value["turn_index"] == explanation["turn_index"]
        before = "–" if value["before"] is None else f"{value['before']:.3f}"
        cells = (str(value["turn_index"]), value["agent"], before, str(value["num_replays"]))
        table.add_row(*map(ForeignText, cells), style="bold" if is_found else None)
    low, high = explanation["ci95"]
    turn = f"turn {explanation['turn_index']} ({explanation['agent']})"
    cost = f"{explanation['cost']:+.3f} [{low:+.3f}, {high:+.3f}]"
    verdict = (
        f"{turn} cost most: {cost}, from {explanation['before']:.3f} before it to {explanation['after']:.3f} after it"
    )
    if not explanation["is_certain"]:
        verdict = f"no turn certainly cost anything; {verdict}: ask for more --replays, or the team cannot do better from any turn"
    parts: list[RenderableType] = [
        ForeignText(
            f"episode {explanation['episode_id']}, outcome {explanation['outcome']:g}, {explanation['num_replays']} replays"
        ),
        table,
        ForeignText(verdict, style="bold"),
        Panel(ForeignText(explanation["completion"]), title=ForeignText(f"{turn} said"), title_align="left"),
    ]
    if alternative := explanation["alternative"]:
        title = f"in a replay that earned {alternative['outcome']:g} ({alternative['episode_id']})"
        parts.append(Panel(ForeignText(alternative["completion"]), title=ForeignText(title), title_align="left"))
    return Group(*parts)
