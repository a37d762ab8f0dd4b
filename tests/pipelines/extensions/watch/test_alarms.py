"""Alarms on literal numbers, how often a sound team raises one, and how often a degraded one does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from records import MakeTrace

from pipelines.config.run_config import load_config
from pipelines.extensions.watch.alarms import CheckedFigure, check_window, num_figures
from pipelines.extensions.watch.config import WatchConfig, WatchFloorsConfig, watch_config
from pipelines.extensions.watch.drift import Sketch
from pipelines.extensions.watch.episode_metrics import Estimate, Window, estimate_of, window_of
from pipelines.figures.figure import Figure
from pipelines.figures.registry import FIGURES
from serve_apps.gateway.traffic.figures import NAMES

pytestmark = pytest.mark.fast

DEMO = Path(__file__).parents[4] / "infra" / "runs" / "demo.yaml"
CONFIG = WatchConfig()
BARE = WatchConfig(floors=WatchFloorsConfig(**dict.fromkeys(WatchFloorsConfig.DEFAULTS, 0.0)))
"""Without floors, so that rates are those of the statistics alone."""


def window(key: int = 0, *, version: int | None = 1, alarms: tuple[str, ...] = (), **means: float) -> Window:
    figures = {name.replace("__", "/"): Estimate(num=50, mean=mean, error=0.001) for name, mean in means.items()}
    return Window(key=str(key), at=key, figures=figures, team_version=version, alarms=alarms)


def judged(
    now: Window, history: list[Window], *, alpha: float = 0.01, config: WatchConfig = CONFIG
) -> dict[str, CheckedFigure]:
    return {found.figure: found for found in check_window(now, history, alpha=alpha, config=config)}


OUTCOMES = [window(k, outcome=mean) for k, mean in enumerate((0.70, 0.74, 0.72, 0.68, 0.71))]


def test_limits_are_the_prediction_interval_of_the_champions_own_windows() -> None:
    found = judged(window(9, outcome=0.5), OUTCOMES)["outcome"]
    # mean 0.71, standard deviation 0.02236, t of 4 degrees at 0.99: 3.747, times sqrt(1 + 1/5)
    assert (found.usual, found.high, found.num_windows) == (pytest.approx(0.71), None, 5)
    assert found.low == pytest.approx(0.71 - 3.747 * 0.02236 * 1.0954, abs=1e-4)
    assert found.state == "alarm"
    assert found.what == "fewer tasks are solved: 0.5, 0.71 is usual (at least 0.618, from 5 windows)" and found.of.try_


def test_what_may_only_fall_may_rise_and_what_may_do_neither_may_not() -> None:
    assert judged(window(9, outcome=0.99), OUTCOMES)["outcome"].state == "sound"
    tokens = [window(k, completion_tokens=80 + k) for k in range(6)]
    assert [judged(window(9, completion_tokens=n), tokens)["completion_tokens"].state for n in (40, 82, 160)] == [
        "alarm", "sound", "alarm",
    ]  # fmt: skip


def test_a_certain_change_that_is_too_small_to_matter_is_no_alarm() -> None:
    tokens = [window(k, completion_tokens=80 + 0.01 * k) for k in range(6)]
    assert judged(window(9, completion_tokens=95), tokens)["completion_tokens"].state == "sound"
    assert judged(window(9, completion_tokens=101), tokens)["completion_tokens"].state == "alarm"
    assert judged(window(9, completion_tokens=95), tokens, config=BARE)["completion_tokens"].state == "alarm"
    none = [window(k, tool_calls=0) for k in range(6)]
    assert judged(window(9, tool_calls=0.2), none)["tool_calls"].state == "sound", "a quarter of one call, at least"


def test_figures_of_an_agent_have_the_floor_of_their_figure() -> None:
    past = [window(k, entropy__solver=1.0) for k in range(6)]
    assert judged(window(9, entropy__solver=0.1), past)["entropy/solver"].state == "alarm"


def test_too_little_history_is_said_and_what_alarmed_is_no_part_of_it() -> None:
    found = judged(window(9, outcome=0.0), OUTCOMES[:4])["outcome"]
    assert (found.state, found.num_windows, found.low) == ("learning", 4, None)
    odd = window(5, outcome=0.0, alarms=("turns",))
    assert judged(window(9, outcome=0.0), [*OUTCOMES[:4], odd])["outcome"].num_windows == 4
    assert judged(window(9, outcome=0.0), [*OUTCOMES, odd])["outcome"].state == "alarm"


def test_another_champion_begins_anew() -> None:
    assert judged(window(9, version=2, outcome=0.0), OUTCOMES)["outcome"].state == "learning"


def fixed(key: int, values: Mapping[str, Mapping[str, float]], *, version: int = 1, tasks: str = "d") -> Window:
    figures = {name: estimate_of(list(of.values()), FIGURES[name]) for name, of in values.items()}
    return Window(key=str(key), at=key, figures=figures, team_version=version, tasks=tasks, by_task=values)


def solved(num: int, of: int = 32) -> dict[str, dict[str, float]]:
    return {"outcome": {f"t{i}": float(i < num) for i in range(of)}, "turns": {f"t{i}": 3.0 for i in range(of)}}


def test_fixed_tasks_are_judged_by_themselves_from_the_second_time_on() -> None:
    first = fixed(0, solved(24))
    assert {f.state for f in judged(first, []).values()} == {"learning"}
    again = judged(fixed(1, solved(24)), [first])["outcome"]
    assert (again.state, again.now, again.usual) == ("sound", 0.75, 0.75)
    assert judged(fixed(1, solved(22)), [first])["outcome"].state == "sound", "two of 32 may fail by chance"
    assert judged(fixed(1, solved(10)), [first])["outcome"].state == "alarm"
    assert judged(fixed(1, solved(0, of=3)), [fixed(0, solved(3, of=3))])["outcome"].state == "sound", "too few tasks"


def test_success_on_the_same_tasks_is_compared_across_champions_and_nothing_else_is() -> None:
    first = fixed(0, solved(24))
    found = judged(fixed(1, solved(6), version=2), [first])
    assert (found["outcome"].state, found["turns"].state) == ("alarm", "learning")
    assert judged(fixed(1, solved(6), version=2, tasks="others"), [first])["outcome"].state == "learning"


def lasting(*means: float, since: float = -1.0, **settings: Any) -> CheckedFigure:
    """The check of the last of these windows."""
    *history, now = [window(k, outcome=mean, **settings) for k, mean in enumerate(means)]
    (found,) = check_window(now, history, alpha=0.01, config=BARE, since=since)
    return found


def test_a_fall_that_no_window_shows_is_found_in_the_windows_since() -> None:
    before, after = (0.70, 0.74, 0.72, 0.68, 0.71), (0.67, 0.65, 0.66, 0.65, 0.66)
    alone = [lasting(*before, *after[:n]).state for n in range(1, 5)]
    assert alone[:2] == ["sound", "sound"], "one or two windows prove nothing"
    found = lasting(*before, *after)
    # mean 0.71 of 5, mean 0.658 of 5; sums of squares 0.002 and 0.00028, 8 degrees; 0.01 / 2 / 4 moments: t = 4.334
    limit = 0.71 - 4.3335 * ((0.002 + 0.00028) / 8 * (1 / 5 + 1 / 5)) ** 0.5
    assert (found.state, found.num_windows, found.num_now) == ("alarm", 5, 5)
    assert (found.now, found.usual, found.low) == pytest.approx((0.658, 0.71, limit), abs=1e-4)
    assert found.what.startswith("fewer tasks are solved: 0.658 over 5 windows, 0.71 is usual (at least 0.")


def test_what_was_accepted_and_what_training_changes_is_no_lasting_change() -> None:
    means = (0.70, 0.74, 0.72, 0.68, 0.71, 0.67, 0.65, 0.66, 0.65, 0.66)
    assert lasting(*means).state == "alarm"
    assert lasting(*means, since=4.5).state == "sound", "accepted before the sixth window"
    assert lasting(*means, since=float("inf")).state == "sound", "a team that is not the champion"
    assert lasting(*means, version=None).state == "sound", "another team in each window"


def sampled(rng: np.random.Generator, *, num: int = 60, **change: float) -> Window:
    """A window of a team whose own windows differ by 5%."""
    at = {"tokens": 80.0, "entropy": 0.8, "outcome": 0.7, "faults": 0.03} | change
    f = float(np.exp(0.05 * rng.normal()))
    values: dict[str, Any] = {
        "completion_tokens": rng.gamma(3, at["tokens"] * f / 3, num),
        "entropy": rng.normal(at["entropy"] * f, 0.2, num),
        "outcome": (rng.random(num) < at["outcome"]) * 1.0,
        "format_share": (rng.random(num) >= at["faults"]) * 1.0,
        "turns": rng.poisson(3, num) + 1.0,
    }
    return Window(
        key="", at=0, figures={n: estimate_of(v.tolist(), FIGURES[n]) for n, v in values.items()}, team_version=1
    )


def share_of_alarms(num: int, *, num_windows: int, config: WatchConfig, figure: str = "", **change: float) -> float:
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(num):
        history = [sampled(rng) for _ in range(num_windows)]
        now = sampled(rng, **change)
        found = judged(now, history, alpha=0.01 / num_figures(now), config=config)
        alarms += any(f.state == "alarm" and figure in f.figure for f in found.values())
    return alarms / num


@pytest.mark.parametrize("num_windows", [5, 12])
def test_a_look_at_a_sound_team_rarely_alarms(num_windows: int) -> None:
    assert share_of_alarms(500, num_windows=num_windows, config=BARE) <= 0.01 + 0.009, "1% and two standard errors"


@pytest.mark.parametrize(
    ("change", "figure", "least"),
    [
        ({"tokens": 160.0}, "completion_tokens", 0.8),
        ({"entropy": 0.1}, "entropy", 0.95),
        ({"outcome": 0.3}, "outcome", 0.8),
        ({"faults": 0.5}, "format_share", 0.95),
    ],
)
def test_a_degraded_team_mostly_alarms_after_eight_windows(change: dict[str, float], figure: str, least: float) -> None:
    assert share_of_alarms(60, num_windows=8, config=CONFIG, figure=figure, **change) >= least


def test_a_fall_of_ten_points_is_noticed_within_fifteen_windows_and_a_sound_team_rarely_alarms() -> None:
    rng, noticed, alarms = np.random.default_rng(2), 0, []
    for _ in range(30):
        history: list[Window] = []
        for number in range(25):
            now = replace(sampled(rng, num=200, outcome=0.6 if number < 10 else 0.5), at=number)
            found = check_window(now, history, alpha=0.01 / num_figures(now), config=BARE, since=-1)
            alarming = [f.figure for f in found if f.state == "alarm"]
            if number < 10:
                alarms.append(bool(alarming))
            elif "outcome" in alarming:
                noticed += 1
                break
            history += [] if alarming else [now]
    assert noticed >= 27, "by single windows 12"
    assert sum(alarms) <= 0.02 * len(alarms)


def prompts_of(rng: np.random.Generator, share: float, num: int = 60) -> Sketch:
    """Of which a share is about something else; the sketch is drawn as `drift.sketch` makes it."""
    words = np.array([np.random.default_rng(i).dirichlet(np.full(64, 0.2)) for i in (1, 2)])
    kinds = (rng.random(num) < share).astype(int)
    counts = np.array([rng.multinomial(12, words[kind]) for kind in kinds], dtype=float)
    vectors = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    mean = vectors.mean(0)
    return Sketch(num=num, mean=mean.tolist(), spread=float(1 - (mean**2).sum()))


@pytest.mark.parametrize(
    ("wanders", "rate"), [(0.0, 0.01), (0.3, 0.03)], ids=["one source", "a mixture that changes from window to window"]
)
def test_prompts_of_the_same_source_rarely_drift_and_others_do(wanders: float, rate: float) -> None:
    rng, num, alarms, found = np.random.default_rng(3), 300, 0, 0

    def one(share: float) -> Window:
        return Window(key="", at=0, figures={}, team_version=1, sketch=prompts_of(rng, share))

    for i in range(num):
        history = [one(rng.random() * wanders) for _ in range(6)]
        alarms += judged(one(rng.random() * wanders), history, config=BARE)["input_drift"].state == "alarm"
        if i < 50:
            found += judged(one(0.9), history, config=CONFIG)["input_drift"].state == "alarm"
    assert alarms / num <= rate + 2 * (rate * (1 - rate) / num) ** 0.5, "two standard errors"
    assert found / 50 >= 0.8


def test_a_distance_to_a_history_that_is_not_there_is_no_number() -> None:
    first = Window(key="", at=0, figures={}, team_version=1, sketch=prompts_of(np.random.default_rng(5), 0.0))
    found = judged(first, [])["input_drift"]
    assert (found.state, found.now) == ("learning", None)


def test_prompts_alike_in_what_matters_are_no_alarm_however_many() -> None:
    rng = np.random.default_rng(4)
    history = [Window(key="", at=0, figures={}, sketch=prompts_of(rng, 0.0, 2000)) for _ in range(6)]
    now = Window(key="", at=0, figures={}, sketch=prompts_of(rng, 0.07, 2000))
    assert judged(now, history, config=BARE)["input_drift"].state == "alarm"
    assert judged(now, history)["input_drift"].state == "sound"


def test_a_history_that_is_shorter_than_what_is_needed_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"watch\.history = 4 windows are kept, and watch\.min_history = 5"):
        WatchConfig(history=4)


def test_floors_are_those_of_the_figures() -> None:
    assert WatchFloorsConfig.DEFAULTS.keys() <= FIGURES.keys() and len(WatchFloorsConfig.DEFAULTS) == 17
    assert set(NAMES) <= WatchFloorsConfig.DEFAULTS.keys(), "every window of the gateway is checked"
    assert WatchFloorsConfig().model_dump()["input_drift"] == 0.2
    with pytest.raises(ValueError, match=r"unknown key 'watch\.floors\.turn': did you mean 'turns'\?"):
        load_config(DEMO, {"watch.floors": {"turn": 0.1}})


def test_a_figure_of_ones_own_is_part_of_each_window_and_has_a_floor(make_trace: MakeTrace) -> None:
    own = Figure(
        name="politeness",
        meaning="",
        worse="lower",
        changed="fewer answers say please",
        of_episode=lambda trace: float("please" in trace.answer),
        floor=0.1,
    )
    figures = {**FIGURES, "politeness": own}
    keys = {"evaluate.figures": ["polite:politeness"], "watch.floors": {"politeness": 0.2}}
    config = watch_config(load_config(DEMO, keys))
    assert config.floors.of("politeness") == 0.2 and watch_config(load_config(DEMO)) == WatchConfig()
    *history, now = [
        window_of(
            [make_trace(i, answer="42, please" if k < 5 else "42") for i in range(40)],
            key=str(k),
            at=k,
            team_version=1,
            figures=figures,
            fixed_tasks="d",
        )
        for k in range(6)
    ]
    found = {c.figure: c for c in check_window(now, history, alpha=0.01, config=config, figures=figures)}
    assert found["politeness"].state == "alarm" and "fewer answers say please: 0, 1 is" in found["politeness"].what
