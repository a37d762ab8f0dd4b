"""figures: iterations -> Plotly figures as plain JSON (colours of text and grid come from the page's theme)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from math import ceil, isfinite
from types import MappingProxyType
from typing import Any

from stores.journal.stage_results import CALLED, CHOSEN, PART, PROBABILITY, STOP

Row = Mapping[str, Any]
EMPTY: Mapping[str, Any] = MappingProxyType({})
PALETTE = ("#3b82f6", "#f59e0b", "#10b981", "#ec4899", "#8b5cf6", "#06b6d4", "#ef4444", "#84cc16")
"""Colours that are legible on a light and on a dark page."""
STAGE_COLORS = {
    "collect": "#3b82f6",
    "evaluate": "#06b6d4",
    "train": "#8b5cf6",
    "score": "#84cc16",
    "sync": "#f59e0b",
    "promote": "#ec4899",
    "between stages": "#94a3b8",
}
WORK_STAGES = ("collect", "evaluate", "train")
"""Sampling (evaluation included) and training; the rest of an iteration is overhead."""
TRAIN_PANELS = (
    ("KL of the update", "kl_k3"),
    ("Entropy", "entropy"),
    ("Logprob gap between trainer and engine (mean)", "logprob_gap_mean"),
    ("Gradient norm", "grad_norm"),
)
"""Title and metric of the charts that are always open."""

AGENT_PANELS = (
    ("Ratio to the old policy (mean)", "ratio"),
    ("Share of clipped tokens", "clip_share"),
    ("KL to the parent version", "kl_k3"),
    ("KL to the reference", "kl_ref_k3"),
    ("Entropy", "entropy"),
    ("Standard deviation of advantages", "advantage_std"),
    ("Share of groups without signal", "groups_without_signal"),
    ("Correlation of credit with outcome", "credit_correlation"),
)
"""Title and name of the train metrics that have a chart per agent."""


SHARES = {"yaxis": {"range": [0, 1]}}
CHOICE_PANELS = (
    (CHOSEN, "share of its choices", SHARES),
    (PROBABILITY, "mean probability where offered", SHARES),
)
PART_PANELS = ((PART, "parts of its reward", EMPTY), (CALLED, "calls of tools per episode", EMPTY))
KINDS = (CHOSEN, PROBABILITY, PART, CALLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One Plotly chart: its title, traces and axes."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]

    def json(self) -> str:
        """The chart as JSON for a script element: it holds no NaN, and nothing that could close the element."""
        text = json.dumps({"data": self.data, "layout": self.layout}, allow_nan=False)
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def learning(rows: Sequence[Row]) -> list[Figure]:
    """Returns the charts of reward and of valid format per agent, and of the reasons for which episodes end."""
    agents = _Lines(rows, "agents")
    reward = agents.chart("Reward", "reward")
    valid = agents.chart("Share of turns with valid format", "format", {"yaxis": {"tickformat": ".0%"}})
    reasons = _Lines([{**row, "lines": _named(_part(row, "metrics"), STOP)} for row in rows], "lines")
    ends = reasons.chart("Why episodes end, share of them", "value", {"yaxis": {"tickformat": ".0%"}})
    has_several = ends is not None and len(ends.data) > 1  # one line at 100% says nothing
    return [chart for chart in (reward, valid, ends if has_several else None) if chart]


def training(rows: Sequence[Row]) -> list[Figure]:
    """Returns the charts of `TRAIN_PANELS` that the run has, with a line per model group."""
    groups = _Lines(rows, "groups")
    charts = [groups.chart(title, name, _small_numbers(title)) for title, name in TRAIN_PANELS]
    return [chart for chart in charts if chart]


def training_of_agents(rows: Sequence[Row]) -> list[Figure]:
    """Returns the charts of `AGENT_PANELS` that the run has, with a line per agent."""
    agents = _Lines(rows, "agents")
    return [chart for title, name in AGENT_PANELS if (chart := agents.chart(title, name))]


def choices(rows: Sequence[Row]) -> list[Figure]:
    """Returns two charts for every agent that chooses, with a line per option."""
    return _by_agent(rows, CHOICE_PANELS)


def parts_of_rewards(rows: Sequence[Row]) -> list[Figure]:
    """Returns a chart for every agent that is paid, with a line for each part of its reward, and one of the tools that it calls."""
    return _by_agent(rows, PART_PANELS)


def _by_agent(rows: Sequence[Row], panels: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[Figure]:
    """Returns charts per agent with a line for each of its figures of a kind. Args: panels: kind, title and layout."""
    agents = dict.fromkeys(agent for row in rows for agent in _part(row, "agents"))
    charts = []
    for agent in agents:
        for kind, title, layout in panels:
            by_name = [{**row, "lines": _named(_part(row, "agents").get(agent) or EMPTY, kind)} for row in rows]
            charts.append(_Lines(by_name, "lines").chart(f"{agent}: {title}", "value", layout))
    return [chart for chart in charts if chart]


def _named(figures: Mapping[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Returns the figures of a kind by what follows it, as `_Lines` takes them."""
    return {name.removeprefix(kind): {"value": value} for name, value in figures.items() if name.startswith(kind)}


