"""alarms: windows of the champion's own history + the present one -> which figures left their usual range.

    window, history ── check_window ──> sound | alarm | learning, per figure, with its limits

No figure is compared with a chosen number but for `watch.floors`: changes too small to matter, however certain they are. With
alpha for one figure (`watch.confidence` divided among all figures of a check, Bonferroni) a figure alarms

    window by window   beyond the prediction interval of the earlier windows, mean +- t * sqrt(v (1 + 1/n) + e), t with n - 1
                       degrees of freedom; v is the variance between windows, never less than their mean squared standard
                       error, e what a smaller present window adds to it; ratios are compared by their logarithm
    on fixed tasks     where the paired differences to the tasks' own history have a mean beyond t * standard error: that they
                       are the same tasks leaves only chance in sampling, so one earlier window is enough
    a lasting change   of one team: where the windows since any moment of its history have a mean beyond t * standard error of that before,
                       with half of alpha, divided among these moments (Hawkins, Qiu and Kang 2003, "The changepoint model for
                       statistical process control"). What one window cannot tell several can, and a fall that no window alarmed
                       at is not what is usual: the team's first windows are kept for good
    drift of prompts   as window by window, on the cube root (Wilson and Hilferty 1931) of each window's pseudo-F against the
                       others (`drift`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pipelines.extensions.watch.config import WatchConfig
from pipelines.extensions.watch.drift import Sketch, merge, pseudo_f, shift
from pipelines.extensions.watch.episode_metrics import Estimate, Window
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
    num_now: int = 1
    """The windows that `now` is the mean of: the present one alone, or all since a lasting change."""

    @property
    def what(self) -> str:
        """`the number of turns has changed: 8.2, 4.1 is usual (3 to 5.2, from 9 windows)`."""
        bounds = {(True, True): "{low:.3g} to {high:.3g}", (True, False): "at least {low:.3g}"}.get(
            (self.low is not None, self.high is not None), "at most {high:.3g}"
        )
        limits = bounds.format(low=self.low, high=self.high)
        lately = f" over {self.num_now} windows" if self.num_now > 1 else ""
        return f"{self.of.changed}: {self.now:.3g}{lately}, {self.usual:.3g} is usual ({limits}, from {self.num_windows} windows)"


def check_window(
    window: Window,
    history: Sequence[Window],
    *,
    alpha: float,
    config: WatchConfig,
    figures: Figures = FIGURES,
    since: float = math.inf,
) -> list[CheckedFigure]:
    """Checks every figure of the window.

    Args:
        history: earlier windows of the same kind; those of other teams or tasks are left out where they say nothing.
        alpha: chance of a false alarm for one figure.
        since: Unix seconds; a lasting change is looked for among the windows after it.
    """
    checker = _Checker(window, history, alpha, config, figures, since)
    check = checker.paired if window.by_task else checker.predicted
    checked = [
        checker.lasting(name, known)
        or check(name, known[-config.history :])
        or checker.learning(name, known, estimate.mean)
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
    since: float

    @property
    def is_of_one_team(self) -> bool:
        """Whether what lasts may be looked for: training changes the team with each window."""
        return self.window.team_version is not None and self.since < math.inf

    @property
    def alpha_at_once(self) -> float:
        """Returns the chance of a false alarm by the present window alone."""
        return self.alpha / 2 if self.is_of_one_team else self.alpha

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
        if len(known) < self.config.min_history:
            return None
        return self._compared(name, known, (), self.alpha_at_once)

    def lasting(self, name: str, known: Sequence[Window]) -> CheckedFigure | None:
        """Returns the alarm of a change that came at any moment since the team's first windows; None where there is none."""
        windows = [w for w in known if w.team_version == self.window.team_version and w.at > self.since]
        moments = range(self.config.min_history, len(windows)) if self.is_of_one_team else ()
        found = [
            self._compared(
                name, windows[:moment][: self.config.history], windows[moment:], self.alpha / 2 / len(moments)
            )
            for moment in moments
        ]
        changes = [
            (abs(one.now - one.usual), one)
            for one in found
            if one.state == "alarm" and one.now is not None and one.usual is not None
        ]
        return max(changes, key=lambda change: change[0])[1] if changes else None

    def _compared(self, name: str, before: Sequence[Window], lately: Sequence[Window], alpha: float) -> CheckedFigure:
        """Checks the mean of the present window and those that came `lately` by the windows before them."""
        figure, present = figure_of(name, self.figures), self.window.figures[name]
        (usual, squares, errors), (now, more, _) = (
            _on_scale([w.figures[name] for w in windows], figure) for windows in (before, [*lately, self.window])
        )
        num, num_now = len(before), len(lately) + 1
        sampling = math.fsum(error**2 for error in errors) / num
        of_one_task = math.fsum(e**2 * w.figures[name].num for e, w in zip(errors, before, strict=True)) / num
        variance = max((squares + more) / (num + num_now - 2), sampling) * (1 / num_now + 1 / num)
        variance += max(0.0, of_one_task / present.num - sampling) / num_now**2
        reach = _t(alpha / (1 + figure.is_watched_both_ways), num + num_now - 2) * math.sqrt(variance)
        low, high = usual - reach, usual + reach
        if figure.compared_by == "ratio":
            low, usual, high, now = (math.exp(x) - figure.least for x in (low, usual, high, now))
        return self._within(name, now, usual, low, high, num_windows=num, num_now=num_now)

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
        reach = _t(self.alpha_at_once / (1 + figure.is_watched_both_ways), len(pairs) - 1) * math.sqrt(
            variance / (len(pairs) + len(more))
        )
        usual = math.fsum(before for _, before in pairs) / len(pairs)
        now = math.fsum(now for now, _ in pairs) / len(pairs)
        return self._within(name, now, usual, usual - reach, usual + reach, num_windows=len(known))

    def drifted(self, now: Sketch) -> CheckedFigure:
        """Checks by each earlier window's distance to the others; the floor is on the distance without what chance adds.

        The distances share windows, which makes them look more alike than a new one is: hence n - 2 degrees of freedom and 3/n,
        where independent values have n - 1 and 1/n. Measured at 1% asked for: 0.8% of windows of one source after 5 windows,
        0.4% after 8; 2.7% after 6 where each window mixes two sources anew, from none to 30% of the second.
        """
        sketches = [w.sketch for w in self.comparable(INPUT_DRIFT) if w.sketch is not None][-self.config.history :]
        if len(sketches) < self.config.min_history:
            return self.learning(INPUT_DRIFT, sketches, pseudo_f(now, merge(sketches)) if sketches else None)
        apart = [_apart(one, [*sketches[:i], *sketches[i + 1 :]]) for i, one in enumerate(sketches)]
        usual, variance = _mean_and_variance(apart)
        num, figure = len(apart), self.figures[INPUT_DRIFT]
        high = usual + _t(self.alpha / (1 + figure.is_watched_both_ways), num - 2) * math.sqrt(variance * (1 + 3 / num))
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
        self, name: str, now: float, usual: float, low: float, high: float, *, num_windows: int, num_now: int = 1
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
            num_now=num_now,
        )

    def _floor(self, figure: Figure) -> float:
        return self.config.floors.of(figure.name, figure.floor) or 0.0


def _apart(one: Sketch, others: Sequence[Sketch]) -> float:
    return math.cbrt(pseudo_f(one, merge(others)))


def _on_scale(estimates: Sequence[Estimate], figure: Figure) -> tuple[float, float, list[float]]:
    """Returns the mean, the sum of squared deviations from it, and the standard errors; of ratios those of their logarithms, because a window
    that is longer by a factor is as likely as one that is shorter by it."""
    values, errors = [e.mean for e in estimates], [e.error for e in estimates]
    if figure.compared_by == "ratio":
        errors = [error / (value + figure.least) for error, value in zip(errors, values, strict=True)]
        values = [math.log(value + figure.least) for value in values]
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values), errors


@cache
def _t(tail: float, degrees: int) -> float:
    """Returns the quantile of Student's t beyond which chance lies with probability `tail`."""
    from scipy.stats import t

    return float(t.isf(tail, degrees))


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
