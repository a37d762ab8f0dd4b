"""limits: the figures -> the config sections that set by how much each may change: maps by the names of figures, of your own ones too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from pipelines.figures.registry import FIGURES
from stores.settings import Settings

Limit = Annotated[float, Field(ge=0)] | None


def limits_of(limits: Mapping[str, float | None]) -> dict[str, float | None]:
    """Returns the limits of the figures that have one; an infinite one is off."""
    return {name: None if limit == math.inf else limit for name, limit in limits.items() if limit is not None}


class FigureLimits(Settings):
    """The limits of figures by their names; which names there may be is a rule of pipelines/config/rules.py."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Limit]
    DEFAULTS: ClassVar[Mapping[str, float | None]] = {}
    TAKES_OWN: ClassVar[bool] = True
    """Whether figures of `evaluate.figures` may be keys."""

    @model_validator(mode="before")
    @classmethod
    def _add_defaults(cls, given: Any) -> Any:
        return {**cls.DEFAULTS, **given} if isinstance(given, Mapping) else given

    def of(self, name: str, default: float | None = None) -> float | None:
        """Returns the limit of a figure; `default` where nothing is said of it."""
        limit: float | None = dict(self).get(name, default)
        return limit


class GuardsConfig(FigureLimits):
    """By how much a candidate may be worse than the champion in each figure; null: the figure is not checked.

    A guard holds where its whole interval is on the allowed side of the limit. Where the whole interval is on the other side
    the candidate is rejected; between the two the decision is inconclusive.
    """

    DEFAULTS = limits_of({name: figure.guard for name, figure in FIGURES.items()})


class TrafficGuardsConfig(FigureLimits):
    """By how much the answers of a team may be worse than those of the team beside or before it; null: the figure is not checked."""

    DEFAULTS = limits_of({name: figure.traffic_guard for name, figure in FIGURES.items()})
    TAKES_OWN = False
