"""Collect and train over three Ray nodes, one of which is lost while both have work on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.cluster import NOTICED_SOON, started
from tests.chaos.nodes import DEADLINE_S, NODES, ONE_GROUP, Command, faults_of, lose_in, run_of, served_now


@pytest.mark.timeout(1200)
def test_a_run_over_three_nodes_survives_the_loss_of_one_in_collect(tmp_path: Path) -> None:
    changes = [f"storage.root={tmp_path}", "iterations=1", ONE_GROUP]
    with started(NODES, NOTICED_SOON) as cluster:
        command = Command(run=run_of(changes), cluster=cluster, changes=changes)
        try:
            loss = lose_in("collect", 1, command)
            assert loss.spread["Collector"] == 3, "collectors sit on all nodes"
            assert loss.spread["RayTrainWorker"] == 2, "trainer workers sit on two nodes"
            assert loss.lost["Collector"] >= 1
            command.wait(DEADLINE_S)
            assert faults_of(command.run, before=[]) == []
            assert json.loads(served_now(command)) == {"team": [1]}
        finally:
            command.stop()
