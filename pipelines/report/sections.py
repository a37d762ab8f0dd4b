"""sections: what a run measured -> one self-contained report.html that works offline, and a table for the terminal.

    ReportData --> the values of the page's sections (this file), charts (figures) --> templates/report.html.jinja (page)

The templates escape everything that comes from models, tasks or configs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipelines.monitoring.training_warnings import TrainingWarning, all_warnings
from pipelines.report import figures
from pipelines.report.page import render_template
from pipelines.report.timeline import Timeline
from pipelines.report.timeline_chart import timeline_chart
from pipelines.report.waits import Account, lane_times, largest_waits
from pipelines.report.warnings_table import newest_first, warning_lines
from pipelines.report.watch_table import watch_tables
from stores.journal.stage_results import CHOSEN
from stores.types import EpisodeRewards, Trace, Turn, TurnReward

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleEpisode:
    """An episode to show: its trace and, if it was scored, its rewards."""

    trace: Trace
    rewards: EpisodeRewards | None = None
    command: str = ""
    """Shows the whole episode in a terminal."""

    def reward_of(self, turn: Turn) -> TurnReward | None:
        """The reward of one of its turns; None where it has none."""
        rewards = self.rewards.rewards if self.rewards else ()
        return next((reward for reward in rewards if reward.turn_index == turn.turn_index), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One task, as two teams solved it."""

    title: str
    """Why it is shown."""
    episodes: Mapping[str, ExampleEpisode]
    """By what each team is called."""


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
    `agents`: {agent: {`reward`, `format`, ...: float}}, with the train metrics of figures.AGENT_PANELS
    `groups`: {model_group: {train metric: float}}, with or without the prefix `train/`, see figures.TRAIN_PANELS
    `funnel`: {agent: {step: count}}, steps in the order of the funnel
    `seconds`: {stage: seconds}, and `total` where wall time is more than the sum
    `causes`: {cause: number of training episodes}, `sound` for those that did not fail
    `repeated`: {`training`, `gate, candidate` or `gate, champion`: {agent: repeated attempts at model calls}}
    `evaluation`: None or {`candidate`, `champion`, `gain`, `bound`: {mean, low, high} or None, `num_tasks`, `verdict`,
        `condition`, `causes`: {team: {cause: number}}}
    `warnings`: the warnings of `training_warnings.latest_warnings`, for the terminal
    `time`: the `waits.Account` of the iteration, in the report only
    Of a long run these are some of the iterations, see `so_far`.
    """
    form: Mapping[str, Any] | None = None
    """What form and substance have in the gain, see `form_of_gain`."""
    control: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`before` and `after` -> one agent alone with the team's tokens, see `over_control`; empty: there is no control."""
    comparison: Mapping[str, Any] | None = None
    """The content of compare.json, see `runners.compare`; None where nobody compared the team with one agent."""
    explanations: Sequence[Mapping[str, Any]] = ()
    """What `troupe why` found about failed episodes, see `stores.traces.explanations`."""
    extremes: Sequence[Mapping[str, Any]] = ()
    """Mappings of the same form that hold the highest and lowest values of lines of which not every iteration is drawn."""
    num_iterations: int | None = None
    """How many are finished; None: as many as are drawn."""
    total_seconds: float | None = None
    """Of all of them; None: of those that are drawn."""
    warnings: Sequence[TrainingWarning] | None = None
    """The latest warnings of the run; None: those of the iterations that are drawn."""
    num_warnings: int | None = None
    """How many there were in all."""
    examples: Sequence[Example] = ()
    time: Account = field(default_factory=Account)
    """Who worked in all iterations, and who waited for whom."""
    timelines: Sequence[Timeline] = ()
    """The last iterations, in order; those that are drawn whole."""
    notes: Sequence[str] = ()
    """Sentences below the headline: what a reader must know to judge the numbers."""
    checks: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    """The latest drift check of each kind, see `watching.check_windows`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Name -> value, shown at the end: workflow, seed, versions, commit."""


def render(data: ReportData) -> str:
    """Returns the page as HTML text."""
    rows = list(data.iterations)
    lines = sorted([*rows, *data.extremes], key=lambda row: row["iteration"])
    warnings = all_warnings(rows) if data.warnings is None else data.warnings
    total_seconds = sum(map(figures.total_seconds, rows)) if data.total_seconds is None else data.total_seconds
    num_iterations = len(rows) if data.num_iterations is None else data.num_iterations
    return render_template(
        "report.html.jinja",
        data=data,
        num_iterations=num_iterations,
        is_thinned=len(rows) < num_iterations,
        total_seconds=total_seconds,
        learning=figures.learning(lines),
        evaluated=(evaluated := [(row["iteration"], row["evaluation"]) for row in rows if row.get("evaluation")]),
        evaluation=[figures.evaluation(evaluated)] if evaluated else [],
        warnings=newest_first(warnings),
        num_older_warnings=max((data.num_warnings or 0) - len(warnings), 0),
        watched=watch_tables(data.checks),
        training=figures.training(lines),
        training_of_agents=figures.training_of_agents(lines),
        choices=figures.choices(lines),
        other_metrics=figures.other_metrics(lines),
        causes=[row for row in rows if failures(row.get("causes")) or _gate_failures(row)],
        funnel_row=next((row for row in reversed(rows) if row.get("funnel")), None),
        funnel=figures.funnel(lines),
        repeated=[(row["iteration"], line) for row in rows if (line := repeated_in_words(row.get("repeated")))],
        timings=figures.timings(rows),
        work=figures.work(rows),
        waits=largest_waits(data.time),
        lane_times=lane_times(data.time),
        timelines=[timeline_chart(timeline) for timeline in reversed(data.timelines)],
        examples=data.examples,
    )


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


