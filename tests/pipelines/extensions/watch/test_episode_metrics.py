"""Windows of episodes on literal numbers, and sketches of prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from records import MakeTrace

from pipelines.extensions.watch.drift import merge, pseudo_f, shift, sketch
from pipelines.extensions.watch.episode_metrics import Window, estimate_of, window_of
from pipelines.figures.registry import FIGURES
from stores.types import EpisodeRewards

pytestmark = pytest.mark.fast


def test_tasks_are_the_units_and_their_mean_has_an_error(
    make_trace: MakeTrace, make_rewards: Callable[..., EpisodeRewards]
) -> None:
    traces = [make_trace(i) for i in range(6)]  # two of each task
    rewards = {t.episode_id: make_rewards(t, outcome=float(i < 2)) for i, t in enumerate(traces)}
    window = window_of(traces, key="k", at=0, rewards=rewards, fixed_tasks="d")
    outcome = window.figures["outcome"]
    assert (outcome.num, outcome.mean) == (3, pytest.approx(1 / 3))
    assert outcome.error == pytest.approx(math.sqrt(0.3 / 5)), "of 1 0 0, and a 0 and a 1 in addition"
    assert window.by_task["outcome"] == {"t0": 1.0, "t1": 0.0, "t2": 0.0} and window.sketch is None
    assert Window.from_json(json.loads(json.dumps(window.to_json()))) == window
    other = window_of(traces, key="k", at=0)
    assert other.sketch is not None and not other.by_task
    assert Window.from_json(json.loads(json.dumps(other.to_json()))) == other
    assert estimate_of([2.0, 4.0], FIGURES["turns"]).error == pytest.approx(1.0)


def test_an_agents_figures_count_each_episode_in_which_it_spoke_also_alone(make_trace: MakeTrace) -> None:
    whole = [make_trace(i) for i in range(8)]
    whole = [replace(t, turns=tuple(replace(turn, is_format_ok=True) for turn in t.turns)) for t in whole]
    alone = [replace(t, turns=(replace(t.turns[0], is_format_ok=i < 2),)) for i, t in enumerate(whole)]
    figures = window_of([*whole[4:], *alone[:4]], key="k", at=0).figures
    assert (figures["format_share/solver"].num, figures["format_share/solver"].mean) == (4, 0.75)
    assert (figures["format_share/verifier"].num, figures["format_share/verifier"].mean) == (2, 1.0)
    single = window_of(alone, key="k", at=0).figures
    assert "format_share" in single and "format_share/solver" not in single, "it is the team"


def test_no_text_of_an_episode_is_in_its_window(make_trace: MakeTrace) -> None:
    traces = [
        replace(t, task=replace(t.task, prompt=f"secret{i}")) for i, t in enumerate(make_trace(i) for i in range(6))
    ]
    kept = json.dumps(window_of(traces, key="k", at=0).to_json())
    assert "secret" not in kept and "answer>" not in kept


def test_sketches_add_up_and_tell_other_prompts_apart() -> None:
    rng = np.random.default_rng(0)

    def prompts(first: int, num: int = 200) -> list[str]:
        return [" ".join(f"w{first + w}" for w in rng.integers(0, 30, 8)) for _ in range(num)]

    a, b, other = prompts(0), prompts(0), prompts(15)
    whole, parts = sketch(a + b), merge([sketch(a), sketch(b)])
    assert parts.num == 400 and parts.mean == pytest.approx(whole.mean, abs=1e-5)
    assert 0.3 < pseudo_f(sketch(a), sketch(b)) < 2 and shift(sketch(a), sketch(b)) < 0.1
    assert pseudo_f(sketch(a), sketch(other)) > 10 and shift(sketch(a), sketch(other)) > 0.3
    assert shift(sketch(["same"] * 9), sketch(["same"] * 9)) == 0
