"""What an evaluation reports, without playing one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.config.run_config import load_config
from pipelines.config.sections import PromoteConfig
from pipelines.episodes.sampling import Sampled
from pipelines.evaluation.gate import Evidence, LooksToCome, decide_promotion
from pipelines.evaluation.played import Played
from pipelines.evaluation.statistics import Interval, Resampling, mean_interval
from pipelines.run.run import Run
from pipelines.stages.evaluate import _to_come
from stores.types import FAMILY, Purpose, Task, Trace, families

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


def test_a_problem_of_many_tasks_or_turns_is_one_problem_to_a_floor() -> None:
    """Of eleven problems one has 50 of the 60 tasks, and fails. Counted as eleven equal ones, 17% of sound episodes were surely below 90%."""

    def look(sizes: list[int]) -> LooksToCome:
        named = [name for name, size in enumerate(sizes) for _ in range(size)]
        tasks = [
            Task(task_id=f"t{i}", prompt="", answers=(), metadata={FAMILY: f"f{name}"}) for i, name in enumerate(named)
        ]
        solver = SimpleNamespace(agent="solver")
        traces = [SimpleNamespace(task=task, turns=[solver] * (91 if i == 0 else 1)) for i, task in enumerate(tasks)]
        played: Any = SimpleNamespace(traces=traces)
        return _to_come(tasks, played, families(tasks), confidence=0.995)

    gain = Interval(mean=0.1, low=0.05, high=0.2, num_tasks=60)
    assert look([50] + [1] * 10) == LooksToCome(1, {"solver": 1}, 0.995)
    found = Evidence(gain=gain, ok_share=10 / 60, format_shares={"solver": 0.4}, looks_to_come=look([50] + [1] * 10))
    decided = decide_promotion(PromoteConfig(min_format_share=0.9), found)
    assert decided.verdict == "inconclusive" and "but not sure of share of ok episodes" in decided.condition
    assert look([2] * 30).num_problems == 30, "of one size each counts"