# ---- the terminal

_GROUP_NAMES = ("kl", "entropy", "logprob gap", "grad norm")
_GAP_MAX = ("logprob_gap_max", "gap_max", "max_abs")


def iteration_table(row: Mapping[str, Any]) -> Group:
    """Returns a table with a row per agent (reward, format, funnel), then a line per model group and one for the seconds.

    `row` is an iteration as in `ReportData.iterations`; a dash stands for what was not measured.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    agents, funnel = row.get("agents") or {}, row.get("funnel") or {}
    steps = list(dict.fromkeys(step for counts in funnel.values() for step in counts))
    table = Table(box=SIMPLE_HEAD, title=escape(_title(row)), title_justify="left", title_style="bold")
    table.add_column("agent", overflow="fold")
    for name in ("reward", "format", *(_short(step) for step in steps)):
        table.add_column(name, justify="right", overflow="fold")
    for agent in dict.fromkeys([*agents, *funnel]):
        values, counts = agents.get(agent) or {}, funnel.get(agent) or {}
        cells = [_number(values.get("reward"), ".3f"), _number(values.get("format"), ".1%")]
        cells += [_number(counts.get(step), ",.0f") for step in steps]
        table.add_row(escape(agent), *cells)
    return Group(table, Text(_caption(row)))


def _title(row: Mapping[str, Any]) -> str:
    metrics = row.get("metrics") or {}
    parts = [f"iteration {row['iteration']}"]
    for name, label, spec in (("reward", "reward", ".3f"), ("accuracy", "accuracy", ".1%")):
        if _number(metrics.get(name), spec) != "–":
            parts.append(f"{label} {metrics[name]:{spec}}")
    speed = _number(metrics.get("tokens_per_s"), ",.0f")
    parts += [f"{speed} tokens/s"] if speed != "–" else []
    seconds = figures.total_seconds(row)
    return " · ".join([*parts, f"{seconds:.1f} s"] if seconds else parts)


def _caption(row: Mapping[str, Any]) -> str:
    lines = []
    for group, values in (row.get("groups") or {}).items():
        parts = []
        for name, (_, names) in zip(_GROUP_NAMES, figures.TRAIN_PANELS, strict=True):
            value = _number(figures.first_metric(values, names), ".3g")
            gap_max = _number(figures.first_metric(values, _GAP_MAX), ".2g") if name == "logprob gap" else "–"
            if value != "–":
                parts.append(f"{name} {value}" + (f" (max {gap_max})" if gap_max != "–" else ""))
        lines.append(f"{group}: {', '.join(parts)}" if parts else f"{group}: not trained")
    cached = {agent: _number(v.get("cached_prompt_share"), ".0%") for agent, v in (row.get("agents") or {}).items()}
    if shares := ", ".join(f"{agent} {share}" for agent, share in cached.items() if share != "–"):
        lines.append(f"prompt tokens from the prefix cache: {shares}")
    lines += [f"{agent} chooses: {shares}" for agent, v in (row.get("agents") or {}).items() if (shares := _chosen(v))]
    stages = [f"{k} {v:.1f}" for k, v in (row.get("seconds") or {}).items() if k != "total"]
    overhead = figures.overhead_share(row)
    if failures(row.get("causes")):
        lines.append("failed: " + ", ".join(f"{n} by {c}" for c, n in sorted(row["causes"].items()) if c != "sound"))
    if repeated := repeated_in_words(row.get("repeated")):
        lines.append(f"repeated calls: {repeated}")
    if stages:
        lines.append("seconds: " + ", ".join(stages) + (f" · overhead {overhead:.0%}" if overhead is not None else ""))
    result = row.get("evaluation")
    if result and result.get("verdict"):
        lines.append(f"gate: {result['verdict']}, {result.get('condition', '')}")
    return "\n".join([*lines, *warning_lines(row)])


def _chosen(values: Mapping[str, Any]) -> str:
    """Describes an agent's choices; empty where it makes none."""
    taken = {name.removeprefix(CHOSEN): share for name, share in values.items() if name.startswith(CHOSEN)}
    return ", ".join(f"{name} {share:.0%}" for name, share in sorted(taken.items(), key=lambda item: -item[1]))


def _short(step: str) -> str:
    return {"non_zero_advantage": "adv ≠ 0", "episodes_ok": "ok", "with_ids": "with ids"}.get(
        step, step.replace("_", " ")
    )


def _number(value: Any, spec: str) -> str:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return format(value, spec) if is_number else "–"
