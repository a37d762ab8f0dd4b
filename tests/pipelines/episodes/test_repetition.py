"""A pass that failed because too many episodes did, repeated over a real store; only engines and collectors are left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import MakeTrace

from pipelines.config.sections import BudgetConfig, CollectConfig
from pipelines.episodes import sampling
from pipelines.episodes.groups import Groups
from pipelines.episodes.sampling import InfrastructureFailures, Pass, Sampled, sample_episodes
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import CallCounts
from stores.traces.store import TraceStore
from stores.types import Cause, EpisodeStatus, Purpose, Task, Trace

pytestmark = pytest.mark.test

TEAM_SPEC: Any = SimpleNamespace(team_key="team")
SIZE = 2
TASKS = [Task(task_id=f"t{i}", prompt=f"{i} + {i}", answers=(str(2 * i),)) for i in range(4)]


class Engines:
    """Plays episodes, those of some tasks without an answer while the engines are down; the last task's are never begun."""

    def __init__(self, make_trace: MakeTrace, store: TraceStore) -> None:
        self._make_trace, self._store = make_trace, store
        self.down: tuple[str, ...] = ()
        self.played: list[str] = []

    def play(self, specs: Sequence[EpisodeSpec], groups: Groups, of: Pass, **more: Any) -> Iterator[Mapping[str, Any]]:
        begun = [spec for spec in specs if spec.group_id in groups.begun or spec.task != TASKS[-1]]
        traces = [self._trace(spec, of) for spec in begun]
        self._store.write_episodes(traces, **more)
        self.played = [spec.task.task_id for spec in begun]
        counts = Counter(trace.group_id for trace in traces)
        tokens = sum(len(turn.completion_token_ids) for trace in traces for turn in trace.turns)
        calls = json.dumps(asdict(CallCounts()))
        yield {"num": len(traces), "groups": json.dumps(counts), "num_tokens": tokens, "calls": calls}

    def _trace(self, spec: EpisodeSpec, of: Pass) -> Trace:
        trace = self._make_trace(
            **of.where, episode_id=spec.episode_id, episode_index=spec.episode_index, task=spec.task
        )
        trace = replace(trace, group_id=spec.group_id)
        if spec.task.task_id not in self.down:
            return trace
        lost: dict[str, Any] = {"status": EpisodeStatus.INFRA_ERROR, "cause": Cause.INFRASTRUCTURE, "turns": ()}
        return replace(trace, **lost, tool_calls=(), error="the engine is gone")


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    store = TraceStore(str(tmp_path / "traces"))
    store.create()
    return store


@pytest.fixture
def engines(make_trace: MakeTrace, store: TraceStore, monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines(make_trace, store)
    monkeypatch.setattr(sampling, "_run", engines.play)
    return engines


def sample(store: TraceStore, *, num_enough: int, **budget: Any) -> Sampled:
    config = CollectConfig(max_failed_share=0.1, budget=BudgetConfig(**budget))
    where: dict[str, Any] = {"run_id": "run", "iteration": 1, "purpose": Purpose.TRAIN, "seed": 0}
    by = Pass(**where, team_spec=TEAM_SPEC, apps={}, capacity={}, store=store, config=config)
    return sample_episodes(TASKS, by, episodes_per_task=SIZE, num_enough=num_enough)


def pinned(store: TraceStore, sampled: Sampled) -> list[str]:
    traces = list(store.read_traces(sampled.traces))
    assert all(trace.is_outcome for trace in traces)
    return sorted(trace.task.task_id for trace in traces)


def test_groups_that_failed_are_played_again_though_the_others_have_spent_the_budget(
    store: TraceStore, engines: Engines
) -> None:
    engines.down = ("t2",)
    with pytest.raises(InfrastructureFailures, match="2 of 6 episodes failed"):
        sample(store, num_enough=4, tokens=1)
    engines.down = ()
    sampled = sample(store, num_enough=4, tokens=1)
    assert engines.played == ["t2"] * SIZE
    assert pinned(store, sampled) == sorted(["t0", "t1", "t2"] * SIZE)
    assert (sampled.stopped_by, sampled.tasks_left) == ("tokens", ["t3"])


def test_groups_that_failed_are_left_out_where_others_are_enough(store: TraceStore, engines: Engines) -> None:
    engines.down = ("t2",)
    with pytest.raises(InfrastructureFailures, match="2 of 6 episodes failed"):
        sample(store, num_enough=2)
    engines.played = []
    sampled = sample(store, num_enough=2)
    assert engines.played == []
    assert pinned(store, sampled) == sorted(["t0", "t1"] * SIZE)
    assert (sampled.stopped_by, sampled.tasks_left) == ("enough", ["t2", "t3"])
