"""report: what a run measured -> one self-contained report.html that works offline, and a table for the terminal.

    ReportData --> sections (this file) + figures (report_figures) --> page with Plotly inlined once (report_page)

Everything that comes from models, tasks or configs is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from pipelines.report import figures as figures
from pipelines.report.page import page
from pipelines.report.warnings_table import symptom_lines, symptoms_table
from pipelines.report.watch_table import watch_tables
from stores.types import EpisodeRewards, Trace, Turn, TurnReward

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleEpisode:
    """A trace and, where it was scored, its credit."""

    trace: Trace
    rewards: EpisodeRewards | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One task, as the team solved it before and after."""

    before: ExampleEpisode | None = None
    after: ExampleEpisode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """What a report shows. Numbers that are missing, None or NaN are left out, never drawn as zero."""

    run_id: str
    headline: Mapping[str, Any]
    """As in report.json: `before`, `after` ({accuracy, ci95, num_tasks}), `delta`, `delta_ci95`; any may be missing."""
    iterations: Sequence[Mapping[str, Any]]
    """One mapping per iteration:
    `iteration`: int
    `metrics`: {name: float} of the whole iteration (`reward`, `tokens_per_s`, `overhead_share`, ...)
    `agents`: {agent: {`reward`, `format`, ...: float}}, with the train metrics of report_figures.AGENT_PANELS
    `groups`: {model_group: {train metric: float}}, with or without the prefix `train/`, see report_figures.TRAIN_PANELS
    `funnel`: {agent: {step: count}}, steps in the order of the funnel
    `seconds`: {stage: seconds}, and `total` where wall time is more than the sum
    `evaluation`: None or {`candidate`, `champion`, `gain`: {mean, low, high} or None, `num_tasks`, `verdict`,
        `condition`}
    `symptoms`: the warnings of `symptoms.find_symptoms`, for the terminal; the page finds them again
    """
    examples: Sequence[Example] = ()
    notes: Sequence[str] = ()
    """Sentences below the headline: what a reader must know to judge the numbers."""
    looks: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    """Latest looks by kind, see `watching.look`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Name -> value, shown at the end: workflow, seed, versions, commit."""


def render(data: ReportData) -> str:
    """The page as text."""
    rows = list(data.iterations)
    sections = [
        _headline(data),
        _section("Learning", "Per agent, mean over the episodes of an iteration.", _charts(figures.learning(rows))),
        _section(
            "Evaluation", "Held-out tasks of the gate, with 95% intervals; the gain's is the gate's.", _evaluation(rows)
        ),
        _section(
            "Symptoms", "Figures that left their usual range, judged by the run's own history.", symptoms_table(rows)
        ),
        _section(
            "Watch",
            "What episodes are like, against the champion's own history; what is usual follows from earlier windows.",
            watch_tables(data.looks),
        ),
        _section("Training", "Per model group.", _charts(figures.training(rows)) + _more_metrics(rows)),
        _section("Training, per agent", "Over each agent's own turns.", _charts(figures.training_of_agents(rows))),
        _section("Funnel", "Turns of each agent, from call to gradient.", _funnel(rows)),
        _section("Time", "Seconds per stage, and the share that neither samples nor trains.", _time(rows)),
        _section("Episodes", "The same tasks before and after. Credit is what each turn earned.", _examples(data)),
        _section("Run", "", _facts(data.facts)),
    ]
    return page(title=f"{data.run_id} · Troupe", body="\n".join(sections))


def _section(title: str, hint: str, body: str) -> str:
    if not body:
        return ""
    hint_html = f"<p class='hint'>{escape(hint)}</p>" if hint else ""
    return f"<section><h2>{escape(title)}</h2>{hint_html}{body}</section>"


def _charts(specs: Iterable[figures.Figure]) -> str:
    cards = [
        f"<figure class='card'><figcaption>{escape(f.title)}</figcaption>"
        f"<div class='chart'><script type='application/json'>{f.json()}</script></div></figure>"
        for f in specs
    ]
    return f"<div class='grid'>{''.join(cards)}</div>" if cards else ""


# ---- headline


def _headline(data: ReportData) -> str:
    headline = data.headline
    before, after = headline.get("before") or {}, headline.get("after") or {}
    cards = [_accuracy_card("Before", before), _accuracy_card("After", after, is_after=True)]
    delta = headline.get("delta")
    if delta is not None:
        interval = _interval_text(headline.get("delta_ci95"), signed=True)
        cards.append(_card("Gain", f"{100 * delta:+.1f}", "points", interval, tone="good" if delta > 0 else "bad"))
    num = len(data.iterations)
    seconds = sum(figures.total_seconds(row) for row in data.iterations)
    cards.append(_card("Iterations", str(num), "", f"{_duration(seconds)} in stages" if seconds else ""))
    notes = "".join(f"<p>{escape(note)}</p>" for note in data.notes)
    return (
        f"<header><h1>{escape(data.run_id)}</h1></header>"
        f"<div class='cards'>{''.join(c for c in cards if c)}</div>"
        f"{f'<div class=notes>{notes}</div>' if notes else ''}"
    )


