"""limits: the figures -> the config sections that set by how much each may change: one key per figure, and those of your own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, create_model

from pipelines.figures.figure import Figure
from pipelines.figures.of_episodes import INPUT_DRIFT
from pipelines.figures.registry import FIGURES
from stores.settings import Settings

LEAST = "The least"
Limit = Annotated[float, Field(ge=0)] | None


class FigureLimits(Settings):
    """The limits of figures by their names; those of your own figures are the extra keys (pipelines/config/rules.py)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Limit]

    def of(self, name: str, default: float | None = None) -> float | None:
        """Returns the limit of a figure; `default` where nothing is said of it."""
        limit: float | None = dict(self).get(name, default)
        return limit


def _section(
    name: str, text: str, limits: Mapping[str, float | None], change: str, base: type[Settings] = Settings
) -> Any:
    """Makes the section with a key for each figure that has a limit; an infinite one is off by default."""
    fields: dict[str, Any] = {
        figure: (Limit, Field(None if limit == math.inf else limit, description=_description(FIGURES[figure], change)))
        for figure, limit in limits.items()
        if limit is not None
    }
    return create_model(name, __base__=base, __doc__=text, **fields)


def _description(figure: Figure, change: str) -> str:
    is_ratio = figure.compared_by == "ratio" and figure.name != INPUT_DRIFT
    if figure.is_watched_both_ways and change == LEAST:
        return f"{change} growth or fall of the {figure.meaning}, as a share of the usual value."
    way = "fall" if figure.worse == "lower" else "growth, 0.5 being half as much more," if is_ratio else "rise"
    return f"{change} {way} of the {figure.meaning}."


if TYPE_CHECKING:
    GuardsConfig = FigureLimits
    TrafficGuardsConfig = FigureLimits
    WatchFloorsConfig = FigureLimits
else:
    GuardsConfig = _section(
        "GuardsConfig",
        """This section sets by how much a candidate may be worse than the champion in each figure; null: the figure is not checked.

        A guard holds where its whole interval is on the allowed side of the limit. Where the whole interval is on the other side
        the candidate is rejected; between the two the decision is inconclusive. A figure of `evaluate.figures` is a key, too.""",
        {name: figure.guard for name, figure in FIGURES.items()},
        "The largest allowed",
        FigureLimits,
    )
    TrafficGuardsConfig = _section(
        "TrafficGuardsConfig",
        """This section sets by how much the answers of a team may be worse than those of the team beside or before it, in each
        figure; null: the figure is not checked.""",
        {name: figure.traffic_guard for name, figure in FIGURES.items()},
        "The largest allowed",
    )
    WatchFloorsConfig = _section(
        "WatchFloorsConfig",
        """This section sets the least change of each figure that raises an alarm, however certain it is; null: 0. A figure of one
        agent has the floor of the team's figure. A figure of `evaluate.figures` is a key, too.""",
        {name: figure.floor for name, figure in FIGURES.items()},
        LEAST,
        FigureLimits,
    )
