"""The learning rate's schedules on literal numbers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from train_loops.config import OptimizerConfig
from train_loops.signal.learning_rate import learning_rate

pytestmark = pytest.mark.fast


def rates(**settings: Any) -> list[float]:
    return [learning_rate(OptimizerConfig(lr=0.8, **settings), step) for step in range(8)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.8] * 8),
        ({"warmup_steps": 4}, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8]),
        ({"schedule": "linear", "decay_steps": 4}, [0.8, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0, 0.0]),
        (
            {"schedule": "linear", "warmup_steps": 2, "decay_steps": 6, "min_lr_share": 0.5},
            [0.4, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4],
        ),
        ({"schedule": "cosine", "decay_steps": 4}, [0.8, 0.6828427, 0.4, 0.1171573, 0.0, 0.0, 0.0, 0.0]),
        (
            {"schedule": "cosine", "warmup_steps": 2, "decay_steps": 6, "min_lr_share": 0.25},
            [0.4, 0.8, 0.8, 0.7121320, 0.5, 0.2878680, 0.2, 0.2],
        ),
    ],
    ids=["constant", "warm-up", "linear", "linear-to-half", "cosine", "cosine-to-a-quarter"],
)
def test_a_schedule_gives_these_rates(settings: dict[str, Any], expected: list[float]) -> None:
    assert rates(**settings) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosine"}, "needs decay_steps above warmup_steps = 0, got 0"),
        (
            {"schedule": "linear", "warmup_steps": 9, "decay_steps": 9},
            "needs decay_steps above warmup_steps = 9, got 9",
        ),
        ({"decay_steps": 100}, "need schedule: linear or cosine"),
        ({"min_lr_share": 0.1}, "need schedule: linear or cosine"),
    ],
)
def test_a_schedule_without_an_end_or_an_end_without_a_schedule_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(**settings)
