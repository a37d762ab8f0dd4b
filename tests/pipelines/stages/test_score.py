"""The score stage: every episode that some model group trains on is paid, no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stage_records import collected, finish

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.stages.score import score
from stores.types import EpisodeStatus, Purpose, Trace

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
STATUSES = list(EpisodeStatus)


@pytest.mark.parametrize(
    ("train_statuses", "paid"),
    [
        (("ok", "truncated"), {"ok", "truncated"}),
        (("ok",), {"ok", "truncated"}),  # truncated episodes count in what is reported
        (("ok", "truncated", "timeout", "tool_error"), {"ok", "truncated", "timeout", "tool_error"}),
    ],
)
def test_episodes_are_paid_whose_status_counts_or_is_trained_on(
    make_trace: Callable[..., Trace], tmp_path: Path, train_statuses: tuple[str, ...], paid: set[str]
) -> None:
    changes = {"storage.root": str(tmp_path), "model_groups.team.train": {"train_statuses": train_statuses}}
    run = Run(load_config(SMALL, changes))
    run.open()
    where = {"run_id": run.run_id, "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
    traces = [make_trace(i, **where, status=status) for i, status in enumerate(STATUSES)]
    run.traces.write_episodes(traces)
    finish(run, 1, collected(traces=run.traces.pin_episodes(**where)))
    rewards = {r.episode_id: r for r in run.traces.read_rewards(score(run, 1).rewards)}
    assert {trace.status.value for trace in traces if trace.episode_id in rewards} == paid
