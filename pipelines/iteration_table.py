"""iteration_table: what one iteration measured -> a short table for the terminal, legible in 100 columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.report_figures import TRAIN_PANELS, first_metric, overhead_share, total_seconds

if TYPE_CHECKING:
    from rich.console import Group

_GROUP_NAMES = ("kl", "entropy", "logprob gap", "grad norm")
_GAP_MAX = ("logprob_gap_max", "gap_max", "max_abs")


def iteration_table(row: Mapping[str, Any]) -> Group:
    """One row per agent (reward, format, funnel); below it one line per model group and one for the seconds.

    `row` is an iteration as in `pipelines.report.ReportData.iterations`; a dash stands for what was not measured.
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
    seconds = total_seconds(row)
    return " · ".join([*parts, f"{seconds:.1f} s"] if seconds else parts)


def _caption(row: Mapping[str, Any]) -> str:
    lines = []
    for group, values in (row.get("groups") or {}).items():
        parts = []
        for name, (_, names) in zip(_GROUP_NAMES, TRAIN_PANELS, strict=True):
            value = _number(first_metric(values, names), ".3g")
            gap_max = _number(first_metric(values, _GAP_MAX), ".2g") if name == "logprob gap" else "–"
            if value != "–":
                parts.append(f"{name} {value}" + (f" (max {gap_max})" if gap_max != "–" else ""))
        lines.append(f"{group}: {', '.join(parts)}" if parts else f"{group}: not trained")
    stages = [f"{k} {v:.1f}" for k, v in (row.get("seconds") or {}).items() if k != "total"]
    overhead = overhead_share(row)
    if stages:
        lines.append("seconds: " + ", ".join(stages) + (f" · overhead {overhead:.0%}" if overhead is not None else ""))
    found = row.get("evaluation")
    if found and found.get("verdict"):
        lines.append(f"gate: {found['verdict']}, {found.get('condition', '')}")
    return "\n".join(lines)


def _short(step: str) -> str:
    return {"non_zero_advantage": "adv ≠ 0", "episodes_ok": "ok", "with_ids": "with ids"}.get(
        step, step.replace("_", " ")
    )


def _number(value: Any, spec: str) -> str:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return format(value, spec) if is_number else "–"
