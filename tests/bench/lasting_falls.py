"""lasting_falls: how soon `troupe watch` notices that a champion solves 10 points fewer for good, and how often it alarms at a sound one.

A window is 200 answers, of which 60% are right, or 50% from the fall on; its other figures stay as they are, and differ between windows by 5%.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipelines.extensions.watch.alarms import check_window, num_figures
from pipelines.extensions.watch.config import WatchConfig, WatchFloorsConfig
from pipelines.extensions.watch.episode_metrics import Window, estimate_of
from pipelines.extensions.watch.watching import _first_and_latest
from pipelines.figures.registry import FIGURES
from tests.bench.figures import Figure

NUM_RUNS, NUM_ANSWERS, WITHIN = 200, 200, 15
CONFIG = WatchConfig()
BARE = WatchConfig(floors=WatchFloorsConfig(**dict.fromkeys(WatchFloorsConfig.DEFAULTS, 0.0)))
"""Alarms also at changes that are too small to matter: false ones are then those of the statistics alone."""


def figures() -> Iterator[Figure]:
    """Yields the share of runs in which the fall is noticed, and the share of checks of a sound champion that alarm."""
    for num_before in (5, 10, 20, 60):
        rng = np.random.default_rng([num_before, 7])
        runs = [_alarms(rng, CONFIG, num_before=num_before, num_after=WITHIN) for _ in range(NUM_RUNS)]
        noticed = sum(any("outcome" in found for found in run[num_before:]) for run in runs) / NUM_RUNS
        name = f"watch, a fall of 10 points after {num_before} windows is noticed within {WITHIN}"
        yield Figure(name, noticed, least=0.9, note=f"of {NUM_RUNS} runs of {NUM_ANSWERS} answers a window")
    rng = np.random.default_rng([60, 8])
    checks = [bool(found) for _ in range(NUM_RUNS) for found in _alarms(rng, BARE, num_before=60)[CONFIG.min_history :]]
    note = f"of {len(checks)} checks, without floors"
    yield Figure("watch, false alarms per check", float(np.mean(checks)), most=0.01, note=note)


def _alarms(
    rng: np.random.Generator, config: WatchConfig, *, num_before: int, num_after: int = 0
) -> list[tuple[str, ...]]:
    """Returns by window the figures that alarm."""
    history: list[Window] = []
    every = []
    for number in range(num_before + num_after):
        window = _window(rng, number, right=0.6 if number < num_before else 0.5)
        alpha = (1 - config.confidence) / num_figures(window)
        found = check_window(window, history, alpha=alpha, config=config, since=-1.0)
        every.append(tuple(one.figure for one in found if one.state == "alarm"))
        if not every[-1]:
            history.append(window)
            kept = _first_and_latest(history, config.history, since=-1.0)
            history = [w for w in history if w.key in kept]
    return every


def _window(rng: np.random.Generator, number: int, *, right: float) -> Window:
    between = np.exp(0.05 * rng.normal(size=2))
    values = {
        "outcome": rng.random(NUM_ANSWERS) < right,
        "format_share": rng.random(NUM_ANSWERS) < 0.97,
        "completion_tokens": rng.gamma(3, 80 * between[0] / 3, NUM_ANSWERS),
        "entropy": rng.normal(0.8 * between[1], 0.2, NUM_ANSWERS),
        "turns": rng.poisson(3, NUM_ANSWERS) + 1,
    }
    estimates = {name: estimate_of(of.astype(float).tolist(), FIGURES[name]) for name, of in values.items()}
    return Window(key=str(number), at=float(number), figures=estimates, team_version=1)
