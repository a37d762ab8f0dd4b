"""The section `watch` of a run config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from pipelines.figures.limits import FigureLimits, limits_of
from pipelines.figures.registry import FIGURES
from stores.settings import Settings

if TYPE_CHECKING:
    from pipelines.config.run_config import RunConfig


class WatchFloorsConfig(FigureLimits):
    """The least change of each figure that raises an alarm, however certain it is; null: 0. A figure of one agent has the team's."""

    DEFAULTS = limits_of({name: figure.floor for name, figure in FIGURES.items()})


class WatchConfig(Settings):
    """This section sets how silent degradation of a team is detected: by thresholds from the champion's own history."""

    confidence: float = Field(0.99, gt=0.5, lt=1)
    """The probability that a check of a team that has not changed raises no alarm at all, over all figures of the check."""
    min_history: int = Field(5, ge=3)
    """The number of earlier windows that a figure needs before it is checked. On fixed tasks one is enough."""
    history: int = Field(20, ge=3)
    """The number of windows that are kept of each source."""
    min_episodes: int = Field(30, ge=2)
    """The number of captured answers, or of the gateway's answers, that a check needs. Fewer wait for the next check."""
    max_episodes: int = Field(1000, ge=2)
    """The number of captured answers that a check reads, the newest first."""
    on_alarm: Literal["warn", "fail"] = "warn"
    """What an alarm of an iteration does. `warn`: it is reported. `fail`: it fails the DAG run, too, and the schedule goes on
    only with force or once the alarm is accepted."""
    floors: WatchFloorsConfig = WatchFloorsConfig()
    """By the names of figures, of `evaluate.figures` too: the least change that raises an alarm; null: 0. What is not named has the
    floor of the page on figures."""

    @model_validator(mode="after")
    def _enough_is_kept(self) -> Self:
        if self.history < self.min_history:
            raise ValueError(
                f"watch.history = {self.history} windows are kept, and watch.min_history = {self.min_history} are needed: "
                "raise the first"
            )
        return self


def watch_config(config: RunConfig) -> WatchConfig:
    """Returns the section of a run config, or its defaults where it has none."""
    return config.section_of("watch", WatchConfig) or WatchConfig()
