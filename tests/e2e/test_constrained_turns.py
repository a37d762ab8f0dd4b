"""Turns under a constraint through the whole loop: sampled by the real engine, stored with their form, trained on under its masks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from stores.types import RewardsRef, Trace, TracesRef
from tests.e2e.local_runs import COMMAND, DEADLINE_S, report_of
from train_loops.config import DeepSpeedConfig
from train_loops.engine.deepspeed_engine import load_policy
from train_loops.rows.batching import collate
from train_loops.rows.masks import with_masks
from train_loops.rows.samples import Sample, samples_of

pytestmark = pytest.mark.nightly

CONFIG = Path(__file__).parent / "constrained.yaml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of two iterations."""
    root = tmp_path_factory.mktemp("constrained")
    command = [COMMAND[0], "train", str(CONFIG), "--set", f"storage.root={root}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-6000:]
    return Run(load_config(CONFIG, {"storage.root": str(root)}))


def episodes(run: Run, iteration: int) -> list[Trace]:
    collected = run.journal.ref(run.key(iteration, "collect"))
    assert collected is not None
    return list(run.traces.read_traces(TracesRef(**collected["traces"])))


def test_every_turn_is_what_its_form_allows_and_is_trained_on(trained: Run) -> None:
    turns = [turn for trace in episodes(trained, 1) for turn in trace.turns]
    assert len(turns) >= 200 and all(turn.sampling.constraint for turn in turns)
    typed = [t for t in turns if "json" in json.loads(t.sampling.constraint) and t.finish_reason == "stop"]
    assert len(typed) > 100
    for turn in typed:
        assert 0 <= json.loads(turn.completion_text)["value"] < 100
    assert report_of(trained)["versions"] == {"calculator": 2}


def test_trainer_and_engine_agree_and_would_not_without_the_masks(trained: Run) -> None:
    gap = report_of(trained)["logprob_gap"]
    assert 0 < gap["mean"] < 1e-3
    # The same rows again under version 1, with their masks and without.
    ref = trained.weights.ref("calculator", 1)
    assert ref is not None
    folder = trained.weights.fetch(ref)
    scored = trained.journal.ref(trained.key(2, "score"))
    assert scored is not None
    rewards = {r.episode_id: r for r in trained.traces.read_rewards(RewardsRef(**scored["rewards"]))}
    scorer = load_policy(folder, DeepSpeedConfig())
    rows = [
        sample
        for trace in episodes(trained, 2)[:20]
        for sample in samples_of(trace, rewards[trace.episode_id], model_group="calculator")
    ]
    masked = with_masks(rows, folder)

    def difference(samples: list[Sample]) -> float:
        found = scorer(collate(samples, [(i,) for i in range(len(samples))]))[0].detach().numpy()
        return float(np.abs(found - np.concatenate([s.rollout_logprobs for s in samples])).mean())

    assert difference(masked) < 1e-4 and difference(rows) > 0.05
