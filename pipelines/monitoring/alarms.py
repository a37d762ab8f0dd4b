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
from typing import Literal

from pipelines.config.figures import INPUT_DRIFT, base_name, figure_of
from pipelines.config.sections import WatchConfig
from pipelines.monitoring.drift import Sketch, merge, pseudo_f, shift
from pipelines.monitoring.episode_metrics import Window

State = Literal["sound", "alarm", "learning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFigure:
    """The result of the check of one figure."""

    figure: str
    state: State
    now: float
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
        changed = figure_of(self.figure).changed
        return f"{changed}: {self.now:.3g}, {self.usual:.3g} is usual ({limits}, from {self.num_windows} windows)"

    @property
    def try_(self) -> str:
        """Says what to try against this figure's alarm."""
        return figure_of(self.figure).try_


def check_window(
    window: Window, history: Sequence[Window], *, alpha: float, config: WatchConfig
) -> list[CheckedFigure]:
    """Checks every figure of the window.

    Args:
        history: earlier windows of the same kind; those of other teams or tasks are left out where they say nothing.
        alpha: chance of a false alarm for one figure.
    """
    checked = []
    for name, estimate in window.figures.items():
        known = _comparable(window, history, name)
        if window.by_task:
            result = _paired(window, known, name, alpha=alpha, config=config)
        else:
            result = _predicted(window, known, name, alpha=alpha, config=config)
        checked.append(
            result or CheckedFigure(figure=name, state="learning", now=estimate.mean, num_windows=len(known))
        )
    if window.sketch is not None:
        checked.append(_drifted(window, _comparable(window, history, INPUT_DRIFT), alpha=alpha, config=config))
    return checked


def num_figures(window: Window) -> int:
    """Returns how many figures `check_window` checks."""
    return len(window.figures) + (window.sketch is not None)


def _comparable(window: Window, history: Sequence[Window], name: str) -> list[Window]:
    """Windows without an alarm that have the figure, of the same team; what a fixed task is solved with is the same for
    any team."""
    has = [
        w
        for w in history
        if w.tasks == window.tasks
        and not w.alarms
        and (name in w.figures or (name == INPUT_DRIFT and w.sketch is not None))
    ]
    own = [w for w in has if w.team_version == window.team_version]
    return has if not own and window.by_task and name == "outcome" else own


def _predicted(
    window: Window, known: Sequence[Window], name: str, *, alpha: float, config: WatchConfig
) -> CheckedFigure | None:
    """Checks by the prediction interval of the earlier windows; None while they are too few."""
    num, now = len(known), window.figures[name]
    if num < config.min_history:
        return None
    figure = figure_of(name)
    earlier = [w.figures[name] for w in known]
    if figure.compared_by == "ratio":  # a window that is longer by a factor is as likely as one that is shorter by it
        middles = [math.log(estimate.mean + figure.least) for estimate in earlier]
        errors = [estimate.error / (estimate.mean + figure.least) for estimate in earlier]
    else:
        middles, errors = [estimate.mean for estimate in earlier], [estimate.error for estimate in earlier]
    middle, between = _mean_and_variance(middles)
    sampling = math.fsum(error**2 for error in errors) / num
    of_one_task = math.fsum(error**2 * estimate.num for error, estimate in zip(errors, earlier, strict=True)) / num
    variance = max(between, sampling) * (1 + 1 / num) + max(0.0, of_one_task / now.num - sampling)
    reach = _t(name, alpha, num - 1) * math.sqrt(variance)
    low, usual, high = (
        math.exp(x) - figure.least if figure.compared_by == "ratio" else x
        for x in (middle - reach, middle, middle + reach)
    )
    return _within(name, now.mean, usual, low, high, num_windows=num, config=config)


def _paired(
    window: Window, known: Sequence[Window], name: str, *, alpha: float, config: WatchConfig
) -> CheckedFigure | None:
    """Checks by the tasks' own history; None without one. Shares get one task that rose and one that fell in addition (Agresti
    and Min 2005, for matched pairs), so that a handful of tasks proves little.
    """
    earlier: dict[str, list[float]] = {}
    for past in known:
        for task, value in past.by_task[name].items():
            earlier.setdefault(task, []).append(value)
    pairs = [(v, math.fsum(e) / len(e)) for task, v in window.by_task[name].items() if (e := earlier.get(task))]
    if len(pairs) < 2:
        return None
    more = (1.0, -1.0) if figure_of(name).compared_by == "difference" else ()
    differences = [now - before for now, before in pairs]
    _, variance = _mean_and_variance([*differences, *more])
    reach = _t(name, alpha, len(pairs) - 1) * math.sqrt(variance / (len(pairs) + len(more)))
    usual = math.fsum(before for _, before in pairs) / len(pairs)
    now = math.fsum(now for now, _ in pairs) / len(pairs)
    return _within(name, now, usual, usual - reach, usual + reach, num_windows=len(known), config=config)


def _drifted(window: Window, known: Sequence[Window], *, alpha: float, config: WatchConfig) -> CheckedFigure:
    """Checks by each earlier window's distance to the others; the floor is on the distance without what chance adds.

    The distances share windows, which makes them look more alike than a new one is: hence n - 2 degrees of freedom and 3/n,
    where independent values have n - 1 and 1/n. Measured at 1% asked for: 0.8% of windows of one source after 5 windows,
    0.4% after 8; 2.7% after 6 where each window mixes two sources anew, from none to 30% of the second.
    """
    sketches, now = [w.sketch for w in known if w.sketch is not None], window.sketch
    assert now is not None, "asked for windows with a sketch only"
    if len(sketches) < config.min_history:
        distance = pseudo_f(now, merge(sketches)) if sketches else 1.0
        return CheckedFigure(figure=INPUT_DRIFT, state="learning", now=distance, num_windows=len(sketches))
    apart = [_apart(one, [*sketches[:i], *sketches[i + 1 :]]) for i, one in enumerate(sketches)]
    usual, variance = _mean_and_variance(apart)
    num = len(apart)
    high = usual + _t(INPUT_DRIFT, alpha, num - 2) * math.sqrt(variance * (1 + 3 / num))
    distance = _apart(now, sketches)
    is_alarm = distance > high and shift(now, merge(sketches)) > config.floors.input_drift
    return CheckedFigure(
        figure=INPUT_DRIFT,
        state="alarm" if is_alarm else "sound",
        now=distance**3,
        usual=usual**3,
        high=high**3,
        num_windows=num,
    )


def _apart(one: Sketch, others: Sequence[Sketch]) -> float:
    return math.cbrt(pseudo_f(one, merge(others)))


def _within(
    name: str, now: float, usual: float, low: float, high: float, *, num_windows: int, config: WatchConfig
) -> CheckedFigure:
    """Args: low, high: what chance makes; the floor may lie beyond."""
    figure = figure_of(name)
    unit = max(usual, figure.least) if figure.compared_by == "ratio" else 1.0
    floor = getattr(config.floors, base_name(name)) * unit
    lowest = min(low, usual - floor) if figure.worse == "lower" or figure.is_watched_both_ways else None
    highest = max(high, usual + floor) if figure.worse == "higher" or figure.is_watched_both_ways else None
    is_alarm = (lowest is not None and now < lowest) or (highest is not None and now > highest)
    state: State = "alarm" if is_alarm else "sound"
    return CheckedFigure(
        figure=name, state=state, now=now, usual=usual, low=lowest, high=highest, num_windows=num_windows
    )


def _t(name: str, alpha: float, degrees: int) -> float:
    """Quantile beyond which a figure that may go both ways, or one, lies with chance `alpha`."""
    from scipy.stats import t

    return float(t.ppf(1 - alpha / (2 if figure_of(name).is_watched_both_ways else 1), degrees))


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
