"""registry: the names of figures -> the figures, Troupe's and those that a run config adds by dotted path; an episode -> its values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pipelines.figures.figure import Figure, base_name
from pipelines.figures.of_episodes import EPISODE_FIGURES, FAILURES, FEEDBACK
from pipelines.figures.of_training import TRAINING_FIGURES
from stores.by_name import open_by_name
from stores.types import EpisodeRewards, Trace

Figures = Mapping[str, Figure]
FIGURES: Figures = {figure.name: figure for figure in (*EPISODE_FIGURES, *TRAINING_FIGURES)}
"""By their names."""
METRICS = (
    *("reward", "tokens_per_s", "sync_seconds", "overhead_share", "sampling_seconds", "training_seconds"),
    *("cost", "cost_multiplier", "credit_fidelity", "credit_inferred"),
)
"""What else an iteration's metrics hold: no figure of one's own may have such a name."""


def figure_of(name: str, figures: Figures = FIGURES) -> Figure:
    """Returns the figure of a name, which may be that of one agent; KeyError for an unknown one."""
    return figures[base_name(name)]


def with_own(paths: Iterable[str], *, guards: Collection[str] = ()) -> Figures:
    """Returns Troupe's figures and those that `evaluate.figures` names; `guards` are the keys of `promote.guards`.

    ValueError, with place and fix, where a path does not import or loads a heavy library, or where what it names is no figure of that
    name that an episode has, a guard without a value of a played episode, or a ratio without a least usual value.
    """
    own: dict[str, Figure] = {}
    for number, path in enumerate(paths):
        place = f"evaluate.figures.{number}"
        figure: Figure = open_by_name(
            path,
            place=place,
            wanted="a pipelines.figures.figure.Figure",
            fits=lambda found: isinstance(found, Figure),
            is_parsing=True,
        )
        if figure.name != own_name(path):
            raise ValueError(
                f"{place}: the figure {path!r} has the name {figure.name!r}: give the object and the figure one name, by which "
                "promote.guards and watch.floors know it"
            )
        if figure.of_episode is None and figure.of_rewards is None:
            raise ValueError(f"{place}: {path!r} has no value of an episode: give it `of_episode` or `of_rewards`")
        if figure.of_episode is None and (figure.guard is not None or figure.name in guards):
            raise ValueError(
                f"{place}: {path!r} cannot be a guard, because the episodes of the gate have no rewards: give it `of_episode`, or drop "
                f"its `guard` and promote.guards.{figure.name}"
            )
        if figure.compared_by == "ratio" and not figure.least > 0:
            raise ValueError(
                f"{place}: {path!r} is compared by its ratio and has no `least`, so that nothing would be worse than a usual value of 0: give it "
                'the least amount that counts as usual, in its unit, or compared_by="difference"'
            )
        own[figure.name] = figure
    return {**FIGURES, **own}


def own_name(path: str) -> str:
    """Returns the name of the figure at a dotted path: what follows the colon."""
    return path.rpartition(":")[2]


def figures_of(
    trace: Trace,
    rewards: EpisodeRewards | None = None,
    *,
    feedback: float | None = None,
    figures: Figures = FIGURES,
) -> dict[str, float]:
    """Returns the watched figures of one episode, those of its agents as `<figure>/<agent>`.

    One that is no outcome of the policy has `failure_share` and no other: it says nothing about the team. ValueError, with its name,
    where a figure is no finite number, or one that is compared by its ratio is negative.
    """
    if not trace.is_outcome:
        figures = {name: figure for name, figure in figures.items() if name == FAILURES}
    watched = [figure for figure in figures.values() if figure.is_watched]
    agents = dict.fromkeys(turn.agent for turn in trace.turns)
    values: dict[str, float] = {}
    for figure in watched:
        if figure.of_episode is not None and (figure.in_windows is None or figure.in_windows(trace)):
            values[figure.name] = figure.of_episode(trace)
        if figure.of_rewards is not None and rewards is not None:
            values[figure.name] = figure.of_rewards(rewards)
        if figure.of_agent is not None:
            for agent in agents:
                own = [turn for turn in trace.turns if turn.agent == agent]
                values[f"{figure.name}/{agent}"] = figure.of_agent(own)
    if trace.is_outcome and feedback is not None:
        values[FEEDBACK] = feedback
    numbers = {name: number_of(name, value) for name, value in values.items()}
    for name, value in numbers.items():
        figure = figure_of(name, figures)
        if figure.compared_by == "ratio" and value + figure.least <= 0:
            raise ValueError(
                f"figure {name} of an episode is {value:g}, and no ratio of such values says anything: return an amount that is not negative, "
                'or give the figure compared_by="difference"'
            )
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def number_of(name: str, value: Any) -> float:
    """Returns the value of a figure, which may be one of the user's own; ValueError, with its name, where that is no finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"figure {name} of an episode is no number: {error}; return nan where there is none") from None
    if math.isinf(number):
        raise ValueError(f"figure {name} of an episode is {number}: return a finite number, or nan where there is none")
    return number
