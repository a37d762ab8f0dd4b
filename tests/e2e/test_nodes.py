"""Collect and train over three Ray nodes, one of which is lost while both have work on it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from pipelines.config import load_config
from pipelines.run import Run
from tests.chaos.cluster import NOTICED_SOON, started
from tests.chaos.nodes import CONFIG, DEADLINE_S, NODES, Command, faults_of, lose_in, served_now

GROUP = "{team: {agents: [solver, verifier, refiner, finalizer], train: {num_workers: 2, cpus_per_worker: 1.1}}}"


def test_a_run_over_three_nodes_survives_the_loss_of_one_in_collect(tmp_path: Path) -> None:
    changes = {"storage.root": str(tmp_path), "iterations": "1", "model_groups": GROUP}
    with started(NODES, NOTICED_SOON) as cluster:
        run = Run(load_config(CONFIG, {key: yaml.safe_load(value) for key, value in changes.items()}))
        command = Command(run=run, cluster=cluster, changes=[f"{key}={value}" for key, value in changes.items()])
        try:
            loss = lose_in("collect", 1, command)
            assert loss.spread["Collector"] == 3, "collectors sit on all nodes"
            assert loss.spread["RayTrainWorker"] == 2, "trainer workers sit on two nodes"
            assert loss.lost["Collector"] >= 1
            command.wait(DEADLINE_S)
            assert faults_of(run, before=[]) == []
            assert json.loads(served_now(command)) == {"team": [1]}
        finally:
            command.stop()
