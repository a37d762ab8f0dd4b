"""episode_metrics: episodes -> figures with a sampling error: lengths, turns, tools, format, entropy, repeats, credit.

    episode ── figures_of ──> {figure: value} ── mean per task ──> [values] ── estimate_of ──> number, mean, standard error

Tasks are the units, as in `statistics`: episodes of one task are not independent. A figure of one agent is called
`<figure>/<agent>`; what each means is in `pipelines.figures`. Nothing here holds a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipelines.extensions.watch.drift import Sketch, sketch
from pipelines.figures.figure import Figure, base_name
from pipelines.figures.registry import FIGURES, Figures, figure_of, figures_of
from stores.types import EpisodeRewards, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure of a set of episodes, estimated over its tasks."""

    num: int
    """Tasks that have it, at least 2."""
    mean: float
    error: float
    """Standard error of the mean over tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A set of episodes that is checked as one, and later part of the history of others."""

    key: str
    """What it is of: the same window taken again replaces itself."""
    at: float
    """Unix seconds."""
    figures: Mapping[str, Estimate]
    team_version: int | None = None
    """None where the team changes from window to window: in training."""
    tasks: str = ""
    """Digest of a fixed set of tasks; windows of other tasks say nothing about it."""
    by_task: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of a fixed set: figure -> task id -> mean."""
    sketch: Sketch | None = None
    """Of the prompts, where these are not fixed."""
    alarms: tuple[str, ...] = ()
    """Figures that were out of their usual range. A window with any is no part of what is usual, in no figure: what made one
    leave its range has moved others within theirs."""

    def to_json(self) -> dict[str, Any]:
        """Returns the metrics as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Window:
        """The inverse of `to_json`."""
        figures = {name: Estimate(**estimate) for name, estimate in data["figures"].items()}
        drawn = None if data["sketch"] is None else Sketch(**data["sketch"])
        return cls(**{**data, "figures": figures, "sketch": drawn, "alarms": tuple(data["alarms"])})


def window_of(
    traces: Iterable[Trace],
    *,
    key: str,
    at: float,
    rewards: Mapping[str, EpisodeRewards] | None = None,
    feedback: Mapping[str, float] | None = None,
    team_version: int | None = None,
    fixed_tasks: str = "",
    figures: Figures = FIGURES,
) -> Window:
    """The figures of episodes; with `fixed_tasks`, the digest of a fixed set, also per task and without the prompts.

    Args: rewards, feedback: by episode id, of those that have them.
    """
    values: dict[str, dict[str, list[float]]] = {}
    prompts: dict[str, str] = {}
    for trace in traces:
        paid, score = (rewards or {}).get(trace.episode_id), (feedback or {}).get(trace.episode_id)
        prompts[trace.task.task_id] = trace.task.prompt
        for name, value in figures_of(trace, paid, feedback=score, figures=figures).items():
            values.setdefault(name, {}).setdefault(trace.task.task_id, []).append(value)
    agents = {agent for name in values if (agent := name.partition("/")[2])}
    if len(agents) == 1:  # what it does is what the team does
        values = {name: tasks for name, tasks in values.items() if name == base_name(name)}
    by_task = {name: {task: math.fsum(v) / len(v) for task, v in tasks.items()} for name, tasks in values.items()}
    if fixed_tasks:
        by_task.pop("prompt_words", None)
    return Window(
        key=key,
        at=at,
        figures={
            name: estimate_of(list(tasks.values()), figure_of(name, figures))
            for name, tasks in by_task.items()
            if len(tasks) > 1
        },
        team_version=team_version,
        tasks=fixed_tasks,
        by_task={name: {t: round(v, 6) for t, v in tasks.items()} for name, tasks in by_task.items()}
        if fixed_tasks
        else {},
        sketch=None if fixed_tasks or len(prompts) < 2 else sketch(prompts.values()),
    )


def estimate_of(values: Sequence[float], figure: Figure) -> Estimate:
    """Mean over tasks and its error. Of a share with one task at 0 and one at 1 added (Agresti and Coull 1998): none that was
    never seen is held to be impossible.
    """
    num, mean = len(values), math.fsum(values) / len(values)
    more = (0.0, 1.0) if figure.compared_by == "difference" else ()
    return Estimate(num=num, mean=mean, error=standard_error([*values, *more]))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 of fewer than two values."""
    num = len(values)
    if num < 2:
        return 0.0
    mean = math.fsum(values) / num
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (num - 1) / num)
