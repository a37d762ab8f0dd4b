"""figure: what one figure means, how it is counted in an episode, and when it has become worse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.figures.checks import Check
from stores.types import EpisodeRewards, Trace, Turn

Direction = Literal["higher", "lower"]
Comparison = Literal["ratio", "difference"]
State = Literal["holds", "broken", "unclear"]
INSPECT = "look at episodes (troupe show)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure, under one name wherever it appears: in `promote.guards`, `traffic.guards`, `watch.floors`, in metrics and reports.

    A figure of one agent is called `<figure>/<agent>`. Your own figure is an object of this class in a module of yours that
    `evaluate.figures` names by its dotted path.
    """

    name: str
    meaning: str
    """What one value is, with its unit."""
    worse: Direction
    changed: str
    """What an alarm or a warning begins with."""
    try_: str = INSPECT
    """What to try when it has become worse."""
    compared_by: Comparison = "difference"
    """How two values are compared. Shares are compared by their difference, amounts by their ratio."""
    least: float = 0.0
    """Of a ratio: a usual value below this counts as this, so that twice nothing is no change. A figure of your own whose ratio is compared
    needs one."""
    of_episode: Callable[[Trace], float] | None = None
    """Its value of an episode, NaN where the episode has none. What has one can be a guard."""
    of_agent: Callable[[Sequence[Turn]], float] | None = None
    """Its value of the turns of one agent, NaN where they have none; None: it is not counted by agent."""
    of_rewards: Callable[[EpisodeRewards], float] | None = None
    """Its value of an episode's rewards, NaN where they have none."""
    guard: float | None = None
    """The change for the worse that `promote.guards` allows by default; infinite: any."""
    traffic_guard: float | None = None
    """The same for `traffic.guards`, of figures that the gateway counts for every answer."""
    in_windows: Callable[[Trace], bool] | None = None
    """Whether a stored episode is watched by it, where not each is that has a value: guards count them all."""
    floor: float | None = None
    """The least change that raises an alarm by default."""
    is_watched: bool = True
    """Whether stored episodes are watched by it: not by what depends on who else used the engines."""
    is_watched_both_ways: bool = False
    """Whether watching raises an alarm for a change in either direction."""
    check: Check | None = None
    """When the figures of an iteration's training are a warning."""

    def limit(self, margin: float) -> float:
        """Returns the limit of the difference, or of the ratio, that a margin allows."""
        unchanged = 1.0 if self.compared_by == "ratio" else 0.0
        return unchanged + margin if self.worse == "higher" else unchanged - margin

    def state(self, low: float, high: float, limit: float) -> State:
        """Judges a change by its whole interval: on the right side of the limit, on the wrong one, or over it."""
        if self.worse == "lower":
            low, high, limit = -high, -low, -limit
        return "holds" if high <= limit else "broken" if low > limit else "unclear"

    def words(self, mean: float, low: float, high: float, limit: float) -> str:
        """Returns a change as `completion_tokens x1.98 [1.91, 2.05], at most x1.50`."""
        sign, form = ("x", ".2f") if self.compared_by == "ratio" else ("", "+.3f")
        bound = "at least" if self.worse == "lower" else "at most"
        return f"{self.name} {sign}{mean:{form}} [{low:{form}}, {high:{form}}], {bound} {sign}{limit:{form}}"


def base_name(name: str) -> str:
    """Returns `entropy` for `entropy/solver`."""
    return name.partition("/")[0]
