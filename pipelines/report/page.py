"""page: what a run measured -> one self-contained report.html, light and dark, that works offline.

    ReportData --> the values of the page's sections (this file), charts --> templates/report.html.jinja

The templates escape everything that comes from models, tasks or configs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.report import charts
from pipelines.report.parts import Part
from pipelines.report.training_warnings import TrainingWarning

if TYPE_CHECKING:
    from jinja2 import Template

FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """The content of a report. Numbers that are missing, None or NaN are left out, never drawn as zero."""

    run_id: str
    headline: Mapping[str, Any]
    """As in report.json: `before`, `after` ({accuracy, ci95, num_tasks}), `delta`, `delta_ci95`; any may be missing."""
    iterations: Sequence[Mapping[str, Any]]
    """One mapping per iteration:
    `iteration`: int
    `metrics`: {name: float} of the whole iteration (`reward`, `tokens_per_s`, `overhead_share`, ...)
    `agents`: {agent: {`reward`, `format`, ...: float}}, with the train metrics of charts.AGENT_PANELS
    `groups`: {model_group: {train metric: float}}, with or without the prefix `train/`, see charts.TRAIN_PANELS
    `funnel`: {agent: {step: count}}, steps in the order of the funnel
    `seconds`: {stage: seconds}, and `total` where wall time is more than the sum
    `causes`: {cause: number of training episodes}, `sound` for those that did not fail
    `repeated`: {`training`, `gate, candidate` or `gate, champion`: {agent: repeated attempts at model calls}}
    `evaluation`: None or {`candidate`, `champion`, `gain`, `bound`: {mean, low, high} or None, `num_tasks`, `verdict`,
        `condition`, `causes`: {team: {cause: number}}}
    `warnings`: the warnings of `training_warnings.latest_warnings`, for the terminal
    Of a long run these are some of the iterations, see `summaries`.
    """
    control: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`before` and `after` -> one agent alone with the team's tokens, see `team_over_control`; empty: there is no control."""
    parts: Sequence[Part] = ()
    """The sections of extensions."""
    extremes: Sequence[Mapping[str, Any]] = ()
    """Mappings of the same form that hold the highest and lowest values of lines of which not every iteration is drawn."""
    num_iterations: int = 0
    """How many are finished, drawn or not."""
    total_seconds: float = 0.0
    """Of all of them."""
    warnings: Sequence[TrainingWarning] = ()
    """The latest warnings of the run."""
    num_warnings: int = 0
    """How many there were in all."""
    notes: Sequence[str] = ()
    """Sentences below the headline: what a reader must know to judge the numbers."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Name -> value, shown at the end: workflow, seed, versions, commit."""


def render(data: ReportData) -> str:
    """Returns the page as HTML text."""
    rows = list(data.iterations)
    lines = sorted([*rows, *data.extremes], key=lambda row: row["iteration"])
    from plotly.offline import get_plotlyjs

    texts = {kind: (FOLDER / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")}
    return _template("report.html.jinja").render(
        **texts,
        plotly_js=get_plotlyjs(),
        data=data,
        is_thinned=len(rows) < data.num_iterations,
        learning=charts.learning(lines),
        evaluated=(evaluated := [(row["iteration"], row["evaluation"]) for row in rows if row.get("evaluation")]),
        evaluation=[charts.evaluation(evaluated)] if evaluated else [],
        warnings=sorted(data.warnings, key=lambda warning: -warning.iteration),
        num_older_warnings=max(data.num_warnings - len(data.warnings), 0),
        training=charts.training(lines),
        training_of_agents=charts.training_of_agents(lines),
        choices=charts.choices(lines),
        parts_of_rewards=charts.parts_of_rewards(lines),
        other_metrics=charts.other_metrics(lines),
        causes=[row for row in rows if failures(row.get("causes")) or _gate_failures(row)],
        funnel_row=next((row for row in reversed(rows) if row.get("funnel")), None),
        funnel=charts.funnel(lines),
        repeated=[(row["iteration"], line) for row in rows if (line := repeated_in_words(row.get("repeated")))],
        timings=charts.timings(rows),
    )


def section(template: Path, **values: Any) -> str:
    """Returns a section of an extension, made by a template that may import the macros of `parts.html.jinja`; its values are escaped."""
    return _template(template.name, template.parent).render(**values)


def failures(causes: Mapping[str, int] | None) -> int:
    """Returns how many episodes failed, whoever caused it."""
    return sum(number for cause, number in (causes or {}).items() if cause != "sound")


def repeated_in_words(repeated: Mapping[str, Mapping[str, int]] | None) -> str:
    """Describes which model calls were repeated, and the key to raise; empty where none was."""
    if not repeated:
        return ""
    parts = [f"{n} of {agent} ({where})" for where, counts in repeated.items() for agent, n in counts.items()]
    return (
        f"{', '.join(parts)}: a replica failed, or nothing came from an engine for collect.call.call_timeout_s; where none "
        "failed, raise it"
    )


def _gate_failures(row: Mapping[str, Any]) -> int:
    return sum(failures(causes) for causes in ((row.get("evaluation") or {}).get("causes") or {}).values())


def duration(seconds: float) -> str:
    """Seconds in words, e.g. `90 s` or `6.5 min`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def moment(unix_s: float) -> str:
    """A time in words, e.g. `2026-05-01 12:30 UTC`."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _template(name: str, folder: Path = FOLDER) -> Template:
    # Imported here: the command line's help must not wait for it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "moment": moment}
    return environment.get_template(name)
