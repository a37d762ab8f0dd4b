"""What an evaluation reports, without playing one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.episodes.sampling import Sampled
from pipelines.evaluation.played import Played
from pipelines.evaluation.statistics import Resampling, mean_interval
from pipelines.run.run import Run
from stores.types import Purpose, Trace

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_the_reported_interval_is_at_95_percent_whatever_the_gate_decides_by(
    make_trace: Callable[..., Trace], tmp_path: Path, confidence: float
) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path), "evaluate.confidence": confidence}))
    run.open()
    where = {"run_id": run.run_id, "iteration": 1, "purpose": Purpose.GATE, "team_key": "team"}
    run.traces.write_episodes([make_trace(i, **where, answer="5" if i % 3 else "6") for i in range(12)])
    sampled = Sampled(
        traces=run.traces.pin_episodes(**where),
        num_new=0,
        num_kept=12,
        statuses={},
        num_tokens=0,
        sampling_seconds=0.0,
        seconds=0.0,
        groups=[f"t{i}" for i in range(6)],
        stopped_by=None,
        tasks_left=[],
    )
    played = Played(run, sampled, {})
    assert list(played.score(run).ci95) == mean_interval(played.outcomes, Resampling(seed=run.config.seed)).ci95
