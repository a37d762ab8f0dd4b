"""Tasks that a candidate lost at the gate: which episodes are explained, and which agents are counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.extensions.why.lost_tasks import Blame, blame_by_agent, lost_episodes
from stores.traces.store import TraceStore
from stores.types import Cause, EpisodeRewards, EpisodeStatus, Purpose, Trace

pytestmark = pytest.mark.test

GATE = {"run_id": "run", "iteration": 3, "purpose": Purpose.GATE}


class GateRun:
    """A run whose candidate and champion have met at the gate, over a real store."""

    credit_version = "c1"

    def __init__(self, folder: Path) -> None:
        self.traces = TraceStore(str(folder))
        self.traces.create()
        self.evaluated = SimpleNamespace(candidate=None, champion=None, skipped=None, condition="evaluate.every = 6")

    def iteration(self, number: int, **_: Any) -> Any:
        assert number == 3
        return SimpleNamespace(evaluated=self.evaluated)

    def played(self, team: str, traces: list[Trace], rewards: list[EpisodeRewards]) -> Any:
        self.traces.write_episodes(traces)
        self.traces.write_rewards(rewards)
        return SimpleNamespace(traces=self.traces.pin_episodes(**GATE, team_key=team))


def test_the_worst_episode_of_each_lost_task_comes_in_the_order_of_the_loss(
    tmp_path: Path, make_trace: Callable[..., Trace], make_rewards: Callable[..., EpisodeRewards]
) -> None:
    run = GateRun(tmp_path)
    outcomes = {  # of episodes 0 to 9, two of each task
        "new": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0, 0.0, 0.0],
        "old": [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    }
    traces = {team: [make_trace(i, **GATE, team_key=team) for i in range(10)] for team in outcomes}
    traces["new"][8:] = [
        make_trace(i, **GATE, team_key="new", status=EpisodeStatus.INFRA_ERROR, cause=Cause.INFRASTRUCTURE)
        for i in (8, 9)
    ]
    for team, field in (("new", "candidate"), ("old", "champion")):
        rewards = [make_rewards(t, outcome=o) for t, o in zip(traces[team], outcomes[team], strict=True)]
        rewards += [make_rewards(traces[team][0], credit_version="other", outcome=0.0)]
        setattr(run.evaluated, field, run.played(team, traces[team], rewards))
    worst_of_t1 = min(traces["new"][2:4], key=lambda t: t.episode_id)
    assert lost_episodes(run, 3) == [
        worst_of_t1.episode_id,
        traces["new"][1].episode_id,
        traces["new"][6].episode_id,
    ], "t1 lost 1.0, t0 0.5, t3 0.25; t2 was won, t4 has no outcome"


def test_equal_outcomes_in_another_order_lose_nothing(
    tmp_path: Path, make_trace: Callable[..., Trace], make_rewards: Callable[..., EpisodeRewards]
) -> None:
    run, task = GateRun(tmp_path), make_trace(0).task
    for field, outcomes in (("candidate", [0.3, 0.2, 0.1]), ("champion", [0.1, 0.2, 0.3])):
        traces = [make_trace(i, **GATE, team_key=field, task=task) for i in range(3)]
        rewards = [make_rewards(t, outcome=o) for t, o in zip(traces, outcomes, strict=True)]
        setattr(run.evaluated, field, run.played(field, traces, rewards))
    assert lost_episodes(run, 3) == []
    run.evaluated.candidate, run.evaluated.champion = run.evaluated.champion, run.evaluated.candidate
    assert lost_episodes(run, 3) == []


def test_a_gate_without_a_champion_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no champion was met at the gate of iteration 3: evaluate\.every = 6"):
        lost_episodes(GateRun(tmp_path), 3)


def test_agents_are_counted_by_what_their_turns_cost() -> None:
    found = [
        {"agent": "solver", "is_certain": True, "cost": 0.5},
        {"agent": "verifier", "is_certain": True, "cost": 0.75},
        {"agent": "solver", "is_certain": False, "cost": 0.125},
    ]
    assert blame_by_agent(found) == [
        Blame(agent="verifier", num_episodes=1, num_certain=1, cost=0.75),
        Blame(agent="solver", num_episodes=2, num_certain=1, cost=0.625),
    ]
    assert blame_by_agent([]) == []
