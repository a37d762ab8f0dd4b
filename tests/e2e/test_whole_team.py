"""Runs of `troupe train` whose whole team learns first, and one that plays variants: on the real parts, as a user starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_runs import CONFIG, finish, start

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from train_loops.signal.team_signal import LOG_RATIOS_FILE, SIGNAL_FILE

pytestmark = pytest.mark.nightly

TWO_GROUPS = {"a": {"agents": ["solver", "verifier"]}, "b": {"agents": ["refiner", "finalizer"]}}
SHORT = {"iterations": 1, "warmstart.num_epochs": 1, "collect.tasks_per_iteration": 12}


def trained(root: Path, settings: dict[str, Any]) -> Run:
    log = root / "log"
    words = [f"{key}={_flow(value)}" for key, value in (SHORT | settings).items()]
    finish(start(root, log, settings=words), log)
    return Run(load_config(CONFIG, {"storage.root": str(root)} | SHORT | settings))


def _flow(value: Any) -> str:
    """YAML in a line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in value.items()) + "}"
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value).lower() if value is True else str(value)


@pytest.mark.timeout(600)
def test_happo_updates_the_groups_in_the_order_that_the_journal_keeps(tmp_path: Path) -> None:
    run = trained(tmp_path, {"model_groups": TWO_GROUPS, "train.algorithm": "happo"})
    result = run.iteration(1).find_team()
    assert result is not None and result.team.model is not None
    order = run.journal.value(run.run_id, "update-order/1")["model_groups"]
    assert sorted(order) == ["a", "b"] and list(result.order) == order
    team = run.weights.fetch(result.team.model)
    assert (team / SIGNAL_FILE).is_file()
    for group in order:
        model = result.model_groups[group].model
        assert model.version == 1 and (run.weights.fetch(model) / LOG_RATIOS_FILE).is_file()
        assert result.model_groups[group].metrics["train/steps"] == 2
    assert run.trained(1) == {group: result.model_groups[group].model for group in ("a", "b")}


@pytest.mark.timeout(600)
def test_a_mixers_credit_is_trained_on_and_kept(tmp_path: Path) -> None:
    settings = {"train.team": {"mixer": "qmix"}, "train.advantage": {"normalize_std": False}}
    run = trained(
        tmp_path,
        {"model_groups": {"all": {"agents": [a for g in TWO_GROUPS.values() for a in g["agents"]]}}} | settings,
    )
    result = run.iteration(1).find_team()
    assert result is not None and result.team.metrics["train/replayed_episodes"] > 0
    assert result.model_groups["all"].model.version == 1


@pytest.mark.timeout(600)
def test_variants_are_stored_and_only_their_changed_turns_train(tmp_path: Path) -> None:
    variants = {"kind": "counterfactual", "per_task": 4}
    settings = {"train.algorithm": "counterfactual", "collect.variants": variants, "collect.episodes_per_task": 4}
    run = trained(tmp_path, settings)
    traces = list(run.traces.read_traces(run.iteration(1).collected.traces))
    played = [trace for trace in traces if trace.variant]
    plain = {trace.episode_id: trace for trace in traces if not trace.variant}
    assert len(plain) == len(played) == 48 and len({trace.episode_id for trace in traces}) == 96
    of_task = {(t.task.task_id, t.episode_index): t for t in plain.values()}
    for trace in played:
        at = int(trace.variant.removeprefix("counterfactual-"))
        base = of_task[trace.task.task_id, trace.episode_index]
        before = [list(turn.completion_token_ids) for turn in base.turns if turn.turn_index < at]
        assert [list(turn.completion_token_ids) for turn in trace.turns if turn.turn_index < at] == before
    figures = run.iteration(1).trained["team"].agents
    turns = {agent: sum(t.agent == agent for trace in plain.values() for t in trace.turns) for agent in figures}
    for trace in played:  # of a replay the turn that it sampled anew
        at = int(trace.variant.removeprefix("counterfactual-"))
        base = of_task[trace.task.task_id, trace.episode_index]
        turns[next(t.agent for t in base.turns if t.turn_index == at)] += 1
    assert {agent: int(of["funnel/calls"]) for agent, of in figures.items()} == turns
