"""Why an episode failed: replays are stored, counted and asked for once; what cannot be explained is refused. Engines: tests/e2e."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipelines.config.sections import CollectConfig
from pipelines.credit.outcome import OutcomeShare
from pipelines.episodes import sampling
from pipelines.extensions.why import why
from pipelines.extensions.why.shown import TEMPLATE, explanation_view
from pipelines.report.page import section
from serve_apps.episode_spec import EpisodeSpec
from stores.traces.explanations import find_explanation, keep_explanation, newest_explanations
from stores.traces.store import TraceStore
from stores.types import SERVED, Cause, EpisodeStatus, ModelVersionRef, Trace
from tests.pipelines.extensions.why.planted_faults import CHAIN, SLIP, plant, play

pytestmark = pytest.mark.test


class ChainRun:
    """The part of a run that `explain` asks, over a real store; its episodes are played without engines."""

    def __init__(self, folder: Path) -> None:
        self.run_id, self.folder = "scripted", str(folder)
        self.traces_uri = str(folder / "traces")
        self.traces = TraceStore(self.traces_uri)
        workflow = SimpleNamespace(path=CHAIN)
        self.config = SimpleNamespace(seed=0, collect=CollectConfig(), workflow=workflow)
        self.credit, self.credit_version = OutcomeShare(metric="math"), "c"
        self.weights = SimpleNamespace(
            ref=lambda group, version: (
                ModelVersionRef(model_group=group, version=version, uri="u", manifest_sha256="x")
                if version == 0
                else None
            ),
            versions=lambda group: [0],
        )
        self.num_played = 0
        self.failing = 0.0

    def team_spec(self, *args: Any, **settings: Any) -> Any:
        return SimpleNamespace(team_key="team")

    def store(self, trace: Trace) -> Trace:
        self.traces.begin(run_id=trace.run_id, iteration=trace.iteration)
        self.traces.write_episodes([trace])
        return trace

    def plays(self, specs: Sequence[EpisodeSpec], *_: Any, replaced: Sequence[Cause]) -> Iterator[dict[str, Any]]:
        """Stands in for the collectors."""
        dice = random.Random(self.num_played)
        self.num_played += len(specs)
        traces = []
        for spec in specs:
            own = random.Random(spec.seed)
            played = play("math_chain", lambda _, own=own: own.random() < SLIP, script=spec.script)
            if dice.random() < self.failing:
                played = replace(played, status=EpisodeStatus.INFRA_ERROR, cause=Cause.INFRASTRUCTURE, error="gone")
            traces.append(
                replace(
                    played,
                    episode_id=spec.episode_id,
                    group_id=spec.group_id,
                    iteration=spec.iteration,
                    purpose=spec.purpose,
                    team_key=spec.team_key,
                    variant=spec.variant,
                )
            )
        self.traces.write_episodes(traces, replaced=replaced)
        yield {
            "num": len(traces),
            "num_tokens": 1,
            "calls": "{}",
            "started_at": 0.0,
            "ended_at": 1.0,
            "statuses": "{}",
            "causes": "{}",
        }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = ChainRun(tmp_path)
    monkeypatch.setattr(sampling, "_run", made.plays)
    monkeypatch.setattr(why, "serve", lambda *args: {})
    for name in ("app_names", "capacities"):
        monkeypatch.setattr(sampling, name, lambda *args: {})
    return made


def failed_episode(run: Any, **changes: Any) -> Trace:
    """The refiner is at fault."""
    planted = plant("math_chain", 1)
    trace = replace(planted.trace, workflow=CHAIN, policy_versions={"scripted": 0}, **changes)
    return run.store(trace)


def test_the_turn_is_found_its_alternative_shown_and_the_same_question_plays_nothing_anew(run: Any) -> None:
    trace = failed_episode(run)
    found = why.explain(run, trace.episode_id, budget=64)
    assert (found["turn_index"], found["agent"], found["outcome"]) == (2, "refiner", 0.0)
    assert found["is_certain"] and found["ci95"][0] <= found["cost"] <= found["ci95"][1]
    assert found["alternative"]["outcome"] == 1.0 and "55" in found["alternative"]["completion"]
    assert "13" in found["completion"]
    assert run.num_played == found["num_replays"] <= 64
    assert find_explanation(run.traces_uri, run.run_id, trace.episode_id) == found
    again = why.explain(run, trace.episode_id, budget=64)
    assert again == found and run.num_played == found["num_replays"]


def test_replays_that_the_infrastructure_failed_are_left_out(run: Any) -> None:
    run.failing = 0.3
    found = why.explain(run, failed_episode(run).episode_id, budget=64)
    assert found["turn_index"] == 2
    assert sum(value["num_replays"] for value in found["values"]) < found["num_replays"]


def test_replays_that_failed_are_played_again_when_the_question_is_asked_again(run: Any) -> None:
    trace = failed_episode(run)
    run.failing = 1.0
    with pytest.raises(ValueError, match="no replay from turn 0 came to an end"):
        why.explain(run, trace.episode_id, budget=64)
    run.failing = 0.0
    found = why.explain(run, trace.episode_id, budget=64)
    assert found["turn_index"] == 2
    assert sum(value["num_replays"] for value in found["values"]) == found["num_replays"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"status": EpisodeStatus.INFRA_ERROR, "cause": Cause.INFRASTRUCTURE, "error": "gone"}, "infrastructure caused its failure"),
        ({"outcome_metadata": {SERVED: {"score": 0.6}}}, "its caller scored it"),
        ({"variant": "greedy"}, r"is a replay \(greedy\) itself"),
        ({"is_version_mixed": True}, "weights changed while it was played"),
        ({"turns": (), "stop_reason": "nothing"}, "has no turn that could have decided it: nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained_is_refused(run: Any, changes: dict[str, Any], said: str) -> None:
    trace = failed_episode(run, **changes)
    with pytest.raises(ValueError, match=rf"episode {trace.episode_id}.*{said}"):
        why.explain(run, trace.episode_id, budget=64)
    assert run.num_played == 0


def test_another_runs_another_teams_or_a_lost_versions_episode_is_refused(run: Any) -> None:
    planted = plant("math_chain", 1).trace
    other = run.store(replace(planted, workflow="x:Alone", policy_versions={"scripted": 0}))
    with pytest.raises(ValueError, match="was played by x:Alone, and the run's team is serve_apps"):
        why.explain(run, other.episode_id, budget=64)
    lost = run.store(
        replace(planted, episode_id="00017777777777777777777777777777", workflow=CHAIN, policy_versions={"scripted": 7})
    )
    with pytest.raises(
        ValueError, match="was played by version 7 of model group 'scripted', which is not stored any more"
    ):
        why.explain(run, lost.episode_id, budget=64)
    run.run_id = "another"
    with pytest.raises(ValueError, match="is of run 'scripted': name it by --run"):
        why.explain(run, lost.episode_id, budget=64)


def test_what_was_found_is_shown_beside_the_episode_and_in_the_report(run: Any) -> None:
    trace = failed_episode(run)
    found = why.explain(run, trace.episode_id, budget=64)
    other = {**found, "episode_id": "f" * 32}
    keep_explanation(run.traces_uri, run.run_id, other)
    keep_explanation(run.traces_uri, "another", {**found, "episode_id": "e" * 32})
    (Path(run.traces_uri) / "why" / run.run_id / "damaged.json").write_text("")
    assert [e["episode_id"] for e in newest_explanations(run.traces_uri, run.run_id, limit=5)] == [
        "f" * 32,
        trace.episode_id,
    ]
    assert len(newest_explanations(run.traces_uri, run.run_id, limit=2)) == 1, "the damaged one is left out"
    assert newest_explanations(run.traces_uri, "nobody", limit=5) == []
    page = section(TEMPLATE, explanations=[found])
    assert "Why episodes failed" in page and trace.episode_id[:12] in page and "2 refiner" in page
    console = Console(record=True, width=160)
    console.print(explanation_view(found))
    assert "turn 2 (refiner) cost most" in console.export_text()
    console = Console(record=True, width=160)
    console.print(explanation_view({**found, "completion": "[/a]"}))
    assert "[/a]" in console.export_text(), "brackets are shown as they are"