def other_metrics(rows: Sequence[Row]) -> list[Figure]:
    """Returns a chart of every metric that has none elsewhere: of model groups, of agents and of the whole iteration."""
    shown = {name for _, name in TRAIN_PANELS}
    groups, agents = _Lines(rows, "groups"), _Lines(rows, "agents")
    names = dict.fromkeys(_bare(n) for row in rows for group in _part(row, "groups").values() for n in group)
    charts = [groups.chart(name, name) for name in names if name not in shown]
    per_agent = dict.fromkeys(n for row in rows for values in _part(row, "agents").values() for n in values)
    for name in per_agent:
        if name in ("reward", "format", *(panel for _, panel in AGENT_PANELS)) or name.startswith(KINDS):
            continue
        charts.append(agents.chart(f"{_bare(name)}, per agent", _bare(name)))
    whole = _Lines([{**row, "m": {"iteration": _part(row, "metrics")}} for row in rows], "m")
    of_all = dict.fromkeys(n for row in rows for n in _part(row, "metrics"))
    charts += [whole.chart(name, name) for name in of_all if not name.startswith(STOP)]
    return [chart for chart in charts if chart]


def evaluation(judged: Sequence[tuple[int, Row]]) -> Figure:
    """Draws candidate and champion with their intervals. `judged` holds (iteration, result) of evaluated iterations."""
    data = []
    for index, side in enumerate(("candidate", "champion")):
        points = [(iteration, result[side]) for iteration, result in judged if result.get(side)]
        if not points:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": side,
                # A little to the right, so that the two intervals of one iteration do not cover each other.
                "x": [iteration + 0.06 * index for iteration, _ in points],
                "y": [_finite(p["mean"]) for _, p in points],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [_finite(p["high"] - p["mean"]) for _, p in points],
                    "arrayminus": [_finite(p["mean"] - p["low"]) for _, p in points],
                    "thickness": 1.5,
                    "width": 3,
                },
                "line": {"color": PALETTE[index], "width": 2, "dash": "solid" if index == 0 else "dot"},
                "marker": {"size": 7},
                "hovertemplate": "%{y:.3f}",
            }
        )
    layout = {"yaxis": {"tickformat": ".0%"}, "xaxis": _iteration_axis([i for i, _ in judged])}
    return Figure(title="Accuracy on the tasks of the gate", data=data, layout=layout)


def funnel(rows: Sequence[Row]) -> list[Figure]:
    """Returns the chart of the share of each agent's calls that reached the last step of the funnel."""

    def share(counts: Mapping[str, float]) -> float | None:
        values = list(counts.values())
        if len(values) == 1:  # a row of extremes holds the share itself
            return values[0]
        return values[-1] / calls if (calls := counts.get("calls")) else None

    shares = [
        {**row, "shares": {agent: {"trained": share(counts)} for agent, counts in _part(row, "funnel").items()}}
        for row in rows
    ]
    layout = {"yaxis": {"range": [0, 1.03], "tickformat": ".0%"}}
    figure = _Lines(shares, "shares").chart("Share of calls that trained", "trained", layout)
    return [figure] if figure else []


def timings(rows: Sequence[Row]) -> list[Figure]:
    """Returns the charts of the seconds per stage (stacked) and of the overhead."""
    timed = [row for row in rows if _part(row, "seconds")]
    if not timed:
        return []
    x = [row["iteration"] for row in timed]
    stages = dict.fromkeys(s for row in timed for s in _stage_seconds(row))
    order = [s for s in STAGE_COLORS if s in stages] + [s for s in stages if s not in STAGE_COLORS]
    bars: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": stage,
            "x": x,
            "y": [_finite(_stage_seconds(row).get(stage)) for row in timed],
            "marker": {"color": STAGE_COLORS.get(stage, PALETTE[index % len(PALETTE)])},
            "hovertemplate": "%{y:.2f} s",
        }
        for index, stage in enumerate(order)
    ]
    layout = _stacked_seconds(x)
    shares = [overhead_share(row) for row in timed]
    line = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "overhead",
        "x": x,
        "y": shares,
        "line": {"color": PALETTE[1], "width": 2},
        "marker": {"size": 6},
        "hovertemplate": "%{y:.1%}",
    }
    top = max([0.3, *(s * 1.15 for s in shares if s is not None)])
    share_layout = {
        "yaxis": {"range": [0, top], "tickformat": ".0%"},
        "xaxis": _iteration_axis(x),
        "showlegend": False,
    }
    return [
        Figure(title="Seconds per stage", data=bars, layout=layout),
        Figure(title="Overhead: neither sampling nor training", data=[line], layout=share_layout),
    ]


