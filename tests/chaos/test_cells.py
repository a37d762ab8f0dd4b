"""Two cells of `make chaos`, in one iteration of one run: the driver in collect, the trainer's worker in train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import play_round
from tests.chaos.scene import Local, Scene
from tests.chaos.victims import BY_NAME

pytestmark = pytest.mark.timeout(420)


def test_a_driver_killed_in_collect_and_a_worker_killed_in_train_lose_double_and_change_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    try:
        scene.world.up()
        kills = {"collect": (BY_NAME["driver"], "collect", 0), "train": (BY_NAME["trainer worker"], "train", 0)}
        cells = play_round(scene, Local, kills, usual_s={"collect": 1.0, "train": 0.5}, twin=None)
    finally:
        scene.world.down()
    assert [(cell.victim, cell.verdict) for cell in cells] == [("driver", "ok"), ("trainer worker", "ok")], cells
    assert [cell.recovered_by for cell in cells] == ["same command", "itself"]
