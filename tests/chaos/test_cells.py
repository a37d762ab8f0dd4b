"""Two cells of `make chaos`, in one iteration of one run over three nodes: a node in collect, a trainer's worker in train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import play_round
from tests.chaos.scene import Local, Scene
from tests.chaos.victims import BY_NAME

pytestmark = pytest.mark.timeout(420)


def test_a_node_lost_in_collect_and_a_worker_killed_in_train_lose_double_and_change_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    try:
        scene.world.up()
        kills = {"collect": (BY_NAME["node"], "collect", 0), "train": (BY_NAME["trainer worker"], "train", 0)}
        cells = play_round(scene, Local, kills, usual_s={"collect": 1.0, "train": 0.5}, twin=None)
    finally:
        scene.world.down()
    assert [(cell.victim, cell.verdict) for cell in cells] == [("node", "ok"), ("trainer worker", "ok")], cells
    lost, _ = cells
    assert lost.num_kept > 0
    assert any("ray::Collector" in kind for kind in lost.killed)
    assert lost.spread["ray::Collector"] >= 2, "collectors are spread as well as Ray can"
    assert lost.spread["ray::RayTrainWorker"] == 2, "a worker is too large for another one on its node"