def _accuracy_card(name: str, result: Mapping[str, Any], *, is_after: bool = False) -> str:
    accuracy = result.get("accuracy")
    if accuracy is None:
        return ""
    low, high = result.get("ci95") or (accuracy, accuracy)
    scale = (
        f"<div class='scale'><i style='left:{100 * low:.2f}%;width:{100 * max(high - low, 0):.2f}%'></i>"
        f"<b style='left:{100 * accuracy:.2f}%'></b></div>"
    )
    tasks = f" · {result['num_tasks']} tasks" if "num_tasks" in result else ""
    foot = _interval_text(result.get("ci95")) + tasks
    return _card(name, f"{100 * accuracy:.1f}", "% right", foot, extra=scale, tone="accent" if is_after else "")


def _card(name: str, value: str, unit: str, foot: str, *, extra: str = "", tone: str = "") -> str:
    return (
        f"<div class='card stat {tone}'><span class='name'>{escape(name)}</span>"
        f"<span class='value'>{escape(value)}<small>{escape(unit)}</small></span>{extra}"
        f"<span class='foot'>{escape(foot)}</span></div>"
    )


def _interval_text(interval: Sequence[float] | None, *, signed: bool = False) -> str:
    if not interval:
        return ""
    low, high = (f"{100 * x:+.1f}" if signed else f"{100 * x:.1f}" for x in interval)
    return f"95% interval {low} to {high}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


# ---- evaluation


