"""alarms: windows of the champion's own history + the present one -> which figures left their usual range.

    window, history ── check_window ──> sound | alarm | learning, per figure, with its limits

No figure is compared with a chosen number but for `watch.floors`: changes too small to matter, however certain they are. With
alpha for one figure (`watch.confidence` divided among all figures of a check, Bonferroni) a figure alarms

    window by window   beyond the prediction interval of the earlier windows, mean +- t * sqrt(v (1 + 1/n) + e), t with n - 1
                       degrees of freedom; v is the variance between windows, never less than their mean squared standard
                       error, e what a smaller present window adds to it; ratios are compared by their logarithm
    on fixed tasks     where the paired differences to the tasks' own history have a mean beyond t * standard error: that they
                       are the same tasks leaves only chance in sampling, so one earlier window is enough
    drift of prompts   as window by window, on the cube root (Wilson and Hilferty 1931) of each window's pseudo-F against the
                       others (`drift`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipelines.extensions.watch.config import WatchConfig
from pipelines.extensions.watch.drift import Sketch, merge, pseudo_f, shift
from pipelines.extensions.watch.episode_metrics import Window
from pipelines.figures.figure import Figure
from pipelines.figures.of_episodes import INPUT_DRIFT
from pipelines.figures.registry import FIGURES, Figures, figure_of

State = Literal["sound", "alarm", "learning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFigure:
    """The result of the check of one figure."""

    figure: str
    """Its name; of one agent, with the agent's."""
    of: Figure
    state: State
    now: float | None
    """None for a distance to a history that is not there."""
    num_windows: int
    """The windows of the history that it was compared with, or that there are so far."""
    usual: float | None = None
    low: float | None = None
    """A value below raises an alarm; None: no value is too low, or there is too little history."""
    high: float | None = None
    """The same for a value above."""

    @property
    def what(self) -> str:
        """`the number of turns has changed: 8.2, 4.1 is usual (3 to 5.2, from 9 windows)`."""
        bounds = {(True, True): "{low:.3g} to {high:.3g}", (True, False): "at least {low:.3g}"}.get(
            (self.low is not None, self.high is not None), "at most {high:.3g}"
        )
        limits = bounds.format(low=self.low, high=self.high)
        return (
            f"{self.of.changed}: {self.now:.3g}, {self.usual:.3g} is usual ({limits}, from {self.num_windows} windows)"
        )


def check_window(
    window: Window, history: Sequence[Window], *, alpha: float, config: WatchConfig, figures: Figures = FIGURES
) -> list[CheckedFigure]:
    """Checks every figure of the window.

    Args:
        history: earlier windows of the same kind; those of other teams or tasks are left out where they say nothing.
        alpha: chance of a false alarm for one figure.
    """
    checker = _Checker(window, history, alpha, config, figures)
    check = checker.paired if window.by_task else checker.predicted
    checked = [
        check(name, known) or checker.learning(name, known, estimate.mean)
        for name, estimate in window.figures.items()
        for known in [checker.comparable(name)]
    ]
    return checked if window.sketch is None else [*checked, checker.drifted(window.sketch)]


def num_figures(window: Window) -> int:
    """Returns how many figures `check_window` checks."""
    return len(window.figures) + (window.sketch is not None)


