"""Choices through the whole loop: sampled by the real engine over what was offered, charged with cost, trained on, and explained."""

from __future__ import annotations

import json
import math
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from stores.journal.stage_results import Scored
from stores.traces.conventions import allowed_tokens
from stores.traces.explanations import find_explanation
from stores.types import Purpose, Trace, Turn
from tests.e2e.local_runs import COMMAND, DEADLINE_S, report_of, troupe
from train_loops.config import DeepSpeedConfig
from train_loops.engine.deepspeed_engine import load_policy
from train_loops.rows.batching import collate
from train_loops.rows.masks import with_masks
from train_loops.rows.samples import samples_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

CONFIG = Path(__file__).parents[2] / "infra" / "workflows" / "orchestrated_math.yaml"
SETTINGS: dict[str, Any] = {
    "iterations": 2,
    "tasks.gate.count": 24,
    "tasks.test.count": 32,
    "warmstart.num_demonstrations": 300,
    "warmstart.num_epochs": 2,
    "collect.tasks_per_iteration": 16,
    "evaluate.every": 2,
    "cost": {"figure": "completion_tokens", "at_most": 40, "rate": 0.5},
}


FIXED: dict[str, Any] = SETTINGS | {
    "run": "fixed",
    "iterations": 1,
    "workflow": {"path": "serve_apps.workflows.math_chain:MathChain"},
    "model_groups.team.agents": ["solver", "verifier", "refiner", "finalizer"],
    "warmstart.demonstrator": "pipelines.examples.arithmetic.tasks:demonstrate",
    "warmstart.num_epochs": 8,
    "cost": None,
    "evaluate.every": 1,
}
"""The same agents in a fixed order, with a start that solves some of the tasks: 10 of 128 episodes."""


def train(folder: Path, settings: dict[str, Any]) -> Run:
    settings = settings | {"storage.root": str(folder)}
    changed = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    done = subprocess.run(
        [COMMAND[0], "train", str(CONFIG), *changed], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return Run(load_config(CONFIG, settings))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("choices"), SETTINGS)


def episodes(run: Run, iteration: int) -> list[Trace]:
    return list(run.traces.read_traces(run.iteration(iteration).collected.traces))


def choices(traces: list[Trace]) -> list[Turn]:
    return [turn for trace in traces for turn in trace.turns if turn.agent == "orchestrator"]


def test_every_choice_has_the_distribution_that_it_was_sampled_from(trained: Run) -> None:
    turns = choices(episodes(trained, 1))
    assert len(turns) > 200 and {len(turn.option_logprobs) for turn in turns} >= {2, 3}
    for turn in turns:
        assert len(turn.completion_token_ids) == 1 and turn.finish_reason == "stop"
        assert sum(map(math.exp, turn.option_logprobs.values())) == pytest.approx(1.0, abs=1e-5)
        assert turn.rollout_logprobs[0] == pytest.approx(turn.option_logprobs[turn.fields["choice"]], abs=1e-6)
        assert len(allowed_tokens(turn.sampling.constraint)) == len(turn.option_logprobs)
    taken = {turn.fields["choice"] for turn in turns}
    assert {"check", "refine", "stop"} <= taken


def test_the_trainer_computes_the_same_probability_of_every_option(trained: Run) -> None:
    ref = trained.weights.ref("team", 0)
    assert ref is not None
    folder = trained.weights.fetch(ref)
    scorer = load_policy(folder, DeepSpeedConfig())
    scored = trained.iteration(1).find(Scored)
    assert scored is not None
    rewards = {r.episode_id: r for r in trained.traces.read_rewards(scored.rewards)}
    traces = episodes(trained, 1)[:32]  # some end after one choice
    rows = [
        sample
        for trace in traces
        for sample in samples_of(trace, rewards[trace.episode_id], model_group="team")
        if sample.agent == "orchestrator"
    ]
    turns = {(trace.episode_id, turn.turn_index): turn for trace in traces for turn in trace.turns}
    masked = with_masks(rows, folder)
    found = scorer(collate(masked, [(i,) for i in range(len(masked))]))[0].detach().numpy()
    sampled = [turns[row.episode_id, row.turn_index].rollout_logprobs[0] for row in rows]
    assert len(rows) > 10 and np.abs(found - sampled).max() < 1e-4
    assert report_of(trained)["logprob_gap"]["mean"] < 1e-5


def test_the_multiplier_goes_from_iteration_to_iteration_and_is_charged(trained: Run) -> None:
    first, second = (trained.iteration(iteration).find(Scored) for iteration in (1, 2))
    assert first is not None and second is not None and first.cost is not None and second.cost is not None
    assert first.cost["multiplier"] == 0.0 and first.cost["mean"] > 40
    assert second.cost["multiplier"] == first.cost["next_multiplier"] > 0
    parts = [part for episode in trained.traces.read_rewards(second.rewards) for part in episode.rewards]
    assert parts and all(part.breakdown["cost"] < 0 for part in parts)
    page = Path(trained.folder, "report.html").read_text()
    assert "orchestrator: share of its choices" in page and "cost_multiplier" in page


def test_a_failed_episode_is_explained_by_replays_and_what_was_found_is_kept(trained: Run) -> None:
    failed = next(
        trace for trace in episodes(trained, 2) if trace.answer not in trace.task.answers and len(trace.turns) > 3
    )
    asked = troupe(trained, "why", failed.episode_id[:12], "--run", trained.run_id, "--replays", "48")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    found = find_explanation(trained.traces_uri, trained.run_id, failed.episode_id)
    assert found is not None and found["num_replays"] <= 48
    assert {value["turn_index"] for value in found["values"]} == {turn.turn_index for turn in failed.turns}
    assert found["ci95"][0] <= found["cost"] <= found["ci95"][1]
    assert f"turn {found['turn_index']} ({found['agent']})" in asked.stdout
    replays = [
        trace
        for trace in trained.traces.find_traces(
            run_id=trained.run_id, purpose=Purpose.AD_HOC, task_id=failed.task.task_id, limit=200
        )
        if trace.variant.startswith("counterfactual")
    ]
    assert len(replays) == found["num_replays"]


def test_an_orchestrator_starts_from_the_episodes_of_a_fixed_workflow_and_keeps_its_order(tmp_path: Path) -> None:
    fixed = train(tmp_path, FIXED)
    champion = fixed.weights.ref("team", 1)
    assert champion is not None
    start = {
        "run": "orchestrated",
        "iterations": 1,
        "model_groups.team.model": str(fixed.weights.fetch(champion)),
        "warmstart": {
            "traces": {"uri": fixed.traces_uri, "weights": fixed.weights_uri, "run": "fixed"},
            "num_demonstrations": 100,
            "num_epochs": 40,  # of the few episodes that were solved
            "batch_turns": 32,
        },
        "cost": {"figure": "completion_tokens", "at_most": 60},
    }
    kept = {key: value for key, value in SETTINGS.items() if not key.startswith("warmstart")}
    run = train(tmp_path, kept | start)
    first = episodes(run, 1)
    taken = Counter(tuple(trace.outcome_metadata["steps"]) for trace in first)
    assert taken["solve", "check", "refine", "finish"] > len(first) / 4, taken
    assert len(taken) > 3, "other choices are tried, too"