def _evaluation(rows: Sequence[Mapping[str, Any]]) -> str:
    judged = [(row["iteration"], row["evaluation"]) for row in rows if row.get("evaluation")]
    if not judged:
        return ""
    body = []
    for iteration, found in judged:
        verdict = str(found.get("verdict") or "")
        cells = [
            f"<td>{iteration}</td>",
            *(f"<td class='num'>{_estimate(found.get(key), signed=key == 'gain')}</td>" for key in _COLUMNS),
            f"<td class='num'>{found.get('num_tasks') or ''}</td>",
            f"<td><span class='badge {_TONES.get(verdict, '')}'>{escape(verdict)}</span></td>",
            f"<td class='wide'>{escape(str(found.get('condition') or ''))}</td>",
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    names = ["Iteration", *(c.capitalize() for c in _COLUMNS), "Tasks", "Verdict", "What decided"]
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f"<div class='card scroll'><table><tr>{head}</tr>{''.join(body)}</table></div>"
    return _charts([figures.evaluation(judged)]) + table


_COLUMNS = ("candidate", "champion", "gain")
_TONES = {"promote": "good", "reject": "bad", "inconclusive": "warn"}


def _estimate(interval: Mapping[str, float] | None, *, signed: bool) -> str:
    if not interval:
        return "–"
    form = "{:+.3f}" if signed else "{:.3f}"
    mean, low, high = (form.format(interval[key]) for key in ("mean", "low", "high"))
    return f"{mean} <span class='dim'>[{low}, {high}]</span>"


# ---- training, funnel, time


def _more_metrics(rows: Sequence[Mapping[str, Any]]) -> str:
    more = _charts(figures.other_metrics(rows))
    return f"<details class='more'><summary>All other metrics</summary>{more}</details>" if more else ""


def _funnel(rows: Sequence[Mapping[str, Any]]) -> str:
    last = next((row for row in reversed(rows) if row.get("funnel")), None)
    if last is None:
        return ""
    steps = list(dict.fromkeys(step for counts in last["funnel"].values() for step in counts))
    head = "".join(f"<th>{escape(step.replace('_', ' '))}</th>" for step in steps)
    body = []
    for agent, counts in last["funnel"].items():
        first = next(iter(counts.values()), 0)
        cells = "".join(_funnel_cell(counts.get(step), first) for step in steps)
        body.append(f"<tr><th>{escape(agent)}</th>{cells}</tr>")
    table = (
        f"<figure class='card scroll'><figcaption>Iteration {last['iteration']}</figcaption>"
        f"<table class='funnel'><tr><th></th>{head}</tr>{''.join(body)}</table></figure>"
    )
    return table + _charts(figures.funnel(rows))


def _funnel_cell(count: int | None, first: int) -> str:
    if count is None:
        return "<td>–</td>"
    share = count / first if first else 0.0
    return (
        f"<td><div class='bar'><i style='width:{100 * min(share, 1):.1f}%'></i>"
        f"<span>{count:,}</span><span class='dim'>{100 * share:.0f}%</span></div></td>"
    )


def _time(rows: Sequence[Mapping[str, Any]]) -> str:
    return _charts(figures.timings(rows))


# ---- episodes


def _examples(data: ReportData) -> str:
    return "".join(_example(example) for example in data.examples)


def _example(example: Example) -> str:
    sides = [(name, e) for name, e in (("Before", example.before), ("After", example.after)) if e is not None]
    if not sides:
        return ""
    task = sides[0][1].trace.task
    columns = "".join(_episode(name, episode) for name, episode in sides)
    return (
        f"<div class='card example'><div class='task'><b>{escape(task.prompt)}</b>"
        f"<span class='dim'>right answer: {escape(' or '.join(task.answers))}</span></div>"
        f"<div class='sides'>{columns}</div></div>"
    )


def _episode(name: str, episode: ExampleEpisode) -> str:
    trace, rewards = episode.trace, episode.rewards
    credit = {r.turn_index: r for r in rewards.rewards} if rewards else {}
    badge = ""
    if rewards is not None:
        tone = "good" if rewards.outcome >= 1 else "bad" if rewards.outcome <= 0 else "warn"
        badge = f"<span class='badge {tone}'>outcome {rewards.outcome:g}</span>"
    answer = f"answer <b>{escape(trace.answer)}</b>" if trace.answer else "no answer"
    error = f"<p class='fault'>{escape(trace.error)}</p>" if trace.error else ""
    turns = "".join(_turn(turn, credit.get(turn.turn_index)) for turn in trace.turns)
    return (
        f"<div class='side'><div class='head'><h3>{name}</h3>{badge}<span>{answer}</span>"
        f"<span class='dim'>{trace.status} · {escape(trace.episode_id[:12])}</span></div>{error}{turns}</div>"
    )


def _turn(turn: Turn, reward: TurnReward | None) -> str:
    if turn.is_format_ok:
        verdict = "<span class='badge good'>format ok</span>"
    else:
        verdict = f"<span class='badge bad'>{escape(turn.format_fault or 'format broken')}</span>"
    paid = ""
    if reward is not None:
        parts = ", ".join(f"{escape(part)} {value:+g}" for part, value in reward.breakdown.items())
        tone = "good" if reward.reward > 0 else "bad" if reward.reward < 0 else ""
        paid = f"<span class='badge {tone}'>credit {reward.reward:+.2f}</span><span class='dim'>{parts}</span>"
    fields = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value) or '<i>empty</i>'}</dd>" for name, value in turn.fields.items()
    )
    size = f"{len(turn.completion_token_ids)} tokens · {turn.finish_reason} · v{turn.policy_version}"
    return (
        f"<div class='turn'><div class='head'><b>{escape(turn.agent)}</b>{verdict}{paid}"
        f"<span class='dim'>{size}</span></div>"
        f"<pre>{escape(turn.completion_text) or '<i>empty</i>'}</pre>"
        f"<details><summary>Parsed fields</summary><dl>{fields}</dl></details>"
        f"<details><summary>Prompt</summary><pre>{escape(turn.prompt_text)}</pre></details></div>"
    )


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<div class='card scroll'><table class='facts'>{rows}</table></div>" if rows else ""


# ---- the terminal

_GROUP_NAMES = ("kl", "entropy", "logprob gap", "grad norm")
_GAP_MAX = ("logprob_gap_max", "gap_max", "max_abs")


def iteration_table(row: Mapping[str, Any]) -> Group:
    """One row per agent (reward, format, funnel); below it one line per model group and one for the seconds.

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
    stages = [f"{k} {v:.1f}" for k, v in (row.get("seconds") or {}).items() if k != "total"]
    overhead = figures.overhead_share(row)
    if stages:
        lines.append("seconds: " + ", ".join(stages) + (f" · overhead {overhead:.0%}" if overhead is not None else ""))
    found = row.get("evaluation")
    if found and found.get("verdict"):
        lines.append(f"gate: {found['verdict']}, {found.get('condition', '')}")
    return "\n".join([*lines, *symptom_lines(row)])


def _short(step: str) -> str:
    return {"non_zero_advantage": "adv ≠ 0", "episodes_ok": "ok", "with_ids": "with ids"}.get(
        step, step.replace("_", " ")
    )


def _number(value: Any, spec: str) -> str:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return format(value, spec) if is_number else "–"