@dataclass(frozen=True, slots=True)
class _Checker:
    """One window and what it is checked by."""

    window: Window
    history: Sequence[Window]
    alpha: float
    config: WatchConfig
    figures: Figures

    def comparable(self, name: str) -> list[Window]:
        """Windows without an alarm that have the figure, of the same team; what a fixed task is solved with is the same for
        any team."""
        has = [
            w
            for w in self.history
            if w.tasks == self.window.tasks
            and not w.alarms
            and (name in w.figures or (name == INPUT_DRIFT and w.sketch is not None))
        ]
        own = [w for w in has if w.team_version == self.window.team_version]
        return has if not own and self.window.by_task and name == "outcome" else own

    def learning(self, name: str, known: Sequence[Any], now: float | None) -> CheckedFigure:
        """The result where there is too little history."""
        figure = figure_of(name, self.figures)
        return CheckedFigure(figure=name, of=figure, state="learning", now=now, num_windows=len(known))

    def predicted(self, name: str, known: Sequence[Window]) -> CheckedFigure | None:
        """Checks by the prediction interval of the earlier windows; None while they are too few."""
        num, now = len(known), self.window.figures[name]
        if num < self.config.min_history:
            return None
        figure = figure_of(name, self.figures)
        earlier = [w.figures[name] for w in known]
        if (
            figure.compared_by == "ratio"
        ):  # a window that is longer by a factor is as likely as one that is shorter by it
            middles = [math.log(estimate.mean + figure.least) for estimate in earlier]
            errors = [estimate.error / (estimate.mean + figure.least) for estimate in earlier]
        else:
            middles, errors = [estimate.mean for estimate in earlier], [estimate.error for estimate in earlier]
        middle, between = _mean_and_variance(middles)
        sampling = math.fsum(error**2 for error in errors) / num
        of_one_task = math.fsum(error**2 * estimate.num for error, estimate in zip(errors, earlier, strict=True)) / num
        variance = max(between, sampling) * (1 + 1 / num) + max(0.0, of_one_task / now.num - sampling)
        reach = self._t(figure, num - 1) * math.sqrt(variance)
        low, usual, high = (
            math.exp(x) - figure.least if figure.compared_by == "ratio" else x
            for x in (middle - reach, middle, middle + reach)
        )
        return self._within(name, now.mean, usual, low, high, num_windows=num)

    def paired(self, name: str, known: Sequence[Window]) -> CheckedFigure | None:
        """Checks by the tasks' own history; None without one. Shares get one task that rose and one that fell in addition
        (Agresti and Min 2005, for matched pairs), so that a handful of tasks proves little.
        """
        earlier: dict[str, list[float]] = {}
        for past in known:
            for task, value in past.by_task[name].items():
                earlier.setdefault(task, []).append(value)
        of_tasks = self.window.by_task[name].items()
        pairs = [(v, math.fsum(e) / len(e)) for task, v in of_tasks if (e := earlier.get(task))]
        if len(pairs) < 2:
            return None
        figure = figure_of(name, self.figures)
        more = (1.0, -1.0) if figure.compared_by == "difference" else ()
        differences = [now - before for now, before in pairs]
        _, variance = _mean_and_variance([*differences, *more])
        reach = self._t(figure, len(pairs) - 1) * math.sqrt(variance / (len(pairs) + len(more)))
        usual = math.fsum(before for _, before in pairs) / len(pairs)
        now = math.fsum(now for now, _ in pairs) / len(pairs)
        return self._within(name, now, usual, usual - reach, usual + reach, num_windows=len(known))

    def drifted(self, now: Sketch) -> CheckedFigure:
        """Checks by each earlier window's distance to the others; the floor is on the distance without what chance adds.

        The distances share windows, which makes them look more alike than a new one is: hence n - 2 degrees of freedom and 3/n,
        where independent values have n - 1 and 1/n. Measured at 1% asked for: 0.8% of windows of one source after 5 windows,
        0.4% after 8; 2.7% after 6 where each window mixes two sources anew, from none to 30% of the second.
        """
        sketches = [w.sketch for w in self.comparable(INPUT_DRIFT) if w.sketch is not None]
        if len(sketches) < self.config.min_history:
            return self.learning(INPUT_DRIFT, sketches, pseudo_f(now, merge(sketches)) if sketches else None)
        apart = [_apart(one, [*sketches[:i], *sketches[i + 1 :]]) for i, one in enumerate(sketches)]
        usual, variance = _mean_and_variance(apart)
        num, figure = len(apart), self.figures[INPUT_DRIFT]
        high = usual + self._t(figure, num - 2) * math.sqrt(variance * (1 + 3 / num))
        distance = _apart(now, sketches)
        is_alarm = distance > high and shift(now, merge(sketches)) > self._floor(figure)
        return CheckedFigure(
            figure=INPUT_DRIFT,
            of=figure,
            state="alarm" if is_alarm else "sound",
            now=distance**3,
            usual=usual**3,
            high=high**3,
            num_windows=num,
        )

    def _within(
        self, name: str, now: float, usual: float, low: float, high: float, *, num_windows: int
    ) -> CheckedFigure:
        """Args: low, high: what chance makes; the floor may lie beyond."""
        figure = figure_of(name, self.figures)
        unit = max(usual, figure.least) if figure.compared_by == "ratio" else 1.0
        floor = self._floor(figure) * unit
        lowest = min(low, usual - floor) if figure.worse == "lower" or figure.is_watched_both_ways else None
        highest = max(high, usual + floor) if figure.worse == "higher" or figure.is_watched_both_ways else None
        is_alarm = (lowest is not None and now < lowest) or (highest is not None and now > highest)
        return CheckedFigure(
            figure=name,
            of=figure,
            state="alarm" if is_alarm else "sound",
            now=now,
            usual=usual,
            low=lowest,
            high=highest,
            num_windows=num_windows,
        )

    def _floor(self, figure: Figure) -> float:
        return self.config.floors.of(figure.name, figure.floor) or 0.0

    def _t(self, figure: Figure, degrees: int) -> float:
        """Quantile beyond which a figure that may go both ways, or one, lies with chance `alpha`."""
        from scipy.stats import t

        return float(t.ppf(1 - self.alpha / (2 if figure.is_watched_both_ways else 1), degrees))


def _apart(one: Sketch, others: Sequence[Sketch]) -> float:
    return math.cbrt(pseudo_f(one, merge(others)))


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
