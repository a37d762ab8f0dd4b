"""The actor that keeps what Prometheus shows, in this process and without a cluster."""

from __future__ import annotations

import pytest

from pipelines.extensions.prometheus.meter import Meter

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("stage", "in_flight"), [("score", 8.0), ("train", 8.0), ("collect", 0.0), ("evaluate", 0.0), ("measure", 0.0)]
)
def test_only_the_end_of_a_stage_that_plays_says_that_no_episode_is_in_flight(stage: str, in_flight: float) -> None:
    meter = Meter()
    for run in ("r", "other"):
        meter.observe([("troupe_episodes_in_flight", 8.0, {"run": run, "collector": "0"})])
    ended = {"run": "r", "stage": stage, "model_group": "", "outcome": "done"}
    meter.observe([("troupe_stages", 1, ended)])
    shown = {dict(tags)["run"]: value for (_, tags), value in meter._gauges.items()}
    assert shown == {"r": in_flight, "other": 8.0}