def _stacked_seconds(x: Sequence[int]) -> dict[str, Any]:
    """Returns the layout of bars of seconds that are stacked by iteration."""
    return {
        "barmode": "stack",
        "bargap": 0.25,
        "yaxis": {"ticksuffix": " s"},
        "xaxis": _iteration_axis(x),
        "legend": {"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top", "traceorder": "reversed"},
    }


def total_seconds(row: Row) -> float:
    """Returns the wall seconds of an iteration: its `total` if it has one, else the sum of its stages."""
    seconds = _part(row, "seconds")
    return float(seconds.get("total") or sum(v for k, v in seconds.items() if k != "total"))


def overhead_share(row: Row) -> float | None:
    """Returns the share of an iteration that is neither sampling (evaluation included) nor training; None without timings."""
    measured = _finite(_part(row, "metrics").get("overhead_share"))
    total = total_seconds(row)
    if measured is not None or total <= 0:
        return measured
    return max(0.0, 1.0 - sum(_part(row, "seconds").get(stage, 0.0) for stage in WORK_STAGES) / total)


def metric(values: Mapping[str, Any], name: str) -> float | None:
    """Returns a value, which of a model group has the prefix `train/`; None where there is no finite one."""
    return _finite(values.get(f"train/{name}", values.get(name)))


def _stage_seconds(row: Row) -> dict[str, float]:
    stages = {k: v for k, v in _part(row, "seconds").items() if k != "total"}
    rest = total_seconds(row) - sum(stages.values())
    return stages if rest <= 1e-3 else {**stages, "between stages": rest}


class _Lines:
    """One part of the rows, as charts with a line per agent or model group."""

    def __init__(self, rows: Sequence[Row], part: str) -> None:
        self._x = [row["iteration"] for row in rows]
        # Rows of extremes hold single lines: another line goes on past them, where a missing measurement leaves a gap.
        self._is_whole = ["is_part" not in row for row in rows]
        keys = dict.fromkeys(key for row in rows for key in _part(row, part))
        self._values = {key: [_part(row, part).get(key) or EMPTY for row in rows] for key in keys}

    def chart(self, title: str, name: str, layout: Mapping[str, Any] = EMPTY) -> Figure | None:
        """Draws a metric; None if there is no number at all."""
        data = []
        for index, (key, values) in enumerate(self._values.items()):
            y = [metric(row, name) for row in values]
            is_drawn = [value is not None or is_whole for value, is_whole in zip(y, self._is_whole, strict=True)]
            y = list(compress(y, is_drawn))
            if any(v is not None for v in y):
                data.append(
                    {
                        "type": "scatter",
                        "mode": "lines+markers" if len(self._x) <= 40 or _has_lone_value(y) else "lines",
                        "name": key,
                        "x": list(compress(self._x, is_drawn)),
                        "y": y,
                        "line": {"color": PALETTE[index % len(PALETTE)], "width": 2},
                        "marker": {"size": 5},
                        "hovertemplate": "%{y:.4g}",
                    }
                )
        if not data:
            return None
        if len({v for line in data for v in line["y"] if v is not None}) == 1:
            layout = {"yaxis": {"rangemode": "tozero", **layout.get("yaxis", {})}}
        axes = {"xaxis": _iteration_axis(self._x), "showlegend": len(data) > 1}
        return Figure(title=title, data=data, layout={**axes, **dict(layout)})


def _has_lone_value(y: Sequence[float | None]) -> bool:
    """Says whether a value stands between two gaps: no line leads to it, so that it is seen by its marker alone."""
    around = zip([None, *y], y, [*y[1:], None], strict=False)
    return any(value is not None and before is None and after is None for before, value, after in around)


def _iteration_axis(iterations: Sequence[int]) -> dict[str, Any]:
    low, high = min(iterations), max(iterations)
    step = max(1, ceil((high - low) / 12))
    return {"title": {"text": "iteration"}, "dtick": step, "tick0": low, "range": [low - 0.5, high + 0.5]}


def _small_numbers(title: str) -> dict[str, Any]:
    return {"yaxis": {"exponentformat": "power", "rangemode": "tozero"}} if title != "Entropy" else {}


def _part(row: Row, key: str) -> Mapping[str, Any]:
    return row.get(key) or EMPTY


def _bare(name: str) -> str:
    return name.removeprefix("train/")


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and isfinite(value) else None
